"""What all ops share: the choice of backend and level, checks with messages, token chunks and weight gradients."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType

import torch
from torch import Tensor

from .. import eager, state
from ..errors import DeviceError, DtypeError, LayoutError, ShapeError
from ..memory import parse_size

ACTIVATIONS = tuple(eager.ACTIVATIONS)
LEVELS = ("none", "selective", "full")
BACKENDS = ("auto", "eager", "triton")
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256

_log = logging.getLogger("ckptkern")


class _Choice:
    """The requested backend, process-wide as torch's own backend flags are. torch.compile guards on an attribute of an
    object and compiles again when it changes; on a ContextVar it breaks the graph, on a thread-local it does not look.
    """

    def __init__(self):
        self.backend = os.environ.get("CKPTKERN_BACKEND", "auto")


_choice = _Choice()


# -- backend --------------------------------------------------------------------------------------------------------


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the backend of the ops called inside: "auto", "eager" or "triton".

    "auto" (also the default of the environment variable CKPTKERN_BACKEND) takes Triton kernels for CUDA tensors that
    they cover and PyTorch ops for the rest; "triton" raises where a kernel does not cover the case. The choice is made
    in forward and kept for backward. Raises ValueError for another name.
    """
    check_choice("backend", "name", name, BACKENDS)
    outer, _choice.backend = _choice.backend, name
    try:
        yield
    finally:
        _choice.backend = outer


@functools.cache
def _log_once(reason: str) -> None:
    _log.info("eager backend: %s", reason)


def _constant_log(reason: str) -> None:
    _log_once(reason)


_constant_log._dynamo_marked_constant = True  # as below


@functools.cache
def _device_reason(device_type: str, index: int | None) -> str | None:
    """Why no kernel can run on this device, or None: the same all through a process."""
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


def _constant_device_reason(device_type: str, index: int | None) -> str | None:
    return _device_reason(device_type, index)


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo: Dynamo calls it instead of tracing
# into Triton and the CUDA driver.
_constant_device_reason._dynamo_marked_constant = True


def _not_covered(x: Tensor) -> str | None:
    """Why the kernels do not cover `x`, or None."""
    if x.dtype not in KERNEL_DTYPES:
        return f"the kernels cover float16, bfloat16 and float32, not {x.dtype}"
    return _constant_device_reason(x.device.type, x.device.index)


def head_dim_not_covered(head_dim: int) -> str | None:
    """Why no attention kernel covers this head dim, or None."""
    if head_dim <= MAX_HEAD_DIM:
        return None
    return f"the attention kernels cover head dims up to {MAX_HEAD_DIM}, not {head_dim}"


def choose_backend(op: str, x: Tensor, reason: str | None = None) -> str:
    """The backend that serves `x`: "eager" or "triton". reason: why else no kernel covers this call, or None."""
    name = _choice.backend
    if name not in BACKENDS:
        check_choice(op, "the environment variable CKPTKERN_BACKEND", name, BACKENDS)
    if name == "eager" or (name == "auto" and not x.is_cuda):
        return "eager"
    reason = _not_covered(x) or reason
    if reason is None:
        return "triton"
    if name == "triton":
        raise RuntimeError(f"{op}: backend('triton') was asked for, but {reason}")
    _log_once(reason)
    return "eager"


def compose(op: str, reason: str) -> None:
    """Raises, or says once, that PyTorch ops stand in for this op."""
    if kernels_alone():
        raise RuntimeError(f"{op}: backend('triton') was asked for, but {reason}")
    _constant_log(reason)


def _own_operations(kind: type) -> str:
    return f"{kind.__name__} has operations of its own: PyTorch's serve, and backward keeps what these keep"


def compose_of(op: str, kind: type) -> None:
    """`compose`, because `kind` has operations of its own."""
    if kind.__name__ == "CausalBias":
        raise TypeError(f"{op}: a CausalBias is no tensor of numbers; it may be an attn_mask, and nothing else")
    compose(op, _own_operations(kind))


def log_composed(kind: type) -> None:
    """The same of a module that calls its submodules instead, which is no fault under any backend."""
    _constant_log(_own_operations(kind))


def kernels_alone() -> bool:
    """Is it backend("triton"), which lets nothing stand in for our kernels?"""
    return _choice.backend == "triton"


