"""Logits of a converted head: what trainers read of them without values, what else gets values, and when these cannot be
computed any more."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from conversion.test_heads import WIDTH, B, Doubled, S, V, assert_same_step, converted_pair, ids
from support.cases import assert_as_exact
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion.logits import Logits, Matmul
from ckptkern.conversion.tokens import LMHead
from ckptkern.memory import peak_memory

LABELS = ids(1)


def loss_of(z, labels=LABELS):
    return F.cross_entropy(z.flatten(0, -2), labels.flatten())


# After "TRL", trl.trainer.utils.selective_log_softmax; "verl", verl.utils.torch_functional.logprobs_from_logits_v2 and
# logprobs_from_logits_naive; as the libraries' users know them, in our words.


def trl(z, index):
    chosen = torch.gather(z, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in z])


def trl_narrow(z, index):
    rows = zip(z, index, strict=True)
    return torch.stack(
        [F.log_softmax(row, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1) for row, labels in rows]
    )


def verl(z, index):
    return torch.gather(F.log_softmax(z, dim=-1), -1, index[..., None])[..., 0]


def verl_flat(z, index):
    z = z.reshape(-1, V)
    return (torch.gather(z, 1, index.reshape(-1, 1))[:, 0] - z.logsumexp(dim=1)).view(index.shape)


def of_float32(z, index):
    return torch.log_softmax(z, -1, dtype=torch.float32).gather(-1, index[..., None]).squeeze(-1)


def trl_entropy(z, index=None):
    """After trl.trainer.utils.entropy_from_logits, in our words: chunks of tokens."""
    entropies = []
    for part in z.reshape(-1, z.shape[-1]).split(4, dim=0):
        log_p = F.log_softmax(part, dim=-1)
        entropies.append(-(torch.exp(log_p) * log_p).sum(-1))
    return torch.cat(entropies).reshape(z.shape[:-1])


def verl_entropy(z, index=None):
    """After verl.utils.torch_functional.entropy_from_logits."""
    return torch.logsumexp(z, dim=-1) - torch.sum(torch.softmax(z, dim=-1) * z, dim=-1)


def chunked_entropy(z, index):
    p, log_p = F.softmax(z, -1, dtype=torch.float32), z.float().log_softmax(-1)
    return torch.cat([-torch.sum(torch.mul(*both), -1) for both in zip(log_p.chunk(2), p.chunk(2), strict=True)])


def label_smoother(z, index):
    """Trainer's, with tokens that do not count."""
    smoother = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother(0.1)
    return smoother({"logits": z}, index.masked_fill(index == 3, -100))


def fairseq(z, index):
    """After fairseq.criterions.label_smoothed_cross_entropy.label_smoothed_nll_loss."""
    log_p = F.log_softmax(z, dim=-1, dtype=torch.float32).view(-1, z.shape[-1])
    nll = -log_p.gather(dim=-1, index=index.reshape(-1, 1))
    smooth = -log_p.sum(dim=-1, keepdim=True)
    for losses in (nll, smooth):
        losses.masked_fill_(index.reshape(-1, 1) == 3, 0.0)
    return 0.9 * nll.sum() + 0.1 / V * smooth.sum()


def timm(z, index):
    """After timm.loss.LabelSmoothingCrossEntropy."""
    log_p = F.log_softmax(z, dim=-1)
    return -0.9 * log_p.gather(dim=-1, index=index.unsqueeze(-1)).squeeze(-1) - 0.1 * log_p.mean(dim=-1)


def nll(z, index):
    return F.nll_loss(z.log_softmax(-1).flatten(0, 1), index.flatten(), ignore_index=3)


def nll_of_each(z, index):
    """[B, V, T], as losses of images have it; and a sum of negated, scaled log-probabilities in place."""
    log_p = z.transpose(1, 2).log_softmax(1)
    loss = nn.NLLLoss(torch.linspace(0.5, 2, V), reduction="none")(log_p, index)
    return loss + (log_p / 2).gather(1, index[:, None])[:, 0].mul_(3) - log_p.sum((1,)) / V


def nll_of_sum(z, index):
    log_p = -(2 * torch.log_softmax(z.reshape(-1, V), 1))
    return F.nll_loss(log_p, target=index.reshape(-1), reduction="sum") + loss_of(z.log_softmax(-1), index)


def shifted(z):
    return z[:, :-1]


def completion(z):
    return z[:, -5:, :] / 0.7


def softcapped(z):
    return torch.tanh(z / 3.0) * 3.0


SMOOTHED = (label_smoother, fairseq, timm)
WRITTEN = (
    trl, trl_narrow, verl, verl_flat, of_float32, trl_entropy, verl_entropy, chunked_entropy, *SMOOTHED, nll, nll_of_each,
    nll_of_sum,
)  # fmt: skip
CHANGES = (shifted, completion, softcapped)


