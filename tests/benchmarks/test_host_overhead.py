"""What one segment costs the host: tiny tensors, one thread, forward + backward, against torch.utils.checkpoint; and what
an MLP of the eager backend costs that computes."""

import math
import statistics

import pytest
import torch

from ckptkern.benchmarks import cases, measure

TRIES = 5  # the host may be busy during some


def medians(case: str, *names: str, rounds: int = 40) -> list[float]:
    """ms of the ways of a case: medians of interleaved rounds, each the quickest of a batch."""
    item = next(item for item in cases.items("cpu") if item.case.name == case)
    model, x, dy = cases.build(item, torch.device("cpu"))
    makers = cases.ways(item.case)
    steps = {name: measure.stepper(makers[name](model, x), model, [(x, dy)]) for name in names}
    with measure.threads(1):
        clock = measure.host_clock if item.case.host else measure.cpu_clock
        measure.interleaved(steps, clock, 3)
        times, errors = measure.interleaved(steps, clock, rounds)
    assert not errors
    return [statistics.median(times[name]) for name in names]


def fused() -> float:
    """Our time at "full" over torch.utils.checkpoint's."""
    ours, theirs = medians("host", "ckptkern full", cases.CHECKPOINT)
    return ours / theirs


def general() -> float:
    """What checkpoint() adds to the plain call, over what torch.utils.checkpoint adds; random state kept by both.

    0.35 to 0.36 on a machine with nothing else to do, 0.39 to 0.41 on one whose caches others use: a third of it is the
    unwinding of the exception that ends the recompute.
    """
    plain, ours, theirs = medians("host-general", cases.EAGER, "ckptkern", cases.CHECKPOINT)
    return (ours - plain) / (theirs - plain)


def eager_mlp() -> float:
    """A step of an MLP at "full" by the eager backend over torch.utils.checkpoint of the same MLP: no host time, 7 products."""
    ours, theirs = medians("mlp-gelu", "ckptkern full", cases.CHECKPOINT, rounds=10)
    return ours / theirs


@pytest.mark.parametrize(("measured", "bound"), [(fused, 0.5), (general, 0.45), (eager_mlp, 1.0)])
def test_host_time_of_a_segment(measured, bound):
    ratios = []
    while len(ratios) < TRIES and min(ratios, default=math.inf) > bound:
        ratios.append(measured())
    print(f"ours / torch.utils.checkpoint: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    assert min(ratios) <= bound, ratios
