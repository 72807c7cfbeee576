"""ckptkern.plan by peak: what a step allocates is what was predicted, and never above the budget."""

import itertools
import random
import sys
from typing import Any

import pytest
import torch
from support.architectures import ids
from support.planned import MODELS, Convolutions, model_of
from torch import Tensor, nn

import ckptkern
from ckptkern import memory
from ckptkern.errors import BudgetError
from ckptkern.planning import measure
from ckptkern.planning.live import Live, step_of
from ckptkern.planning.measure import stepped
from ckptkern.planning.table import Measured, Table
from ckptkern.planning.timing import RATES, estimated

pytest.importorskip("scipy")


class WithLoss(nn.Module):
    """Returns a loss, as a model of transformers with labels."""

    def __init__(self, inner: nn.Module, vocabulary: int):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(16, vocabulary)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.inner(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def layers(count: int = 4, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    kinds = [ckptkern.nn.LlamaDecoderLayer(16, 2, intermediate_size=48, device=device) for _ in range(count)]
    return nn.Sequential(*kinds)


def sequence(requires_grad: bool = True, device: str = "cpu", tokens: int = 256) -> Tensor:
    return torch.randn(2, tokens, 16, device=device, requires_grad=requires_grad)


SCALARS = 256  # bytes that come and go between two runs

CASES = {name: (make, (lambda inputs=inputs: (inputs(),))) for name, (make, inputs) in MODELS.items()} | {
    "convolutions": (Convolutions, lambda: (torch.randn(64, 4, 6),)),
    "llama layers": (layers, lambda: (sequence(),)),
    "head and loss": (lambda: WithLoss(layers(2), 300), lambda: (sequence(), torch.randint(0, 300, (2, 256)))),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 48, 0.1, batch_first=True), 3, enable_nested_tensor=False
        ),
        lambda: (sequence(tokens=64),),
    ),
}  # fmt: skip


def peak_of(model: nn.Module, inputs: tuple) -> int:
    """Of a step that trains, by the profiler."""
    with torch.random.fork_rng(), memory.peak_memory("cpu") as peak:
        output = model.train()(*inputs)
        loss = output["loss"] if isinstance(output, dict) else output
        loss = loss if isinstance(loss, Tensor) else loss[0]
        (loss if loss.dim() == 0 else loss.float().sum()).backward()
        del output, loss
    return peak.bytes


def flops_of(table: Table, row: Measured, strategy: int) -> int:
    return sum(table.kinds[kind].costs[strategy].flops for kind in row.kinds)


def least_of(plan: ckptkern.Plan) -> int:
    with pytest.raises(BudgetError, match="wanted a step of at most 1 B") as error:
        plan.replan(1)
    return error.value.least


@pytest.mark.sampled
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients there", "no gradients"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_stays_within_the_budget_and_is_as_predicted(
    name: str, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table, "cost", flops_of)  # times of one round are noise
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model, given = make(), inputs()

    def reset() -> None:
        for p in (*model.parameters(), *given):
            p.grad = torch.zeros_like(p) if gradients and p.requires_grad else None

    reset()
    plan = ckptkern.plan(model, *given, budget="1GiB")
    least = least_of(plan)
    costs = []
    for budget in (least, *(int(least * factor) for factor in (1.05, 1.2, 1.5, 3))):
        plan.replan(budget)
        reset()
        measured = peak_of(model, given)
        assert plan.peak <= budget
        assert measured <= budget + SCALARS
        assert abs(plan.predicted - measured) <= 0.08 * measured  # 6.5 % was seen once, beside other work
        assert abs(plan.peak - measured) <= 0.01 * measured + SCALARS
        costs.append(plan.cost)
    assert sorted(costs, reverse=True) == costs, "more memory costs no more time"
    reset()


# Part of the peak by which a prediction may be wrong. The gradient of a sum has no memory, and that of a region alone does; so
# where the last region's output is summed, it counts one gradient too many.
SUMMED = dict.fromkeys(["ours", "llama layers", "encoder"], 0.05)
EXACT = dict.fromkeys(["head and loss", "peak at the loss"], 0.0)


@pytest.mark.parametrize("name", [*CASES, "peak at the loss"])
def test_every_choice_is_predicted(name: str) -> None:
    """Uniform ones and mixtures."""
    torch.manual_seed(0)
    if name == "peak at the loss":
        model, inputs = WithLoss(layers(), 4000), (sequence(), torch.randint(0, 4000, (2, 256)))
    else:
        make, given = CASES[name]
        model, inputs = make(), given()
    plan, draw = ckptkern.plan(model, *inputs, budget="1GiB"), random.Random(0)
    rows = plan.table.rows
    places = range(max(len(row.strategies) for row in rows))
    choices = [[min(place, len(row.strategies) - 1) for row in rows] for place in places]
    choices += [[draw.randrange(len(row.strategies)) for row in rows] for _ in range(6)]
    for chosen in choices:
        measured = plan.choices.measured(chosen)
        allowed = SCALARS + measured * (SUMMED | EXACT).get(name, 0.01)
        assert abs(plan.table.peak(chosen) - measured) <= allowed, chosen


