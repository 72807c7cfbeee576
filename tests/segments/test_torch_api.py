"""The API of torch.utils.checkpoint from 2.11 to 2.15: signatures, the decorator form, saved-tensor hooks around a selective
region, offload policies; of ckptkern.checkpoint and through patch_torch()."""

import contextlib
import functools
import inspect
import warnings
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from segments.test_patch import is_ours
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

import ckptkern

# -- signatures --------------------------------------------------------------------------------------------------------

UNTIL_2_13 = {  # preserve_rng_state is taken out of kwargs
    "use_reentrant": None, "context_fn": noop_context_fn, "determinism_check": "default", "debug": False,
    "early_stop": True,
}  # fmt: skip
FROM_2_14 = UNTIL_2_13 | {"preserve_rng_state": True, "respect_saved_tensors_hooks": None}
RELEASES = {  # keyword-only parameters of torch.utils.checkpoint.checkpoint, and their defaults
    "2.11": UNTIL_2_13,
    "2.12": UNTIL_2_13,
    "2.13": UNTIL_2_13,
    "2.14": FROM_2_14,
    "2.15": FROM_2_14,
}
POLICIES = ["MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"]
RUNNING = ".".join(torch.__version__.split(".")[:2])
KNOWS_HOOKS = "respect_saved_tensors_hooks" in RELEASES.get(RUNNING, FROM_2_14)
needs_2_14 = pytest.mark.skipif(not KNOWS_HOOKS, reason="new in torch 2.14")


def keywords(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_the_running_torch_is_as_the_table_says():
    """It fails on a release that is not in the table, and where torch has a new argument or policy."""
    torchs = torch_checkpoint.checkpoint
    assert keywords(torchs) == RELEASES[RUNNING]
    assert keywords(torchs).keys() <= keywords(ckptkern.checkpoint).keys()
    (function, args, *_, kwargs), (ours, *others, last) = (
        inspect.signature(f).parameters.values() for f in (torchs, ckptkern.checkpoint)
    )
    assert [p.kind for p in (function, args, kwargs)] == [p.kind for p in (ours, others[0], last)]
    assert function.default is (None if KNOWS_HOOKS else inspect.Parameter.empty)
    assert [policy.name for policy in CheckpointPolicy] == POLICIES
    sequential = inspect.signature(torch_checkpoint.checkpoint_sequential).parameters
    assert list(sequential) == ["functions", "segments", "input", "use_reentrant", "kwargs"]


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


@pytest.mark.parametrize("release", RELEASES)
def test_arguments_of_every_release_are_accepted(release):
    """With the same defaults, but for use_reentrant, which is False."""
    options, x = RELEASES[release] | {"use_reentrant": False}, torch.randn(3, requires_grad=True)
    assert keywords(ckptkern.checkpoint).items() >= options.items()
    for y in (
        ckptkern.checkpoint(torch.sin, x, **options),
        ckptkern.checkpoint(**options)(torch.sin)(x),
        ckptkern.checkpoint_sequential([torch.sin, nn.Identity()], 2, x, **options),
        ckptkern.nn.Sequential(Sine(), nn.Identity(), segments=2, **options)(x),
        ckptkern.nn.LayerStack([Sine(), nn.Identity()], 1, **options)(x),
    ):
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.cos())


# -- the decorator form ------------------------------------------------------------------------------------------------


def f(x):
    return x.sin().exp()


