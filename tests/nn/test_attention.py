"""nn.MultiheadAttention against torch.nn.MultiheadAttention in float64."""

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
    bool_mask,
    both_of,
    causal_mask,
    float_mask,
    padding_mask,
    pairwise,
    raised,
    run,
    tokens,
)  # fmt: skip

import ckptkern
from ckptkern.memory import saved_tensors

L = T
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")


def build(**kwargs):
    heads = kwargs.pop("num_heads", H)
    return both_of(ckptkern.nn.MultiheadAttention, torch.nn.MultiheadAttention, E, heads, **kwargs)


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
    layout, source, widths = case["layout"], case["source"], case["widths"]
    kdim, vdim = {"same": (E, E), "other": (4, 4) if source == "key_is_value" else (4, 6)}[widths]
    ours, theirs = build(
        bias=case["bias"], add_bias_kv=case["bias_kv"], add_zero_attn=case["zero_attn"], kdim=kdim, vdim=vdim,
        batch_first=layout == "batch_first",
    )  # fmt: skip
    for module in (ours, theirs):
        module.train(case["training"])
    inputs = {"query": tokens(layout, L)}
    if source != "self":
        inputs["key"] = tokens(layout, S, kdim)
    if source == "three":
        inputs["value"] = tokens(layout, S, vdim)
    keys = L if source == "self" else S
    batch = 1 if layout == "unbatched" else B
    attn_mask = attention_mask(case["mask"], batch, H, L, keys)
    padding = padding_mask(case["padding"], () if layout == "unbatched" else (B,), keys)

    def call(module, query, key=None, value=None):
        key = query if key is None else key
        return module(
            query, key, key if value is None else value, key_padding_mask=padding, attn_mask=attn_mask,
            need_weights=case["weights"] != "none", average_attn_weights=case["weights"] == "mean",
            is_causal=case["mask"] == "causal",
        )  # fmt: skip

    assert_drop_in(ours, theirs, call, inputs)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_modes_equal_torch(recompute):
    ours, theirs = build(recompute=recompute)
    assert_drop_in(ours, theirs, lambda m, x: m(x, x, x, need_weights=False), {"x": tokens("seq_first", L)})


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_mask_gets_a_gradient(padded, recompute):
    """In one region, unless weights are needed or a hint stands for the mask, which a padding mask overrules."""
    ours, theirs = build(recompute=recompute)
    inputs = {"x": tokens("seq_first", L), "attn_mask": torch.randn(B * H, L, L).double().requires_grad_()}
    padding = torch.zeros(B, L).double().index_fill(1, torch.tensor([L - 1]), -torch.inf) if padded else None

    def call(m, x, attn_mask, need_weights=False, is_causal=False):
        return m(x, x, x, padding, need_weights, attn_mask, is_causal=is_causal)

    y, _ = call(ours, **inputs)
    assert type(y.grad_fn.next_functions[0][0]).__name__ == "AttentionBlockFunctionBackward"
    for options in ({}, {"need_weights": True}, *([{"is_causal": True}] if padded else [])):
        assert_drop_in(ours, theirs, lambda m, x, attn_mask: call(m, x, attn_mask, **options), inputs)  # noqa: B023
    with torch.no_grad():
        x, attn_mask = inputs.values()
        torch.testing.assert_close(
            ours(x, x, x, need_weights=False, attn_mask=attn_mask),
            theirs(x, x, x, need_weights=False, attn_mask=attn_mask),
        )