def weighted(y):
    return (y * torch.linspace(1, 2, y.numel()).view_as(y)).sum()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("written", WRITTEN)
def test_log_probabilities_and_entropies_without_values(written, bias):
    results = []
    for model in converted_pair(bias=bias):
        y = []
        for change in CHANGES:
            logits, _ = model(ids())
            z = change(logits)
            y.append(written(z, LABELS[:, -z.shape[1] :]))
            assert not isinstance(logits, Logits) or not (logits.computed or z.computed or logits.matmul.aliases)
        grads = torch.autograd.grad(sum(map(weighted, y)), [model.embed.weight, model.body[0].weight])
        results.append([*(tensor.detach() for tensor in y), *grads])
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("grad", [True, False])
def test_arg_max_and_lse(grad):
    logits, want = (model(ids(), LABELS)[0] for model in converted_pair())
    with torch.set_grad_enabled(grad):
        assert torch.equal(logits.argmax(dim=-1), want.argmax(-1))
        assert torch.equal(torch.argmax(logits, -1, keepdim=True), want.argmax(-1, keepdim=True))
        torch.testing.assert_close(logits.logsumexp(-1, keepdim=True), want.logsumexp(-1, keepdim=True))
    assert not logits.computed


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("function", [torch.logsumexp, F.log_softmax])
def test_dtypes_are_torchs(function, autocast):
    x, w = torch.randn(4, WIDTH).bfloat16(), torch.randn(V, WIDTH).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = Matmul(x, LMHead(w)).logits()
        results = [function(z, dim=-1) for z in (logits, F.linear(x, w))]
        results = [result.gather(-1, torch.arange(4)[:, None]) if result.dim() > 1 else result for result in results]
    assert not logits.computed
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_without_gradients_they_are_lazy_too():
    """As TRL logs an entropy, and a reference's log-probabilities: no gradient, and those of the loss are as they were."""
    results = []
    for model in converted_pair():
        logits, _ = model(ids())
        with torch.no_grad():
            logged = [trl_entropy(logits), trl(logits[:, 1:], LABELS[:, 1:]), loss_of(logits)]
        logged += [verl(logits.detach(), LABELS), verl_entropy(logits.detach())]
        assert not any(tensor.requires_grad for tensor in logged)
        loss = loss_of(logits)
        results.append([*logged, loss.detach(), *torch.autograd.grad(loss, model.embed.weight)])
        assert not isinstance(logits, Logits) or not logits.matmul.aliases, "values were made"
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


def test_the_bytes_of_a_preference_loss():
    """Log-probabilities of masked tokens, and a logged entropy, within the workspace; logits of 512 tokens are 16 MiB."""
    x, w = torch.randn(512, 8, requires_grad=True), torch.randn(8192, 8, requires_grad=True)
    index, mask = torch.randint(8192, (512,)), torch.arange(512) % 4 != 0
    with peak_memory("cpu") as peak:
        logits = Matmul(x, LMHead(w, workspace="8MiB")).logits()[mask]
        with torch.no_grad():
            trl_entropy(logits)
        trl_narrow(logits[None], index[mask][None]).sum().backward()
    assert peak.bytes < 10 * 2**20


@pytest.mark.parametrize("smoothed", SMOOTHED)
def test_label_smoothing_is_one_pass_over_the_matmul(smoothed, monkeypatch):
    passes, run = [], ckptkern.ops.linear_cross_entropy
    monkeypatch.setattr(
        ckptkern.ops, "linear_cross_entropy", lambda *args, **more: passes.append(1) or run(*args, **more)
    )
    smoothed(converted_pair()[0](ids())[0], LABELS).sum().backward()
    assert len(passes) == 1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("written", [*SMOOTHED, nll])
def test_losses_in_16_bits(written, autocast):
    ours, theirs = converted_pair(lambda model, z, targets: written(z, LABELS).float().mean(), bias=True, tied=False)

    def run(model, dtype, autocast=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model.to(dtype)(ids(2), LABELS)[1]
        used = {name: p for name, p in model.named_parameters() if name != "added"}
        return dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))

    exact = run(copy.deepcopy(theirs), torch.float64)
    dtype = torch.float32 if autocast else torch.bfloat16
    assert_as_exact(run(ours, dtype, autocast), run(theirs, dtype, autocast), exact)


