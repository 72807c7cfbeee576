"""ckptkern's checkpoint behind torch's, for code that already checkpoints.

torch's `checkpoint` is a decorated function, which holds the undecorated one in a closure's cell. A patch puts ours into
this cell. So torch's is the same object as before, which Dynamo knows it by, and all who hold it run ours: modules that
imported it by name, partial objects, default arguments.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings

import torch.utils.checkpoint as torch_checkpoint

from .checkpoint import checkpoint

__all__ = ["Patch", "patch_torch", "unpatch_torch"]

_torchs = inspect.unwrap(torch_checkpoint.checkpoint)
_patches: list[Patch] = []  # those that are not removed, oldest first


class Patch:
    """What `patch_torch` returns. ``remove()``, or the end of a ``with`` block, takes it back, once."""

    def __init__(self, cell: types.CellType):
        self._cell = cell
        cell.cell_contents = _checkpoint
        _patches.append(self)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.remove()

    def remove(self) -> None:
        if self in _patches:
            _patches.remove(self)
            if not _patches:
                self._cell.cell_contents = _torchs


def patch_torch() -> Patch:
    """From now on torch.utils.checkpoint.checkpoint runs `ckptkern.checkpoint`, whoever calls it, however they got it.

    ::

        ckptkern.patch_torch()             # for good, or until ckptkern.unpatch_torch()
        with ckptkern.patch_torch():       # for a block
            model(x).sum().backward()

    torch's `checkpoint_sequential` and `checkpoint_wrapper`, and libraries (transformers, timm, torchtitan), call it and so
    run ours; a segment whose forward ran inside is ours also in a backward outside. All arguments mean what they mean to
    torch's, but use_reentrant=True runs as False, which a UserWarning says once; where it is left out it is False. Under
    torch.compile the graph is the one that torch's gives. Patches nest: the last one to be removed gives torch its own.

    Raises RuntimeError if torch.utils.checkpoint.checkpoint is not torch's: somebody else has put theirs there.
    """
    torchs = torch_checkpoint.checkpoint
    for cell in getattr(torchs, "__closure__", None) or ():
        if cell.cell_contents in (_torchs, _checkpoint):
            return Patch(cell)
    raise RuntimeError(
        "ckptkern.patch_torch: wanted torch's own function at torch.utils.checkpoint.checkpoint but got "
        f"{torchs.__module__}.{torchs.__qualname__}"
    )


def unpatch_torch() -> None:
    """Takes the latest patch back; nothing where there is none."""
    if _patches:
        _patches[-1].remove()


# Without its __dict__: once called, torch's function keeps there what its decorator calls instead of it.
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
