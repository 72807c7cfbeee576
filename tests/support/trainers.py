"""Trains examples/trl_trainers.py's model by one of its trainers three ways: as it is, with gradient checkpointing (TRL's
default), and with that and the callback. Prints of each its peak and its largest tensor, and how far the last one's log is from
the first's: trainers.py sft|dpo|grpo

A log is the loss, or GRPO's reward, and the gradient's norm of each step. The loss of GRPO is 0 before a second update with the
same samples, and after four steps rounding changes a sample.
"""

from __future__ import annotations

import itertools
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from ckptkern.memory import format_size, memory_timeline

RECIPE = Path(__file__).parents[2] / "examples" / "trl_trainers.py"


def trained(recipe: dict[str, Any], trainer: str, name: str, *callbacks: Any, **options: bool) -> torch.Tensor:
    """Returns the log."""
    with memory_timeline("cpu") as timeline:
        log = recipe["train"](recipe[trainer], recipe["build"](), *callbacks, **options)
    largest = max(after - before for before, after in itertools.pairwise([0, *timeline.bytes]))
    print(f"{name}: peak {format_size(timeline.peak)}, largest tensor {format_size(largest)}")
    measure = "reward" if trainer == "grpo" else "loss"
    print(f"{measure} {log[0][measure]:.2f} -> {log[-1][measure]:.2f}")
    return torch.tensor([[entry[measure], entry["grad_norm"]] for entry in log])[: 4 if trainer == "grpo" else None]


def main(trainer: str) -> None:
    recipe = runpy.run_path(str(RECIPE))
    plain = trained(recipe, trainer, "as it is", gradient_checkpointing=False)
    trained(recipe, trainer, "gradient checkpointing")
    callback = recipe["TrainerCallback"](recompute="full", workspace="1MiB")
    converted = trained(recipe, trainer, "converted", callback)
    print("calls", callback.conversion.calls)
    print(f"largest difference: {((converted - plain).abs() / plain.abs().amax(0)).max().item():.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
