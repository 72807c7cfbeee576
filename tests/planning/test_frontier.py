"""ckptkern.frontier: the size that it finds trains within the budget, and the next does not."""

import math

import pytest
import torch
from support.planned import layers, model_of, peak_of, sequence

import ckptkern
from ckptkern.conversion.recorder import step_of
from ckptkern.errors import BudgetError
from ckptkern.planning.plan import CLOSE, search

pytest.importorskip("scipy")


@pytest.mark.parametrize(
    "peak",
    [
        lambda n: 1000 + 7 * n,
        lambda n: 1000 + 7 * n + n * n // 50,  # scores that are written out
        lambda n: 1000 + 7 * n + 900 * -(-n // 300),  # chunks
        lambda n: 10**6 if n > 700 else 1000 + n,
        lambda n: math.inf if n > 700 else 1000 + n,  # out of memory
        lambda n: 5000 + (n > 900) * 10**6,  # flat
    ],
)
@pytest.mark.parametrize("budget", [2000, 6000, 50_000])
def test_the_search_ends_beside_a_size_that_does_not_fit(budget, peak):
    calls = []
    try:
        size, tried = search(lambda n: calls.append(n) or peak(n), budget, 4, 4, 100_000)
    except BudgetError:
        assert peak(4) > budget
        return
    assert peak(size) <= budget
    assert size == 100_000 or any(peak(n) > budget for n in tried if size < n <= size + max(4, size // CLOSE))
    assert set(calls) == set(tried)
    assert len(calls) == len(tried) <= 25


def test_it_ends_at_the_limit():
    assert search(lambda n: n, 10**9, 64, 64, 1000)[0] == 960
    assert search(lambda n: n, 10**9, 1, 1, 10)[0] == 10


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_longest_sequence(device):
    model = layers(3, device)
    frontier = ckptkern.frontier(model, lambda n: sequence(n, device, 1), "1MiB", multiple=16)
    assert frontier.peak <= frontier.budget == 2**20
    if device == "cpu":
        for p in model.parameters():
            p.grad = None
        assert peak_of(model, (sequence(frontier.size, batch=1),)) <= 2**20
    for layer in model:
        layer.recompute = "full"
        layer.zero_grad()
    beyond = frontier.size + max(16, frontier.size // CLOSE)
    assert step_of(model, ((sequence(beyond, device, 1),), {})).peak > 2**20
    assert f"largest size within 1 MiB: {frontier.size}" in str(frontier)


@pytest.mark.slow
def test_a_model_that_is_converted_and_a_batch():
    def batch(size):
        return torch.randint(0, 20, (size, 12))

    model = model_of("llama")
    frontier = ckptkern.frontier(model, batch, "512KiB", multiple=1, limit=64)
    assert 1 < frontier.size <= 64
    assert set(frontier.plan.strategies) == {"layers.0", "layers.1"}


def test_a_budget_that_the_first_size_does_not_meet():
    model = model_of("llama")
    with pytest.raises(BudgetError, match="frontier: the budget is 1 B, but size 2 takes") as error:
        ckptkern.frontier(model, lambda n: torch.randint(0, 20, (n, 12)), 1, multiple=2)
    assert error.value.least > 1000
    assert not any("forward" in m.__dict__ for m in model.modules()), "converted no more"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiple": 0}, "multiple must be a positive int, not 0"),
        ({"limit": 1.5}, "limit must be a positive int, not 1.5"),
        ({"budget": "much"}, "budget must be a number of bytes"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        ckptkern.frontier(layers(), sequence, **({"budget": "1MiB"} | options))
