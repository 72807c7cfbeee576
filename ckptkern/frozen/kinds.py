"""Kinds of quantised weights: what each is made of, and how it is dequantised.

The functions of the library that made a weight dequantise it. Those of raw tensors (block_fp8, mxfp4) are written here, in the
formulas that their publishers' own code has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from ..extras import missing

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 128  # of block_fp8, in both dimensions
GROUP = 32  # values that share a scale in mxfp4
AT_ONCE = 2**20  # elements that are dequantised at a time where that has temporaries
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
TORCHAO = {"Int8Tensor": "int8", "IntxUnpackedToInt8Tensor": "intx", "Float8Tensor": "float8"}
OPTIONAL = {"Int8Tensor": ("zero_point",)}
QUANTISES_INPUT = ("act_quant_kwargs", "activation_quantization", "act_quant_scale", "act_pre_scale")


class Layout(NamedTuple):
    """What a Frozen is besides its tensors, in plain values. shape: of the whole weight; dtype: of the weight that it stands
    for; numbers: of its kind; views: that are taken of the dequantised weight, in order."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: tuple
    views: tuple = ()


class Kind(NamedTuple):
    """dequantized(parts, layout, dtype) -> the whole weight; of raw tensors, [n, k]. transient: bytes of temporaries for each
    of at most AT_ONCE elements, or for each of all if it is below 1. package: that made it, whose function dequantises it."""

    dequantized: Callable[[Sequence[Tensor], Layout, torch.dtype], Tensor]
    transient: float
    package: str = ""


def layout_of(
    data: Tensor, scales: Tensor | None, kind: str | None, dtype: torch.dtype | None
) -> tuple[Layout, tuple[Tensor, ...]]:
    """(layout, the library's tensors) of what `Frozen` is given. Raises what `Frozen` raises."""
    if dtype is not None and dtype not in (*FLOATS, torch.float64):
        raise DtypeError(f"Frozen: dtype must be float16, bfloat16, float32 or float64, not {dtype}")
    if kind is not None:
        return _raw(data, scales, kind, dtype or torch.bfloat16)
    if scales is not None:
        raise TypeError("Frozen: scales are given without a kind; pass kind='block_fp8' or kind='mxfp4'")
    package = type(data).__module__.partition(".")[0]
    if package == "bitsandbytes" and type(data).__name__ == "Params4bit":
        return _of_bitsandbytes(data, dtype)
    if package == "torchao" and type(data).__name__ in TORCHAO:
        return _of_torchao(data, dtype)
    raise TypeError(
        f"Frozen: data must be bitsandbytes' Params4bit, a weight-only {', '.join(TORCHAO)} of torchao, or raw tensors "
        f"with a kind, not {type(data).__module__}.{type(data).__name__}"
    )


def transient_bytes(layout: Layout) -> int:
    """Bytes of what is alive beside the weight while it is dequantised."""
    transient, numel = KINDS[layout.kind].transient, math.prod(layout.shape[-2:])
    return int(transient * (numel if transient < 1 else min(numel, AT_ONCE)))


