"""Every launch of a step, caught on meta tensors that pass for tensors of a GPU: Triton's and torch's."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from benchmarks.codegen.sass import ATTENTION, MATMULS
from ckptkern.benchmarks.cases import DTYPES, Item, Maker
from ckptkern.memory import saved_tensors
from ckptkern.tools.compiling import meta_as_on

from .rates import GPU

aten = torch.ops.aten
COLLECTIVE, WAIT = "collective", "wait"


class Caught(NamedTuple):
    """A launch of a Triton kernel: what compiling.compile_launch takes, and the grid."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def named(self) -> dict[str, Any]:
        """Every argument by name."""
        return dict(zip((p.name for p in self.kernel.params), self.args, strict=False)) | self.kwargs


class Launch(NamedTuple):
    """One launch.

    kind   "matmul" (cuBLAS), "core" (torch's own of attention), "elementwise", "norm", "reduction", "kernel" (Triton, with
           matmuls), "triton" (Triton, without)
    flops  as torch counts them: of matmuls alone, a causal core in full
    bytes  of all tensors that it reads or writes, each once
    shape  of a matmul: M, N, K, with the rows that experts' tiles have too many (`expert_rows`); of a core: B, H, Sq, Sk, D
    causal a core sees half of the scores

    Over several ranks also "collective", of which bytes are those of the whole tensor, and "wait", which waits for one. The
    shape of both is the collective's number.
    """

    name: str
    kind: str
    flops: int
    bytes: int
    shape: tuple[int, ...] = ()
    causal: bool = False
    caught: Caught | None = None


class Trace(NamedTuple):
    """The launches of a step in order, and the bytes that its forward saves, parameters apart."""

    forward: list[Launch]
    backward: list[Launch]
    saved: int

    @property
    def launches(self) -> list[Launch]:
        return self.forward + self.backward


# -- experts -----------------------------------------------------------------------------------------------------------

# Rows of the tiles of torch's grouped matmuls, as cutlass has them.
GROUPED_TILE = 128


def expert_rows(rows: int, experts: int, tile: int) -> int:
    """Rows that tiles of so many rows take for all experts. Who goes where is data, which meta tensors have not: the router is
    taken to be balanced, and the last tile of every expert to be half empty."""
    return rows + experts * tile // 2


