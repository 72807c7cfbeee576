"""Copies of detached logits: values of the moment, which can be read after the optimizer's step, beside a fused loss."""

from __future__ import annotations

import copy

import pytest
import torch
from conversion.test_heads import B, S, V, assert_same_step, converted_pair, ids
from conversion.test_logits import LABELS, loss_of
from torch import Tensor

from ckptkern.conversion.logits import Logits
from ckptkern.memory import saved_tensors

COPIED = {
    "detach, clone": lambda z: z.detach().clone(),
    "clone, detach": lambda z: z.clone().detach(),
    "torch.clone": lambda z: torch.clone(z.detach()[:, 1:].contiguous()),
    "deepcopy": lambda z: torch.stack(copy.deepcopy([z.detach()[i, j] for i in range(B) for j in range(S)])),
    "another dtype": lambda z: z.detach().to(torch.float64),
    "to a copy": lambda z: z.detach().to(z.dtype, copy=True),
    "float": lambda z: z.detach().float(),
    "half": lambda z: z[:, :-1].detach().half(),
    "cpu": lambda z: z.detach().cpu(),
    "to a device": lambda z: z.detach().to("cpu"),
    "a buffer": lambda z: torch.zeros(z.shape).copy_(z.detach()),
    "a list": lambda z: torch.stack([row.clone() for row in z.detach()]),
    "a mean": lambda z: z.detach().softmax(-1).mean(0),
    "of a statistic": lambda z: z.detach().log_softmax(-1).clone(),
}
COPIED |= {
    f"without gradients, {name}": lambda z, change=change: torch.no_grad()(change)(z)
    for name, change in {
        "clone": Tensor.clone,
        "to": lambda z: z.to(z.dtype, copy=True),
        "of a view": lambda z: z[:, 1:].contiguous().clone(),
    }.items()
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use", COPIED)
def test_a_copy_of_detached_logits_is_values(use, dtype):
    """It is read after the optimizer's step, and the loss that is taken after it is as it was."""
    results = []
    for model in converted_pair(bias=True):
        model.to(dtype)
        logits, _ = model(ids())
        copied = COPIED[use](logits)
        assert type(copied) is Tensor
        with saved_tensors([*model.parameters()]) as saved:
            loss = loss_of(logits)
        assert any(V in shape and shape.numel() > V for shape, _, _ in saved.tensors) == (type(logits) is Tensor)
        assert not isinstance(logits, Logits) or not (logits.computed or logits.matmul.aliases)
        grads = torch.autograd.grad(loss, model.embed.weight)
        with torch.no_grad():
            model.head.weight.mul_(2)
        results.append((copied, loss.detach(), *grads))
    rounded = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(*results, **rounded)
    assert not results[0][0].requires_grad


def test_what_asks_for_no_copy_stays_lazy():
    model, _ = converted_pair()
    logits, _ = model(ids(), LABELS)
    with torch.no_grad():
        lazy = logits[..., :-1, :].contiguous(), logits.float().reshape(-1, V), logits.to(logits.dtype) / 2, -logits
    lazy += logits.detach(), logits.detach()[:, 1:].contiguous().flatten(0, 1), logits.clone()
    assert all(type(logits) is Logits and not logits.computed for logits in lazy)


def test_a_mask_of_detached_logits_counts_after_a_copy():
    def masked_after(model, logits, targets):
        before = logits.detach().clone()
        logits.detach()[..., 5] = -1e4
        return loss_of(logits) + (logits * before).mean()

    assert_same_step(*converted_pair(masked_after))
