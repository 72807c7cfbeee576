"""Checks of a call's arguments, one function per kind of argument, whose message says what was expected and what was found; and
the choice of backend, implementation, mode, precision and workspace."""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ... import eager
from ...errors import DeviceError, DtypeError, LayoutError, ShapeError
from ...memory import bytes_of
from ...state import Observed, layer_fits, observe, unpack_saved
from ...subclasses import constant
from . import implementations as _impls
from . import tuned as _tuned

ACTIVATIONS = tuple(eager.ACTIVATIONS)  # every name that an `activation` may be
MODES = ("none", "selective", "full")
Bytes = int | str | None  # a limit in bytes, or a size such as "64MiB"; None: none of its own


def check_choice(op: str, name: str, value, choices) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_mode(op: str, recompute: str) -> None:
    check_choice(op, "recompute", recompute, MODES)


def modes_of_sublayers(op: str, recompute: str | tuple[str, str]) -> tuple[str, str]:
    """Returns the modes of a layer's attentions and of its MLP, from one for both ("selective" recomputes all of the MLP) or a
    pair."""
    if isinstance(recompute, (tuple, list)) and len(recompute) == 2:
        attention, mlp = recompute
    else:
        attention, mlp = recompute, "full" if recompute == "selective" else recompute
    for mode in (attention, mlp):
        check_mode(op, mode)
    return attention, mlp


def check_options(op: str, activation: str, recompute: str, dropout_p: float = 0.0) -> None:
    if activation not in ACTIVATIONS or recompute not in MODES:
        check_choice(op, "activation", activation, ACTIVATIONS)
        check_mode(op, recompute)
    if type(dropout_p) is not float or not 0.0 <= dropout_p <= 1.0:
        check_probability(op, dropout_p)


def check_probability(op: str, p: float) -> None:
    if (type(p) is not float and (isinstance(p, Tensor) or not is_number(p))) or not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: dropout probability has to be a number between 0 and 1, but got {p!r}")


