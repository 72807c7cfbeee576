"""ckptkern.plan: what it predicts is what is saved, and what it applies trains as before."""

import copy
import pickle
import random
import sys

import pytest
import torch
from support.architectures import ids
from support.planned import MODELS, NAMES, Convolutions, model_of
from support.ranks import Ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import ckptkern
from ckptkern import memory
from ckptkern.errors import BudgetError
from ckptkern.planning import agree, measure
from ckptkern.planning.measure import record
from ckptkern.planning.segments import Strategy, segments_of
from ckptkern.planning.table import Table

pytest.importorskip("scipy")


def counted(model: nn.Module, x: Tensor) -> int:
    """saved_tensors in training mode, the random state as before."""
    with torch.random.fork_rng(), memory.saved_tensors(model) as found:
        model.train()(x)
    return found.bytes


def least_of(plan: ckptkern.Plan) -> int:
    try:
        plan.replan(0)
    except BudgetError as error:
        return error.least
    return 0


@pytest.mark.parametrize("name", MODELS)
def test_what_is_predicted_is_saved(name: str) -> None:
    make, inputs = MODELS[name]
    model, x = make(), inputs()
    stores = [ckptkern.storage.offload(min_bytes=0), ckptkern.storage.compress("int8", min_bytes=256)]
    plan = ckptkern.plan(model, x, saved="1GiB", stores=stores)
    assert plan.saved == counted(model, x)
    draw = random.Random(0)
    for _ in range(12):  # any mixture, not only those that are optimal
        chosen = [draw.randrange(len(row.strategies)) for row in plan.table.rows]
        for row, strategy in zip(plan.table.rows, chosen, strict=True):
            row.segment.set(row.strategies[strategy])
        assert plan.table.saved(chosen) == counted(model, x), chosen
    largest, least = plan.table.saved([0] * len(plan.table.rows)), least_of(plan)
    costs = []
    for budget in (largest, largest // 2, largest // 3):
        plan.replan(max(budget, least))
        costs.append(plan.cost)
        assert plan.saved == counted(model, x)
        assert plan.saved <= plan.budget
    assert costs == sorted(costs)


class Calls(nn.Module):
    """Calls its regions in ways of which one region alone may show too little."""

    def __init__(self, how: str):
        super().__init__()
        kinds = [ckptkern.nn.LlamaDecoderLayer(16, 2, intermediate_size=24) for _ in range(2)]
        self.layers, self.act, self.how = nn.ModuleList(kinds), ckptkern.nn.Linear(16, 16, activation="relu"), how
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh())])  # copies what has gaps

    def forward(self, x: Tensor) -> Tensor:
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
def test_what_is_predicted_is_saved_however_a_region_is_called(how: str) -> None:
    torch.manual_seed(0)
    model, x = Calls(how), torch.randn(2, 6, 16, requires_grad=True)
    plan = ckptkern.plan(model, x, saved="1GiB")
    rows, draw = plan.table.rows, random.Random(0)
    for _ in range(12):
        chosen = [draw.randrange(len(row.strategies)) for row in rows]
        for row, strategy in zip(rows, chosen, strict=True):
            row.segment.set(row.strategies[strategy])
        assert plan.table.saved(chosen) == counted(model, x), chosen


def test_a_region_that_is_called_twice_costs_twice() -> None:
    table = ckptkern.plan(Convolutions(), torch.randn(2, 4, 6, requires_grad=True), saved="1GiB").table
    assert [len(row.kinds) for row in table.rows] == [2, 1, 1]
    first = table.rows[0]
    assert len(set(first.kinds)) == 1
    assert table.cost(first, 0) == 2 * table.kinds[first.kinds[0]].costs[0].seconds > 0


@pytest.mark.parametrize("name", [*NAMES, "convolutions"])
def test_a_planned_model_trains_as_before(name: str) -> None:
    make, inputs = MODELS[name]
    model, x = make().train(), inputs()
    unfused = copy.deepcopy(model)
    plan = ckptkern.plan(model, x, saved="1GiB", stores=[ckptkern.storage.offload(min_bytes=0)])
    expected = torch.autograd.grad(unfused(x).square().mean(), list(unfused.parameters()), allow_unused=True)
    strategies = {strategy for row in plan.table.rows for strategy in range(len(row.strategies))}
    for strategy in sorted(strategies):
        for row in plan.table.rows:
            row.segment.set(row.strategies[min(strategy, len(row.strategies) - 1)])
        found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), allow_unused=True)
        torch.testing.assert_close(found, expected)


