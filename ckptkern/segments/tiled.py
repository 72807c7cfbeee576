"""Token-wise functions in chunks of tokens, each an activation checkpoint (`slices.in_slices`): `tiled`."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parametrize

from ..errors import ShapeError
from ..ops.dispatch.choices import Bytes, autocast_dtype, choose_workspace
from .axes import Axis, even
from .checkpoint import checkpoint
from .decisions import deciding_nothing
from .reachable import caching_nothing, missing_weights, modules_of
from .sequential import on_fakes, saved_by, storages_of
from .slices import in_slices

FLOOR = 128  # tokens of the shortest default chunk: shorter matmuls cost more than they save
ASSUMED = 32  # a token's transients in sizes of its input, under torch.compile, where nothing is measured


def tiled(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    chunks: int | None = None,
    dim: int = -2,
    *,
    workspace: Bytes = None,
    preserve_rng_state: bool = True,
    check: bool = False,
) -> Tensor:
    """Computes fn(x), for a token-wise function or module, in chunks of tokens that backward recomputes one by one.

    fn is token-wise if its output for a token depends on this token only, as in an MLP, a norm, an LM head or an adapter. x
    [..., tokens, features]; fn returns a tensor with the same tokens in the same dimension.
    chunks: the number of chunks. By default as few as keep a chunk's transients within `workspace` (bytes, or "64MiB"), of at
    least 128 tokens; fn is measured on fake tensors, or else on tokens of x. dim: the dimension of tokens.
    preserve_rng_state: as in `checkpoint`. check: raises ValueError if fn is not token-wise, which takes a few more runs.

    Saved for backward: x, and 2.5 KiB of state for each chunk. Gradients of all tensors that fn uses are summed over chunks in
    float32 (16-bit parameters: 10 bytes an element) and arrive once, so DistributedDataParallel's hooks and fully_shard(fn) run
    once a pass; hooks of inner modules run for each chunk. Under torch.compile chunks are torch's checkpoints, with 32 times
    the input as transients.

    Raises ShapeError if fn returns another number of tokens, RuntimeError if fn contains a module that is sharded by itself.
    """
    if not callable(fn):
        raise TypeError(f"tiled: fn must be a function or module of one tensor, not {type(fn).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"tiled: x must be a tensor, not {type(x).__name__}")
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"tiled: dim must be a dimension of x, which has shape {tuple(x.shape)}, but is {dim!r}")
    if chunks is not None and (not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1):
        raise ValueError(f"tiled: chunks must be a positive int or None, not {chunks!r}")
    if chunks is not None and workspace is not None:
        raise ValueError("tiled: chunks and workspace both set a chunk's length: pass only one")
    if isinstance(fn, nn.parallel.DistributedDataParallel):
        raise ValueError("tiled: fn is wrapped in DistributedDataParallel: wrap the model that calls tiled instead")
    bound = choose_workspace("tiled", workspace, x)
    dim %= x.dim()
    if torch.compiler.is_compiling():
        return _traced(fn, x, chunks, dim, bound, preserve_rng_state)

    def run(forward, x):
        return run_in_chunks(fn, forward, x, dim, chunks, bound, check=check, preserve_rng_state=preserve_rng_state)

    if not isinstance(fn, nn.Module) or is_transformed():
        return run(fn, x)
    # the module's own hooks run once, and its forward is replaced inside
    forward, own = fn.forward, fn.__dict__.get("forward")

    def restore():
        if own is None:
            fn.__dict__.pop("forward", None)
        else:
            fn.__dict__["forward"] = own

    def whole(x):
        restore()  # forward may call the module itself
        return run(forward, x)

    fn.__dict__["forward"] = whole
    try:
        return fn(x)
    finally:
        restore()


def is_transformed() -> bool:
    """Returns whether nothing can be recomputed: in torch.func's transforms, which allow no saved-tensor hooks, and forward
    AD."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _name(fn: Callable) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


