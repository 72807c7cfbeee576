"""The promise of `workspace` for layers that convert took: memory rises by what is saved, the result or the gradients, and the
workspace."""

import pytest
import torch
from support.architectures import ARCHITECTURES, WIDTH, Stack
from support.cases import MODES, output_gradient

import ckptkern
from ckptkern.conversion.binding import Fused
from ckptkern.memory import peak_memory, saved_tensors

SHAPE = (17, 41, WIDTH)  # 697 tokens: six units of 128, of which the last has 57
NAMES = [name for name, one in ARCHITECTURES.items() if one.stack is Stack and "transformer_layer" in one.replaced_by]
NAMES = [
    name for name in NAMES if name not in ("buffers", "torch decoder", "windows", "weighted")
]  # whose tables and masks are of other sizes


def layer_of(name: str, x: torch.Tensor) -> tuple[torch.nn.Module, dict]:
    layer, arguments = ARCHITECTURES[name].layer(), ARCHITECTURES[name].calls(x)
    ckptkern.convert(layer, x, **arguments)
    assert isinstance(layer.forward, Fused)
    return layer, arguments


def transient(layer, arguments, x, mode, workspace) -> list[int]:
    """Bytes of forward beside what it saves and gives, and of backward beside the gradients."""
    layer.forward.recompute, layer.forward.workspace = mode, workspace
    leaves = [x, *layer.parameters()]
    torch.manual_seed(0)
    with peak_memory("cpu") as forward, saved_tensors(leaves) as saved:
        y = layer(x, **arguments)
    y = y[0] if isinstance(y, tuple) else y
    dy = output_gradient(y)
    with peak_memory("cpu") as backward:
        grads = torch.autograd.grad(y, leaves, dy)
    return [forward.bytes - saved.bytes - y.nbytes, backward.bytes - sum(one.nbytes for one in grads)]


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_of_a_converted_layer(name, mode):
    torch.manual_seed(0)
    x = torch.randn(SHAPE, requires_grad=True)
    layer, arguments = layer_of(name, x.detach())
    # with 2^17 bytes attention's core is torch's kernel, whose own buffers a smaller one has no room for
    least = max(*transient(layer, arguments, x, mode, 1), *transient(layer, arguments, x, mode, 2**17))
    whole = max(transient(layer, arguments, x, mode, 2**40))
    for workspace in (int(1.95 * least), int(2.9 * least)):
        found = transient(layer, arguments, x, mode, workspace)
        assert max(found) <= workspace, f"forward and backward: {found}"
    assert least < 0.8 * whole
