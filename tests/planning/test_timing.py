"""The clock of steps. What of it needs no GPU runs here with a step's own doings; tests marked gpu run the rest."""

import contextlib
import itertools

import pytest
import torch

import ckptkern
from ckptkern.planning import measure, timing

CPU = torch.device("cpu")


@pytest.mark.parametrize("needed", [1, timing.SLEEP + 1, timing.LONGEST_SLEEP, 2 * timing.LONGEST_SLEEP])
def test_the_sleep_grows_until_the_host_is_ahead(needed, monkeypatch):
    """Launches take the host as long as `needed` cycles. The clock remembers sleeps over steps. The device is only a name
    here."""
    asked, ran = [], []

    class Event:
        def __init__(self, enable_timing):
            self.record = self.synchronize = lambda: None

        def query(self):
            return asked[-1] < needed

        def elapsed_time(self, end):
            return 1e5 / len(asked)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "_sleep", asked.append)
    clock = timing.Clock(torch.device("cuda", 0))
    seconds = clock(lambda: lambda: ran.append(len(asked)))
    assert seconds == 100.0 / len(asked), "of the last attempt alone"
    assert ran == [*range(1, len(asked) + 1)], "a step behind each sleep"
    grown = [timing.SLEEP * 2**n for n in range(len(asked))]
    assert asked == grown
    assert clock.cycles == grown[-1] >= min(needed, timing.LONGEST_SLEEP)
    assert all(size < needed for size in grown[:-1])
    clock(lambda: lambda: None)
    assert asked == [*grown, grown[-1]], "the next step begins where this one ended"


def test_what_prepares_a_step_is_not_timed(monkeypatch):
    seconds = iter(range(10))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(seconds))
    done = []

    def prepare():
        next(seconds)  # a second of the clock
        return lambda: done.append(next(seconds))

    assert timing.Clock(CPU)(prepare) == 2
    assert done == [2]


def test_a_strategy_takes_the_median_of_its_rounds(monkeypatch):
    """The rounds interleave the strategies, whose number the model decides."""
    seconds = itertools.count(1.0)
    monkeypatch.setattr(measure, "Clock", lambda device: lambda prepare: next(seconds))
    monkeypatch.setattr(measure, "ROUNDS", 3)
    model = torch.nn.Sequential(ckptkern.nn.MLP(4, 8))
    costs = ckptkern.plan(model, torch.randn(2, 4, requires_grad=True), saved="1GiB").table.kinds[0].costs
    assert [cost.seconds for cost in costs] == [len(costs) + 1.0 + i for i in range(len(costs))]


@pytest.mark.gpu
def test_the_host_is_ahead_on_a_gpu():
    """Of many small launches, and not where each waits."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(64, device=device)

    def step(waits):
        for _ in range(100):
            x.add_(1)
            if waits:
                torch.cuda.synchronize()

    step(False)
    for waits in (False, True):
        clock = timing.Clock(device)
        assert clock(lambda waits=waits: lambda: step(waits)) > 0
        assert (clock.cycles < timing.LONGEST_SLEEP) == (not waits)
