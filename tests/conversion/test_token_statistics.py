"""What trainers read of a converted model's logits, without the logits: as TRL, verl and transformers write it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conversion.test_heads import WIDTH, B, S, V, converted, ids, model_of
from torch import Tensor
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion.logits import Logits, Matmul
from ckptkern.memory import peak_memory

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


def trl_entropy(z: Tensor) -> Tensor:
    """After trl.trainer.utils.entropy_from_logits, in our words: chunks of tokens."""
    found = []
    for part in z.reshape(-1, z.shape[-1]).split(4, dim=0):
        log_p = F.log_softmax(part, dim=-1)
        found.append(-(torch.exp(log_p) * log_p).sum(-1))
    return torch.cat(found).reshape(z.shape[:-1])


def verl_entropy(z: Tensor) -> Tensor:
    """After verl.utils.torch_functional.entropy_from_logits."""
    return torch.logsumexp(z, dim=-1) - torch.sum(torch.softmax(z, dim=-1) * z, dim=-1)


def chunked_entropy(z: Tensor) -> Tensor:
    p, log_p = F.softmax(z, -1, dtype=torch.float32), z.float().log_softmax(-1)
    return torch.cat([-torch.sum(torch.mul(*both), -1) for both in zip(log_p.chunk(2), p.chunk(2), strict=True)])


@pytest.mark.parametrize(
    ("written", "change"), [(trl_entropy, shifted), (verl_entropy, softcapped), (chunked_entropy, completion)]
)
def test_entropy(written: Callable, change: Callable) -> None:
    theirs = model_of(bias=True)
    ours, found = converted(theirs), []
    for model in (ours, theirs):
        model.zero_grad()
        logits, _ = model(ids())
        entropy = written(change(logits))
        (entropy * torch.linspace(1, 2, entropy.shape[1])).sum().backward()
        found.append([entropy.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        if model is ours:
            assert not logits.matmul.aliases, "values were made"
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-5)


def test_without_gradients_they_are_lazy_too() -> None:
    """As TRL logs an entropy, and a reference's log-probabilities: no gradient, and those of the loss are as they were."""
    theirs = model_of()
    ours, found = converted(theirs), []
    for model in (ours, theirs):
        model.zero_grad()
        logits, _ = model(ids())
        with torch.no_grad():
            logged = [
                trl_entropy(logits),
                trl(logits[:, 1:], ids(1)[:, 1:]),
                F.cross_entropy(logits.flatten(0, 1), ids(1).flatten()),
            ]
        logged += [verl(logits.detach(), ids(1)), verl_entropy(logits.detach())]
        assert not any(one.requires_grad for one in logged)
        loss = F.cross_entropy(logits.flatten(0, 1), ids(1).flatten())
        loss.backward()
        found.append([*logged, loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        if model is ours:
            assert not logits.matmul.aliases, "values were made"
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-5)


def test_the_bytes_of_a_preference_loss() -> None:
    """Log-probabilities of masked tokens, and a logged entropy, within the workspace; logits of 512 tokens are 16 MiB."""
    x, w = torch.randn(512, 8, requires_grad=True), torch.randn(8192, 8, requires_grad=True)
    index, mask = torch.randint(8192, (512,)), torch.arange(512) % 4 != 0
    with peak_memory("cpu") as peak:
        logits = Matmul(x, w, None, workspace="8MiB").logits()[mask]
        with torch.no_grad():
            trl_entropy(logits)
        trl_narrow(logits[None], index[mask][None]).sum().backward()
    assert peak.bytes < 10 * 2**20


OTHERS = {
    "another dimension": lambda z: z.logsumexp(1),
    "several tokens of a class": lambda z: z.gather(-1, ids(1)[..., None].expand(-1, -1, 2)),
    "fewer tokens": lambda z: z.gather(-1, ids(1)[:, 2:, None]),
    "the whole": lambda z: z.log_softmax(-1) * z.softmax(-1),
    "a detached factor": lambda z: (z.softmax(-1).detach() * z.log_softmax(-1)).sum(-1),
    "factors of other tokens": lambda z: (z.softmax(-1)[:, 1:] * z.log_softmax(-1)[:, :-1]).sum(-1),
    "factors of other temperatures": lambda z: ((z / 2).softmax(-1) * z.log_softmax(-1)).sum(-1),
    "a sum over tokens": lambda z: (z.softmax(-1) * z.log_softmax(-1)).sum(1),
    "a sum in another dtype": lambda z: (z.softmax(-1) * z.log_softmax(-1)).sum(-1, dtype=torch.float64),
    "a product of probabilities": lambda z: (z.softmax(-1) * z.softmax(-1)).sum(-1),
    "exponentials": lambda z: (z.exp() * z).sum(-1),
    "split classes": lambda z: z.split(3, dim=-1)[1].logsumexp(-1),
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


def test_what_made_logits_is_said() -> None:
    ours = model_of()
    conversion = ckptkern.convert(ours.train(), ids(), ids(1))
    (head,) = [row for row in conversion if row.name == "head"]
    logits, _ = ours(ids(), ids(1))
    assert logits.argmax(-1).shape == logits.detach().logsumexp(-1).shape
    assert head.calls == {"fused": 1, "checkpointed": 0, "original": 0}
    with pytest.warns(UserWarning, match="call of Linear runs .*: topk reads its logits, which are made for it"):
        logits.topk(3)
    logits.topk(3)
    assert head.calls == {"fused": 0, "checkpointed": 0, "original": 1}


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
