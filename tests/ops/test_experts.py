"""moe_mlp and grouped_gated_mlp: every kind of routing."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.cases import DTYPES, MODES, assert_same_within_rounding, check_exactness, gradients, output_gradient
from support.oracles import ORACLES
from support.wrappers import Logged

import ckptkern
from ckptkern import eager
from ckptkern.ops import catalog

Tensors = dict[str, torch.Tensor]


def moe(x, index, s, w, wd, b=None, bd=None, act=F.silu):
    """The reference implementation: one expert after the other on its tokens, as transformers' models write it, added
    up in float32."""
    total = torch.zeros(x.shape, dtype=eager.wide_of(x.dtype))
    for e in range(len(w)):
        *tokens, j = torch.where(index == e)
        g, u = F.linear(x[tuple(tokens)], w[e], None if b is None else b[e]).chunk(2, -1)
        y = F.linear(act(g) * u, wd[e], None if bd is None else bd[e])
        weighted = y * s[(*tokens, j)][:, None].to(y.dtype)
        total = total.index_put(tuple(tokens), weighted.to(total.dtype), accumulate=True)
    return total.to(x.dtype)


def routing(kind: str, tokens: int, top_k: int, experts: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    choices = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
    index = torch.stack(choices or [torch.zeros(0)]).view(tokens, top_k).long()
    if kind == "empty experts":  # and duplicates
        index[(index == 0) | (index == experts - 1)] = 1
    elif kind == "dropped":
        index[::2, 0], index[1::3, -1] = -1, experts
    elif kind == "all dropped":
        index[:] = -1
    elif kind == "one expert":
        index[:] = 1
    return index


def tensors_of(index, experts, d, h, dtype=torch.float32, bias=True) -> Tensors:
    """Of `moe`, by name."""
    shapes = {"x": (len(index), d), "s": index.shape, "w_weight": (experts, 2 * h, d), "wd_weight": (experts, d, h)}
    shapes |= {"b": (experts, 2 * h), "bd": (experts, d)} if bias else {}
    leaves = catalog.random_leaves({name: catalog.Normal(tuple(shape)) for name, shape in shapes.items()}, dtype)
    return {name.removesuffix("_weight"): t for name, t in leaves.items()}


def ours_of(index, function=ckptkern.moe_mlp):
    return lambda t: function(t["x"], index, t["s"], t["w"], t["wd"], gate_up_bias=t.get("b"), down_bias=t.get("bd"))


theirs_of = functools.partial(ours_of, function=ORACLES["moe_mlp"])


# kind, tokens, top_k, experts, features, hidden
ROUTINGS = [
    ("even", 50, 2, 5, 24, 20), ("empty experts", 40, 3, 8, 16, 32), ("dropped", 33, 2, 3, 20, 7),
    ("all dropped", 9, 2, 4, 8, 8), ("one expert", 35, 2, 2, 16, 36), ("even", 0, 2, 3, 8, 8), ("even", 7, 1, 600, 5, 3),
    ("even", 6, 3, 3, 1, 1), ("even", 4, 1, 2, 0, 3), ("even", 4, 1, 2, 3, 0),
]  # fmt: skip
each_backend = pytest.mark.parametrize("backend", ["eager", "triton"])


@each_backend
@pytest.mark.parametrize(("sizes", "dtype"), [(sizes, DTYPES[i % 3]) for i, sizes in enumerate(ROUTINGS)], ids=str)
def test_gradients_are_as_exact_as_torchs(sizes, dtype, backend):
    """Uneven and empty experts, duplicate and dropped token-expert pairs, no tokens at all (pytorch#192497), E > 512
    (aiter#4482)."""
    kind, tokens, top_k, experts, d, h = sizes
    index = routing(kind, tokens, top_k, experts)
    with ckptkern.backend(backend):
        check_exactness(ours_of(index), theirs_of(index), tensors_of(index, experts, d, h, dtype))


@pytest.mark.parametrize("sizes", ROUTINGS[:4], ids=lambda sizes: sizes[0])
def test_a_subclass_with_operations_of_its_own_is_composed(sizes):
    """In PyTorch ops, every expert on every token: dropped, duplicate and empty ones count as they do in the op."""
    kind, tokens, top_k, experts, d, h = sizes
    run = ours_of(routing(kind, tokens, top_k, experts))
    t = tensors_of(routing(kind, tokens, top_k, experts), experts, d, h, torch.float64)
    logged = gradients(run, {**t, "x": torch.Tensor._make_subclass(Logged, t["x"].detach(), True)})
    assert_same_within_rounding(
        {name: one.as_subclass(torch.Tensor) for name, one in logged.items()}, gradients(run, t)
    )


@each_backend
def test_an_empty_expert_has_exact_zeros(backend):
    """pytorch#172439; and so has the weight of a dropped token-expert pair (transformers#48687)."""
    index = routing("empty experts", 40, 3, 8)
    index[5, 1], index[6, 2] = -1, 8
    t = tensors_of(index, 8, 16, 24, torch.bfloat16)
    with ckptkern.backend(backend):
        found = gradients(ours_of(index), t)
    for name in ("w", "wd", "b", "bd"):
        assert found[name][[0, 7]].count_nonzero() == 0, name
    assert found["s"][5, 1] == found["s"][6, 2] == 0
    assert found["s"].count_nonzero() == found["s"].numel() - 2
    weights = t["s"].detach().clone()
    weights[5, 1] = weights[6, 2] = float("nan")
    with ckptkern.backend(backend):
        again = ours_of(index)({**t, "s": weights})
    assert torch.equal(again, found["y"]), "nobody reads the weight of a dropped token-expert pair"


@each_backend
@pytest.mark.parametrize("mode", MODES)
def test_rows_beyond_the_last_offset(backend, mode):
    """They hold what they like: zeros come out, and zeros as their gradient (pytorch#154557, #193633, transformers#48205)."""
    offs, t = torch.tensor([7, 7, 20], dtype=torch.int32), tensors_of(torch.zeros(37, 1), 3, 16, 24, bias=False)

    def of(function):
        return lambda t: function(t["x"], offs, t["w"], t["wd"], row_weights=t["s"][:, 0], recompute=mode)

    dy = output_gradient(t["x"]).index_fill(0, torch.arange(20, 37), 0.0)
    expected = gradients(of(ORACLES["grouped_gated_mlp"]), t, dy)
    with torch.no_grad():
        t["x"][20:] = dy[20:] = float("nan")
    with ckptkern.backend(backend):
        found = gradients(of(ckptkern.grouped_gated_mlp), t, dy)
    for rows in (*(found[name][20:] for name in ("y", "x", "s")), found["w"][1], found["wd"][1]):
        assert not rows.any()
    assert_same_within_rounding(found, expected)


def test_autocast_does_not_round_the_routing_weights():
    run, t = ours_of(routing("even", 50, 2, 5)), tensors_of(torch.zeros(50, 2), 5, 24, 20)
    narrow = {name: one.detach().bfloat16() for name, one in t.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(run, t)
    assert torch.equal(run(narrow | {"s": t["s"]}), found["y"])
    assert found["s"].dtype == torch.float32
    assert not torch.equal(run(narrow), found["y"])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_narrow_integers_hold_no_row_and_no_count(dtype):
    E, rows, largest = 256, 40_000, torch.iinfo(dtype).max
    t = tensors_of(torch.zeros(rows, 1), E, 4, 3, bias=False)
    index, ends = torch.arange(rows).clamp(max=min(largest, E - 1))[:, None], torch.tensor([50, 100])
    assert torch.equal(*(ours_of(one)(t) for one in (index.to(dtype), index)))
    assert torch.equal(
        *(ckptkern.grouped_gated_mlp(t["x"], one, t["w"][:2], t["wd"][:2]) for one in (ends.to(dtype), ends))
    )
