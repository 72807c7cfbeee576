"""examples/expert_parallel.py, experts over several ranks, against one process with all experts, in float64."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from support.timeline import Timeline

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.ops.registration.functions import bodies_seen

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "expert_parallel.py"
TOKENS, D, HIDDEN, EXPERTS, TOP_K = 24, 8, 12, 8, 3


@pytest.mark.parametrize(("n", "uneven"), [(2, True), (4, False), pytest.param(4, True, marks=pytest.mark.long)])
@on_ranks()
def test_experts_over_ranks(rank, n, uneven):
    torch.manual_seed(0)
    x, dy = torch.randn(2, n, TOKENS, D, dtype=torch.float64).unbind()
    router = torch.randn(EXPERTS, D, dtype=torch.float64)
    if uneven:  # some experts get all tokens, and most none
        router[TOP_K:] = 0
        x.abs_()
        router[:TOP_K].abs_()
    w, wd = torch.randn(EXPERTS, 2 * HIDDEN, D).double(), torch.randn(EXPERTS, D, HIDDEN).double()
    own = slice(rank * EXPERTS // n, (rank + 1) * EXPERTS // n)

    layer = runpy.run_path(str(EXAMPLE))["Experts"](D, HIDDEN, EXPERTS, TOP_K).double()
    with torch.no_grad():
        for parameter, value in ((layer.router.weight, router), (layer.gate_up, w[own]), (layer.down, wd[own])):
            parameter.copy_(value)
    mine = x[rank].clone().requires_grad_()
    with saved_tensors([*layer.parameters(), mine]) as saved:
        y = layer(mine)
    with bodies_seen(), Timeline() as timeline:
        y.backward(dy[rank])
    assert len(timeline.collectives) == 3, "of results, rows and weights, and none in recompute"
    assert not any("topk" in step.name or "sigmoid_" in step.name for step in timeline.steps), str(timeline)
    widest = max(tensor[0][-1] for tensor in saved.tensors if len(tensor[0]) == 2)
    assert widest == D, "no hidden row is saved"

    parameters = [tensor.clone().requires_grad_() for tensor in (x.flatten(0, 1), router, w, wd)]
    weights, index = (parameters[0] @ parameters[1].t()).softmax(-1).topk(TOP_K)
    expected = ckptkern.moe_mlp(parameters[0], index, weights, *parameters[2:])
    dx, drouter, dw, dwd = torch.autograd.grad(expected, parameters, dy.flatten(0, 1))
    dist.all_reduce(layer.router.weight.grad)
    for ours, theirs in (
        (y, expected.view_as(x)[rank]),
        (mine.grad, dx.view_as(x)[rank]),
        (layer.router.weight.grad, drouter),
        (layer.gate_up.grad, dw[own]),
        (layer.down.grad, dwd[own]),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
