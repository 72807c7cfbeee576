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
    return os.getpid(), (dist.get_world_size(), total.item(), torch.rand(()).item())


def _lose(rank, lost, how, waits=True):
    """One rank raises, dies or returns at once, and the others wait for it, or do not."""
    if rank != lost:
        return dist.all_reduce(torch.ones(1)) if waits else None
    if how == "raises":
        raise ValueError(f"injected at {lost}")
    if how == "dies":
        os._exit(7)


def test_ranks_run_one_function_after_another_with_groups_of_their_own(ranks):
    first = torch.rand((), generator=torch.Generator().manual_seed(0)).item()
    seen = []
    for size, factor, total in ((2, 1, 3.0), (4, 2, 20.0), (2, 3, 9.0)):
        pids, results = zip(*ranks.run(size, _sum, factor), strict=True)
        assert results == size * ((size, total, first),)
        seen.append(pids)
    assert seen[0] == seen[1][:2] == seen[2]
    assert len({*seen[1], os.getpid()}) == 5


@pytest.mark.parametrize("at", [3, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_raises_ends_the_others(at):
    with Ranks(patience=120) as ranks:
        processes = ranks.run(4, _sum, 1) and [process for process, _ in ranks.started]
        start = time.monotonic()
        with pytest.raises(RankError, match=f"injected at {at}") as error:
            ranks.run(4, _lose, at, "raises")
        assert time.monotonic() - start < ranks.patience / 2, "the test has waited for ranks that wait for each other"
        assert f"rank {at} of 4: Traceback" in str(error.value)
        assert str(error.value).count("Traceback") == 1, "the others were waiting, and did not fail"
        assert f'test_ranks.py", line {_lose.__code__.co_firstlineno + 5}, in _lose' in str(error.value)
        assert not any(process.is_alive() for process in processes)
        assert ranks.run(2, _sum, 1)[0][1][:2] == (2, 3.0), "others take their place"


def test_a_rank_that_dies_is_named_and_where_one_hangs_is_shown():
    with Ranks(patience=120) as ranks:
        with pytest.raises(RankError, match="rank 1 of 2: died with exit code 7"):
            ranks.run(2, _lose, 1, "dies")
        ranks.run(2, _sum, 1)
        ranks.patience = 0.2
        with pytest.raises(RankError, match=r"rank 0 has not reported in 0\.2 s") as error:
            ranks.run(2, _lose, 1, "returns")
    assert "in _serve" in str(error.value)


@pytest.mark.parametrize(
    ("code", "error"), [(7, "others return without an error"), (8, "was to end with 8, and has 7")]
)
def test_a_rank_that_is_lost_has_to_be_an_error_of_the_others(code, error):
    with Ranks(patience=120) as ranks, pytest.raises(RankError, match=error):
        ranks.errors(2, _lose, 1, "dies", code == 8, lost=1, code=code)
