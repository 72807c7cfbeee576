"""nn.MultiheadAttention against torch.nn.MultiheadAttention in float64: masks, weights, other keys and values, errors."""

import functools
import itertools

import pytest
import torch
from support.drop_ins import (
    B,
    E,
    H,
    S,
    T,
    assert_drop_in,
    attention_mask,
    causal_mask,
    padding_mask,
    pair_of,
    pairwise,
    raised,
    tokens,
)
from torch.nn.attention import bias

from ckptkern.memory import saved_tensors

pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched", "ignore:Lower right causal bias will produce NaNs"
)
build = functools.partial(pair_of, "MultiheadAttention", batch_first=False)


@pytest.mark.parametrize(
    "case",
    pairwise(
        lambda case: case["source"] != "self" or case["widths"] == "same",
        layout=("unbatched", "seq_first", "batch_first"),
        source=("self", "key_is_value", "three"),
        widths=("same", "other"),
        bias=(True, False),
        bias_kv=(False, True),
        zero_attn=(False, True),
        mask=("none", "bool2", "bool3", "float2", "float3", "causal"),
        padding=("none", "bool", "float"),
        weights=("none", "mean", "heads"),
        training=(True, False),
    ),
)
def test_equals_torch(case):
    layout, source = case["layout"], case["source"]
    kdim, vdim = {"same": (E, E), "other": (4, 4) if source == "key_is_value" else (4, 6)}[case["widths"]]
    pair = build(
        bias=case["bias"], add_bias_kv=case["bias_kv"], add_zero_attn=case["zero_attn"], kdim=kdim, vdim=vdim,
        batch_first=layout == "batch_first",
    )  # fmt: skip
    ours, theirs = (module.train(case["training"]) for module in pair)
    inputs = {"query": tokens(layout, T)}
    if source != "self":
        inputs["key"] = tokens(layout, S, kdim)
    if source == "three":
        inputs["value"] = tokens(layout, S, vdim)
    keys, lead = (T if source == "self" else S), () if layout == "unbatched" else (B,)
    attn_mask, padding = (
        attention_mask(case["mask"], *lead or (1,), H, T, keys),
        padding_mask(case["padding"], lead, keys),
    )

    def call(module, query, key=None, value=None):
        key = query if key is None else key
        return module(
            query, key, key if value is None else value, key_padding_mask=padding, attn_mask=attn_mask,
            need_weights=case["weights"] != "none", average_attn_weights=case["weights"] == "mean",
            is_causal=case["mask"] == "causal",
        )  # fmt: skip

    assert_drop_in(ours, theirs, call, inputs)


