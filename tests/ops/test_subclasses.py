"""Tensor subclasses as arguments: how an op takes each, and that it never misreads a subclass's memory."""

import logging

import pytest
import torch
from support.cases import assert_same, assert_same_within_rounding, gradients
from support.wrappers import Int8Weight, Logged, Named
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import bias

import ckptkern
from ckptkern import subclasses
from ckptkern.memory import saved_tensors
from ckptkern.ops.dispatch import choices as _choices

pytestmark = pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")


# -- CausalBias --------------------------------------------------------------------------------------------------------

LENGTHS = [(lengths, "eager") for lengths in ((4, 6), (6, 4), (5, 5), (1, 7), (40, 70), (70, 40))]
# within a tile, several tiles, and a tile of rows that see nothing
LENGTHS += [(lengths, "triton") for lengths in ((6, 4), (40, 70), (70, 30))]


def heads(Sq: int, Sk: int, H_kv: int = 2, D: int = 8) -> dict[str, Tensor]:
    return {
        name: torch.randn(2, H, S, D).requires_grad_()
        for name, H, S in (("q", 2, Sq), ("k", H_kv, Sk), ("v", H_kv, Sk))
    }


def attention(**options):
    def run(t):
        torch.manual_seed(1)
        return ckptkern.scaled_dot_product_attention(t["q"], t["k"], t["v"], **options)

    return run


def torchs(**options):
    return lambda t: F.scaled_dot_product_attention(t["q"], t["k"], t["v"], **options)


@pytest.mark.parametrize("make_bias", [bias.causal_upper_left, bias.causal_lower_right])
@pytest.mark.parametrize(("lengths", "backend"), LENGTHS, ids=str)
def test_a_causal_bias_is_the_mask_that_it_stands_for(lengths, make_bias, backend):
    """Values and gradients; rows that see nothing are zeros, and the result is a plain tensor."""
    mask, tensors = make_bias(*lengths), heads(*lengths)
    expected = gradients(torchs(attn_mask=mask._materialize()), tensors)
    with ckptkern.backend(backend):
        made = gradients(attention(attn_mask=mask), tensors)
        same = gradients(attention(attn_mask=mask._materialize()), tensors)
    assert type(made["y"]) is Tensor
    assert_same_within_rounding(made, expected)
    assert_same_within_rounding(made, same)
    if lengths == (6, 4) and make_bias is bias.causal_lower_right:
        assert not made["y"][..., :2, :].any()
        assert not made["q"][..., :2, :].any()


OPTIONS = {
    "dropout": {"dropout_p": 0.4},
    "grouped heads": {"enable_gqa": True},
    "a window": {"window_size": (2, -1)},
    "a window's right side": {"window_size": (-1, 1)},
    "a scale": {"scale": -0.3},
}


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_causal_bias_beside_other_options(options, backend):
    mask, tensors = bias.causal_lower_right(4, 6), heads(4, 6, H_kv=1 if "enable_gqa" in options else 2)
    with ckptkern.backend(backend):
        expected = gradients(attention(attn_mask=mask._materialize(), **options), tensors)
        assert_same_within_rounding(gradients(attention(attn_mask=mask, **options), tensors), expected)


