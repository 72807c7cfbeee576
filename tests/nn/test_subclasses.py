"""Modules whose weights, inputs or masks are tensor subclasses."""

import copy
import logging

import pytest
import torch
from support.cases import assert_same_within_rounding, gradients
from support.wrappers import Int8Weight
from torch.nn.attention import bias

from ckptkern import nn
from ckptkern.ops.dispatch import choices as _choices

pytestmark = pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")

MODULES = {
    "Linear": lambda: nn.Linear(6, 8, activation="gelu"),
    "LinearStack": lambda: nn.LinearStack([6, 8, 6]),
    "MLP": lambda: nn.MLP(6),
    "GatedMLP": lambda: nn.GatedMLP(6, 10),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(6, 2, 12, 0.0, batch_first=True),
    "LlamaAttention": lambda: nn.LlamaAttention(8, 2),
    "LlamaDecoderLayer": lambda: nn.LlamaDecoderLayer(8, 2),
}


def quantized(module: torch.nn.Module, dense: bool) -> torch.nn.Module:
    """Makes every nn.Linear's weight an Int8Weight, as torchao does, or the dense weight that this stands for."""
    for one in module.modules():
        if isinstance(one, torch.nn.Linear):
            weight = Int8Weight.of(one.weight)
            one.weight = torch.nn.Parameter(weight.dense() if dense else weight, requires_grad=False)
    return module


def run(module, name):
    def call(t):
        return module(t["x"], t["x"]) if "DecoderLayer" in name and "Llama" not in name else module(t["x"])

    return call


@pytest.mark.parametrize("name", MODULES)
def test_quantized_weights_in_torchs_linear(name, caplog):
    _choices._log_once.cache_clear()
    module = MODULES[name]()
    dense, module = quantized(copy.deepcopy(module), True), quantized(module, False)
    x = {"x": torch.randn(2, 4, 8 if "Llama" in name else 6).requires_grad_()}
    with caplog.at_level(logging.INFO, "ckptkern"):
        made = gradients(run(module, name), x)
    assert_same_within_rounding(made, gradients(run(dense, name), x))
    assert any("Int8Weight has operations of its own" in record.message for record in caplog.records)


# -- CausalBias --------------------------------------------------------------------------------------------------------

BIASES = {"upper-left": bias.causal_upper_left, "lower-right": bias.causal_lower_right}


@pytest.mark.parametrize("make_bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("B", "batch_first", "S"), [(3, True, 4), (3, False, 4), (1, True, 4), (3, True, 6)])
def test_a_causal_bias_in_attention(B, batch_first, S, padded, need_weights, make_bias):
    """With one batch of two heads, torch's own module takes the bias for a mask [B H, L, S] and reads its memory."""
    module = nn.MultiheadAttention(6, 2, batch_first=batch_first)
    mask, memory = make_bias(4, S), torch.randn(B, S, 6)
    x = {"x": torch.randn(B, 4, 6).requires_grad_()}
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, -1] = padded

    def attend(attn_mask):
        def call(t):
            q = t["x"] if batch_first else t["x"].transpose(0, 1)
            k = q if S == 4 else memory
            return module(q, k, k, padding if padded else None, need_weights, attn_mask)[0]

        return call

    made = gradients(attend(mask), x)
    assert type(made["y"]) is torch.Tensor
    assert_same_within_rounding(made, gradients(attend(~mask._materialize()), x))


@pytest.mark.parametrize("make_bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_causal_bias_in_transformer_layers(batch_first, training, make_bias):
    options = {"dropout": 0.0, "batch_first": batch_first}
    encoder = nn.TransformerEncoderLayer(6, 2, 12, **options).train(training)
    decoder = nn.TransformerDecoderLayer(6, 2, 12, **options).train(training)
    stack = torch.nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False).train(training)
    memory = torch.randn((3, 6, 6) if batch_first else (6, 3, 6))
    x = {"x": torch.randn((3, 4, 6) if batch_first else (4, 3, 6)).requires_grad_()}
    square, wide = make_bias(4, 4), make_bias(4, 6)
    masks = [square, wide], [~mask._materialize() for mask in (square, wide)]
    for call in (
        lambda t, square, wide: encoder(t["x"], square),
        lambda t, square, wide: stack(t["x"], square),
        lambda t, square, wide: decoder(t["x"], memory, square, wide),
    ):
        with_bias, with_mask = (gradients(lambda t, m=m, call=call: call(t, *m), x) for m in masks)
        assert_same_within_rounding(with_bias, with_mask)


@pytest.mark.parametrize("make_bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("composed", [False, True])
def test_a_causal_bias_in_llama(composed, make_bias):
    for module in (nn.LlamaAttention(8, 2), nn.LlamaDecoderLayer(8, 2)):
        if composed:
            quantized(module, False)
        x = {"x": torch.randn(2, 5, 8).requires_grad_()}
        for is_causal in (False, True):
            made = gradients(lambda t, m=module, c=is_causal: m(t["x"], attn_mask=make_bias(5, 5), is_causal=c), x)
            assert_same_within_rounding(made, gradients(lambda t, m=module: m(t["x"]), x))


# -- jagged nested tensors, which torch's modules take -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["Linear", "LinearStack", "MLP", "GatedMLP", "Dropout"])
def test_jagged_rows(name):
    module = nn.Dropout(0.0) if name == "Dropout" else MODULES[name]()
    x = torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(5, 6)], layout=torch.jagged)
    torch.testing.assert_close(module(x).values(), module(x.values()))


# -- DTensor -----------------------------------------------------------------------------------------------------------


def _check_sharded(rank: int) -> None:
    """Modules whose weights are sharded over two processes give what the whole ones give."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    import ckptkern

    mesh = init_device_mesh("cpu", (2,))
    for make in (lambda: nn.Linear(6, 8, activation="gelu"), lambda: nn.MLP(6), lambda: nn.GatedMLP(6, 10),
                 lambda: nn.LinearStack([6, 8, 6])):  # fmt: skip
        torch.manual_seed(0)
        module = make()
        x = torch.randn(4, 6)
        expected = module(x)
        expected.square().sum().backward()
        gradients = [p.grad for p in module.parameters()]
        for one in module.modules():
            for name, parameter in one._parameters.items():
                if parameter is not None:
                    one._parameters[name] = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        y = module(distribute_tensor(x, mesh, [Replicate()]))
        assert type(y) is DTensor
        torch.testing.assert_close(y.full_tensor(), expected)
        y.square().sum().backward()
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)

    # the op itself, as module hooks or a functional call reach it, and its dropout
    w1, w2 = torch.randn(8, 6), torch.randn(6, 8)
    sharded = [distribute_tensor(w, mesh, [Shard(0)]) for w in (w1, w2)]
    y = ckptkern.mlp(distribute_tensor(x, mesh, [Replicate()]), sharded[0], None, sharded[1], None)
    torch.testing.assert_close(y.full_tensor(), ckptkern.mlp(x, w1, None, w2, None))
    dropped = ckptkern.dropout(distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)]), 0.5)
    assert 0.4 < (dropped.full_tensor() != 0).float().mean() < 0.6


def test_sharded_weights_over_two_processes(ranks):
    ranks.run(2, _check_sharded)
