"""Tensor subclasses as arguments: how an op takes each, and that it never misreads a subclass's memory."""

import logging

import pytest
import torch
from support.calls import call_of, dropping
from support.cases import assert_same, assert_same_within_rounding, gradients, seeded
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
    return lambda t: ckptkern.scaled_dot_product_attention(t["q"], t["k"], t["v"], **options)


def torchs(**options):
    return lambda t: F.scaled_dot_product_attention(t["q"], t["k"], t["v"], **options)


@pytest.mark.parametrize("make_bias", [bias.causal_upper_left, bias.causal_lower_right])
@pytest.mark.parametrize(("lengths", "backend"), LENGTHS, ids=str)
def test_a_causal_bias_is_the_mask_that_it_stands_for(lengths, make_bias, backend):
    """Values and gradients; rows that see nothing are zeros, and the result is a plain tensor."""
    mask, tensors = make_bias(*lengths), heads(*lengths)
    with ckptkern.backend(backend):
        made = gradients(attention(attn_mask=mask), tensors)
    assert type(made["y"]) is Tensor
    assert_same_within_rounding(made, gradients(torchs(attn_mask=mask._materialize()), tensors))


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
        found = [gradients(seeded(attention(attn_mask=one, **options)), tensors) for one in (mask, mask._materialize())]
    assert_same_within_rounding(*found)


@pytest.mark.parametrize("lead", [(), (2,), (2, 1, 3)])
def test_a_causal_bias_with_any_batch_shape(lead):
    mask = bias.causal_lower_right(4, 6)
    t = {name: torch.randn(*lead, S, 8).requires_grad_() for name, S in zip("qkv", (4, 6, 6), strict=True)}
    assert_same_within_rounding(*(gradients(attention(attn_mask=one), t) for one in (mask, mask._materialize())))


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_causal_bias_compiled(dynamic):
    """With symbols too, without which every length compiles anew."""
    run = torch.compile(
        lambda t, mask: attention(attn_mask=mask)(t), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    masks = bias.causal_lower_right(4, 6), bias.causal_upper_left(6, 4), bias.causal_lower_right(6, 4)
    for mask in masks if dynamic else masks[:1]:
        tensors = heads(mask.seq_len_q, mask.seq_len_kv)
        ours = gradients(lambda t, mask=mask: run(t, mask), tensors)
        assert_same_within_rounding(ours, gradients(torchs(attn_mask=mask._materialize()), tensors))


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
    with pytest.raises(ValueError, match="causal=True"):
        attention(attn_mask=mask, is_causal=True)(tensors)
    with pytest.raises(TypeError, match="result of an operation on a CausalBias"):
        attention(attn_mask=mask[0])(tensors)
    padding = bias.causal_upper_left(2, 3)[0]
    for call in (call_of("linear_act", x=mask), call_of("attention_block", key_padding_mask=padding)):
        with pytest.raises(TypeError, match=f"{call.op}: a CausalBias does not hold numbers"):
            call(call.make())


@pytest.mark.parametrize("mask_is_exclusion", [False, True])
@pytest.mark.parametrize("make_bias", [bias.causal_upper_left, bias.causal_lower_right])
def test_a_causal_bias_of_a_block_is_is_causal(make_bias, mask_is_exclusion):
    call = call_of("attention_block")
    made = call.with_(attn_mask=make_bias(3, 3), mask_is_exclusion=mask_is_exclusion)
    assert_same(gradients(made, call.make()), gradients(call.with_(is_causal=True), call.make()))
    with pytest.raises(ValueError, match=r"causal_lower_right\(3, 4\), but query has 3 rows and key 3"):
        call.with_(attn_mask=bias.causal_lower_right(3, 4))(call.make())


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
    """The same values, gradients and dropout masks as the op has with the dense weight."""
    call = dropping(name).with_(**({"rotary": 10.0} if "attention" in name else {}))
    kinds = Int8Weight.of, lambda t: Int8Weight.of(t).dense()
    ours, theirs = (gradients(of_x(call, with_weights(call, kind)), {"x": call.make()["x"]}) for kind in kinds)
    assert_same_within_rounding(ours, theirs)


@pytest.mark.parametrize("name", ["linear_act", "linear_stack"])
def test_a_quantized_weight_compiled(name):
    call = call_of(name)
    tensors, x = with_weights(call, Int8Weight.of), {"x": call.make()["x"]}
    run = torch.compile(lambda x: call.unseeded({**tensors, "x": x}), fullgraph=True, backend="eager")
    assert_same_within_rounding(gradients(lambda t: run(t["x"]), x), gradients(of_x(call, tensors), x))


def test_composed_is_said_once_and_refused_of_the_kernels(caplog):
    _choices._log_once.cache_clear()
    call = call_of("mlp")
    tensors = with_weights(call, Int8Weight.of)
    with caplog.at_level(logging.INFO, "ckptkern"):
        call(tensors)
        call(tensors)
    assert sum("Int8Weight has operations of its own" in record.message for record in caplog.records) == 1
    with ckptkern.backend("triton"), pytest.raises(RuntimeError, match=r"mlp: .* Int8Weight has operations of its own"):
        call(tensors)


def test_composed_under_autocast_has_the_ops_dtypes():
    call = call_of("mlp")
    with torch.autocast("cpu", torch.bfloat16):
        plain, logged = (
            call({**call.make(), "x": x}) for x in (call.make()["x"], call.make()["x"].as_subclass(Logged))
        )
    assert type(logged) is Tensor
    assert plain.dtype == logged.dtype == torch.bfloat16
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
    """With no bound of a window at all, and with is_causal, as a decoder layer passes them; torch has no other."""
    t, mask = heads(5, 5), torch.rand(5, 5) > 0.3
    logged = t | {"q": t["q"].as_subclass(Logged)}
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


@pytest.mark.parametrize("name", OPS[:4])
def test_jagged_rows(name):
    call, x, found = call_of(name), jagged(), []
    for rows in (x, x.values().detach()):
        tensors = call.make() | {"x": rows}
        y = call(tensors)
        y = y.values() if y.is_nested else y
        y.sum().backward()
        found.append([y.detach(), *(t.grad for one, t in tensors.items() if one != "x")])
    torch.testing.assert_close(*found)


def test_jagged_attention_and_dropout():
    x = jagged()
    assert ckptkern.dropout(x, 0.5).shape == x.shape
    q = x.unflatten(-1, (2, 3)).transpose(1, 2)
    y = ckptkern.scaled_dot_product_attention(q, q, q)
    for one, row in zip(y.unbind(), x.unbind(), strict=True):
        h = row.unflatten(-1, (2, 3)).transpose(0, 1)
        torch.testing.assert_close(one, F.scaled_dot_product_attention(h, h, h))


def test_jagged_where_no_op_takes_it():
    for name in ("attention_block", "mlp_block"):
        call = call_of(name)
        with pytest.raises(TypeError, match=f"{name}: input must be a dense tensor, not nested"):
            call(call.make() | {"x": jagged()})
