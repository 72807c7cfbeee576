"""TRL's fused LM head on linear_cross_entropy: `patch_trl` returns what TRL's own function returns, with its gradients."""

from __future__ import annotations

import pytest
import torch

import ckptkern
from ckptkern.memory import peak_memory

kernels = pytest.importorskip("trl.kernels")
N, D, V = 9, 6, 40
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def inputs(bias):
    tensors = [torch.randn(N, D), torch.randn(V, D), torch.randn(V) if bias else None]
    return [None if tensor is None else tensor.requires_grad_() for tensor in tensors]


def targets(hidden, weight):
    """The first few are likely to have the largest logit."""
    tokens = torch.arange(N) * 4
    tokens[:3] = (hidden[:3].float() @ weight.float().t()).argmax(-1)
    return tokens


def run(tensors, *arguments):
    """The results, and the gradients of a function of those that have one."""
    outputs = kernels.ChunkedLogProbFunction.apply(*tensors, targets(*tensors[:2]), *arguments)
    weights = torch.linspace(1, 2, N)
    wanted = sum((output * weights).sum() for output in outputs[:2] if output is not None)
    grads = torch.autograd.grad(wanted, [tensor for tensor in tensors if tensor is not None])
    return [*(None if output is None else output.detach() for output in outputs), *grads]


def both(*arguments):
    """Ours and theirs."""
    with ckptkern.patch_trl():
        ours = run(*arguments)
    return ours, run(*arguments)


@pytest.mark.parametrize(
    ("bias", "temperature", "softcap", "scale", "outputs"),
    [
        (False, 1.0, None, 1.0, ("log_probs",)),
        (True, 0.7, None, 0.5, ("log_probs", *OUTPUTS)),
        (False, 0.7, 3.0, 0.5, ("log_probs", *OUTPUTS)),
        (True, 1.0, 3.0, 1.0, ("entropy", "is_top1")),
    ],
)
def test_it_is_trls(bias, temperature, softcap, scale, outputs):
    ours, theirs = both(inputs(bias), temperature, 16, softcap, scale, outputs)
    assert theirs[4] is None or 0 < theirs[4].sum() < N
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_16_bits(autocast):
    """As in TRL the hidden states' dtype, or autocast's, is that of the matmuls. Logits are not rounded to it."""
    hidden, weight, _ = inputs(False)
    hidden = hidden.detach().to(torch.float32 if autocast else torch.bfloat16).requires_grad_()
    exact = (hidden.bfloat16().double() @ weight.bfloat16().double().t()).log_softmax(-1)[
        range(N), targets(hidden, weight)
    ]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = both([hidden, weight, None], 1.0, 16)
    for result in results:
        assert [grad.dtype for grad in result[-2:]] == [hidden.dtype, torch.float32]
    ours, theirs = ((result[0].double() - exact).abs().max() for result in results)
    assert ours < 1e-5 < theirs


def test_its_memory_is_bounded():
    hidden, weight = torch.randn(1024, 8, requires_grad=True), torch.randn(8192, 8, requires_grad=True)
    with ckptkern.patch_trl("8MiB"), peak_memory("cpu") as peak:
        outputs = kernels.ChunkedLogProbFunction.apply(hidden, weight, None, torch.arange(1024), 1.0, 32768)
        (outputs[0].sum() + outputs[1].sum()).backward()
    assert peak.bytes < 10 * 2**20  # logits are 32 MiB


def test_patches_nest_and_an_error_gives_trls_back():
    first = ckptkern.patch_trl()
    with pytest.raises(KeyError), ckptkern.patch_trl("1MiB"):
        raise KeyError
    assert "apply" in vars(kernels.ChunkedLogProbFunction)
    first.remove()
    first.remove()
    assert "apply" not in vars(kernels.ChunkedLogProbFunction)


def test_what_is_refused(monkeypatch):
    hidden, weight, _ = inputs(False)
    weight.ds_id = 0
    with pytest.raises(ValueError, match="patch_trl: workspace must be a positive number of bytes"):
        ckptkern.patch_trl(-1)
    with (
        ckptkern.patch_trl(),
        pytest.raises(RuntimeError, match="patch_trl: DeepSpeed's ZeRO-3 has split the head's weight"),
    ):
        kernels.ChunkedLogProbFunction.apply(hidden, weight, None, torch.zeros(N, dtype=torch.int64), 1.0, 16)
    monkeypatch.setattr(kernels.ChunkedLogProbFunction, "forward", lambda ctx, hidden: None)
    with pytest.raises(RuntimeError, match=r"no trl\.kernels\.ChunkedLogProbFunction with the arguments of TRL 1\.16"):
        ckptkern.patch_trl()