CALLS = {
    "decorator": lambda checkpoint, x: checkpoint(use_reentrant=False)(f)(x),
    "hooks": lambda checkpoint, x: checkpoint(f, x, use_reentrant=False, respect_saved_tensors_hooks=True),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("patched", [False, True])
def test_calls_of_2_14_work_on_every_torch(call, patched):
    x = torch.randn(3, requires_grad=True)
    with ckptkern.patch_torch() if patched else contextlib.nullcontext():
        y = CALLS[call](torch_checkpoint.checkpoint if patched else ckptkern.checkpoint, x)
    assert torch.equal(y, f(x))
    assert torch.equal(*(torch.autograd.grad(output.sum(), x)[0] for output in (y, f(x))))


def decorates(patched):
    """Returns a checkpoint with the decorator form: torch has it since 2.14, and before while it is patched."""
    return torch_checkpoint.checkpoint if patched else ckptkern.checkpoint


@pytest.mark.parametrize("patched", [False, True])
def test_decorated_methods_and_their_arguments(patched):
    """The options are the decorator's: a call's arguments are the function's, whatever their names."""
    with ckptkern.patch_torch() if patched else contextlib.nullcontext():
        checkpoint, runs = decorates(patched), []

        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(3))

            @checkpoint(use_reentrant=False, early_stop=False)
            def forward(self, x, *, debug, early_stop=2.0):
                """Scales."""
                runs.append(debug)
                return (x * self.weight).sin() * early_stop

        module, x = Scaled(), torch.randn(3)
        y = module(x, debug="mine", early_stop=3.0)
        (grad,) = torch.autograd.grad(y.sum(), module.weight)
        torch.testing.assert_close(grad, 3 * x * (x * module.weight).cos())
        assert runs == ["mine", "mine"]
        assert (Scaled.forward.__name__, Scaled.forward.__doc__) == ("forward", "Scales.")
        with pytest.raises(ValueError, match=r"Unexpected keyword arguments: earlystop"):
            checkpoint(use_reentrant=False, earlystop=True)
        with pytest.raises(ValueError, match="determinism_check should be one of"):
            checkpoint(use_reentrant=False, determinism_check="some")(f)(x)


@needs_2_14
def test_patched_torch_runs_what_was_decorated_before():
    """And no more of it when the patch is gone, wherever it was decorated."""
    seen = {}

    def called(decorated):
        return is_ours(lambda function, x: (seen.update(function=function), decorated(x)))

    def decorate():
        return torch_checkpoint.checkpoint(use_reentrant=False)(lambda x: seen["function"](x))

    before = decorate()
    assert not called(before)
    with ckptkern.patch_torch():
        during = decorate()
        with ckptkern.patch_torch():
            assert called(before)
        assert called(before)
        assert called(during)
    assert not called(before)
    assert not called(during)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("call", ["decorator", "hooks", "decorated"])
@pytest.mark.parametrize("patched", [False, pytest.param(True, marks=needs_2_14)])
def test_compiled(call, patched, fullgraph):
    if patched and (call == "decorator" or (call == "decorated" and fullgraph)):
        pytest.skip("Dynamo fails on torch's decorator form inside a graph, also where nothing is patched")
    checkpoint, x = decorates(patched), torch.randn(3, requires_grad=True)
    decorated = checkpoint(use_reentrant=False)(f)
    run = (lambda x: decorated(x)) if call == "decorated" else (lambda x: CALLS[call](checkpoint, x))
    torch._dynamo.reset()
    with ckptkern.patch_torch() if patched else contextlib.nullcontext():
        y = torch.compile(lambda x: run(x) * 2, backend="aot_eager", fullgraph=fullgraph)(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 2 * x.cos() * f(x))


# -- saved-tensor hooks around a selective region ----------------------------------------------------------------------


def patched_torchs(*args, **kwargs):
    with ckptkern.patch_torch():
        return torch_checkpoint.checkpoint(*args, **kwargs)


CHECKPOINTS = {
    "ckptkern": ckptkern.checkpoint,
    "patched": patched_torchs,
    "torch": functools.partial(torch_checkpoint.checkpoint, use_reentrant=False),
}
OURS = ("ckptkern", "patched")
saved_matmuls = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


class Matmuls:
    """Two matmuls with an operator between them, and the gradients."""

    def __init__(self):
        self.x, self.w = (torch.randn(4, 4, dtype=torch.double, requires_grad=True) for _ in range(2))
        self.expected = self.gradients(self.function(self.x))

    def function(self, x):
        return ((x @ self.w).sin() @ self.w).cos()

    def gradients(self, y):
        return torch.autograd.grad(y.square().sum(), (self.x, self.w))

    def check(self, y):
        for actual, wanted in zip(self.gradients(y), self.expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


class Elsewhere:
    """Saved-tensor hooks that keep values in a place of their own."""

    def __init__(self):
        self.values, self.seen, self.taken = [], [], []

    def pack(self, x):
        self.values.append(x.detach().numpy().copy())
        self.seen.append(weakref.ref(x))
        return len(self.values) - 1

    def unpack(self, place):
        self.taken.append(place)
        return torch.from_numpy(self.values[place])

    def __enter__(self):
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)


