"""Whether the ops of this moment run on a shard: set by ckptkern.parallel around a block's forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class NotSharded(Exception):
    """What is called has no sharded form; the block then runs on the whole parameters."""


class _Active:
    """The shard (`sharded.Shard`) that the ops run on, or None. An attribute of an object, as the backend in _choices."""

    def __init__(self):
        self.shard: Any = None


ACTIVE = _Active()


def refuse_shard(reason: str) -> None:
    """Raises NotSharded on a shard: what follows would compute with parts of the parameters as if they were whole."""
    if ACTIVE.shard is not None:
        raise NotSharded(reason)


def whole_rows(x: Tensor) -> int:
    """The rows of a sample of x [..., S, d] on all ranks together."""
    return x.shape[-2] if ACTIVE.shard is None else ACTIVE.shard.whole_rows(x)
