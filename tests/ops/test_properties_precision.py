"""In which dtype the ops of the catalogue multiply, sum and return: under autocast, in 16 bits, over chunks and groups."""

import functools

import pytest
import torch
from support.cases import (
    Tensors,
    Watch,
    assert_same_within_rounding,
    check_exactness,
    clone,
    gradients,
    norm,
    output_gradient,
    with_copies,
)
from support.catalog import Entry, Sizes
from support.properties import (
    HEADS,
    OF_OPS,
    Case,
    alone,
    each,
    each_call,
    joined,
    mode_in_turn,
    outcome,
    sizes_of,
    smallest_chunks,
)

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
        leaves = case.make()
        for inside, around_backward, dtype in ((BF16, None, BF16), (None, BF16, FP32))[: 1 if options else 2]:
            with Watch() as watch:
                with autocast(inside):
                    y = case(leaves)
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
    tensors = case.make()
    names = [name for name, leaf in tensors.items() if "weight" in name and leaf.dim() > 1]
    for x_dtype in (FP32, BF16, FP16, FP64):
        for dtype in (FP32, BF16, FP16):
            leaves = {n: t.detach().to(dtype if n in names else x_dtype).requires_grad_() for n, t in tensors.items()}
            with autocast(BF16):
                if x_dtype != FP64:
                    actual = gradients(case, leaves)
                    assert all(actual[name].dtype == leaf.dtype for name, leaf in leaves.items())
                    assert actual["y"].isfinite().all()
            message = f"^{entry.function.__name__}: .*(use one dtype|but a parameter is|must have one)"
            if names and dtype != x_dtype:
                with pytest.raises(TypeError, match=message):
                    case(leaves)


@pytest.mark.parametrize(("entry", "options"), each_call(OF_LAYERS))
def test_a_weight_is_cast_once_in_each_pass(entry: Entry, options):
    for mode in entry.modes or ("",):
        case = Case(entry, options, mode, Sizes(experts=4))
        leaves = case.make()
        with autocast(BF16), Watch() as forward:
            y = case(leaves)
        with Watch() as backward:
            torch.autograd.grad(y, list(leaves.values()), output_gradient(y))
        for name, t in leaves.items():
            if t.dim() > 1 and "weight" in name and "router" not in name:
                counts = [counter.casts[t.data_ptr()] for counter in (forward, backward)]
                assert max(counts) <= 1, f"{case}: forward and backward cast {name} {counts} times"


# -- 16 bits -----------------------------------------------------------------------------------------------------------

EXACT = [
    pytest.param(*case.values, dtype, dtype, id=f"{case.id}-{str(dtype)[6:]}")
    for i, case in enumerate(each_call(WITHOUT_ROUTER))
    for dtype in dict.fromkeys(((BF16, FP16, FP32)[i % 3], (BF16, FP16)[i % 2]))
]
UPDATED = dict.fromkeys(("mlp_block", "linear_cross_entropy", "selected_log_probs", "moe_mlp"), ("lora",))
UPDATED |= {"attention_block": ("three weights with updates",)}
EXACT += [
    pytest.param(OF_OPS[name], options, dtype, FP32, id=f"{name}-float32 updates of {dtype}")
    for name, options in UPDATED.items()
    for dtype in (BF16, FP16)
]


@pytest.mark.parametrize(("entry", "options", "dtype", "of_updates"), EXACT)
def test_as_exact_as_eager_pytorch(entry: Entry, options, dtype, of_updates):
    """At most twice its error against float64, in one chunk and in several. With float32 updates, as peft makes them, gradients
    of factors are float32, and none vanishes where float16 would lose it."""
    for i, more in enumerate(({}, smallest_chunks(entry))):
        case = Case(entry, options, mode_in_turn(entry, i), sizes_of(entry))
        leaves = {n: t.detach().to(of_updates if "lora" in n else dtype) for n, t in case.make().items()}

        def eager(leaves: Tensors, case=case) -> torch.Tensor:
            y = joined(case.oracle(leaves))
            return y if of_updates == dtype else y.to(next(iter(leaves.values())).dtype).to(y.dtype)

        ours = functools.partial(case, **more)
        check_exactness(ours, eager, {name: leaf.requires_grad_() for name, leaf in leaves.items()})


SUMMED = [name for name in OF_LAYERS if "workspace" in OF_OPS[name].parameters and name in WITHOUT_ROUTER]


@pytest.mark.parametrize("entry", each(SUMMED))
def test_error_does_not_grow_with_chunks_and_groups(entry: Entry):
    """Gradients are summed over 24 chunks of tokens, or 16 groups of heads, in float32, and rounded once."""
    heads = "num_heads" in entry.parameters or "transformer" in entry.name
    sizes = Sizes((2, 64), 32, 24, 8, heads=16) if heads else Sizes((24, 128), 8, 8, 8)
    case = Case(entry, sizes=sizes)
    leaves = case.make(BF16)
    exact = outcome(case.results(double := clone(leaves, FP64)), double)
    whole, parts = (outcome(case.results(leaves, **more), leaves) for more in ({}, smallest_chunks(entry)))
    for name, want in exact.items():
        at_once, error = (norm(grads[name].double() - want) for grads in (whole, parts))
        assert error <= 1.1 * at_once, (
            f"{case}: in chunks or groups {name} has an error of {error:.3g}, and {at_once:.3g} at once"
        )


# -- main_grad ---------------------------------------------------------------------------------------------------------


def has_main_grad(name: str, leaf: torch.Tensor) -> bool:
    """The weights of matmuls, and the factors of their updates; a head forms that of its B by chunks of classes."""
    return leaf.dim() > 1 and ("weight" in name or "lora" in name) and name not in ("top_k_weights", "lora.b")


@pytest.mark.parametrize(("entry", "options"), each_call(OF_OPS))
def test_weights_are_summed_in_main_grad(entry: Entry, options):
    """Over two micro-batches, in chunks or groups that each add their part: `.grad` stays empty, and other inputs' as ever."""
    case = Case(entry, options, mode_in_turn(entry, 1), sizes_of(entry))
    leaves, more = case.make(), smallest_chunks(entry)
    expected = gradients(functools.partial(case, **more), leaves)
    weights = {name: leaf for name, leaf in leaves.items() if has_main_grad(name, leaf)}
    for leaf in weights.values():
        leaf.main_grad, leaf.grad_added_to_main_grad = torch.zeros(leaf.shape), False
    for _ in range(2):
        y = case(leaves, **more)
        y.backward(output_gradient(y))
    for name, leaf in weights.items():
        assert leaf.grad is None, f"{case}: {name} has a .grad beside its main_grad"
        assert leaf.grad_added_to_main_grad, f"{case}: main_grad of {name} is not said to have the gradient"
    actual = {n: leaf.main_grad / 2 if n in weights else leaf.grad / 2 for n, leaf in leaves.items()}
    del expected["y"]
    assert_same_within_rounding(actual, expected, f"{case}, with main_grad", "autograd")
