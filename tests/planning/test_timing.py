"""The clock of steps. What of it needs no GPU runs here with a step's own doings; tests marked gpu run the rest."""

import itertools

import pytest
import torch

import ckptkern
from ckptkern.planning import measure, timing

CPU = torch.device("cpu")


def attempts(needed: int):
    """(attempt, the sleeps that it was asked for) of a step whose launches take the host as long as `needed` cycles."""
    asked = []

    def attempt(cycles: int) -> tuple[float, bool]:
        asked.append(cycles)
        return 100.0 / len(asked), cycles >= needed

    return attempt, asked


@pytest.mark.parametrize("needed", [1, timing.SLEEP, timing.SLEEP + 1, timing.LONGEST_SLEEP])
def test_the_sleep_grows_until_the_host_is_ahead(needed):
    attempt, asked = attempts(needed)
    seconds, cycles, ahead = timing.launched_ahead(attempt, timing.SLEEP)
    assert asked == [timing.SLEEP * 2**n for n in range(len(asked))]
    assert ahead
    assert cycles == asked[-1] >= needed
    assert all(one < needed for one in asked[:-1])
    assert seconds == 100.0 / len(asked)  # of the last attempt alone
    assert timing.launched_ahead(attempt, cycles)[1] == cycles  # the next step begins where this one ended


def test_a_step_that_waits_for_the_gpu_ends_the_search():
    attempt, asked = attempts(2 * timing.LONGEST_SLEEP)
    assert timing.launched_ahead(attempt, timing.SLEEP)[1:] == (timing.LONGEST_SLEEP, False)
    assert asked[-1] == timing.LONGEST_SLEEP
    before = len(asked)
    timing.launched_ahead(attempt, timing.LONGEST_SLEEP)
    assert len(asked) == before + 1


@pytest.mark.parametrize("needed", [1, 4 * timing.SLEEP, 2 * timing.LONGEST_SLEEP])
def test_the_clock_remembers(needed, monkeypatch):
    """Sleeps, and whether it was ahead, over steps. The device is only a name here."""
    attempt, asked = attempts(needed)
    clock = timing.Clock(torch.device("cuda", 0))
    monkeypatch.setattr(clock, "_attempt", lambda prepare, cycles: attempt(cycles))
    first, second = clock(None), clock(None)
    assert (first, second) == (100.0 / (len(asked) - 1), 100.0 / len(asked))
    assert clock.cycles == asked[-1] == asked[-2] >= min(needed, timing.LONGEST_SLEEP)
    assert clock.ahead == (needed <= timing.LONGEST_SLEEP)
    monkeypatch.setattr(clock, "_attempt", lambda prepare, cycles: (1.0, True))
    clock(None)
    assert clock.ahead == (needed <= timing.LONGEST_SLEEP)  # one step that waited is in the figures


def test_what_prepares_a_step_is_not_timed(monkeypatch):
    seconds = iter(range(10))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(seconds))
    done = []

    def prepare():
        next(seconds)  # a second of the clock
        return lambda: done.append(next(seconds))

    assert timing.Clock(CPU)(prepare) == 2
    assert done == [2]


@pytest.mark.parametrize(
    ("nbytes", "cache"), [(10, 0), (10, 5), (10, 10), (10, 95), (10**9, 5), (3 * 2**20, 50 * 2**20)]
)
def test_operands_by_turns_fill_the_cache(nbytes, cache):
    """Between two turns of one the others go through the cache. None is there for nothing."""
    count = timing.copies(nbytes, cache)
    assert (count - 1) * nbytes >= cache
    assert count == 1 or (count - 2) * nbytes < cache
    assert timing.copies(1, 2**40) == timing.copies(0, 2**40) == timing.MOST_COPIES
    assert timing.cache_of(CPU) == 0


def test_a_strategy_takes_the_median_of_its_rounds(monkeypatch):
    """The rounds interleave the strategies, whose number the model decides."""
    seconds = itertools.count(1.0)
    monkeypatch.setattr(measure, "Clock", lambda device: lambda prepare: next(seconds))
    monkeypatch.setattr(measure, "ROUNDS", 3)
    model = torch.nn.Sequential(ckptkern.nn.MLP(4, 8))
    costs = ckptkern.plan(model, torch.randn(2, 4, requires_grad=True), saved="1GiB").table.kinds[0].costs
    assert [cost.seconds for cost in costs] == [len(costs) + 1.0 + i for i in range(len(costs))]


def test_gradients_of_outputs_are_made_once(monkeypatch):
    """By the first backward of the first strategy; all timed ones take the same."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    call = ((torch.randn(2, 4, requires_grad=True),), {})
    made, whole = [], torch.ones_like
    monkeypatch.setattr(torch, "ones_like", lambda one: made.append(one.shape) or whole(one))
    seeds = []
    for _ in range(3):
        forward, backward = measure.step(model, call, seeds)
        forward()
        found = backward()
    assert made == [(2, 4)]
    assert [one.shape for one in seeds] == [(2, 4)]
    fresh_forward, fresh_backward = measure.step(model, call)
    fresh_forward()
    for ours, theirs in zip(found, fresh_backward(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_the_host_is_ahead_on_a_gpu():
    """Of many small launches, and not where each waits."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(64, device=device)

    def step(waits: bool):
        for _ in range(100):
            x.add_(1)
            if waits:
                torch.cuda.synchronize()

    step(False)
    for waits in (False, True):
        clock = timing.Clock(device)
        assert clock(lambda waits=waits: lambda: step(waits)) > 0
        assert clock.ahead == (not waits)


@pytest.mark.gpu
def test_a_captured_step_on_a_gpu():
    """It runs only where it is replayed; the warm-up is another step."""
    x, y = (torch.zeros(4, device="cuda") for _ in range(2))
    replay = timing.captured(lambda: x.add_(1), lambda: y.add_(1), torch.cuda.graph_pool_handle())
    assert (x.tolist(), y.tolist()) == ([0.0] * 4, [3.0] * 4)
    replay()
    replay()
    assert x.tolist() == [2.0] * 4
