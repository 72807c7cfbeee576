"""mlp: the checks that it has besides those of all ops."""

import torch
import torch.nn.functional as F

import ckptkern


def test_x_and_weights_as_views_of_one_buffer():
    """Slices of one tensor, with its strides."""
    buffer = torch.randn(20, 30, dtype=torch.float64, requires_grad=True)

    def run(function):
        x, w1, w2 = buffer[:5, :4], buffer[5:11, 4:8], buffer[11:14, 10:16]
        return torch.autograd.grad(function(x, w1, w2).square().sum(), buffer)[0]

    ours = run(lambda x, w1, w2: ckptkern.mlp(x, w1, None, w2, None))
    torch.testing.assert_close(ours, run(lambda x, w1, w2: F.linear(F.gelu(F.linear(x, w1)), w2)))
