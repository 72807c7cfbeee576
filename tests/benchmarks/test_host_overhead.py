"""What one segment costs the host: tiny tensors, one thread, forward + backward, against torch.utils.checkpoint."""

import statistics

import torch

from ckptkern.benchmarks import cases, measure

TRIES = 3  # the host may be busy during one


def ratio_to_checkpoint(rounds: int = 40) -> float:
    """Our time at "full" over torch.utils.checkpoint's: medians of interleaved rounds, each the quickest of a batch."""
    (item,) = (item for item in cases.items("cpu") if item.case.host)
    model, x, dy = cases.build(item, torch.device("cpu"))
    makers = cases.ways(item.case, compile=False)
    steps = {
        name: measure.stepper(makers[name](model, x), model, [(x, dy)]) for name in ("ckptkern full", cases.CHECKPOINT)
    }
    with measure.threads(1):
        measure.interleaved(steps, measure.host_clock, 3)
        times, errors = measure.interleaved(steps, measure.host_clock, rounds)
    assert not errors
    ours, theirs = (statistics.median(times[name]) for name in steps)
    return ours / theirs


def test_a_segment_costs_the_host_at_most_half_of_a_checkpoint():
    ratios = []
    while len(ratios) < TRIES and min(ratios, default=1.0) > 0.5:
        ratios.append(ratio_to_checkpoint())
    assert min(ratios) <= 0.5, f"ours / torch.utils.checkpoint: {', '.join(f'{ratio:.3f}' for ratio in ratios)}"
