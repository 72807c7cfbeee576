"""What trainers read of a converted model's logits, without the logits: as TRL, verl and transformers write it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conversion.test_heads import WIDTH, B, S, V, converted, ids, model_of
from torch import Tensor
from torch.nn import functional as F

from ckptkern.conversion.logits import Logits, Matmul

# After "TRL", trl.trainer.utils.selective_log_softmax; "verl", verl.utils.torch_functional.logprobs_from_logits_v2 and
# logprobs_from_logits_naive; as the libraries' users know them, in our words.


def trl(z: Tensor, index: Tensor) -> Tensor:
    chosen = torch.gather(z, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in z])


def trl_narrow(z: Tensor, index: Tensor) -> Tensor:
    found = []
    for row, labels in zip(z, index, strict=True):
        log_p = F.log_softmax(row, dim=-1)
        found.append(log_p.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(found)


def verl(z: Tensor, index: Tensor) -> Tensor:
    log_p = F.log_softmax(z, dim=-1)
    return torch.gather(log_p, -1, index[..., None])[..., 0]


def verl_flat(z: Tensor, index: Tensor) -> Tensor:
    z = z.reshape(-1, V)
    return (torch.gather(z, 1, index.reshape(-1, 1))[:, 0] - z.logsumexp(dim=1)).view(index.shape)


def transformers(z: Tensor, index: Tensor) -> Tensor:
    return z.float().log_softmax(-1).gather(2, index.unsqueeze(2)).squeeze(2)


def of_float32(z: Tensor, index: Tensor) -> Tensor:
    return torch.log_softmax(z, -1, dtype=torch.float32).gather(-1, index[..., None]).squeeze(-1)


WRITTEN = (trl, trl_narrow, verl, verl_flat, transformers, of_float32)


def shifted(z: Tensor) -> Tensor:
    return z[:, :-1]


def completion(z: Tensor) -> Tensor:
    return z[:, -5:, :] / 0.7


def softcapped(z: Tensor) -> Tensor:
    return torch.tanh(z / 3.0) * 3.0


@pytest.mark.parametrize("change", [shifted, completion, softcapped])
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("bias", [False, True])
def test_log_probabilities(written: Callable, change: Callable, bias: bool) -> None:
    theirs = model_of(bias=bias)
    ours, found = converted(theirs), []
    for model in (ours, theirs):
        model.zero_grad()
        logits, _ = model(ids())
        z = change(logits)
        log_probs = written(z, ids(1)[:, -z.shape[1] :])
        (log_probs * torch.linspace(1, 2, z.shape[1])).sum().backward()
        found.append([log_probs.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        if model is ours:
            assert isinstance(logits, Logits)
            assert not logits.made
            assert not z.made
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("grad", [True, False])
def test_arg_max_and_lse(grad: bool) -> None:
    theirs = model_of()
    ours = converted(theirs)
    logits, _ = ours(ids(), ids(1))
    want = theirs(ids())[0]
    with torch.set_grad_enabled(grad):
        assert torch.equal(logits.argmax(dim=-1), want.argmax(-1))
        assert torch.equal(torch.argmax(logits, -1, keepdim=True), want.argmax(-1, keepdim=True))
        torch.testing.assert_close(logits.logsumexp(-1, keepdim=True), want.logsumexp(-1, keepdim=True))
    assert not logits.made


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("function", [torch.logsumexp, F.log_softmax, torch.log_softmax])
def test_dtypes_are_torchs(function: Callable, autocast: bool) -> None:
    x, w = torch.randn(4, WIDTH).bfloat16(), torch.randn(V, WIDTH).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = Matmul(x, w, None).logits()
        ours, theirs = function(logits, dim=-1), function(F.linear(x, w), dim=-1)
        index = torch.arange(4)[:, None]
        if ours.shape == logits.shape:
            assert ours.dtype == theirs.dtype
            ours, theirs = ours.gather(-1, index), theirs.gather(-1, index)
        assert ours.dtype == theirs.dtype
    assert not logits.made
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


OTHERS = {
    "another dimension": lambda z: z.logsumexp(1),
    "several tokens of a class": lambda z: z.gather(-1, ids(1)[..., None].expand(-1, -1, 2)),
    "fewer tokens": lambda z: z.gather(-1, ids(1)[:, 2:, None]),
    "the whole": lambda z: z.log_softmax(-1) * z.softmax(-1),
    "of all": lambda z: z.argmax().float() * z.mean(),
    "a scale after log_softmax": lambda z: (z.log_softmax(-1) * 2).gather(-1, ids(1)[..., None]),
    "a loss of log_softmax": lambda z: F.nll_loss(z.log_softmax(-1).flatten(0, 1), ids(1).flatten()),
    "a cross-entropy of log_softmax": lambda z: F.cross_entropy(z.log_softmax(-1).flatten(0, 1), ids(1).flatten()),
    "log_softmax twice": lambda z: z.log_softmax(-1).log_softmax(-1).gather(-1, ids(1)[..., None]),
    "some classes": lambda z: z[..., 3:9].logsumexp(-1),
    "classes first": lambda z: z.transpose(1, 2).log_softmax(1).gather(1, ids(1)[:, None]),
    "rows": lambda z: torch.stack([row.exp() for row in z]),
    "rows of classes": lambda z: torch.stack([part.sum(0) for part in z.unbind(-1)]),
}


@pytest.mark.parametrize("use", OTHERS)
def test_other_functions_get_values(use: str) -> None:
    theirs = model_of()
    ours = converted(theirs)
    found = []
    for model in (ours, theirs):
        result = OTHERS[use](model(ids())[0])
        found.append([result.detach(), *torch.autograd.grad(result.sum(), list(model.embed.parameters()))])
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-6)


def test_an_index_out_of_bounds_is_an_error() -> None:
    logits, _ = converted(model_of())(ids())
    for wrong in (V, -100):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            logits.log_softmax(-1).gather(-1, torch.full((B, S, 1), wrong))


def test_the_gradient_of_logits_whose_statistic_was_taken_is_refused() -> None:
    logits, _ = converted(model_of())(ids())
    log_probs = logits.log_softmax(-1).gather(-1, ids(1)[..., None])
    with pytest.raises(RuntimeError, match="grad needs the gradient of logits"):
        torch.autograd.grad(log_probs.sum(), logits, allow_unused=True)
