"""transformer_layer: parallel sublayers, and a recompute mode for each sublayer."""

import functools
import itertools

import pytest
import torch
from support.cases import MODES, Watch, output_gradient
from support.properties import call_of
from torch import Tensor, nn

import ckptkern
from ckptkern.memory import saved_tensors

NN = ckptkern.nn


def test_parallel_sublayers_run_no_backward_of_each_other():
    """With one weight of the attention sublayer trained, its own matmul is all that backward runs."""
    call = call_of("transformer_layer", "parallel", recompute="none")
    weight = "attention_arguments.out_weight"
    y = call(call.make(frozen=call.make().keys() - {weight}))
    with Watch() as watch:
        y.backward(output_gradient(y))
    assert watch.flops == 2 * y[..., 0].numel() * call.make()[weight].numel()


# -- a mode for each sublayer ------------------------------------------------------------------------------------------

B, S, D, HIDDEN = 2, 6, 32, 48
ROW, STATES = B * S * D * 4, 16 * 5  # bytes of x, and of dropout's states at most
LAYERS = {
    "llama": functools.partial(NN.LlamaDecoderLayer, D, 4, intermediate_size=HIDDEN, resid_dropout=0.1),
    "encoder": functools.partial(NN.TransformerEncoderLayer, D, 4, HIDDEN, 0.1, batch_first=True),
    "decoder": functools.partial(NN.TransformerDecoderLayer, D, 4, HIDDEN, 0.1, batch_first=True),
}


def inputs(name: str) -> list[Tensor]:
    """x, and a decoder's memory."""
    return [torch.randn(B, rows, D, requires_grad=True) for rows in ((S, 3) if name == "decoder" else (S,))]


def run(layer: nn.Module, tensors: list[Tensor]) -> tuple[list[Tensor], int]:
    """(output and gradients, saved bytes besides a memory)."""
    torch.manual_seed(1)
    with saved_tensors([*layer.parameters(), *tensors[1:]]) as saved:
        y = layer(*tensors)
    return [y, *torch.autograd.grad(y.square().sum(), [*tensors, *layer.parameters()])], saved.bytes


@pytest.mark.parametrize("name", LAYERS)
def test_each_pair_of_modes_saves_what_its_modes_say(name):
    layer, tensors, saved = LAYERS[name](), inputs(name), {}
    for mode in (*MODES, *itertools.product(MODES, MODES)):
        layer.recompute = mode
        results, saved[mode] = run(layer, tensors)
        if mode == "none":
            expected = results
        torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    between = 2 * ROW if name == "decoder" else ROW  # what each sublayer is given
    assert saved["full", "full"] == pytest.approx(saved["full"] + between, abs=STATES)
    assert saved["selective", "full"] == pytest.approx(saved["selective"] + between, abs=STATES)
    hidden = B * S * HIDDEN * 4
    selective, none = (2, 3) if name == "llama" else (1, 1)  # g, u and h; of ReLU h alone
    for attention in MODES:
        assert saved[attention, "selective"] == saved[attention, "full"] + selective * hidden
        assert saved[attention, "none"] == saved[attention, "full"] + none * hidden
    assert saved["none"] == pytest.approx(saved["none", "none"], abs=STATES)


@pytest.mark.parametrize(("name", "place"), [("llama", "self_attn"), ("llama", "mlp"), ("decoder", "linear1")])
def test_a_pair_where_submodules_are_called(name, place):
    """One sublayer by its modules, which have a hook; the layer is an activation checkpoint then."""
    layer, tensors = LAYERS[name](recompute=("selective", "none")), inputs(name)
    expected, _ = run(layer, tensors)
    layer.get_submodule(place).register_forward_hook(lambda *args: None)
    least = sum(tensor.nbytes for tensor in tensors)
    for pair in itertools.product(MODES, MODES):
        layer.recompute = pair
        actual, saved = run(layer, tensors)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        assert saved > 2 * least if pair == ("none", "none") else saved <= least + STATES, pair


@pytest.mark.parametrize("name", LAYERS)
def test_constructors_take_a_pair(name):
    layer = LAYERS[name](recompute=("selective", "none"))
    assert (layer.recompute, layer.self_attn.recompute) == (("selective", "none"), "selective")
    with pytest.raises(ValueError, match="recompute must be one of 'none', 'selective', 'full'"):
        LAYERS[name](recompute=("selective", "most"))
