"""The loss whose gradients are formed in forward: when, three matmuls, what is saved, and every way to ask for gradients."""

import functools
import itertools

import pytest
import torch
from ops.test_cross_entropy import IGNORED, check, class_weights, make, ours, unfused
from support.cases import DTYPES, assert_same, assert_same_within_rounding, gradients, output_gradient
from support.drop_ins import pairwise
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.ops.cross_entropy import in_forward

M, WIDTH, CLASSES = 300, 8, 90


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """How often it ran."""
    found, original = [], in_forward.loss_and_gradients

    def counted(*args):
        found.append(args)
        return original(*args)

    monkeypatch.setattr(in_forward, "loss_and_gradients", counted)
    return found


CASES = pairwise(
    dtype=DTYPES, backend=("eager", "triton"), recompute=("none", "selective"), reduction=("mean", "sum"), bias=(True, False),
    weighted=(False, True), label_smoothing=(0.0, 0.1), softcap=(None, 5.0), logit_scale=(1.0, 0.5), workspace=(None, 1),
    ignore=("none", "some", "all but one"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_as_exact_as_pytorch(case, runs):
    case = dict(case)
    tensors, target = make((2, M // 2), WIDTH, CLASSES, case.pop("dtype"), case.pop("bias"), case.pop("ignore"))
    weight = class_weights(CLASSES) if case.pop("weighted") else None
    with ckptkern.backend(case.pop("backend")):
        check(target, tensors, weight=weight, **case)
    assert runs


class Matmuls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._opname.startswith(("mm", "addmm", "bmm", "baddbmm"))
        return func(*args, **(kwargs or {}))


def test_three_matmuls_and_what_is_saved(runs):
    """Of each set of trained inputs only the gradients, x's in its dtype and the parameters' in float32."""
    for trained in list(itertools.product((False, True), repeat=3))[1:]:
        tensors, target = make((M,), WIDTH, CLASSES, torch.bfloat16)
        for t, on in zip(tensors.values(), trained, strict=True):
            t.requires_grad_(on)
        with Matmuls() as forward, saved_tensors([*tensors.values(), target]) as saved:
            loss = ours(target, tensors, recompute="none", reduction="sum", workspace=2**30)
        assert bool(runs) == any(trained[:2])
        if runs:
            sizes = (2 * M * WIDTH, 4 * CLASSES * WIDTH, 4 * CLASSES)
            assert saved.bytes == sum(size for size, on in zip(sizes, trained, strict=True) if on)
            assert forward.count == 1 + sum(trained[:2])
            with Matmuls() as backward:
                loss.backward()
            assert backward.count == 0
        runs.clear()


def test_exponentials_are_saved_where_they_are_fewer_bytes(runs):
    tensors, target = make((M,), M, CLASSES)
    ours(target, tensors, recompute="none")
    tensors, target = make((M,), WIDTH, CLASSES)
    for options in (
        dict(reduction="none"),
        dict(z_loss=0.1),
        dict(return_lse=True),
        dict(recompute="full"),
        dict(top_k=2),
    ):
        ours(target, tensors, **{"recompute": "none"} | options)
    with torch.no_grad():
        ours(target, tensors, recompute="none")
    assert not runs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_retained_graph_gives_the_same_gradients_again(dtype, runs):
    """Then backward scales copies."""
    tensors, target = make((M,), WIDTH, CLASSES, dtype)
    loss, inputs = ours(target, tensors, recompute="none"), list(tensors.values())
    first = torch.autograd.grad(loss, inputs, torch.tensor(3.0), retain_graph=True)
    for retained in (True, False):
        again = torch.autograd.grad(loss, inputs, torch.tensor(3.0), retain_graph=retained)
        assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, inputs)
    assert len(runs) == 1


def test_second_order(runs):
    tensors, target = make((M,), WIDTH, CLASSES, torch.float64)
    found = []
    for run in (ours, unfused):
        inputs = list(tensors.values())
        loss = run(target, tensors, label_smoothing=0.1, recompute="none")
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        total = sum((grad * output_gradient(grad)).sum() for grad in first)
        found.append(dict(zip(tensors, torch.autograd.grad(total, inputs), strict=True)))
    assert_same_within_rounding(*found)
    assert len(runs) == 1


def test_float16_keeps_small_probabilities(runs):
    """Of 200,000 classes most have a probability of 5e-6, of which float16 has 6 bits. A mean, under a loss scale."""
    tensors, target = make((64,), 8, 200_000, torch.float16, bias=False, ignore="none")
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    unfused(target, exact).backward()
    (ours(target, tensors, recompute="none") * 65536.0).backward()
    assert runs
    rare = torch.ones(200_000, dtype=torch.bool).index_fill(0, target, False)  # rows without a target
    found, want = tensors["weight"].grad[rare].double() / 65536, exact["weight"].grad[rare]
    assert ((found - want).norm(dim=1) / want.norm(dim=1)).mean() < 6e-4


def test_units_do_not_overflow(runs):
    """In float16 a class weight or a scale of logits multiplies them."""
    tensors, target = make((M,), WIDTH, CLASSES, torch.float16)
    check(target, tensors, weight=torch.full((CLASSES,), 200.0), recompute="none")
    check(target, tensors, logit_scale=200.0, recompute="none")
    assert runs


def test_inside_a_checkpoint_nothing_is_formed_in_forward(runs):
    tensors, target = make((M,), WIDTH, CLASSES)
    run = functools.partial(ours, target, recompute="none")
    for reentrant in (False, True):
        found = gradients(
            lambda t, reentrant=reentrant: checkpoint(
                lambda *v: run(dict(zip(t, v, strict=True))), *t.values(), use_reentrant=reentrant
            ),
            tensors,
        )
        assert not runs
        assert_same_within_rounding(found, gradients(functools.partial(ours, target), tensors))


def test_compiled_and_transformed(runs):
    """They take the exponentials, with the same results."""
    torch._dynamo.reset()
    tensors, target = make((M,), WIDTH, CLASSES)
    run = functools.partial(ours, target, recompute="none")
    expected = gradients(run, tensors)
    runs.clear()
    assert_same_within_rounding(gradients(torch.compile(run, backend="aot_eager", fullgraph=True), tensors), expected)
    x, others = tensors["x"], {name: t.detach() for name, t in tensors.items() if name != "x"}
    dx = torch.func.grad(lambda x: run({"x": x} | others))(x.detach())
    assert not runs
    assert_same_within_rounding({"x": dx}, dict(x=torch.autograd.grad(run(tensors), tensors["x"])[0]))


def test_main_grad_and_autocast(runs):
    tensors, target = make((M,), WIDTH, CLASSES)
    weight = torch.nn.Parameter(tensors["weight"].detach().bfloat16())
    weight.main_grad = torch.ones(weight.shape)
    plain = weight.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = (ours(target, tensors | {"weight": one}, recompute="none") for one in (weight, plain))
    (expected,) = torch.autograd.grad(expected, plain)
    loss.backward()
    assert runs
    assert weight.grad is None
    assert weight.grad_added_to_main_grad
    assert (weight.main_grad - 1 - expected).norm() < 1e-2 * expected.norm()
    assert tensors["x"].grad.dtype == torch.float32


def test_an_ignored_tokens_input_does_not_matter(runs):
    tensors, target = make((M,), WIDTH, CLASSES)
    expected = gradients(functools.partial(ours, target, recompute="none"), tensors)
    with torch.no_grad():
        tensors["x"][target == IGNORED] = 1e38
    found = gradients(functools.partial(ours, target, recompute="none"), tensors)
    del expected["weight"], found["weight"]  # of matmuls in another order
    assert_same(found, expected)
    assert runs


def test_targets_out_of_bounds(runs):
    tensors, target = make((M,), WIDTH, CLASSES)
    target[7] = CLASSES
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        ours(target, tensors, recompute="none")
    assert runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_of_a_step(dtype, runs):
    """Above the gradients and the float32 sum of the weight's: one chunk of 128 tokens, and a CPU's float32 copies."""
    tokens, d, V = 1024, 64, 8192
    tensors, target = make((tokens,), d, V, dtype, bias=False)
    with peak_memory("cpu") as peak:
        ours(target, tensors, recompute="none", workspace=1).backward()
    narrow = dtype.itemsize == 2
    held = 4 * V * d + tokens * d * dtype.itemsize + 128 * 4 * V
    copies = narrow * (128 * 2 * V + 4 * V * d + 2 * V * d)  # exponentials, the weight in float32, the result
    assert peak.bytes <= held + copies + 2**18
    assert runs


def test_nothing_is_saved_twice():
    """Backward of a graph that ends scales in place."""
    tensors, target = make((M,), WIDTH, CLASSES)
    loss = ours(target, tensors, recompute="none")
    with peak_memory("cpu") as peak:
        loss.backward()
    assert peak.bytes < 4 * CLASSES * WIDTH
