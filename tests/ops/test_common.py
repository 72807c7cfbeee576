"""What the ops share: precision and autocast, workspace and chunks, backend, and errors that say what was wanted and came."""

import contextlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.cases import (
    ACTIVATIONS,
    LAYERS,
    MODES,
    P,
    Sizes,
    Watch,
    assert_as_exact,
    assert_same,
    assert_same_within_rounding,
    check_against_float64,
    clone,
    gradients,
    make,
    output_gradient,
    setups,
    with_copies,
)

import ckptkern
from ckptkern import eager
from ckptkern.memory import peak_memory
from ckptkern.ops.dispatch import choices as _choices
from ckptkern.ops.registration import gradients as _gradients

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS_OF_LAYERS = setups(("gelu",), ("full",), ops=LAYERS)


def autocast(dtype: torch.dtype | None):
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def raises(error: type, *parts: str):
    """pytest.raises for a message with these parts, in order."""
    return pytest.raises(error, match=".*".join(re.escape(part) for part in parts))


# -- precision ---------------------------------------------------------------------------------------------------------


def cast(tensors: dict, dtype: torch.dtype) -> dict:
    return {name: t.to(dtype) for name, t in tensors.items()}


def multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """What a CPU's matmuls read."""
    return FP32 if eager.upcasts(dtype) else dtype


@pytest.mark.sampled
@pytest.mark.parametrize("around", [None, BF16, FP16], ids=["no autocast", "bf16 autocast", "fp16 autocast"])
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), list(itertools.product((FP32, BF16, FP16, FP64), repeat=2)), ids=str
)
@pytest.mark.parametrize("setup", OPS_OF_LAYERS)
def test_every_pair_of_dtypes(setup, x_dtype, weight_dtype, around):
    """The compute dtype is autocast's, or the one that all share; each gradient has its tensor's dtype."""
    tensors = {name: t.to(x_dtype if name == "x" else weight_dtype) for name, t in make(setup).items()}
    tensors = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    dtype = x_dtype if around is None or x_dtype == FP64 else around

    def fused(t):
        with autocast(around):
            return setup.fused(t)

    if dtype == x_dtype != weight_dtype and (around is None or x_dtype == FP64):
        with pytest.raises(TypeError, match=f"{setup.op.name}: input is {x_dtype} but a parameter is {weight_dtype}"):
            fused(tensors)
        return
    with Watch() as watch:
        ours = gradients(fused, tensors)
    assert {*watch.dtypes} == {(multiplied_in(dtype),) * 2}
    assert ours["y"].dtype == dtype
    unfused = gradients(lambda t: setup.unfused(cast(t, dtype)), tensors)
    if dtype == FP64:  # there is nothing more exact to compare with
        assert_same_within_rounding(ours, unfused)
        return
    exact = gradients(setup.unfused, clone(clone(tensors, dtype), FP64), output_gradient(ours["y"]).double())
    assert_as_exact(ours, unfused, exact)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("setup", setups(("gelu",), ("selective", "full"), dropout=(P,), ops=LAYERS))
def test_a_cpu_without_matmuls_of_a_dtype_multiplies_in_float32(setup, dtype, monkeypatch):
    """As exact as its own, in one chunk and in several; nothing is multiplied in 16 bits."""
    with_copies(monkeypatch, True)
    tensors = make(setup, Sizes(lead=(300,)), dtype)
    for workspace in (None, 1):
        check_against_float64(setup.with_(workspace=workspace), tensors)
    with Watch() as watch:
        gradients(setup.fused, tensors)
    assert {*watch.dtypes} == {(FP32, FP32)}


def test_float32_is_multiplied_as_it_is():
    assert not eager.upcasts(FP32)
    assert not eager.upcasts(FP64)


