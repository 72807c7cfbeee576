"""Implements frozen quantised weights as arguments of the ops.

A `Frozen` has the shape and dtype of the weight that it stands for, and holds only the library's quantised tensors. An op saves
it for backward as it is, and dequantises it in each pass; other PyTorch operations dequantise it where they read it.

The library that made a weight dequantises it. Raw tensors (block_fp8, mxfp4) are dequantised here, by their publishers'
formulas.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_map

from .errors import DtypeError, ShapeError
from .extras import missing
from .memory import placeholders

aten = torch.ops.aten
VIEWS = "t", "transpose", "slice", "select", "unbind", "split", "split_with_sizes", "unsqueeze"
SWAPS = {("transpose.int", (-2, -1))}  # transposes each expert
SAME = "detach", "alias", "lift_fresh"
_MARK = "frozen:"  # begins an op's option string that says which of its tensors are parts of a Frozen
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 128  # of block_fp8, in both dimensions
GROUP = 32  # values that share a scale in mxfp4
AT_ONCE = 2**20  # elements dequantised at a time by kinds with temporaries
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same negative
TORCHAO = {"Int8Tensor": "int8", "IntxUnpackedToInt8Tensor": "intx", "Float8Tensor": "float8"}
OPTIONAL = {"Int8Tensor": ("zero_point",)}
QUANTISES_INPUT = ("act_quant_kwargs", "activation_quantization", "act_quant_scale", "act_pre_scale")


class Layout(NamedTuple):
    """Describes a Frozen besides its tensors, in plain values. shape: of the whole weight. dtype: of the weight that it
    stands for. numbers: parameters of its kind. views: operations on the dequantised weight, in order."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: tuple
    views: tuple = ()


Taken = tuple[Layout, tuple[Tensor, ...]]  # a Frozen's layout and tensors


def expert_by_slices(parts, layout, expert):
    """Returns one expert of parts that have an entry for each expert, or are common to all."""
    own = [part[expert] if part.dim() and len(part) == layout.shape[0] else part for part in parts]
    return layout._replace(shape=layout.shape[1:]), tuple(own)


class Kind(NamedTuple):
    """A kind of quantisation. dequantized(parts, layout, dtype) -> the whole weight; for raw tensors, [n, k]. transient:
    bytes of temporaries per element, for at most AT_ONCE elements, or for all if it is below 1. package: that dequantises
    it. expert(parts, layout, e): one expert of [E, n, k]."""

    dequantized: Callable[[Sequence[Tensor], Layout, torch.dtype], Tensor]
    transient: float
    package: str = ""
    expert: Callable[[Sequence[Tensor], Layout, int], Taken] = expert_by_slices


def layout_of(data: Tensor, scales: Tensor | None, kind: str | None, dtype: torch.dtype | None) -> Taken:
    """Returns the layout and the library's tensors for `Frozen`'s arguments. Raises what `Frozen` raises."""
    if dtype is not None and dtype not in (*FLOATS, torch.float64):
        raise DtypeError(f"Frozen: dtype must be float16, bfloat16, float32 or float64, not {dtype}")
    if kind is not None:
        return _raw(data, scales, kind, dtype or torch.bfloat16)
    if scales is not None:
        raise TypeError("Frozen: scales are given without a kind; pass kind='block_fp8' or kind='mxfp4'")
    if (packed := packed_4bit(data)) is not None:
        return _of_bitsandbytes(*packed, dtype)
    if type(data).__module__.startswith("torchao.") and type(data).__name__ in TORCHAO:
        return _of_torchao(data, dtype)
    raise TypeError(
        f"Frozen: data must be bitsandbytes' Params4bit or its parametrization alone, a weight-only {', '.join(TORCHAO)} of "
        f"torchao, or raw tensors with a kind, not {type(data).__module__}.{type(data).__name__}"
    )


