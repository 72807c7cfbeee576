"""The shard, or the part of a sequence, that ops run on: state that ckptkern.parallel sets around a forward."""

from __future__ import annotations

from torch import Tensor


class NotSharded(Exception):
    """Raised by a call that has no sharded form; the block then runs on the whole parameters."""


class _Active:
    """Holds the shard (`sharded.Shard`) that the ops run on, or None, and the group over which a sequence is split
    (`attention.context.Context`), or None. gathered: parameters exist for this call alone, so that no recompute finds them.
    Attributes of an object, as the backend in `choices`."""

    def __init__(self):
        self.shard = None
        self.context = None
        self.gathered = False


ACTIVE = _Active()


def refuse_shard(reason: str) -> None:
    """Raises NotSharded on a shard, whose parts of parameters the caller would take for the whole. Raises RuntimeError on a
    part of a sequence, as `refuse_context`."""
    refuse_context(reason)
    if ACTIVE.shard is not None:
        raise NotSharded(reason)


def refuse_context(reason: str) -> None:
    """Raises RuntimeError on a part of a sequence, whose rows the caller would take for all."""
    if ACTIVE.context is not None:
        raise RuntimeError(
            f"ContextParallel: {reason}, which would attend to this rank's rows alone. Pass no mask of "
            "these rows, and to a transformers model neither attention_mask nor position_ids that jump; or leave the module out"
        )


def ranks_of_rows() -> int:
    """Returns the number of ranks over which the rows of a sequence are split."""
    count = ACTIVE.shard.size if ACTIVE.shard is not None and ACTIVE.shard.sequence else 1
    return count if ACTIVE.context is None else count * ACTIVE.context.size


def whole_rows(x: Tensor) -> int:
    """Returns the number of rows of a sample of x [..., S, d] on all ranks together."""
    return x.shape[-2] * ranks_of_rows()
