"""ckptkern.checkpoint beside test_regions.py: options, memory, errors, the rest of torch. What it notices: test_noticed.py."""

import collections
import functools
import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern import checkpoint
from ckptkern.memory import saved_tensors


def mlp(*, p=0.0):
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(p), nn.Linear(32, 8), nn.LayerNorm(8))


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


class Count(TorchDispatchMode):
    """How often each op runs inside."""

    def __init__(self):
        super().__init__()
        self.ops = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func._opname if hasattr(func, "_opname") else str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


# -- random numbers, gradients, parts of a region ----------------------------------------------------------------------


@pytest.mark.parametrize("preserve", [False, True])
def test_preserve_rng_state(preserve):
    """Without it recompute samples another mask; with it backward uses forward's (OLMo-core#828)."""
    x = torch.ones(1000, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5) * x, x, preserve_rng_state=preserve)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad != 0, y != 0) == preserve


def test_second_order():
    x = torch.randn(4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: checkpoint(lambda x: x.sin() * x.exp(), x), x)


def test_parts_of_a_region_backward_and_a_group_recomputes_once():
    """Two backward passes over different parts: the second recomputes for itself, except in a group."""
    runs, x = [], leaf(4)

    def function(x):
        runs.append(1)
        return x.sin().exp(), x.cos().exp()

    expected = torch.autograd.grad(sum(part.sum() for part in function(x)), x)[0]
    runs.clear()
    for parts, together in (((0, 1), False), ((0, 1), True)):
        x.grad, outputs = None, checkpoint(function, x, early_stop=False)
        with torch_checkpoint.GraphExecGroup() if together else torch.enable_grad():
            for part in parts:
                outputs[part].sum().backward()
        torch.testing.assert_close(x.grad, expected)
    assert len(runs) == 3 + 2


# -- memory ------------------------------------------------------------------------------------------------------------


def test_hooks_around_a_region_see_its_arguments_and_may_copy_them():
    """So save_on_cpu and our stores reach what it saves. One tensor in two places is one again."""
    seen, packed = [], []

    def function(x, others, *, named):
        seen.append(x is others[0] is named)
        return (x * others[0]).sin() * named

    x = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t.clone())[1], lambda t: t):
        y = checkpoint(function, x, [x], named=x)
    assert len(packed) == 1
    assert packed[0] is x
    assert torch.equal(*(torch.autograd.grad(one.sum(), x)[0] for one in (y, function(x, [x], named=x))))
    assert seen == [True] * 3


def test_recomputed_tensors_are_let_go():
    """With retain_graph too, as in torch's: what a backward pass has read is freed. So is a graph without a backward pass."""
    alive = []

    def function(x):
        y = x.sin()
        alive.append(weakref.ref(y))
        return y.cos().exp()

    checkpoint(function, leaf(9)).sum().backward(retain_graph=True)
    inner = (leaf(9) * 2).requires_grad_()
    alive.append(weakref.ref(inner))
    y = checkpoint(torch.exp, inner.sin())
    gc.disable()
    try:
        del inner, y
        assert [reference() for reference in alive] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.slow
def test_memory_is_flat_without_the_garbage_collector():
    """No cycle through hooks, placeholders or exceptions; every tenth recompute raises (pytorch#84413)."""
    model, failing = mlp(p=0.5), []

    def function(x):
        if failing:
            failing.clear()
            raise KeyError("injected")
        return model(x)

    def step(i):
        y = checkpoint(function, leaf(5, 8)).sum()
        failing.extend([1] * (i % 10 == 0))
        try:
            y.backward()
        except KeyError:
            assert i % 10 == 0
        assert not failing
        model.zero_grad(set_to_none=True)

    def counted():
        """Tensors, and all objects that the collector knows of."""
        objects = gc.get_objects()
        return sum(issubclass(type(o), torch.Tensor) for o in objects), len(objects)

    gc.collect()
    gc.disable()
    try:
        for i in range(20):
            step(i)
        before = counted()
        for i in range(60):
            step(i)
        after = counted()
    finally:
        gc.enable()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 2  # `before` itself


