"""ckptkern.plan by peak: the search over modes and workspaces, steps op by op, and GPUs that are not there."""

import itertools
import sys
from typing import Any

import pytest
import torch
from support.architectures import ids
from support.planned import SCALARS, forget_gradients, layers, least_of, model_of, peak_of, sequence
from torch import Tensor, nn

import ckptkern
from ckptkern import memory
from ckptkern.planning.live import Live, step_of
from ckptkern.planning.measure import stepped
from ckptkern.planning.table import Table
from ckptkern.planning.timing import RATES, estimated

pytest.importorskip("scipy")


@pytest.mark.slow
def test_the_choice_is_the_cheapest_of_all() -> None:
    """Against every mixture of the modes of two layers."""
    plan = ckptkern.plan(layers(2), sequence(), budget="1GiB")
    table = plan.table
    choices = list(itertools.product(*(range(len(row.strategies)) for row in table.rows)))
    peaks = {choice: table.peak(choice) for choice in choices}
    low, high = min(peaks.values()), max(peaks.values())
    for i in (1, 3, 5, 7):
        budget = low + (high - low) * i // 8
        plan.replan(budget)
        best = min(table.cost_of(choice) for choice in choices if peaks[choice] <= budget)
        assert plan.cost <= 1.05 * best


def workspaces(model: nn.Module) -> set:
    return {m.workspace for layer in model for m in (layer, layer.self_attn, layer.mlp)}


