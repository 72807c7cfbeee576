"""ckptkern.warm_up: it compiles what a training step launches, and nothing else of that step stays."""

import copy
import json
import random
import subprocess
import sys
import textwrap
from collections import deque

import numpy as np
import pytest
import torch
from support.outside import start
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern.tools import warm_up as module

BF16 = torch.bfloat16


class Stateful(nn.Module):
    """Moves all that a forward can move, and may raise after it."""

    def __init__(self, raises: bool = False):
        super().__init__()
        self.raises = raises
        self.norm, self.mlp, self.drop = nn.BatchNorm1d(8), ckptkern.nn.MLP(8, 32, dropout=0.5), nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(8).requires_grad_(False)
        self.calls, self.log, self.nested = 0, [], {"a": [deque([1])], "tensor": torch.zeros(2)}
        self.generator = torch.Generator().manual_seed(1)
        self.mean, self.cache = torch.zeros(8), None

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.nested["a"][0].append(2)
        self.nested["new"] = 1
        self.nested["tensor"].add_(1)
        self.mean = self.mean.lerp(x.detach().float().mean(0), 0.5)
        self.cache, self.made = x.detach(), x.detach()
        noise = torch.rand(8, generator=self.generator) + random.random() + float(np.random.rand())
        scale.mul_(2)
        y = self.drop(ckptkern.checkpoint(self.mlp, self.frozen(self.norm(x)))) * noise * scale
        if self.raises:
            raise RuntimeError("after everything has moved")
        return y


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 8, requires_grad=True), torch.ones(8)


def state_of(model: nn.Module, *more: Tensor) -> list:
    """All that must be as before, to be compared with torch.equal and ==."""
    generators = [m.generator.get_state() for m in model.modules() if hasattr(m, "generator")]
    return copy.deepcopy(
        [
            dict(model.state_dict()),
            [None if p.grad is None else p.grad.clone() for p in model.parameters()],
            [sorted(vars(m)) for m in model.modules()],
            [m.training for m in model.modules()],
            generators,
            [
                (
                    m.calls,
                    m.log,
                    m.nested["a"],
                    sorted(m.nested),
                    m.nested["tensor"],
                    m.mean,
                    m.cache,
                    hasattr(m, "made"),
                )
                for m in model.modules()
                if isinstance(m, Stateful)
            ],
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            np.random.get_state()[2],
            [tensor.detach() for tensor in more],
            [p.grad for p in more],
        ]
    )


def same(a, b) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_of_the_step_stays(autocast: bool, training: bool) -> None:
    model = Stateful().train(training)
    model.frozen.eval()
    model.mlp.fc1.weight.grad = torch.ones_like(model.mlp.fc1.weight)
    gradient, args = model.mlp.fc1.weight.grad, inputs()
    before = state_of(model, *args)
    with torch.autocast("cpu", BF16, enabled=autocast), torch.no_grad():
        ckptkern.warm_up(model, args[0], scale=args[1])
    for after, other in zip(state_of(model, *args), before, strict=True):
        assert same(after, other), (after, other)
    assert model.mlp.fc1.weight.grad is gradient
    assert model.norm.weight.grad is None


def test_nothing_stays_of_a_step_that_raises() -> None:
    model, args = Stateful(raises=True).eval(), inputs()
    before = state_of(model, *args)
    with pytest.raises(RuntimeError, match="after everything has moved"):
        ckptkern.warm_up(model, *args)
    for after, other in zip(state_of(model, *args), before, strict=True):
        assert same(after, other), (after, other)