@pytest.mark.parametrize("setup", setups(("gelu",), MODES, dropout=(P,), ops=LAYERS))
@pytest.mark.parametrize("workspace", [None, 1], ids=["whole", "chunked"])
def test_backward_runs_in_the_autocast_of_forward(setup, workspace):
    """bf16 forward and backward called outside, or fp32 forward and backward called inside."""
    setup = setup.with_(workspace=workspace)
    tensors = make(setup, Sizes(lead=(140,)))
    for forward, backward, dtype in ((BF16, None, BF16), (None, BF16, FP32)):
        with Watch() as watch:
            with autocast(forward):
                y = setup.fused(tensors)
            with autocast(backward):
                grads = torch.autograd.grad(y, list(tensors.values()), output_gradient(y))
        assert y.dtype == dtype
        # on the CPU, a weight gradient of more than one chunk is summed up in float32
        allowed = {(multiplied_in(dtype),) * 2} | ({(FP32, FP32)} if workspace else set())
        assert set(watch.dtypes) <= allowed
        assert [g.dtype for g in grads] == [FP32] * len(grads)


@pytest.mark.parametrize("setup", OPS_OF_LAYERS)
def test_second_order_in_another_autocast(setup):
    """The second derivative too is taken at the precision of forward."""
    tensors = make(setup)

    def penalty(around):
        y = setup.fused(tensors)
        first = torch.autograd.grad(y, list(tensors.values()), output_gradient(y), create_graph=True)
        with autocast(around):
            return torch.autograd.grad(first, list(tensors.values()), [torch.ones_like(g) for g in first])

    for inside, outside in zip(penalty(BF16), penalty(None), strict=True):
        assert torch.equal(inside, outside)


@pytest.mark.parametrize("setup", OPS_OF_LAYERS)
def test_backward_runs_in_the_settings_of_forward(setup, monkeypatch):
    """The whole snapshot is entered around backward, in whatever thread, and left again."""
    seen = []
    matmul = torch.mm

    def recording(*args, **kwargs):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return matmul(*args, **kwargs)

    torch.use_deterministic_algorithms(True)
    try:
        y = setup.fused(make(setup))
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch, "mm", recording)
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    y = setup.fused(make(setup))
    assert set(seen) == {True}
    seen.clear()
    y.sum().backward()
    assert set(seen) == {False}


@pytest.mark.parametrize("setup", OPS_OF_LAYERS)
def test_autocast_switched_off_inside_autocast(setup):
    tensors = make(setup)
    with torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", enabled=False):
        ours = gradients(setup.fused, tensors)
    assert_same(ours, gradients(setup.fused, tensors))


@pytest.mark.parametrize("setup", OPS_OF_LAYERS)
def test_no_grad_first_inside_one_autocast(setup):
    """A weight cast under no_grad must not be reused by the training step that follows."""
    tensors = make(setup)

    def twice(t):
        with torch.autocast("cpu", dtype=BF16):
            with torch.no_grad():
                setup.fused(t)
            return setup.fused(t)

    def once(t):
        with torch.autocast("cpu", dtype=BF16):
            return setup.fused(t)

    assert_same(gradients(twice, tensors), gradients(once, tensors))


@pytest.mark.parametrize("setup", OPS_OF_LAYERS)
def test_state_after_an_error_in_backward(setup, monkeypatch):
    """The outer autocast comes back when recompute raises, and the next step is right."""
    tensors = make(setup)
    expected = gradients(setup.fused, tensors)
    with torch.autocast("cpu", dtype=BF16):
        y = setup.fused(tensors)

    def fail(*args, **kwargs):
        assert not torch.is_autocast_enabled("cpu")  # op bodies run without it
        raise RuntimeError("out of memory, say")

    with monkeypatch.context() as patch:
        for name in ("linear_bwd", "act_grad", "mlp_bwd", "gated_bwd"):
            patch.setattr(eager, name, fail)
        with torch.autocast("cpu", dtype=FP16):
            with pytest.raises(RuntimeError, match="say"):
                y.sum().backward()
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == FP16
    assert not torch.is_autocast_enabled("cpu")
    assert_same(gradients(setup.fused, tensors), expected)


