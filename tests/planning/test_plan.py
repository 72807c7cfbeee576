"""ckptkern.plan by saved bytes: its table and its text, what it leaves as it was, several ranks, and what it refuses."""

import copy
import itertools
import pickle
import sys

import pytest
import torch
from support.architectures import ids
from support.planned import counted, model_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ckptkern
from ckptkern import memory
from ckptkern.errors import BudgetError
from ckptkern.planning import measure, table
from ckptkern.planning.segments import Strategy, segments_of

pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def llama():
    """A plan of a converted model of two layers, with a store. Its tests plan again."""
    return ckptkern.plan(model_of("llama"), ids(), saved="1GiB", stores=[ckptkern.storage.offload(min_bytes=0)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "report", "certify"])
def test_what_is_measured_is_as_before(name):
    model = model_of("llama").eval()
    model.layers[0].train()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False  # Megatron-LM's sums of gradients
    modes = [m.training for m in model.modules()]
    state, values = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    options = {"plan": {"saved": "1GiB", "stores": [ckptkern.storage.offload()]}}.get(name, {})
    getattr(ckptkern, name)(model, ids(), **options)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    for p in model.parameters():
        assert torch.equal(p.grad, torch.ones_like(p))
        assert not p.main_grad.any()
        assert not p.grad_added_to_main_grad
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert bool(segments_of(model)) == (name == "plan")
    ckptkern.revert(model)
    model.train()(ids()).sum().backward()
    assert not any(torch.equal(p.grad, torch.ones_like(p)) for p in model.layers.parameters())


def test_the_layers_of_a_stack_are_planned():
    """A LayerStack has no mode of its own; its layers have."""
    stack = ckptkern.nn.LayerStack([ckptkern.nn.MLP(8, 32) for _ in range(2)], every=2)
    assert {*ckptkern.plan(stack, torch.randn(16, 8), budget="1MiB").strategies} == {"0", "1"}


