"""Results as an H100 would write them, for what reads such results: their times are the cost model's."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = ("mlp-gelu/d1024x16384", "linear_cross_entropy/d1024x16384")
COLUMNS = ("case", "variant", "device", "dtype", "status", "ms")
DEVICE = "nvidia-h100-80gb-hbm3"


def results_of_an_h100(folder: Path, cases: Sequence[str] = CASES, slower: float = 1.25) -> Path:
    """Writes results.csv and env.json of the cases, with the cost model's times of an H100 that is so many times slower, a
    ceiling, and a whole model, which the cost model does not know. Returns the path of results.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    with (ROOT / "benchmarks/results/model/h100.csv").open(newline="") as file:
        rows = [
            {"case": row["case"], "variant": row["variant"], "ms": f"{slower * float(row['ms']):.5g}"}
            for row in csv.DictReader(file)
            if row["case"] in cases
        ]
    rows += [
        {"case": "ceiling", "variant": "copy 1 GiB", "ms": "0.7"},
        {"case": "model/llama", "variant": "eager", "ms": "9"},
    ]
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({"device": "cuda", "dtype": "bfloat16", "status": "ok"} | row for row in rows)
    (folder / "env.json").write_text(json.dumps({"device": DEVICE}))
    return folder / "results.csv"
