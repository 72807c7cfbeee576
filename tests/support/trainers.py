"""Trains examples/trl_trainers.py's model by one of its trainers three ways: as it is, with gradient checkpointing, and
converted. Prints of each its peak and its largest tensor, and how far the converted one's log is from the first's:
trainers.py sft|dpo|grpo

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


def trained(recipe: dict[str, Any], trainer: str, name: str, model: torch.nn.Module, **options: bool) -> torch.Tensor:
    """Returns the log."""
    with memory_timeline("cpu") as timeline:
        log = recipe["train"](recipe[trainer], model, **options)
    largest = max(after - before for before, after in itertools.pairwise([0, *timeline.bytes]))
    print(f"{name}: peak {format_size(timeline.peak)}, largest tensor {format_size(largest)}")
    measure = "reward" if trainer == "grpo" else "loss"
    print(f"{measure} {log[0][measure]:.2f} -> {log[-1][measure]:.2f}")
    return torch.tensor([[entry[measure], entry["grad_norm"]] for entry in log])[: 4 if trainer == "grpo" else None]


def main(trainer: str) -> None:
    recipe = runpy.run_path(str(RECIPE))
    plain = trained(recipe, trainer, "as it is", recipe["build"]())
    trained(recipe, trainer, "gradient checkpointing", recipe["build"](), gradient_checkpointing=True)
    model = recipe["build"]()
    conversion = recipe["convert"](model, packed=trainer == "sft")
    converted = trained(recipe, trainer, "converted", model)
    print("calls", conversion.calls)
    print(f"largest difference: {((converted - plain).abs() / plain.abs().amax(0)).max().item():.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
