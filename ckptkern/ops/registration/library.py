"""An op as two library ops, `ckptkern::NAME_fwd(tensors, options) -> [y, *more, *saved]` and `ckptkern::NAME_bwd(dy, tensors,
saved, options, needs) -> gradients`, so that torch.compile, FLOP counters and selective checkpointing see it.

They are functional and raw (no torch.library.custom_op, whose host time is higher). Fakes and FLOPs are what the op's own body
gives on meta tensors, in PyTorch ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from ...frozen import regrouped
from ..dispatch.choices import read_precision
from . import codec as _codec
from .needs import joined
from .op import Op, names_of_saved, results_of, run_forward
from .vmap import in_legacy_vmap, loop_over_batch

LIBRARY = torch.library.Library("ckptkern", "FRAGMENT")


class Registered(NamedTuple):
    """An op with the two library ops that were made of it."""

    op: type[Op]
    fwd: torch._ops.OpOverload
    bwd: torch._ops.OpOverload
    layout: _codec.Layout  # of its options


def call_forward(registered: Registered, tensors: Sequence, options) -> Sequence[Tensor]:
    """[y, *more, *saved] by the library op."""
    return registered.fwd(tensors, *_codec.pack(registered.layout, options))


def _on_meta(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [t if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]


def _in_torch_ops(options) -> Any:
    """The options with which an op's body runs in PyTorch ops, all tokens at once."""
    return _codec.replaced(options, backend="eager", fused="", workspace=None)


def register(op: type[Op]) -> Registered:
    """Schemas, bodies, fakes, vmap rules and FLOP formulas of the two library ops."""
    names, layout = (f"{op.name}_fwd", f"{op.name}_bwd"), _codec.layout_of(op.Options)
    LIBRARY.define(f"{names[0]}(Tensor?[] tensors, {_codec.SCHEMA}) -> Tensor[]")
    LIBRARY.define(
        f"{names[1]}(Tensor dy, Tensor?[] tensors, Tensor?[] saved, {_codec.SCHEMA}, int[] needs) -> Tensor[]"
    )
    packets = tuple(getattr(torch.ops.ckptkern, name) for name in names)

    def options_of(lists: Sequence) -> Any:
        options = _codec.unpack(layout, lists)
        if "auto" in _codec.values_of(
            options, "precision"
        ):  # a compiled graph's, which reads torch's setting when it runs
            options = _codec.replaced(options, precision=read_precision())
        return options

    def forward(tensors, *lists):
        with torch._C._DisableAutocast():
            return run_forward(op, regrouped(tensors, lists[2]), options_of(lists))

    def backward(dy, tensors, saved, *lists_and_needs):
        *lists, needs = lists_and_needs
        options = options_of(lists)
        with torch._C._DisableAutocast():
            made = dict(zip(names_of_saved(op, options), saved, strict=True))
            # a function of tensors, which changes no main_grad that hangs on one
            own = [t.detach() if hasattr(t, "main_grad") else t for t in regrouped(tensors, lists[2])]
            grads = op.backward(dy, own, made, options, joined(needs))
            return [dy.new_empty(0) if g is None else g for g in grads]

    def forward_on_meta(tensors, *lists):
        options = _codec.unpack(layout, lists)
        with torch._C._DisableAutocast():
            y, made = op.forward(regrouped(_on_meta(tensors), lists[2]), _in_torch_ops(options))
            return results_of(op, options, y, op.made_on_meta(tensors[0], made, options))

    def backward_on_meta(dy, tensors, saved, *lists_and_needs):
        *lists, needs = lists_and_needs
        options = _in_torch_ops(_codec.unpack(layout, lists))
        (dy,), tensors, saved = _on_meta([dy]), _on_meta(tensors), _on_meta(saved)
        with torch._C._DisableAutocast():
            made = dict(zip(names_of_saved(op, options), saved, strict=True))
            return op.backward(dy, regrouped(tensors, lists[2]), made, options, joined(needs))

    for packet, body, on_meta in zip(packets, (forward, backward), (forward_on_meta, backward_on_meta), strict=True):
        name = packet.default._schema.name
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(name, _fake(on_meta), lib=LIBRARY)
        torch.library.register_vmap(name, loop_over_batch(packet.default), lib=LIBRARY)
        register_flop_formula(packet, get_raw=True)(_flops(on_meta))
    LIBRARY.impl(names[1], in_legacy_vmap(packets[1].default), "Batched")
    return Registered(op, *(packet.default for packet in packets), layout)


def _fake(on_meta: Callable) -> Callable:
    """The op's results, empty, from its body on meta tensors."""

    def fake(first, *others):
        like = first if isinstance(first, Tensor) else next(t for t in first if t is not None)
        return [
            like.new_empty(0) if t is None else like.new_empty_strided(t.shape, t.stride(), dtype=t.dtype)
            for t in on_meta(first, *others)
        ]

    return fake


def _addmm_flops(total, a, b, *args, out_val=None, **kwargs) -> int:
    """torch counts addmm, but neither addmm_ nor one with an out_dtype."""
    return 2 * a.numel() * b.shape[1]


_addmm_flops._get_raw = True  # tensors, not their shapes
_ADDMM = {torch.ops.aten.addmm: _addmm_flops, torch.ops.aten.addmm_: _addmm_flops}


def _grouped_mm_flops(a, b, *args, out_val=None, **kwargs) -> int:
    """Each row of a [R, k] meets one of b [E, k, n], and each column of a [k, R] one row of b [R, n]."""
    return 2 * b.numel() * a.shape[-2] if a.dim() > b.dim() else 2 * a.numel() * b.shape[-1]


_grouped_mm_flops._get_raw = True


def _of_all_heads(formula: Callable, query: int) -> Callable:
    """The formula of an attention whose arguments from place `query` are q, k and v, of fewer heads of k and v, too: in torch
    2.11 it refuses them."""

    def flops(*args, **kwargs) -> int:
        heads, given = args[query].shape[1], list(args)
        for place in (query + 1, query + 2):
            given[place] = args[place][:, :1].expand(-1, heads, -1, -1)
        return formula(*given, **kwargs)

    flops._get_raw = True
    return flops


FLOPS = flop_registry | {  # formulas of the ops in the bodies, of which torch lacks these
    **_ADDMM,
    torch.ops.aten._grouped_mm: _grouped_mm_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_all_heads(
        flop_registry[torch.ops.aten._scaled_dot_product_flash_attention], query=0
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_all_heads(
        flop_registry[torch.ops.aten._scaled_dot_product_flash_attention_backward], query=1
    ),
}


def _flops(on_meta: Callable) -> Callable:
    """The op's FLOPs, from its body on meta tensors: multiply-adds times two, as torch counts them."""

    def flops(*args, out_val=None):
        with (
            _disable_current_modes(),
            FlopCounterMode(display=False, custom_mapping=_ADDMM) as counter,
        ):
            on_meta(*args)
        return counter.get_total_flops()

    return flops
