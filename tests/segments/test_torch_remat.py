"""Our layers inside torch_remat's checkpoints, which save named regions and recompute the rest: gradients and saved bytes."""

import pytest
import torch
from torch import nn

import ckptkern
from ckptkern.memory import saved_tensors

remat = pytest.importorskip("torch_remat")
WIDTH, BATCH, LENGTH = 16, 2, 8
TENSOR = BATCH * LENGTH * WIDTH * 4  # bytes of a hidden state


class Layer(nn.Module):
    """saved: is attention a region that torch_remat does not recompute?"""

    def __init__(self, dropout, saved):
        super().__init__()
        self.attention = ckptkern.nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        self.mlp = ckptkern.nn.MLP(WIDTH, 4 * WIDTH, dropout=dropout, recompute="none")
        self.saved, self.calls = saved, {"attention": 0, "mlp": 0}

    def attend(self, x):
        self.calls["attention"] += 1
        return self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x):
        attended = remat.region(self.attend, "attention", recompute=not self.saved)(x)
        remat.recompute_needs_tensor(attended)
        x = x + attended
        self.calls["mlp"] += 1
        return x + self.mlp(x)


class Generator:
    """torch_remat's hook for the state of random numbers, which it restores only by one."""

    def snapshot(self):
        return torch.get_rng_state()

    def restore(self, state):
        torch.set_rng_state(state)


def step(layer, x, call):
    """The output and the gradients, and the bytes that forward saves besides parameters."""
    torch.manual_seed(1)
    with saved_tensors(layer) as saved:
        y = call(x)
    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), (x, *layer.parameters()))], saved.bytes


@pytest.mark.parametrize("saved", [False, True])
def test_a_layer_in_a_checkpoint(saved):
    layer, x = Layer(0.5, saved), torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    wanted, plain = step(layer, x, layer)
    layer.calls.update(attention=0, mlp=0)
    actual, held = step(layer, x, remat.checkpoint(region_name="layer", recompute_state_hooks=(Generator(),))(layer))
    assert all(map(torch.equal, actual, wanted))
    assert layer.calls == {"attention": 1 if saved else 2, "mlp": 2}
    assert plain > 8 * TENSOR
    assert held == TENSOR if not saved else TENSOR < held < plain / 2
