"""transformer_layer: parallel sublayers, and a recompute mode for each sublayer."""

import functools
import itertools

import pytest
import torch
from support.calls import call_of
from support.cases import MODES, Watch, assert_same_within_rounding, gradients, output_gradient
from support.oracles import transformer_layer as oracle
from torch import Tensor, nn

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.ops import catalog

NN = ckptkern.nn


def test_parallel_sublayers_run_no_backward_of_each_other():
    """With one weight of the attention sublayer trained, its own matmul is all that backward runs."""
    call = call_of("transformer_layer", "parallel", recompute="none")
    weight = "attention_arguments.out_weight"
    y = call(call.make(frozen=call.make().keys() - {weight}))
    with Watch() as watch:
        y.backward(output_gradient(y))
    assert watch.flops == 2 * y[..., 0].numel() * call.make()[weight].numel()


def test_parallel_sublayers_share_a_norm():
    """Its tensors are given twice: autograd adds what the two sublayers return for them."""
    call = call_of("transformer_layer", "parallel")
    tensors = call.make() | {"gain": torch.randn(6, requires_grad=True)}

    def shared(function):
        def run(t):
            given = {"x": t["x"], "parallel": True}
            for name in ("attention_arguments", "mlp_arguments"):
                own = {one.partition(".")[2]: value for one, value in t.items() if one.startswith(name)}
                given[name] = own | {"norm": "rms", "norm_weight": t["gain"]}
            given["attention_arguments"]["num_heads"] = catalog.Sizes().heads
            return function(**given)

        return run

    assert_same_within_rounding(*(gradients(shared(one), tensors) for one in (ckptkern.transformer_layer, oracle)))


# -- a mode for each sublayer ------------------------------------------------------------------------------------------

B, S, D, HIDDEN = 2, 6, 32, 48
ROW, STATES = B * S * D * 4, 16 * 5  # bytes of x, and of dropout's states at most
LAYERS = {
    "llama": lambda: (NN.LlamaDecoderLayer(D, 4, intermediate_size=HIDDEN, resid_dropout=0.1), ()),
    "encoder": lambda: (NN.TransformerEncoderLayer(D, 4, HIDDEN, 0.1, batch_first=True), ()),
    "decoder": lambda: (
        NN.TransformerDecoderLayer(D, 4, HIDDEN, 0.1, batch_first=True), (torch.randn(B, 3, D, requires_grad=True),)
    ),
}  # fmt: skip


def run(layer: nn.Module, x: Tensor, memory: tuple[Tensor, ...]) -> tuple[list[Tensor], int]:
    """(output and gradients, saved bytes)."""
    torch.manual_seed(1)
    with saved_tensors([*layer.parameters(), *memory]) as saved:
        y = layer(x, *memory)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *memory, *layer.parameters()])], saved.bytes


@pytest.mark.parametrize("name", LAYERS)
def test_each_pair_of_modes_saves_what_its_modes_say(name):
    layer, memory = LAYERS[name]()
    x, found = torch.randn(B, S, D, requires_grad=True), {}
    for mode in (*MODES, *itertools.product(MODES, MODES)):
        layer.recompute = mode
        results, found[mode] = run(layer, x, memory)
        if mode == "none":
            expected = results
        torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    between = 2 * ROW if name == "decoder" else ROW  # what each sublayer is given
    assert found["full", "full"] == pytest.approx(found["full"] + between, abs=STATES)
    assert found["selective", "full"] == pytest.approx(found["selective"] + between, abs=STATES)
    hidden = B * S * HIDDEN * 4
    selective, none = (2, 3) if name == "llama" else (1, 1)  # g, u and h; of ReLU h alone
    for attention in MODES:
        assert found[attention, "selective"] == found[attention, "full"] + selective * hidden
        assert found[attention, "none"] == found[attention, "full"] + none * hidden
    assert found["none"] == pytest.approx(found["none", "none"], abs=STATES)


@pytest.mark.parametrize(("name", "place"), [("llama", "self_attn"), ("llama", "mlp"), ("decoder", "linear1")])
def test_a_pair_where_submodules_are_called(name, place):
    """One sublayer by its modules, which have a hook; the layer is an activation checkpoint then."""
    layer, memory = LAYERS[name]()
    x = torch.randn(B, S, D, requires_grad=True)
    layer.recompute = ("selective", "none")
    expected, _ = run(layer, x, memory)
    layer.get_submodule(place).register_forward_hook(lambda *args: None)
    least = ROW + sum(one.nbytes for one in memory)
    for pair in itertools.product(MODES, MODES):
        layer.recompute = pair
        found, saved = run(layer, x, memory)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert saved > 2 * least if pair == ("none", "none") else saved <= least + STATES, pair


@pytest.mark.parametrize("make", [
    functools.partial(NN.LlamaDecoderLayer, D, 4, intermediate_size=HIDDEN),
    functools.partial(NN.TransformerEncoderLayer, D, 4, HIDDEN),
    functools.partial(NN.TransformerDecoderLayer.from_torch, nn.TransformerDecoderLayer(D, 4, HIDDEN)),
])  # fmt: skip
def test_constructors_take_a_pair(make):
    layer = make(recompute=("selective", "none"))
    assert (layer.recompute, layer.self_attn.recompute) == (("selective", "none"), "selective")
    with pytest.raises(ValueError, match="recompute must be one of 'none', 'selective', 'full'"):
        make(recompute=("selective", "most"))
