"""What a plan predicts of its strategies is what they save and allocate, they train as before, and budgets are met."""

import copy
import itertools

import pytest
import torch
from support.planned import CASES, SCALARS, apply, counted, forget_gradients, least_of, loss_of, mixtures, peak_of
from torch import nn

import ckptkern
from ckptkern.planning import measure

pytest.importorskip("scipy")

# Part of the peak by which a prediction may be wrong. The gradient of a sum has no memory, and that of a region alone does; so
# where the last region's output is summed, it counts one gradient too many.
WRONG_BY = dict.fromkeys(["ours", "llama layers", "encoder"], 0.06) | {"head and loss": 0.0, "peak at the loss": 0.0}
# A region that an op stands for and one that it does not, several kinds of regions, a loss, a peak in the loss
SHORT = {"decoder": False, "convolutions": True, "ours": True, "head and loss": False}
STEPS = [
    pytest.param(name, there, marks=() if SHORT.get(name) == there else pytest.mark.long)
    for name, there in itertools.product(CASES, (False, True))
]


def gradients(model, inputs):
    torch.manual_seed(2)
    return torch.autograd.grad(loss_of(model.train()(*inputs)), list(model.parameters()), allow_unused=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "there"), STEPS)
def test_a_model_in_every_strategy(name, there):
    """there: gradients are there when the step begins."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    expected = gradients(copy.deepcopy(model), inputs)

    def reset():
        forget_gradients(model, inputs)
        for p in model.parameters() if there else ():
            p.grad = torch.zeros_like(p)

    reset()
    plan = ckptkern.plan(model, *inputs, budget="1GiB")
    rows = plan.table.rows
    places = range(max(len(row.strategies) for row in rows))
    uniform = (apply(plan, [min(place, len(row.strategies) - 1) for row in rows]) for place in places)
    for chosen in itertools.chain(uniform, mixtures(plan, 4)):
        assert plan.table.saved(chosen) == counted(model, *inputs), chosen
        torch.testing.assert_close(gradients(model, inputs), expected, rtol=1e-4, atol=1e-5)
        measured = plan.table.measured(chosen)
        allowed = SCALARS + measured * WRONG_BY.get(name, 0.01)
        assert abs(plan.table.peak(chosen) - measured) <= allowed, (
            f"{chosen}: predicted {plan.table.peak(chosen)} bytes, measured {measured}"
        )
    least = least_of(plan)
    costs = []
    for budget in (least, int(1.3 * least), 3 * least):
        plan.replan(budget)
        reset()
        measured = peak_of(model, inputs)
        assert max(plan.peak, measured - SCALARS) <= budget
        assert abs(plan.predicted - measured) <= 0.08 * measured  # 6.5 % was seen once, beside other work
        assert abs(plan.peak - measured) <= 0.01 * measured + SCALARS
        costs.append(plan.cost)
    assert sorted(costs, reverse=True) == costs, "more memory costs no more time"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("llama", "ours") else pytest.mark.long) for name in CASES]
)
def test_what_stores_save(name):
    """By saved bytes: any mixture of modes and stores, and the cheapest within a budget."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    stores = [ckptkern.storage.offload(min_bytes=0), ckptkern.storage.compress("int8", min_bytes=256)]
    plan = ckptkern.plan(model, *inputs, saved="1GiB", stores=stores)
    assert plan.saved == counted(model, *inputs)
    for chosen in mixtures(plan, 12):
        assert plan.table.saved(chosen) == counted(model, *inputs), chosen
    largest, least, costs = plan.table.saved([0] * len(plan.table.rows)), least_of(plan), []
    for budget in (largest, max(largest // 3, least), least):
        plan.replan(budget)
        costs.append(plan.cost)
        assert counted(model, *inputs) == plan.saved <= plan.budget
    assert costs == sorted(costs)


class Calls(nn.Module):
    """Calls its regions in ways of which one region alone may show too little."""

    def __init__(self, how):
        super().__init__()
        kinds = [ckptkern.nn.LlamaDecoderLayer(16, 2, intermediate_size=24) for _ in range(2)]
        self.layers, self.act, self.how = nn.ModuleList(kinds), ckptkern.nn.Linear(16, 16, activation="relu"), how
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh())])  # copies what has gaps

    def forward(self, x):
        first, second = self.layers
        x = self.act(x)
        if self.how == "in a checkpoint":
            return second(torch.utils.checkpoint.checkpoint(first, x, use_reentrant=False))
        if self.how == "two lengths":
            return first(x).sum() + first(second(x[:, :3])).sum()
        if self.how == "a part of a tensor":
            return self.blocks[0](second(first(x))[:, 1:4]).sum()
        return second(first(x.transpose(0, 1)).transpose(0, 1)) + x


@pytest.mark.parametrize("how", ["in a checkpoint", "two lengths", "a part of a tensor", "transposed"])
def test_however_a_region_is_called(how):
    torch.manual_seed(0)
    model, x = Calls(how), torch.randn(2, 6, 16, requires_grad=True)
    plan = ckptkern.plan(model, x, saved="1GiB")
    for chosen in mixtures(plan, 8):
        assert plan.table.saved(chosen) == counted(model, x), chosen


def test_a_region_that_is_called_twice_costs_twice():
    model, (x,) = CASES["convolutions"]()
    table = ckptkern.plan(model, x.requires_grad_(), saved="1GiB").table
    assert [len(row.kinds) for row in table.rows] == [2, 1, 1]
    first = table.rows[0]
    assert len(set(first.kinds)) == 1
    assert table.times()[0][0] == 2 * table.kinds[first.kinds[0]].costs[0].seconds > 0


def test_alike_layers_are_measured_once_and_cost_what_their_mode_recomputes(monkeypatch):
    measured, alone = [], measure.measure_alone
    monkeypatch.setattr(
        measure, "measure_alone", lambda kind, *rest: measured.append(kind.first.name) or alone(kind, *rest)
    )
    model, (x,) = CASES["llama layers"]()
    table = ckptkern.plan(model, x, saved="1GiB").table
    assert measured == ["0"]
    flops = {
        str(strategy): cost.flops for strategy, cost in zip(table.rows[0].strategies, table.kinds[0].costs, strict=True)
    }
    assert flops["none"] < flops["selective"] < flops["full"] <= flops["none"] * 4 / 3


def test_a_weight_that_autocast_casts_once_for_two_regions():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    model[2][0].weight = model[1][0].weight
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        plan = ckptkern.plan(model, x, saved="1GiB", exclude="0")
        chosen = apply(plan, plan.table.uniform("none"))
        copy_of_weight = 8 * 8 * 2
        assert plan.table.saved(chosen) == counted(model, x) + copy_of_weight, "counted in both"
