"""Core attention, softmax(scale q k^T + mask) v, forward and backward, and the choice of its kernel."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.types import IntLikeType
from torch.utils._python_dispatch import _disable_current_modes

from ... import eager
from ...errors import ShapeError
from ..dispatch.choices import KERNEL_DTYPES, check_tensor, kernels_alone
from ..dispatch.shard import refuse_context
from ..registration.functions import Bodies
from ..sublayer.dropout import dropout_arguments


class CoreTensors(NamedTuple):
    """Holds the core's inputs besides q, k and v: mask [B or 1, H or 1, Sq or 1, Sk or 1], slopes [B or 1, H], sinks [H],
    the dropout state, and the bounds of packed sequences, int32 [N + 1]."""

    mask: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    rng: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None


class CoreOptions(NamedTuple):
    """Holds the core's other arguments. left, right: visible columns, None for no bound; max_q, max_k: the longest packed
    sequences; fused: the name of torch's kernel, or ""; softcap: 0 for none; first_plane, planes: AttentionCore's, for
    the dropout mask; workspace: AttentionCore's, bytes of scores in PyTorch ops."""

    dropout_p: float
    scale: float
    left: IntLikeType | None
    right: IntLikeType | None
    max_q: IntLikeType
    max_k: IntLikeType
    backend: str
    precision: str
    fused: str
    softcap: float
    first_plane: int
    planes: int
    workspace: int | None


def core_of(t: CoreTensors, o: Any) -> eager.AttentionCore:
    """Returns the core as launchers take it. o: options with the fields of CoreOptions.

    A bool mask is viewed as int8 here, inside the ops, because torch 2.11's inductor cannot compile that view.
    """
    mask = t.mask.view(torch.int8) if t.mask is not None and t.mask.dtype == torch.bool else t.mask
    return eager.AttentionCore(
        scale=o.scale,
        precision=o.precision,
        window=(o.left, o.right),
        mask=mask,
        slopes=t.slopes,
        sinks=None if t.sinks is None else t.sinks[None],
        dropout=eager.NO_DROPOUT if t.rng is None else dropout_arguments(t.rng, o.dropout_p),
        cu_q=t.cu_q,
        cu_k=t.cu_k,
        max_q=o.max_q,
        max_k=o.max_k,
        fused=o.fused,
        softcap=o.softcap,
        plane_base=o.first_plane,
        planes=o.planes,
        workspace=o.workspace,
    )


def merged_mask(mask: Tensor | None, padding: Tensor | None, mask_is_exclusion: bool = False) -> Tensor | None:
    """Merges attn_mask, broadcastable to [B, H, S, S], with key_padding_mask [B, S] (True hides) or with a second
    attn_mask.

    Backward merges again: the given masks are saved, because all layers of a model share them.
    """
    pads = padding is not None and padding.dim() < 4
    padding = torch.atleast_2d(padding)[:, None, None] if pads else padding
    seen = added = None
    for tensor, hides in ((mask, mask_is_exclusion), (padding, pads or mask_is_exclusion)):
        if tensor is None:
            continue
        if tensor.is_floating_point():
            added = tensor if added is None else added + tensor
        else:
            tensor = ~tensor if hides else tensor
            seen = tensor if seen is None else seen & tensor
    if added is not None:
        return added if seen is None else added.masked_fill(~seen, -math.inf)
    return seen


# GPUs and head dims for which cuDNN's kernel is first, as in torch 2.11 (check_prefer_cudnn_attention).
# On H200 our core is second, not flash attention: OWN_BEFORE_FLASH. Causal heads of 128, forward and backward in a GPT and in a
# Llama layer, ms above cuDNN's (benchmarks/results/h200): 2,048 tokens 0.21 and 0.43 (flash attention 0.44 and 0.44), 8,192
# tokens 4.5 and 6.0 (7.9 and 7.3). Other cases, which were not measured, take torch's kernels.
CUDNN_FIRST, CUDNN_HEAD_DIMS = ((9, 0), (10, 0)), range(64, 129, 8)
OWN_BEFORE_FLASH = {((9, 0), 128)}  # (compute capability, head dim) of cores with a bound: causal and windows
FLASH_HEAD_DIMS = range(8, 257, 8)


class CoreCase(NamedTuple):
    """The key by which a kernel is chosen. bounded: has a window, such as causal; windowed: has a window other than causal."""

    float32: bool
    D: int
    bounded: bool
    windowed: bool
    packed: bool
    masked: bool
    grouped: bool


