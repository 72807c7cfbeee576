"""Words that the field does not use for these things do not come back; CONTRIBUTING says which it uses."""

import re
import subprocess

import pytest
from test_architecture import ROOT

SUFFIXES = (".py", ".md", ".cpp", ".h", ".csv", ".toml", ".yml")
HISTORY = {"CHANGELOG.md", "tests/test_words.py"}
# a word -> what it is here
WORDS = {
    r"\bkept(_\w+)?\b": "saved for backward",
    r"\brebuil(t|ds?)\b": "recomputed",
    r"\bmade again\b": "recomputed",
    r"\bproducts\b": "matmuls, GEMMs",
    r"\b\w*(attention|mlp)_half\w*\b": "sublayer",
    r"\brivals?\b": "baseline",
    r"\bplant(s|ed|ing)?\b": "inject a fault",
    r"\bstatics\b": "options",
    r"\bcomposites?\b": "reference implementation",
    r"\bforeign\b": "a subclass with its own dispatch",
    r"\bturned\b": "rotated",
    r"\bby turns\b": "interleaved",
    r"\bcards?\b": "GPU",
    r"\bmultiprocessors?\b": "SM",
    r"\bbranch_scale\b": "layer_scale",
    r"\bmask_hides\b": "mask_is_exclusion",
    r"\bserved_by\b": "replaced_by",
    r"\bckptkern (tune|verify)\b": "autotune, selftest",
}


def texts() -> dict[str, str]:
    """Every text file that is in git, or would be; of a checkout without git there is nothing to hold."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = [name for name in listed.stdout.splitlines() if name.endswith(SUFFIXES) and name not in HISTORY]
    return {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}


def found(word: str, texts: dict[str, str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(word, line, re.IGNORECASE)
    ]


@pytest.fixture(scope="module")
def tree() -> dict[str, str]:
    files = texts()
    if not files:
        pytest.skip("no git checkout")
    return files


@pytest.mark.parametrize("word", WORDS)
def test_a_word_has_not_come_back(word, tree):
    assert found(word, tree) == [], f"write: {WORDS[word]}"


def test_a_word_is_found():
    assert found(r"\bkept(_\w+)?\b", {"a.py": "x = 1\ndef kept_bytes(): ..."}) == ["a.py:2: def kept_bytes(): ..."]
