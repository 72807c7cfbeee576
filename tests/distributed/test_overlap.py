"""What the collectives of tensor parallelism run under, by the order of events, on gloo processes."""

from collections.abc import Callable

import pytest
import torch
from distributed.test_data_parallel import sharded
from support.architectures import GPT, ids
from support.ranks import on_ranks
from support.timeline import Collective, Timeline
from support.training import Network
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import ckptkern
from ckptkern.ops.registration.functions import bodies_seen
from ckptkern.parallel import TensorParallel

B, S, WIDTH, HEADS, HIDDEN = 3, 128, 32, 8, 96
TOKENS = B * S


def layers(count: int, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(ckptkern.nn.LlamaDecoderLayer(WIDTH, HEADS, 4, HIDDEN, **options) for _ in range(count)))


def split(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    return parallelize_module(model, mesh, {"*": TensorParallel(sequence_parallel=sequence)})


def rows(mesh: DeviceMesh, sequence: bool, **options) -> torch.Tensor:
    """This rank's rows of an input."""
    x = torch.randn(B, S, WIDTH, generator=torch.Generator().manual_seed(1), **options)
    return (x.chunk(mesh.size(), 1)[mesh.get_local_rank()] if sequence else x).clone().requires_grad_()


def backward_of(mesh: DeviceMesh, sequence: bool, **options) -> Timeline:
    """The steps of backward through two layers."""
    y = split(layers(2, **options), mesh, sequence)(rows(mesh, sequence))
    with bodies_seen(), Timeline() as timeline:
        y.sum().backward()
    assert all(one.waited for one in timeline.collectives)
    return timeline


def under(collective: Collective) -> tuple[int, int, int]:
    """(matmuls that give a weight's gradient, other matmuls, attention) between its start and its wait."""
    weights = sum(left[1] == TOKENS for left, _ in collective.matmuls())
    return weights, len(collective.matmuls()) - weights, collective.count("attention")


def named(timeline: Timeline, name: str) -> list[tuple[int, int, int]]:
    """Of the collectives of a name, except for the small ones of the norms' gradients."""
    return [under(one) for one in timeline.collectives if one.name == name and one.size > WIDTH * 2]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@on_ranks(mesh="tp")
def test_the_all_reduce_of_dx_runs_under_the_next_sublayers_recompute(mesh, mode):
    reductions, core = named(backward_of(mesh, False, recompute=mode), "all_reduce"), int(mode == "full")
    projections, hidden = (0, 0) if mode == "none" else (3, 2)
    # the MLP's, then attention's, of the last layer and of the first, whose input is no layer's output
    of_mlp, of_attention = (3, projections, core), (4, hidden, 0)
    assert reductions == [of_mlp, of_attention, of_mlp, (4, 0, 0)]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@on_ranks(mesh="tp")
def test_with_sequence_parallelism_the_gather_of_dy_runs_under_the_recompute(mesh, mode):
    timeline, core = backward_of(mesh, True, recompute=mode), int(mode == "full")
    projections, hidden = (0, 0) if mode == "none" else (3, 2)
    of_x, of_dy = (named(timeline, "all_gather_into_tensor")[place::2] for place in (0, 1))
    assert of_x == 4 * [(0, 0, 0)]
    assert of_dy == 2 * [(0, hidden, 0), (0, projections, core)]
    assert named(timeline, "reduce_scatter_tensor") == 2 * [(3, 0, 0), (4, 0, 0)]
    events = [(step.kind, step.name, step.number) for step in timeline.steps if step.kind in ("start", "wait")]
    starts = {number: place for place, (kind, _, number) in enumerate(events) if kind == "start"}
    waits = {number: place for place, (kind, _, number) in enumerate(events) if kind == "wait"}
    gathers = [one.number for one in timeline.collectives if one.name == "all_gather_into_tensor"]
    for x, dy in zip(gathers[::2], gathers[1::2], strict=True):
        assert starts[x] < starts[dy] < waits[x] < waits[dy], (
            "both are started together, x first, and x is waited for first"
        )
    scatters = [one.number for one in timeline.collectives if one.name == "reduce_scatter_tensor"]
    for scatter, x, dy in zip(scatters, gathers[2::2], gathers[3::2], strict=False):
        assert starts[x] < waits[scatter] < starts[dy], "the gather of the next x does not wait for dx, that of dy does"


@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
@on_ranks(mesh="tp")
def test_what_does_not_fit_the_workspace_waits_for_no_collective(mesh: DeviceMesh, sequence: bool) -> None:
    timeline = backward_of(mesh, sequence, workspace=1)
    assert named(timeline, "reduce_scatter_tensor" if sequence else "all_reduce") == 4 * [(0, 0, 0)]


# -- who sees a gradient that a collective still writes


@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
@on_ranks(mesh="tp")
def test_readers_of_a_gradient_get_it_complete(mesh: DeviceMesh, sequence: bool) -> None:
    """Hooks, x.grad, calls that ask for one gradient, and other readers of x get a plain tensor, of the same values."""
    model = split(layers(2, dtype=torch.float64), mesh, sequence)
    x = rows(mesh, sequence, dtype=torch.float64)

    def gradients(change: Callable) -> list[torch.Tensor]:
        model.zero_grad()
        x.grad = None
        mid = model[0](x)
        seen = change(mid)
        (model[1](mid).square().sum() + (mid.sin().sum() if seen == "also" else 0)).backward()
        for made in (x.grad, *(seen if isinstance(seen, list) else ())):
            assert type(made) is torch.Tensor
        return [x.grad, *(p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters())]

    def hooked(mid: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        mid.register_hook(lambda grad: seen.append(grad))
        return seen

    expected = gradients(lambda mid: None)
    assert all(torch.equal(*pair) for pair in zip(gradients(hooked), expected, strict=True))
    mids: list[torch.Tensor] = []
    assert all(
        torch.equal(*pair)
        for pair in zip(gradients(lambda mid: mid.retain_grad() or mids.append(mid)), expected, strict=True)
    )
    assert type(mids[0].grad) is torch.Tensor
    mid = model[0](x)
    (dmid,) = torch.autograd.grad(model[1](mid).square().sum(), mid)
    assert type(dmid) is torch.Tensor
    assert torch.equal(dmid, mids[0].grad)

    both = gradients(lambda mid: "also")  # autograd adds to what is late
    mid = model[0](x)
    (dx,) = torch.autograd.grad(mid, x, dmid + mid.detach().cos())
    torch.testing.assert_close(both[0], dx)


# -- FSDP2


START, ARRIVED = "c10d::_allgather_base_", "fsdp::split_with_sizes_copy"


@on_ranks()
def test_fsdp2_gathers_weights_as_early_as_for_plain_layers(rank: int) -> None:
    seen = []
    for ours in (False, True):
        torch.manual_seed(0)
        network = Network(GPT, count=3)
        if ours:
            assert len(ckptkern.convert(network, ids(), recompute="full").converted) == 3
        y = sharded(network)(ids())
        with bodies_seen(), Timeline() as timeline:
            y.sum().backward()
        events = [step.name if step.kind == "op" else "compute" for step in timeline.steps]
        seen.append([one for one, before in zip(events, ["", *events], strict=False) if one != before])
    assert seen[1] == seen[0]
    arrivals = [place for place, one in enumerate(seen[1]) if one == ARRIVED]
    assert len(arrivals) == 3
    for place in arrivals[:-1]:
        after = seen[1][place:]
        assert after.index(START) < after.index("compute"), (
            "the next layer's weights are gathered under this one's backward"
        )