def kernel_order(capability: tuple[int, int], case: CoreCase) -> tuple[str, ...]:
    """Returns torch's kernels to try, in order, before the backend's.

    float32 without TF32 has only memory-efficient attention: our kernels take tiles of 32 x 32 and FMA there. Masks go to
    cuDNN and to memory-efficient attention; torch never gives either a mask together with causal. Windows and packed
    sequences go to flash attention. Dropout goes to no kernel of torch: its forward takes no seed, so recompute could not
    sample the same mask.
    """
    plain = not (case.windowed or case.packed or (case.masked and case.bounded))
    if case.float32:
        return ("efficient",) if plain else ()
    cudnn = plain and capability in CUDNN_FIRST and case.D in CUDNN_HEAD_DIMS
    flash = not case.masked and not (case.bounded and (capability, case.D) in OWN_BEFORE_FLASH)
    return ("cudnn",) * cudnn + ("flash",) * flash


@functools.cache
def _accepts(kernel: str, index: int | None, dtype: torch.dtype, case: CoreCase) -> bool:
    """Returns whether torch lets `kernel` run such heads on this device, with this build and this cuDNN."""
    # With this variable torch gives cuDNN's logsumexp another layout.
    if kernel == "cudnn" and os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0") not in ("", "0"):
        return False
    grouped = case.grouped and kernel != "efficient"  # which gets repeated heads
    # Real tensors, not fake ones: torch answers for the current device.
    with _disable_current_modes(), torch.cuda.device(index), torch.inference_mode(False), torch.enable_grad():
        q, k = (
            torch.empty((1, heads, 128, case.D), dtype=dtype, device="cuda", requires_grad=True)
            for heads in (2, 1 if grouped else 2)
        )
        mask = q.detach().new_empty((1, 1, 128, 128)) if case.masked else None
        asked = torch.backends.cuda.SDPAParams(q, k, k, mask, 0.0, case.bounded and not case.windowed, grouped)
        return getattr(torch.backends.cuda, f"can_use_{kernel}_attention")(asked)


def _constant_kernels(index: int | None, dtype: torch.dtype, *case: Any) -> tuple[str, ...]:
    """Returns `kernel_order` without kernels that the user disables or torch refuses."""
    asked = CoreCase(dtype == torch.float32, *case)
    kernels = kernel_order(torch.cuda.get_device_capability(index), asked)
    names = {"efficient": "mem_efficient"}  # its name in torch's settings
    enabled = (
        kernel for kernel in kernels if getattr(torch.backends.cuda, f"{names.get(kernel, kernel)}_sdp_enabled")()
    )
    return tuple(kernel for kernel in enabled if _accepts(kernel, index, dtype, asked))


_constant_kernels._dynamo_marked_constant = True  # as in `dispatch.choices`: called, not traced


def fused_core(
    backend: str,
    x: Tensor,
    dtype: torch.dtype,
    precision: str,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    left: int | None,
    right: int | None,
    scale: float,
    *others: object,
    masks: Sequence[Tensor | None] = (),
    cu: Tensor | None = None,
) -> str:
    """Returns the name of torch's kernel for the core of q [B, H, Sq, D] and k [B, H_kv, Sk, D], or "" for the backend's
    kernel.

    precision: of float32, `matmul_precision`. masks: merged into the core's mask. cu: of packed sequences. others: slopes,
    dropout, softcap, but not sinks. The backend's kernel runs
    - if any of the others is not None, or a mask is trained, has several heads or rows of queries, of which torch's kernel
      reads a copy that no workspace counts, or is a float of another dtype, which the backend's kernel adds in float32;
    - with a scale that is not positive (torch's kernel on a CPU hides a score by -inf before it scales it);
    - under deterministic algorithms, under backend("triton"), and if torch.backends.cuda disables torch's kernels;
    - in float32 unless the precision is known to be "ieee";
    - with a bound, unless Sq = Sk or packed: flash attention aligns bottom-right.
    cuDNN's kernel does not run without causal's bound if the number of keys is not a multiple of 128: its backward has
    given NaN for some (pytorch#196678). All kernels save o and lse, so the choice does not change what is saved.
    """
    if (
        x.is_meta
        and Bodies.seen
        and not any(isinstance(other, Tensor) and other.requires_grad for other in (*others, *masks))
    ):
        return "cpu"  # counts allocations: only gradients of masks and slopes need scores
    if backend != "triton":
        return ""
    H, Sq, D = q_shape[1:]
    Sk, masks = k_shape[2], [m for m in masks if m is not None]
    head_dim = next((n for n in FLASH_HEAD_DIMS if n == D), 0)  # a number, not torch.compile's symbol
    bounded, packed = left is not None or right is not None, cu is not None
    if (
        not x.is_cuda
        or kernels_alone()
        or dtype not in KERNEL_DTYPES
        or (dtype == torch.float32 and precision != "ieee")
        or not head_dim
        or any(other is not None for other in others)
        or any(m.requires_grad or m.dtype not in (torch.bool, dtype) for m in masks)
        or any(m.dim() == 4 and (m.shape[1] != 1 or m.shape[2] != 1) for m in masks)
        or not scale > 0
        or (bounded and not packed and Sq != Sk)
        or 0 in (*q_shape, *k_shape)
        or 1 in (Sq, Sk)
        or (packed and cu.shape[0] < 2)
        or torch.are_deterministic_algorithms_enabled()
    ):
        return ""
    grouped = True if k_shape[1] != H else False  # noqa: SIM210 (a bool, likewise)
    windowed = True if bounded and (left is not None or right != 0) else False  # noqa: SIM210 (a bool, likewise)
    case = (head_dim, bounded, windowed, packed, bool(masks), grouped)
    for kernel in _constant_kernels(x.device.index, dtype, *case):
        if kernel != "cudnn" or bounded or Sk % 128 == 0:
            return kernel
    return ""


