"""Makes torch.utils.checkpoint.checkpoint run ckptkern's, for code that already calls torch's.

torch's `checkpoint` is a decorator's wrapper, and a cell of its closure holds the undecorated function. A patch puts ours
into that cell. The wrapper stays the same object, so Dynamo still recognises it, and everyone who holds it runs ours:
modules that imported it by name, partial objects, default arguments. What torch's decorator form makes, from 2.14 on, calls
another function of torch's module by name, which a patch replaces too.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import CellType

import torch
import torch.utils.checkpoint as torch_checkpoint

from .checkpoint import Options, checkpoint
from .checkpoint import _checkpoint as run

_torchs = inspect.unwrap(torch_checkpoint.checkpoint)
_torchs_decorated = getattr(torch_checkpoint, "_checkpoint_impl", None)  # from 2.14 on: runs decorated functions
_patches: list[Patch] = []  # not yet removed, oldest first


class Patch:
    """Returned by `patch_torch` and `patch_trl`. ``remove()``, or the end of a ``with`` block, undoes the patch; again, it does
    nothing.

    patches: those of the same function that are not yet removed, oldest first. restore: puts back what they replaced.
    """

    def __init__(self, patches: list[Patch], restore: Callable[[], None]):
        self._patches, self._restore = patches, restore
        patches.append(self)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.remove()

    def remove(self) -> None:
        if self in self._patches:
            self._patches.remove(self)
            if not self._patches:
                self._restore()


def patch_torch() -> Patch:
    """From now on torch.utils.checkpoint.checkpoint runs `ckptkern.checkpoint`, for every caller and however imported.

        ckptkern.patch_torch()             # for good, or until ckptkern.unpatch_torch()
        with ckptkern.patch_torch():       # for a block
            model(x).sum().backward()

    Callers include torch's own `checkpoint_sequential` and `checkpoint_wrapper` and libraries such as transformers, timm
    and torchtitan. A region whose forward ran inside the block is ours also if its backward runs outside. Arguments mean
    what they mean to torch, except that use_reentrant=True runs as False, which a UserWarning says once; left out, it is
    False. What torch's decorator form has made, before or inside the block, runs ours inside it. Before torch 2.14, which has
    no such form, it is ours for good. Under torch.compile the graph is torch's. Patches nest: removing the last one restores
    torch's function.

    Raises RuntimeError if somebody else has replaced torch.utils.checkpoint.checkpoint.
    """
    torchs = torch_checkpoint.checkpoint
    for cell in getattr(torchs, "__closure__", None) or ():
        if cell.cell_contents in (_torchs, _checkpoint):
            _put(cell, _checkpoint, _decorated)
            return Patch(_patches, functools.partial(_put, cell, _torchs, _torchs_decorated))
    raise RuntimeError(
        "ckptkern.patch_torch: wanted torch's own function at torch.utils.checkpoint.checkpoint but got "
        f"{torchs.__module__}.{torchs.__qualname__}"
    )


def _put(cell: CellType, called: Callable, decorated: Callable | None) -> None:
    cell.cell_contents = called
    if _torchs_decorated is not None:
        torch_checkpoint._checkpoint_impl = decorated


def unpatch_torch() -> None:
    """Removes the latest patch; does nothing if there is none."""
    if _patches:
        _patches[-1].remove()


# Not __dict__: once called, torch's function keeps in it what its decorator runs instead, which would then be torch's.
@functools.wraps(_torchs, assigned=("__doc__",), updated=())
def _checkpoint(function=None, *args, use_reentrant: bool | None = None, **kwargs):
    if function is None and not args and _torchs_decorated is not None:
        return _torchs(use_reentrant=use_reentrant, **kwargs)  # what it makes runs ours while a patch is there
    if use_reentrant:
        _say_once()
    return checkpoint(function, *args, **kwargs)


def _decorated(function, args, kwargs, *, use_reentrant: bool | None = None, **options):
    if torch.compiler.is_compiling():
        return _torchs_decorated(function, args, kwargs, use_reentrant=bool(use_reentrant), **options)
    if use_reentrant:
        _say_once()
    return run(function, args, kwargs, Options(False, **options))


@functools.cache
def _say_once() -> None:
    warnings.warn(
        "ckptkern.patch_torch: use_reentrant=True runs as use_reentrant=False, the only variant of ckptkern.checkpoint",
        stacklevel=5,  # past torch's own frames
    )