@pytest.mark.slow
def test_a_smaller_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It meets a budget that modes alone do not, or leaves room for a quicker mode."""
    monkeypatch.setattr("ckptkern.planning.search.SMALLER", 2)
    plan_module = sys.modules["ckptkern.planning.plan"]
    tried, narrower = [], plan_module.narrower
    monkeypatch.setattr(plan_module, "narrower", lambda *given: tried.append(narrower(*given)) or tried[-1])
    model, x = layers(), sequence()
    model[1].workspace = 512
    plan = ckptkern.plan(model, x, budget="1GiB")
    assert not tried, "nothing could be quicker"
    assert plan.workspace is None
    assert workspaces(model) == {None, 512}, "left as it was"
    first = plan.choices
    least = first.measured(first.lowest())
    alone = first.table.cost_of(first.best(least))
    plan.replan(least)
    assert plan.workspace is not None
    assert plan.peak <= least
    assert plan.cost <= 0.98 * alone
    plan.replan(int(0.7 * least))
    assert plan.workspace in {table.workspace for table in tried}
    assert peak_of(model, (x,)) <= 0.7 * least + SCALARS
    assert workspaces(model) == {plan.workspace, 512}, "that which was less already is left as it was"
    assert f"workspace: {memory.format_size(plan.workspace)}" in str(plan).splitlines()
    forget_gradients(model, (x,))
    chosen = plan.table.uniform("selective")
    assert abs(plan.table.peak(chosen) - plan.choices.measured(chosen)) <= 0.05 * plan.table.peak(chosen)
    plan.replan("1GiB")
    assert plan.workspace is None
    assert workspaces(model) == {None, 512}, "room for the quicker"
    before = plan.strategies
    assert least_of(plan) < 0.7 * least
    assert (plan.strategies, workspaces(model)) == (before, {None, 512})


def test_a_model_that_convert_replaced_gets_its_workspace_back() -> None:
    model = model_of("llama")
    before = [vars(m).copy() for m in model.modules()]
    plan = ckptkern.plan(model, ids(), budget="1GiB")
    plan.table.workspaces.set(1024)
    assert {row.segment.forward.workspace for row in plan.table.rows} == {1024}
    ckptkern.revert(model)
    assert [vars(m).keys() for m in model.modules()] == [one.keys() for one in before]


@pytest.mark.slow
def test_a_prediction_that_is_too_low_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = Table.peak
    monkeypatch.setattr(Table, "peak", lambda self, chosen: int(0.8 * predicted(self, chosen)))
    model, x = layers(3), sequence()
    plan = ckptkern.plan(model, x, budget="1GiB")
    least = least_of(plan)
    for factor in (1, 1.5):
        plan.replan(int(factor * least))
        forget_gradients(model, (x,))
        assert peak_of(model, (x,)) <= factor * least


@pytest.mark.slow
def test_on_the_meta_device_as_on_the_cpu() -> None:
    """Where matmuls are what a choice costs."""
    found = []
    for device in ("cpu", "meta"):
        attention = ckptkern.nn.LlamaAttention(16, 2, device=device)
        model, x = nn.Sequential(attention, ckptkern.nn.GatedMLP(16, 96, device=device)), sequence(64, device)
        plan = ckptkern.plan(model, x, budget="1GiB")
        assert {str(strategy) for strategy in plan.strategies.values()} == {"none"}
        table = plan.table
        held = [one.bytes for row in table.rows for one in row.held]
        peaks = [plan.choices.measured(table.uniform(mode)) for mode in ("none", "selective", "full")]
        found.append((held, [cost.flops for kind in table.kinds for cost in kind.costs], peaks))
    (held, flops, peaks), (held_on_meta, flops_on_meta, peaks_on_meta) = found
    assert (held_on_meta, flops_on_meta) == (held, flops)
    assert peaks_on_meta == pytest.approx(peaks, rel=0.05)
    assert plan.cost == table.cheapest == sum(min(cost.flops for cost in kind.costs) for kind in table.kinds)
    with pytest.raises(ValueError, match="the meta device, which has no memory to fill: wanted a budget"):
        ckptkern.plan(model, x)


def test_a_gpu_that_is_not_there() -> None:
    """Its rates are the times, and copies to the host are free as long as the region's own work is longer."""
    to = {"device": "meta", "dtype": torch.bfloat16}
    model = nn.Sequential(*(ckptkern.nn.GatedMLP(1024, 4096, **to) for _ in range(2)))
    x = torch.empty(1, 2048, 1024, requires_grad=True, **to)
    plan = ckptkern.plan(model, x, budget="1024GiB", stores=[ckptkern.storage.offload(min_bytes=0)], device="h100")
    assert plan.workspace == 79 * 2**30 // 32
    rates, costs, row = RATES["h100"], plan.table.kinds[0].costs, plan.table.rows[0]
    by_name = {str(strategy): i for i, strategy in enumerate(row.strategies)}
    for name, place in by_name.items():
        assert costs[place].seconds >= costs[place].flops / rates.matmuls
        if "offload" not in name:
            assert costs[place].seconds <= 3 * costs[place].flops / rates.matmuls
            away = by_name[f"{name} + offload"]
            copied = 2 * (row.held[place].bytes - row.held[away].bytes) / rates.host
            assert costs[away].seconds >= copied > 0
            assert costs[away].seconds <= 1.2 * max(costs[place].seconds, copied) + copied / 2
            assert costs[away].transient >= row.held[place].bytes - row.held[away].bytes, "what comes back"
    assert set(map(str, plan.strategies.values())) == {"none"}
    plan.replan(plan.choices.measured(plan.table.uniform("full")))
    assert plan.peak <= plan.budget
    slower, faster = (estimated(lambda: model[0](x), RATES[name]) for name in ("a100", "h100"))
    assert slower > 2 * faster
    with pytest.raises(ValueError, match="device must be one of h200, h100, a100, not 'tpu'"):
        ckptkern.plan(model, x, budget="1024GiB", device="tpu")
    with pytest.raises(ValueError, match="device is of a model on the meta device"):
        ckptkern.plan(layers(), sequence(), budget="1024GiB", device="h100")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_size": (16, 0)},
        {"window_size": (16, 16)},
        {"dropout_p": 0.5},
        {"softcap": 2.0},
        {"attn_mask": torch.bool},
    ],
)
def test_attention_on_the_meta_device_has_no_scores(options: dict[str, Any]) -> None:
    to = {"device": "meta", "dtype": torch.bfloat16}

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            given = options | ({"attn_mask": mask} if mask is not None else {})
            return ckptkern.scaled_dot_product_attention(q, k, v, workspace="1GiB", **given)

    mask = torch.empty(1024, 1024, device="meta", dtype=options["attn_mask"]) if "attn_mask" in options else None
    q, k, v = (torch.empty(1, 2, 1024, 8, requires_grad=True, **to) for _ in range(3))
    step = step_of(Attention(), (q, k, v, mask), {}, [], torch.device("meta"), all_there=True)
    assert step.peak < 1024 * 1024


