"""Every ```python block of the README and the documentation runs, and prints what the page says that it prints.

The blocks of a page run in order in one namespace. A block ```output is what the block before it printed, to the letter.
`<!-- skip: next -->` leaves one out: it needs a GPU or several processes. What a reader need not see, such as a rank's
environment, is an invisible block: `<!-- invisible-code-block: python ... -->`.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]

_evaluate = PythonEvaluator()


def run(example: Example) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        _evaluate(example)
    example.namespace["_printed"] = printed.getvalue()


def compare(example: Example) -> None:
    assert example.namespace.pop("_printed") == example.parsed


def check(page: Path) -> Document:
    parsers = CodeBlockParser("python", run), CodeBlockParser("output", compare), SkipParser()
    document = Document.parse(str(page), *parsers)
    document.namespace["__name__"] = page.stem
    for example in document:
        example.evaluate()
    return document


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The blocks run in an empty folder and find nothing of the test suite."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "tests"])
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_of(page, elsewhere):
    check(ROOT / page)


@pytest.mark.parametrize("fence", ["```py", "```Python", "``` python", "```python title=x", "~~~python"])
def test_no_block_is_written_so_that_it_would_not_run(fence):
    """Only fences that say ```python are run."""
    other = re.compile(r"^\s*(`{3,}|~{3,})[ ]*[Pp]y.*$", re.MULTILINE)
    assert other.search(fence)
    wrong = [
        f"{page}: {found.group()}"
        for page in PAGES
        for found in other.finditer((ROOT / page).read_text())
        if found.group().strip() != "```python"
    ]
    assert not wrong


def test_a_wrong_block_and_a_wrong_output_are_noticed(tmp_path, elsewhere):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 2\nprint(x)\n```\n\n```output\n2\n```\n\n```python\nx += 1\n```\n")
    assert check(page).namespace["x"] == 3
    page.write_text("```python\nprint(2)\n```\n\n```output\n3\n```\n")
    with pytest.raises(AssertionError):
        check(page)
    page.write_text("<!-- skip: next -->\n```python\n1 / 0\n```\n\n```python\nimport cases\n```\n")
    with pytest.raises(ModuleNotFoundError, match="cases"):
        check(page)