@pytest.mark.parametrize("setup", setups(ACTIVATIONS, ("none", "full"), ops=["linear_act"]))
def test_activations_at_the_end_of_fp16(setup):
    """At |z| ~ 10,000, where z^3 and exp(z) are far outside fp16, everything is finite that is finite in torch."""
    tensors = make(setup, dtype=FP16)
    tensors["x"] = tensors["x"].detach().mul(3000).requires_grad_()
    unfused, ours = gradients(setup.unfused, tensors), gradients(setup.fused, tensors)
    assert unfused["y"].abs().max() > 5000
    for name, reference in unfused.items():
        assert ours[name][reference.isfinite()].isfinite().all(), name


# -- workspace ---------------------------------------------------------------------------------------------------------

CHUNKED = setups(dropout=(P,), ops=("linear_stack", "mlp", "gated_mlp"))
FIVE_CHUNKS = Sizes(lead=(4, 135))  # 128 tokens per chunk, 28 in the last


@pytest.mark.parametrize("setup", CHUNKED)
def test_chunks_change_no_mask_and_no_gradient(setup):
    """A workspace too small for 540 tokens; masks, biases and weights as without."""
    small = setup.with_(workspace=1)
    check_against_float64(small, make(setup, FIVE_CHUNKS))
    tensors = make(setup, FIVE_CHUNKS, FP64)
    assert_same_within_rounding(gradients(small.fused, tensors), gradients(setup.fused, tensors))


@pytest.mark.parametrize("setup", CHUNKED)
def test_chunks_with_frozen_inputs(setup):
    """The weight gradients are there when x needs none."""
    setup = setup.with_(workspace=1)
    names = list(make(setup))
    for frozen in (names[:1], names[:2], names[1:], names[:-2]):
        check_against_float64(setup, make(setup, FIVE_CHUNKS, frozen=frozen))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("setup", setups(("relu",), ("none", "full"), ops=("linear_stack", "mlp", "gated_mlp")))
def test_error_does_not_grow_with_the_number_of_chunks(setup, dtype):
    """48 chunks are summed in float32 and rounded once, biases too."""
    sizes = Sizes(lead=(128 * 48,), features=8, hidden=8, out=8)
    tensors = make(setup, sizes, dtype)
    exact = gradients(setup.unfused, clone(tensors, FP64))

    def errors(workspace):
        ours = gradients(setup.with_(workspace=workspace).fused, tensors)
        return {
            n: (torch.linalg.vector_norm(ours[n].double() - e) / torch.linalg.vector_norm(e)).item()
            for n, e in exact.items()
        }

    whole, chunked = errors(None), errors(1)
    for name, error in whole.items():
        assert chunked[name] <= 1.05 * error, name


def transient(setup, tensors, workspace):
    """The peak of backward beyond the gradients: x's in its dtype, parameters' as the float32 sums of chunks, biases' with
    the part that is added."""
    y = setup.with_(workspace=workspace).fused(tensors)
    dy = output_gradient(y)
    with peak_memory("cpu") as peak:
        grads = torch.autograd.grad(y, list(tensors.values()), dy)
    sizes = [g.numel() * (g.element_size() if i == 0 else 4 * (3 - g.dim())) for i, g in enumerate(grads)]
    return peak.bytes - sum(sizes)


# All for one activation of each set of saved tensors and number of temporaries; of the others what they hold themselves.
HELD = ("relu", "relu2", "gelu", "quick_gelu")
BOUNDED = setups(HELD, ("selective", "full"), dropout=(0.0, P), ops=("linear_stack", "mlp", "gated_mlp"))
BOUNDED += setups([name for name in ACTIVATIONS if name not in HELD], ("full",), ops=("gated_mlp",))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("setup", BOUNDED)
def test_workspace_bounds_the_memory_of_backward(setup, dtype, monkeypatch):
    """With 128 rows per chunk, the minimum, and with room for more: the estimate forgets no float32 copy.

    Without oneDNN, which takes blocks of its own on processors that multiply bfloat16: up to 200 KB, for any number of rows.
    """
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    tensors = make(setup, Sizes(lead=(640,), features=8, hidden=64, out=8), dtype)
    module = sys.modules["ckptkern.ops.mlp." + ("branch" if "mlp" in setup.op.name else setup.op.name)]
    with mock.patch.object(module, "token_chunks", wraps=_gradients.token_chunks) as spy:
        transient(setup, tensors, 1)
    least = 128 * spy.call_args.args[1]
    for workspace in (least, 2 * least):
        assert 0 < transient(setup, tensors, workspace) <= workspace


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rows", [64, 256, 1024])
@pytest.mark.parametrize("setup", setups(("relu", "gelu"), ("full",), ops=("mlp", "gated_mlp")))
def test_peak_of_a_step_is_not_above_eager_pytorch(setup, rows, dtype, monkeypatch):
    """With the default workspace, at sizes where the weights' gradients weigh more than the rows, too; without the float32
    copies by which a CPU multiplies a type that oneDNN does not."""
    with_copies(monkeypatch, False)
    tensors = make(setup, Sizes(lead=(rows,), features=64, hidden=256, out=64), dtype)

    def peak(function):
        with peak_memory("cpu") as found:
            gradients(function, tensors)
        return found.bytes

    small = 2**16  # float32 sums of biases, and the rows that a column's sum copies
    assert peak(setup.fused) <= peak(setup.unfused) + small


