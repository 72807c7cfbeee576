"""A gradient that is waited for where it is first read."""

import pytest
import torch

from ckptkern.ops.registration.late import Late, arrived, is_late


@pytest.fixture
def late():
    """(a late tensor, the tensor that arrives, an entry for each wait)"""
    value, waits = torch.randn(2, 6, 4), []
    return Late(value.shape, value.dtype, value.device, lambda: waits.append(1) or value), value, waits


def test_views_do_not_wait_and_operations_do(late):
    one, value, waits = late
    part = one.reshape(12, 4)[3:7].to(torch.float32)
    assert (tuple(part.shape), part.dtype, is_late(part), waits) == ((4, 4), torch.float32, True, [])
    assert torch.equal(torch.mm(part, value[0].t()), torch.mm(value.view(12, 4)[3:7], value[0].t()))
    assert arrived(one) is value
    assert one.data_ptr() == value.data_ptr()
    assert (waits, is_late(one), is_late(value)) == ([1], False, False)


def test_results_and_leaf_gradients_are_plain_tensors(late):
    one, value, _ = late
    assert type(one * 2) is torch.Tensor
    leaf = torch.zeros_like(value, requires_grad=True)
    leaf.clone().backward(one)
    assert type(leaf.grad) is torch.Tensor
    assert torch.equal(leaf.grad, value)
