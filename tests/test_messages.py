"""What people write by mistake: the error's class, and the words that say what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ckptkern
from ckptkern import memory

X = torch.randn(2, 4, 16)
LINEAR = nn.Linear(16, 16)
CUDA = torch.cuda.is_available()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x)
        return x


def in_inference(run):
    def inside():
        with torch.inference_mode():
            return run()

    return inside


def convert(**options):
    return ckptkern.convert(Model(), X, **options)


def converted():
    model = Model()
    ckptkern.convert(model, X)
    return model


def plan(model=None, *args, **options):
    pytest.importorskip("scipy")
    return ckptkern.plan(model or Model(), *(args or (X,)), **options)


STEPS = {
    "convert": ckptkern.convert,
    "certify": ckptkern.certify,
    "report": ckptkern.report,
    "plan": lambda *args, **named: plan(*args, saved="1GiB", **named),
}
CALLS = {
    "workspace=1.5": (lambda: convert(workspace=1.5), ValueError, "positive number of bytes or a string like '64MiB', not 1.5"),
    "workspace=nan": (lambda: convert(workspace=float("nan")), ValueError, "positive number of bytes .*, not nan"),
    "budget": (lambda: plan(budget=20.5), ValueError, "plan: budget must be a number of bytes, .* '10GiB' .*, not 20.5"),
    "saved": (lambda: plan(saved="20G"), ValueError, "plan: saved must be a number of bytes, .* '10GiB' .*, not '20G'"),
    "frontier": (
        lambda: ckptkern.frontier(Model(), lambda n: torch.randn(1, n, 16), -1.0),
        ValueError, "frontier: budget must be a number of bytes",
    ),
    "BudgetError of a peak": (
        lambda: plan(budget="1KiB"), ckptkern.errors.BudgetError, r"lowest peak of a step is .*, of which .* are .*offload\(\)",
    ),
    "BudgetError of saved bytes": (
        lambda: plan(saved=10), ckptkern.errors.BudgetError, r"Take that budget, fewer tokens or samples, or .*offload\(\)",
    ),
    "checkpoint(layer(x))": (
        lambda: ckptkern.checkpoint(LINEAR(X)), TypeError, r"of shape \(2, 4, 16\)\. .*: checkpoint\(layer, x\), not",
    ),
    "checkpointed(layer(x))": (lambda: ckptkern.checkpointed(LINEAR(X)), TypeError, r"checkpointed\(layer\)\(x\), not"),
    "checkpoint_sequential(x, 2, layers)": (
        lambda: ckptkern.checkpoint_sequential(X, 2, nn.Sequential(LINEAR)), TypeError,
        r"found a tensor: the order is checkpoint_sequential\(layers, segments, input\)",
    ),
    "checkpoint_sequential(layers, x, 2)": (
        lambda: ckptkern.checkpoint_sequential(nn.Sequential(LINEAR), X, 2), ValueError,
        r"is a tensor: the order is checkpoint_sequential\(layers, segments, input\)",
    ),
    "checkpoint_sequential(layer, 2, x)": (
        lambda: ckptkern.checkpoint_sequential(LINEAR, 2, X), TypeError, "or a list of layers, but found Linear",
    ),
    "include of another model": (
        lambda: convert(include="transformer.h.*"), ValueError, r"no module of Model; its lists of layers are 'layers\.\*'",
    ),
    "exclude of another model": (lambda: convert(exclude="transformer.h.*"), ValueError, r"lists of layers are 'layers\.\*'"),
    "include of a list": (lambda: convert(include="layers"), ValueError, r"names a list, .* Its members are 'layers\.\*'"),
    "inputs on another device, as a replica of DataParallel has": (
        lambda: converted()(X.to("meta")), RuntimeError, r"is on meta but .* is on cpu\. .*\.DistributedDataParallel",
    ),
    "plan's include": (lambda: plan(saved="1GiB", include="transformer.h.*"), ValueError, r"lists of layers are 'layers\.\*'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_names_the_remedy(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", STEPS)
def test_a_model_of_which_no_step_runs(name):
    run = STEPS[name]
    with torch.inference_mode():
        model, x = Model(), X.clone()
    for error, message, call in (
        (
            RuntimeError,
            rf"{name}: torch\.inference_mode\(\) is on, .* outside of it",
            in_inference(lambda: run(Model(), X)),
        ),
        (RuntimeError, rf"{name}: a parameter or input was made in torch\.inference_mode", lambda: run(model, X)),
        (RuntimeError, r"pass its clone\(\)", lambda: run(Model(), x)),
        (
            ValueError,
            rf"{name}: .* nn\.DataParallel.*\.DistributedDataParallel",
            lambda: run(nn.DataParallel(Model()), X),
        ),
        (ValueError, rf"{name}: a lazy module has no parameters yet", lambda: run(nn.Sequential(nn.LazyLinear(4)), X)),
        (TypeError, rf"{name}: .* by keyword, {name}\(model, \*\*batch\)", lambda: run(Model(), {"x": X, "labels": X})),
    ):
        with pytest.raises(error, match=message):
            call()


def used(function, device):
    """Calls the function, and enters what it returns."""
    function(device).__enter__()


@pytest.mark.skipif(CUDA, reason="needs a machine without CUDA")
@pytest.mark.parametrize("name", ["peak_memory", "memory_timeline", "free_memory"])
def test_memory_of_a_gpu_that_is_not_there(name):
    with pytest.raises(ValueError, match=f"{name}: torch finds no CUDA device here"):
        used(getattr(memory, name), "cuda")


def test_an_integral_float_is_a_number_of_bytes():
    convert(workspace=1e9)
    with ckptkern.workspace(1e9):
        pass
    assert plan(saved=1e9).budget == 10**9


def test_what_works_in_inference_mode():
    model = Model()
    ckptkern.convert(model, X)
    with torch.inference_mode():
        assert torch.isfinite(model.eval()(X)).all()
        assert torch.equal(ckptkern.checkpoint(LINEAR, X), LINEAR(X))