@pytest.mark.parametrize("padded", [False, True])
def test_the_mask_gets_a_gradient(padded):
    """In one region, unless weights are needed or a hint stands for the mask, which a padding mask overrules."""
    ours, theirs = build()
    inputs = {"x": tokens("seq_first", T), "attn_mask": torch.randn(B * H, T, T).double().requires_grad_()}
    padding = torch.zeros(B, T).double().index_fill(1, torch.tensor([T - 1]), -torch.inf) if padded else None

    def call(m, x, attn_mask, need_weights=False, is_causal=False):
        return m(x, x, x, padding, need_weights, attn_mask, is_causal=is_causal)

    assert type(call(ours, **inputs)[0].grad_fn.next_functions[0][0]).__name__ == "AttentionBlockFunctionBackward"
    for options in ({}, {"need_weights": True}, *([{"is_causal": True}] if padded else [])):
        assert_drop_in(ours, theirs, functools.partial(call, **options), inputs)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("masked", ["attn_mask", "key_padding_mask", "both", "hint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_torch_says_which_dtypes_of_masks_go_together(dtype, masked, autocast):
    pair, x = [module.to(dtype) for module in build()], tokens("seq_first", T, grad=False).to(dtype)
    kinds, errors = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64), set()
    for need_weights, one, other in itertools.product((True, False), kinds, kinds if masked == "both" else kinds[:1]):
        mask, padding = causal_mask(T, T), torch.zeros(B, T).to(other if masked == "both" else one)
        mask = mask < 0 if one == torch.bool else mask.to(one)
        given = dict(need_weights=need_weights, is_causal=masked == "hint")
        given |= {} if masked == "key_padding_mask" else {"attn_mask": mask}
        given |= {"key_padding_mask": padding} if masked in ("key_padding_mask", "both") else {}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ours, theirs = (raised(functools.partial(module, x, x, x, **given)) for module in pair)
        assert ours == theirs, given
        errors.add(theirs is None)
    assert len(errors) == 2, "some are taken, some are not"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("need_weights", [True, False])
def test_no_keys(need_weights, extra, padded):
    """Without need_weights torch cannot form the mask's shape; the expected result is that without a mask."""
    ours, theirs = build(add_bias_kv=extra, add_zero_attn=extra)
    mask = torch.zeros(B, 0, dtype=torch.bool) if padded else None

    def call(module, query, keys):
        padding = mask if module is ours or need_weights or extra else None
        return module(query, keys, keys, padding, need_weights=need_weights)

    assert_drop_in(ours, theirs, call, {"query": tokens("seq_first", T), "keys": tokens("seq_first", 0)})


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_query_that_sees_nothing_gives_zeros(need_weights):
    """pytorch#103749: torch's need_weights=True gives NaN."""
    (ours, _), x = build(), tokens("seq_first", T)
    hidden = torch.arange(T)[:, None].expand(T, T) == 2
    y, weights = ours(x, x, x, attn_mask=hidden, need_weights=need_weights)
    assert torch.equal(y[2], ours.out_proj.bias.expand(B, E))
    total = y.sum()
    if need_weights:
        torch.testing.assert_close(weights.sum(-1), (torch.arange(T) != 2).double().expand(B, T))
        total += weights.square().sum()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(total, [x, *ours.parameters()]))


def test_dropout_acts_on_the_weights():
    """The same mask with weights and without."""
    p, long = 0.25, 64
    ours, theirs = build(dropout=p)
    x = torch.randn(long, B, E, dtype=torch.float64)
    torch.manual_seed(1)
    y, weights = ours(x, x, x, average_attn_weights=False)
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], y)
    saved = weights != 0
    assert abs(saved.double().mean() - (1 - p)) < 4 * (p * (1 - p) / weights.numel()) ** 0.5
    _, whole = theirs.eval()(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(weights, torch.where(saved, whole / (1 - p), 0.0))


def test_the_weights_are_computed_once():
    """The output is computed from the returned weights: no fused core runs as well, and no second copy is saved."""
    ours, _ = build()
    x = tokens("seq_first", T)
    with saved_tensors(exclude=ours.parameters()) as saved, torch.profiler.profile() as profile:
        ours(x, x, x)
    assert saved.bytes == 8 * B * T * (E + 3 * E + E + H * T), saved.tensors
    names = {event.key for event in profile.key_averages()}
    assert "ckptkern::linear_act_fwd" in names
    assert "ckptkern::attention_fwd" not in names


# -- masks that are a CausalBias, which has uninitialised memory -------------------------------------------------------


@pytest.mark.parametrize("make", [bias.causal_upper_left, bias.causal_lower_right])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(("samples", "keys"), [(1, T), (3, S)])
def test_a_causal_bias(samples, keys, need_weights, make):
    """With one sample of two heads, torch's own module takes the bias for a mask [B H, L, S] and reads its memory."""
    (module, _), mask = build(args=(E, 2)), make(T, keys)

    def call(module, x, memory, mask=mask):
        return module(x, memory, memory, need_weights=need_weights, attn_mask=mask)

    inputs = {name: torch.randn(n, samples, E).double().requires_grad_() for name, n in (("x", T), ("memory", keys))}
    assert_drop_in(module, module, call, inputs, functools.partial(call, mask=~mask._materialize()))
