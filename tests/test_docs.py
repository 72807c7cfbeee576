"""Runs every ```python block of the README and the documentation, and compares what it prints with the page.

The blocks of a page run in order in one namespace. A block ```output is what the block before it printed with the pinned
torch, to the letter.
`<!-- skip: next -->` leaves out a block that needs a GPU or several processes; with `if(not find_spec("transformers"),
reason="...")` one whose package is not installed, and the rest of its page. What a reader need not see, such as a rank's
environment, goes into an invisible block: `<!-- invisible-code-block: python ... -->`. A block that includes a file of
examples/ is left to tests/test_recipes.py, which runs the file. Pages of LONG run in `make test-all`; every page's blocks
are compiled."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.dev import layer
from ckptkern.benchmarks import report
from docs import reference

pytest.importorskip("sybil", reason="needs Sybil, which requirements-dev.txt pins")
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
LONG = {  # what takes their blocks more than some seconds
    "docs/how-to/plan.md": "plans and trains models under several budgets",
    "docs/tutorials/budget.md": "plans eight layers, in minutes",
}
# What torch's own layers save differs between its versions: the pages show the pinned one's.
PINNED = re.search(r"^torch==(\d+\.\d+\.)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)[1]

INCLUDED = '--8<-- "examples/'
_evaluate = PythonEvaluator()


def run(example: Example) -> None:
    if example.parsed.startswith(INCLUDED):
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        _evaluate(example)
    example.namespace["_printed"] = printed.getvalue()


def compare(example: Example) -> None:
    printed = textwrap.dedent(example.namespace.pop("_printed"))  # Sybil dedents what it parses
    if torch.__version__.startswith(PINNED):
        assert printed == example.parsed


def check(page: Path) -> Document:
    parsers = CodeBlockParser("python", run), CodeBlockParser("output", compare), SkipParser()
    document = Document.parse(str(page), *parsers)
    document.namespace.update(__name__=page.stem, find_spec=find_spec)
    for example in document:
        example.evaluate()
    return document


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Runs the blocks in an empty folder, where they cannot import from the test suite, and restores what they set."""
    environment = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "tests"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:  # of another test here
        monkeypatch.delitem(sys.modules, name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.long] * (page in LONG)) for page in PAGES])
def test_code_blocks_of(page, elsewhere):
    check(ROOT / page)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_python_compiles_and_is_one_that_runs(page):
    """Checks for ```python, the only spelling that Sybil reads, and in the reference ```pyi, a signature."""
    fences = re.findall(r"^\s*(?:```|~~~).*py.*$", (ROOT / page).read_text(), re.MULTILINE | re.IGNORECASE)
    signatures = {"```pyi"} if page.startswith("docs/reference/") else set()
    assert {fence.strip() for fence in fences} <= {"```python"} | signatures
    for block in Document.parse(str(ROOT / page), CodeBlockParser("python", run)):
        if not block.parsed.startswith(INCLUDED):
            compile(block.parsed, f"{page}:{block.line}", "exec")


def test_the_documentation_is_short():
    words = {page: len((ROOT / page).read_text().split()) for page in PAGES if page.startswith("docs/")}
    assert sum(words.values()) <= 30_000, sorted(words.items(), key=lambda pair: -pair[1])


def test_every_long_page_is_there():
    assert {*LONG} <= {*PAGES}


@pytest.mark.parametrize("path", sorted(reference.PAGES.rglob("*.md")), ids=lambda path: path.stem)
def test_the_reference_has_the_signatures_and_docstrings_of_today(path):
    """Needs the pinned torch, whose signatures the modules that follow torch's have."""
    if torch.__version__.startswith(PINNED):
        assert path.read_text() == reference.page(path.read_text()), "run make docs"


@pytest.mark.parametrize(
    "name", ["ckptkern", "ckptkern.nn", "ckptkern.memory", "ckptkern.storage", "ckptkern.hub", "ckptkern.integrations"]
)
def test_the_reference_has_every_public_name(name):
    module = importlib.import_module(name)
    headings = {line.lstrip("# ") for line in all_pages_of_the_reference().splitlines() if line.startswith("#")}
    of_frameworks = getattr(module, "MODULES", ())  # imported on first use
    public = {
        f"{name}.{member}" for member in module.__all__ if member in of_frameworks or callable(getattr(module, member))
    }
    assert public - headings == set()