def test_measuring_holds_nothing():
    """A model that does not fit can be measured: what its layers save is freed at once."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    seen, alive = [], []
    model[0].register_forward_hook(lambda module, args, output: seen.append(StorageWeakRef(output.untyped_storage())))
    model[2].register_forward_hook(lambda module, args, output: alive.append(not seen[-1].expired()))
    step = table.Example("plan", model, ((torch.randn(4, 8, requires_grad=True),), {})).step(backs=False)
    assert step.saved == 4 * 4 * 8 * 4, "the input of each linear layer and the last tanh's output"
    y = model(torch.randn(4, 8, requires_grad=True))
    assert y.requires_grad
    assert alive == [False, True]


@pytest.mark.slow
def test_the_least_that_would_fit(llama):
    llama.replan("1GiB")
    strategies = llama.strategies
    with pytest.raises(
        BudgetError, match=r"budget of saved tensors is 10 B \(10 bytes\), but the model saves at least"
    ) as error:
        llama.replan(10)
    assert llama.strategies == strategies, "nothing changed"
    least = error.value.least
    llama.replan(least)
    assert counted(llama.model, ids()) == least
    assert pickle.loads(pickle.dumps(error.value)).least == least
    model = model_of("llama")
    with pytest.raises(BudgetError):
        ckptkern.plan(model, ids(), saved=10)
    assert not segments_of(model), "as before"


def test_a_plan_is_shown(llama):
    llama.replan("1GiB")
    lines = str(llama).splitlines()
    assert lines[0].split() == ["region", "replaced", "by", "strategy", "chosen", "saved", "time", "GFLOP", "transient"]
    assert lines[1].startswith("layers.* (2)  transformer_layer  none")
    assert any(line.split()[0] == "selective/none" for line in lines)
    assert lines[-1].startswith("saved: ")
    assert "of a budget of 1 GiB" in lines[-1]


def test_a_copy_keeps_the_modes_and_not_the_stores(llama):
    for row in llama.table.rows:
        row.segment.set(Strategy("full", llama.table.rows[0].strategies[-1].store))
    other = copy.deepcopy(llama.model)
    assert [segment.strategy for segment in segments_of(other)] == [Strategy("full")] * 2
    assert counted(other, ids()) > counted(llama.model, ids())


def test_a_converted_model_is_planned_as_it_is():
    model = model_of("llama")
    ckptkern.convert(model, ids(), include="layers.1")
    before = model.layers[1].forward
    plan = ckptkern.plan(model, ids(), saved="1GiB")
    assert model.layers[1].forward is before
    assert set(plan.strategies) == {"layers.0", "layers.1"}, "the other is an activation checkpoint, or none"
    plan.replan(plan.table.saved(plan.table.uniform("full")))
    ckptkern.revert(model)
    assert not segments_of(model)


@pytest.mark.parametrize(("option", "layer"), [("exclude", "layers.1"), ("include", "layers.0")])
def test_include_and_exclude(option, layer):
    plan = ckptkern.plan(model_of("llama"), ids(), saved="1GiB", **{option: "layers.0"})
    assert set(plan.strategies) == {layer}


def test_blocks_with_running_statistics_are_regions():
    model = nn.Sequential(*(nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)) for _ in range(2)), nn.Conv1d(4, 4, 1))
    theirs, x = copy.deepcopy(model), torch.randn(2, 4, 6)
    plan = ckptkern.plan(model, x, saved="600B")
    assert plan.strategies == {"0": Strategy("full"), "1": Strategy("full")}
    for m in (model, theirs):
        m(x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), theirs.buffers(), strict=True))


def test_a_strategy_in_which_one_region_does_not_fit(monkeypatch):
    """It is not chosen, and the others are measured."""
    run = measure.watched_alone

    def watched_alone(module, *arguments):
        if any(str(segment.strategy).startswith("none") for segment in segments_of(module)):
            raise torch.OutOfMemoryError
        return run(module, *arguments)

    monkeypatch.setattr(measure, "watched_alone", watched_alone)
    plan = ckptkern.plan(model_of("llama"), ids(), saved="1GiB", stores=[ckptkern.storage.offload()])
    assert not any(str(strategy).startswith("none") for strategy in plan.strategies.values())
    assert plan.cost < float("inf")
    assert "does not fit" in str(plan)


# -- between steps


def test_the_plan_follows_the_room_on_the_device(monkeypatch):
    free = [2**40]
    monkeypatch.setattr(memory, "free_memory", lambda device: free[0])
    model, x = model_of("llama"), ids()
    gradients = sum(p.nbytes for p in model.parameters())
    plan = ckptkern.plan(model, x, saved=20_000, adapt=True)
    assert plan.budget == 20_000
    roomy = plan.saved

    def step_with(room):
        free[0] = room + plan.transient + gradients
        saved = counted(model, x)
        assert saved == plan.saved
        return saved

    full = plan.table.saved(plan.table.uniform("full")) + 100
    assert step_with(2**40) == roomy
    tight = step_with(full)
    assert tight <= full < roomy
    free[0] = 2**40
    model.eval()(x)
    with torch.no_grad():
        model.train()(x)
    assert plan.saved == tight, "neither saves anything"
    assert step_with(2**40) == roomy
    assert plan.budget == 20_000, "at most what was given"
    with pytest.warns(UserWarning, match="may not fit"):
        least = step_with(10)
    assert least <= tight
    plan.adapting.remove()
    free[0] = 2**40
    counted(model, x)
    assert plan.saved == least


def test_without_a_budget_it_is_what_is_free(monkeypatch):
    model, x = model_of("llama"), ids()
    model.layers[0].requires_grad_(False)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**6 + trained)
    plan = ckptkern.plan(model, x)
    assert plan.budget == 10**6 - plan.table.transient(plan.table.uniform("full")) < 10**6


# -- what callers get wrong


def test_wrong_arguments():
    model, size = model_of("llama"), "budget must be a number of bytes, or a size such as"
    both = "budget bounds the peak and saved the saved bytes: give one"
    for kind, message, options in (
        *((ValueError, size, {"budget": wrong}) for wrong in ("lots", -1, True, 0.5)),
        (TypeError, "stores must hold stores such as", {"budget": 10, "stores": [3]}),
        (ValueError, both, {"budget": 10, "saved": 10}),
    ):
        with pytest.raises(kind, match=message):
            ckptkern.plan(model, ids(), **options)
    for call, (kind, message, *arguments) in itertools.product(
        (ckptkern.plan, ckptkern.report),
        (
            (TypeError, r"model must be a torch.nn.Module, not int", 3, ids()),
            (TypeError, "example inputs are missing", model),
            (ValueError, "{} first, then compile", torch.compile(model), ids()),
        ),
    ):
        with pytest.raises(kind, match=message.format(call.__name__)):
            call(*arguments)
    with pytest.raises(ValueError, match="wanted an output with a gradient"):
        ckptkern.report(nn.Sequential(ckptkern.nn.MLP(8, 16)).requires_grad_(False), torch.randn(3, 8))


def test_without_scipy(monkeypatch):
    monkeypatch.setattr(
        sys.modules["ckptkern.planning.plan"], "missing", lambda *packages: "scipy is not installed: pip install scipy"
    )
    with pytest.raises(ImportError, match="scipy is not installed"):
        ckptkern.plan(model_of("llama"), ids(), saved=10)


# -- two ranks


def _check_ranks(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    measure.ROUNDS = 1
    model = model_of("llama")
    many = torch.cat([ids(seed) for seed in range(1 + rank)])  # the second rank has more samples
    plan = ckptkern.plan(model, many, saved=45_000)
    strategies = [{name: str(strategy) for name, strategy in plan.strategies.items()}]
    theirs = [None, None]
    torch.distributed.all_gather_object(theirs, (strategies, plan.saved, plan.cost))
    assert theirs[0] == theirs[1]
    mine = counted(model, many)
    assert mine <= plan.saved
    assert rank == 0 or mine == plan.saved

    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError("no")

    errors, message = (ArithmeticError, RuntimeError), r"no" if rank else r"rank 1 of the group failed with .*no"
    with pytest.raises(errors, match=message):
        ckptkern.plan(Fails() if rank else nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), saved=10)
    with pytest.raises(RuntimeError, match="has other regions"):
        ckptkern.plan(model_of("gpt" if rank else "llama"), ids(), saved="1GiB")
    assert table.gathered(10 + rank, None) == [10, 11]

    model = model_of("llama")
    fully_shard(model.layers[0], mesh=init_device_mesh("cpu", (2,)))
    wrapped = nn.parallel.DistributedDataParallel(model_of("gpt"))
    for call in (ckptkern.plan, ckptkern.report):
        with pytest.raises(ValueError, match=rf"{call.__name__} first, then shard"):
            call(model, ids())
        with pytest.raises(ValueError, match=rf"{call.__name__} first, then wrap"):
            call(wrapped, ids())


def test_two_ranks_choose_alike_and_a_sharded_model_is_refused(ranks):
    ranks.run(2, _check_ranks)
