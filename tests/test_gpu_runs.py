"""tests/support/gpu_runs.py: which tests a GPU run has, in which order, and what stays on the disk when it ends."""

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import gpu_runs

TESTS = Path(__file__).parent


def test_no_file_with_a_gpu_test_is_passed_over(request):
    """Of what this run has collected: all files, in a run of the suite."""
    files = {item.path for item in request.session.items if "gpu" in item.keywords}
    assert [path for path in files if not gpu_runs.may_have_gpu_tests(path)] == []


@pytest.mark.parametrize(
    ("source", "has"),
    [
        ("@pytest.mark.gpu\ndef test_it(): ...", True),
        ("pytestmark = pytest.mark.gpu", True),
        ("def test_it(a,\n    device,\n): ...", True),
        ("def test_it(device_type): ...", False),
        ("def make(device): ...\ndef test_it(): ...", False),
    ],
)
def test_a_file_is_known_by_its_text(source, has, tmp_path):
    (tmp_path / "test_it.py").write_text(source)
    assert gpu_runs.may_have_gpu_tests(tmp_path / "test_it.py") == has


def test_a_counterpart_has_cpu_where_the_test_has_cuda():
    assert gpu_runs.counterpart_of("a.py::test_cuda[x-cuda-cudax]") == "a.py::test_cuda[x-cpu-cudax]"
    assert gpu_runs.counterpart_of("a.py::test_cuda[cuda]") == "a.py::test_cuda[cpu]"
    assert gpu_runs.counterpart_of("a.py::test_on_a_gpu") == "a.py::test_on_a_gpu"


SUITE = """
import os, pytest

@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request): return request.param

def test_other(device): pass
def test_is_recomputed(device): pass
def test_fails(device): assert os.path.exists("mended"), "not\\nyet"
def test_is_skipped(device): pytest.skip("for a reason")
def test_on_cpu_alone(): raise SystemExit
@pytest.mark.gpu
def test_on_gpu_alone(): pass
"""


@pytest.mark.slow
def test_results_are_on_the_disk_and_what_passed_is_left_out(tmp_path):
    """In two runs: first one test fails; the second, after it is mended, runs it and what was skipped, and nothing else."""
    (tmp_path / "support").mkdir()
    for name in ("conftest.py", "support/gpu_runs.py", "support/outside.py", "support/interpreter.py"):
        (tmp_path / name).write_text((TESTS / name).read_text())
    (tmp_path / "test_suite.py").write_text(SUITE)
    markers = '["gpu", "slow", "long"]'
    (tmp_path / "pyproject.toml").write_text(f'[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = {markers}')

    def run(*more: str, which: str = "--counterparts") -> tuple[int, list[dict[str, str]]]:
        options = ["-p", "no:cacheprovider", which, "--results", "r.csv", "--no-summary"]
        command = [sys.executable, "-m", "pytest", *options, *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        said = done.stdout + done.stderr
        assert done.returncode == 0 or "FAILED test_suite.py::test_fails[cpu]\n" in done.stdout, said
        with (tmp_path / "r.csv").open(newline="") as file:
            return done.returncode, [
                row | {"test": row["test"].partition("::test_")[2]} for row in csv.DictReader(file)
            ]

    status, rows = run()
    message_of = {row["test"]: row["message"] for row in rows}
    assert status == 1
    assert {row["test"]: row["outcome"] for row in rows} == {
        "is_recomputed[cpu]": "passed",
        "other[cpu]": "passed",
        "fails[cpu]": "failed",
        "is_skipped[cpu]": "skipped",
    }
    assert message_of["fails[cpu]"].startswith("AssertionError: not yet")
    assert "for a reason" in message_of["is_skipped[cpu]"]
    assert rows[0]["test"] == "is_recomputed[cpu]"  # most likely to fail
    (tmp_path / "mended").touch()
    status, rows = run(*(["-n", "1"] if importlib.util.find_spec("xdist") else []))
    assert status == 0
    assert {(row["test"], row["outcome"]) for row in rows[4:]} == {
        ("fails[cpu]", "passed"),
        ("is_skipped[cpu]", "skipped"),
    }
    status, rows = run("-m", "gpu", which="--without-counterpart")
    assert status == 0
    assert [(row["test"], row["outcome"]) for row in rows[6:]] == [
        ("on_gpu_alone", "skipped" if not torch.cuda.is_available() else "passed")
    ]