def is_number(value) -> bool:
    """Returns whether value is one number: a number, a tensor or an array of no dimensions, or a symbolic number of
    torch.compile."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    # isinstance first: to torch.compile a symbolic number is a float, and has no attribute
    return isinstance(value, (int, float)) or (hasattr(value, "__float__") and not getattr(value, "shape", ()))


def check_number(op: str, name: str, value) -> None:
    """Checks for a number without float(), which would turn a symbolic number of torch.compile into a constant."""
    if type(value) is float:
        return
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: no gradient is formed for {name}")
    if not is_number(value) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a number, not {value!r}")


def check_positive(op: str, name: str, value) -> None:
    check_number(op, name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{op}: {name} must be above 0 and finite, not {value!r}")


def check_softcap(op: str, softcap: float | None, name: str = "softcap") -> float:
    """Checks softcap and returns it, 0 for None."""
    if softcap is None:
        return 0.0
    check_positive(op, name, softcap)
    return float(softcap)


def check_count(op: str, name: str, value, least: int = 1) -> None:
    if (
        isinstance(value, (bool, Tensor))
        or not (isinstance(value, int) or hasattr(value, "__index__"))
        or value < least
    ):
        raise ValueError(f"{op}: {name} must be an integer of at least {least}, not {value!r}")


def check_flags(op: str, **flags: bool) -> None:
    """Raises TypeError for a flag that is not a bool: an argument in the wrong place would go unnoticed, because most objects
    are true."""
    for name, value in flags.items():
        if type(value) is not bool:
            raise TypeError(f"{op}: {name} must be a bool, not {value!r}")


def check_input(op: str, x: Tensor, name: str = "input", *, jagged: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, not {type(x).__name__}")
    if not x.is_floating_point():
        raise DtypeError(f"{op}: {name} must be floating point, not {x.dtype}")
    if x.dim() == 0:
        raise ShapeError(f"{op}: {name} must have at least one dimension, (..., in_features), but is a scalar")
    layout = x.layout
    if (layout is not torch.strided or x.is_nested) and not (jagged and layout is torch.jagged):
        raise LayoutError(f"{op}: {name} must be a dense tensor, not {'nested' if x.is_nested else x.layout}")


def check_weight(
    op: str, name: str, weight: Tensor, bias: Tensor | None, x: Tensor, in_features: int, source: str
) -> None:
    """Checks that `weight` [N, in_features] and `bias` [N] fit an input with `in_features` features. source: the input's name
    in messages."""
    if not is_compiling() and layer_fits(x, weight, bias, in_features):
        return
    check_tensor(op, name, weight, x)
    shape = weight.shape
    if len(shape) != 2:
        raise ShapeError(f"{op}: {name} must be [out_features, in_features], but has shape {tuple(shape)}")
    if shape[1] != in_features:
        hint = f"; {name} must be [out_features, in_features], as in nn.Linear, but is {tuple(shape)}: pass {name}.t()"
        raise ShapeError(
            f"{op}: {source} has {in_features} features but {name} has in_features={shape[1]}"
            + (hint if shape[0] == in_features else "")
        )
    if bias is not None:
        check_tensor(op, f"the bias of {name}", bias, x, (shape[0],), ", one value for each of its out_features")


def check_tensor(
    op: str, name: str, tensor: Tensor, x: Tensor, shape: tuple = (), note: str = "", *, floating: bool = True
) -> None:
    """Checks that `tensor` is a dense Tensor on the device of the input x, floating point if `floating`, and of `shape`, if
    that is not empty. note: follows the shape in the message."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, not {type(tensor).__name__}")
    if tensor.device != x.device:
        raise DeviceError(f"{op}: input is on {x.device} but {name} is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise LayoutError(f"{op}: {name} must be a dense tensor, not {tensor.layout}")
    if floating and tensor.dtype != x.dtype and not tensor.is_floating_point():
        raise DtypeError(f"{op}: {name} must be floating point, not {tensor.dtype}")
    if shape and tuple(tensor.shape) != shape:
        raise ShapeError(f"{op}: {name} must have shape {shape}{note}, but has {tuple(tensor.shape)}")


# -- choices

BACKENDS = ("auto", "eager", "triton")
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
_log = logging.getLogger("ckptkern")


class _Choice:
    """Holds the requested backend, process-wide as torch's own backend flags are. torch.compile guards on an attribute of an
    object and compiles again when it changes; a ContextVar would break the graph, and a thread-local is not guarded.
    """

    def __init__(self):
        self.backend = os.environ.get("CKPTKERN_BACKEND", "auto")
        self.impl = ""  # for all matmuls, instead of the table's
        # bytes in digits, "" for the device's default; a str, because torch.compile turns an int that changes into a symbol
        self.workspace = ""
        self.seen: list[tuple] | None = None  # records the arguments of choose_impl if it is a list


_choice = _Choice()


@contextmanager
def setting(name: str, value, *owners) -> Iterator[None]:
    """Sets an attribute inside, on the owners that have it."""
    before = [(owner, getattr(owner, name)) for owner in owners if hasattr(owner, name)]
    for owner, _ in before:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, own in before:
            setattr(owner, name, own)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Sets the backend of the ops called inside: "auto", "eager" or "triton".

    "auto", also the default of CKPTKERN_BACKEND, runs Triton kernels for CUDA tensors that they cover, a library's matmuls
    and attention unless ours were measured to be faster, and PyTorch ops for the rest. "triton" runs our kernels wherever they
    exist, and raises where none covers the case. Backward uses forward's choice.
    Raises ValueError for another name.
    """
    check_choice("backend", "name", name, BACKENDS)
    with setting("backend", name, _choice):
        yield


@constant
def log_once(reason: str) -> None:
    _log.info("eager backend: %s", reason)


@constant
def _device_reason(device_type: str, index: int | None) -> str | None:
    """Returns why no kernel can run on this device, or None. It does not change within a process."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed (pip install triton)"
    if device_type == "cuda":
        if torch.version.hip:
            return "the kernels are tuned for NVIDIA GPUs"
        major, minor = torch.cuda.get_device_capability(index)
        return None if major >= 8 else f"the kernels need compute capability 8.0, device {index} has {major}.{minor}"
    if device_type == "cpu" and triton.knobs.runtime.interpret:
        return None
    return f"the kernels run on CUDA tensors, not on {device_type}"


def head_dim_not_covered(head_dim: int) -> str | None:
    """Returns why no attention kernel covers this head dim, or None."""
    if head_dim <= MAX_HEAD_DIM:
        return None
    return f"the attention kernels cover head dims up to {MAX_HEAD_DIM}, not {head_dim}"


def choose_backend(op: str, x: Tensor, reason: str | None = None) -> str:
    """Returns the backend that runs `x`: "eager" or "triton". reason: a further reason why no kernel covers this call."""
    name = _choice.backend
    if name not in BACKENDS:
        check_choice(op, "the environment variable CKPTKERN_BACKEND", name, BACKENDS)
    if name == "eager" or (name == "auto" and not x.is_cuda):
        return "eager"
    if x.dtype not in KERNEL_DTYPES:
        reason = f"the kernels cover float16, bfloat16 and float32, not {x.dtype}"
    else:
        reason = _device_reason(x.device.type, x.device.index) or reason
    if reason is None:
        return "triton"
    compose(op, reason)
    return "eager"


@constant
def _impl(op: str, device_type: str, index: int | None, dtype: torch.dtype, size: int) -> str:
    """Returns the implementation in the table that `python -m ckptkern autotune` wrote on this machine, else the default."""
    row = _tuned.table(device_type, index).get((op, str(dtype).removeprefix("torch."), size))
    if row:
        return row["impl"]
    # a CPU interprets or emulates kernels and takes the implementation of the GPU that they are tuned for
    capability = (9, 0) if device_type == "cpu" else torch.cuda.get_device_capability(index)
    return _impls.default_impl(op, capability, dtype, size)


def surely(comparison: bool) -> bool:
    """Returns whether a comparison with a number of rows surely holds. In a graph for any number of rows it never does: the
    graph is right for all, without a guard that splits the range of torch.export's Dim."""
    if not is_compiling():
        return comparison
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(comparison)


def choose_impl(op: str, x: Tensor, features: int, hidden: int, out: int, *, name: str | None = None) -> str:
    """Returns the implementation of an op's matmuls (`_impls`), on the backend that `choose_backend` returns.

    features, hidden, out: of the op's input, hidden layer (linear_act: 0) and output. name: the op's name in the table, if it
    is another. Under backend("triton") no library's matmul replaces a kernel.
    """
    if _choice.seen is not None:
        _choice.seen.append((name or op, features, hidden, out, x.dtype))
    backend = choose_backend(op, x)
    if backend == "eager":
        return backend
    if _choice.impl in _impls.OF_KERNELS:
        return _choice.impl
    if kernels_alone():
        return "triton"
    return _impl(name or op, x.device.type, x.device.index, x.dtype, _impls.size_class(max(features, out)))


def compose(op: str, reason: str) -> None:
    """Logs once that PyTorch ops replace this op, or raises under backend("triton")."""
    if kernels_alone():
        raise RuntimeError(f"{op}: backend('triton') was asked for, but {reason}")
    log_once(reason)


def compose_of(op: str, kind: type) -> None:
    """Calls `compose`, because `kind` has operations of its own."""
    if kind.__name__ == "CausalBias":
        raise TypeError(f"{op}: a CausalBias does not hold numbers; it can only be an attn_mask")
    compose(op, f"{kind.__name__} has operations of its own, so PyTorch ops run, and backward saves what they save")


def kernels_alone() -> bool:
    """Returns whether the backend is "triton", under which nothing may replace our kernels."""
    return _choice.backend == "triton"


@functools.cache
def primitives(name: str):
    """Returns the functions that ops call: `ckptkern.eager`, or those of the same names of an implementation over
    `triton_kernels`."""
    if name == "eager":
        return eager
    from ... import triton_kernels

    return _impls.OF_KERNELS[name](triton_kernels)


def matmul_precision(x: Tensor) -> str:
    """Returns the input precision of float32 matmuls: "tf32" where torch's own setting allows it, else "ieee".

    torch.compile cannot trace the setting, so a compiled graph carries "auto" and its ops read it when they run.
    """
    if not x.is_cuda or x.dtype != torch.float32:
        return "ieee"
    if is_compiling():
        return "auto"
    return read_precision()


def read_precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# Modules whose unpack hooks show a checkpoint: torch's, ours in forward, and ours in recompute.
_TRANSFORMS, _BACKWARD = int(Observed.TRANSFORMS), int(Observed.BACKWARD)
_RECOMPUTED = int(Observed.BACKWARD | Observed.HOOKS)
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
RECOMPUTING = ("torch.utils.checkpoint", unpack_saved.__module__, "ckptkern.segments.segment")


class _Nested(threading.local):
    """State of this thread. region: the saved-tensor hooks of the region in which ops use their own mode (`nn.LayerStack`)."""

    region: object = False


_NESTED = _Nested()


@contextmanager
def own_modes() -> Iterator[None]:
    """Lets ops use their own modes inside a region of several layers, which recomputes what they do not save. Not in a region
    inside it, whose recompute in backward runs without this context."""
    with setting("region", _top_hooks(True), _NESTED):
        yield


def choose_mode(recompute: str) -> str:
    """Returns the mode of a call: "none" if it is part of something that will be, or is being, recomputed.

    A non-reentrant checkpoint, torch's or ours, shows by its saved-tensor hooks, in forward and in recompute. A reentrant one
    shows because it runs forward inside a backward pass. Recomputing inside a recompute costs GEMMs and saves no memory.
    """
    if recompute == "none" or is_compiling():
        return recompute
    seen = observe(())
    if not seen & _RECOMPUTED or seen & _TRANSFORMS or _NESTED.region == _top_hooks(True):
        return recompute
    return "none" if in_region() or (seen & _BACKWARD and _NESTED.region is False) else recompute


def in_region() -> bool:
    """Returns whether the innermost saved-tensor hooks are those of a non-reentrant checkpoint or its recompute."""
    hooks = _top_hooks(True)
    return getattr(hooks and hooks[1], "__module__", "") in RECOMPUTING


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns autocast's dtype for x's device, None if it is off; meta tensors have no autocast."""
    if (x.is_cpu or x.is_cuda) and not torch._C._is_any_autocast_enabled():  # a fifth of the time of what follows
        return None
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_off(x: Tensor) -> AbstractContextManager:
    """Switches autocast off, as ops do for their bodies, but traceably: Dynamo knows torch.autocast, not _DisableAutocast."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def compute_dtype(op: str, x: Tensor, *weights: Tensor | None) -> torch.dtype:
    """Returns autocast's dtype inside autocast, else x's own, which the weights must then share.

    A bias of another dtype is cast. F.linear does so too for an input that is not contiguous (nn.MultiheadAttention's
    batch_first); for a contiguous one it raises.
    """
    own = x.dtype
    if torch._C._is_any_autocast_enabled() and own is not torch.float64 and (dtype := autocast_dtype(x)) is not None:
        return dtype
    for weight in weights:
        if weight is not None and weight.dtype is not own:
            raise DtypeError(
                f"{op}: input is {own} but a parameter is {weight.dtype}; use one dtype, or torch.autocast"
                + (", which leaves float64 as it is" if own is torch.float64 else "")
            )
    return own


def cast_input(op: str, x: Tensor, *weights: Tensor | None) -> Tensor:
    """Returns x in the compute dtype."""
    dtype = compute_dtype(op, x, *weights)
    return x if x.dtype is dtype else x.to(dtype)


# Bytes without a GPU. The loss takes no more time with less; benchmarks/NOTES.md has the times.
WORKSPACE, WORKSPACE_OF_LOSS = 2**25, 2**24


@constant
def default_workspace(device_type: str, index: int | None) -> int:
    """Returns 1/32 of a GPU's memory, at least 256 MiB; 32 MiB elsewhere.

    Every further chunk costs a pass over the float32 sums of the weights' gradients. A backward that needs less runs as one
    chunk, and its peak is lower than that of PyTorch's own backward.
    """
    if device_type != "cuda" or not torch.cuda.is_available():
        return WORKSPACE
    return max(torch.cuda.get_device_properties(index).total_memory // 32, 2**28)


class workspace:
    """Sets the bytes of transient memory that an op may take in each pass, for calls without a `workspace` of their own.

        ckptkern.workspace("64MiB")             # from now on, in the whole process
        with ckptkern.workspace("16MiB"):       # inside
            loss = model(x)

    size: an int, a string such as "64MiB", or None for the device's default: 1/32 of a GPU's memory but at least 256 MiB; on a
        CPU 32 MiB, or the largest weight in float32 if that is more, and 16 MiB for linear_cross_entropy. Read in forward;
        backward uses the same.
    Raises ValueError for another size.
    """

    def __init__(self, size: Bytes):
        nbytes = parse_bytes("workspace", size)
        self.outer, _choice.workspace = _choice.workspace, "" if nbytes is None else str(nbytes)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        _choice.workspace = self.outer


_MODES = int(Observed.MODES)
UNBOUNDED = 2**62  # for meta tensors, where chunks would only take time, unless a mode counts their memory


def choose_workspace(op: str, value: Bytes, x: Tensor, summed: int = 0, least: int = WORKSPACE) -> int:
    """Returns the workspace in bytes: the value, else that of `workspace`, else the default of x's device.

    On a CPU the default is `least`, or the float32 sums of the weight that has most elements, `summed`, over which each chunk
    makes a pass.
    """
    if value is not None:
        return parse_bytes(op, value)
    if _choice.workspace:
        return int(_choice.workspace)
    if x.is_meta and not is_compiling() and not observe(()) & _MODES:
        return UNBOUNDED
    return max(least, 4 * summed) if x.is_cpu else default_workspace(x.device.type, x.device.index)


def parse_bytes(op: str, value: float | str | None) -> int | None:
    """Returns the bytes of a number, or of a string such as "64MiB"; None stays None."""
    if value is None:
        return None
    size = bytes_of(value)
    if size:
        return size
    raise ValueError(f"{op}: workspace must be a positive number of bytes or a string like '64MiB', not {value!r}")
