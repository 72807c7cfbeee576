"""patch_torch: which callers run ours, what the arguments do, torch.compile, and how torch's function is restored."""

import functools
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointError, checkpoint

import ckptkern
from ckptkern import patch_torch, unpatch_torch
from ckptkern.state import unpack_saved

SOURCE = """
import functools
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

class Model:
    run = staticmethod(checkpoint)

def default(function, x, run=checkpoint):
    return run(function, x, use_reentrant=False)

def by_name(function, x):
    return checkpoint(function, x, use_reentrant=False)

def of_class(function, x):
    return Model.run(function, x, use_reentrant=False)

def sequential(function, x):
    return checkpoint_sequential([function, lambda x: x], 2, x, use_reentrant=False)

partial = functools.partial(checkpoint, use_reentrant=False)
"""


def imported(tmp_path, name):
    """A module that somebody else wrote."""
    path = tmp_path / f"{name}.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_attribute(function, x):
    return torch_checkpoint.checkpoint(function, x, use_reentrant=False)


class Seen(nn.Module):
    """Does it run in a region of ours?"""

    def forward(self, x):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.ours = hooks is not None and hooks[1] is unpack_saved
        return x.sin()


def is_ours(call):
    seen = Seen()
    call(seen, torch.ones(3, requires_grad=True))
    return seen.ours


@pytest.fixture(autouse=True)
def torchs_own():
    yield
    assert not is_ours(by_attribute)


def test_everyone_who_has_torchs_gets_ours(tmp_path):
    names = ("by_name", "default", "of_class", "sequential", "partial")
    before = imported(tmp_path, "before")
    calls = [by_attribute, lambda seen, x: checkpoint_wrapper(seen)(x), *(getattr(before, name) for name in names)]
    assert [is_ours(call) for call in calls] == [False] * 7
    with patch_torch():
        during = imported(tmp_path, "during")
        calls += [getattr(during, name) for name in names]
        assert [is_ours(call) for call in calls] == [True] * 12
    assert [is_ours(call) for call in calls] == [False] * 12


def test_a_region_outlives_the_patch():
    with patch_torch():
        linear, x = nn.Linear(3, 3), torch.randn(2, 3)
        y = checkpoint(linear, x, use_reentrant=False)
    with torch.no_grad():
        linear.weight.add_(1)
    with pytest.raises(CheckpointError, match="the parameter 'weight' of shape"):  # torch's says nothing
        y.sum().backward()


def test_patches_nest_and_an_error_gives_torchs_back():
    first, second = patch_torch(), patch_torch()
    first.remove()
    first.remove()
    assert is_ours(by_attribute)
    unpatch_torch()
    assert not is_ours(by_attribute)
    second.remove()
    unpatch_torch()
    with pytest.raises(KeyError), patch_torch():
        raise KeyError


def test_somebody_elses_is_refused(monkeypatch):
    def theirs(function, *args):
        return function(*args)

    with monkeypatch.context() as patched:
        patched.setattr(torch_checkpoint, "checkpoint", theirs)
        with pytest.raises(RuntimeError, match=r"expected torch's own function at .* but found .*test_patch\..*theirs"):
            patch_torch()
    with patch_torch(), monkeypatch.context() as patched:  # theirs came later, and does not keep ours
        patched.setattr(torch_checkpoint, "checkpoint", theirs)
        unpatch_torch()


def test_determinism_check_is_ours():
    x = torch.ones(3, requires_grad=True)
    with patch_torch():
        y = checkpoint(
            lambda x: (x * torch.rand(())).exp(),
            x,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="values",
        )
        with pytest.raises(CheckpointError, match="recomputed other values than forward had"):
            y.sum().backward()
        with pytest.raises(ValueError, match="determinism_check should be one of"):
            checkpoint(torch.sin, x, determinism_check="some")


def test_reentrant_is_said_once():
    """It runs as use_reentrant=False does, also where it is left out."""
    ckptkern.segments.checkpoint._say_once.cache_clear()
    x = torch.ones(3, requires_grad=True)
    with patch_torch(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ys = [
            checkpoint(torch.sin, x, **options)
            for options in ({}, {"use_reentrant": None}, *[{"use_reentrant": True}] * 2)
        ]
    assert ["use_reentrant=True runs as use_reentrant=False" in str(warning.message) for warning in caught] == [True]
    for y in ys:
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.detach().cos())


# -- torch.compile ----------------------------------------------------------------------------------------------------

CALLS = {
    "attribute": by_attribute,
    "name": lambda function, x: checkpoint(function, x, use_reentrant=True, preserve_rng_state=False, early_stop=False),
    "partial": functools.partial(checkpoint, use_reentrant=True),
    "ckptkern's": lambda function, x: ckptkern.checkpoint(function, x),
}


def compiled_step(call, fullgraph):
    """(step, x, gradient of x): a compiled function with a checkpoint inside, which breaks the graph unless `fullgraph`."""
    torch._dynamo.reset()
    linear, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)

    def inner(x):
        if not fullgraph:
            torch._dynamo.graph_break()
        return linear(x).sin()

    step = torch.compile(lambda x: CALLS[call](inner, x) * 2, backend="aot_eager", fullgraph=fullgraph)
    return step, x, torch.autograd.grad((linear(x).sin() * 2).sum(), x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_compiled(call, fullgraph):
    step, x, expected = compiled_step(call, fullgraph)
    for patched in (True, False, True):  # a graph of one may run in the other
        patch = patch_torch()
        if not patched:
            patch.remove()
        try:
            x.grad = None
            step(x).sum().backward()  # torch's reentrant variant knows no torch.autograd.grad
            torch.testing.assert_close(x.grad, *expected)
        finally:
            patch.remove()


@pytest.mark.parametrize(("call", "fullgraph"), [("attribute", True), ("ckptkern's", False)])
def test_ours_put_in_place_of_torchs(call, fullgraph, monkeypatch):
    """Unsloth replaces torch's function in this way; looking torch's up by its name gave a RecursionError."""
    monkeypatch.setattr(torch_checkpoint, "checkpoint", ckptkern.checkpoint)
    step, x, expected = compiled_step(call, fullgraph)
    torch.testing.assert_close(torch.autograd.grad(step(x).sum(), x), expected)


AFTER_A_CALL = """
import torch, torch.utils.checkpoint as torch_checkpoint
layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
torch_checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
import ckptkern
with ckptkern.patch_torch():
    for _ in range(2):  # torch's has no such check
        torch_checkpoint.checkpoint(layer, x, use_reentrant=False, determinism_check="values").sum().backward()
"""


@pytest.mark.slow
def test_torchs_has_run_before_ours_was_imported():
    """From its first call on, torch keeps on the function itself what it calls in the function's place."""
    command = [sys.executable, "-c", AFTER_A_CALL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