@pytest.mark.parametrize(
    ("rows", "row_bytes", "workspace", "chunks"),
    [
        (0, 10, 1000, [(0, 0)]),
        (100, 10, 1, [(0, 100)]),
        (129, 10, 1, [(0, 128), (128, 129)]),
        (600, 10, 2560, [(0, 128), (128, 384), (384, 600)]),
        (16384, 1, 10880, [(0, 8192), (8192, 16384)]),
        (1300, 1, 1024, [(0, 640), (640, 1300)]),
        (600, 10, 2559, [(0, 128), (128, 256), (256, 384), (384, 512), (512, 600)]),
        (5, 0, 1, [(0, 5)]),
    ],
)
def test_token_chunks(rows, row_bytes, workspace, chunks):
    assert _gradients.token_chunks(rows, row_bytes, workspace) == chunks


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (None, None), (7, 7), ("7", 7), ("64MiB", 2**26), ("64 mib", 2**26), ("1.5KiB", 1536), ("2GB", 2 * 10**9),
        (" 3KB ", 3000), ("1e3B", 1000),
    ],
)  # fmt: skip
def test_workspace_units(given, size):
    assert _choices.parse_bytes("mlp", given) == size


# -- backend and mode -------------------------------------------------------------------------------------------------


def test_backend_is_given_back():
    assert _choices._choice.backend == "auto"
    with ckptkern.backend("eager"):
        with pytest.raises(KeyError), ckptkern.backend("triton"):
            raise KeyError
        assert _choices._choice.backend == "eager"
        with ckptkern.backend("auto"):
            assert _choices._choice.backend == "auto"
        assert _choices._choice.backend == "eager"
    assert _choices._choice.backend == "auto"
    with pytest.raises(ValueError, match="backend: name must be one of 'auto', 'eager', 'triton', not 'cuda'"):
        ckptkern.backend("cuda").__enter__()
    assert _choices._choice.backend == "auto"


@pytest.mark.parametrize("setup", setups(("gelu",), ("full",), dropout=(P,)))
def test_what_the_kernels_do_not_cover(setup):
    """backend("triton") raises; under "auto" the eager backend runs."""
    tensors = make(setup, dtype=FP64)
    reason = "the kernels cover float16, bfloat16 and float32, not torch.float64"
    wanted = raises(RuntimeError, f"{setup.op.name}: backend('triton') was asked for, but {reason}")
    with ckptkern.backend("triton"), wanted:
        setup.call(tensors)
    assert setup.call(tensors).dtype == FP64


@pytest.mark.parametrize("setup", setups(("gelu",), ("full",), dropout=(P,)))
def test_backend_of_forward_runs_backward(setup):
    """backward() looks nothing up, wherever it is called."""
    tensors = make(setup)
    expected = gradients(setup.fused, tensors)
    with ckptkern.backend("eager"):
        y = setup.fused(tensors)
    with ckptkern.backend("triton"), Watch() as watch:
        y.backward(output_gradient(y))
    assert "eager" in watch.strings
    assert "triton" not in watch.strings
    for name, t in tensors.items():
        assert torch.equal(t.grad, expected[name])