def test_losses_of_a_low_rank_update():
    """The logits of LoRA's layer get the same functions."""
    x, w = torch.randn(4, WIDTH), torch.randn(V, WIDTH)
    a, b = torch.randn(2, WIDTH).requires_grad_(), torch.randn(V, 2).requires_grad_()
    results = []
    for z in (Matmul(x, LMHead(w), lora=ckptkern.LoRA(a, b, 0.5)).logits(), F.linear(x, w + 0.5 * b @ a)):
        loss = sum(weighted(loss_of(z[None], LABELS[:1, :4])) for loss_of in (*SMOOTHED, nll))
        assert not isinstance(z, Logits) or not (z.computed or z.matmul.aliases)
        results.append([loss.detach(), *torch.autograd.grad(loss, [a, b])])
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


# -- what gets values


def of_token(z, count=1):
    return z.gather(-1, LABELS[..., None].expand(-1, -1, count))


def gradient_of(z):
    (dz,) = torch.autograd.grad(z.softmax(-1).square().sum(), z, create_graph=True)
    return (dz * z).sum() + loss_of(z)


VALUES = {
    "another dimension": lambda z: z.logsumexp(1),
    "several tokens of a class": lambda z: of_token(z, 2),
    "a detached factor": lambda z: (z.softmax(-1).detach() * z.log_softmax(-1)).sum(-1),
    "factors of other tokens": lambda z: (z.softmax(-1)[:, 1:] * z.log_softmax(-1)[:, :-1]).sum(-1),
    "factors of other temperatures": lambda z: ((z / 2).softmax(-1) * z.log_softmax(-1)).sum(-1),
    "a sum in another dtype": lambda z: (z.softmax(-1) * z.log_softmax(-1)).sum(-1, dtype=torch.float64),
    "exponentials": lambda z: (z.exp() * z).sum(-1),
    "split classes": lambda z: z.split(3, dim=-1)[1].logsumexp(-1),
    "log_softmax times a tensor": lambda z: of_token(z.log_softmax(-1) * torch.tensor(2.0)),
    "a sum of log-probabilities in another dtype": lambda z: z.log_softmax(-1).sum(-1, dtype=torch.float64),
    "exp of scaled log-probabilities": lambda z: ((2 * z.log_softmax(-1)).exp() * z.log_softmax(-1)).sum(-1),
    "an arg max of negated log-probabilities": lambda z: (-z.log_softmax(-1)).argmax(-1) + of_token(z)[..., 0],
    "a loss of negative logits' log_softmax": lambda z: F.cross_entropy(
        -z.log_softmax(-1).flatten(0, 1), LABELS.flatten()
    ),
    "a sum over tokens": lambda z: z.log_softmax(-1).sum(1),
    "a loss of no log-probabilities": lambda z: F.nll_loss(z.flatten(0, 1), LABELS.flatten()),
    "rows": lambda z: torch.stack([row.exp() for row in z]),
    "a gradient with a graph": gradient_of,
}


@pytest.mark.parametrize("use", VALUES)
def test_other_functions_get_values(use):
    results = []
    for model in converted_pair():
        result = VALUES[use](model(ids())[0])
        results.append([result.detach(), *torch.autograd.grad(result.sum(), model.embed.weight)])
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-6)


def hooked(z):
    z.register_hook(lambda dy: 3 * dy)
    return z


def in_place(change):
    def changed(z):
        change(z)
        return z

    return changed


def replaced_data(z):
    z.data = z.detach() / 2


def retained(z):
    z.retain_grad()
    loss_of(z).backward(retain_graph=True)
    return loss_of(z) + (z.grad.sin() * z).sum()


def copied_before(change):
    def use(z):
        half = z.float() * 0.5
        change(z)
        return loss_of(half) + loss_of(z)

    return use


def masked(z):
    with torch.no_grad():
        z.detach()[..., 5] = -1e4


def detached(z):
    before = z.exp().sum()
    z.detach_()
    return loss_of(z) + before


def node_of(z):
    return Doubled.apply(z).sin().sum()


CHANGED = {
    "a hook": lambda z: loss_of(hooked(z)),
    "a hook of a node's input": lambda z: node_of(hooked(z)),
    "a node of what was divided": lambda z: node_of(in_place(lambda z: z.div_(4))(z)),
    "a node of what was masked": lambda z: node_of(in_place(lambda z: z[..., 0].zero_())(z)),
    "masked data": lambda z: loss_of(in_place(lambda z: z.data[..., 5].fill_(-1e4))(z)),
    "replaced data": lambda z: loss_of(in_place(replaced_data)(z)),
    "a masked array": lambda z: loss_of(in_place(lambda z: z.detach().numpy()[..., 5].fill(-1e4))(z)),
    "a retained gradient": retained,
    "a copy before a mask": copied_before(masked),
    "a copy before a change": copied_before(Tensor.exp_),
    "detached in place": detached,
}


@pytest.mark.parametrize("use", CHANGED)
def test_hooks_and_changes_of_logits_count(use):
    assert_same_step(*converted_pair(lambda model, logits, targets: CHANGED[use](logits)))