_measured: weakref.WeakKeyDictionary[nn.Module, dict[tuple, int]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _no_cast_cache() -> Iterator[None]:
    """Disables autocast's cache inside: chunks that share a cast of a weight would sum its gradients in the cast's dtype."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# -- running ----------------------------------------------------------------------------------------------------------


def _returned(fn: Callable, dim: int, result, length: int) -> tuple[Tensor]:
    """Returns fn's result as a tuple. Raises TypeError or ShapeError if it is not a tensor of `length` tokens."""
    if not isinstance(result, Tensor):
        raise TypeError(f"tiled: {_name(fn)} must return a tensor, but returned a {type(result).__name__}")
    if result.dim() <= dim or result.shape[dim] != length:
        raise ShapeError(
            f"tiled: {_name(fn)} got {length} tokens but returned shape {tuple(result.shape)}, which must have as many in "
            f"dimension {dim}"
        )
    return (result,)


def run_in_chunks(
    fn: Callable,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    dim: int,
    chunks: int | None,
    workspace: int,
    is_inside: bool = False,
    check: bool = False,
    **options,
) -> Tensor:
    """Implements `tiled`. forward: fn, or the module's own forward inside a call of fn. dim: not negative. is_inside: one chunk
    that fits the workspace is no checkpoint. options: those of `checkpoint`."""
    if is_transformed():
        return forward(x)
    tokens, axis = x.shape[dim], Axis(dim)
    length = max(1, -(-tokens // (chunks or 1)))
    if chunks is None and tokens > FLOOR:
        is_module, rest = isinstance(fn, nn.Module), x.shape[dim + 1 :]
        known = _measured.setdefault(fn, {}) if is_module else {}
        key = (
            x.shape[:dim],
            rest,
            x.dtype,
            x.requires_grad,
            x.device.type,
            autocast_dtype(x),
            is_module and fn.training,
        )
        if key not in known:
            with _without_trace(forward, x), torch.enable_grad(), caching_nothing():
                try:
                    with on_fakes():
                        known[key] = _bytes_of_token(forward, x, dim)
                except Exception:  # a forward that reads values finds none
                    known[key] = _bytes_of_token(forward, x, dim)
        length = even(tokens, max(FLOOR, workspace // max(known[key], 1)))
    if is_inside and chunks is None and tokens <= length:
        return forward(x)
    if check:
        check_token_wise(fn, forward, x, dim, length)
    if parametrize._cache_enabled:
        for module, name in missing_weights(forward, (), {}):
            getattr(module, name)  # computes the cached weight outside the chunks, once for all
    with _no_cast_cache() if tokens > length else contextlib.nullcontext(), _whole_modules(fn):
        (y,) = in_slices(
            lambda _: forward,
            [(x, axis)],
            [axis],
            tokens,
            length,
            functools.partial(_returned, fn, dim),
            lambda _, part: part.new_empty((*part.shape[:dim], tokens, *part.shape[dim + 1 :])),
            **options,
        )
    return y


@_no_cast_cache()
def _bytes_of_token(forward: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> int:
    """Returns the transient bytes of a token beside x, dx, y and dy: twice what is saved and returned."""
    sizes, count = [], min(FLOOR, x.shape[dim] // 2)
    for n in (count, 2 * count):
        part = x.detach().narrow(dim, 0, n).clone().requires_grad_(x.is_floating_point())
        with deciding_nothing():  # a recompute, which does not measure, replays decisions
            output, saved = saved_by(forward, part)
        sizes.append(sum((saved | storages_of([output] if isinstance(output, Tensor) else [])).values()))
    return -(-2 * (sizes[1] - sizes[0]) // count)


@contextlib.contextmanager
def _without_trace(forward: Callable, x: Tensor) -> Iterator[None]:
    """Restores random states and buffers afterwards."""

    def restore(buffer, value):
        if not torch.equal(buffer, value):
            buffer.copy_(value)

    with (
        torch.random.fork_rng([x.device] if x.is_cuda and torch.cuda.is_initialized() else []),
        contextlib.ExitStack() as stack,
    ):
        for buffer in (b for module in modules_of(forward, (), {}) for b in module.buffers(recurse=False)):
            if type(buffer) is Tensor and not buffer.is_meta:  # a fake tensor has no values
                stack.callback(restore, buffer, buffer.clone())
        yield


@contextlib.contextmanager
def _whole_modules(fn: Callable) -> Iterator[None]:
    """Raises RuntimeError if a module that runs inside is sharded by itself: each chunk would gather and reduce it."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    def refuse(module, args):
        if isinstance(module, FSDPModule):
            raise RuntimeError(
                f"tiled: {type(module).__name__} inside {_name(fn)} is sharded by itself, so every chunk would gather its "
                "parameters: pass the sharded module itself to tiled, or shard a module around the call"
            )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _traced(fn: Callable, x: Tensor, chunks: int | None, dim: int, workspace: int, preserve_rng_state: bool) -> Tensor:
    """Computes `tiled` in a form that Dynamo traces."""
    tokens = x.shape[dim]
    transients = ASSUMED * (x.numel() // max(tokens, 1)) * x.dtype.itemsize
    length = even(tokens, -(-tokens // chunks) if chunks else max(FLOOR, workspace // max(transients, 1)))
    narrow = {}
    if isinstance(fn, nn.Module):
        narrow = {n: p for n, p in fn.named_parameters() if p.dtype in (torch.float16, torch.bfloat16)}
    wide = {n: p.float() for n, p in narrow.items()}

    def call(part):
        if not wide:
            return fn(part)
        return torch.func.functional_call(fn, {n: p.to(narrow[n].dtype) for n, p in wide.items()}, (part,))

    parts = x.split(length, dim)
    return torch.cat([checkpoint(call, part, preserve_rng_state=preserve_rng_state) for part in parts], dim)


# -- check ------------------------------------------------------------------------------------------------------------


def random_state(x: Tensor) -> Tensor:
    """Returns the state of torch's generators for x."""
    return torch.cat([torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else [])])


NEAR, NEAR_16_BIT = 1e-4, 2e-2  # allowed difference of a chunk from the whole, relative to the largest output


@torch.no_grad()
@caching_nothing()
def check_token_wise(fn: Callable, forward: Callable, x: Tensor, dim: int, length: int) -> None:
    """Raises ValueError or ShapeError if a token's output depends on other tokens or on its position. length: tokens of a
    chunk."""
    tokens = x.shape[dim]
    if tokens < 2:
        return
    length = min(length, -(-tokens // 2))
    places = torch.arange(tokens, device=x.device)
    poisoned, bad = places < 0, list[str]()

    def spread(value):
        """Returns a mask of the other tokens that became NaN; None if the value has no tokens."""
        if not isinstance(value, Tensor) or value.dim() <= dim or value.shape[dim] != tokens:
            return None
        return torch.isnan(value).movedim(dim, 0).flatten(1).any(1) & ~poisoned

    def watch(name, module, args, output):
        before, after = (spread(value) for value in (args[0] if args else None, output))
        if after is not None and after.any() and before is not None and not before.any():
            bad.append(f" (in {name}: {type(module).__name__})")

    with _without_trace(forward, x):
        before, whole = random_state(x), forward(x)
        draws = not torch.equal(before, random_state(x))
        _returned(fn, dim, whole, tokens)
        for poisoned in (places < length, places >= length, places % 2 == 0) if x.is_floating_point() else ():
            at = poisoned.view(-1, *[1] * (x.dim() - dim - 1))
            affected = spread(forward(poison := x.masked_fill(at, float("nan"))))
            if affected is None or not affected.any():
                continue
            with contextlib.ExitStack() as hooks:  # which a fused module inside would not run with
                for name, module in list(fn.named_modules())[1:] if isinstance(fn, nn.Module) else ():
                    hooks.callback(module.register_forward_hook(functools.partial(watch, name)).remove)
                forward(poison)
            raise ValueError(
                f"tiled: {_name(fn)} is not token-wise along dimension {dim}: its output for token "
                f"{int(affected.nonzero()[0])} depends on other tokens{bad[0] if bad else ''}"
            )
        if draws:
            return
        narrow = whole.dtype.itemsize <= 2 or torch.is_autocast_enabled(x.device.type) or x.is_cuda
        # where all tokens are the same, one expert gets all, and shows a limit
        same = x.narrow(dim, 0, 1).expand_as(x).clone()
        for tensor, result in ((x, whole), (same, forward(same))):
            largest = result.abs().amax().item() if result.numel() else 0.0
            chunks = zip(tensor.split(length, dim), result.split(length, dim), strict=True)
            for start, (chunk, expected) in zip(range(0, tokens, length), chunks, strict=True):
                end, part = start + chunk.shape[dim], forward(chunk)
                if part.shape != expected.shape:
                    raise ShapeError(
                        f"tiled: {_name(fn)} returned {tuple(part.shape)} for {end - start} tokens, not {tuple(expected.shape)}"
                    )
                apart = (part.double() - expected.double()).abs().nan_to_num().amax().item() if part.numel() else 0.0
                if apart > (NEAR_16_BIT if narrow else NEAR) * largest:
                    raise ValueError(
                        f"tiled: {_name(fn)} is not token-wise along dimension {dim}: run alone, tokens {start} to {end - 1} "
                        f"give an output that differs by {apart:.3g} where the largest is {largest:.3g}. "
                        "Does it read a position, or the number of tokens?"
                    )