def test_without_gradients_nothing_is_saved():
    model, x = mlp(), torch.randn(5, 8)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, saved_tensors() as saved:
            assert torch.equal(checkpoint(model, x), model(x))
        assert saved.bytes == 0
    checkpoint(model, x).sum().backward()  # training after inference mode (pytorch#77967)


def test_early_stop_leaves_out_the_last_matmul():
    model, x, matmuls = mlp()[:4], leaf(5, 8), []
    for early_stop, torchs_switch in ((True, None), (False, None), (True, False)):
        with torch_checkpoint.set_checkpoint_early_stop(torchs_switch), Count() as count:
            checkpoint(model, x, early_stop=early_stop).sum().backward()
        matmuls.append(count.ops["mm"] + count.ops["addmm"])
    assert matmuls[0] == matmuls[1] - 1 == matmuls[2] - 1


def test_selective_policies_save_the_matmuls():
    model, aten = mlp(p=0.5), torch.ops.aten
    policy = functools.partial(
        torch_checkpoint.create_selective_checkpoint_contexts, [aten.addmm.default, aten.mm.default]
    )
    y = checkpoint(model, leaf(5, 8), context_fn=policy)
    with Count() as count:
        y.sum().backward()
    assert (count.ops["addmm"], count.ops["gelu"]) == (0, 1)


# -- errors and contexts -----------------------------------------------------------------------------------------------


def test_wrong_arguments():
    x = leaf(3)
    with pytest.raises(ValueError, match="use_reentrant=True is not supported"):
        checkpoint(torch.sin, x, use_reentrant=True)
    assert torch.equal(checkpoint(torch.sin, x, use_reentrant=None), x.sin())
    with pytest.raises(ValueError, match=r"determinism_check should be one of .*'values'.* but got often"):
        checkpoint(torch.sin, x, determinism_check="often")
    with pytest.raises(ValueError, match="debug=True is incompatible with non-default context_fn"):
        checkpoint(torch.sin, x, debug=True, context_fn=lambda: (None, None))
    with pytest.raises(TypeError):
        checkpoint(torch.sin, x, wrong=1)
    items: list = []
    items.append(items)
    with pytest.raises(RecursionError):
        checkpoint(lambda x, items: x.sin(), x, items)


def test_state_after_an_error_in_forward_and_a_read_without_gradients():
    with pytest.raises(KeyError, match="injected"):
        checkpoint(lambda x: {}["injected"], leaf(3))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    y = checkpoint(lambda x: x.sin().exp(), leaf(4))
    with torch.no_grad():
        assert torch.equal(y.grad_fn._saved_result, y)  # recomputes
        assert not torch.is_grad_enabled()


def test_a_first_result_read_in_recompute():
    """A backward pass inside the recompute that needs the first run's tensors: the region recomputes inside itself."""
    stored, given = [], leaf(3)

    def function(x):
        side = x.sin().exp()
        stored.append(side)
        if len(stored) == 2:  # its placeholders are those of the region that is being recomputed
            (grad,) = torch.autograd.grad(stored[0].sum(), given, retain_graph=True)
            assert torch.equal(grad, side.detach() * x.detach().cos())
        return x.cos().exp()

    y = checkpoint(function, given, early_stop=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), given)[0], -given.cos().exp() * given.sin())
    assert len(stored) == 3


# -- torch.compile, threads, GPUs --------------------------------------------------------------------------------------