class Casts(TorchDispatchMode):
    """Counts them: autocast keeps those of weights until it is left."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_training_goes_on_as_if_it_had_not_been() -> None:
    """Also inside the autocast that warmed up, whose cache of cast weights belongs to a graph that is freed."""
    results = []
    for warm in (False, True):
        torch.manual_seed(0)
        model, (x, _) = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), inputs()
        with torch.autocast("cpu", BF16):
            if warm:
                ckptkern.warm_up(model, x)
            with Casts() as casts:
                y = model(x)
        y.float().square().sum().backward()
        results.append([torch.tensor(casts.count), y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


def test_backward_runs_and_outside_of_autocast() -> None:
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            seen.append((torch.is_autocast_enabled("cpu"), dy.is_contiguous(), model.training))
            return dy

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(x)

    model = Model().eval()
    with torch.autocast("cpu", BF16):
        ckptkern.warm_up(model, torch.randn(3, 4, requires_grad=True))
    assert seen == [(False, True, True)]


def test_a_loss_is_what_is_differentiated() -> None:
    seen = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
            self.used.weight.register_hook(lambda grad: seen.append("used"))
            self.unused.weight.register_hook(lambda grad: seen.append("unused"))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.unused(x), "loss": self.used(x).mean()}

    ckptkern.warm_up(Model(), torch.randn(3, 2))
    assert seen == ["used"]


def test_an_optimizer_inside_backward_waits() -> None:
    model = nn.Linear(4, 4)
    steps = []
    model.weight.register_post_accumulate_grad_hook(lambda p: steps.append(p.grad.clone()))
    before = copy.deepcopy(model.state_dict())
    ckptkern.warm_up(model, torch.randn(3, 4))
    assert steps == []
    model(torch.randn(3, 4)).sum().backward()
    assert len(steps) == 1
    assert same(dict(before), dict(model.state_dict()))


def test_main_grad_is_not_added_to() -> None:
    model = ckptkern.nn.Linear(4, 4)
    model.weight.main_grad = main = torch.zeros(4, 4)
    ckptkern.warm_up(model, torch.randn(3, 4))
    assert model.weight.main_grad is main
    assert not main.any()


def test_what_is_frozen_in_training_stays_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train()
    model[1].eval()
    seen = []
    model.register_forward_hook(lambda *_: seen.extend(m.training for m in model.modules()))
    ckptkern.warm_up(model, torch.randn(3, 4))
    assert seen == [True, True, False]


def test_a_parameter_that_forward_writes_is_named() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.inner.weight.clamp_(-0.1, 0.1)
            return self.inner(x)

    with pytest.raises(RuntimeError, match=r"changed the parameter inner\.weight in place"):
        ckptkern.warm_up(Clamped(), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ckptkern.warm_up(torch.relu, torch.ones(2)), TypeError, "must be a torch.nn.Module, not builtin"),
        (lambda: ckptkern.warm_up(nn.ReLU()), ValueError, "example inputs are missing"),
        (lambda: ckptkern.warm_up(nn.ReLU(), torch.ones(2)), ValueError, "warm_up: wanted an output with a gradient"),
        (lambda: ckptkern.warm_up(nn.LazyLinear(2), torch.ones(1, 2)), ValueError, "a lazy module has no parameters"),
    ],
)
def test_what_is_wrong_is_said(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_without_kernels_it_says_so() -> None:
    warm = ckptkern.warm_up(nn.Linear(4, 4), torch.randn(3, 4))
    assert (warm.kernels, warm.names, warm.count) == ([], [], 0)
    assert str(warm).startswith("no kernel to compile: the model ran in PyTorch ops; the step took ")
    assert str(module.WarmUp([], 3)).startswith("no kernel to compile: this process had all that the 3 launches need; ")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert ckptkern.warm_up(nn.Linear(4, 4), torch.randn(3, 4)).count == 0


GROUPS = []


def test_a_model_in_distributed_data_parallel(tmp_path) -> None:
    """Its reducer sees a whole step, and its next steps go on."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
        x = torch.randn(3, 4)
        ckptkern.warm_up(model, x)
        assert model.module.weight.grad is None
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
        assert torch.allclose(model.module.weight.grad, x.sum(0).expand(4, 4))
    finally:
        # with the last reference torch joins a thread that may wait for the GIL, which the joining thread holds
        GROUPS.append(torch.distributed.group.WORLD)
        torch.distributed.destroy_process_group()


# Kernels are compiled in a process that does not interpret, for a GPU that need not be there.
COMPILED = """
    import json, torch, ckptkern
    from triton import knobs
    from emulator.emulated import emulated

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (ckptkern.nn.Linear(32, 32, activation="relu", recompute="full") for _ in range(2))

        def forward(self, x):
            return ckptkern.checkpoint(self.b, self.a(x))

    told = []
    knobs.compilation.listener = before = lambda **event: told.append(event["src"].name)
    model, x = Twice().to(torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    with emulated(80) as launches, ckptkern.backend("triton"):
        warm = ckptkern.warm_up(model, x)
        launched = [one.kernel for one in launches]
        again = ckptkern.warm_up(model, x)
    assert knobs.compilation.listener is before and not knobs.runtime.launch_enter_hook.calls
    cached = [kernel.cached for kernel in again.kernels]
    print(json.dumps([warm.names, warm.count, launched, told[: len(launched)], cached, str(warm)]))
"""


def test_kernels_of_forward_recompute_and_backward_are_counted_once() -> None:
    """The emulator compiles a launch anew, which Triton's cache answers; a GPU's second launch asks nobody."""
    process = start("-c", textwrap.dedent(COMPILED), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate()
    assert process.returncode == 0, error
    names, count, launched, told, cached, text = json.loads(out)
    assert set(names) == set(launched)
    assert len(names) >= 2
    assert len(launched) > count >= len(names)  # two layers launch alike, and one of them twice
    assert told == launched
    assert cached == [True] * count
    assert text.startswith(f"{count} kernels in ")
    assert f"  {names[0]}" in text


C_MODULE = """
    #include <Python.h>
    static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "launcher"};
    PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&definition); }
"""


def test_what_the_c_compiler_builds_is_counted(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton builds its launchers, which nothing does without a GPU; what its cache has is not built again."""
    build = pytest.importorskip("triton.runtime.build")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = build._build
    with module.compilations(lambda *_: None) as compiled:
        for _ in range(2):
            build.compile_module_from_src(C_MODULE, "launcher")
    assert build._build is before
    assert len(compiled.c_modules) == 1
    assert compiled.c_modules[0] > 0
    warm = module.WarmUp([module.Kernel("_mlp_bwd_kernel", 1.0, False)], 3, 2.0, [0.25, 0.5])
    assert str(warm).splitlines()[-1] == "    0.75 s  the C compiler, for launches x2"


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_after_it_nothing_is_compiled_and_a_graph_is_captured(
    p: float, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    model = ckptkern.nn.GatedMLP(80, 208, dropout=p).to("cuda", BF16)  # of sizes that no other test has
    x = torch.randn(304, 80, device="cuda", dtype=BF16, requires_grad=True)
    state = torch.cuda.get_rng_state()
    warm = ckptkern.warm_up(model, x)
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert warm.count >= 2
    assert warm.launches >= warm.count
    again = ckptkern.warm_up(model, x)
    assert (again.count, again.launches) == (0, warm.launches)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), module.compilations(lambda *_: None) as compiled:
        model(x).backward(torch.ones_like(x))
        torch.cuda.synchronize()
    model.zero_grad()
    with module.compilations(lambda *_: None) as captured, torch.cuda.graph(graph, stream=stream):
        with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
            ckptkern.warm_up(model, x)
        model(x).backward(torch.ones_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert compiled.count == captured.count == 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