# -- what they are


def test_logits_are_the_linear_layers():
    model, theirs = converted_pair(bias=True)
    logits, want = model(ids(), LABELS)[0], theirs(ids())[0]
    assert isinstance(logits, Logits)
    for of in (lambda z: (z.shape, z.size(-1), len(z), z.dtype, z.device, z.requires_grad), Tensor.tolist):
        assert of(logits) == of(want)
    assert torch.equal(logits[..., 1:, :].detach(), want[:, 1:])
    assert str(logits.detach()) == str(want.detach())
    for mode in (True, False):
        with torch.no_grad():
            logits, _ = model.train(mode)(ids(), LABELS)
        assert type(logits) is Tensor
        assert torch.equal(logits, want)
    with torch.inference_mode():
        assert type(model(ids())[0]) is Tensor


def test_metadata_asks_for_no_values():
    x, w = torch.randn(B, S, WIDTH), torch.randn(V, WIDTH)
    logits, want = Matmul(x, LMHead(w)).logits(), F.linear(x, w)
    hash(logits), logits.numel(), logits.element_size(), logits.layout
    assert logits.flatten(0, 1).view(3, 6, V)[1].shape == (6, V)
    assert not logits.computed
    for change in (lambda z: z[:, 1:], lambda z: z.transpose(0, 1) * 2, lambda z: z.transpose(1, 2).contiguous()):
        of_both = (
            (tensor.shape, tensor.stride(), tensor.is_contiguous(), tensor.storage_offset())
            for tensor in map(change, (logits, want))
        )
        assert next(of_both) == next(of_both)


def under_dispatch(function):
    """The function past __torch_function__, as C++ calls it."""

    def run(z):
        with torch._C.DisableTorchFunctionSubclass():
            return function(z)

    return run


SAID = {
    "topk": lambda z: z.topk(3),
    "mT": lambda z: z.mT,
    "exp.default": under_dispatch(Tensor.exp),
    "zero_": torch.no_grad()(lambda z: z.detach().zero_()),
}


@pytest.mark.parametrize("cause", SAID)
def test_what_made_logits_is_said(cause):
    read = SAID[cause]
    ours = converted_pair()[1]
    conversion = ckptkern.convert(ours.train(), ids(), LABELS)
    (head,) = [row for row in conversion if row.name == "head"]
    logits, _ = ours(ids(), LABELS)
    assert logits.argmax(-1).shape == logits.detach().logsumexp(-1).shape
    assert head.calls == {"fused": 1, "checkpointed": 0, "original": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits.detach().topk(3), logits.detach().clone(), [row.tolist() for row in logits.detach()]
    assert head.calls == {"fused": 1, "checkpointed": 0, "original": 0}
    with pytest.warns(UserWarning, match=f"{cause} reads its logits, .* Take the loss by .* metrics of logits.detach"):
        read(logits)
    read(logits)
    assert head.calls == {"fused": 0, "checkpointed": 0, "original": 1}


# -- errors


def test_gradients_that_are_never_formed_are_refused():
    logits, loss = converted_pair()[0](ids(), LABELS)
    logits.register_hook(print)  # as fully_shard does with all outputs
    assert not logits.computed
    with pytest.raises(RuntimeError, match="retain_grad needs the gradient of logits"):
        logits.retain_grad()
    log_probs = verl(logits, LABELS)
    for result in (loss, log_probs.sum()):
        with pytest.raises(RuntimeError, match="grad needs the gradient of logits"):
            torch.autograd.grad(result, logits, allow_unused=True)
    torch.autograd.grad(logits.sum(), logits.matmul.head.weight)


@pytest.mark.parametrize("when", ["an optimizer's step", "freed", "replaced"])
def test_logits_that_come_too_late_are_an_error(when):
    model, _ = converted_pair()
    logits, loss = model(ids(), LABELS)
    weight = model.head.weight
    if when == "freed":
        weight.data.untyped_storage().resize_(0)
    elif when == "replaced":
        weight.data = 2 * weight.data
    else:
        loss.backward()
        torch.optim.SGD([weight], 0.1).step()
    for read in (lambda: logits.argmax(-1), lambda: loss_of(logits)):
        with pytest.raises(RuntimeError, match="Read logits before the optimizer's step"):
            read()


def test_a_wrong_target_is_torchs_error():
    model, _ = converted_pair()
    with pytest.raises(ValueError, match="Expected input batch_size"):
        model(ids(), LABELS[:, 1:])
    with pytest.raises(IndexError, match="out of bounds"):
        model(ids(), LABELS + V)
    with pytest.raises(IndexError, match="Target -100 is out of bounds"):
        model(ids())[0].log_softmax(-1).gather(-1, torch.full((B, S, 1), -100))