def primitives(name: str) -> ModuleType:
    """The functions that the ops are written in: `ckptkern.eager`, or the launchers of the same names."""
    if name == "eager":
        return eager
    from .. import triton_kernels  # imports triton: only here, on first use

    return triton_kernels


def matmul_precision(x: Tensor) -> str:
    """Input precision of float32 products: "tf32" where torch's own setting allows it, else "ieee".

    torch.compile cannot trace the setting, so a compiled graph carries "auto" and its ops read it when they run.
    """
    if not x.is_cuda or x.dtype != torch.float32:
        return "ieee"
    if torch.compiler.is_compiling():
        return "auto"
    return read_precision()


def read_precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# -- level ----------------------------------------------------------------------------------------------------------


# Modules of the unpack hooks of torch's checkpoint, and of ours in forward and in recompute.
RECOMPUTING = ("torch.utils.checkpoint", "ckptkern._C", "ckptkern.segments.checkpoint")


def _inside_checkpoint() -> bool:
    """Is this call itself a part of something that will be, or is being, recomputed?

    torch's non-reentrant checkpoint, and ours, is seen by its saved-tensor hooks, in forward and in recompute; every reentrant
    one by running forward inside a backward pass. Recomputing inside a recompute costs GEMMs and keeps nothing less.
    """
    if torch._C._current_graph_task_id() != -1:
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[1], "__module__", "") in RECOMPUTING


def choose_level(recompute: str) -> str:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return recompute
    return "none" if _inside_checkpoint() else recompute


# -- checks ---------------------------------------------------------------------------------------------------------


def check_choice(op: str, what: str, value, choices) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {what} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_level(op: str, recompute: str) -> None:
    check_choice(op, "recompute", recompute, LEVELS)


def check_statics(op: str, activation: str, recompute: str, dropout_p: float = 0.0) -> None:
    check_choice(op, "activation", activation, ACTIVATIONS)
    check_level(op, recompute)
    check_probability(op, dropout_p)


def check_probability(op: str, p: float) -> None:
    # isinstance first: a symbolic number of torch.compile is a float to it, and has no attribute
    number = isinstance(p, (int, float)) or (hasattr(p, "__float__") and not isinstance(p, Tensor))
    if not number or not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: dropout probability has to be a number between 0 and 1, but got {p!r}")


def check_number(op: str, name: str, value) -> None:
    """float() would fix a symbolic number of torch.compile. A tensor of no dimensions is one, as in torch."""
    if type(value) is float:
        return
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: no gradient is formed for {name}")
    number = value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int) or hasattr(value, "__float__")
    if not number or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a number, not {value!r}")


def check_count(op: str, name: str, value, least: int = 1) -> None:
    if type(value) is int and value >= least:
        return
    if (
        isinstance(value, (bool, Tensor))
        or not (isinstance(value, int) or hasattr(value, "__index__"))
        or value < least
    ):
        raise ValueError(f"{op}: {name} must be an integer of at least {least}, not {value!r}")


def check_flags(op: str, **flags: bool) -> None:
    """A slip among positions would go unnoticed: most objects are true."""
    for name, value in flags.items():
        if type(value) is not bool:
            raise TypeError(f"{op}: {name} must be a bool, not {value!r}")