def dequantized(parts: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    """Computes the whole weight, in `dtype` if the kind can. Raises ImportError without the library that made it."""
    kind = KINDS[layout.kind]
    if kind.package and (advice := missing(kind.package)):
        raise ImportError(f"Frozen: a weight of {kind.package} is dequantised by {kind.package}. {advice}")
    if kind.package or len(layout.shape) == 2:
        return kind.dequantized(parts, layout, dtype)
    whole = parts[0].new_empty(layout.shape, dtype=dtype)
    for expert, made in enumerate(whole):
        made.copy_(kind.dequantized([part[expert] for part in parts], layout._replace(shape=layout.shape[1:]), dtype))
    return whole


def is_made_of(data: Any, parts: Sequence[Tensor]) -> bool:
    """Are these still the tensors of a library's weight? A library may pack it anew, or quantise it again."""
    if hasattr(data, "quant_state"):
        state = data.quant_state
        return state is not None and data.data_ptr() == parts[0].data_ptr() and state.absmax is parts[1]
    return data.qdata is parts[0] and data.scale is parts[1]


def why_not(data: Any) -> str:
    """Why no Frozen can be made of a weight; "" if one can."""
    try:
        layout_of(data, None, None, None)
    except (TypeError, ValueError) as error:  # ShapeError and DtypeError are such
        return str(error)
    return ""


# -- bitsandbytes: NF4 and FP4


def _of_bitsandbytes(data: Any, dtype: torch.dtype | None) -> tuple[Layout, tuple[Tensor, ...]]:
    state = data.quant_state
    if state is None:
        raise ValueError("Frozen: the Params4bit is not quantised yet; move its module to its device first")
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            "Frozen: the Params4bit is packed for inference on this CPU, which bitsandbytes does in an evaluation without "
            "gradients; load the weight again for training"
        )
    if state.quant_type not in ("nf4", "fp4") or state.dtype not in FLOATS:
        raise ValueError(
            f"Frozen: of bitsandbytes' kinds it takes nf4 and fp4 of 16-bit or float32 weights, not {state.quant_type!r} of "
            f"{state.dtype}"
        )
    shape = tuple(state.shape)
    if len(shape) != 2 or -(-math.prod(shape) // 2) != data.numel() * data.element_size():
        raise ShapeError(
            f"Frozen: the Params4bit has {data.numel() * data.element_size()} bytes for a weight of shape {shape}; it must be "
            f"[out_features, in_features] with two values in each byte"
        )
    parts, numbers = [data.data.as_subclass(Tensor), state.absmax], [state.blocksize]
    if state.nested:
        parts += [state.offset, state.state2.absmax, state.state2.code]
        numbers += [state.state2.blocksize]
    return Layout(state.quant_type, shape, dtype or state.dtype, tuple(numbers)), tuple(parts)


def _bitsandbytes(parts: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    packed, absmax, *nested = parts
    offset, absmax2, code2 = nested or (None, None, None)
    blocksize, *inner = layout.numbers
    state2 = QuantState(absmax2, blocksize=inner[0], code=code2, dtype=torch.float32) if nested else None
    made = dtype if dtype in FLOATS else torch.float32
    return dequantize_4bit(packed, QuantState(absmax, layout.shape, None, blocksize, layout.kind, made, offset, state2))


# -- torchao: int8, int1 to int8, float8


def _of_torchao(data: Any, dtype: torch.dtype | None) -> tuple[Layout, tuple[Tensor, ...]]:
    name = type(data).__name__
    for attribute in QUANTISES_INPUT:
        if getattr(data, attribute, None) is not None:
            raise TypeError(
                f"Frozen: a torchao {name} with {attribute} changes its layer's input too, so that it does not multiply by the "
                f"dequantised weight; quantise weight-only"
            )
    block = tuple(data.block_size or ())
    optional = [part for part in OPTIONAL.get(name, ()) if getattr(data, part) is not None]
    parts = [getattr(data, part) for part in (*data.tensor_data_names, *optional)]
    if data.dim() not in (2, 3) or len(block) != data.dim() or parts[0].shape != data.shape:
        raise ShapeError(
            f"Frozen: a torchao {name} must be [out_features, in_features] or [experts, ...], a value in each element, but is "
            f"{tuple(data.shape)} in blocks {block}, of data {tuple(parts[0].shape)}"
        )
    target = str(getattr(data, "target_dtype", "")).removeprefix("torch.")
    numbers = (str(data.dtype).removeprefix("torch."), target, *block)
    return Layout(TORCHAO[name], tuple(data.shape), dtype or data.dtype, numbers), tuple(parts)


def _torchao(parts: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    from torchao import quantization

    own, target, *block = layout.numbers
    own, block = getattr(torch, own), block[-len(layout.shape) :]

    def of(parts: Sequence[Tensor]) -> Tensor:
        if layout.kind == "int8":
            return quantization.Int8Tensor(*parts[:2], block, own, *parts[2:]).dequantize()
        if layout.kind == "float8":
            return quantization.Float8Tensor(*parts, block_size=block, dtype=own).dequantize()
        kind = quantization.IntxUnpackedToInt8Tensor
        return kind(*parts, getattr(torch, target), tuple(block), own, None).dequantize()

    if len(layout.shape) == 3 or block[0] != 1:
        return of(parts)
    return by_rows(layout, dtype, lambda rows: of([part[rows] if part.dim() == 2 else part for part in parts]))


# -- raw tensors: DeepSeek's blocks, and MXFP4


def _raw(data: Tensor, scales: Tensor | None, kind: str, dtype: torch.dtype) -> tuple[Layout, tuple[Tensor, ...]]:
    if kind not in ("block_fp8", "mxfp4"):
        raise ValueError(
            f"Frozen: kind must be 'block_fp8' or 'mxfp4', not {kind!r}; a weight of bitsandbytes or torchao has its own"
        )
    if not isinstance(data, Tensor) or not isinstance(scales, Tensor):
        raise TypeError(f"Frozen: kind={kind!r} needs data and scales as tensors")
    if kind == "mxfp4":
        *lead, groups, width = data.shape if data.dim() > 2 else (0, 0, 0)
        shape, wanted = (*lead, groups * GROUP), (*lead, groups)
        dtypes, fits = "uint8 data and uint8 scales", data.dtype == scales.dtype == torch.uint8
        layout = "[n, k / 32, 16] or [E, n, k / 32, 16]"
        good = width == GROUP // 2 and len(shape) in (2, 3)
    else:
        shape = tuple(data.shape)
        wanted = (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))
        dtypes, fits = "float8 data and floating-point scales", data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        fits = fits and scales.dtype in FLOATS
        layout, good = "[n, k] or [E, n, k]", len(shape) in (2, 3)
    if not fits:
        raise DtypeError(f"Frozen: kind={kind!r} needs {dtypes}, not {data.dtype} and {scales.dtype}")
    if not good or tuple(scales.shape) != wanted:
        raise ShapeError(
            f"Frozen: kind={kind!r} needs data {layout}, here with scales {wanted}, but they have shapes "
            f"{tuple(data.shape)} and {tuple(scales.shape)}"
        )
    return Layout(kind, tuple(shape), dtype, ()), (data, scales)


def _block_fp8(parts: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    """float32(data) * scale, rounded once: weight_dequant of DeepSeek-V3's inference/kernel.py."""
    data, scales = parts
    columns = torch.arange(data.shape[1], device=data.device) // BLOCK

    def rows_of(rows: slice) -> Tensor:
        own = scales[rows.start // BLOCK : -(-rows.stop // BLOCK)].float()
        own = own[:, columns].repeat_interleave(BLOCK, 0)[: rows.stop - rows.start]
        return data[rows].float().mul_(own)

    return by_rows(layout, dtype, rows_of)


def _mxfp4(parts: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    """transformers' convert_moe_packed_tensors (integrations/mxfp4.py), without its transposition."""
    blocks, scales = parts
    table = torch.tensor(FP4, dtype=torch.float32, device=blocks.device)

    def rows_of(rows: slice) -> Tensor:
        own = blocks[rows]
        values = table[torch.stack((own & 15, own >> 4), -1).int()].flatten(2)
        return torch.ldexp(values, scales[rows].int()[..., None] - 127).flatten(1)

    return by_rows(layout, dtype, rows_of)


def by_rows(layout: Layout, dtype: torch.dtype, rows_of: Callable[[slice], Tensor]) -> Tensor:
    """The weight [n, k] from rows_of(some of its rows), which begin at multiples of BLOCK."""
    n, k = layout.shape
    step = max(AT_ONCE // max(k, 1) // BLOCK, 1) * BLOCK
    if n <= step:
        return rows_of(slice(0, n)).to(dtype)
    made: Tensor | None = None
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        part = rows_of(rows)
        made = part.new_empty(layout.shape, dtype=dtype) if made is None else made
        made[rows] = part
    return made


KINDS = {  # bytes as measured on a CPU, and a little more
    "nf4": Kind(
        _bitsandbytes, 0.25, "bitsandbytes"
    ),  # of float32 scales; of all elements, because they are all at once
    "fp4": Kind(_bitsandbytes, 0.25, "bitsandbytes"),
    "int8": Kind(_torchao, 13, "torchao"),
    "intx": Kind(_torchao, 7, "torchao"),
    "float8": Kind(_torchao, 13, "torchao"),
    "block_fp8": Kind(_block_fp8, 13),
    "mxfp4": Kind(_mxfp4, 21),
}
