"""In which dtype the ops of the catalogue multiply, sum and return: under autocast, in 16 bits, over chunks and groups."""

from collections import Counter

import pytest
import torch
from support.cases import Watch, check_exactness, clone, output_gradient, with_copies
from support.properties import (
    HEADS,
    OF_OPS,
    Case,
    alone,
    assert_equal_to_rounding,
    each,
    each_call,
    joined,
    mode_in_turn,
    outcome,
    sizes_of,
    smallest_chunks,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ckptkern.ops.catalog import Entry, Sizes
from ckptkern.ops.registration.functions import bodies_seen

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OF_LAYERS = [name for name in OF_OPS if name not in (*HEADS, "dropout")]
# The choice of experts is the logits', which differ between two ways to round: test_moe_block.py gives both one choice.
WITHOUT_ROUTER = [name for name in OF_OPS if "moe_block" not in name and "experts" not in name]


def autocast(dtype: torch.dtype | None):
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)


# -- autocast ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", each(OF_LAYERS))
def test_dtypes_under_autocast(entry: Entry, monkeypatch):
    """All matmuls of both passes are in autocast's dtype, wherever backward is called, and in float32 if only backward is
    inside; gradients have the dtypes of their tensors. Weights' gradients are summed over chunks in float32."""
    with_copies(monkeypatch, False)
    core = {"query", "num_heads", "attention_arguments"}  # PyTorch ops form scores in float32
    for i, options in enumerate(alone(entry)):
        case = Case(entry, options, mode_in_turn(entry, i), Sizes(experts=4))
        leaves = case.make(FP32)
        for inside, around_backward, dtype in ((BF16, None, BF16), (None, BF16, FP32))[: 1 if options else 2]:
            with Watch() as watch:
                with autocast(inside):
                    y = joined(case.results(leaves))
                with autocast(around_backward):
                    grads = torch.autograd.grad(y, list(leaves.values()), output_gradient(y))
            allowed = {(dtype, dtype), *([(FP32, FP32)] if (core | {"router_dtype"}) & case.arguments.keys() else [])}
            assert set(watch.dtypes) <= allowed, (
                f"{case} in autocast to {inside}, backward in {around_backward}: multiplies {set(watch.dtypes)}"
            )
            assert {grad.dtype for grad in grads} == {FP32}, f"{case}: gradients are {[grad.dtype for grad in grads]}"


@pytest.mark.parametrize("entry", each(OF_OPS))
def test_pairs_of_dtypes(entry: Entry):
    """x in one dtype, parameters in another: autocast's counts, or a TypeError says what to do."""
    case = Case(entry)
    made = case.make(FP32)
    names = [name for name, leaf in made.items() if "weight" in name and leaf.dim() > 1]
    if not names:
        return
    for x_dtype in (FP32, BF16, FP16, FP64):
        for dtype in (FP32, BF16, FP16):
            leaves = {n: t.detach().to(dtype if n in names else x_dtype).requires_grad_() for n, t in made.items()}
            with autocast(BF16):
                if x_dtype != FP64:
                    found = outcome(case.results(leaves), leaves)
                    assert all(found[name].dtype == leaf.dtype for name, leaf in leaves.items())
                    assert found["result 0"].isfinite().all()
            if dtype == x_dtype:
                continue
            with pytest.raises(
                TypeError, match=f"^{entry.function.__name__}: .*(use one dtype|but a parameter is|must have one)"
            ):
                case.results(leaves)