def test_environment_variable(monkeypatch):
    """It is read once, when the package is imported."""

    def drop(value):
        monkeypatch.setenv("CKPTKERN_BACKEND", value)
        monkeypatch.setattr(_choices, "_choice", _choices._Choice())
        return ckptkern.dropout(torch.ones(2, 2))

    assert drop("eager").shape == (2, 2)
    wanted = "dropout: the environment variable CKPTKERN_BACKEND must be one of 'auto', 'eager', 'triton', not 'cuda'"
    with pytest.raises(ValueError, match=f"^{wanted}$"):
        drop("cuda")
    environment = {**os.environ, "CKPTKERN_BACKEND": "triton", "TRITON_INTERPRET": "0"}
    code = "import torch, ckptkern; ckptkern.dropout(torch.ones(2, 2))"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "RuntimeError: dropout: backend('triton') was asked for, but " in run.stderr


DEFAULTS = {
    "linear_act": dict(bias=None, activation="relu", recompute="selective"),
    "linear_stack": dict(biases=None, activation="relu", recompute="full", workspace=None),
    "mlp": dict(activation="gelu", dropout_p=0.0, training=True, recompute="full", workspace=None),
    "gated_mlp": dict(activation="silu", gate_bias=None, up_bias=None, down_bias=None, dropout_p=0.0, training=True,
                      recompute="full", workspace=None),
    "moe_mlp": dict(activation="silu", gate_up_bias=None, down_bias=None, lora=None, recompute="full", workspace=None),
    "moe_block": dict(
        activation="silu", scoring="softmax", normalize=True, score_bias=None, num_groups=1, top_groups=None,
        group_score="top2", routed_scaling_factor=1.0, router_bias=None, router_dtype=None, gate_up_bias=None,
        down_bias=None, shared_gate_weight=None, shared_gate_bias=None, shared_up_weight=None, shared_up_bias=None,
        shared_down_weight=None, shared_down_bias=None, shared_expert_gate=None, norm=None, norm_weight=None,
        norm_bias=None, norm_scale=None, norm_shift=None, norm_eps=1e-5, norm_first=True, post_norm=None,
        post_norm_weight=None, post_norm_bias=None, post_norm_eps=1e-5, layer_scale=None, resid_dropout_p=0.0,
        drop_path_p=0.0, residual=True, lora=None, training=True, recompute="full", workspace=None,
    ),
    "grouped_gated_mlp": dict(activation="silu", row_weights=None, lora=None, recompute="full", workspace=None),
}  # fmt: skip


@pytest.mark.parametrize("op", DEFAULTS)
def test_defaults(op):
    parameters = inspect.signature(getattr(ckptkern, op)).parameters
    assert {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty} == DEFAULTS[op]


# -- errors ------------------------------------------------------------------------------------------------------------


def label_of(name: str) -> str:
    """What a message calls the tensor: weights[1] of a stack, "the bias of fc1_weight"."""
    if "bias" in name:
        return f"the bias of {label_of(name.replace('biases', 'weights').replace('bias', 'weight'))}"
    return re.sub(r"\.(\d)", r"[\1]", name)


PARAMETERS = [
    pytest.param(setup.values[0], name, id=f"{setup.values[0].op.name}-{name}")
    for setup in OPS_OF_LAYERS
    for name in setup.values[0].op.parameters(1, 1, 1)
]