@pytest.mark.parametrize("lengths", [(4, 6), (6, 4)], ids=str)
@pytest.mark.parametrize("dims", [2, 3, 5])
def test_a_causal_bias_with_any_batch_shape(dims, lengths):
    mask = bias.causal_lower_right(*lengths)
    lead = (2, 1, 3)[: dims - 2]
    rows = {"q": lengths[0], "k": lengths[1], "v": lengths[1]}
    t = {name: torch.randn(*lead, S, 8).requires_grad_() for name, S in rows.items()}
    assert_same_within_rounding(
        gradients(attention(attn_mask=mask), t), gradients(torchs(attn_mask=mask._materialize()), t)
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_causal_bias_compiled(dynamic):
    compiled = torch.compile(attention_of_bias, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    upper_left, lower_right = bias.causal_upper_left, bias.causal_lower_right
    masks = lower_right(4, 6), upper_left(6, 4), lower_right(5, 5), lower_right(6, 4), upper_left(4, 6)
    for mask in masks if dynamic else masks[:2]:  # without symbols every length compiles anew
        tensors = heads(mask.seq_len_q, mask.seq_len_kv)
        assert_same_within_rounding(
            gradients(lambda t, mask=mask: compiled(t["q"], t["k"], t["v"], mask), tensors),
            gradients(torchs(attn_mask=mask._materialize()), tensors),
        )


def attention_of_bias(q, k, v, mask):
    return ckptkern.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_a_causal_bias_saves_no_mask():
    tensors = heads(64, 64)
    saved = []
    for options in ({"is_causal": True}, {"attn_mask": bias.causal_lower_right(64, 64)}):
        with saved_tensors() as found:
            attention(**options)(tensors)
        saved.append(found.bytes)
    assert saved[0] == saved[1]


def test_what_torch_accepts_of_other_lengths():
    """An upper-left or a square bias is is_causal at any length, as in torch; another lower-right one is refused."""
    tensors = heads(4, 6)
    for mask in (bias.causal_upper_left(9, 9), bias.causal_upper_left(3, 8), bias.causal_lower_right(8, 8)):
        expected = gradients(torchs(attn_mask=mask), tensors)
        assert_same_within_rounding(gradients(attention(attn_mask=mask), tensors), expected)
    with pytest.raises(ValueError, match=r"causal_lower_right\(4, 7\), but query has 4 rows and key 6"):
        attention(attn_mask=bias.causal_lower_right(4, 7))(tensors)


def test_a_causal_bias_has_one_place():
    mask, tensors = bias.causal_lower_right(4, 6), heads(4, 6)
    for run in (torchs, attention):
        with pytest.raises(ValueError, match="causal=True"):
            run(attn_mask=mask, is_causal=True)(tensors)
    with pytest.raises(RuntimeError, match="is_causal"):
        attention(attn_mask=torch.zeros(4, 6), is_causal=True)(tensors)
    with pytest.raises(TypeError, match="result of an operation on a CausalBias"):
        attention(attn_mask=mask[0])(tensors)
    x, weight = torch.randn(3, 6), torch.randn(5, 6)
    with pytest.raises(TypeError, match="linear_act: a CausalBias does not hold numbers"):
        ckptkern.linear_act(mask, weight)
    with pytest.raises(TypeError, match="mlp: a CausalBias does not hold numbers"):
        ckptkern.mlp(x, weight, None, bias.causal_lower_right(4, 5)[0], None)
    with pytest.raises(TypeError, match="attention_block: a CausalBias does not hold numbers"):
        ckptkern.attention_block(
            torch.randn(2, 4, 6), torch.randn(18, 6), None, torch.randn(6, 6), None, 2,
            key_padding_mask=bias.causal_upper_left(2, 4)[0],
        )  # fmt: skip


@pytest.mark.parametrize("mask_is_exclusion", [False, True])
@pytest.mark.parametrize("make_bias", [bias.causal_upper_left, bias.causal_lower_right])
def test_a_causal_bias_of_a_block_is_is_causal(make_bias, mask_is_exclusion):
    t = {"x": (2, 5, 6), "qkv": (18, 6), "out": (6, 6)}
    t = {name: torch.randn(shape).requires_grad_() for name, shape in t.items()}

    def block(t, **options):
        return ckptkern.attention_block(t["x"], t["qkv"], None, t["out"], None, 2, **options)

    made = gradients(lambda t: block(t, attn_mask=make_bias(5, 5), mask_is_exclusion=mask_is_exclusion), t)
    assert_same(made, gradients(lambda t: block(t, is_causal=True), t))
    with pytest.raises(ValueError, match=r"causal_lower_right\(5, 6\), but query has 5 rows and key 5"):
        block(t, attn_mask=bias.causal_lower_right(5, 6))


# -- operations of their own -------------------------------------------------------------------------------------------


def weight(*shape) -> Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


def calls(make_weight):
    """op: (x, a weight in every place) -> y, with dropout where there is some."""
    w = [make_weight(weight(*shape)) for shape in ((10, 6), (10, 6), (6, 10), (18, 6), (6, 6))]
    latents = [make_weight(weight(*shape)) for shape in ((8, 6), (7, 6), (10, 5), (6, 6))]
    norm = {"norm": "rms", "norm_weight": torch.ones(6)}
    attention_arguments = {"qkv_weight": w[3], "qkv_bias": None, "out_weight": w[4], "out_bias": None, "num_heads": 2}
    mlp_arguments = {
        "up_weight": w[0],
        "up_bias": None,
        "down_weight": w[2],
        "down_bias": None,
        "dropout_p": 0.3,
        **norm,
    }
    return {
        "linear_act": lambda x: ckptkern.linear_act(x, w[0], torch.ones(10), "gelu"),
        "linear_stack": lambda x: ckptkern.linear_stack(x, [w[0], w[2]]),
        "mlp": lambda x: ckptkern.mlp(x, w[0], torch.ones(10), w[2], None, dropout_p=0.3),
        "gated_mlp": lambda x: ckptkern.gated_mlp(x, w[0], w[1], w[2], dropout_p=0.3),
        "mlp_block": lambda x: ckptkern.mlp_block(x, **mlp_arguments, resid_dropout_p=0.3),
        "attention_block": lambda x: ckptkern.attention_block(
            x, **attention_arguments, dropout_p=0.3, is_causal=True, alibi_slopes=torch.ones(2), **norm
        ),
        "latent_attention_block": lambda x: ckptkern.latent_attention_block(
            x, *latents, 2, kv_a_norm_weight=torch.ones(5), rotary=10.0, dropout_p=0.3, is_causal=True, **norm
        ),
        "transformer_layer": lambda x: ckptkern.transformer_layer(x, attention_arguments, mlp_arguments),
    }


OPS = list(calls(lambda w: w))


@pytest.mark.parametrize("op", OPS)
def test_a_quantized_weight_is_composed(op):
    """The same values, gradients and dropout masks as the op has with the dense weight."""
    torch.manual_seed(0)
    quantized = calls(Int8Weight.of)[op]
    torch.manual_seed(0)
    dense = calls(lambda w: Int8Weight.of(w).dense())[op]
    x = {"x": torch.randn(2, 4, 6).requires_grad_()}

    def seeded(call):
        def run(t):
            torch.manual_seed(3)
            return call(t["x"])

        return run

    assert_same_within_rounding(gradients(seeded(quantized), x), gradients(seeded(dense), x))


@pytest.mark.parametrize("op", ["linear_act", "linear_stack"])
def test_a_quantized_weight_compiled(op):
    call = calls(Int8Weight.of)[op]
    x = {"x": torch.randn(2, 4, 6).requires_grad_()}
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert_same_within_rounding(gradients(lambda t: compiled(t["x"]), x), gradients(lambda t: call(t["x"]), x))


def test_composed_is_said_once_and_refused_of_the_kernels(caplog):
    _choices._log_once.cache_clear()
    call = calls(Int8Weight.of)["mlp"]
    with caplog.at_level(logging.INFO, "ckptkern"):
        call(torch.randn(4, 6))
        call(torch.randn(4, 6))
    assert sum("Int8Weight has operations of its own" in record.message for record in caplog.records) == 1
    with ckptkern.backend("triton"), pytest.raises(RuntimeError, match=r"mlp: .* Int8Weight has operations of its own"):
        call(torch.randn(4, 6))


def test_composed_under_autocast_has_the_ops_dtypes():
    torch.manual_seed(0)
    x, (w1, w2) = torch.randn(4, 6), (weight(10, 6), weight(6, 10))
    with torch.autocast("cpu", torch.bfloat16):
        unfused = ckptkern.mlp(x, w1, None, w2, None)
        logged = ckptkern.mlp(x.as_subclass(Logged), w1, None, w2, None)
    assert type(logged) is Tensor
    assert unfused.dtype == logged.dtype == torch.bfloat16
    torch.testing.assert_close(logged, unfused)


@pytest.mark.parametrize("op", OPS)
def test_a_subclass_without_operations_is_memory(op):
    """The op itself runs, and the result is of the class that torch's operations give it."""
    call = calls(lambda w: w)[op]
    x = torch.randn(2, 4, 6)
    torch.manual_seed(3)
    expected = call(x)
    torch.manual_seed(3)
    y = call(x.as_subclass(Named).requires_grad_())
    assert type(y) is Named
    assert y.grad_fn.name().endswith("FunctionBackward")
    assert torch.equal(y.as_subclass(Tensor), expected)
    own = type("Own", (torch.nn.Parameter,), {})
    assert type(calls(own)[op](x)) is Tensor


def test_who_has_operations_of_its_own():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.randn(3)
        assert subclasses.own_dispatch((fake, torch.nn.Parameter(fake))) is None
    unfused = torch.randn(3)
    own = type("Own", (torch.nn.Parameter,), {})
    assert (
        subclasses.own_dispatch((unfused, None, torch.nn.Parameter(unfused), unfused.as_subclass(Named), own(unfused)))
        is None
    )
    assert subclasses.own_dispatch((unfused, unfused.as_subclass(Logged))) is Logged
    assert subclasses.own_dispatch([bias.causal_upper_left(2, 2)]) is bias.CausalBias


def test_attention_of_a_subclass_is_torchs():
    t = heads(4, 6)
    q = t["q"].as_subclass(Logged)
    mask = torch.rand(4, 6) > 0.3
    y = ckptkern.scaled_dot_product_attention(q, t["k"], t["v"], mask)
    torch.testing.assert_close(y, F.scaled_dot_product_attention(t["q"], t["k"], t["v"], mask))
    with pytest.raises(TypeError, match="window_size, alibi_slopes, softcap and sinks do not go with a Logged"):
        ckptkern.scaled_dot_product_attention(q, t["k"], t["v"], window_size=(1, 1))
    with pytest.raises(TypeError, match="and sinks do not go with a Logged"):
        ckptkern.scaled_dot_product_attention(q, t["k"], t["v"], sinks=torch.zeros(q.shape[1]))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_attention_of_a_subclass_takes_a_window_that_torch_has(window):
    """No bound at all, and is_causal, as a decoder layer passes them; torch has no other."""
    q = torch.randn(2, 3, 5, 4)
    ours = ckptkern.scaled_dot_product_attention(q.as_subclass(Logged), q, q, window_size=window)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=window == (-1, 0))
    torch.testing.assert_close(ours.as_subclass(Tensor), expected)
    with pytest.raises(TypeError, match="window_size, alibi_slopes, softcap and sinks do not go with a Logged"):
        ckptkern.scaled_dot_product_attention(q.as_subclass(Logged), q, q, window_size=(2, 0))


def test_dropout_of_a_subclass_is_torchs():
    x = torch.ones(4, 1000).as_subclass(Logged)
    y = ckptkern.dropout(x, 0.25)
    assert 0.6 < (y != 0).float().mean() < 0.9


# -- jagged nested tensors ---------------------------------------------------------------------------------------------


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(5, 6)], layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("op", ["linear_act", "linear_stack", "mlp", "gated_mlp"])
def test_jagged_rows(op):
    w = [weight(*shape).requires_grad_() for shape in ((10, 6), (10, 6), (6, 10))]
    call = {
        "linear_act": lambda x: ckptkern.linear_act(x, w[0]),
        "linear_stack": lambda x: ckptkern.linear_stack(x, [w[0], w[2]]),
        "mlp": lambda x: ckptkern.mlp(x, w[0], None, w[2], None),
        "gated_mlp": lambda x: ckptkern.gated_mlp(x, *w),
    }[op]
    x = jagged()
    made, rows = call(x), call(x.values().detach())
    torch.testing.assert_close(made.values(), rows)
    made.values().sum().backward()
    grad = w[0].grad.clone()
    w[0].grad = None
    rows.sum().backward()
    torch.testing.assert_close(grad, w[0].grad)


def test_jagged_attention_and_dropout():
    x = jagged()
    assert ckptkern.dropout(x, 0.5).shape == x.shape
    q = x.unflatten(-1, (2, 3)).transpose(1, 2)
    y = ckptkern.scaled_dot_product_attention(q, q, q)
    for one, row in zip(y.unbind(), x.unbind(), strict=True):
        h = row.unflatten(-1, (2, 3)).transpose(0, 1)
        torch.testing.assert_close(one, F.scaled_dot_product_attention(h, h, h))


def test_jagged_where_no_op_takes_it():
    w = weight(6, 6)
    with pytest.raises(TypeError, match="attention_block: input must be a dense tensor, not nested"):
        ckptkern.attention_block(jagged(), weight(18, 6), None, w, None, 2)
    with pytest.raises(TypeError, match="mlp_block: input must be a dense tensor, not nested"):
        ckptkern.mlp_block(jagged(), w, None, w, None)