def test_compiled_around_and_inside():
    """torch.compile sees torch's checkpoint, in one graph."""
    torch._dynamo.reset()
    model, x = mlp(), leaf(5, 8)

    def around(x):
        return checkpoint(model, x, preserve_rng_state=False).sin()

    inner = torch.compile(model, backend="aot_eager")
    compiled = torch.compile(around, backend="aot_eager", fullgraph=True)
    found, inside, wanted = (
        torch.autograd.grad(y.sum(), [x, *model.parameters()])
        for y in (compiled(x), checkpoint(inner, x).sin(), model(x).sin())
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inside, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match=r"not supported under torch\.compile"):
        torch.compile(lambda x: checkpoint(model, x, determinism_check="values"), backend="eager", fullgraph=True)(x)


def test_two_threads():
    """Regions of several threads, and one graph's backward from another thread (pytorch#96764)."""

    def work(model, x):
        expected = torch.autograd.grad(model(x).sum(), x)[0]
        for _ in range(20):
            mine = torch.autograd.grad(checkpoint(model, x, preserve_rng_state=False).sum(), x)[0]
            torch.testing.assert_close(mine, expected)
        return checkpoint(model, x).sum(), x, expected

    with ThreadPoolExecutor(3) as pool:
        for y, x, expected in pool.map(work, [mlp()[:4] for _ in range(3)], [leaf(5, 8) for _ in range(3)]):
            torch.testing.assert_close(torch.autograd.grad(y, x)[0], expected)


def test_cuda_state_is_not_read_without_cuda_arguments():
    """A region of CPU tensors leaves a GPU, and its lazy initialisation, alone."""
    before = torch.cuda.is_initialized()
    checkpoint(torch.sin, leaf(4)).sum().backward()
    assert torch.cuda.is_initialized() == before


@pytest.mark.parametrize("nested", [False, True])
def test_random_state_of_the_arguments_device(device, nested):
    """Also where the only tensor on it lies in a list in a dict (pytorch#121212)."""
    x = torch.ones(1000, device=device, requires_grad=True)
    function = (lambda d: F.dropout(d["a"][0], 0.5) * d["a"][0]) if nested else (lambda x: F.dropout(x, 0.5) * x)
    y = checkpoint(function, {"a": [x]} if nested else x)
    get_state = torch.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    torch.rand(1, device=device)
    state = get_state()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad == 0, y == 0)
    assert torch.equal(get_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph():
    """Refused with the way out where torch's state would be read; captured without it."""
    x, layer = torch.ones(64, device="cuda", requires_grad=True), ckptkern.nn.Dropout(0.5)

    def step(**options):
        y = checkpoint(lambda x: layer(x) * x, x, **options)
        return y, torch.autograd.grad(y.sum(), x)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(preserve_rng_state=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grad = step(preserve_rng_state=False)
    outputs = []
    for _ in range(2):
        graph.replay()
        assert torch.equal(grad == 0, y == 0)
        outputs.append(y.detach().clone())
    assert not torch.equal(*outputs)
    with pytest.raises(RuntimeError, match="preserve_rng_state=False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()


ENDS_IN_A_SEGMENT = """
import sys, threading, time, torch, ckptkern

inside, go_on = threading.Event(), threading.Lock()
go_on.acquire()

class Asked(tuple):
    @property
    def _make(self):  # in the constructor of the region's state
        inside.set()
        go_on.acquire()

class Last:
    def __del__(self, go_on=go_on.release, sleep=time.sleep):  # Python is ending: the thread that asks for it is unwound
        go_on()
        sleep(0.5)

x = torch.ones(1, requires_grad=True)
threading.Thread(target=ckptkern.checkpoint, args=(lambda x, _: x.sin(), x, Asked()), daemon=True).start()
inside.wait()
sys.last = Last()
"""


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_thread_that_python_ends_inside_of_a_region(runs):
    """The thread is unwound without a thread state, so nothing on its stack may need one. Not every run would crash."""
    processes = [subprocess.Popen([sys.executable, "-c", ENDS_IN_A_SEGMENT]) for _ in range(runs)]
    assert [process.wait() for process in processes] == [0] * runs
