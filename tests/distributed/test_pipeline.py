"""Segments inside the stages of torch.distributed.pipelining train as one process with all stages."""

import itertools

import pytest
import torch
from support.architectures import WIDTH, B, S, ids
from support.ranks import on_ranks
from support.training import KINDS, STEPS, layer_of, optimizer_of
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

import ckptkern
from ckptkern.ops.registration import functions
from ckptkern.segments import checkpoint

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
SCHEDULES = {
    schedule.__name__: schedule
    for schedule in (
        ScheduleGPipe,
        Schedule1F1B,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
        ScheduleDualPipeV,
    )
}
V_SHAPED = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]  # the first rank has the first stage and the last
# form the gradients of inputs and of weights in two passes; DualPipeV does so for some micro-batches
ZERO_BUBBLE = ["ScheduleInterleavedZeroBubble", *V_SHAPED]


class Part(nn.Module):
    """One layer, after the embedding in the first stage and before the head in the last."""

    def __init__(self, kind: str, p: float, ours: bool, stage: int, stages: int):
        super().__init__()
        torch.manual_seed(stage)
        self.embed = nn.Embedding(20, WIDTH) if stage == 0 else nn.Identity()
        self.head = nn.Linear(WIDTH, 20) if stage == stages - 1 else nn.Identity()
        torch.manual_seed(100 + stage)
        self.layer = layer_of(kind, p, ours)
        if kind == "converted" and ours:
            conversion = ckptkern.convert(self, ids() if stage == 0 else torch.randn(B, S, WIDTH))
            assert [row.replaced_by for row in conversion.converted] == ["transformer_layer"], conversion

    def forward(self, x):
        x = self.layer(self.embed(x))
        return self.head(x[0] if isinstance(x, tuple) else x)


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step, micros):
    tokens = torch.cat([ids(10 * step + micro) for micro in range(micros)])
    return tokens, tokens.roll(1, 1)


def alone(parts, step, micros):
    """The micro-batches' losses and each part's gradients in one process, where each part samples as its rank does."""
    states = [torch.Generator().manual_seed(1000 * step + i).get_state() for i in range(len(parts))]
    losses = []
    for x, target in zip(*(tensor.chunk(micros) for tensor in batch(step, micros)), strict=True):
        for i, part in enumerate(parts):
            torch.set_rng_state(states[i])
            x = part(x)
            states[i] = torch.get_rng_state()
        losses.append(loss_of(x, target))
        (losses[-1] / micros).backward()
    return [loss.item() for loss in losses], [[p.grad for p in part.parameters()] for part in parts]


def refusal(schedule, kind):
    """Why torch 2.11 cannot run it."""
    if RELEASE < (2, 13) and schedule in V_SHAPED:
        return "this schedule of torch 2.11 sends to its own rank, which gloo refuses"
    if RELEASE < (2, 13) and schedule in ZERO_BUBBLE and kind != "segments":
        return "this schedule of torch 2.11 fails on every autograd.Function: _input_metadata"
    return None


def cases():
    """Every schedule and kind on two ranks, and on four, where those of one stage a rank have dropout."""
    for n, (i, schedule), kind in itertools.product((2, 4), enumerate(SCHEDULES), KINDS):
        short = kind == KINDS[i % 3] and (n == 2 or schedule in ("Schedule1F1B", "ScheduleDualPipeV"))
        refused = refusal(schedule, kind)
        marks = [pytest.mark.skipif(bool(refused), reason=str(refused)), *([] if short else [pytest.mark.long])]
        yield pytest.param(n, schedule, kind, 0.2 if n == 4 and i < 2 else 0.0, marks=marks)


@pytest.mark.parametrize(("n", "schedule", "kind", "p"), [*cases()])
@on_ranks()
def test_stages(rank, n, schedule, kind, p):
    each = 2 if "Interleaved" in schedule or schedule in V_SHAPED else 1  # stages of a rank
    numbers = [rank, 2 * n - 1 - rank] if schedule in V_SHAPED else range(rank, each * n, n)
    micros = max(4, each * n) if schedule == "ScheduleDualPipeV" else 4  # which wants one for each stage
    unfused = [Part(kind, p, kind != "segments" and p > 0, i, each * n) for i in range(each * n)]
    parts = {i: Part(kind, p, True, i, each * n) for i in numbers}
    for i, part in parts.items():
        part.load_state_dict(unfused[i].state_dict())
    hidden = torch.empty(B, S, WIDTH, requires_grad=True)
    stages = [
        PipelineStage(
            part,
            i,
            each * n,
            torch.device("cpu"),
            input_args=(hidden if i else ids(),),
            output_args=(hidden if i < each * n - 1 else torch.empty(B, S, 20, requires_grad=True),),
        )
        for i, part in parts.items()
    ]
    bodies, direct, recompute = [], functions.run_backward, checkpoint.Segment.recompute

    def counted(*args):
        bodies.append(args[0].name)
        return direct(*args)

    def recomputed(self, key):
        bodies.append("recompute")
        recompute(self, key)

    functions.run_backward, checkpoint.Segment.recompute = counted, recomputed
    run = SCHEDULES[schedule](stages if each > 1 else stages[0], micros, loss_fn=loss_of)
    optimizers = [optimizer_of(nn.ModuleList(unfused)), optimizer_of(nn.ModuleList(parts.values()))]
    for step in range(STEPS):
        expected, gradients = alone(unfused, step, micros)
        bodies.clear()
        torch.manual_seed(1000 * step + rank)
        x, target = batch(step, micros)
        losses = []
        is_last = each * n - 1 in numbers
        run.step(*([x] if rank == 0 else []), **({"target": target, "losses": losses} if is_last else {}))
        if is_last:
            torch.testing.assert_close([loss.item() for loss in losses], expected, rtol=1e-5, atol=1e-5)
        for i, part in parts.items():
            for mine, theirs in zip(part.parameters(), gradients[i], strict=True):
                torch.testing.assert_close(mine.grad, theirs, rtol=1e-5, atol=1e-5)
        # one backward of each layer and one recompute of each region for a micro-batch, also where it comes in two passes
        if name := {"converted": "transformer_layer", "segments": "recompute"}.get(kind):
            assert bodies.count(name) == len(parts) * micros, bodies
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
