"""How a problem's implementations are timed: with which operands, alike, and what is said of it."""

import types

import pytest
import torch

from ckptkern.ops.dispatch import choices as _choices
from ckptkern.planning.timing import Clock
from ckptkern.tools import autotune, race

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)  # of the latter only the name
PROBLEM = race.Problem("mlp", 24, 40, 16, torch.float16, 32)


@pytest.mark.parametrize("cache", [0, 1, 40_000])
def test_operands_exceed_the_cache(cache, monkeypatch):
    monkeypatch.setattr(race, "cache_of", lambda device: cache)
    operands = race.operands_of(PROBLEM, CPU)
    sizes = {sum(one.nbytes for one in leaves.values()) + dy.nbytes for leaves, dy in operands}
    assert len(sizes) == 1
    assert (len(operands) - 1) * sizes.pop() >= cache
    storages = [one.data_ptr() for leaves, dy in operands for one in (*leaves.values(), dy)]
    assert len(set(storages)) == 6 * len(operands)
    first, _ = operands[0]
    for leaves, dy in operands:
        assert dy.shape == (32, 16)
        for name, one in leaves.items():
            assert one.is_leaf
            assert one.requires_grad
            assert torch.equal(one, first[name])


@pytest.fixture
def steps(monkeypatch):
    """(inputs of every forward, gradients of every backward), by address."""
    inputs, seeds = [], []
    forward, grad = race.forward, torch.autograd.grad

    def spied(outputs, leaves, dy):
        seeds.append(dy.data_ptr())
        return grad(outputs, leaves, dy)

    monkeypatch.setattr(race, "forward", lambda problem, t: inputs.append(t["x"].data_ptr()) or forward(problem, t))
    monkeypatch.setattr(torch.autograd, "grad", spied)
    return inputs, seeds


def timed(copies: int, monkeypatch) -> race.Timed:
    monkeypatch.setattr(race, "copies", lambda nbytes, cache: copies)
    return race.Timed(PROBLEM, "eager", race.operands_of(PROBLEM, CPU), Clock(CPU))


def test_steps_take_operands_by_turns(monkeypatch, steps):
    """Gradients of results are among them: a step makes none."""
    monkeypatch.setattr(torch, "ones_like", lambda *given: 1 / 0)
    one = timed(3, monkeypatch)
    for _ in range(5):
        assert one() > 0
    inputs, seeds = steps
    assert inputs == [one.operands[n % 3][0]["x"].data_ptr() for n in range(6)]  # the first compiles
    assert seeds == [one.operands[n % 3][1].data_ptr() for n in range(6)]


def test_a_graph_has_a_step_with_each_of_the_operands(monkeypatch, steps):
    """Captured and replayed as on a GPU, but for the graph."""
    monkeypatch.setattr(race, "captured", lambda step, warm_up, pool: warm_up() or step)
    one = timed(3, monkeypatch)
    one.capture(None)
    inputs, _ = steps
    assert len(inputs) == 2
    inputs.clear()
    one.clock = lambda prepare: prepare()() or 0.006
    assert one() == pytest.approx(2.0)  # ms of one step
    assert sorted(inputs) == sorted(leaves["x"].data_ptr() for leaves, _ in one.operands)


class Step:
    """A step that can be captured, or not."""

    def __init__(self, fails: bool = False):
        self.replay, self.fails = None, fails

    def capture(self, pool):
        if self.fails:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        self.replay = pool

    def __call__(self):
        return 1.0


def raced(*failing: str) -> race.Race:
    one = race.Race(race.Outcome(PROBLEM, "triton"), CUDA)
    one.pool = "pool"
    one.steps = {name: Step(name in failing) for name in ("triton", "dual", "library")}
    one.run(0.0)
    return one


def test_implementations_are_timed_alike():
    """In graphs, or none of them: a graph's kernels follow each other more closely."""
    one = raced()
    assert {step.replay for step in one.steps.values()} == {"pool"}
    assert one.outcome.timed == "kernels, in CUDA graphs"
    one = raced("dual")
    assert {step.replay for step in one.steps.values()} == {None}
    why = "(dual is not captured, RuntimeError: operation not permitted)"
    assert one.outcome.timed == f"kernels, launched ahead {why}"
    one.steps["persistent"] = Step()
    one.run(0.0)
    assert one.steps["persistent"].replay is None
    one.clock.ahead = False
    one.run(0.0)
    assert one.outcome.timed == f"kernels and the host, for which a step waits {why}"
    assert one.outcome.timed in autotune.line(one.outcome)
    assert [row["timed"] for row in autotune.rows_of([one.outcome])] == [[one.outcome.timed]]


def test_a_step_that_is_made_later_is_captured_then():
    one = raced()
    first, one.pool = one.steps["triton"], "another"
    one.steps["persistent"] = Step()
    one.run(0.0)
    assert (first.replay, one.steps["persistent"].replay) == ("pool", "another")


def test_on_a_cpu_it_is_the_clock_on_the_wall():
    outcome = race.measure(PROBLEM, CPU, 0.0)
    assert outcome.timed == "wall clock"
    assert not outcome.few


@pytest.mark.parametrize(("tokens", "few"), [(1, True), (1664, True), (1665, False)])
def test_which_problems_have_few_rows(tokens, few, monkeypatch):
    """As the look-up has it, of matmuls of 16 bits on the kernels."""
    problem = race.Problem("mlp", 2048, 8192, 2048, torch.bfloat16, tokens)
    x = types.SimpleNamespace(dtype=problem.dtype, device=CPU, is_cpu=True, is_cuda=False, numel=lambda: 2048 * tokens)
    with _choices.backend("triton"):
        assert problem.few(CPU) == few
        assert not problem._replace(dtype=torch.float32).few(CPU)
        monkeypatch.setattr(_choices, "_impl", lambda *key: (_choices.few_rows(*key[1:]), "few", "many"))
        assert _choices.choose_impl("mlp", x, 2048, 8192, 2048) == ("few" if few else "many")
    assert not problem.few(CPU)


@pytest.mark.gpu
def test_implementations_are_captured_on_a_gpu():
    """All that run at all, with few rows and many; operands are more than L2 holds."""
    device = torch.device("cuda", torch.cuda.current_device())
    for tokens in (128, 8192):
        problem = race.Problem("gated_mlp", 1024, 4096, 1024, torch.bfloat16, tokens)
        outcome = race.measure(problem, device, 0.5, deadline=0.0)
        assert len(outcome.left) > 1
        outcome = race.measure(problem, device, 0.5)
        assert outcome.timed == "kernels, in CUDA graphs"
        assert not outcome.left
        operands = race.operands_of(problem, device)
        nbytes = sum(one.nbytes for leaves, dy in operands for one in (*leaves.values(), dy))
        assert nbytes > torch.cuda.get_device_properties(device).L2_cache_size