def attend(p: ModuleType, q: Tensor, k: Tensor, v: Tensor, core: eager.AttentionCore, do: Tensor | None = None):
    """Returns (o, lse, delta) of the core. p: the backend's module. delta is computed only if `do` is given, the core's
    backward reads it, and there are no sinks, which change o."""
    p = eager if core.fused else p
    wants_delta = do is not None and not core.fused and not (p is eager and eager.flash_on_cpu(q, k, core))
    o, lse, delta = p.attn_fwd(q, k, v, core, do=do if wants_delta and core.sinks is None else None)
    if core.sinks is not None:
        o, lse = eager.with_sinks(o, lse, core)
    return eager.as_heads(o), lse, delta


def attention_grads(
    p: ModuleType,
    q,
    k,
    v,
    do,
    o,
    lse,
    core: eager.AttentionCore,
    *,
    delta=None,
    need_dq=True,
    need_dkv=True,
    dmask_shape=None,
    need_dslopes=False,
    need_dsinks=False,
    out=(None,) * 3,
) -> tuple:
    """Returns (dq, dk, dv, dmask, dslopes, dsinks [H] in float32) from o and lse, by the kernel that ran forward.

    out: tensors to write dq, dk, dv into; torch's kernels may return new ones instead. delta: from `attend`, or None.
    dmask_shape: the trained mask's shape, or None; core.mask is that mask, or its sum with others. need_dslopes: in PyTorch
    ops only.
    """
    needs, dsinks = dict(need_dq=need_dq, need_dkv=need_dkv), None
    if need_dsinks:
        delta = p.attn_delta(o, do, core) if delta is None else delta
        dsinks = eager.sink_gradient(lse, delta, core.sinks)
    if not (need_dq or need_dkv or need_dslopes or dmask_shape is not None):
        return *(None,) * 5, dsinks
    if core.fused or p is eager:
        of_scores = dict(dmask_shape=dmask_shape, need_dslopes=need_dslopes)
        return *eager.attn_grads(q, k, v, do, o, lse, core, delta=delta, **needs, **of_scores, outs=out), dsinks
    delta = p.attn_delta(o, do, core) if delta is None else delta
    dq, dk, dv = out
    if need_dq or need_dkv:
        dq, dk, dv = p.attn_bwd(q, k, v, do, lse, delta, core, **needs, dq=dq, dk=dk, dv=dv)
    dmask = None if dmask_shape is None else p.attn_dmask(q, k, v, do, lse, delta, core, dmask_shape)
    return dq, dk, dv, dmask, None, dsinks


def check_sinks(op: str, sinks: Tensor, x: Tensor, H: int) -> None:
    check_tensor(op, "sinks", sinks, x)
    if sinks.shape != (H,):
        raise ShapeError(
            f"{op}: sinks must have a number for each query head, [{H}], but has shape {tuple(sinks.shape)}"
        )


def in_context_parallel() -> bool:
    """Returns whether torch.distributed's context_parallel is on. It splits sequences over ranks, and replaces only
    torch.nn.functional.scaled_dot_product_attention by attention over all ranks."""
    return (getattr(F.scaled_dot_product_attention, "__module__", None) or "").startswith("torch.distributed")


in_context_parallel._dynamo_marked_constant = True  # as _constant_kernels


def check_whole_sequence(op: str, *, takes_parts: bool = False) -> None:
    """Raises NotImplementedError inside torch's context_parallel, and RuntimeError inside ours unless the op `takes_parts`
    of a sequence."""
    if not takes_parts:
        refuse_context(op)
    if in_context_parallel():
        raise NotImplementedError(
            f"{op}: inside torch's context_parallel this op would attend to this rank's part of the sequence alone. Call "
            "torch.nn.functional.scaled_dot_product_attention there, in a ckptkern.checkpoint to recompute it"
        )
