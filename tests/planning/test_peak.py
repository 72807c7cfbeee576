"""ckptkern.plan by peak: the search over modes and workspaces, steps op by op, and GPUs that are not there."""

import functools
import itertools
import sys

import pytest
import torch
from support.architectures import ids
from support.planned import SCALARS, forget_gradients, layers, least_of, model_of, peak_of, sequence
from torch import nn

import ckptkern
from ckptkern import memory
from ckptkern.conversion import recorder
from ckptkern.conversion.recorder import Step, step_of
from ckptkern.planning.table import Table
from ckptkern.planning.timing import RATES, Roofline

pytest.importorskip("scipy")


@pytest.mark.slow
def test_the_choice_is_the_cheapest_of_all():
    """Against every mixture of the modes of two layers."""
    plan = ckptkern.plan(layers(2), sequence(), budget="1GiB")
    table = plan.table
    choices = itertools.product(*(range(len(row.strategies)) for row in table.rows))
    peaks = {choice: table.peak(choice) for choice in choices}
    for budget in torch.linspace(min(peaks.values()), max(peaks.values()), 9)[1::2]:
        plan.replan(int(budget))
        assert plan.cost <= 1.05 * min(table.cost_of(choice) for choice, peak in peaks.items() if peak <= budget)


def workspaces(model):
    return {m.workspace for layer in model for m in (layer, layer.self_attn, layer.mlp)}


@pytest.mark.slow
def test_a_smaller_workspace(monkeypatch, one_thread):
    """It meets a budget that modes alone do not, or leaves room for a quicker mode."""
    monkeypatch.setattr("ckptkern.planning.search.SMALLER", 2)
    model, x = layers(), sequence()
    model[1].workspace = 512
    plan = ckptkern.plan(model, x, budget="1GiB")
    assert plan.workspace is None
    assert workspaces(model) == {None, 512}, "left as it was"
    first = plan.search.all[0]
    with pytest.raises(ckptkern.errors.BudgetError) as error:
        first.best(1)
    least = error.value.least
    alone = first.table.cost_of(first.best(least))
    plan.replan(least)
    assert plan.workspace is not None
    assert plan.peak <= least
    assert plan.cost <= 0.98 * alone
    plan.replan(int(0.7 * least))
    assert peak_of(model, (x,)) <= 0.7 * least + SCALARS
    assert workspaces(model) == {plan.workspace, 512}, "that which was less already is left as it was"
    assert f"workspace: {memory.format_size(plan.workspace)}" in str(plan).splitlines()
    forget_gradients(model, (x,))
    chosen = plan.table.uniform("selective")
    assert abs(plan.table.peak(chosen) - plan.table.measured(chosen)) <= 0.05 * plan.table.peak(chosen)
    plan.replan("1GiB")
    assert plan.workspace is None
    assert workspaces(model) == {None, 512}, "room for the quicker"


def test_a_model_that_convert_replaced_gets_its_workspace_back():
    model = model_of("llama")
    before = [vars(m).copy() for m in model.modules()]
    plan = ckptkern.plan(model, ids(), budget="1GiB")
    plan.table.workspaces.set(1024)
    assert {row.segment.forward.workspace for row in plan.table.rows} == {1024}
    ckptkern.revert(model)
    assert [vars(m).keys() for m in model.modules()] == [attributes.keys() for attributes in before]


@pytest.mark.slow
def test_a_prediction_that_is_too_low_is_corrected(monkeypatch):
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
def test_on_the_meta_device_as_on_the_cpu():
    """Where matmuls are what a choice costs."""
    results, peaks = [], []
    for device in ("cpu", "meta"):
        attention = ckptkern.nn.LlamaAttention(16, 2, device=device)
        model, x = nn.Sequential(attention, ckptkern.nn.GatedMLP(16, 96, device=device)), sequence(64, device)
        plan = ckptkern.plan(model, x, budget="1GiB")
        assert {str(strategy) for strategy in plan.strategies.values()} == {"none"}
        table = plan.table
        peaks.append([plan.table.measured(table.uniform(mode)) for mode in ("none", "selective", "full")])
        flops = [[cost.flops for cost in kind.costs] for kind in table.kinds]
        results.append((flops, [sum(held.values()) for row in table.rows for held in row.held]))
    assert results[0] == results[1]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)
    assert plan.cost == sum(map(min, flops))


