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
        bias=case["bias"],
        add_bias_kv=case["bias_kv"],
        add_zero_attn=case["zero_attn"],
        kdim=kdim,
        vdim=vdim,
        batch_first=layout == "batch_first",
    )
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
            query,
            key,
            key if value is None else value,
            key_padding_mask=padding,
            attn_mask=attn_mask,
            need_weights=case["weights"] != "none",
            average_attn_weights=case["weights"] == "mean",
            is_causal=case["mask"] == "causal",
        )

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
    for need_weights, mask_dtype, other in itertools.product(
        (True, False), kinds, kinds if masked == "both" else kinds[:1]
    ):
        mask, padding = causal_mask(T, T), torch.zeros(B, T).to(other if masked == "both" else mask_dtype)
        mask = mask < 0 if mask_dtype == torch.bool else mask.to(mask_dtype)
        options = dict(need_weights=need_weights, is_causal=masked == "hint")
        options |= {} if masked == "key_padding_mask" else {"attn_mask": mask}
        options |= {"key_padding_mask": padding} if masked in ("key_padding_mask", "both") else {}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ours, theirs = (raised(functools.partial(module, x, x, x, **options)) for module in pair)
        assert ours == theirs, options
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


def test_a_query_that_sees_nothing_gives_zeros():
    """pytorch#103749: torch's need_weights=True gives NaN."""
    (ours, _), x = build(), tokens("seq_first", T)
    hidden = torch.arange(T)[:, None].expand(T, T) == 2
    y, _ = ours(x, x, x, attn_mask=hidden, need_weights=False)
    assert torch.equal(y[2], ours.out_proj.bias.expand(B, E))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), [x, *ours.parameters()]))


@pytest.mark.parametrize("source", ["weights", "three"])
def test_what_no_op_computes_saves_its_inputs(source):
    """Dropout of the weights, too, which the recompute samples again."""
    ours, theirs = build(dropout=0.25)
    inputs = [tokens("seq_first", T) for _ in range(3 if source == "three" else 1)]
    results = []
    for module in (ours, theirs):
        torch.manual_seed(1)
        with saved_tensors(exclude=ours.parameters()) as saved:
            y, weights = module(*(inputs * 3)[:3], need_weights=source == "weights")
        assert module is theirs or saved.bytes == sum(x.nbytes for x in inputs), saved.tensors
        total = y.square().sum() + (0 if weights is None else weights.square().sum())
        results.append([y, weights, *torch.autograd.grad(total, inputs)])
    torch.testing.assert_close(*results)


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
