"""ckptkern.checkpoint beside test_regions.py: options, memory, errors, the rest of torch. What it notices: test_noticed.py."""

import contextlib
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
from segments.test_regions import leaf, matmuls, mlp
from support.cases import Watch

import ckptkern
from ckptkern import checkpoint
from ckptkern.memory import saved_tensors

# -- random numbers, gradients, parts of a region ----------------------------------------------------------------------


def test_without_preserve_rng_state_recompute_samples_another_mask():
    x = torch.ones(1000, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5) * x, x, preserve_rng_state=False)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not torch.equal(grad != 0, y != 0)


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
    assert torch.equal(*(torch.autograd.grad(output.sum(), x)[0] for output in (y, function(x, [x], named=x))))
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
    """No cycle through hooks, placeholders or exceptions, also of a recompute that raises (pytorch#84413)."""
    model, failing, counts = mlp(0.5), [], []

    def function(x):
        return model(x) if not failing else {}["injected"]

    gc.collect()
    gc.disable()
    try:
        for _ in range(8):
            for fails in (False, True):
                y = checkpoint(function, leaf(5, 8)).sum()
                failing[:] = [1] * fails
                with pytest.raises(KeyError) if fails else contextlib.nullcontext():
                    y.backward()
                failing.clear()
                model.zero_grad()
            counts.append(len(gc.get_objects()))
    finally:
        gc.enable()
    assert counts[-1] - counts[2] < len(counts[3:]), "objects of Python, after each round"


def test_without_gradients_nothing_is_saved():
    model, x = mlp(), torch.randn(5, 8)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, saved_tensors() as saved:
            assert torch.equal(checkpoint(model, x), model(x))
        assert saved.bytes == 0
    checkpoint(model, x).sum().backward()  # training after inference mode (pytorch#77967)


@pytest.mark.parametrize(
    ("options", "torchs_switch", "recomputed"),
    [({}, None, 1), ({"early_stop": False}, None, 2), ({}, False, 2), ({"context_fn": matmuls}, None, 0)],
)
def test_early_stop_and_policies_leave_out_matmuls(options, torchs_switch, recomputed):
    """Counts recomputed matmuls, of two of equal size. Early stop leaves out the last."""
    model, x, flops = mlp()[:4], leaf(5, 8), []
    for run in (functools.partial(checkpoint, **options), lambda model, x: model(x)):
        with torch_checkpoint.set_checkpoint_early_stop(torchs_switch):
            y = run(model, x)
            with Watch() as count:
                y.sum().backward()
        flops.append(count.flops)
    assert flops[0] - flops[1] == recomputed * 2 * 5 * 8 * 32


# -- errors and contexts -----------------------------------------------------------------------------------------------


def test_wrong_arguments():
    x, items = leaf(3), []
    items.append(items)
    for error, message, options in (
        (ValueError, "use_reentrant=True is not supported", {"use_reentrant": True}),
        (ValueError, r"determinism_check should be one of .*'values'.* but got often", {"determinism_check": "often"}),
        (ValueError, "debug=True is incompatible with non-default context_fn", {"debug": True, "context_fn": matmuls}),
        (TypeError, None, {"wrong": 1}),
        (RecursionError, None, {"input": items}),
    ):
        with pytest.raises(error, match=message):
            checkpoint(torch.sin, x, **options)
    assert torch.equal(checkpoint(torch.sin, x, use_reentrant=None), x.sin())


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
    stored, outer = [], leaf(3)

    def function(x):
        side = x.sin().exp()
        stored.append(side)
        if len(stored) == 2:  # its placeholders are those of the region that is being recomputed
            (grad,) = torch.autograd.grad(stored[0].sum(), outer, retain_graph=True)
            assert torch.equal(grad, side.detach() * x.detach().cos())
        return x.cos().exp()

    y = checkpoint(function, outer, early_stop=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), outer)[0], -outer.cos().exp() * outer.sin())
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
    actual, inside, wanted = (
        torch.autograd.grad(y.sum(), [x, *model.parameters()])
        for y in (compiled(x), checkpoint(inner, x).sin(), model(x).sin())
    )
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
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


@pytest.mark.parametrize("inner", [None, False, True])
def test_masks_of_ckptkern_are_repeated_without_random_state(device, inner):
    """Also of a region inside, whether it preserves the random state or not, and for each of two backward passes."""
    x, layer = torch.ones(500, device=device, requires_grad=True), ckptkern.nn.Dropout(0.5)

    def dropped(x):
        return layer(x) * x

    def function(x):
        x = layer(x) * x
        x = x * dropped(x) if inner is None else x * checkpoint(dropped, x, preserve_rng_state=inner)
        return x * layer(x)

    y = checkpoint(function, x, preserve_rng_state=False)
    for retain in (True, False):
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=retain)
        assert torch.equal(grad == 0, y == 0)
    assert 20 < y.count_nonzero() < 120
    assert not torch.equal(y, checkpoint(function, x, preserve_rng_state=False))
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda x: layer(x) / (1 // 0), x, preserve_rng_state=False)
    assert not torch.equal(layer(x), layer(x))  # no region is left behind that records or repeats


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
