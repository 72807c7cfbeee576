"""What is chosen for a call, and who sees it: backend, workspace, the state of autograd's threads, and the dispatcher."""

import re
import threading
from types import SimpleNamespace

import pytest
import torch
from support import catalog
from support.cases import (
    DTYPES,
    Watch,
    check_exactness,
    gradients,
    output_gradient,
    uninitialised_is_nan,
    with_copies,
)
from support.properties import OF_OPS, call_of, calls_of, dropping

import ckptkern
from ckptkern import eager
from ckptkern.memory import peak_memory
from ckptkern.ops.dispatch import choices
from ckptkern.ops.registration import library

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NN = ckptkern.nn

# -- backend -----------------------------------------------------------------------------------------------------------


def test_backend_is_given_back():
    assert choices._choice.backend == "auto"
    with ckptkern.backend("eager"):
        with pytest.raises(KeyError), ckptkern.backend("triton"):
            raise KeyError
        assert choices._choice.backend == "eager"
        with ckptkern.backend("auto"):
            assert choices._choice.backend == "auto"
        assert choices._choice.backend == "eager"
    with pytest.raises(ValueError, match="backend: name must be one of 'auto', 'eager', 'triton', not 'cuda'"):
        ckptkern.backend("cuda").__enter__()
    assert choices._choice.backend == "auto"


@pytest.mark.parametrize("name", [op for op in OF_OPS if OF_OPS[op].op.kernels])
def test_what_the_kernels_do_not_cover(name):
    """backend("triton") raises; under "auto" the eager backend runs."""
    call = dropping(name)
    tensors = call.make(torch.float64)
    reason = re.escape(
        "backend('triton') was asked for, but the kernels cover float16, bfloat16 and float32, not torch.float64"
    )
    with ckptkern.backend("triton"), pytest.raises(RuntimeError, match=f"{call.entry.function.__name__}: {reason}"):
        call(tensors)
    assert call(tensors).dtype == torch.float64


@pytest.mark.parametrize("name", ["mlp", "attention_block", "linear_cross_entropy"])
def test_the_backend_of_forward_runs_backward(name):
    call = dropping(name)
    with ckptkern.backend("eager"):
        y = call(call.make())
    with ckptkern.backend("triton"), Watch() as watch:
        y.backward(output_gradient(y))
    assert "eager" in watch.strings
    assert "triton" not in watch.strings


def test_environment_variable(monkeypatch):
    """It is read once, when the package is imported."""

    def drop(value):
        monkeypatch.setenv("CKPTKERN_BACKEND", value)
        monkeypatch.setattr(choices, "_choice", choices._Choice())
        return ckptkern.dropout(torch.ones(2, 2))

    assert drop("eager").shape == (2, 2)
    wanted = "dropout: the environment variable CKPTKERN_BACKEND must be one of 'auto', 'eager', 'triton', not 'cuda'"
    with pytest.raises(ValueError, match=f"^{wanted}$"):
        drop("cuda")


# -- the state in which backward runs ----------------------------------------------------------------------------------


def test_backward_runs_in_the_settings_of_forward(monkeypatch):
    """The whole snapshot is entered around backward, in whatever thread, and left again."""
    call, seen, matmul = call_of("mlp"), [], torch.mm
    with uninitialised_is_nan():  # which is a setting of torch
        y = call(call.make())
    monkeypatch.setattr(
        torch, "mm", lambda *a, **k: seen.append(torch.are_deterministic_algorithms_enabled()) or matmul(*a, **k)
    )
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    assert set(seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("device_type", ["mps", "xpu", "cpu", "cuda"])
def test_autocast_of_any_device(device_type):
    """torch's quick query, whether any autocast is on, leaves out some devices."""
    x = SimpleNamespace(device=torch.device(device_type), is_cpu=device_type == "cpu", is_cuda=device_type == "cuda")
    assert choices.autocast_dtype(x) is None
    outer = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, True)
    try:
        assert choices.autocast_dtype(x) == torch.get_autocast_dtype(device_type)
    finally:
        torch.set_autocast_enabled(device_type, outer)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("workspace", [None, 1])
def test_a_cpu_without_matmuls_of_a_dtype_multiplies_in_float32(workspace, dtype, monkeypatch):
    """As exact as its own, in one chunk and in several; nothing is multiplied in 16 bits."""
    with_copies(monkeypatch, True)
    call = dropping("gated_mlp", sizes=catalog.Sizes((300,)), workspace=workspace)
    check_exactness(call, lambda t: call.oracle(t)[0], call.make(dtype))
    with Watch() as watch:
        gradients(call, call.make(dtype))
    assert {*watch.dtypes} == {(FP32, FP32)}
    assert not eager.upcasts(FP32)


