"""Partitions saved tensors over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..bits import checksum
from .store import MIN_BYTES, Chained, Store

Share = tuple[object, int, torch.dtype]  # (result of the next store, bytes and dtype of the whole tensor)


class partition(Chained):
    """Stores 1/n of each saved tensor on each of n ranks; backward gathers it with one all-gather per tensor.

    Use it only for tensors that are *equal on all ranks*, such as the input of a layer norm under tensor parallelism. Backward
    compares checksums: a difference is a RuntimeError on a CPU, a device-side assertion on a GPU. All ranks must save equal
    shapes in the same order and run the same backward; if a rank stops, the others wait until the group's timeout.

    group: a ProcessGroup with this rank; None is the default group. then: a store of the shares. min_bytes, exclude, select: as
    in ``Store``, for the whole tensor.

    Raises RuntimeError if torch.distributed is not initialized, ValueError if this rank is not in the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        then: Store | None = None,
        min_bytes: int = MIN_BYTES,
        exclude: Iterable[Tensor] = (),
        select: Callable[[Tensor], bool] | None = None,
    ):
        super().__init__(then, min_bytes, exclude, select)
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("partition: torch.distributed is not initialized; call init_process_group first")
        self._group = dist.group.WORLD if group is None else group
        self._rank = dist.get_rank(self._group)
        if self._rank < 0:
            raise ValueError("partition: this rank is not a member of the group")
        self._ranks = dist.get_world_size(self._group)

    def put(self, flat: Tensor) -> Share:
        whole = flat.view(torch.uint8)
        size = -(-whole.numel() // (8 * self._ranks)) * 8  # bytes: not every backend knows every dtype
        share = whole.new_zeros(size + 8)  # the last eight are the checksum
        mine = whole[self._rank * size : (self._rank + 1) * size]
        share[: mine.numel()] = mine
        share[size:].view(torch.int64).copy_(checksum(flat))
        return self._then.put(share), whole.numel(), flat.dtype

    def resident(self, saved: Share) -> Iterator[Tensor]:
        return self._then.resident(saved[0])

    def get(self, saved: Share) -> Tensor:
        share, n, dtype = self._then.get(saved[0]), *saved[1:]
        shares = share.new_empty(self._ranks, share.numel())
        dist.all_gather_into_tensor(shares.view(-1), share, group=self._group)
        sums = shares[:, -8:].contiguous().view(torch.int64)
        torch._assert_async((sums == sums[0]).all(), "partition: a saved tensor is not equal on all ranks")
        return shares[:, :-8].reshape(-1)[:n].view(dtype)
