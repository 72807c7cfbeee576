"""Tensor subclasses as arguments: how an op takes each, and that it never misreads a subclass's memory."""

import logging

import pytest
import torch
from support.cases import assert_same, assert_same_within_rounding, gradients, seeded
from support.properties import call_of, dropping
from support.wrappers import Int8Weight, Logged, Named
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import bias

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.ops.dispatch import choices as _choices

pytestmark = pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")


# -- CausalBias --------------------------------------------------------------------------------------------------------

upper_left, lower_right = bias.causal_upper_left, bias.causal_lower_right


def heads(Sq: int, Sk: int, lead: tuple[int, ...] = (2, 2), **options) -> dict[str, Tensor]:
    of_keys = (*lead[:-1], 1) if "enable_gqa" in options else lead
    shapes = dict(query=(*lead, Sq, 8), key=(*of_keys, Sk, 8), value=(*of_keys, Sk, 8))
    return {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}


def attention(**options):
    return lambda t: ckptkern.scaled_dot_product_attention(**t, **options)


def torchs(**options):
    return lambda t: F.scaled_dot_product_attention(**t, **options)


# Within a tile, several tiles, and a tile of rows that see nothing; then options that go with it, and any batch shape.
LIKE_A_MASK = [
    (make, lengths, {}) for make in (upper_left, lower_right) for lengths in ((5, 5), (1, 7), (40, 70), (70, 30))
]
LIKE_A_MASK += [
    (lower_right, (4, 6), options)
    for options in (
        dict(dropout_p=0.4),
        dict(enable_gqa=True),
        dict(window_size=(2, -1)),
        dict(window_size=(-1, 1)),
        dict(scale=-0.3),
        dict(lead=()),
        dict(lead=(2, 1, 3)),
    )
]


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize(("make_bias", "lengths", "options"), LIKE_A_MASK)
def test_a_causal_bias_is_the_mask_that_it_stands_for(make_bias, lengths, options, backend):
    """Values and gradients; rows that see nothing are zeros, and the result is a plain tensor."""
    mask, tensors = make_bias(*lengths), heads(*lengths, **options)
    options = {name: value for name, value in options.items() if name != "lead"}
    with ckptkern.backend(backend):
        actual, expected = (
            gradients(seeded(attention(attn_mask=m, **options)), tensors) for m in (mask, mask._materialize())
        )
    assert type(actual["y"]) is Tensor
    assert_same_within_rounding(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_causal_bias_compiled(dynamic):
    """With symbols too, without which every length compiles anew."""
    run = torch.compile(ckptkern.scaled_dot_product_attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for mask in (lower_right(4, 6), upper_left(6, 4), lower_right(6, 4))[: 3 if dynamic else 1]:
        tensors = heads(mask.seq_len_q, mask.seq_len_kv)
        ours = gradients(lambda t, mask=mask: run(**t, attn_mask=mask), tensors)
        assert_same_within_rounding(ours, gradients(torchs(attn_mask=mask._materialize()), tensors))


def test_a_causal_bias_saves_no_mask():
    saved = []
    for options in ({"is_causal": True}, {"attn_mask": lower_right(64, 64)}):
        with saved_tensors() as tensors:
            attention(**options)(heads(64, 64))
        saved.append(tensors.bytes)
    assert saved[0] == saved[1]


def test_what_torch_accepts_of_other_lengths():
    """An upper-left or a square bias is is_causal at any length, as in torch."""
    tensors = heads(4, 6)
    for mask in (upper_left(9, 9), upper_left(3, 8), lower_right(8, 8)):
        assert_same_within_rounding(*(gradients(of(attn_mask=mask), tensors) for of in (attention, torchs)))


SDPA = "scaled_dot_product_attention"
REFUSED = [
    (SDPA, dict(attn_mask=lower_right(3, 7)), r"causal_lower_right\(3, 7\), but query has 3 rows and key 4"),
    (SDPA, dict(attn_mask=lower_right(3, 4), is_causal=True), "a CausalBias should not be used with is_causal=True"),
    (SDPA, dict(attn_mask=lower_right(3, 4)[0]), "result of an operation on a CausalBias"),
    ("linear_act", dict(x=lower_right(3, 6)), "a CausalBias does not hold numbers"),
    ("attention_block", dict(key_padding_mask=upper_left(2, 3)[0]), "a CausalBias does not hold numbers"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_a_causal_bias_has_one_place(name, arguments, message):
    call = call_of(name, **arguments)
    with pytest.raises((TypeError, ValueError), match=f"{name}: .*{message}"):
        call(call.make())


@pytest.mark.parametrize("mask_is_exclusion", [False, True])
def test_a_causal_bias_of_a_block_is_is_causal(mask_is_exclusion):
    call = call_of("attention_block")
    expected = gradients(call.with_(is_causal=True), call.make())
    for mask in (upper_left(3, 3), lower_right(3, 3)):
        masked = call.with_(attn_mask=mask, mask_is_exclusion=mask_is_exclusion)
        assert_same(gradients(masked, call.make()), expected)


# -- operations of their own -------------------------------------------------------------------------------------------

OPS = ("linear_act", "linear_stack", "mlp", "gated_mlp", "mlp_block", "attention_block", "latent_attention_block")
OPS += ("transformer_layer",)


def with_weights(call, kind) -> dict:
    """Tensors by name, the weights of a kind."""
    return {name: kind(t.detach()) if t.dim() == 2 and "weight" in name else t for name, t in call.make().items()}


def of_x(call, tensors):
    return lambda t: call({**tensors, "x": t["x"]})


@pytest.mark.parametrize("name", OPS)
def test_a_quantized_weight_is_composed(name):
    """The same values, gradients and dropout masks as the op has with the dense weight; compiled, too."""
    call = dropping(name).with_(**({"rotary": 10.0} if "attention" in name else {}))
    quantized, dense = (with_weights(call, kind) for kind in (Int8Weight.of, lambda t: Int8Weight.of(t).dense()))
    x = {"x": call.make()["x"]}
    expected = gradients(of_x(call, dense), x)
    assert_same_within_rounding(gradients(of_x(call, quantized), x), expected)
    if name in ("linear_act", "linear_stack"):
        run = torch.compile(lambda x: call.unseeded({**quantized, "x": x}), fullgraph=True, backend="eager")
        assert_same_within_rounding(gradients(lambda t: run(t["x"]), x), expected)


def test_composed_is_said_once_and_refused_of_the_kernels(caplog):
    _choices.log_once.cache_clear()
    call = call_of("mlp")
    tensors = with_weights(call, Int8Weight.of)
    with caplog.at_level(logging.INFO, "ckptkern"):
        call(tensors)
        call(tensors)
    assert caplog.text.count("Int8Weight has operations of its own") == 1
    with ckptkern.backend("triton"), pytest.raises(RuntimeError, match=r"mlp: .* Int8Weight has operations of its own"):
        call(tensors)


def test_composed_under_autocast_has_the_ops_dtypes():
    call = call_of("mlp")
    t = call.make()
    with torch.autocast("cpu", torch.bfloat16):
        plain, logged = (call(t | {"x": x}) for x in (t["x"], t["x"].as_subclass(Logged)))
    assert type(logged) is Tensor
    assert plain.dtype == torch.bfloat16
    torch.testing.assert_close(logged, plain)


@pytest.mark.parametrize("name", OPS)
def test_a_subclass_without_operations_is_memory(name):
    """The op itself runs, and the result is of the class that torch's operations give it."""
    call = dropping(name)
    tensors = call.make()
    y = call({**tensors, "x": tensors["x"].detach().as_subclass(Named).requires_grad_()})
    assert type(y) is Named
    assert y.grad_fn.name().endswith("FunctionBackward")
    assert torch.equal(y.as_subclass(Tensor), call(tensors))
    assert type(call(with_weights(call, type("Own", (torch.nn.Parameter,), {})))) is Tensor


def test_attention_of_a_subclass_is_torchs():
    """With no bound of a window at all, and with is_causal, as a decoder layer passes them; torch has no other."""
    t, mask = heads(5, 5), torch.rand(5, 5) > 0.3
    logged = t | {"query": t["query"].as_subclass(Logged)}
    for ours, theirs in (
        ({"attn_mask": mask}, {"attn_mask": mask}),
        ({"window_size": (-1, -1)}, {}),
        ({"window_size": (-1, 0)}, {"is_causal": True}),
    ):
        torch.testing.assert_close(attention(**ours)(logged).as_subclass(Tensor), torchs(**theirs)(t))
    for refused in ({"window_size": (1, 1)}, {"window_size": (2, 0)}, {"sinks": torch.zeros(2)}):
        with pytest.raises(TypeError, match="window_size, alibi_slopes, softcap and sinks do not go with a Logged"):
            attention(**refused)(logged)


def test_dropout_of_a_subclass_is_torchs():
    x = torch.ones(4, 1000).as_subclass(Logged)
    y = ckptkern.dropout(x, 0.25)
    assert 0.6 < (y != 0).float().mean() < 0.9


# -- jagged nested tensors ---------------------------------------------------------------------------------------------


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(5, 6)], layout=torch.jagged, requires_grad=True)


def test_jagged():
    """Layers, attention and dropout take it as their dense rows; a block does not."""
    for call in map(call_of, ("linear_act", "linear_stack", "mlp", "gated_mlp")):
        x, ours, theirs = jagged(), call.make(), call.make()
        y, dense = call(ours | {"x": x}).values(), call(theirs | {"x": x.values().detach()})
        torch.testing.assert_close(y, dense)
        y.sum().backward()
        dense.sum().backward()
        torch.testing.assert_close(*([t.grad for t in tensors.values()][1:] for tensors in (ours, theirs)))
    assert ckptkern.dropout(x, 0.5).shape == x.shape
    q = x.unflatten(-1, (2, 3)).transpose(1, 2)
    y = ckptkern.scaled_dot_product_attention(q, q, q)
    for actual, row in zip(y.unbind(), x.unbind(), strict=True):
        h = row.unflatten(-1, (2, 3)).transpose(0, 1)
        torch.testing.assert_close(actual, F.scaled_dot_product_attention(h, h, h))
    for call in map(call_of, ("attention_block", "mlp_block")):
        with pytest.raises(TypeError, match=f"{call.op}: input must be a dense tensor, not nested"):
            call(call.make() | {"x": x})