@pytest.mark.parametrize(("setup", "name"), PARAMETERS)
def test_wrong_parameters(setup, name):
    good, label, op = make(setup), label_of(name), setup.op.name
    shape = tuple(good[name].shape)

    def call(value):
        return setup.call({**good, name: value})

    with raises(TypeError, f"{op}: ", f"{label} must be a Tensor", "not float"):
        call(0.5)
    with raises(TypeError, f"{op}: {label} must be floating point, not torch.int64"):
        call(torch.ones(shape, dtype=torch.int64))
    with raises(ValueError, f"{op}: input is on cpu but {label} is on meta"):
        call(good[name].detach().to("meta"))
    if "bias" in name:
        for wrong in ((shape[0] + 1,), (1, *shape), ()):
            with raises(ValueError, f"{op}: {label} must have shape ({shape[0]},)", f"but has shape {wrong}"):
                call(torch.ones(wrong))
    else:
        with raises(TypeError, f"{op}: input is torch.float32 but a parameter is torch.float64"):
            call(good[name].detach().double())
        with raises(TypeError, f"{op}: {label} must be a Tensor, not NoneType"):
            call(None)
        with raises(ValueError, f"{op}: {label} must be [out_features, in_features], but has shape {shape[1:]}"):
            call(torch.ones(shape[1:]))
        with raises(ValueError, f"{op}: ", f" has {shape[1]} features but {label} has in_features={shape[1] + 2}"):
            call(torch.ones(shape[0], shape[1] + 2))


@pytest.mark.parametrize("bias_dtype", [BF16, FP16, FP64], ids=str)
@pytest.mark.parametrize("setup", OPS_OF_LAYERS)
def test_a_bias_of_another_dtype(setup, bias_dtype):
    """The result is F.linear's when it adds the bias separately; the bias's gradient has the bias's dtype."""
    tensors = {
        name: t.detach().to(bias_dtype if "bias" in name else t.dtype).requires_grad_()
        for name, t in make(setup).items()
    }
    ours = gradients(setup.fused, tensors)
    same = gradients(setup.fused, {name: t.detach().float().requires_grad_() for name, t in tensors.items()})
    for name, value in ours.items():
        assert value.dtype == (tensors[name].dtype if name in tensors else FP32), name
        assert torch.equal(value, same[name].to(value.dtype)), name


@pytest.mark.parametrize("setup", setups(("gelu",), ("full",), dropout=(P,)))
def test_wrong_inputs(setup):
    """Arguments and results other than floating-point tensors: None, numbers, integers (DeepSpeed#660)."""
    good, op = make(setup), setup.op.name

    def call(x):
        return setup.call({**good, "x": x})

    for wrong, kind in ((None, "NoneType"), ([[1.0]], "list"), (1.0, "float")):
        with raises(TypeError, f"{op}: input must be a Tensor, not {kind}"):
            call(wrong)
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with raises(TypeError, f"{op}: input must be floating point, not {dtype}"):
            call(torch.ones(3, 7, dtype=dtype))
    if op != "dropout":  # which takes a scalar, as nn.Dropout does
        with raises(ValueError, f"{op}: input must have at least one dimension", "is a scalar"):
            call(torch.tensor(1.0))
    with raises(TypeError, f"{op}: input must be a dense tensor, not torch.sparse_coo"):
        call(torch.ones(3, 7).to_sparse())
    with raises(
        TypeError, f"{op}: input must be a dense tensor, not nested"
    ):  # a jagged one is taken: test_subclasses.py
        call(torch.nested.nested_tensor([torch.ones(2, 7), torch.ones(3, 7)], layout=torch.strided))
    if op != "dropout":
        first = label_of(list(good)[1])
        with raises(ValueError, f"{op}: input has 6 features but {first} has in_features=7"):
            call(torch.ones(3, 6))
        with raises(ValueError, f"{op}: input is on meta but {first} is on cpu"):
            call(torch.ones(3, 7, device="meta"))


def wrong_options() -> list:
    values = {
        "activation": ["tanh", "", None, "ReLU"],
        "recompute": ["all", None, True, "Full"],
        "dropout_p": [-0.1, 1.5, float("nan"), "0.5", None, torch.tensor(0.5)],
        "workspace": [0, -1, 1.5, True, "", "lots", "MiB", "-5MiB", "0MiB", "5 PB", "inf", "nan", b"5"],
    }
    return [
        pytest.param(setup.values[0], option, value, id=f"{setup.values[0].op.name}-{option}={value!r}")
        for setup in setups(("gelu",), ("full",), dropout=(P,))
        for option in setup.values[0].op.options
        for value in values[option]
    ]


