"""What runs by default on a GPU, kernel by kernel: the table in benchmarks/results is what a trace finds."""

from __future__ import annotations

import csv
import io
import subprocess

import pytest
from codegen import routes
from codegen.sass import MATMULS
from support import outside

CORES = {"attn_fwd", "attn_dq", "attn_dkdv"}


def printed(*options: str) -> str:
    """What the command prints in a process without the interpreter."""
    process = outside.start("-m", "tests.codegen.routes", *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate()
    assert process.returncode == 0, error
    return out


@pytest.fixture(scope="module")
def held() -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(routes.PATH.read_text())))


def test_the_table_is_what_runs():
    """`python -m tests.codegen.routes > benchmarks/results/routes.csv` writes it again."""
    assert printed() == routes.PATH.read_text()


def test_no_matmul_of_ours_runs_that_nobody_measured(held):
    """But for experts, where torch has no fast grouped matmul or ours took less time, and cores that torch does not compute:
    with dropout, with a mask off cuDNN."""
    ours = {name.strip("_").removesuffix("_kernel") for name in MATMULS}
    for row in held:
        ran = {part.partition(":")[0] for part in row["ours"].split()} & ours
        assert {name for name in ran if not name.startswith("experts")} <= CORES, row
        cores = row["layer"] == "BERT, dropout" or (row["layer"] == "BERT, padded" and "cudnn" not in row["torch"])
        assert ran.isdisjoint(CORES) == (not cores or "efficient" in row["torch"]), row
    assert {row["layer"] for row in held} == set(routes.LAYERS)


def test_a_step_compiles_nothing_more_for_another_shape():
    first, *others = csv.DictReader(io.StringIO(printed("--launches")))
    assert 0 < int(first["compiled"]) <= 10
    assert [row["compiled"] for row in others] == ["0"] * 6
    assert {row["launches"] for row in others} == {first["launches"]}