# -- the workspace -----------------------------------------------------------------------------------------------------


SIZES = {
    None: None, "7": 7, "64MiB": 2**26, "64 mib": 2**26, "1.5KiB": 1536, "2GB": 2 * 10**9, " 3KB ": 3000, "1e3B": 1000,
}  # fmt: skip
NO_SIZES = -1, "", "MiB", "-5MiB", "0MiB", "5 PB", "inf", "nan"


def test_units():
    assert {size: choices.parse_bytes("mlp", size) for size in SIZES} == SIZES
    for size in NO_SIZES:
        with pytest.raises(ValueError, match=f"^mlp: workspace must be .* like '64MiB', not {re.escape(repr(size))}$"):
            choices.parse_bytes("mlp", size)


@pytest.mark.parametrize(("memory", "workspace"), [(4 * 2**30, 2**28), (80 * 2**30, 2.5 * 2**30)])
def test_the_default_is_a_part_of_the_gpu(memory, workspace, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=memory))
    choices.default_workspace.cache_clear()
    try:
        assert choices.default_workspace("cuda", 0) == workspace
    finally:
        choices.default_workspace.cache_clear()
    assert choices.default_workspace("cpu", None) == 2**25
    chosen = [choices.choose_workspace("mlp", None, torch.ones(1), summed) for summed in (2**20, 2**24)]
    assert chosen == [2**25, 2**26]


def workspaces(name: str, **more) -> set[int]:
    """Returns the workspaces, in bytes, with which an op's call runs."""
    call = call_of(name, **more)
    (_, (_, *lists)), _ = calls_of(call)
    return {*library.values_of(library.unpack(library.layout_of(call.entry.op.Options), lists), "workspace")} - {None}


@pytest.mark.parametrize("name", [name for name in OF_OPS if "workspace" in OF_OPS[name].parameters])
def test_the_setting_is_that_of_an_op_without_its_own(name):
    (default,) = workspaces(name)
    with ckptkern.workspace("1MiB"):
        assert workspaces(name) == {2**20} != {default}
        assert workspaces(name, workspace=12345) == {12345}
    assert workspaces(name) == {default}


def test_the_workspace_of_the_process():
    """A call sets it, the end of a `with` sets the one of before."""
    try:
        ckptkern.workspace("3MiB")
        with ckptkern.workspace(2**21), ckptkern.workspace(None):
            assert workspaces("mlp") == {choices.WORKSPACE}
        with pytest.raises(KeyError), ckptkern.workspace(7):
            raise KeyError
        with pytest.raises(ValueError, match=r"workspace: workspace must be .* or a string like '64MiB', not 'much'"):
            ckptkern.workspace("much")
        assert workspaces("mlp") == {3 * 2**20}
    finally:
        ckptkern.workspace(None)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("rows", [64, 1024])
def test_the_peak_of_a_step_is_not_above_eager_pytorchs(rows, dtype, monkeypatch):
    """With the default workspace, also where the weights' gradients weigh more than the rows; without the float32 copies by
    which a CPU multiplies a type that oneDNN does not."""
    with_copies(monkeypatch, False)
    call = call_of("gated_mlp", sizes=catalog.Sizes((rows,), 64, 256, 64))
    tensors = call.make(dtype)

    def peak(function):
        with peak_memory("cpu") as peaks:
            gradients(function, tensors)
        return peaks.bytes

    small = 2**16  # float32 sums of biases, and the rows that a column's sum copies
    assert peak(call) <= peak(lambda t: call.oracle(t)[0]) + small


# -- the dispatcher ----------------------------------------------------------------------------------------------------


def test_the_profiler_sees_the_ops_and_nobody_else_pays_for_the_dispatcher(monkeypatch):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        NN.MLP(8)(torch.randn(3, 8)).sum().backward()
    names = [event.name for event in profiler.events() if event.name.startswith("ckptkern::")]
    assert names == ["ckptkern::mlp_fwd", "ckptkern::mlp_bwd"]
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", None)
    NN.MLP(8)(torch.randn(3, 8)).sum().backward()


def test_a_tensor_that_outlived_its_transform_keeps_its_graph():
    """torch's ops unwrap it, and so must a Function that is applied without torch's own apply()."""
    x, escaped = torch.randn(3, 8, requires_grad=True), []
    torch.func.grad(lambda x: (escaped.append(x), x.sum())[1])(x)
    NN.MLP(8)(escaped[0]).sum().backward()
    assert x.grad.abs().sum() > 0
