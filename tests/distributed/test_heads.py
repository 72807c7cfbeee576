"""Converted heads under DistributedDataParallel and fully_shard train as one process with all ranks' batches."""

import copy

import pytest
import torch
from conversion.test_heads import LM, flat, ids, model_of
from support.ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptkern
from ckptkern.conversion.logits import Logits


def converted(model: nn.Module, replaced: bool = True) -> nn.Module:
    conversion = ckptkern.convert(model, ids(), ids(1))
    assert [row.replaced_by for row in conversion.converted] == ["linear_cross_entropy"] * replaced, str(conversion)
    return model


def sharded(model: LM, head: bool = False) -> LM:
    for part in (model.body, model.head)[: 1 + head]:
        fully_shard(part)
    return fully_shard(model)


WRAPPERS = {
    "DDP": lambda model: DistributedDataParallel(converted(model)),
    "shard, convert": lambda model: converted(sharded(model)),
    "convert, shard, the head alone": lambda model: sharded(converted(model), head=True),
    "shard, convert, the head alone": lambda model: converted(sharded(model, head=True), replaced=False),
    "convert, shard": lambda model: sharded(converted(model)),
    "DDP, unused": lambda model: DistributedDataParallel(converted(model), find_unused_parameters=True),
}


def losses(model: nn.Module, ranks: list[int]) -> list[list[float]]:
    """Of training steps with the mean of these ranks' losses."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.5), []
    for step in range(3):
        optimizer.zero_grad()
        each = [model(ids(10 * step + rank), ids(10 * step + rank + 1))[1] for rank in ranks]
        (sum(each) / len(each)).backward()
        optimizer.step()
        found.append([float(one.detach()) for one in each])
    return found


@pytest.mark.parametrize(
    "wrapper", [pytest.param(name, marks=pytest.mark.long if i > 3 else ()) for i, name in enumerate(WRAPPERS)]
)
@on_ranks()
def test_a_head_is_trained_as_in_one_process(rank, wrapper):
    model = model_of(flat, tied=False, bias=True)
    del model.added  # is in no loss, which DDP would wait for
    want = losses(copy.deepcopy(model), [0, 1])
    ours = WRAPPERS[wrapper](model)
    found = losses(ours, [rank])
    assert [one for (one,) in found] == pytest.approx([one[rank] for one in want], rel=1e-5)
    assert want[-1] != pytest.approx(want[0], rel=1e-2)
    logits, _ = model(ids(), ids(1))
    assert (type(logits) is Logits) == (not wrapper.endswith("alone"))