def estimated(run, rates):
    """Seconds on a GPU of these rates."""
    with Roofline(rates) as line:
        run()
    return line.seconds


def test_a_gpu_that_is_not_there():
    """Its rates are the times, and copies to the host are free as long as the region's own work is longer."""
    to = {"device": "meta", "dtype": torch.bfloat16}
    model = nn.Sequential(*(ckptkern.nn.GatedMLP(1024, 4096, **to) for _ in range(2)))
    x = torch.empty(1, 2048, 1024, requires_grad=True, **to)
    plan = ckptkern.plan(model, x, budget="1024GiB", stores=[ckptkern.storage.offload(min_bytes=0)], device="h100")
    assert plan.workspace == 79 * 2**30 // 32
    rates, row = RATES["h100"], plan.table.rows[0]
    cost_of = dict(zip(map(str, row.strategies), zip(plan.table.kinds[0].costs, row.held, strict=True), strict=True))
    for mode in ("none", "selective", "full"):
        (here, held), (away, held_away) = cost_of[mode], cost_of[f"{mode} + offload"]
        assert 1 <= here.seconds * rates.matmuls / here.flops <= 3
        copied = sum(held.values()) - sum(held_away.values())
        seconds = 2 * copied / rates.host
        assert 0 < seconds <= away.seconds <= 1.2 * max(here.seconds, seconds) + seconds / 2
        assert away.transient >= copied, "what comes back"
    assert set(map(str, plan.strategies.values())) == {"none"}
    plan.replan(plan.table.measured(plan.table.uniform("full")))
    assert plan.peak <= plan.budget
    slower, faster = (estimated(lambda: model[0](x), RATES[name]) for name in ("a100", "h100"))
    assert slower > 2 * faster