def test_the_choice_is_the_cheapest_of_all() -> None:
    """Against every mixture of the modes of two layers."""
    model, x = layers(2), sequence()
    plan = ckptkern.plan(model, x, budget="1GiB")
    table = plan.table
    table.kinds[0].costs = [cost._replace(seconds=cost.flops / 1e9 + 1e-3) for cost in table.kinds[0].costs]
    choices = list(itertools.product(*(range(len(row.strategies)) for row in table.rows)))
    peaks = {choice: table.peak(choice) for choice in choices}
    low, high = min(peaks.values()), max(peaks.values())
    regret = []
    for i in range(1, 8):
        budget = low + (high - low) * i // 8
        try:
            plan.replan(budget)
        except BudgetError:
            regret.append(None)
            continue
        best = min(table.cost_of(choice) for choice in choices if peaks[choice] <= budget)
        regret.append(plan.cost / best - 1)
    assert None not in regret
    assert max(regret) <= 0.05


def test_budgets_that_nothing_meets_leave_the_model_as_it_was() -> None:
    model, x = layers(), sequence()
    with pytest.raises(BudgetError) as error:
        ckptkern.plan(model, x, budget=10)
    assert {layer.recompute for layer in model} == {"selective"}, "the default"
    assert ckptkern.plan(model, x, budget=error.value.least).peak <= error.value.least
    with pytest.raises(ValueError, match="budget bounds the peak and saved the saved bytes: give one of them"):
        ckptkern.plan(model, x, budget=10, saved=10)


def workspaces(model: nn.Module) -> set:
    return {m.workspace for layer in model for m in (layer, layer.self_attn, layer.mlp)}


def test_a_smaller_workspace_meets_a_budget_that_modes_alone_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_module = sys.modules["ckptkern.planning.plan"]
    tried, narrower = [], plan_module.narrower
    monkeypatch.setattr(plan_module, "narrower", lambda *given: tried.append(narrower(*given)) or tried[-1])
    model, x = layers(), sequence()
    model[1].workspace = 512
    plan = ckptkern.plan(model, x, budget="1GiB")
    assert not tried, "nothing could be quicker"
    assert plan.workspace is None
    assert workspaces(model) == {None, 512}, "left as it was"
    least = plan.choices.measured(plan.choices.lowest())
    plan.replan(int(0.7 * least))
    assert plan.workspace in {table.workspace for table in tried}
    assert peak_of(model, (x,)) <= 0.7 * least + SCALARS
    assert workspaces(model) == {plan.workspace, 512}, "that which was less already is left as it was"
    assert f"workspace: {memory.format_size(plan.workspace)}" in str(plan).splitlines()
    for one in (*model.parameters(), x):
        one.grad = None
    for mode in ("none", "selective"):
        chosen = plan.table.uniform(mode)
        assert abs(plan.table.peak(chosen) - plan.choices.measured(chosen)) <= 0.05 * plan.table.peak(chosen)
    plan.replan("1GiB")
    assert plan.workspace is None
    assert workspaces(model) == {None, 512}, "room for the quicker"
    chosen = plan.strategies
    with pytest.raises(BudgetError) as error:
        plan.replan(1)
    assert error.value.least < 0.7 * least
    assert (plan.strategies, workspaces(model)) == (chosen, {None, 512})


def test_a_smaller_workspace_that_leaves_room_for_a_quicker_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table, "cost", flops_of)
    model, x = layers(), sequence()
    plan = ckptkern.plan(model, x, budget="1GiB")
    first = plan.choices
    budget = first.measured(first.lowest())
    alone = first.table.cost_of(first.best(budget))
    plan.replan(budget)
    assert plan.workspace is not None
    assert plan.peak <= budget
    assert plan.cost <= 0.98 * alone


def test_a_model_that_convert_replaced_gets_its_workspace_back() -> None:
    model = model_of("llama")
    before = [vars(m).copy() for m in model.modules()]
    plan = ckptkern.plan(model, ids(), budget="1GiB")
    plan.table.workspaces.set(1024)
    assert {row.segment.forward.workspace for row in plan.table.rows} == {1024}
    ckptkern.revert(model)
    assert [vars(m).keys() for m in model.modules()] == [one.keys() for one in before]


def test_a_prediction_that_is_too_low_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = Table.peak
    monkeypatch.setattr(Table, "peak", lambda self, chosen: int(0.8 * predicted(self, chosen)))
    model, x = layers(), sequence()
    plan = ckptkern.plan(model, x, budget="1GiB")
    least = least_of(plan)
    for factor in (1, 1.2, 1.5):
        plan.replan(int(factor * least))
        x.grad = None
        for p in model.parameters():
            p.grad = None
        assert peak_of(model, (x,)) <= factor * least