WANTED = {
    "activation": f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, not ",
    "recompute": "recompute must be one of {modes}, not ",
    "dropout_p": "dropout probability has to be a number between 0 and 1, but got ",
    "workspace": "workspace must be a positive number of bytes or a string like '64MiB', not ",
}


@pytest.mark.parametrize(("setup", "option", "value"), wrong_options())
def test_wrong_options(setup, option, value):
    wanted = WANTED[option].format(modes=", ".join(map(repr, setup.op.matmuls)))
    with raises(ValueError, f"{setup.op.name}: {wanted}{value!r}"):
        setup.with_(**{option: value}).call(make(setup))


@pytest.mark.parametrize("setup", setups(dropout=(P,)))
def test_meta_tensors(setup):
    """Shapes and dtypes of outputs and gradients without data, as for torch's own layers."""
    real = make(setup)
    meta = {name: torch.empty_like(t, device="meta").requires_grad_() for name, t in real.items()}
    y = setup.call(meta)
    assert y.device.type == "meta"
    assert y.shape == setup.fused(real).shape
    y.sum().backward()
    for name, t in meta.items():
        assert (t.grad.shape, t.grad.device.type) == (real[name].shape, "meta")


@pytest.mark.parametrize("given", [None, 3, torch.ones(4, 3)], ids=str)
def test_a_stack_takes_lists(given):
    with pytest.raises(TypeError, match="linear_stack: weights must be a list of tensors, not"):
        ckptkern.linear_stack(torch.ones(2, 3), given)
    with pytest.raises(TypeError, match="linear_stack: biases must be a list of tensors, not"):
        ckptkern.linear_stack(torch.ones(2, 3), [torch.ones(4, 3)], given if given is not None else 1.0)
    layer = torch.nn.ParameterList([torch.ones(4, 3)])
    assert ckptkern.linear_stack(torch.ones(2, 3), layer).shape == (2, 4)


def test_errors_leave_the_generator_alone():
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="workspace"):
        ckptkern.mlp(torch.ones(2, 3), torch.ones(4, 3), None, torch.ones(3, 4), None, dropout_p=0.5, workspace=-1)
    assert torch.equal(torch.get_rng_state(), before)


def test_compile_reaches_the_kernels() -> None:
    """Dynamo cannot trace into Triton or the CUDA driver, so whether a kernel can run here is a constant."""
    pytest.importorskip("triton")
    layer = ckptkern.nn.MLP(16, 32)
    x = torch.randn(8, 16, requires_grad=True)
    with ckptkern.backend("triton"):
        (expected,) = torch.autograd.grad(layer(x).sum(), x)
        (compiled,) = torch.autograd.grad(torch.compile(layer, fullgraph=True, backend="aot_eager")(x).sum(), x)
    assert torch.equal(compiled, expected)


@pytest.mark.parametrize("device_type", ["mps", "xpu", "cpu", "cuda"])
def test_autocast_of_any_device(device_type):
    """torch's quick query, whether any autocast is on, leaves out some devices."""
    x = SimpleNamespace(device=torch.device(device_type), is_cpu=device_type == "cpu", is_cuda=device_type == "cuda")
    assert _choices.autocast_dtype(x) is None
    outer = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, True)
    try:
        assert _choices.autocast_dtype(x) == torch.get_autocast_dtype(device_type)
        assert not _choices.no_autocast(x)
    finally:
        torch.set_autocast_enabled(device_type, outer)


@pytest.mark.parametrize(("memory", "workspace"), [(4 * 2**30, 2**28), (80 * 2**30, 2.5 * 2**30)])
def test_default_workspace_is_a_part_of_the_gpu(memory, workspace, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=memory))
    _choices._device_workspace.cache_clear()
    try:
        assert _choices.default_workspace("cuda", 0) == workspace
    finally:
        _choices._device_workspace.cache_clear()
    assert _choices.default_workspace("cpu", None) == 2**25
    assert _choices.choose_workspace("mlp", None, torch.ones(1), 2**20) == 2**25
    assert _choices.choose_workspace("mlp", None, torch.ones(1), 2**24) == 2**26
    assert _choices.choose_workspace("mlp", "3KB", torch.ones(1)) == 3000
