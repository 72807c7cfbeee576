"""What the collectives of tensor parallelism run under, by the order of events, on gloo processes."""

import pytest
import torch
from distributed.test_data_parallel import sharded
from support.architectures import GPT, ids
from support.ranks import on_ranks
from support.strategies import MODES, WIDTH, B, llama, mine, split, whole
from support.timeline import Timeline
from support.training import Network
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ckptkern
from ckptkern.ops.registration.functions import bodies_seen

S = 128
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
STRATEGIES = pytest.mark.parametrize("strategy", ["heads", "rows"])


def two_layers(mesh: DeviceMesh, strategy: str, **options) -> tuple[nn.Module, Tensor]:
    """A model that is split, and this rank's rows of an input."""
    x = mine(torch.randn(B, S, WIDTH, dtype=options.get("dtype")), mesh, strategy).clone().requires_grad_()
    return split(nn.Sequential(llama(**options), llama(**options)), mesh, strategy, "*"), x


def backward_of(mesh: DeviceMesh, strategy: str, **options) -> Timeline:
    model, x = two_layers(mesh, strategy, **options)
    y = model(x)
    with bodies_seen(), Timeline() as timeline:
        y.sum().backward()
    assert all(collective.waited for collective in timeline.collectives)
    return timeline


def under(timeline: Timeline, name: str) -> list[tuple[int, int, int]]:
    """(matmuls that give a weight's gradient, other matmuls, attention) between the start and the wait of each collective of a
    name, except for the small ones of the norms' gradients."""
    counts = []
    for collective in timeline.collectives:
        if collective.name == name and collective.size > WIDTH * 2:
            weights = sum(left[1] == B * S for left, _ in collective.matmuls())
            counts.append((weights, len(collective.matmuls()) - weights, collective.count("attention")))
    return counts


@pytest.mark.parametrize("mode", MODES)
@on_ranks(mesh="tp")
def test_dx_and_dy_travel_under_the_recompute(mesh, mode):
    """The all-reduce of dx under the next sublayer's, the gather of dy, with sequence parallelism, under its own."""
    of_mlp = (0, 0 if mode == "none" else 3, int(mode == "full"))
    hidden = 0 if mode == "none" else 2
    reductions = under(backward_of(mesh, "heads", recompute=mode), "all_reduce")
    # the MLP's, then attention's, of the last layer and of the first, whose input is no layer's output
    assert reductions == [(3, *of_mlp[1:]), (4, hidden, 0), (3, *of_mlp[1:]), (4, 0, 0)]
    timeline = backward_of(mesh, "rows", recompute=mode)
    of_x, of_dy = (under(timeline, GATHER)[place::2] for place in (0, 1))
    assert of_x == 4 * [(0, 0, 0)]
    assert of_dy == 2 * [(0, hidden, 0), of_mlp]
    assert under(timeline, SCATTER) == 2 * [(3, 0, 0), (4, 0, 0)]
    events = [(step.kind, step.number) for step in timeline.steps]
    gathers, scatters = (
        [collective.number for collective in timeline.collectives if collective.name == name]
        for name in (GATHER, SCATTER)
    )
    for place, (x, dy) in enumerate(zip(gathers[::2], gathers[1::2], strict=True)):
        order = [("start", x), ("start", dy), ("wait", x), ("wait", dy)]
        if place:  # the gather of x does not wait for the sum of dx before it, that of dy does
            order.insert(1, ("wait", scatters[place - 1]))
        assert [event for event in events if event in order] == order, (
            "both are started together, and x is waited for first"
        )


@STRATEGIES
@on_ranks(mesh="tp")
def test_what_does_not_fit_the_workspace_waits_for_no_collective(mesh, strategy):
    timeline = backward_of(mesh, strategy, workspace=1)
    assert under(timeline, SCATTER if strategy == "rows" else "all_reduce") == 4 * [(0, 0, 0)]


@STRATEGIES
@on_ranks(mesh="tp")
def test_readers_of_a_gradient_get_it_complete(mesh, strategy):
    """Hooks, x.grad, calls that ask for one gradient, and other readers of x get a plain tensor, of the same values, and not
    one that a collective still writes."""
    model, x = two_layers(mesh, strategy, dtype=torch.float64)
    seen, mids = [], []

    def gradients(read):
        model.zero_grad()
        x.grad = None
        mids.append(model[0](x))
        (model[1](mids[-1]).square().sum() + (read(mids[-1]) or 0)).backward()
        assert type(x.grad) is Tensor
        return [x.grad, *(whole(p.grad) for p in model.parameters())]

    expected = gradients(lambda mid: None)
    for read in (lambda mid: mid.register_hook(seen.append) and None, lambda mid: mid.retain_grad()):
        assert all(map(torch.equal, gradients(read), expected))
    mid = model[0](x)
    (dmid,) = torch.autograd.grad(model[1](mid).square().sum(), mid)
    for grad in (dmid, mids[-1].grad, *seen):
        assert type(grad) is Tensor
        assert torch.equal(grad, dmid)
    both = gradients(lambda mid: mid.sin().sum())  # autograd adds to what is late
    torch.testing.assert_close(torch.autograd.grad(mid, x, dmid + mid.detach().cos())[0], both[0])


START, ARRIVED = "c10d::_allgather_base_", "fsdp::split_with_sizes_copy"


@on_ranks()
def test_fsdp2_gathers_weights_as_early_as_for_plain_layers(rank):
    """The next layer's are gathered under this one's backward."""
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
        seen.append([event for event, before in zip(events, ["", *events], strict=False) if event != before])
    assert seen[1] == seen[0]
    arrivals = [place for place, event in enumerate(seen[1]) if event == ARRIVED]
    assert len(arrivals) == 3
    for place in arrivals[:-1]:
        after = seen[1][place:]
        assert after.index(START) < after.index("compute")
