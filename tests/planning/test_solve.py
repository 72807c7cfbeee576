"""The optimum of plan's integer programme, against trying every choice."""

import itertools
import random

import pytest

from ckptkern.errors import BudgetError
from ckptkern.planning.search import choose
from ckptkern.planning.table import OWN, total

pytest.importorskip("scipy")


def problem(seed):
    """Up to five regions; some are alike, and some storages are saved by several of them or by the rest."""
    draw = random.Random(seed)
    names = [("out", i) for i in range(4)]
    sizes = {name: draw.choice([0, 7, 4096, 3 * 2**20]) for name in names}
    rest = {OWN: draw.choice([0, 100])} | {n: sizes[n] for n in draw.sample(names, draw.choice([0, 0, 1]))}
    kinds = []
    for _ in range(draw.randint(1, 3)):
        strategies = draw.randint(1, 4)
        kinds.append(
            (
                [draw.choice([0.0, 1.0, draw.uniform(0.5, 9)]) for _ in range(strategies)],
                [draw.choice([0, 1, draw.randint(0, 9 * 2**20)]) for _ in range(strategies)],
            )
        )
    costs, held = [], []
    for _ in range(draw.randint(1, 5)):
        cost, own = draw.choice(kinds)
        shared = [{n: sizes[n] for n in names if draw.random() < 0.3} if draw.random() < 0.5 else {} for _ in own]
        costs.append(cost)
        held.append([{(len(held), w): n, **some} for w, (n, some) in enumerate(zip(own, shared, strict=True))])
    return costs, held, rest


def of(strategies, costs, held, rest):
    """(bytes, cost) of a choice."""
    chosen = list(enumerate(strategies))
    return total([rest, *(held[i][strategy] for i, strategy in chosen)]), sum(
        costs[i][strategy] for i, strategy in chosen
    )


def with_what_several_save(held, rest):
    """The rest with the storages that more than one region may save: they count once, whatever is chosen."""
    names = [{name for option in own for name in option} for own in held]
    several = {
        name: n for own in held for option in own for name, n in option.items() if sum(name in of for of in names) > 1
    }
    return rest | several


@pytest.mark.slow
def test_no_choice_is_cheaper():
    for seed in range(100):
        costs, held, outside = problem(seed)
        rest = with_what_several_save(held, outside)
        every = [of(choice, costs, held, rest) for choice in itertools.product(*(range(len(cost)) for cost in costs))]
        saved = sorted({saved for saved, _ in every})
        for budget in {saved[0], saved[len(saved) // 2], saved[-1] - 1, saved[-1] + 1}:
            if budget < saved[0]:
                continue
            ours, cost = of(choose(costs, held, outside, budget), costs, held, rest)
            assert ours <= budget
            best = min(cost for saved, cost in every if saved <= budget)
            assert cost == pytest.approx(best, rel=1e-6, abs=1e-6), (seed, budget)
        with pytest.raises(BudgetError) as error:
            choose(costs, held, outside, min(total([outside]), saved[0]) - 1)
        assert error.value.least <= saved[0], seed
        ours, _ = of(choose(costs, held, outside, error.value.least), costs, held, outside)
        assert ours == error.value.least


def test_layers_that_are_alike_are_counted_and_not_told_apart():
    """96 layers in nine strategies: as binaries they have so many equal solutions that no solver ends."""
    draw = random.Random(0)
    cost = [1 + draw.random() for _ in range(9)]
    own = [int(2**30 / c**3) for c in cost]
    costs, held = [cost] * 96, [[{(i, w): n, ("in", i): 2**24} for w, n in enumerate(own)] for i in range(96)]
    budget = 96 * (2**24 + sorted(own)[4]) - 1
    ours, actual = of(choose(costs, held, {}, budget), costs, held, {})
    assert ours <= budget
    # the best of all mixtures of two strategies, which is what the relaxed problem has
    mixtures = [
        k * cost[a] + (96 - k) * cost[b]
        for a, b in itertools.product(range(9), repeat=2)
        for k in range(97)
        if k * own[a] + (96 - k) * own[b] + 96 * 2**24 <= budget
    ]
    assert actual <= min(mixtures) + 1e-6


def test_of_layers_that_are_alike_the_last_save_most():
    held = [[{(i, 0): 100}, {(i, 1): 10}] for i in range(5)]
    assert choose([[1.0, 2.0]] * 5, held, {}, 240) == (1, 1, 1, 0, 0)


def test_the_solvers_tolerance_is_no_byte_too_many():
    """A bound that one byte more would meet with another choice, for sizes whose doubles are not exact in MiB."""
    big = 10**12 + 1
    held = [[{(0, 0): big}, {(0, 1): 3}], [{(1, 0): big // 3}, {(1, 1): 1}]]
    assert choose([[1.0, 2.0], [1.0, 2.0]], held, {}, big + big // 3 - 1) != (0, 0)
    assert choose([[1.0, 2.0], [1.0, 2.0]], held, {}, big + big // 3) == (0, 0)
