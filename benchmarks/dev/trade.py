"""The trade of activation checkpoints: saved bytes against time over region counts, as CSV and a figure.

    python -m benchmarks.dev.trade --out docs/concepts

writes segments.csv and segments.png: a stack of blocks, cut into 1 to L regions, forward + backward, each cut beside
the unmodified run in interleaved rounds. On a CPU only the ratio means anything; saved bytes are exact.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

import torch
from torch import nn

from ckptkern import checkpoint_sequential
from ckptkern.benchmarks import measure
from ckptkern.extras import missing
from ckptkern.memory import saved_tensors

LAYERS = 24


class Block(nn.Module):
    """Pre-norm MLP with a residual: the part of a layer that saves most."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        return x + self.layers(x)


def strategies(layers: int) -> dict[str, int | str]:
    counts = [n for n in range(2, layers + 1) if layers % n == 0]
    return {"eager": 1, **{str(n): n for n in counts}, "sqrt": "sqrt", "every 1": "every 1"}


def run(device: torch.device, width: int, rows: int, rounds: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(LAYERS))).to(device)
    x, dy = torch.randn(rows, width, device=device, requires_grad=True), torch.randn(rows, width, device=device)
    steps, saved = {}, {}
    for name, segments in strategies(LAYERS).items():

        def function(x, segments=segments):
            return checkpoint_sequential(model, segments, x)

        with saved_tensors(exclude=model.parameters()) as found:
            function(x)
        saved[name] = found.bytes
        steps[name] = measure.stepper(function, model, [(x, dy)])
    clock = measure.cuda_clock if device.type == "cuda" else measure.cpu_clock
    measure.interleaved(steps, clock, 2, cuda=device.type == "cuda")
    times, errors = measure.interleaved(steps, clock, rounds, cuda=device.type == "cuda")
    if errors:
        raise RuntimeError("; ".join(f"{name}: {error}" for name, error in errors.items()))
    base = statistics.median(times["eager"])
    return [
        {"segments": name, "saved_bytes": saved[name], "ratio": round(statistics.median(times[name]) / base, 4)}
        for name in steps
    ]


def draw(rows: list[dict[str, object]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    counts = [row for row in rows if str(row["segments"]).isdigit() or row["segments"] == "eager"]
    others = [row for row in rows if row not in counts]
    axes.plot([row["saved_bytes"] / 2**20 for row in counts], [row["ratio"] for row in counts], "o", label="n regions")
    axes.plot([row["saved_bytes"] / 2**20 for row in others], [row["ratio"] for row in others], "s", label="strategies")
    for row in rows:
        axes.annotate(
            str(row["segments"]), (row["saved_bytes"] / 2**20, row["ratio"]), textcoords="offset points", xytext=(5, 5)
        )
    axes.set(xlabel="saved for backward, MiB", ylabel="forward + backward, unmodified run = 1", title=title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.trade", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for segments.csv and segments.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, help="of the blocks (default: 128, 1024 on a GPU)")
    parser.add_argument("--rows", type=int, help="of the input (default: 1024, 16384 on a GPU)")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    if hint := missing("matplotlib"):
        parser.exit(2, f"{parser.prog}: {hint}\n")
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    width, rows = args.width or (1024 if gpu else 128), args.rows or (16384 if gpu else 1024)
    found = run(device, width, rows, args.rounds)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "segments.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    draw(found, f"{LAYERS} blocks, width {width}, {rows} rows, {device.type}", args.out / "segments.png")
    for row in found:
        print(f"{row['segments']:>8}  {row['saved_bytes'] / 2**20:8.2f} MiB  {row['ratio']:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
