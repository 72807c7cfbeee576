"""The harness itself: the error of a rank is the test's error, and other processes take the place of those that it ended."""

import os

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankError, Ranks


def _sum(rank):
    dist.all_reduce(total := torch.tensor(rank + 1.0))
    return total.item()


def _lose(rank, how, waits=True):
    """Rank 1 raises, dies or returns at once, and the others wait for it, or do not."""
    if rank != 1:
        return dist.all_reduce(torch.ones(1)) if waits else None
    if how == "raises":
        raise ValueError("injected")
    if how == "dies":
        os._exit(7)


def test_an_error_of_one_rank_is_that_of_the_test():
    with Ranks(patience=120) as ranks:
        for how, message in (
            ("raises", "^rank 1 of 4: Traceback(?s:.*)injected$"),
            ("dies", "rank 1 of 4: died with exit code 7"),
        ):
            with pytest.raises(RankError, match=message) as error:
                ranks.run(4, _lose, how)
            assert how == "dies" or "rank 0" not in str(error.value), "the others were waiting, and did not fail"
            assert ranks.run(2, _sum) == [3.0, 3.0]
        ranks.patience = 0.2
        with pytest.raises(RankError, match=r"rank 0 has not reported in 0\.2 s(?s:.*)in _serve"):
            ranks.run(2, _lose, "returns")


@pytest.mark.parametrize(
    ("code", "error"), [(7, "others return without an error"), (8, "was to end with 8, and has 7")]
)
def test_a_rank_that_is_lost_has_to_be_an_error_of_the_others(code, error):
    with Ranks(patience=120) as ranks, pytest.raises(RankError, match=error):
        ranks.errors(2, _lose, "dies", code == 8, lost=1, code=code)
