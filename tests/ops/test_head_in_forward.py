"""The loss whose gradients are formed in forward: when, three matmuls, what is saved, and every way to ask for gradients."""

import functools
import itertools

import pytest
import torch
from ops.test_cross_entropy import class_weights, exact_gradients, make, ours
from support.cases import DTYPES, Watch, check_exactness, each_backend
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.ops.cross_entropy import loss as losses

M, WIDTH, CLASSES = 300, 8, 90
formed, recomputed = (functools.partial(ours, recompute=mode) for mode in ("none", "full"))


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """How often it ran."""
    calls, original = [], losses.loss_and_gradients

    def counted(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(losses, "loss_and_gradients", counted)
    return calls


OPTIONS = {
    "everything": dict(
        weight=class_weights(CLASSES), label_smoothing=0.1, softcap=5.0, logit_scale=0.5, workspace=1, reduction="sum"
    ),
    # in float16 these multiply what gradients are formed of, which must not overflow
    "large class weights": dict(weight=torch.full((CLASSES,), 200.0)),
    "a large scale": dict(logit_scale=200.0),
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_exact_as_with_recomputed_logits(dtype, name, backend, runs):
    tensors, target = make((2, M // 2), WIDTH, CLASSES, dtype)

    def run(t):
        with ckptkern.backend(backend):
            return formed(target, **OPTIONS[name])(t)

    check_exactness(run, recomputed(target, **OPTIONS[name]), tensors)
    assert runs


def test_three_matmuls_and_what_is_saved(runs):
    """Of each set of trained inputs only the gradients, x's in its dtype and the parameters' in float32. Backward of a graph
    that ends scales them in place."""
    for trained in list(itertools.product((False, True), repeat=3))[1:]:
        tensors, target = make((M,), WIDTH, CLASSES, torch.bfloat16)
        for t, on in zip(tensors.values(), trained, strict=True):
            t.requires_grad_(on)
        with Watch() as watch, saved_tensors([*tensors.values(), target]) as saved:
            loss = formed(target, reduction="sum", workspace=2**30)(tensors)
            forward = len(watch.dtypes)
            with peak_memory("cpu") as peak:
                loss.backward()
        assert bool(runs) == any(trained[:2])
        if runs:
            sizes = (2 * M * WIDTH, 4 * CLASSES * WIDTH, 4 * CLASSES)
            assert saved.bytes == sum(size for size, on in zip(sizes, trained, strict=True) if on)
            assert forward == len(watch.dtypes) == 1 + sum(trained[:2])
            assert peak.bytes < 4 * CLASSES * WIDTH
        runs.clear()


def test_exponentials_are_saved_where_they_are_fewer_bytes_or_needed(runs):
    """For other results, without gradients, under torch.func, compiled, and inside an activation checkpoint."""
    tensors, target = make((M,), M, CLASSES)
    formed(target)(tensors)
    tensors, target = make((M,), WIDTH, CLASSES)
    for options in (
        dict(reduction="none"),
        dict(z_loss=0.1),
        dict(return_lse=True),
        dict(top_k=2),
        dict(recompute="full"),
    ):
        formed(target, **options)(tensors)

    def call(*values):
        return formed(target)(dict(zip(tensors, values, strict=True)))

    values = tensors.values()
    with torch.no_grad():
        call(*values)
    torch.func.grad(call)(*values)
    torch._dynamo.reset()
    torch.compile(call, backend="aot_eager", fullgraph=True)(*values)
    for use_reentrant in (False, True):
        checkpoint(call, *values, use_reentrant=use_reentrant).backward()
    assert not runs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_retained_graph_gives_the_same_gradients_again(dtype, runs):
    """Then backward scales copies."""
    tensors, target = make((M,), WIDTH, CLASSES, dtype)
    loss, inputs = formed(target)(tensors), list(tensors.values())
    first, *others = (
        torch.autograd.grad(loss, inputs, torch.tensor(3.0), retain_graph=keep) for keep in (True, True, False)
    )
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, inputs)
    assert len(runs) == 1


def test_float16_keeps_small_probabilities(runs):
    """Of 200,000 classes most have a probability of 5e-6, of which float16 has 6 bits. A mean, under a loss scale."""
    tensors, target = make((64,), 8, 200_000, torch.float16, bias=False, ignore="none")
    exact = exact_gradients(target, tensors, torch.float32)["weight"]
    (formed(target)(tensors) * 65536.0).backward()
    assert runs
    rare = torch.ones(200_000, dtype=torch.bool).index_fill(0, target, False)  # rows without a target
    actual, want = tensors["weight"].grad[rare].float() / 65536, exact[rare]
    assert ((actual - want).norm(dim=1) / want.norm(dim=1)).mean() < 6e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_of_a_step(dtype, runs):
    """Above the gradients and the float32 sum of the weight's: one chunk of 128 tokens, and a CPU's float32 copies."""
    tokens, d, V = 1024, 64, 8192
    tensors, target = make((tokens,), d, V, dtype, bias=False)
    with peak_memory("cpu") as peak:
        formed(target, workspace=1)(tensors).backward()
    held = 4 * V * d + tokens * d * dtype.itemsize + 128 * 4 * V
    copies = 128 * 2 * V + 4 * V * d + 2 * V * d  # exponentials, the weight in float32, the result
    assert peak.bytes <= held + (copies if dtype.itemsize == 2 else 0) + 2**18
    assert runs
