"""moe_mlp and grouped_gated_mlp: what all ops promise, on an MoE layer with its router, and what routing adds."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from ops import test_op, test_transforms
from support.cases import (
    DTYPES,
    MODES,
    Op,
    Setup,
    Watch,
    assert_same_within_rounding,
    check_exactness,
    gradients,
    output_gradient,
)
from support.wrappers import Logged
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern import eager
from ckptkern.memory import saved_tensors

E, K = 5, 2
Tensors = dict[str, torch.Tensor]


def chosen(x: torch.Tensor) -> torch.Tensor:
    """Two experts for each token: expert 4 has none, and some tokens come twice to one."""
    pairs = (
        torch.arange(x[..., 0].numel() * K).view(*x.shape[:-1], K)
        if x.shape[-1]
        else torch.zeros(*x.shape[:-1], K).long()
    )
    return pairs // 3 % 4


def router(t: Tensors) -> torch.Tensor:
    return torch.sigmoid(F.linear(t["x"], t["router"]))


def moe(x, index, s, w, wd, b=None, bd=None, act=F.silu):
    """The reference implementation: one expert after the other on its tokens, as transformers' models write it, added
    up in float32."""
    wide = eager.wide_of(x.dtype)
    total = torch.zeros(x.shape, dtype=wide)
    for e in range(len(w)):
        *tokens, j = torch.where(index == e)
        g, u = F.linear(x[tuple(tokens)], w[e], None if b is None else b[e]).chunk(2, -1)
        y = F.linear(act(g) * u, wd[e], None if bd is None else bd[e])
        weighted = (y * s[(*tokens, j)][:, None].to(y.dtype)).to(wide)
        total = total.index_put(tuple(tokens), weighted, accumulate=True)
    return total.to(x.dtype)


def unfused(t: Tensors, act, drop) -> torch.Tensor:
    """Every expert on every token: under a transform, too, no shape depends on values."""
    index, s, total = chosen(t["x"]), router(t), 0
    for e in range(E):
        g, u = F.linear(t["x"], t["gate_up_weight"][e], t["gate_up_bias"][e] if "gate_up_bias" in t else None).chunk(
            2, -1
        )
        y = F.linear(act(g) * u, t["down_weight"][e], t["down_bias"][e] if "down_bias" in t else None)
        total = total + y * torch.where(index == e, s, 0).sum(-1, keepdim=True)
    return total


class MoE(Op):
    """With its router, whose choice is `chosen`."""

    def parameters(self, d, h, e):
        return {
            "router": (K, d), "gate_up_weight": (E, 2 * h, d), "gate_up_bias": (E, 2 * h), "down_weight": (E, d, h),
            "down_bias": (E, d),
        }  # fmt: skip

    def call(self, t, **options):
        return ckptkern.moe_mlp(
            t["x"], chosen(t["x"]), router(t), t["gate_up_weight"], t["down_weight"], gate_up_bias=t.get("gate_up_bias"),
            down_bias=t.get("down_bias"), **options,
        )  # fmt: skip


MOE = MoE("moe_mlp", unfused, saved=lambda *_: (0, 0), matmuls={})  # what is saved: below
SETUPS = [pytest.param(Setup(MOE, "gelu", mode), id=mode) for mode in ("selective", "full")]

PROMISES = [
    test_op.test_every_subset_of_frozen_inputs, test_op.test_gradcheck, test_op.test_gradgradcheck,
    test_op.test_every_mode_gives_the_same_bits, test_op.test_ten_runs_are_bitwise_equal, test_op.test_third_order,
    test_op.test_second_backward_through_a_retained_graph, test_op.test_output_changed_in_place,
    test_op.test_nothing_saved_or_given_is_overwritten, test_op.test_memory_is_flat_without_the_garbage_collector,
    test_op.test_inference_mode_then_training, test_op.test_saved_tensors_on_the_cpu,
    test_op.test_gradient_strides_are_the_parameters, test_op.test_expanded_output_gradients,
    test_op.test_forward_mode_is_refused,
    test_transforms.test_compiled_equals_eager, test_transforms.test_compiled_with_frozen_inputs,
    test_transforms.test_opcheck,
    test_transforms.test_one_graph_for_all_batch_sizes_and_seeds, test_transforms.test_compiled_checkpoint,
    test_transforms.test_compiled_without_gradients, test_transforms.test_grad, test_transforms.test_grad_of_grad,
    test_transforms.test_vmap_over_anything, test_transforms.test_jacobian,
    test_transforms.test_forward_mode_of_torch_func_is_refused,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.sampled
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__.removeprefix("test_"))
def test_promise_of_every_op(promise, setup):
    promise(setup)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("reentrant", [False, None], ids=["torch's checkpoint", "ours"])
def test_inside_a_checkpoint(setup, reentrant):
    test_op.test_inside_a_checkpoint(setup, reentrant)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("create_graph", [False, True])
def test_batched_gradients(setup, create_graph):
    test_transforms.test_batched_gradients(setup, create_graph)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_exported_graphs_have_gradients(backend):
    test_transforms.test_exported_graphs_have_gradients(Setup(MOE, "silu", "full"), backend)


# -- values ------------------------------------------------------------------------------------------------------------


def routing(kind: str, tokens: int, top_k: int, experts: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    index = torch.stack(
        [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)] or [torch.zeros(0)]
    )
    index = index.view(tokens, top_k).long()
    if kind == "empty experts":  # and duplicates
        index[(index == 0) | (index == experts - 1)] = 1
    elif kind == "dropped":
        index[::2, 0], index[1::3, -1] = -1, experts
    elif kind == "all dropped":
        index[:] = -1
    elif kind == "one expert":
        index[:] = 1
    return index


def tensors_of(index, experts, d, h, dtype, bias=True, seed=0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def of(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()

    found = {
        "x": of(len(index), d), "s": of(*index.shape), "w": of(experts, 2 * h, d, scale=max(d, 1) ** -0.5),
        "wd": of(experts, d, h, scale=max(h, 1) ** -0.5),
    }  # fmt: skip
    return found | ({"b": of(experts, 2 * h), "bd": of(experts, d)} if bias else {})


def ours_of(index, **options):
    def ours(t: Tensors) -> torch.Tensor:
        biases = {"gate_up_bias": t.get("b"), "down_bias": t.get("bd")}
        return ckptkern.moe_mlp(t["x"], index, t["s"], t["w"], t["wd"], **biases, **options)

    return ours


def theirs_of(index):
    return lambda t: moe(t["x"], index, t["s"], t["w"], t["wd"], t.get("b"), t.get("bd"))


# kind, tokens, top_k, experts, features, hidden
ROUTINGS = [
    ("even", 50, 2, 5, 24, 20), ("empty experts", 40, 3, 8, 16, 32), ("dropped", 33, 2, 3, 20, 7),
    ("all dropped", 9, 2, 4, 8, 8), ("one expert", 35, 2, 2, 16, 36), ("even", 0, 2, 3, 8, 8), ("even", 7, 1, 600, 5, 3),
    ("even", 6, 3, 3, 1, 1), ("even", 4, 1, 2, 0, 3), ("even", 4, 1, 2, 3, 0),
]  # fmt: skip
each_routing = pytest.mark.parametrize("sizes", ROUTINGS, ids=lambda sizes: "-".join(map(str, sizes)))


@each_routing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_as_exact_as_torchs(sizes, dtype):
    """Uneven and empty experts, duplicate and dropped token-expert pairs, no tokens at all (pytorch#192497), E > 512
    (aiter#4482)."""
    kind, tokens, top_k, experts, d, h = sizes
    index = routing(kind, tokens, top_k, experts)
    for bias in (False, True):
        check_exactness(ours_of(index), theirs_of(index), tensors_of(index, experts, d, h, dtype, bias))


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_an_empty_expert_has_exact_zeros(backend):
    """pytorch#172439; and so has the weight of a dropped token-expert pair (transformers#48687)."""
    index = routing("empty experts", 40, 3, 8)
    index[5, 1], index[6, 2] = -1, 8
    t = tensors_of(index, 8, 16, 24, torch.bfloat16)
    with ckptkern.backend(backend):
        found = gradients(ours_of(index), t)
    for expert, name in itertools.product((0, 7), ("w", "wd", "b", "bd")):
        assert found[name][expert].count_nonzero() == 0, name
    assert found["s"][5, 1] == found["s"][6, 2] == 0
    assert found["s"].count_nonzero() == found["s"].numel() - 2
    weights = t["s"].detach().clone()
    weights[5, 1] = weights[6, 2] = float("nan")
    with ckptkern.backend(backend):
        again = ours_of(index)({**t, "s": weights})
    assert torch.equal(again, found["y"]), "nobody reads the weight of a dropped token-expert pair"


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_beyond_the_last_offset(backend, mode):
    """They hold what they like: zeros come out, and zeros as their gradient (pytorch#154557, #193633, transformers#48205)."""
    offs = torch.tensor([7, 7, 20], dtype=torch.int32)
    t = tensors_of(torch.zeros(37, 1), 3, 16, 24, torch.float32, bias=False)
    weights = t["s"].detach()[:, 0].clone().requires_grad_()
    x = t["x"].detach().clone()
    x[20:] = float("nan")
    x.requires_grad_()
    dy = output_gradient(x)
    dy[20:] = float("nan")
    with ckptkern.backend(backend):
        y = ckptkern.grouped_gated_mlp(x, offs, t["w"], t["wd"], row_weights=weights, recompute=mode)
        dx, ds, dw, dwd = torch.autograd.grad(y, (x, weights, t["w"], t["wd"]), dy)
    for rows in (y[20:], dx[20:], ds[20:], dw[1], dwd[1]):
        assert torch.equal(rows, torch.zeros_like(rows))
    index = torch.tensor([0] * 7 + [2] * 13)[:, None]
    head = {
        "x": x.detach()[:20].requires_grad_(),
        "s": weights.detach()[:20, None].requires_grad_(),
        "w": t["w"],
        "wd": t["wd"],
    }
    expected = gradients(theirs_of(index), head, dy[:20])
    for ours, name in ((y[:20], "y"), (dx[:20], "x"), (ds[:20, None], "s"), (dw, "w"), (dwd, "wd")):
        torch.testing.assert_close(ours, expected[name], rtol=1e-5, atol=1e-5)


def test_grouped_rows_equal_an_moe_of_one():
    """Without weights they are ones, which get no gradient; as with weights of one, bit for bit."""
    offs, index = torch.tensor([5, 5, 30]), torch.tensor([0] * 5 + [2] * 25)[:, None]
    t = tensors_of(index, 3, 16, 24, torch.bfloat16, bias=False)
    del t["s"]
    ours = gradients(lambda t: ckptkern.grouped_gated_mlp(t["x"], offs, t["w"], t["wd"], "gelu"), t)
    ones = torch.ones(30, 1)
    theirs = gradients(lambda t: ckptkern.moe_mlp(t["x"], index, ones, t["w"], t["wd"], "gelu"), t)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


# -- what is saved, and what runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_saved_bytes(mode, compiled, dtype):
    """x, g and u, and the two arguments of the routing. No cast weight, no gathered row."""
    tokens, top_k, experts, d, h = 50, 2, 5, 24, 20
    index = routing("even", tokens, top_k, experts)
    t = tensors_of(index, experts, d, h, torch.float32)
    ours = ours_of(index, recompute=mode)
    if compiled:
        ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
    around = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
    with around, saved_tensors(exclude=[t[name] for name in ("w", "wd", "b", "bd")]) as saved:
        ours(t)
    pairs, elements = tokens * top_k, tokens * d + (tokens * top_k * 2 * h if mode != "full" else 0)
    assert saved.bytes == dtype.itemsize * elements + pairs * (8 + 4)


def test_a_frozen_first_weight_lets_go_of_the_input():
    index = routing("even", 50, 2, 5)
    t = tensors_of(index, 5, 24, 20, torch.float32, bias=False)
    t["w"].requires_grad_(False)
    with saved_tensors(exclude=[index, t["s"], t["w"], t["wd"]]) as saved:
        ours_of(index, recompute="selective")(t)
    assert saved.bytes == 4 * 100 * 40


@pytest.mark.parametrize(("mode", "matmuls"), [("none", 9), ("selective", 9), ("full", 11)])
def test_number_of_matmuls(mode, matmuls):
    """The docstring's table, as run and as registered; matmuls of T k rows, and no others."""
    index = routing("even", 30, 2, 4)
    t = tensors_of(index, 4, 6, 6, torch.float32)
    with Watch() as watch, FlopCounterMode(display=False) as counter:
        gradients(ours_of(index, recompute=mode), t)
    assert watch.flops == matmuls * 2 * 60 * 6 * 6
    with FlopCounterMode(display=False) as counter:
        gradients(ours_of(index, recompute=mode), t)
    assert counter.get_total_flops() == watch.flops


@pytest.mark.parametrize("mode", MODES)
def test_matmuls_of_every_subset_of_frozen_inputs(mode):
    """What is frozen costs no matmul, and the registered FLOPs are those that run."""
    index, size = routing("even", 30, 2, 4), 2 * 60 * 6 * 6
    names = ["x", "s", "w", "wd", "b", "bd"]
    for count in range(1, 7):
        for trained in itertools.combinations(names, count):
            t = tensors_of(index, 4, 6, 6, torch.float32)
            for name in set(names) - set(trained):
                t[name].requires_grad_(False)
            with Watch() as watch:
                gradients(ours_of(index, recompute=mode), t)
            above, last = bool({"x", "s", "w", "b"} & {*trained}), "wd" in trained
            expected = 3 + above + last + 2 * ("x" in trained) + 2 * ("w" in trained)
            expected += 2 * (mode == "full" and (above or last))
            assert watch.flops == expected * size, trained
            assert watch.registered == watch.flops, trained


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("strided", [False, True])
def test_main_grad(backend, strided):
    """float32 sums over micro-batches, once rounded nowhere; no gradient besides."""
    index = routing("empty experts", 40, 3, 8)
    t = tensors_of(index, 8, 16, 24, torch.bfloat16, bias=False)
    weights = {name: torch.nn.Parameter(t[name].detach()) for name in ("w", "wd")}
    for p in weights.values():
        p.main_grad = torch.ones(p.shape) if not strided else torch.ones(p.mT.shape).mT
    unfused = {**t, **{name: p.detach().float().requires_grad_() for name, p in weights.items()}}
    unfused = {name: one.detach().double().requires_grad_() for name, one in unfused.items()}
    exact = gradients(theirs_of(index), unfused, output_gradient(t["x"]).double())
    with ckptkern.backend(backend):
        for _ in range(2):
            y = ours_of(index)({**t, **weights})
            y.backward(output_gradient(y))
    for name, p in weights.items():
        assert p.grad is None
        assert p.grad_added_to_main_grad
        error = torch.linalg.vector_norm(p.main_grad - 1 - 2 * exact[name]) / torch.linalg.vector_norm(2 * exact[name])
        assert error < 0.01, name  # h and dh are bfloat16
        assert (p.main_grad[0] == 1).all(), "an expert without rows adds nothing"
        assert p.main_grad.to(torch.bfloat16).float().sub(p.main_grad).abs().max() > 0, "rounded to the weight's type"


def test_autocast():
    """Gradients have their tensors' dtypes; the routing weights are not rounded to x's."""
    index = routing("even", 50, 2, 5)
    t = tensors_of(index, 5, 24, 20, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = ours_of(index)
        found = gradients(ours, t)
    assert found["y"].dtype == torch.bfloat16
    assert {found[name].dtype for name in t} == {torch.float32}
    narrow = {name: one.detach().to(torch.bfloat16).requires_grad_() for name, one in t.items()}
    wide_weights = gradients(ours_of(index), {**narrow, "s": t["s"]})
    assert torch.equal(wide_weights["y"], found["y"])
    assert wide_weights["s"].dtype == torch.float32
    assert not torch.equal(gradients(ours_of(index), narrow)["y"], found["y"])


# -- errors ------------------------------------------------------------------------------------------------------------


X, INDEX, S, W, WD = (
    torch.ones(6, 4),
    torch.zeros(6, 2).long(),
    torch.ones(6, 2),
    torch.ones(3, 10, 4),
    torch.ones(3, 4, 5),
)
WRONG = {
    "input must be a Tensor, not NoneType": dict(x=None),
    "top_k_index must be a Tensor, not list": dict(index=[[0, 1]]),
    "top_k_index must hold integers, not torch.float32": dict(index=S),
    "top_k_index must hold integers, not torch.bool": dict(index=S.bool()),
    "top_k_index must be (6, 'k') for an input of shape (6, 4), with k of at least 1, but has shape (6,)": dict(
        index=INDEX[:, 0]
    ),
    "top_k_index must be (6, 'k') for an input of shape (6, 4), with k of at least 1, but has shape (6, 0)": dict(
        index=INDEX[:, :0], s=S[:, :0]
    ),
    "top_k_index and top_k_weights must have one shape, but have (6, 2) and (6, 1)": dict(s=S[:, :1]),
    "top_k_weights must be floating point, not torch.int64": dict(s=INDEX),
    "gate_up_weight must be [experts, 2 hidden, features], but has shape (10, 4)": dict(w=W[0]),
    "gate_up_weight must be [experts, 2 hidden, 4] for an input with 4 features, but has shape (3, 4, 10); pass "
    "gate_up_weight.transpose(1, 2) for [experts, 4, 2 hidden]": dict(w=W.mT),
    "gate_up_weight must be [experts, 2 hidden, 4] for an input with 4 features, but has shape (3, 9, 4)": dict(w=W[:, 1:]),
    "down_weight must have shape (3, 4, 5) beside gate_up_weight (3, 10, 4), but has (2, 4, 5)": dict(wd=WD[1:]),
    "gate_up_bias must have shape (3, 10) beside gate_up_weight (3, 10, 4), but has (3, 5)": dict(
        gate_up_bias=torch.ones(3, 5)
    ),
    "down_bias must be [experts, features], but has shape (4,)": dict(down_bias=torch.ones(4)),
    "input is torch.float32 but a parameter is torch.float64": dict(wd=WD.double()),
    "input is on cpu but top_k_index is on meta": dict(index=INDEX.to("meta")),
    "activation must be one of": dict(activation="swish"),
    "recompute must be one of 'none', 'selective', 'full', not 'some'": dict(recompute="some"),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    given = dict(x=X, index=INDEX, s=S, w=W, wd=WD) | WRONG[message]
    tensors = [given.pop(name) for name in ("x", "index", "s", "w", "wd")]
    with pytest.raises((TypeError, ValueError)) as error:
        ckptkern.moe_mlp(*tensors, **given)
    assert f"moe_mlp: {message}" in str(error.value)


OFFS = torch.tensor([1, 2, 6])
WRONG_GROUPS = {
    "input must be [rows, features], but has shape (1, 6, 4)": dict(x=X[None]),
    "offs must hold integers, not torch.float32": dict(offs=OFFS.float()),
    "offs must have shape (3,), the end of each expert's rows, but has (4,)": dict(offs=torch.tensor([0, 1, 2, 6])),
    "row_weights must have shape (6,), one value for each row, but has (6, 2)": dict(row_weights=S),
}


@pytest.mark.parametrize("message", WRONG_GROUPS)
def test_wrong_groups(message):
    given = dict(x=X, offs=OFFS) | WRONG_GROUPS[message]
    with pytest.raises((TypeError, ValueError)) as error:
        ckptkern.grouped_gated_mlp(given.pop("x"), given.pop("offs"), W, WD, **given)
    assert f"grouped_gated_mlp: {message}" in str(error.value)


def test_leading_dimensions_and_integer_types():
    index = routing("dropped", 24, 2, 3)
    t = tensors_of(index, 3, 8, 8, torch.float64)
    expected = gradients(ours_of(index), t)
    shaped = {
        **t,
        "x": t["x"].detach().view(2, 3, 4, 8).requires_grad_(),
        "s": t["s"].detach().view(2, 3, 4, 2).requires_grad_(),
    }
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        found = gradients(ours_of(index.view(2, 3, 4, 2).to(dtype)), shaped)
        for name, value in expected.items():
            assert torch.equal(found[name].view(value.shape), value), name


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_narrow_integers_hold_no_row_and_no_count(dtype):
    E, rows, narrow = 256, 40_000, torch.iinfo(dtype)
    x, w, wd = torch.randn(rows, 4), torch.randn(E, 6, 4), torch.randn(E, 4, 3)
    index = torch.arange(rows).clamp(max=min(narrow.max, E - 1))[:, None]
    mine, want = (ckptkern.moe_mlp(x, i, torch.ones(rows, 1), w, wd) for i in (index.to(dtype), index))
    assert torch.equal(mine, want)
    ends = torch.tensor([50, 100])
    mine, want = (ckptkern.grouped_gated_mlp(x, offs, w[:2], wd[:2]) for offs in (ends.to(dtype), ends))
    assert torch.equal(mine, want)
    assert not mine[100:].any()


def test_names_of_nodes():
    index = routing("even", 6, 2, 3)
    y = ours_of(index)(tensors_of(index, 3, 8, 8, torch.float32))
    assert y.grad_fn.name() == "ExpertsFunctionBackward"


@pytest.mark.parametrize("sizes", ROUTINGS[:4], ids=lambda sizes: sizes[0])
def test_a_subclass_with_operations_of_its_own_is_composed(sizes):
    """In PyTorch ops, every expert on every token: dropped, duplicate and empty ones count as they do in the op."""
    kind, tokens, top_k, experts, d, h = sizes
    index = routing(kind, tokens, top_k, experts)
    t = tensors_of(index, experts, d, h, torch.float64)
    expected = gradients(ours_of(index), t)
    logged = {**t, "x": torch.Tensor._make_subclass(Logged, t["x"].detach(), True)}
    assert "Experts" not in ours_of(index)(logged).grad_fn.name()
    found = gradients(ours_of(index), logged)
    assert_same_within_rounding({name: one.as_subclass(torch.Tensor) for name, one in found.items()}, expected)
