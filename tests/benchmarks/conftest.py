import csv
from typing import NamedTuple

import pytest


class Ran(NamedTuple):
    """rows: of results.csv, by variant."""

    status: int
    rows: dict[str, dict[str, str]]
    printed: str


@pytest.fixture
def bench(tmp_path, capsys, monkeypatch):
    """bench(arguments): of `python -m ckptkern bench`, into tmp_path / "out"; with case=, as if it were the only case."""
    from ckptkern import __main__  # imports Triton, which tests/conftest.py sets up before
    from ckptkern.benchmarks import suite

    def ran(*arguments, case=None):
        if case:
            monkeypatch.setattr(suite, "cases_of", lambda *_: [case])
        capsys.readouterr()
        results = tmp_path / "out" / "results.csv"
        status = __main__.main(["bench", "--device=cpu", "--rounds=2", f"--out={results.parent}", *arguments])
        lines = results.read_text().splitlines() if status != 2 and results.exists() else []
        return Ran(status, {row["variant"]: row for row in csv.DictReader(lines)}, "".join(capsys.readouterr()))

    return ran
