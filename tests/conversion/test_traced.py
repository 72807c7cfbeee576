"""The LM head and its loss under torch.compile: no logits, no break in the graph, and logits for who reads them."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from conversion.test_heads import COVERED, LM, WIDTH, V, converted, flat, ids, model_of, z_loss
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion.traced import TracedLogits
from ckptkern.memory import peak_memory, saved_tensors

INSIDE = (
    "flat", "viewed", "shifted", "to its own device", "scaled", "capped and scaled", "smoothed", "ignored", "padded",
    "summed", "weighted", "in chunks",
)  # fmt: skip
READ = ("permuted", "with an added buffer", "of each token")  # computed with values, which the graph forms


pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torch 2.11's Dynamo says of every compiled call that it is exported, and a head then has logits",
)


@pytest.fixture(autouse=True)
def no_graphs_of_others():
    torch._dynamo.reset()


def compiled(model: LM):
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def step(model: LM, run, seed: int = 2, length: int = 9) -> dict[str, Tensor]:
    model.zero_grad()
    loss = run(ids(seed, length), ids(seed + 1, length))[1]
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=2e-5, atol=1e-6, msg=name)
        assert ours[name].dtype == value.dtype


@pytest.mark.parametrize("loss", [*INSIDE, *READ])
def test_loss_and_gradients(loss: str) -> None:
    theirs = model_of(COVERED[loss], bias=loss in ("flat", "shifted"))
    ours = converted(theirs)
    run = compiled(ours)
    assert_same(step(ours, run), step(theirs, theirs))
    with saved_tensors([*ours.parameters(), ours.class_weights]) as saved:
        logits, _ = run(ids(2), ids(3))
    assert isinstance(logits, TracedLogits)
    assert any(V in shape and shape.numel() > V for shape, _, _ in saved.tensors) == (loss in READ)


def test_a_loss_module_is_traced_as_it_is() -> None:
    """Dynamo makes nn.CrossEntropyLoss, where forward makes one, a function of tensors."""
    theirs = model_of(COVERED["as float"])
    ours = converted(theirs)
    run = compiled(ours)
    assert_same(step(ours, run), step(theirs, theirs))
    assert type(run(ids(2), ids(3))[0]) is Tensor


STATISTICS = {
    "log_softmax": lambda z, t: F.log_softmax(z, -1).gather(-1, t[..., None]),
    "a temperature": lambda z, t: torch.gather(
        (z / 0.7)[:, 1:].log_softmax(dim=-1, dtype=torch.float32), -1, t[:, 1:, None]
    ),
    "logsumexp": lambda z, t: torch.gather(z, -1, t[..., None])[..., 0] - torch.logsumexp(z, dim=-1),
    "capped": lambda z, t: torch.log_softmax(torch.tanh(z / 3) * 3, -1).reshape(-1, V).gather(1, t.reshape(-1, 1)),
    "argmax": lambda z, t: z.logsumexp(-1, keepdim=True) * (torch.argmax(z, -1) == z.argmax(dim=-1)).sum(),
}
VALUES = {
    "an entropy": lambda z, t: (z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1),
    "a loss of log_softmax": lambda z, t: F.cross_entropy(z.log_softmax(-1).flatten(0, 1), t.flatten()),
    "scaled after log_softmax": lambda z, t: (z.log_softmax(-1) * 2).gather(-1, t[..., None]),
    "two tokens": lambda z, t: z.exp().gather(-1, t[..., None].expand(-1, -1, 2)),
    "another dimension": lambda z, t: z.log_softmax(1).gather(-1, t[..., None]) + z.logsumexp(1).sum(),
}


@pytest.mark.parametrize("use", [*STATISTICS, *VALUES])
def test_statistics_inside_of_the_graph(use: str) -> None:
    function, theirs = (STATISTICS | VALUES)[use], model_of(bias=True)
    ours, found = converted(theirs), []
    for model in (ours, theirs):

        def run(x, t, model=model):
            return function(model(x)[0], t)

        run = torch.compile(run, fullgraph=True, backend="aot_eager") if model is ours else run
        model.zero_grad()
        with saved_tensors(model.parameters()) as saved:
            result = run(ids(2), ids(3))
        (result.float() * torch.linspace(1, 2, result.numel()).view_as(result)).sum().backward()
        found.append([result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        if model is ours:
            assert any(shape[-1:] == (V,) and shape.numel() > V for shape, _, _ in saved.tensors) == (use in VALUES)
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-5)


def test_other_lengths() -> None:
    theirs = model_of(COVERED["shifted"])
    ours = converted(theirs)
    run = compiled(ours)
    for length in (9, 12, 17):
        assert_same(step(ours, run, 2, length), step(theirs, theirs, 2, length))


def test_bfloat16_under_autocast_and_as_a_model() -> None:
    for model, context in (
        (model_of(COVERED["viewed"]), torch.autocast("cpu", torch.bfloat16)),
        (model_of(COVERED["shifted"]).bfloat16(), torch.autocast("cpu", enabled=False)),
    ):
        ours = converted(model)
        run = compiled(ours)
        with context:
            mine, eager = run(ids(2), ids(3))[1], ours(ids(2), ids(3))[1]
        assert mine.dtype == eager.dtype
        torch.testing.assert_close(mine, eager, rtol=2e-2, atol=1e-3)


def peak_of(run, length: int) -> int:
    data = ids(2, length), ids(3, length)
    for _ in range(2):
        run.zero_grad()
        run(*data)[1].backward()
    run.zero_grad()
    with peak_memory("cpu") as peak:
        run(*data)[1].backward()
    return peak.bytes


def test_the_peak_is_that_of_the_eager_step() -> None:
    """The logits of 2 x 512 tokens take 16 MiB, of which a step with logits holds several at once."""
    theirs = model_of(COVERED["viewed"], tied=False)
    theirs.head = nn.Linear(WIDTH, 4096)
    ours = copy.deepcopy(theirs)
    ckptkern.convert(ours, ids(), ids(1), workspace="2MiB")
    eager, mine, before = peak_of(ours, 512), peak_of(compiled(ours), 512), peak_of(theirs, 512)
    assert mine < 1.1 * eager < 0.2 * before, (mine, eager, before)


def test_logits_are_there_for_who_reads_them() -> None:
    theirs = model_of(COVERED["scaled"])
    ours = converted(theirs)
    mine, want = compiled(ours)(ids(2), ids(3))[0], theirs(ids(2), ids(3))[0]
    assert mine.shape == want.shape
    assert (mine.dtype, mine.device, mine.dim(), mine.size(-1)) == (want.dtype, want.device, want.dim(), V)
    torch.testing.assert_close(mine * 1.0, want)
    torch.testing.assert_close(torch.softmax(mine, -1), want.softmax(-1))
    torch.testing.assert_close(mine[..., 1:, :].float().reshape(-1, V).exp(), want[..., 1:, :].reshape(-1, V).exp())
    torch.testing.assert_close(mine.logsumexp(-1) + mine[..., 0], want.logsumexp(-1) + want[..., 0])
    assert torch.equal(mine.argmax(-1), want.argmax(-1))
    assert len(mine) == len(want)
    assert all(a.shape == b.shape for a, b in zip(mine, want, strict=True))


def test_a_loss_outside_of_the_graph() -> None:
    theirs = model_of()
    ours = converted(theirs)
    found = []
    for model, run in ((ours, compiled(ours)), (theirs, theirs)):
        logits, loss = run(ids(2), ids(3))
        more = F.cross_entropy(logits.view(-1, V), ids(4).view(-1)) + logits.logsumexp(-1).square().mean()
        (loss + more).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same(*found)


def test_what_would_be_wrong_raises() -> None:
    ours = converted(model_of(lambda m, z, t: flat(m, z.div_(2.0) if torch.compiler.is_compiling() else z, t)))
    with pytest.raises(Exception, match="changes its logits in place"):
        compiled(ours)(ids(2), ids(3))
    ours = converted(
        model_of(lambda m, z, t: flat(m, operator.itruediv(z, 2.0) if torch.compiler.is_compiling() else z, t))
    )
    with pytest.raises(Exception, match="changes its logits in place"):
        compiled(ours)(ids(2), ids(3))
    ours = converted(model_of())
    logits, loss = compiled(ours)(ids(2), ids(3))
    with pytest.raises(RuntimeError, match="in place"):
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="in place"):
        logits[0] = 0.0
    loss.backward()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="weight changed before"):
        logits.argmax(-1)


def test_logits_that_the_model_itself_reads_are_traced_as_they_are() -> None:
    theirs = model_of(z_loss)
    ours = copy.deepcopy(theirs)
    with pytest.warns(UserWarning, match="logsumexp"):
        ckptkern.convert(ours, ids(), ids(1))
    run = compiled(ours)
    assert_same(step(ours, run), step(theirs, theirs))
    assert type(run(ids(2), ids(3))[0]) is Tensor


def test_without_gradients_logits_are_tensors() -> None:
    ours = converted(model_of())
    with torch.no_grad():
        logits, _ = compiled(ours)(ids(2), ids(3))
    assert type(logits) is Tensor
    assert logits.shape == (2, 9, V)


def test_a_compiled_head_alone() -> None:
    theirs = model_of()
    ours = converted(theirs)
    ours.head.compile(backend="aot_eager", fullgraph=True)
    assert_same(step(ours, ours), step(theirs, theirs))
    assert WIDTH in ours.head(torch.randn(2, WIDTH)).x.shape