def test_positional_arguments_are_torchs():
    args = (E, H, 0.25, False, True, True, 4, 6, True, "cpu", torch.float64)
    ours, theirs = ckptkern.nn.MultiheadAttention(*args), torch.nn.MultiheadAttention(*args)
    names = [
        "embed_dim",
        "num_heads",
        "dropout",
        "in_proj_bias",
        "add_zero_attn",
        "kdim",
        "vdim",
        "batch_first",
        "head_dim",
    ]
    assert [getattr(ours, n) for n in names] == [getattr(theirs, n) for n in names]
    assert ours.q_proj_weight.dtype == torch.float64
    with pytest.raises(ValueError, match="recompute must be one of"):
        ckptkern.nn.MultiheadAttention(E, H, recompute="all")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m, x: m(x[0, 0], x[0, 0], x[0, 0]),
        lambda m, x: m(x[None], x[None], x[None]),
        lambda m, x: m(x, x[0], x[0]),
        lambda m, x: m(x[:, 0], x, x),
        lambda m, x: m(x[..., :-1], x[..., :-1], x[..., :-1]),
        lambda m, x: m(x, x[..., :-1], x[..., :-1]),
        lambda m, x: m(x, x[:-1], x),
        lambda m, x: m(x, x[:, :1], x[:, :1]),
        lambda m, x: m(x, x, x, is_causal=True),
        lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(B, L + 1, dtype=torch.bool)),
        lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(L, B, dtype=torch.bool)),
        lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(L, dtype=torch.bool)),
        lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(B, L, dtype=torch.int64)),
        lambda m, x: m(x, x, x, attn_mask=torch.zeros(L, L, dtype=torch.int64)),
        lambda m, x: m(x, x, x, attn_mask=torch.zeros(L, L + 1)),
        lambda m, x: m(x, x, x, attn_mask=torch.zeros(B, L, L)),
        lambda m, x: m(x, x, x, attn_mask=torch.zeros(B, H, L, L)),
        lambda m, x: m(x[:, 0], x[:, 0], x[:, 0], attn_mask=torch.zeros(B * H, L, L)),
        lambda m, x: m(x[:, 0], x[:, 0], x[:, 0], key_padding_mask=torch.zeros(1, L, dtype=torch.bool)),
        lambda m, x: m(x.float(), x.float(), x.float()),
        lambda m, x: m(x, x.float(), x.float()),
        lambda m, x: m(x.long(), x.long(), x.long()),
        lambda m, x: m(x.to("meta"), x.to("meta"), x.to("meta")),
        lambda m, x: m(*[x.to_sparse()] * 3),
        lambda m, x: m(None, None, None),
        lambda m, x: m(None, x, x),
        lambda m, x: m(x, None, x),
        lambda m, x: m(x, x, "value"),
        lambda m, x: m(x, x, x, attn_mask=[1]),
        lambda m, x: m(x, x, x, attn_mask="causal"),
        lambda m, x: m(x, x, x, key_padding_mask=[1]),
        lambda m, x: m(x, x, x, attn_mask=torch.zeros(L, L, dtype=torch.float16)),
        lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(B, L, dtype=torch.float16)),
        lambda m, x: m(x, x[:-1], x[:-1], attn_mask=torch.zeros(L, L - 1, dtype=torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_wrong_input_raises_torchs_error(wrong, need_weights):
    x = tokens("seq_first", L, grad=False)
    ours, theirs = (functools.partial(module, need_weights=need_weights) for module in build())
    expected = raised(lambda: wrong(theirs, x))
    assert raised(lambda: wrong(ours, x)) == expected is not None


@pytest.mark.sampled
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", ["attn_mask", "key_padding_mask", "both", "hint"])
@pytest.mark.parametrize("case", ["float32", "float64", "bfloat16", "autocast", "autocast of float64"])
def test_torch_says_which_dtypes_of_masks_go_together(case, masked, need_weights):
    dtypes = {"autocast": torch.float32, "autocast of float64": torch.float64}
    dtype = dtypes[case] if case in dtypes else getattr(torch, case)
    ours, theirs = (module.to(dtype) for module in build())
    x = tokens("seq_first", L, grad=False).to(dtype)

    def call(module, mask, padding):
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=case in dtypes):
                y = module(x, x, x, padding, need_weights, mask, is_causal=masked == "hint")[0]
        except RuntimeError as error:
            return str(error)
        return y.dtype

    kinds, results = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64), set()
    for one, other in itertools.product(kinds, kinds if masked == "both" else kinds[:1]):
        mask, padding = causal_mask(L, L), torch.zeros(B, L)
        mask = (mask < 0 if one == torch.bool else mask.to(one)) if masked != "key_padding_mask" else None
        padding = padding.to(other if masked == "both" else one) if masked in ("both", "key_padding_mask") else None
        wanted = call(theirs, mask, padding)
        assert call(ours, mask, padding) == wanted, (one, other)
        results.add(type(wanted))
    assert len(results) == (1 if masked == "hint" and not need_weights else 2)  # some are taken, some are not


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("wide", ["query", "keys", "all", "parameters"])
def test_autocast_raises_torchs_error_beside_float64(wide, need_weights):
    """Autocast casts float64 neither among inputs nor among parameters."""
    x = torch.randn(L, B, E)
    query, keys = (x.double() if wide in (name, "all") else x for name in ("query", "keys"))
    errors = []
    for module in build():
        module.to(torch.float64 if wide == "parameters" else torch.float32)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="same dtype") as raised:
            module(query, query if wide == "all" else keys, query if wide == "all" else keys, need_weights=need_weights)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("layout", ["unbatched", "seq_first", "batch_first"])
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("need_weights", [True, False])
def test_no_keys(need_weights, extra, padding, layout):
    """Without need_weights torch cannot form the mask's shape; the expected result is that without a mask."""
    ours, theirs = build(batch_first=layout == "batch_first", add_bias_kv=extra, add_zero_attn=extra)
    lead = () if layout == "unbatched" else (B,)
    dtypes = {"bool": torch.bool, "float": torch.float64}
    mask = None if padding == "none" else torch.zeros(*lead, 0, dtype=dtypes[padding])

    def call(module, query, keys):
        padding = mask if module is ours or need_weights or extra else None
        return module(query, keys, keys, padding, need_weights=need_weights)

    assert_drop_in(ours, theirs, call, {"query": tokens(layout, L), "keys": tokens(layout, 0)})