def check_input(op: str, x: Tensor, *, jagged: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: input must be a Tensor, not {type(x).__name__}")
    if not x.is_floating_point():
        raise DtypeError(f"{op}: input must be floating point, not {x.dtype}")
    if x.dim() == 0:
        raise ShapeError(f"{op}: input must have at least one dimension, (..., in_features), but is a scalar")
    if x.layout is torch.jagged and jagged:
        return
    if x.layout != torch.strided or x.is_nested:
        raise LayoutError(f"{op}: input must be a dense tensor, not {'nested' if x.is_nested else x.layout}")


def check_weight(
    op: str, name: str, weight: Tensor, bias: Tensor | None, x: Tensor, in_features: int, source: str
) -> None:
    """`weight` [N, in_features] and `bias` [N] fit an input with `in_features` features that comes from `source`."""
    check_tensor(op, name, weight, x)
    shape = weight.shape
    if len(shape) != 2:
        raise ShapeError(f"{op}: {name} must be [out_features, in_features], but has shape {tuple(shape)}")
    if shape[1] != in_features:
        raise ShapeError(
            f"{op}: {source} has {in_features} features but {name} has in_features={shape[1]}"
            + (f"; {name} must be [out_features, in_features], as of nn.Linear, but is {tuple(shape)}: pass {name}.t()"
               if shape[0] == in_features else "")
        )  # fmt: skip
    if bias is None:
        return
    check_tensor(op, f"the bias of {name}", bias, x)
    if bias.dim() != 1 or bias.shape[0] != shape[0]:
        raise ShapeError(
            f"{op}: the bias of {name} must have shape ({shape[0]},), one value for each of its out_features, but has "
            f"shape {tuple(bias.shape)}"
        )


def check_tensor(op: str, name: str, tensor: Tensor, x: Tensor, *, floating: bool = True) -> None:
    """`tensor` is one, on the device of the input x, and floating point, as x is, if it has to be."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, not {type(tensor).__name__}")
    if tensor.device != x.device:
        raise DeviceError(f"{op}: input is on {x.device} but {name} is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise LayoutError(f"{op}: {name} must be a dense tensor, not {tensor.layout}")
    if floating and tensor.dtype != x.dtype and not tensor.is_floating_point():
        raise DtypeError(f"{op}: {name} must be floating point, not {tensor.dtype}")


def no_autocast(x: Tensor) -> bool:
    """Is autocast off for x's device, as far as torch's quick answer tells, which knows the CPU and CUDA on all releases?"""
    return (x.is_cpu or x.is_cuda) and not torch._C._is_any_autocast_enabled()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Autocast's dtype for x's device where it is on, else None; there is none for meta tensors."""
    if no_autocast(x):  # a fifth of the host time of asking by the device's name
        return None
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_off(x: Tensor) -> AbstractContextManager:
    """As the bodies of the ops run, for what torch.compile traces: Dynamo knows torch.autocast, not their guard."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def compute_dtype(op: str, x: Tensor, *weights: Tensor | None) -> torch.dtype:
    """Autocast's dtype inside autocast, else x's own, which the weights must then share.

    A bias of another dtype is cast, as in F.linear of what is not contiguous (nn.MultiheadAttention's batch_first); in
    F.linear of what is contiguous it is an error.
    """
    dtype = None if x.dtype == torch.float64 else autocast_dtype(x)
    if dtype is not None:
        return dtype
    for weight in weights:
        if weight is not None and weight.dtype != x.dtype:
            raise DtypeError(
                f"{op}: input is {x.dtype} but a parameter is {weight.dtype}; use one dtype, or torch.autocast"
                + (", which leaves float64 as it is" if x.dtype == torch.float64 else "")
            )
    return x.dtype


def cast_input(op: str, x: Tensor, *weights: Tensor | None) -> Tensor:
    """x in the compute dtype."""
    dtype = compute_dtype(op, x, *weights)
    return x if x.dtype == dtype else x.to(dtype)


# -- tokens and weight gradients ------------------------------------------------------------------------------------

CHUNK_ROWS = 128  # chunks start at multiples of every kernel's BLOCK_M, so that a row keeps its place in the tile


@functools.cache
def _device_workspace(device_type: str, index: int | None) -> int:
    if device_type != "cuda" or not torch.cuda.is_available():
        return 2**30
    return max(torch.cuda.get_device_properties(index).total_memory // 32, 2**28)


def default_workspace(device_type: str, index: int | None) -> int:
    """1/32 of a GPU's memory, at least 256 MiB; 1 GiB elsewhere.

    Large, because every further chunk costs a pass over the float32 sums of the weights' gradients. A backward that needs less
    runs as one chunk, and its peak is below that of PyTorch's own.
    """
    return _device_workspace(device_type, index)


default_workspace._dynamo_marked_constant = True  # as _constant_device_reason


def choose_workspace(op: str, value: int | str | None, x: Tensor) -> int:
    """workspace in bytes: what is given, or the default of x's device."""
    return parse_bytes(op, value) or default_workspace(x.device.type, x.device.index)


def parse_bytes(op: str, value: int | str | None) -> int | None:
    """workspace in bytes: an int, or a string such as "64MiB"; None stays None."""
    if value is None:
        return None
    size = value
    if isinstance(value, str):
        size = parse_size(value)
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    raise ValueError(f"{op}: workspace must be a positive number of bytes or a string like '64MiB', not {value!r}")


def token_chunks(rows: int, bytes_per_row: int, workspace: int) -> list[tuple[int, int]]:
    """[start, stop) row ranges whose transient tensors fit `workspace`; at least CHUNK_ROWS rows each, and as equal as
    multiples of CHUNK_ROWS are.

    What is done with a range is a function of its own, so that its tensors are gone before the next one's are made.
    """
    if rows * bytes_per_row <= workspace:
        return [(0, rows)]
    units = -(-rows // CHUNK_ROWS)
    count = -(-units // max(workspace // bytes_per_row // CHUNK_ROWS, 1))
    bounds = [i * units // count * CHUNK_ROWS for i in range(count)]
    return list(itertools.pairwise([*bounds, rows]))


def row_bytes(like: Tensor, tensors: int, masks: int, summed: int, beside: int) -> int:
    """Bytes of a row's transient tensors in a backward pass, in the dtype of `like`.

    tensors: how many elements of that dtype are alive at the worst moment; masks: how many bools are then. summed: elements of
    the two operands of the largest weight gradient; beside: elements that are alive while it is formed. A CPU forms no
    float32 product of 16-bit operands: it copies both, and an eighth of the rows for the sums of columns; torch's product of
    float16 was measured to take up to one more copy there.
    """
    size = like.element_size()
    bytes_ = tensors * size + masks
    if size >= 4 or like.is_cuda:
        return bytes_
    copies = summed * (8 if like.dtype == torch.float16 else 4)
    return max(bytes_ + summed // 2, beside * size + copies)


class WeightGrad:
    """Sum over chunks of a^T b, accumulated in float32 (float64 for float64) and rounded once to the weight's dtype."""

    def __init__(self, dtype: torch.dtype, chunks: int):
        self.dtype, self.chunks, self.total = dtype, chunks, None

    def add(self, a: Tensor, b: Tensor) -> None:
        """a [m, N], b [m, K] -> total [N, K]."""
        a = a.t()
        if a.is_cuda and a.dtype.itemsize < 4 and (self.chunks > 1 or a.dtype != self.dtype):
            if self.total is None:
                self.total = torch.mm(a, b, out_dtype=torch.float32)
            else:
                torch.addmm(self.total, a, b, out_dtype=torch.float32, out=self.total)
            return
        if self.chunks > 1 and a.dtype.itemsize < 4:  # no such product on a CPU
            a, b = a.float(), b.float()
        self.total = torch.mm(a, b) if self.total is None else self.total.addmm_(a, b)

    def result(self) -> Tensor:
        total, self.total = self.total, None  # one float32 sum beside its result at a time
        return cast_parameter(total, self.dtype)


class BiasGrad:
    """Sum over chunks of float32 partial sums, rounded once."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.total = dtype, None

    def add(self, part: Tensor) -> None:
        self.total = part if self.total is None else self.total.add_(part)

    def result(self) -> Tensor:
        return cast_parameter(self.total, self.dtype)


act = eager.act
column_sum = eager.column_sum


def row_count(x: Tensor) -> int:
    """Rows of [..., K]. torch.Size.numel() would fix a symbolic batch at the size that is traced."""
    return math.prod(x.shape[:-1])


def rows_2d(x: Tensor) -> Tensor:
    """[..., K] -> [rows, K]; a view where the strides allow it."""
    return x if x.dim() == 2 else x.reshape(row_count(x), x.shape[-1])


def unflattened(rows: Tensor, lead: torch.Size) -> Tensor:
    """[rows, K] -> [*lead, K], not a view: autograd refuses to change a Function's result in place if it is one."""
    return rows if len(lead) == 1 else torch.ops.aten._unsafe_view.default(rows, (*lead, rows.shape[1]))


def cast_parameter(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return parameter if parameter is None or parameter.dtype == dtype else parameter.to(dtype)


def dropout_arguments(rng: Tensor | None, p: float) -> tuple[Tensor | None, int, float]:
    """(state, threshold, scale) as the primitives take them: a saved-tensor hook may have given the state other strides."""
    return (None, 0, 1.0) if rng is None else (rng.contiguous(), *state.threshold_scale(p))


def dropped(p: ModuleType, h: Tensor, dropout: tuple[Tensor | None, int, float], row_base: int) -> Tensor:
    """dropout(h), h itself without a state; `p` is the backend's module."""
    return h if dropout[0] is None else p.dropout(h, *dropout, row_base=row_base)


def draw_state(x: Tensor, p: float, training: bool) -> Tensor | None:
    """The 16 bytes that dropout keeps, or None where nothing is dropped."""
    return state.draw(x) if training and p > 0.0 else None
