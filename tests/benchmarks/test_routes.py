"""What runs by default on a GPU, kernel by kernel: the table in benchmarks/results is what a trace finds."""

from __future__ import annotations

import csv

import pytest

from benchmarks.codegen.sass import MATMULS
from benchmarks.dev import routes

CORES = {"attn_fwd", "attn_dq", "attn_dkdv"}


def held() -> list[dict[str, str]]:
    with routes.PATH.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("layer", routes.LAYERS)
def test_the_table_is_what_runs(layer):
    """`python -m benchmarks.dev.routes --out benchmarks/results/routes.csv` writes it again."""
    assert [row for row in routes.rows(layer) if row["layer"] == layer] == [row for row in held() if row["layer"] == layer]


def test_no_matmul_of_ours_runs_that_nobody_measured():
    """But for experts, where torch has no fast grouped matmul or ours took less time, and cores that torch does not compute."""
    ours = {name.strip("_").removesuffix("_kernel") for name in MATMULS}
    for row in held():
        ran = {part.partition(":")[0] for part in row["ours"].split()} & ours
        assert {name for name in ran if not name.startswith("experts")} <= CORES, row
        assert ran.isdisjoint(CORES) or row["dtype"] != "fp32" or row["layer"] in ("BERT, padded", "BERT, dropout"), row


def test_a_step_compiles_nothing_more_for_another_shape():
    found = list(routes.launches())
    assert [one["compiled"] for one in found[1:]] == [0] * 6
    assert 0 < found[0]["compiled"] <= 11
    assert len({one["launches"] for one in found}) == 1