def test_grouped_matmuls_count() -> None:
    R, k, n, rates = 4096, 512, 256, RATES["h200"]._replace(bandwidth=1e30)
    x = torch.empty(R, k, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(4, k, n, device="meta", dtype=torch.bfloat16, requires_grad=True)
    offs, dy = torch.empty(4, device="meta", dtype=torch.int32), torch.empty(R, n, device="meta", dtype=torch.bfloat16)
    forward = 2 * R * k * n / rates.matmuls
    assert estimated(lambda: nn.functional.grouped_mm(x, weight, offs=offs), rates) == pytest.approx(forward)
    step = estimated(lambda: nn.functional.grouped_mm(x, weight, offs=offs).backward(dy), rates)
    assert step == pytest.approx(3 * forward)
    transposed = estimated(lambda: nn.functional.grouped_mm(weight.mT, x.mT, offs=offs), rates)
    assert transposed == pytest.approx(forward), "each column of x has one weight"


@pytest.mark.slow
def test_what_stands_at_the_peak() -> None:
    plan = ckptkern.plan(layers(), sequence(), budget="1GiB")
    lines = str(plan).splitlines()
    assert f"peak of a step: {memory.format_size(plan.peak)} of a budget of 1 GiB" in lines
    largest = plan.standing[0]
    assert any(largest.what in line and line.endswith(largest.place) for line in lines)
    plan.replan(plan.choices.measured(plan.table.uniform("full")))  # others have kernels' own memory at their peak
    standing = plan.standing
    assert 0 <= plan.peak - sum(one.bytes for one in standing) <= 0.05 * plan.peak
    assert standing == sorted(standing, key=lambda one: -one.bytes)
    assert {one.place for one in standing} <= {"", "0", "1", "2", "3"}


def test_live_counts_each_storage_once_and_until_it_is_gone() -> None:
    known = torch.ones(10)
    with Live([known]) as live:
        a = known + 1
        view = a[:3]
        assert live.now() == 40
        del a
        assert live.now() == 40
        del view
        assert live.now() == 0
        known.add_(1)
    assert live.peak == 40
    assert [(one.bytes, one.op, one.shape) for one in live.at_peak] == [(40, "add.Tensor", (10,))]


@pytest.mark.slow
def test_adapting_follows_the_room_and_stores_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [2**30]
    monkeypatch.setattr(memory, "free_memory", lambda device: free[0])
    model, x = layers(), sequence()
    plan = ckptkern.plan(model, x, budget="1GiB", stores=[ckptkern.storage.offload(min_bytes=0)], adapt=True)
    quick = plan.peak
    free[0] = least_of(plan)
    model.train()(x)
    assert plan.budget == free[0]
    assert plan.peak <= free[0] < quick
    plan.stop()
    assert peak_of(model, (x,)) <= plan.peak
    forget_gradients(model, (x,))
    assert stepped(plan.table, model, (x,), {}, plan.chosen).peak == plan.peak


def test_a_model_is_converted_with_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_module = sys.modules["ckptkern.planning.plan"]
    sizes, convert = [], plan_module.convert

    def seen(model: nn.Module, *args: Tensor, **options: Any) -> ckptkern.Conversion:
        sizes.append(tuple(args[0].shape))
        return convert(model, *args, **options)

    monkeypatch.setattr(plan_module, "convert", seen)
    for width, x, expected in (
        (8, torch.randn(3, 70, 8), [(2, 64, 8)]),
        (70, torch.randn(3, 70), [(2, 64), (3, 70)]),  # features are no tokens
    ):
        sizes.clear()
        plan = ckptkern.plan(nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 8)), x, saved="1GiB")
        assert sizes == expected
        assert set(plan.strategies) == {""}