def test_planning_leaves_nothing_behind() -> None:
    model = model_of("llama").eval()
    model.layers[0].train()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    modes = [m.training for m in model.modules()]
    state, values = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    ckptkern.plan(model, ids(), saved="1GiB", stores=[ckptkern.storage.offload()])
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_measuring_holds_nothing() -> None:
    """A model that does not fit can be measured: what its layers keep is freed at once."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    seen: list[StorageWeakRef] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(StorageWeakRef(output.untyped_storage())))
    alive: list[bool] = []
    model[2].register_forward_hook(lambda module, args, output: alive.append(not seen[-1].expired()))
    found = record(model, (torch.randn(4, 8, requires_grad=True),), {}, [])
    assert found.rest.bytes == 4 * 4 * 8 * 4, "the input of each linear layer and the last tanh's output"
    assert alive == [False]
    y = model(torch.randn(4, 8, requires_grad=True))
    assert alive[1]
    assert y.requires_grad


def test_the_least_that_would_fit() -> None:
    model, x = model_of("llama"), ids()
    plan = ckptkern.plan(model, x, saved="1GiB")
    strategies = plan.strategies
    with pytest.raises(BudgetError, match=r"wanted at most 10 B \(10 bytes\) .* but the least") as error:
        plan.replan(10)
    assert plan.strategies == strategies, "nothing changed"
    plan.replan(error.value.least)
    assert counted(model, x) == error.value.least
    assert pickle.loads(pickle.dumps(error.value)).least == error.value.least
    model = model_of("llama")
    with pytest.raises(BudgetError):
        ckptkern.plan(model, x, saved=error.value.least - 1)
    assert not segments_of(model), "as before"


def test_a_plan_is_shown() -> None:
    plan = ckptkern.plan(model_of("llama"), ids(), saved="1GiB")
    lines = str(plan).splitlines()
    assert lines[0].split() == ["region", "strategy", "chosen", "saved", "time", "GFLOP", "transient"]
    assert lines[1].startswith("layers.* (2)  none")
    assert any(line.split()[0] == "selective/none" for line in lines)
    assert lines[-1].startswith("saved: ")
    assert "of a budget of 1 GiB" in lines[-1]


def test_a_converted_model_is_planned_as_it_is() -> None:
    model = model_of("llama")
    ckptkern.convert(model, ids(), include="layers.1")
    before = model.layers[1].forward
    plan = ckptkern.plan(model, ids(), saved="1GiB")
    assert model.layers[1].forward is before
    assert set(plan.strategies) == {"layers.0", "layers.1"}, "the other is an activation checkpoint, or none"
    plan.replan(plan.table.saved(plan.table.uniform("full")))
    ckptkern.revert(model)
    assert not segments_of(model)


def test_include_and_exclude() -> None:
    assert set(ckptkern.plan(model_of("llama"), ids(), saved="1GiB", exclude="layers.0").strategies) == {"layers.1"}
    assert set(ckptkern.plan(model_of("llama"), ids(), saved="1GiB", include="layers.0").strategies) == {"layers.0"}


def test_blocks_that_no_second_forward_may_run_are_no_regions() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)) for _ in range(2)), nn.Conv1d(4, 4, 1))
    plan = ckptkern.plan(model, torch.randn(2, 4, 6), saved="1GiB")
    assert plan.strategies == {}
    assert plan.saved == counted(model, torch.randn(2, 4, 6))
    assert torch.equal(model[0][1].running_mean, torch.zeros(4)) is False, "counted above, and not by plan"


def test_on_the_meta_device_matmuls_are_what_counts() -> None:
    def layers(device: str) -> nn.Module:
        layer = [ckptkern.nn.LlamaDecoderLayer(16, 2, intermediate_size=24, device=device) for _ in range(3)]
        return nn.Sequential(*layer)

    x = torch.empty(2, 5, 16, device="meta", requires_grad=True)
    plan = ckptkern.plan(layers("meta"), x, saved="1GiB")
    assert {str(strategy) for strategy in plan.strategies.values()} <= {"none", "none/selective"}, (
        "no matmul is recomputed"
    )
    real = ckptkern.plan(layers("cpu"), torch.randn(2, 5, 16, requires_grad=True), saved="1GiB")
    for ours, theirs in zip(plan.table.rows, real.table.rows, strict=True):
        assert [held.bytes for held in ours.held] == [held.bytes for held in theirs.held]
        assert [cost.flops for cost in plan.table.kinds[0].costs] == [cost.flops for cost in real.table.kinds[0].costs]
    selective = plan.table.uniform("selective")
    plan.replan(plan.table.saved(selective))
    rows = zip(plan.table.rows, selective, strict=True)
    assert 0 < plan.cost <= sum(plan.table.cost(row, strategy) for row, strategy in rows)
    with pytest.raises(ValueError, match="the meta device, which has no memory to fill: wanted a budget"):
        ckptkern.plan(layers("meta"), x)


def test_a_copy_keeps_the_modes_and_not_the_stores() -> None:
    model, x = model_of("llama"), ids()
    plan = ckptkern.plan(model, x, saved="1GiB", stores=[ckptkern.storage.offload(min_bytes=0)])
    for row in plan.table.rows:
        row.segment.set(Strategy("full", plan.table.rows[0].strategies[-1].store))
    other = copy.deepcopy(model)
    assert [segment.strategy for segment in segments_of(other)] == [Strategy("full")] * 2
    assert counted(other, x) > counted(model, x)


def test_under_autocast() -> None:
    model, x = model_of("llama").train(), ids()
    with torch.autocast("cpu", torch.bfloat16):
        plan = ckptkern.plan(model, x, saved="1GiB")
        for row in plan.table.rows:
            row.segment.set(Strategy("full"))
        chosen = plan.table.uniform("full")
        with memory.saved_tensors(model) as found:
            model(x)
    assert found.bytes == plan.table.saved(chosen)
    predicted = plan.saved
    plan.replan(plan.budget)
    with torch.autocast("cpu", torch.bfloat16), memory.saved_tensors(model) as found:
        model(x)
    assert found.bytes == predicted


def test_a_weight_that_autocast_casts_once_for_two_regions() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    model[2][0].weight = model[1][0].weight
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        plan = ckptkern.plan(model, x, saved="1GiB", exclude="0")
        for row in plan.table.rows:
            row.segment.set(Strategy("none"))
        with memory.saved_tensors(model) as found:
            model(x)
    copy_of_weight = 8 * 8 * 2
    assert plan.table.saved(plan.table.uniform("none")) == found.bytes + copy_of_weight, "counted in both"


# -- between steps


def test_the_plan_follows_the_room_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [2**40]
    monkeypatch.setattr(memory, "free_memory", lambda device: free[0])
    # by measured times any strategy may win on a busy machine
    monkeypatch.setattr(
        Table, "cost", lambda self, row, strategy: self.kinds[row.kinds[0]].costs[strategy].flops * len(row.kinds)
    )
    model, x = model_of("llama"), ids()
    gradients = sum(p.nbytes for p in model.parameters())
    plan = ckptkern.plan(model, x, saved=20_000, adapt=True)
    assert plan.budget == 20_000
    roomy = plan.saved

    def step_with(room: int) -> int:
        free[0] = room + plan.transient + gradients
        found = counted(model, x)
        assert found == plan.saved
        return found

    assert step_with(2**40) == roomy
    full = plan.table.saved(plan.table.uniform("full"))
    tight = step_with(full + 100)
    assert tight <= full + 100 < roomy
    model.eval()
    free[0] = 2**40
    model(x)
    assert plan.saved == tight, "evaluation saves nothing"
    with torch.no_grad():
        model.train()(x)
    assert plan.saved == tight
    assert step_with(2**40) == roomy
    assert plan.budget == 20_000, "at most what was given"
    with pytest.warns(UserWarning, match="may not fit"):
        least = step_with(10)
    assert least <= tight
    plan.stop()
    free[0] = 2**40
    counted(model, x)
    assert plan.saved == least


def test_without_a_budget_it_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of("llama"), ids()
    gradients = sum(p.nbytes for p in model.parameters())
    model.layers[0].requires_grad_(False)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**6 + trained)
    plan = ckptkern.plan(model, x)
    assert trained < gradients
    assert plan.budget <= 10**6
    assert plan.budget == 10**6 - max(plan.table.transients(plan.table.uniform("full")))


# -- what callers get wrong


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((), {"budget": 10}, TypeError, "wanted the inputs of a training step"),
        ((ids(),), {"budget": "lots"}, ValueError, "budget must be a number of bytes, or a size such as"),
        ((ids(),), {"budget": -1}, ValueError, "budget must be"),
        ((ids(),), {"budget": True}, ValueError, "budget must be"),
        ((ids(),), {"budget": 0.5}, ValueError, "budget must be"),
        ((ids(),), {"budget": 10, "stores": [3]}, TypeError, "stores must hold stores such as"),
    ],
)
def test_wrong_arguments(arguments: tuple, options: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        ckptkern.plan(model_of("llama"), *arguments, **options)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not int"):
        ckptkern.plan(3, ids(), saved=10)


def test_a_compiled_model_is_refused() -> None:
    for call in (ckptkern.plan, ckptkern.report):
        with pytest.raises(ValueError, match=rf"{call.__name__} first, then compile"):
            call(torch.compile(model_of("llama")), ids())


def test_a_strategy_in_which_one_region_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not chosen, and the others are measured."""
    run = measure.watched_alone

    def watched_alone(module: nn.Module, *arguments: object) -> tuple:
        if any(str(segment.strategy).startswith("none") for segment in segments_of(module)):
            raise torch.OutOfMemoryError
        return run(module, *arguments)

    monkeypatch.setattr(measure, "watched_alone", watched_alone)
    plan = ckptkern.plan(model_of("llama"), ids(), saved="1GiB", stores=[ckptkern.storage.offload()])
    assert not any(str(strategy).startswith("none") for strategy in plan.strategies.values())
    assert plan.cost < float("inf")
    assert "does not fit" in str(plan)


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["ckptkern.planning.plan"], "missing", lambda *packages: "scipy is not installed: pip install scipy"
    )
    with pytest.raises(ImportError, match="scipy is not installed"):
        ckptkern.plan(model_of("llama"), ids(), saved=10)