def run_selective(checkpoint, respect, context_fn=saved_matmuls, function=None):
    """(hooks around it, categories of its warnings) of a region, whose gradients are right."""
    counted = Matmuls()
    options = {} if respect is None else {"respect_saved_tensors_hooks": respect}
    with Elsewhere() as hooks, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = checkpoint(function or counted.function, counted.x, context_fn=context_fn, **options)
    if function is None:
        counted.check(y)
    else:
        y.sum().backward()
    return hooks, [warning.category for warning in caught]


@pytest.mark.parametrize("respect", [None, False, True])
@pytest.mark.parametrize("name", [*OURS, pytest.param("torch", marks=needs_2_14)])
def test_hooks_see_what_a_policy_saves_only_if_asked_to(name, respect):
    """Both matmuls besides x, and torch holds nothing of them. torch from 2.14 on warns of each where nothing is said."""
    hooks, warned = run_selective(CHECKPOINTS[name], respect)
    assert [values.shape for values in hooks.values] == [(4, 4)] * (3 if respect else 1)
    assert warned == [FutureWarning] * (2 if respect is None and KNOWS_HOOKS else 0)
    alive = [reference() is not None for reference in hooks.seen]
    assert sum(alive[1:]) == 0
    assert len(hooks.taken) == len(hooks.values)


def test_nothing_warns_without_hooks_around():
    """torch would take the region's own hooks for the user's."""
    counted = Matmuls()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for respect in (None, True):
            options = {"context_fn": saved_matmuls, "respect_saved_tensors_hooks": respect}
            counted.check(ckptkern.checkpoint(counted.function, counted.x, **options))


NESTED = [
    (outer, inner) for outer in ("ckptkern", "torch") for inner in ("ckptkern", "torch") if "ckptkern" in (outer, inner)
]


@pytest.mark.parametrize("selective", ["outer", "inner", "both"])
@pytest.mark.parametrize(("outer", "inner"), NESTED)
def test_nested_regions_are_no_hooks_of_the_user(outer, inner, selective):
    """A region's hooks lie between a policy and the user's: of a region inside, or around."""
    if not KNOWS_HOOKS and "torch" in {"outer": outer, "inner": inner, "both": outer + inner}[selective]:
        pytest.skip("torch knows no respect_saved_tensors_hooks before 2.14")
    chosen = {"context_fn": saved_matmuls, "respect_saved_tensors_hooks": True}
    counted = Matmuls()
    around = functools.partial(CHECKPOINTS[outer], **({} if selective == "inner" else chosen))
    inside = functools.partial(CHECKPOINTS[inner], counted.function, **({} if selective == "outer" else chosen))
    for hooks in (contextlib.nullcontext(), Elsewhere()):
        with hooks, warnings.catch_warnings():
            warnings.simplefilter("error")
            y = around(lambda x: inside(x).exp(), counted.x)
        counted.check(y.log())
    if (outer, inner, selective) == ("ckptkern", "torch", "inner"):
        return  # torch's policy takes the hooks of a plain region of ours for the user's: it recomputes what that would save
    matrices = [values for values in hooks.values if values.size]  # torch 2.11 saves an empty tensor for a region, too
    assert len(matrices) == {"outer": 3, "inner": 3, "both": 5}[selective]