def test_a_device_that_cannot_be_planned_for():
    on_meta = layers(device="meta"), sequence(device="meta")
    for arguments, options, message in (
        (on_meta, {"device": "tpu"}, "device must be one of h200, h100, a100, not 'tpu'"),
        ((layers(), sequence()), {"device": "h100"}, "device is for a model on the meta device"),
        (on_meta, {"budget": None}, "the meta device, which has no free memory to plan for. Give a budget"),
    ):
        with pytest.raises(ValueError, match=message):
            ckptkern.plan(*arguments, **{"budget": "1GiB"} | options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_size": (16, 0)},
        {"window_size": (16, 16)},
        {"dropout_p": 0.5},
        {"softcap": 2.0},
        {"attn_mask": True},
    ],
)
def test_attention_on_the_meta_device_has_no_scores(options):
    class Attention(nn.Module):
        def forward(self, q, k, v, mask):
            arguments = options | ({"attn_mask": mask} if "attn_mask" in options else {})
            return ckptkern.scaled_dot_product_attention(q, k, v, workspace="1GiB", **arguments)

    with torch.device("meta"):
        mask = torch.empty(1024, 1024, dtype=torch.bool)
        q, k, v = (torch.empty(1, 2, 1024, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    step = step_of(Attention(), ((q, k, v, mask), {}), there=[q, k, v])
    assert step.peak < 1024 * 1024


def test_grouped_matmuls_count():
    R, k, n, rates = 4096, 512, 256, RATES["h200"]._replace(bandwidth=1e30)
    with torch.device("meta"):
        x, weight, dy = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((R, k), (4, k, n), (R, n)))
        offs = torch.empty(4, dtype=torch.int32)
    grouped_mm, forward = functools.partial(nn.functional.grouped_mm, offs=offs), 2 * R * k * n / rates.matmuls
    for a, b in ((x, weight), (weight.mT, x.mT)):  # each column of x has one weight
        assert estimated(lambda a=a, b=b: grouped_mm(a, b), rates) == pytest.approx(forward)
    leaves = x.requires_grad_(), weight.requires_grad_()
    assert estimated(lambda: grouped_mm(*leaves).backward(dy), rates) == pytest.approx(3 * forward)


@pytest.mark.slow
def test_what_stands_at_the_peak(one_thread):
    plan = ckptkern.plan(layers(), sequence(), budget="1GiB")
    text, largest = str(plan), plan.standing[0]
    assert f"\npeak of a step: {memory.format_size(plan.peak)} of a budget of 1 GiB\n" in text
    assert any(largest.what in line and line.endswith(largest.place) for line in text.splitlines())
    plan.replan(plan.table.measured(plan.table.uniform("full")))  # others have kernels' own memory at their peak
    sizes = [tensor.bytes for tensor in plan.standing]
    assert 0 <= plan.peak - sum(sizes) <= 0.05 * plan.peak
    assert sizes == sorted(sizes, reverse=True)
    assert {tensor.place for tensor in plan.standing} <= {"", "0", "1", "2", "3"}


def test_live_counts_each_storage_once_and_until_it_is_gone():
    known = torch.ones(10)
    with Step() as live:
        a = known + 1
        view = a[:3]
        assert live.now() == 40
        del a
        assert live.now() == 40
        del view
        assert live.now() == 0
        known.add_(1)
    assert live.peak == 40
    assert [(tensor.bytes, tensor.op, tensor.shape) for tensor in live.at_peak] == [(40, "add.Tensor", (10,))]


def test_many_tensors_are_searched_seldom_and_their_peak_is_nearly_exact(monkeypatch):
    monkeypatch.setattr(recorder, "MANY", 64)
    for freed in (0, 4090):
        with Step() as live:
            held = [torch.ones(10) for _ in range(4090)]
            before = len(live.heights)
            for _ in range(freed):
                torch.ones(10)
            del held
            torch.ones(10)
        assert before < 2045, "a search for each op"
        assert len(live.heights) - before < 1022
        assert 1 - 1 / 256 < live.peak / (40 * (4091 if freed else 4090)) <= 1


@pytest.mark.slow
def test_adapting_follows_the_room_and_stores_take_part(monkeypatch):
    free = [2**30]
    monkeypatch.setattr(memory, "free_memory", lambda device: free[0])
    model, x = layers(), sequence()
    plan = ckptkern.plan(model, x, budget="1GiB", stores=[ckptkern.storage.offload(min_bytes=0)], adapt=True)
    quick = plan.peak
    free[0] = least_of(plan)
    model.train()(x)
    assert plan.budget == free[0]
    assert plan.peak <= free[0] < quick
    plan.adapting.remove()
    assert peak_of(model, (x,)) <= plan.peak
    plan.table.steps.clear()
    assert plan.table.step(plan.chosen).peak == plan.peak, "with the gradients that were there when it was planned"


@pytest.mark.parametrize(
    ("x", "expected"),
    [(torch.randn(3, 70, 8), [(2, 64, 8)]), (torch.randn(3, 70), [(2, 64), (3, 70)])],  # features are no tokens
    ids=["tokens", "features"],
)
def test_a_model_is_converted_with_few_tokens(x, expected, monkeypatch):
    plan_module = sys.modules["ckptkern.planning.plan"]
    sizes, convert = [], plan_module.convert
    monkeypatch.setattr(
        plan_module, "convert", lambda model, x, **options: sizes.append(x.shape) or convert(model, x, **options)
    )
    plan = ckptkern.plan(nn.Sequential(nn.Linear(x.shape[-1], 8), nn.ReLU(), nn.Linear(8, 8)), x, saved="1GiB")
    assert sizes == expected
    assert set(plan.strategies) == {""}
