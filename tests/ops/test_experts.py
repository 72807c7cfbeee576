"""moe_mlp and grouped_gated_mlp: every kind of routing."""

import pytest
import torch
from support.cases import (
    DTYPES,
    MODES,
    assert_same_within_rounding,
    check_exactness,
    each_backend,
    gradients,
    output_gradient,
)
from support.catalog import Sizes
from support.properties import call_of, joined
from support.wrappers import Logged

import ckptkern

E = Sizes().experts
EVEN = call_of("moe_mlp", sizes=Sizes((40,), 16, 24))
INDEX = EVEN.arguments["top_k_index"]
DROPPED = torch.arange(80).view(40, 2) % 7 == 3
ROUTINGS = {
    "even": EVEN,
    "duplicates and an empty expert": EVEN.with_(top_k_index=INDEX.clamp(min=1)),
    "dropped": EVEN.with_(top_k_index=torch.where(DROPPED, -1 + (E + 1) * (INDEX % 2), INDEX)),
    "all dropped": EVEN.with_(top_k_index=INDEX * 0 - 1),
    "one expert": EVEN.with_(top_k_index=INDEX * 0 + 1),
    "600 experts": call_of("moe_mlp", sizes=Sizes((40,), 5, 3, experts=600)).with_(
        top_k_index=INDEX * 271
    ),  # aiter#4482
    "no tokens": call_of("moe_mlp", sizes=Sizes((0,))),  # pytorch#192497
    "one feature": call_of("moe_mlp", sizes=Sizes((6,), 1, 1)),
    "no features": call_of("moe_mlp", sizes=Sizes((4,), 0)),
    "no hidden features": call_of("moe_mlp", sizes=Sizes((4,), hidden=0)),
}


@each_backend
@pytest.mark.parametrize(("name", "dtype"), [(name, DTYPES[i % 3]) for i, name in enumerate(ROUTINGS)])
def test_gradients_are_as_exact_as_torchs(name, dtype, backend):
    call = ROUTINGS[name]
    with ckptkern.backend(backend):
        check_exactness(call, lambda t: joined(call.oracle(t)), call.make(dtype))


@pytest.mark.parametrize("name", [*ROUTINGS][:4])
def test_a_subclass_with_operations_of_its_own_is_composed(name):
    """In PyTorch ops, every expert on every token: dropped, duplicate and empty ones count as they do in the op."""
    t = ROUTINGS[name].make()
    logged = gradients(ROUTINGS[name], t | {"x": torch.Tensor._make_subclass(Logged, t["x"].detach(), True)})
    logged = {name: tensor.as_subclass(torch.Tensor) for name, tensor in logged.items()}
    assert_same_within_rounding(logged, gradients(ROUTINGS[name], t))


@each_backend
def test_an_empty_expert_has_exact_zeros(backend):
    """pytorch#172439; and so has the weight of a dropped token-expert pair (transformers#48687), which nobody reads."""
    empty, dropped = ROUTINGS["duplicates and an empty expert"], ROUTINGS["dropped"]
    t = dropped.make(torch.bfloat16)
    weights = t["top_k_weights"].detach().masked_fill(DROPPED, float("nan"))
    with ckptkern.backend(backend):
        of_empty, of_dropped = gradients(empty, empty.make(torch.bfloat16)), gradients(dropped, t)
        again = dropped(t | {"top_k_weights": weights})
    for name in ("gate_up_weight", "down_weight", "gate_up_bias", "down_bias"):
        assert not of_empty[name][0].any(), name
    assert torch.equal(of_dropped["top_k_weights"] == 0, DROPPED)
    assert torch.equal(again, of_dropped["y"])


@each_backend
@pytest.mark.parametrize("mode", MODES)
def test_rows_beyond_the_last_offset(backend, mode):
    """They hold what they like: zeros come out, and zeros as their gradient (pytorch#154557, #193633, transformers#48205)."""
    offs = torch.tensor([7, 7, 20], dtype=torch.int32)
    call = call_of("grouped_gated_mlp", "row_weights", sizes=Sizes((37,)), recompute=mode, offs=offs)
    t = call.make()
    dy = output_gradient(t["x"]).index_fill(0, torch.arange(20, 37), 0.0)
    expected = gradients(lambda t: joined(call.oracle(t)), t, dy)
    with torch.no_grad():
        t["x"][20:] = dy[20:] = float("nan")
    with ckptkern.backend(backend):
        actual = gradients(call, t, dy)
    of_rows = (actual[name][20:] for name in ("y", "x", "row_weights"))
    assert not any(rows.any() for rows in (*of_rows, actual["gate_up_weight"][1], actual["down_weight"][1]))
    assert_same_within_rounding(actual, expected)


def test_autocast_does_not_round_the_routing_weights():
    t = EVEN.make()
    narrow = {name: tensor.detach().bfloat16() for name, tensor in t.items()}
    with torch.autocast("cpu", torch.bfloat16):
        actual = gradients(EVEN, t)
    assert torch.equal(EVEN(narrow | {"top_k_weights": t["top_k_weights"]}), actual["y"])
    assert actual["top_k_weights"].dtype == torch.float32
    assert not torch.equal(EVEN(narrow), actual["y"])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_narrow_integers_hold_no_row_and_no_count(dtype):
    rows, largest = 40_000, torch.iinfo(dtype).max
    index = torch.arange(2 * rows).view(rows, 2).clamp(max=min(largest, 255))
    sizes = Sizes((rows,), 4, 3, experts=256)
    calls = (
        call_of("moe_mlp", sizes=sizes, top_k_index=index),
        call_of("grouped_gated_mlp", sizes=Sizes((rows,), experts=2), offs=torch.tensor([50, 100])),
    )
    for call, name in zip(calls, ("top_k_index", "offs"), strict=True):
        t = call.make()
        assert torch.equal(call.with_(**{name: call.arguments[name].to(dtype)})(t), call(t))