def test_the_index_of_functions_lists_every_page_of_functions():
    listed = reference.ROW.findall((reference.PAGES / "functions.md").read_text())
    assert sorted(listed) == sorted(path.stem for path in (reference.PAGES / "functions").glob("*.md"))


def all_pages_of_the_reference() -> str:
    return "\n".join(path.read_text() for path in reference.PAGES.rglob("*.md"))


def test_a_signature_reads_as_in_source_and_a_docstring_as_paragraphs():
    entry = reference.entry(sys.modules[__name__], "example")
    assert entry == textwrap.dedent("""\
        ```pyi
        @contextmanager
        def example(x: int, /, kind: str = "full", *, by: Callable = noop) -> Iterator[int]: ...
        ```

        Says what it does.

        ```text
        with example(1):
            y * z * 2
        ```

        **`x`**: what it takes,
        over two lines.

        **`kind`, `by`**: the rest.

        Raises ValueError.
        """)


def noop() -> None: ...


@contextlib.contextmanager
def example(x: int, /, kind: str = "full", *, by: Callable = noop) -> Iterator[int]:
    """Says what it does.

        with example(1):
            y * z * 2

    x: what it takes,
        over two lines. kind, by: the rest. Raises ValueError.
    """
    yield x


def test_the_readme_is_short_and_gives_the_figures_that_were_measured():
    readme = (ROOT / "README.md").read_text()
    assert len(readme) < 6000
    peaks = re.findall(r"\| ([\d,]+) MiB \| [\d,]+ \| (\d\.\d\d) \|", readme)
    assert len(peaks) == 8
    assert {(int(peak.replace(",", "")), float(time)) for peak, time in peaks} <= frontier_of_a_llama()
    with (ROOT / "benchmarks/results/h200/results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["case"] == "model/llama-8b/1x4096" and row["ms"]]
    figures = re.findall(r"(\d+\.\d) GiB(?: \||,) (\d+) ms", readme)
    assert len(figures) == 7
    assert set(figures) <= {(f"{int(row['peak_bytes']) / 2**30:.1f}", f"{float(row['ms']):.0f}") for row in rows}


def frontier_of_a_llama() -> set[tuple[int, float]]:
    """Returns {(MiB at 4,096 tokens, ratio of time at 2,048)} of all variants."""
    peaks, times = {}, {}
    with (ROOT / "benchmarks/results/cpu/frontier.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["model"].startswith("Llama, 8 layers"):
                if row["tokens"] == "4096":
                    peaks[row["variant"]] = round(int(row["peak_bytes"]) / 2**20)
                elif row["ratio"]:
                    times[row["variant"]] = round(float(row["ratio"]), 2)
    return {(peak, times[name]) for name, peak in peaks.items()}


def test_the_readme_names_families_whose_layers_were_all_replaced():
    with (ROOT / "benchmarks/results/convert/families.csv").open(newline="") as file:
        whole = {row["name"] for row in csv.DictReader(file) if row["verdict"] == "whole"}
    table = (ROOT / "README.md").read_text().split("<!-- families:begin -->")[1].split("<!-- families:end -->")[0]
    first = re.findall(r"(?<=[|,] )`?([A-Z][\w-]*(?: \d)?|nn\.Transformer)", table)
    assert len(first) > 30
    assert [name for name in first if not any(family.startswith(name) for family in whole)] == []


def test_the_table_of_times_is_that_of_the_results():
    arguments = ["--page", str(ROOT / "docs/measurements/figures.md"), "--results", str(ROOT / "benchmarks/results")]
    assert report.main([*arguments, "--check"]) == 0


def test_the_table_of_a_7b_llama_is_that_of_its_program():
    page = ROOT / "docs/measurements/figures.md"
    assert page.read_text() == report.with_part(page, layer.BEGIN, layer.part(), layer.END)


def test_a_wrong_block_and_a_wrong_output_are_noticed(tmp_path, monkeypatch, elsewhere):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 2\nprint(x)\n```\n\n```output\n2\n```\n\n```python\nx += 1\n```\n")
    assert check(page).namespace["x"] == 3
    page.write_text("```python\nprint(2)\n```\n\n```output\n3\n```\n")
    monkeypatch.setattr(torch, "__version__", f"{PINNED}0")
    with pytest.raises(AssertionError):
        check(page)
    monkeypatch.setattr(torch, "__version__", "1.0")
    check(page)
    page.write_text("<!-- skip: next -->\n```python\n1 / 0\n```\n\n```python\nfrom support import cases\n```\n")
    with pytest.raises(ModuleNotFoundError, match="support"):
        check(page)