def dequantized(parts: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    """Computes the whole weight, in `dtype` if the kind can. Raises ImportError without the library that made it."""
    kind = KINDS[layout.kind]
    if kind.package and (advice := missing(kind.package)):
        raise ImportError(f"Frozen: a weight of {kind.package} is dequantised by {kind.package}. {advice}")
    if kind.package or len(layout.shape) == 2:
        return kind.dequantized(parts, layout, dtype)
    whole = parts[0].new_empty(layout.shape, dtype=dtype)
    for expert, values_of_expert in enumerate(whole):
        own, values = kind.expert(parts, layout, expert)
        values_of_expert.copy_(kind.dequantized(values, own, dtype))
    return whole


def is_made_of(data, parts: Sequence[Tensor]) -> bool:
    """Returns whether these are still the tensors of a library's weight, which the library may pack or quantise again."""
    if (packed_and_state := packed_4bit(data)) is not None:
        packed, state = packed_and_state
        return state is not None and packed.data_ptr() == parts[0].data_ptr() and state.absmax is parts[1]
    return data.qdata is parts[0] and data.scale is parts[1]


def why_not(data) -> str:
    """Returns the reason why no Frozen can be made of a weight; "" if one can."""
    try:
        layout_of(data, None, None, None)
    except (TypeError, ValueError) as error:  # ShapeError and DtypeError are such
        return str(error)
    return ""


# -- bitsandbytes: NF4 and FP4


def packed_4bit(data) -> tuple[Tensor, Any] | None:
    """Returns the packed values and their QuantState of a Params4bit, or of the parametrizations of a parameter that went
    through bitsandbytes' replace_parameter_4bit alone; None for other data."""
    if isinstance(data, ParametrizationList) and len(data) == 1 and hasattr(data[0], "quant_state"):
        return data.original, data[0].quant_state
    return (data, data.quant_state) if type(data).__name__ == "Params4bit" else None


def _of_bitsandbytes(packed: Tensor, state, dtype: torch.dtype | None) -> Taken:
    if state is None:
        raise ValueError("Frozen: the Params4bit is not quantised yet; move its module to its device first")
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            "Frozen: the Params4bit is packed for inference on this CPU, which bitsandbytes does in an evaluation without "
            "gradients; load the weight again for training"
        )
    if state.quant_type not in ("nf4", "fp4") or state.dtype not in FLOATS:
        raise ValueError(
            f"Frozen: a Params4bit must be nf4 or fp4 of a 16-bit or float32 weight, but is {state.quant_type!r} of "
            f"{state.dtype}"
        )
    shape = tuple(state.shape)
    bytes_, whole_rows = packed.nbytes, len(shape) < 3 or shape[2] % state.blocksize == 0
    # bitsandbytes 0.50's CPU kernel uses wrong scales for rows that are not whole blocks
    if len(shape) not in (2, 3) or not whole_rows or -(-math.prod(shape) // 2) != bytes_:
        raise ShapeError(
            f"Frozen: the Params4bit has {bytes_} bytes for a weight of shape {shape}; it must "
            f"be [out_features, in_features], or of experts [E, out_features, in_features] with rows of whole blocks of "
            f"{state.blocksize} values, with two values in each byte"
        )
    parts, numbers = [packed.data.as_subclass(Tensor), state.absmax], [state.blocksize]
    if state.nested:
        parts += [state.offset, state.state2.absmax, state.state2.code]
        numbers += [state.state2.blocksize]
    return Layout(state.quant_type, shape, dtype or state.dtype, tuple(numbers)), tuple(parts)


def _bitsandbytes(parts, layout, dtype):
    from bitsandbytes.functional import QuantState, dequantize_4bit

    packed, absmax, *nested = parts
    offset, absmax2, code2 = nested or (None, None, None)
    blocksize, *inner = layout.numbers
    state2 = QuantState(absmax2, blocksize=inner[0], code=code2, dtype=torch.float32) if nested else None
    computed = dtype if dtype in FLOATS else torch.float32
    return dequantize_4bit(
        packed, QuantState(absmax, layout.shape, None, blocksize, layout.kind, computed, offset, state2)
    )


def _expert_4bit(parts, layout, expert):
    """Returns one expert with its scales dequantised, as bitsandbytes' dequantize_blockwise does: they begin anywhere in a
    block."""
    packed, absmax, *nested = parts
    packed, absmax = (part.view(layout.shape[0], -1)[expert] for part in (packed.view(torch.uint8), absmax))
    if nested:
        (offset, absmax2, code), blocks = nested, len(absmax)
        block = torch.arange(blocks * expert, blocks * (expert + 1), device=absmax.device) // layout.numbers[1]
        absmax = code[absmax.int()] * absmax2[block] + offset
    return layout._replace(shape=layout.shape[1:], numbers=layout.numbers[:1]), (packed[:, None], absmax)


# -- torchao: int8, int1 to int8, float8


def _of_torchao(data, dtype: torch.dtype | None) -> Taken:
    name = type(data).__name__
    for attribute in QUANTISES_INPUT:
        if getattr(data, attribute, None) is not None:
            raise TypeError(
                f"Frozen: a torchao {name} with {attribute} changes its layer's input too, so that the matmul is not that of "
                f"the dequantised weight; quantise weight-only"
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


def _torchao(parts, layout, dtype):
    from torchao import quantization

    own, target, *block = layout.numbers
    own, block = getattr(torch, own), block[-len(layout.shape) :]

    def of(parts):
        if layout.kind == "int8":
            weight = quantization.Int8Tensor(*parts[:2], block, own, *parts[2:])
        elif layout.kind == "float8":
            weight = quantization.Float8Tensor(*parts, block_size=block, dtype=own)
        else:
            weight = quantization.IntxUnpackedToInt8Tensor(*parts, getattr(torch, target), tuple(block), own, None)
        return weight.dequantize()

    if len(layout.shape) == 3 or block[0] != 1:
        return of(parts)
    return by_rows(layout, dtype, lambda rows: of([part[rows] if part.dim() == 2 else part for part in parts]))


# -- raw tensors: DeepSeek's blocks, and MXFP4


def _raw(data: Tensor, scales: Tensor | None, kind: str, dtype: torch.dtype) -> Taken:
    if kind not in ("block_fp8", "mxfp4"):
        raise ValueError(
            f"Frozen: kind must be 'block_fp8' or 'mxfp4', not {kind!r}; a bitsandbytes or torchao weight has a kind of its own"
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


def _block_fp8(parts, layout, dtype):
    """Computes float32(data) * scale, rounded once: weight_dequant of DeepSeek-V3's inference/kernel.py."""
    data, scales = parts
    columns = torch.arange(data.shape[1], device=data.device) // BLOCK

    def rows_of(rows):
        own = scales[rows.start // BLOCK : -(-rows.stop // BLOCK)].float()
        own = own[:, columns].repeat_interleave(BLOCK, 0)[: rows.stop - rows.start]
        return data[rows].float().mul_(own)

    return by_rows(layout, dtype, rows_of)


def _mxfp4(parts, layout, dtype):
    """Computes transformers' convert_moe_packed_tensors (integrations/mxfp4.py), without its transposition."""
    blocks, scales = parts
    table = torch.tensor([sign * value for sign in (1, -1) for value in FP4], dtype=torch.float32, device=blocks.device)

    def rows_of(rows):
        own = blocks[rows]
        values = table[torch.stack((own & 15, own >> 4), -1).int()].flatten(2)
        return torch.ldexp(values, scales[rows].int()[..., None] - 127).flatten(1)

    return by_rows(layout, dtype, rows_of)


def by_rows(layout: Layout, dtype: torch.dtype, rows_of: Callable[[slice], Tensor]) -> Tensor:
    """Returns the weight [n, k] from rows_of(slice of rows), whose slices begin at multiples of BLOCK."""
    n, k = layout.shape
    step = max(AT_ONCE // max(k, 1) // BLOCK, 1) * BLOCK
    if n <= step:
        return rows_of(slice(0, n)).to(dtype)
    weight: Tensor | None = None
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        part = rows_of(rows)
        weight = part.new_empty(layout.shape, dtype=dtype) if weight is None else weight
        weight[rows] = part
    return weight


KINDS = {  # bytes as measured on a CPU, and a little more
    # float32 scales of all elements, because all are dequantised at once
    "nf4": Kind(_bitsandbytes, 0.25, "bitsandbytes", _expert_4bit),
    "fp4": Kind(_bitsandbytes, 0.25, "bitsandbytes", _expert_4bit),
    "int8": Kind(_torchao, 13, "torchao"),
    "intx": Kind(_torchao, 7, "torchao"),
    "float8": Kind(_torchao, 13, "torchao"),
    "block_fp8": Kind(_block_fp8, 13),
    "mxfp4": Kind(_mxfp4, 21),
}


# -- the tensor


class Frozen(Tensor):
    """A frozen quantised weight as an op's weight: `ckptkern.gated_mlp(x, Frozen(q1), Frozen(q2), ...)`.

    data: a library's quantised weight [n, k] or [E, n, k]:

        bitsandbytes' Params4bit (NF4, FP4, double quantisation), or module.parametrizations.name after replace_parameter_4bit;
        torchao's weight-only Int8Tensor, IntxUnpackedToInt8Tensor (int1 to int8) and Float8Tensor;

    or raw tensors of a `kind`:

        "block_fp8"  float8 data [n, k] or [E, n, k], scales [ceil(n / 128), ceil(k / 128)] or [E, ...] (DeepSeek-V3's
                     weight_scale_inv): w = data * scale of its 128 x 128 block;
        "mxfp4"      uint8 data [n, k / 32, 16] or [E, n, k / 32, 16] of two 4-bit floats, the low one first, uint8 scales
                     [n, k / 32] or [E, ...]: w = value * 2 ** (scale - 127) (OCP Microscaling Formats 1.0; GPT-OSS's blocks
                     and scales).

    dtype: of the weight that it stands for; by default what the library dequantises to, and bfloat16 for raw tensors.

    Holds only references: state_dict, merging and saving are the library's. An op saves the quantised memory for backward,
    dequantises in forward and again in backward within its workspace, and computes no gradient. Other operations dequantise
    too.

    Raises TypeError for data of an unknown class, a torchao tensor that quantises activations, and a `kind` without scales;
    ValueError for an unknown kind; ShapeError and DtypeError for tensors that do not fit the kind.
    """

    layout_: Layout
    part_names: list[str]

    @staticmethod
    def __new__(
        cls, data: Tensor, scales: Tensor | None = None, *, kind: str | None = None, dtype: torch.dtype | None = None
    ) -> Frozen:
        return _made(*layout_of(data, scales, kind, dtype))

    @property
    def kind(self) -> str:
        """Returns the kind of quantisation: "nf4", "fp4", "int8", "intx", "float8", "block_fp8" or "mxfp4"."""
        return self.layout_.kind

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Returns the library's tensors."""
        return tuple(getattr(self, name) for name in self.part_names)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the weight as a plain tensor in `dtype`, by default its own."""
        layout, parts = self.layout_, self.parts
        dtype = dtype or layout.dtype
        if parts[0].is_meta:
            whole = parts[0].new_empty(layout.shape, dtype=dtype)
        else:
            with torch.no_grad():
                whole = dequantized(parts, layout, dtype)
        return viewed(whole.to(dtype), layout.views)

    def whole(self) -> tuple[Frozen, tuple]:
        """Returns the whole weight, and the views of it that this tensor is."""
        return _made(self.layout_._replace(views=()), self.parts), self.layout_.views

    def data_ptr(self) -> int:
        raise RuntimeError(
            "ckptkern.Frozen has no address, because its numbers are quantised; take the address of dequantize()"
        )

    def requires_grad_(self, requires_grad: bool = True) -> Frozen:
        if requires_grad:
            raise RuntimeError(
                "ckptkern.Frozen has no gradient, because its numbers are quantised; train a low-rank update of it "
                "(ckptkern.LoRA), or dequantize()"
            )
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Frozen({self.kind}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _made, (self.layout_, self.parts)

    def __deepcopy__(self, memo: dict) -> Frozen:
        return self  # frozen: what a copy reads is the same

    def __tensor_flatten__(self) -> tuple[list[str], Layout]:
        return self.part_names, self.layout_

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], layout: Layout, outer_size: Any, outer_stride: Any) -> Frozen:
        return _made(layout, tuple(inner.values()))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if function.namespace == "ckptkern":
            return function(*flattened(function, args, kwargs))
        if type(first) is Frozen and function.namespace == "aten":
            layout, parts, name = first.layout_, first.parts, function._schema.name.removeprefix("aten::")
            if name in SAME:
                return _made(layout, parts)
            dim, expert = args[1:] if name == "select" else (None, 0)
            if dim == 0 and len(layout.shape) == 3 and {view[:2] for view in layout.views} <= SWAPS:
                return _made(*KINDS[layout.kind].expert(parts, layout, expert % layout.shape[0]))
            if name in VIEWS and not kwargs:  # views of the dequantised weight
                results, view = function(_like(layout), *args[1:]), (f"{name}.{function._overloadname}", args[1:])
                if isinstance(results, Tensor):
                    return _made(layout._replace(views=(*layout.views, (*view, None))), parts)
                return [_made(layout._replace(views=(*layout.views, (*view, i))), parts) for i in range(len(results))]
            if name == "_to_copy":
                dtype, device = kwargs.get("dtype") or layout.dtype, kwargs.get("device")
                parts = parts if device is None else tuple(part.to(device) for part in parts)
                return _made(layout._replace(dtype=dtype), parts)
        if function is aten._grouped_mm.default and len(args) == 3 and type(args[2]) is Tensor:
            return _grouped_mm(*args)
        arguments = zip(function._schema.arguments, args, strict=False)
        changed = [value for a, value in arguments if a.alias_info is not None and a.alias_info.is_write]
        if Frozen in map(type, (*changed, *(kwargs.values() if function._schema.is_mutable else ()))):
            raise RuntimeError(f"ckptkern.Frozen cannot be changed in place by {function}; change its library's tensor")
        args, kwargs = tree_map(lambda value: value.dequantize() if type(value) is Frozen else value, (args, kwargs))
        return function(*args, **kwargs)


def _grouped_mm(x: Tensor, weight: Frozen, offs: Tensor) -> Tensor:
    """Computes torch's grouped matmul, dequantising one expert after another. Reads `offs` on the host."""
    y = x.new_zeros(len(x), weight.shape[2])
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        if start < stop:
            y[start:stop] = x[start:stop] @ weight[expert]
    return y


def viewed(tensor: Tensor, views: Iterable[tuple]) -> Tensor:
    """Applies views to a tensor, each (operation, arguments, index among several results)."""
    for name, args, place in views:
        packet, overload = name.split(".")
        tensor = getattr(getattr(aten, packet), overload)(tensor, *args)
        tensor = tensor if place is None else tensor[place]
    return tensor


@placeholders()
def _like(layout: Layout) -> Tensor:
    return viewed(torch.empty(layout.shape, dtype=layout.dtype, device="meta"), layout.views)


def _made(layout: Layout, parts: Sequence[Tensor]) -> Frozen:
    like = _like(layout)
    frozen = Tensor._make_wrapper_subclass(
        Frozen, like.shape, strides=like.stride(), dtype=layout.dtype, device=parts[0].device, requires_grad=False
    )
    names = [f"part{i}" for i in range(len(parts))]
    vars(frozen).update(zip(names, parts, strict=True), layout_=layout, part_names=names)
    return frozen


def frozen_bytes(weights: Iterable, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bytes of all Frozen weights dequantised at once in `dtype`, and of the largest alone (for experts, one
    expert). Both include the temporaries while one is dequantised."""
    whole = most = largest = 0
    for w in weights:
        if type(w) is Frozen:
            shape, of_each = w.layout_.shape, KINDS[w.kind].transient
            single = math.prod(shape[-2:])
            transient = int(of_each * (single if of_each < 1 else min(single, AT_ONCE)))
            whole += math.prod(shape[-w.dim() :]) * dtype.itemsize
            most, largest = max(most, transient), max(largest, single * dtype.itemsize + transient)
    return whole + most, largest


# -- in the arguments of a library op


def flattened(function, args: tuple, kwargs: dict) -> list:
    """Returns the arguments of a library op with each Frozen replaced by its parts, and a string that says which they are."""
    arguments = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | kwargs
    flat, places = [], []
    for i, tensor in enumerate(arguments["tensors"]):
        parts = (tensor,)
        if type(tensor) is Frozen:
            parts, dtype = tensor.parts, str(tensor.dtype).removeprefix("torch.")
            places.append((i, len(parts), tuple(tensor.layout_._replace(dtype=dtype))))
        flat += parts
    return list((arguments | {"tensors": flat, "strings": [*arguments["strings"], f"{_MARK}{places!r}"]}).values())


def regrouped(tensors: Sequence[Tensor | None], strings: Sequence[str]) -> Sequence[Tensor | None]:
    """Returns the tensors of `flattened` with each Frozen again in the place of its parts."""
    if not strings or not strings[-1].startswith(_MARK):
        return tensors
    whole = list(tensors)
    for place, count, (kind, shape, dtype, numbers, views) in ast.literal_eval(strings[-1].removeprefix(_MARK)):
        layout = Layout(kind, shape, getattr(torch, dtype), numbers, views)
        whole[place : place + count] = [_made(layout, whole[place : place + count])]
    return whole