class Casts(TorchDispatchMode):
    """How often each tensor is copied to another dtype."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        self.names, self.counts = {t.data_ptr(): name for name, t in tensors.items()}, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            source, copied = (args[0], out) if func._schema.name == "aten::_to_copy" else (args[1], args[0])
            name = self.names.get(source.data_ptr())
            if name and copied.dtype != source.dtype:
                self.counts[name] += 1
        return out


@pytest.mark.parametrize(("entry", "options"), each_call(OF_LAYERS))
def test_a_weight_is_cast_once_in_each_pass(entry: Entry, options):
    for mode in entry.modes or ("",):
        case = Case(entry, options, mode, Sizes(experts=4))
        leaves = case.make(FP32)
        weights = {n: t for n, t in leaves.items() if t.dim() > 1 and "weight" in n and "router" not in n}
        with autocast(BF16), bodies_seen(), Casts(weights) as forward:
            y = joined(case.results(leaves))
        with bodies_seen(), Casts(weights) as backward:
            torch.autograd.grad(y, list(leaves.values()), output_gradient(y))
        for name, counts in (("forward", forward.counts), ("backward", backward.counts)):
            twice = {one: count for one, count in counts.items() if count > 1}
            assert not twice, f"{case}: {name} casts {twice} times"


# -- 16 bits -----------------------------------------------------------------------------------------------------------

EXACT = [
    pytest.param(*one.values, dtype, id=f"{one.id}-{str(dtype)[6:]}")
    for i, one in enumerate(each_call(WITHOUT_ROUTER))
    for dtype in ((BF16, FP16, FP32)[i % 3], (BF16, FP16)[i % 2])
]


@pytest.mark.parametrize(("entry", "options", "dtype"), dict.fromkeys(EXACT))
def test_as_exact_as_eager_pytorch(entry: Entry, options, dtype):
    """At most twice its error against float64, in one chunk and in several."""
    for i, more in enumerate(({}, smallest_chunks(entry))):
        case = Case(entry, options, mode_in_turn(entry, i), sizes_of(entry))
        check_exactness(
            lambda leaves, case=case, more=more: joined(case.results(leaves, **more)),
            lambda leaves, case=case: joined(case.oracle(leaves)),
            case.make(dtype),
        )


SUMMED = [name for name in OF_LAYERS if "workspace" in OF_OPS[name].parameters and name in WITHOUT_ROUTER]


@pytest.mark.parametrize("entry", each(SUMMED))
def test_error_does_not_grow_with_chunks_and_groups(entry: Entry):
    """Gradients are summed over 24 chunks of tokens, or 16 groups of heads, in float32, and rounded once."""
    heads = "num_heads" in entry.parameters or "transformer" in entry.name
    sizes = Sizes((2, 64), 32, 24, 8, heads=16) if heads else Sizes((24, 128), 8, 8, 8)
    case = Case(entry, sizes=sizes)
    leaves = case.make(BF16)
    exact = outcome(case.results(double := clone(leaves, FP64)), double)
    errors = []
    for more in ({}, smallest_chunks(entry)):
        found = outcome(case.results(leaves, **more), leaves)
        errors.append({n: torch.linalg.vector_norm(found[n].double() - e).item() for n, e in exact.items()})
    for name, whole in errors[0].items():
        assert errors[1][name] <= 1.1 * whole, (
            f"{case}: in chunks or groups {name} has an error of {errors[1][name]:.3g}, and {whole:.3g} at once"
        )


UPDATED = {
    "mlp_block": ("lora",), "attention_block": ("three weights with updates",), "linear_cross_entropy": ("lora",),
    "selected_log_probs": ("lora",), "moe_mlp": ("lora",),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("entry", each(UPDATED))
def test_float32_updates_of_16_bits(entry: Entry, dtype: torch.dtype):
    """As peft makes them: gradients of factors are float32, and none vanishes where float16 would lose it."""
    for i, more in enumerate(({}, smallest_chunks(entry))):
        case = Case(entry, UPDATED[entry.name], mode_in_turn(entry, i), sizes_of(entry))
        leaves = {n: t if "lora" in n else t.detach().to(dtype).requires_grad_() for n, t in case.make(FP32).items()}
        check_exactness(
            lambda leaves, case=case, more=more: joined(case.results(leaves, **more)).float(),
            lambda leaves, case=case: joined(case.oracle(leaves)).to(next(iter(leaves.values())).dtype).float(),
            leaves,
        )


# -- main_grad ---------------------------------------------------------------------------------------------------------


def has_main_grad(name: str, leaf: torch.Tensor) -> bool:
    """The weights of matmuls, and the factors of their updates; a head forms that of its B by chunks of classes."""
    return leaf.dim() > 1 and ("weight" in name or "lora" in name) and name not in ("top_k_weights", "lora.1")


@pytest.mark.parametrize(("entry", "options"), each_call(OF_OPS))
def test_weights_are_summed_in_main_grad(entry: Entry, options):
    """Over two micro-batches, in chunks or groups that each add their part: `.grad` stays empty, and other inputs' as ever."""
    case = Case(entry, options, sizes=sizes_of(entry))
    leaves = case.make(FP32)
    expected = outcome(case.results(leaves, **smallest_chunks(entry)), leaves)
    weights = {name: leaf for name, leaf in leaves.items() if has_main_grad(name, leaf)}
    for leaf in weights.values():
        leaf.main_grad, leaf.grad_added_to_main_grad = torch.zeros(leaf.shape), False
    for _ in range(2):
        y = joined(case.results(leaves, **smallest_chunks(entry)))
        y.backward(output_gradient(y))
    for name, leaf in weights.items():
        assert leaf.grad is None, f"{case}: {name} has a .grad beside its main_grad"
        assert leaf.grad_added_to_main_grad, f"{case}: main_grad of {name} is not said to have the gradient"
    found = {n: leaf.main_grad / 2 if n in weights else leaf.grad / 2 for n, leaf in leaves.items()}
    assert_equal_to_rounding(found, {n: expected[n] for n in found}, f"{case}, with main_grad", "autograd")
