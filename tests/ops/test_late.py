"""A gradient that a collective still writes; tests/distributed/test_overlap.py has what waits for it."""

import torch

from ckptkern import eager
from ckptkern.ops.dispatch import choices, implementations
from ckptkern.ops.mlp.mlp import MLP
from ckptkern.ops.registration.gradients import Late


def test_kernels_wait_where_they_take_the_address():
    value = torch.randn(2, 3)
    assert Late(value.shape, value.dtype, value.device, lambda: value).data_ptr() == value.data_ptr()


def test_a_library_recomputes_before_it_waits(monkeypatch):
    """An MLP's hidden layer, which our kernel recomputes where it reads dy."""
    calls, linear = [], eager.linear

    def recompute(*operands):
        calls.append("recompute")
        return linear(*operands)

    monkeypatch.setattr(choices.primitives("library"), "kernels", eager)
    monkeypatch.setattr(implementations.Kernels, "linear", staticmethod(recompute))
    dy, x, w1, w2 = (torch.randn(shape) for shape in ((6, 3), (6, 3), (8, 3), (3, 8)))
    late = Late(dy.shape, dy.dtype, dy.device, lambda: calls.append("arrival") or dy)
    o = MLP.Options(False, "gelu", 0.0, "full", "library", "ieee", 2**20, 0)
    tensors = x, None, None, w1, None, w2, None, None
    grads = MLP.backward(late, tensors, {}, o, 0b101001)
    assert calls == ["recompute", "arrival"]
    exact = MLP.backward(dy, tensors, {}, o._replace(backend="eager"), 0b101001)
    for got, wanted in zip(grads, exact, strict=True):
        assert (got is wanted is None) or torch.allclose(got, wanted, atol=1e-5)
