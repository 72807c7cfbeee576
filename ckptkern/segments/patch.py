"""Makes torch.utils.checkpoint.checkpoint run ckptkern's, for code that already calls torch's.

torch's `checkpoint` is a decorator's wrapper, and a cell of its closure holds the undecorated function. A patch puts ours
into that cell. The wrapper stays the same object, so Dynamo still recognises it, and everyone who holds it runs ours:
modules that imported it by name, partial objects, default arguments.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable

import torch.utils.checkpoint as torch_checkpoint

from .checkpoint import checkpoint

__all__ = ["Patch", "patch_torch", "unpatch_torch"]

_torchs = inspect.unwrap(torch_checkpoint.checkpoint)
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
    False. Under torch.compile the graph is torch's. Patches nest: removing the last one restores torch's function.

    Raises RuntimeError if somebody else has replaced torch.utils.checkpoint.checkpoint.
    """
    torchs = torch_checkpoint.checkpoint
    for cell in getattr(torchs, "__closure__", None) or ():
        if cell.cell_contents in (_torchs, _checkpoint):
            cell.cell_contents = _checkpoint
            return Patch(_patches, functools.partial(setattr, cell, "cell_contents", _torchs))
    raise RuntimeError(
        "ckptkern.patch_torch: wanted torch's own function at torch.utils.checkpoint.checkpoint but got "
        f"{torchs.__module__}.{torchs.__qualname__}"
    )


def unpatch_torch() -> None:
    """Removes the latest patch; does nothing if there is none."""
    if _patches:
        _patches[-1].remove()


# Not __dict__: once called, torch's function keeps in it what its decorator runs instead, which would then be torch's.
@functools.wraps(_torchs, assigned=("__doc__",), updated=())
def _checkpoint(function, *args, use_reentrant: bool | None = None, **kwargs):
    if use_reentrant:
        _say_once()
    return checkpoint(function, *args, **kwargs)


@functools.cache
def _say_once() -> None:
    warnings.warn(
        "ckptkern.patch_torch: use_reentrant=True runs as use_reentrant=False, the only variant of ckptkern.checkpoint",
        stacklevel=5,  # past torch's own frames
    )