def test_two_backward_passes_and_a_context_that_raises():
    """The contexts are entered again for the second; what a failed forward has pushed is popped."""
    counted, top = Matmuls(), torch._C._autograd._top_saved_tensors_default_hooks
    mutable = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE
    )
    y = ckptkern.checkpoint(counted.function, counted.x, context_fn=mutable, respect_saved_tensors_hooks=True)
    torch.autograd.grad(y.sum(), counted.x, retain_graph=True)
    counted.check(y)
    with pytest.raises(ZeroDivisionError), Elsewhere():
        ckptkern.checkpoint(lambda x: x @ x / (1 // 0), counted.x, context_fn=mutable, respect_saved_tensors_hooks=True)

    class Fails(contextlib.nullcontext):
        def __enter__(self):
            raise KeyError

    with pytest.raises(KeyError):
        ckptkern.checkpoint(counted.function, counted.x, context_fn=lambda: (Fails(), contextlib.nullcontext()))
    assert top(False) is None


def test_a_change_of_what_a_policy_saves():
    """An error, as without hooks around, unless hooks have copied it before: torch from 2.14 on passes it on at once."""

    def function(x):
        y = x @ x
        z = y.sin()
        y.add_(1)
        return z

    def step(**options):
        x = torch.eye(3, requires_grad=True)
        with Elsewhere():
            y = ckptkern.checkpoint(function, x, context_fn=saved_matmuls, **options)
        return torch.autograd.grad(y.sum(), x)[0]

    for respect in (False,) if KNOWS_HOOKS else (False, True):
        with pytest.raises(RuntimeError, match="has been mutated"):
            step(respect_saved_tensors_hooks=respect)
    if KNOWS_HOOKS:
        x = torch.eye(3, requires_grad=True)
        expected = torch.autograd.grad((x @ x).sin().sum(), x)[0]
        torch.testing.assert_close(step(respect_saved_tensors_hooks=True), expected)


@pytest.mark.parametrize("respect", [None, False, True])
def test_hooks_see_saved_decisions_only_if_asked_to(respect):
    def routed(x):
        values, chosen = x.topk(2, -1)
        return torch.zeros_like(x).scatter(-1, chosen, values.exp())

    hooks, warned = run_selective(ckptkern.checkpoint, respect, ckptkern.saved_decisions, routed)
    assert [values.shape for values in hooks.values] == [(4, 4)] + [(4, 2)] * bool(respect)
    assert len(hooks.taken) == len(hooks.values)
    assert not warned


@pytest.mark.filterwarnings("error")  # also what destructors raise
def test_stores_of_ckptkern_take_what_a_policy_saves(tmp_path):
    """So it is offloaded: three matrices of a size lie in the host's store, and not x alone. Their buffers are used again."""
    held = []
    for respect in (False, True):
        counted, store = Matmuls(), ckptkern.storage.offload(min_bytes=0, directory=tmp_path)
        options = {"context_fn": saved_matmuls, "respect_saved_tensors_hooks": respect}
        for _ in range(2):
            with store:
                y = ckptkern.checkpoint(counted.function, counted.x, **options)
            counted.check(y)
            del y
            held.append(store.host_bytes)
    assert held == [held[0], held[0], 3 * held[0], 3 * held[0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_policys_tensors_leave_the_gpu():
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    results = {}
    (x @ x).sum().backward()  # cuBLAS's workspace is there from now on
    for respect in (False, True):
        before = torch.cuda.memory_allocated()
        with torch.autograd.graph.save_on_cpu():
            y = ckptkern.checkpoint(
                lambda x: (x @ x).sin(), x, context_fn=saved_matmuls, respect_saved_tensors_hooks=respect
            )
        results[respect] = torch.cuda.memory_allocated() - before, torch.autograd.grad(y.sum(), x)[0]
        del y
    assert results[False][0] - results[True][0] == x.nbytes
    assert torch.equal(results[False][1], results[True][1])


# -- offload policies --------------------------------------------------------------------------------------------------


class Runs(TorchDispatchMode):
    """The operators that run, in order, beneath any policy."""

    def __init__(self):
        super().__init__()
        self.runs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
@pytest.mark.parametrize("name", OURS)
def test_offload_policies_do_what_torchs_do(name, policy):
    """In eager mode every release from 2.11 to 2.15 recomputes such operators and offloads nothing."""

    def matmuls_run(name, policy):
        def choose(context, op, *args, **kwargs):
            return policy if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

        counted, context_fn = Matmuls(), functools.partial(create_selective_checkpoint_contexts, choose)
        with Runs() as mode:
            counted.check(CHECKPOINTS[name](counted.function, counted.x, context_fn=context_fn, early_stop=False))
        return mode.runs.count(torch.ops.aten.mm.default)

    ran = matmuls_run(name, policy)
    assert ran == matmuls_run("torch", policy)
    assert ran == matmuls_run(name, CheckpointPolicy.MUST_RECOMPUTE)
    assert ran == matmuls_run(name, CheckpointPolicy.MUST_SAVE) + 2
