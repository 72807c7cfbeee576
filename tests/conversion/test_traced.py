"""The LM head and its loss under torch.compile: no logits, no break in the graph, and logits for who reads them."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from conversion.steps import assert_same, assert_same_steps, compiled
from conversion.test_heads import COVERED, WIDTH, V, converted, converted_pair, flat, ids, model_of, step, z_loss
from conversion.test_logits import completion, of_float32, softcapped, timm, verl, verl_flat
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion.traced import TracedLogits
from ckptkern.memory import peak_memory, saved_tensors

INSIDE = ("shifted", "capped and scaled", "padded", "weighted", "in chunks", "of log_softmax")
READ = (
    "permuted, shifted, copied",
    "with an added buffer",
    "of each token",
)  # computed with values, which the graph forms


pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torch 2.11's Dynamo says of every compiled call that it is exported, and a head then has logits",
)


def forms_logits(run, parameters):
    with saved_tensors(parameters) as saved:
        run()
    return any(V in shape and shape.numel() > V for shape, _, _ in saved.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("names", [INSIDE, READ], ids=" ".join)
def test_losses_inside_of_the_graph(names):
    def loss(model, logits, targets):
        return torch.stack([COVERED[name](model, logits, targets) for name in names])

    ours, theirs = converted_pair(loss, bias="padded" in names)
    run, more = compiled(ours), {"length": 12}
    assert_same(step(run), step(theirs))
    if names == INSIDE:
        assert_same(step(run, **more), step(theirs, **more))
    assert isinstance(run(ids(2), ids(3))[0], TracedLogits)
    assert forms_logits(lambda: run(ids(2), ids(3)), [*ours.parameters(), ours.class_weights]) == (names[0] in READ)


STATISTICS = (
    verl,
    lambda z, t: of_float32(completion(z), t[:, -5:]),
    verl_flat,
    lambda z, t: verl(softcapped(z), t),
    lambda z, t: z.logsumexp(-1, keepdim=True) * (torch.argmax(z, -1) == z.argmax(dim=-1)).sum(),
)
VALUES = (
    lambda z, t: F.nll_loss(-z.log_softmax(-1).flatten(0, 1), t.flatten()) + F.nll_loss(z[0], t[0]),
    timm,
    lambda z, t: (z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1),
    lambda z, t: F.cross_entropy(z.log_softmax(-1).flatten(0, 1), t.flatten()),
    lambda z, t: (z.log_softmax(-1) * 2).gather(-1, t[..., None]),
    lambda z, t: z.exp().gather(-1, t[..., None].expand(-1, -1, 2)),
    lambda z, t: z.log_softmax(1).gather(-1, t[..., None]) + z.logsumexp(1).sum(),
    lambda z, t: 2.0 ** z[:, :1] + z[:, 1:2] % 3.0,
    lambda z, t: torch.stack([z, torch.cat([z, z])[: len(z)]]).sin(),
)


class Statistics(nn.Module):
    def __init__(self, model, uses):
        super().__init__()
        self.model, self.uses = model, uses

    def forward(self, x, t):
        return torch.cat([use(self.model(x)[0], t).float().flatten() for use in self.uses])


@pytest.mark.slow
@pytest.mark.parametrize("uses", [STATISTICS, VALUES], ids=["lazy", "values"])
def test_statistics_inside_of_the_graph(uses):
    ours, theirs = (Statistics(model, uses) for model in converted_pair(bias=True))
    run = compiled(ours)
    assert_same_steps(run, theirs, ids(2), ids(3))
    assert forms_logits(lambda: run(ids(2), ids(3)), list(ours.parameters())) == (uses is VALUES)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_under_autocast_and_as_a_model(autocast):
    ours = converted(model_of(COVERED["viewed"]).to(torch.float32 if autocast else torch.bfloat16))
    run = compiled(ours)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.testing.assert_close(*(model(ids(2), ids(3))[1] for model in (run, ours)), rtol=2e-2, atol=1e-3)


def peak_of(run):
    data = ids(2, 512), ids(3, 512)
    for _ in range(2):
        run.zero_grad()
        run(*data)[1].backward()
    run.zero_grad()
    with peak_memory("cpu") as peak:
        run(*data)[1].backward()
    return peak.bytes


@pytest.mark.slow
def test_the_peak_is_that_of_the_eager_step():
    """The logits of 2 x 512 tokens take 16 MiB, of which a step with logits holds several at once."""
    theirs = model_of(COVERED["viewed"], tied=False)
    theirs.head = nn.Linear(WIDTH, 4096)
    ours = copy.deepcopy(theirs)
    ckptkern.convert(ours, ids(), ids(1), workspace="2MiB")
    eager, mine, before = map(peak_of, (ours, compiled(ours), theirs))
    assert mine < 1.1 * eager < 0.2 * before, (mine, eager, before)


def test_logits_and_losses_outside_of_the_graph():
    ours, theirs = converted_pair(COVERED["capped and scaled"])
    results = []
    for run, model in ((compiled(ours), ours), (theirs, theirs)):
        z, loss = run(ids(2), ids(3))
        outside = F.cross_entropy(z.view(-1, V), ids(4).view(-1)), z.logsumexp(-1) + z[..., 0], z.argmax(-1)
        values = z * 1.0, torch.softmax(z, -1), z[..., 1:, :].float().reshape(-1, V).exp(), torch.stack(list(z))
        results.append([z.shape, *outside, *values])
        results[-1] += torch.autograd.grad(loss + outside[0] + outside[1].square().mean(), model.embed.weight)
    torch.testing.assert_close(*results)


@pytest.mark.slow
def test_what_would_be_wrong_raises():
    for change in (lambda z: z.div_(2.0), lambda z: operator.itruediv(z, 2.0)):
        ours, _ = converted_pair(lambda m, z, t, change=change: flat(m, change(z), t))
        with pytest.raises(Exception, match="changes its logits in place"):
            compiled(ours)(ids(2), ids(3))
    logits, loss = compiled(model := converted_pair()[0])(ids(2), ids(3))
    for change in (lambda: logits.mul_(2), lambda: logits.__setitem__(0, 0.0)):
        with pytest.raises(RuntimeError, match="in place"):
            change()
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="weight changed before"):
        logits.argmax(-1)


@pytest.mark.filterwarnings("ignore:.*also passes the logits")
@pytest.mark.parametrize("loss", [COVERED["as float"], z_loss], ids=["a module", "a z-loss"])
def test_other_losses_are_traced_as_they_are(loss):
    """Dynamo makes nn.CrossEntropyLoss, where forward makes one, a function of tensors; a z-loss reads logits itself."""
    theirs = model_of(loss)
    ours = converted(theirs)
    run = compiled(ours)
    assert_same(step(run), step(theirs))
    assert type(run(ids(2), ids(3))[0]) is Tensor


def test_without_gradients_logits_are_tensors():
    ours, theirs = converted_pair()
    with torch.no_grad():
        logits, _ = compiled(ours)(ids(2), ids(3))
    assert type(logits) is Tensor
    ours.head.compile(backend="aot_eager", fullgraph=True)  # the head alone
    assert_same(step(ours), step(theirs))
    assert WIDTH in ours.head(torch.randn(2, WIDTH)).x.shape