def test_wrong_constructor_arguments_raise_torchs_error():
    for args in ((12, 5), (0, 1), (12, 0), (12, -3), (None, 3), (12, "3")):
        theirs, ours = (raised(lambda nn=nn: nn.MultiheadAttention(*args)) for nn in (torch.nn, ckptkern.nn))  # noqa: B023
        assert ours == theirs is not None


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("source", ["self", "cross"])
def test_a_query_that_sees_nothing_gives_zeros(source, need_weights):
    ours, _ = build()
    x = tokens("seq_first", L)
    keys = x if source == "self" else tokens("seq_first", L)
    hidden = bool_mask(L, L)
    hidden[2] = True
    y, weights = ours(x, keys, keys, attn_mask=hidden, need_weights=need_weights)
    assert torch.equal(y[2], ours.out_proj.bias.expand(B, E))
    if need_weights:
        assert weights[:, 2].abs().sum() == 0
        assert weights[:, 1].sum(-1).sub(1).abs().max() < 1e-12
        y = y.sum() + weights.square().sum()
    grads = torch.autograd.grad(y.sum(), [x, keys, *ours.parameters()], allow_unused=True)
    assert all(grad.isfinite().all() for grad in grads if grad is not None)
    assert grads[0].abs().sum() > 0
    if source == "cross":
        assert grads[0][2].abs().sum() == 0


