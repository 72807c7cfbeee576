"""How a problem's implementations are timed: with which operands, and what is said of it."""

import pytest
import torch

from ckptkern.planning.timing import Clock
from ckptkern.tools import race

CPU = torch.device("cpu")
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


def test_steps_take_operands_by_turns(monkeypatch):
    """Gradients of results are among them: a step makes none."""
    inputs, seeds, forward, grad = [], [], race.forward, torch.autograd.grad

    def spied(outputs, leaves, dy):
        seeds.append(dy.data_ptr())
        return grad(outputs, leaves, dy)

    monkeypatch.setattr(race, "forward", lambda problem, t: inputs.append(t["x"].data_ptr()) or forward(problem, t))
    monkeypatch.setattr(torch.autograd, "grad", spied)
    monkeypatch.setattr(torch, "ones_like", lambda *given: 1 / 0)
    monkeypatch.setattr(race, "copies", lambda nbytes, cache: 3)
    one = race.Timed(PROBLEM, "eager", race.operands_of(PROBLEM, CPU), Clock(CPU))
    for _ in range(5):
        assert one() > 0
    assert inputs == [one.operands[n % 3][0]["x"].data_ptr() for n in range(6)]  # the first compiles
    assert seeds == [one.operands[n % 3][1].data_ptr() for n in range(6)]


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["linear_act", "mlp", "gated_mlp"])
def test_implementations_are_timed_on_a_gpu(op):
    """None is wrong, launches hide behind kernels, and operands are more than L2 holds."""
    device = torch.device("cuda", torch.cuda.current_device())
    problem = race.Problem(op, 1024, 0 if op == "linear_act" else 4096, 1024, torch.bfloat16, 8192)
    outcome = race.measure(problem, device, 0.5)
    assert outcome.ms.keys() == {"triton", "library"}
    assert not outcome.wrong
    assert outcome.ahead
    assert min(map(min, outcome.ms.values())) > 0
    operands = race.operands_of(problem, device)
    nbytes = sum(one.nbytes for leaves, dy in operands for one in (*leaves.values(), dy))
    assert nbytes > torch.cuda.get_device_properties(device).L2_cache_size