def _grouped_gemm(a: Tensor, b: Tensor, out: Tensor) -> tuple[int, tuple[int, int, int]]:
    """(FLOPs, shape) of aten._grouped_mm: of rows [R, K] by [E, K, N], or over the rows of [M, R] and [R, N]."""
    if a.dim() == b.dim() == 2:
        experts, rows = out.shape[0], a.shape[1]
        return 2 * rows * a.shape[0] * b.shape[1], (experts * a.shape[0], b.shape[1], -(-rows // experts))
    rows, (experts, K, N) = a.shape[0], b.shape
    return 2 * rows * K * N, (expert_rows(rows, experts, GROUPED_TILE), N, K)


def _expert_kernel(name: str, given: dict[str, Any]) -> tuple[int, tuple[int, int, int]]:
    """(FLOPs, shape) of a kernel of triton_kernels/experts.py."""
    experts, rows = given["offs_ptr"].numel() - 1, given["R"] if "R" in given else given["order_ptr"].numel()
    if "R" in given:
        N, inner = given["N"], MATMULS[name] * given["K"]
        return 2 * rows * N * inner, (expert_rows(rows, experts, given["BLOCK_M"]), N, inner)
    M, N = given["M"], given["N"]  # of a weight's gradient, whose K is an expert's rows
    return 2 * rows * M * N, (experts * M, N, -(-expert_rows(rows, experts, given["BLOCK_K"]) // experts))


# -- torch's ops -------------------------------------------------------------------------------------------------------

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias"}
ALLOCATES |= {"transpose_", "unsqueeze_"}  # views that are no new tensor
OVERWRITES = {"copy_", "zero_", "fill_", "_foreach_copy_"}  # their first argument is not read
REDUCTIONS = {"sum", "mean", "amax"}
CORES = ("cudnn", "flash", "efficient")  # torch's of attention


# What a CUDA device has a kernel for and meta tensors have not, or not on every release: what it returns.
CUDA_ONLY = {
    "aten::_fused_rms_norm_backward": lambda dy, x, shape, rstd, weight, need: (
        torch.empty_like(x), torch.empty_like(weight)
    ),
    "aten::mm.dtype": lambda a, b, dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=dtype),
    "aten::mm.dtype_out": lambda a, b, dtype, out: out,
    "aten::addmm.dtype": lambda c, a, b, dtype, **scales: c.new_empty((a.shape[0], b.shape[1]), dtype=dtype),
    "aten::addmm.dtype_out": lambda c, a, b, dtype, out, **scales: out,
}  # fmt: skip


class FusedRMSNorm(torch.autograd.Function):
    """F.rms_norm as on CUDA, one kernel each way; on meta tensors torch decomposes it before a mode sees it."""

    @staticmethod
    def forward(ctx, x, shape, weight):
        ctx.save_for_backward(x, x.new_empty(x.shape[: -len(shape)], dtype=torch.float32), weight)
        ctx.shape = shape
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        x, rstd, weight = ctx.saved_tensors
        dx, dweight = aten._fused_rms_norm_backward.default(dy, x, ctx.shape, rstd, weight, [True, True])
        return dx, None, dweight


def _attention(gpu: GPU, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch's scaled_dot_product_attention with its own choice on that GPU."""
    if attn_mask is not None:
        raise NotImplementedError("the model estimates attention without a mask tensor only")
    if gpu.core == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout_p, is_causal, False, scale=scale)[
            0
        ]
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]


def _touched(tensors) -> int:
    """Bytes of tensors; a dimension of stride 0 counts once."""
    return sum(
        t.element_size() * math.prod(n if stride else 1 for n, stride in zip(t.shape, t.stride(), strict=True))
        for t in tensors
        if t.numel()
    )


def torch_launch(func, args, kwargs, out) -> Launch | None:
    """What an op of torch launches; None for views, allocations and what asks for sizes."""
    name = func._schema.name.removeprefix("aten::")
    tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    if func.is_view or name in ALLOCATES or not (tensors or func._schema.is_mutable):
        return None
    read = {key: value for key, value in kwargs.items() if key != "out"}
    given = [t for t in tree_leaves((args[name in OVERWRITES :], read)) if isinstance(t, Tensor)]
    moved = _touched(given) + _touched(tensors or [t for t in tree_leaves(args[0]) if isinstance(t, Tensor)])
    if "scaled_dot_product" in name or "flash_attention" in name:
        direction = "backward" if "backward" in name else "forward"
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        q, k = named["query"], named["key"]
        if "scaled_dot_product" in name:
            shape = (*q.shape[:3], k.shape[2], q.shape[3])
        else:  # rows [B, S, H, D], or [tokens, H, D] packed, each of which sees max_k of a sequence at most
            shape = (math.prod(q.shape[:-3]), q.shape[-2], q.shape[-3], named["max_k"], q.shape[-1])
        flops = 2 * (5 if direction == "backward" else 2) * math.prod(shape)
        kernel = next(one for one in CORES if one in name)
        return Launch(f"torch core {kernel} {direction}", "core", flops, moved, shape, bool(named.get("is_causal")))
    matmul = "addmm" if name == "_addmm_activation" else name.removesuffix("_")  # torch has no formula of the first
    formula = flop_registry.get(getattr(aten, matmul, None))
    operands = [
        a for a in args if isinstance(a, Tensor)
    ]  # an out_dtype among the arguments is unknown to torch's formulas
    flops = formula(*operands, out_val=out) if formula else 0
    if name == "_grouped_mm":
        flops, shape = _grouped_gemm(*args[:2], out)
        return Launch(f"{name} {'x'.join(map(str, shape))}", "matmul", flops, moved, shape)
    if flops:
        a, b = (args[0], args[1]) if name == "mm" else (args[1], args[2])
        shape = a.shape[0], b.shape[1], a.shape[1]
        return Launch(f"{name} {'x'.join(map(str, shape))}", "matmul", flops, moved, shape)
    kind = "norm" if "norm" in name else "reduction" if name in REDUCTIONS else "elementwise"
    shapes = "x".join(map(str, (tensors or given)[0].shape)) or "scalar"
    return Launch(f"{name} {shapes}", kind, 0, moved)


class _Allocated(TorchDispatchMode):
    """Bytes of the storages that ops inside make: now, and at most."""

    def __init__(self, before: Iterable[Tensor]):
        super().__init__()
        self.known, self.now, self.peak = {t.untyped_storage()._cdata for t in before}, 0, 0

    def _freed(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                address, size = storage._cdata, storage.nbytes()
                self.known.add(address)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, address, size)
        return out


class _Log(TorchDispatchMode):
    """Hands every op of torch that launches something to `log`."""

    def __init__(self, log: list[Launch]):
        super().__init__()
        self.log = log
        self.collectives, self.running = 0, {}  # their count; the numbers of those that run, by their result's storage

    def collective(self, name: str, given: Tensor, out: Tensor) -> None:
        """Logs a functional collective, or a wait for one that runs."""
        if name == "wait_tensor":
            number = self.running.pop(given.untyped_storage()._cdata, None)
            if number is not None:
                self.log.append(Launch("wait", WAIT, 0, 0, (number,)))
        else:
            whole = max(given, out, key=Tensor.numel)
            shape = "x".join(map(str, whole.shape))
            self.log.append(Launch(f"{name} {shape}", COLLECTIVE, 0, whole.nbytes, (self.collectives,)))
            self.running[out.untyped_storage()._cdata] = self.collectives
            self.collectives += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if DTensor in types or AsyncCollectiveTensor in types:  # the ops on what these hold come here again
            return NotImplemented
        if FakeTensor in types:  # DTensor asks for a result's shape
            return func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            out = func(*args, **kwargs)
            self.collective(func._schema.name.split("::")[1], args[0], out)
            return out
        overload = "" if func._overloadname == "default" else f".{func._overloadname}"
        out = CUDA_ONLY.get(func._schema.name + overload, func)(*args, **kwargs)
        if launch := torch_launch(func, args, kwargs, out):
            self.log.append(launch)
        return out


# -- Triton's ----------------------------------------------------------------------------------------------------------


def _kernel_flops(name: str, given: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    """(FLOPs, shape) of a kernel's matmuls; (0, ()) if it has none."""
    if name in ATTENTION:
        q, k = given["q_heads"][0], given["k_heads"][0]
        B, Sq, Sk, D = q.shape[0], given["Sq"], given["Sk"], given["D"]
        shape = B, given["H"], Sq, Sk, D
        return 2 * MATMULS[name] * math.prod(shape), (*shape, k.shape[0])[:5]
    if (
        "WIDTH" in given and "L" in given
    ):  # a narrow chain; relu's backward has the last layer's bits and does not run it again
        M, L, width = given["M"], given["L"], given["WIDTH"]
        backward = "dy_rows" in given
        matmuls = (3 * L - (given["bits_rows"][0] is not None)) if backward else L
        return 2 * M * width * width * matmuls, (M, width, width)
    if name in MATMULS and "offs_ptr" in given:
        return _expert_kernel(name, given)
    if name in MATMULS:
        M, N, K = given["M"], given["V" if "V" in given else "N"], given["K"]  # V: columns of a vocabulary
        inner = (MATMULS[name] - ("D" in given)) * K + given.get("D", 0)
        return 2 * M * N * inner, (M, N, inner)
    if "BLOCK_K" in given:
        raise NotImplementedError(f"{name} has a BLOCK_K but no entry in MATMULS (benchmarks/codegen/sass.py)")
    return 0, ()


def triton_launch(caught: Caught) -> Launch:
    given = caught.named
    flops, shape = _kernel_flops(caught.name, given)
    # a narrow chain's scratch never leaves L2
    tensors = [
        leaf
        for key, one in given.items() if key != "scratch_ptr"
        for leaf in tree_leaves(one) if isinstance(leaf, Tensor)
    ]  # fmt: skip
    causal = bool(given.get("RIGHT")) if caught.name in ATTENTION else False
    name = caught.name.strip("_").removesuffix("_kernel")
    return Launch(name, "kernel" if flops else "triton", flops, _touched(tensors), shape, causal, caught)


# -- a step ------------------------------------------------------------------------------------------------------------


def _without_graph(argument):
    """A kernel's argument, detached."""
    return argument.detach() if isinstance(argument, Tensor) else argument


@contextlib.contextmanager
def as_on(gpu: GPU, kernels: bool = True) -> Iterator[list[Launch]]:
    """Inside, meta tensors pass for tensors of that GPU: ops choose backend, tiles and chunks as there. Yields the launches.

    kernels: also Triton's, whose arguments the list then holds.
    """
    log: list[Launch] = []

    def caught(kernel, grid, args, kwargs) -> None:
        if not kernels:
            return
        one = Caught(kernel, (), tree_map(_without_graph, args), kwargs)  # another process compiles it
        log.append(triton_launch(one._replace(grid=tuple(grid(one.named) if callable(grid) else grid))))

    def sdpa(*args, **kwargs):
        return _attention(gpu, *args, **kwargs)

    def dropout(x, p=0.5, training=True, inplace=False):  # on CUDA one kernel; elsewhere torch decomposes it
        return aten.native_dropout(x, p, training)[0]

    def rms_norm(x, normalized_shape, weight=None, eps=None):
        log.append(Launch(f"_fused_rms_norm {'x'.join(map(str, x.shape))}", "norm", 0, _touched((x, x, weight))))
        return FusedRMSNorm.apply(x, list(normalized_shape), weight)

    patches = [
        meta_as_on(gpu, caught),
        # waited for at its first use; on meta tensors torch makes a plain tensor of it
        mock.patch.object(_functional_collectives, "_maybe_wrap_tensor", AsyncCollectiveTensor),
        mock.patch.object(F, "scaled_dot_product_attention", sdpa),
        mock.patch.object(F, "rms_norm", rms_norm),
        mock.patch.object(F, "dropout", dropout),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        with _Log(log):
            yield log


def build(item: Item, dtype: torch.dtype = DTYPES["cuda"]) -> tuple[nn.Module, Tensor]:
    """(model, x) of an item on meta tensors, in training."""
    with torch.device("meta"):
        model = item.case.model(item.size.width).to(dtype)
        return model.train(), torch.empty(item.size.shape, dtype=dtype, requires_grad=True)


def step(gpu: GPU, make: Maker, model: nn.Module, x: Tensor) -> Trace:
    """The launches of forward and backward of one variant, with gradients that are None at first."""
    for leaf in (x, *model.parameters()):
        leaf.grad = None
    with as_on(gpu) as log:
        function = make(model, x)
        with saved_tensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
            function(x)
        unseen = function.unseen_bytes() if hasattr(function, "unseen_bytes") else 0
        log.clear()
        y = function(x)
        forward = list(log)
        dy = torch.empty_like(y)
        log.clear()
        y.backward(dy)
        return Trace(forward, list(log), saved.bytes + unseen)


def peak(gpu: GPU, make: Maker, model: nn.Module, x: Tensor) -> int:
    """Bytes of forward and backward at most, above what was there before: gradients count, what libraries take for themselves
    does not."""
    for leaf in (x, *model.parameters()):
        leaf.grad = None
    with as_on(gpu, kernels=False), _Allocated([x, *model.parameters(), *model.buffers()]) as allocated:
        y = make(model, x)(x)
        y.backward(torch.empty_like(y))
        return allocated.peak