def test_on_the_meta_device_as_on_the_cpu() -> None:
    peaks = {}
    for device in ("cpu", "meta"):
        plan = ckptkern.plan(layers(device=device), sequence(device=device), budget="1GiB")
        peaks[device] = [plan.choices.measured(plan.table.uniform(mode)) for mode in ("none", "selective", "full")]
    assert all(abs(a - b) <= 0.05 * a for a, b in zip(*peaks.values(), strict=True)), peaks


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rates are the times, and copies to the host are free as long as the region's own work is longer."""
    monkeypatch.setattr("ckptkern.planning.search.SMALLER", 0)
    to = {"device": "meta", "dtype": torch.bfloat16}
    model = nn.Sequential(*(ckptkern.nn.LlamaDecoderLayer(1024, 8, intermediate_size=4096, **to) for _ in range(3)))
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
    assert set(map(str, plan.strategies.values())) <= {"none", "none/none", "none/selective"}
    plan.replan(plan.choices.measured(plan.table.uniform("full")))
    assert plan.peak <= plan.budget
    fewest = ckptkern.plan(model, x, budget="1024GiB", device="a100")
    assert fewest.cost > 2 * 3 * min(cost.seconds for cost in costs), "a slower GPU"
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


def test_what_stands_at_the_peak() -> None:
    model, x = layers(), sequence()
    plan = ckptkern.plan(model, x, budget="1GiB")
    lines = str(plan).splitlines()
    assert f"peak of a step: {memory.format_size(plan.peak)} of a budget of 1 GiB" in lines
    largest = plan.standing[0]
    assert any(largest.what in line and line.endswith(largest.place) for line in lines)
    plan.replan(plan.choices.measured(plan.table.uniform("full")))  # others have kernels' own memory at their peak
    standing = plan.standing
    assert 0 <= plan.peak - sum(one.bytes for one in standing) <= 0.05 * plan.peak
    assert standing == sorted(standing, key=lambda one: -one.bytes)
    assert {one.place for one in standing} <= {"", "0", "1", "2", "3"}


def test_a_step_leaves_nothing_behind() -> None:
    model, x = layers(), sequence()
    model[0].mlp.up_proj.weight.main_grad = main = torch.ones_like(model[0].mlp.up_proj.weight)
    state = torch.get_rng_state()
    step_of(model, (x,), {}, [("0", model[0])], torch.device("cpu"))
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in (*model.parameters(), x))
    assert main.eq(1).all()
    assert not hasattr(model[0].mlp.up_proj.weight, "grad_added_to_main_grad")
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


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


def test_layers_that_are_alike_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    alone = measure.measure_alone
    monkeypatch.setattr(
        measure, "measure_alone", lambda kind, *others: found.append(kind.first.name) or alone(kind, *others)
    )
    ckptkern.plan(layers(6), sequence(), budget="1GiB")
    assert found == ["0"]


def test_adapting_follows_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [2**30]
    monkeypatch.setattr(memory, "free_memory", lambda device: free[0])
    monkeypatch.setattr("ckptkern.planning.search.SMALLER", 0)
    model, x = layers(), sequence()
    plan = ckptkern.plan(model, x, budget="1GiB", adapt=True)
    quick = plan.peak
    free[0] = least_of(plan)
    model.train()(x)
    assert plan.budget == free[0]
    assert plan.peak <= free[0] < quick
    plan.stop()


def test_stores_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkern.planning.search.SMALLER", 0)
    model, x = layers(), sequence()
    plan = ckptkern.plan(model, x, budget="1GiB", stores=[ckptkern.storage.offload(min_bytes=0)])
    plan.replan(least_of(plan))
    assert peak_of(model, (x,)) <= plan.peak
    for one in (*model.parameters(), x):
        one.grad = None
    assert stepped(plan.table, model, (x,), {}, plan.chosen).peak == plan.peak


def test_models_that_are_converted_first() -> None:
    model = model_of("llama")
    plan = ckptkern.plan(model, ids(), budget="1GiB")
    assert {row.segment.replaced_by for row in plan.table.rows} == {"transformer_layer"}


def test_a_model_is_converted_with_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_module = sys.modules["ckptkern.planning.plan"]
    sizes, convert = [], plan_module.convert

    def seen(model: nn.Module, *args: Tensor, **options: Any) -> ckptkern.Conversion:
        sizes.append(tuple(args[0].shape))
        return convert(model, *args, **options)

    monkeypatch.setattr(plan_module, "convert", seen)
    plan = ckptkern.plan(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(3, 70, 8), saved="1GiB"
    )
    assert sizes == [(2, 64, 8)]
    assert set(plan.strategies) == {""}
    sizes.clear()
    plan = ckptkern.plan(nn.Sequential(nn.Linear(70, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(3, 70), saved="1GiB")
    assert sizes == [(2, 64), (3, 70)], "features are no tokens"
    assert set(plan.strategies) == {""}