# -- two ranks


def _check_ranks(rank: int) -> None:
    model = model_of("llama")
    many = torch.cat([ids(seed) for seed in range(1 + rank)])  # the second rank has more samples
    plan = ckptkern.plan(model, many, saved=45_000)
    strategies = [{name: str(strategy) for name, strategy in plan.strategies.items()}]
    theirs: list = [None, None]
    torch.distributed.all_gather_object(theirs, (strategies, plan.saved, plan.cost))
    assert theirs[0] == theirs[1]
    mine = counted(model, many)
    assert mine <= plan.saved
    assert rank == 0 or mine == plan.saved

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("no")

    with pytest.raises(
        (ArithmeticError, RuntimeError), match=r"no" if rank else r"rank 1 of the group failed with .*no"
    ):
        ckptkern.plan(Fails() if rank else nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), saved=10)
    with pytest.raises(RuntimeError, match="has other regions"):
        ckptkern.plan(model_of("gpt" if rank else "llama"), ids(), saved="1GiB")
    # the room of the rank that has least
    assert agree.least_of(10 + rank, torch.device("cpu"), None) == 10


def test_two_ranks_choose_alike(ranks: Ranks) -> None:
    ranks.run(2, _check_ranks)


def _check_sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of("llama")
    fully_shard(model.layers[0], mesh=init_device_mesh("cpu", (2,)))
    wrapped = nn.parallel.DistributedDataParallel(model_of("gpt"))
    for call in (ckptkern.plan, ckptkern.report):
        with pytest.raises(ValueError, match=rf"{call.__name__} first, then shard"):
            call(model, ids())
        with pytest.raises(ValueError, match=rf"{call.__name__} first, then wrap"):
            call(wrapped, ids())


def test_a_sharded_model_is_refused(ranks: Ranks) -> None:
    ranks.run(2, _check_sharded)
