"""Allocated memory during a training step of the frontier's Llama, as it is, with gradient checkpointing and converted, and
what stands at the peak of each: python -m benchmarks.dev.timeline --out docs/concepts/peak.png

Measured on a CPU (torch's allocator, float32, gradients allocated before). The horizontal axis is the allocator's events, in
their order, forward and backward each on half of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from ckptkern.conversion.recorder import step_of
from ckptkern.memory import Timeline, format_size, memory_timeline

from . import frontier

MIB = 2**20


def recorded(model: nn.Module, ids: Tensor) -> Timeline:
    with memory_timeline("cpu") as timeline:
        loss = model(input_ids=ids, labels=ids).loss
        timeline.mark("backward")
        loss.backward()
    return timeline


def standing(model: nn.Module, ids: Tensor, count: int = 6) -> list[str]:
    """The largest tensors at the peak, with the ops that made them."""
    alike: dict[str, list[int]] = {}
    for one in step_of(model, (), {"input_ids": ids, "labels": ids}).at_peak:
        alike.setdefault(one.what, []).append(one.bytes)
    largest = sorted(alike.items(), key=lambda item: -sum(item[1]))[:count]
    return [f"{format_size(sum(sizes)):>10}  {len(sizes):3} x {what}" for what, sizes in largest]


def places(timeline: Timeline) -> list[float]:
    """Of the events, forward's between 0 and 1, backward's between 1 and 2."""
    cut = timeline.marks["backward"]
    forward = sum(ms < cut for ms in timeline.milliseconds)
    backward = len(timeline.milliseconds) - forward
    return [i / max(forward, 1) if i < forward else 1 + (i - forward) / backward for i in range(forward + backward)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.timeline", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path, help="the picture to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ids = frontier.random_ids(32000, given.tokens)
    made = {
        "eager": lambda: frontier.llama(32000, 8, 256, 4),
        frontier.CHECKPOINTING: lambda: frontier.checkpointed(frontier.llama(32000, 8, 256, 4)),
        'ckptkern.convert, "full", 4 MiB': lambda: frontier.converted(
            frontier.llama(32000, 8, 256, 4), ids, recompute="full", workspace="4MiB"
        ),
    }
    timelines = {}
    for name, make in made.items():
        model = make()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        timelines[name] = recorded(model, ids)
        print(f"{name}: peak {format_size(timelines[name].peak)}")
        print("\n".join(standing(model, ids)))
    if given.out:
        picture(timelines, given.out)


def picture(timelines: dict[str, Timeline], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, timeline in timelines.items():
        axes.step(places(timeline), [max(b, 1) / MIB for b in timeline.bytes], where="post", lw=1, label=name)
    axes.axvline(1, color="gray", lw=0.8)
    axes.set(
        xticks=[0.5, 1.5], xticklabels=["forward", "backward"], ylabel="allocated, MiB", yscale="log", ylim=(2, None)
    )
    axes.grid(alpha=0.3, axis="y", which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