def test_dropout_acts_on_the_weights():
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
    v = torch.nn.functional.linear(x, ours.in_proj_weight[2 * E :], ours.in_proj_bias[2 * E :])
    o = torch.einsum("bhls,sbhd->lbhd", weights, v.unflatten(-1, (H, E // H))).flatten(2)
    torch.testing.assert_close(y, ours.out_proj(o))


def test_the_weights_are_computed_once():
    """The output is computed from the returned weights: no fused core runs as well, and no second copy is saved."""
    ours, _ = build()
    x = tokens("seq_first", L)
    with saved_tensors(exclude=ours.parameters()) as saved:
        ours(x, x, x)
    assert saved.bytes == 8 * B * L * (E + 3 * E + E + H * L), saved.tensors
    with torch.profiler.profile() as profile:
        ours(x, x, x)
    names = {event.key for event in profile.key_averages()}
    assert "ckptkern::linear_act_fwd" in names
    assert "ckptkern::attention_fwd" not in names


def test_from_torch_shares_the_parameters():
    theirs = torch.nn.MultiheadAttention(E, H, dropout=0.5).eval()
    ours = ckptkern.nn.MultiheadAttention.from_torch(theirs, "full")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(a is b for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert (ours.dropout, ours.training, ours.recompute) == (0.5, False, "full")
    with pytest.raises(ValueError, match="recompute must be one of"):
        ckptkern.nn.MultiheadAttention.from_torch(theirs, "all")
    for wrong, name in ((torch.nn.Linear(16, 4), "Linear"), (None, "NoneType")):
        with pytest.raises(
            TypeError, match=f"^MultiheadAttention: module must be a torch.nn.MultiheadAttention, not {name}$"
        ):
            ckptkern.nn.MultiheadAttention.from_torch(wrong)


@pytest.mark.parametrize(
    ("backend", "source", "weights"),
    [
        *itertools.product(["aot_eager"], ["self", "cross"], ["none", "mean", "heads"]),
        ("inductor", "cross", "mean"),
    ],
)
def test_compiles_without_a_graph_break(backend, source, weights):
    torch._dynamo.reset()
    ours, _ = build()
    inputs = {"query": tokens("seq_first", L)} | ({"key": tokens("seq_first", S)} if source == "cross" else {})
    masks = {"attn_mask": float_mask(L, S if source == "cross" else L)}
    masks["key_padding_mask"] = padding_mask("bool", (B,), masks["attn_mask"].shape[1])

    def call(module, query, key=None):
        key = query if key is None else key
        return module(query, key, key, **masks, need_weights=weights != "none", average_attn_weights=weights == "mean")

    compiled = torch.compile(functools.partial(call, ours), backend=backend, fullgraph=True)
    mine, eager = run(ours, lambda m, **inputs: compiled(**inputs), inputs), run(ours, call, inputs)
    assert list(mine) == list(eager)
    for name, wanted in eager.items():
        torch.testing.assert_close(mine[name], wanted, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_compiles_under_autocast():
    """The weights are computed in the dtype of the scores, in a graph too."""
    torch._dynamo.reset()
    ours = ckptkern.nn.MultiheadAttention(E, H)
    compiled, x = torch.compile(ours, backend="aot_eager", fullgraph=True), torch.randn(L, B, E, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        mine, eager = (run(ours, lambda m, x, call=call: call(x, x, x), {"x": x}) for call in (compiled, ours))
    for name, wanted in eager.items():
        assert mine[name].dtype == wanted.dtype, name
        torch.testing.assert_close(mine[name], wanted)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("source", ["self", "key_is_value", "three"])
def test_a_bias_of_another_dtype(source, need_weights):
    """With batch_first, torch's F.linear sees an input that is not contiguous and adds a bias of any dtype separately."""
    ours, theirs = build(batch_first=True)
    for module in (ours, theirs):
        module.in_proj_bias = torch.nn.Parameter(theirs.in_proj_bias.detach().float())
    x, y, z = (tokens("batch_first", L) for _ in range(3))
    three = {"self": (x, x, x), "key_is_value": (x, y, y), "three": (x, y, z)}[source]
    inputs = {f"input{i}": t for i, t in enumerate(dict.fromkeys(three))}
    names = [next(name for name, one in inputs.items() if one is t) for t in three]

    def call(module, **given):
        return module(*(given[name] for name in names), need_weights=need_weights)

    mine, reference = run(ours, call, inputs), run(theirs, call, inputs)
    for name, wanted in reference.items():
        torch.testing.assert_close(mine[name], wanted, rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")
    assert mine["in_proj_bias"].dtype == torch.float32
    assert mine["output 0"].dtype == torch.float64
