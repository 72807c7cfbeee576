"""The harness itself: an error of one rank ends the others, and is the error of the test."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankError, Ranks


def _sum(rank, factor):
    total = torch.tensor([rank + 1.0]) * factor
    dist.all_reduce(total)
    return dist.get_world_size(), total.item(), torch.rand(()).item()


def _raises(rank, at):
    if rank == at:
        raise ValueError(f"injected at {at}")
    dist.all_reduce(torch.ones(1))


def _dies(rank):
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def _dies_alone(rank):
    if rank == 1:
        os._exit(7)


def _hangs(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def _pid(rank):
    return os.getpid()


def test_ranks_run_one_function_after_another_with_groups_of_their_own(ranks):
    drawn = torch.Generator().manual_seed(0)
    first = torch.rand((), generator=drawn).item()
    assert ranks.run(2, _sum, 1) == 2 * [(2, 3.0, first)]
    pids = ranks.run(2, _pid)
    assert len({*pids, os.getpid()}) == 3
    assert ranks.run(4, _sum, 2) == 4 * [(4, 20.0, first)]
    assert ranks.run(2, _sum, 3) == 2 * [(2, 9.0, first)]
    assert ranks.run(4, _pid)[:2] == pids


@pytest.mark.parametrize("at", [3, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_raises_ends_the_others(at):
    with Ranks(patience=120) as ranks:
        processes = ranks.run(4, _pid) and [process for process, _ in ranks.started]
        start = time.monotonic()
        with pytest.raises(RankError, match=f"injected at {at}") as error:
            ranks.run(4, _raises, at)
        assert time.monotonic() - start < ranks.patience / 2, "the test has waited for ranks that wait for each other"
        assert f"rank {at} of 4: Traceback" in str(error.value)
        assert str(error.value).count("Traceback") == 1, "the others were waiting, and did not fail"
        assert f'test_ranks.py", line {_raises.__code__.co_firstlineno + 2}, in _raises' in str(error.value)
        assert not any(process.is_alive() for process in processes)
        assert ranks.run(2, _sum, 1)[0][:2] == (2, 3.0), "others take their place"


def test_a_rank_that_dies_is_named():
    with Ranks(patience=120) as ranks, pytest.raises(RankError, match="rank 1 of 2: died with exit code 7"):
        ranks.run(2, _dies)


def test_where_a_rank_hangs_is_shown():
    with Ranks(patience=120) as ranks:
        ranks.run(2, _pid)
        ranks.patience = 0.2
        with pytest.raises(RankError, match=r"rank 0 has not reported in 0\.2 s") as error:
            ranks.run(2, _hangs)
    assert "in _serve" in str(error.value)


@pytest.mark.parametrize(
    ("code", "error"), [(7, "others return without an error"), (8, "was to end with 8, and has 7")]
)
def test_a_rank_that_is_lost_has_to_be_an_error_of_the_others(code, error):
    with Ranks(patience=120) as ranks, pytest.raises(RankError, match=error):
        ranks.errors(2, _dies if code == 8 else _dies_alone, lost=1, code=code)
