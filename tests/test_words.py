"""Words that the field does not use for these things do not come back; the table says which words do."""

import re
import subprocess

import pytest
from test_architecture import ROOT

SUFFIXES = (".py", ".md", ".cpp", ".h", ".csv", ".toml", ".yml")
HISTORY = {"tests/test_words.py"}
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
    r"\b(choose|check|own|by|every|each)_levels?\b|--levels\b|\b(recompute|selective|full) levels?\b": "recompute mode",
    r"\bgeneral.segments?\b|\b(fused|recompute|checkpointed) segments?\b": "activation checkpoint, checkpointed region",
    r"\b(cases|config|plan|compiled)[._]ways\b|\b(by|with)_ways?\b|--ways\b": "variant of a benchmark, strategy of a plan",
    r"\b(choose|forced|default)_route\b|\b_routes\b|--route\b|\bthe route\b": "implementation, impl",
    r"\w*twins?(?![a-z])": "drop-in replacement, CPU counterpart, reference",
    r"\bstock\b|\bplain (pytorch|torch|runs?)\b": "eager, unmodified",
    r"\bproofs?\b|\bprove[ns]?\b|\bimpostors?\b": "numerical check, checked, near-miss",
    r"\bmachine.code\b": "SASS",
    r"\bbenchmarks[./]gate\b|\bcompile gate\b": "code-generation check, tests.codegen",
    r"\b(un)?pric(es?|ed|ing)\b": "estimate",
    r"\bjudge\w*\b": "check, tolerance",
    r"\bshipped\b": "default",
    r"\w*ragged\w*": "unaligned, tail tile; torch's nested tensors are jagged",
    r"\bdraws (its|the|other|new|a new|masks|random|anew)\b": "samples",
    r"\b(eager|philox|p|self)\.dropped\(": "apply_dropout",
    r"\w*widen\w*": "upcast",
    r"\bstand(-| for a |_)?ins?\b|\bstands in for\b": "placeholder, lazy tensor; replaces",
    r"\bserve[sd]?\b": "replaces, covers, runs",
    r"\ba mixture('s)?\b(?! of)|\btoken's slots?\b": "mixture of experts (MoE), token-expert pair",
    r"\bloss.heads?\b": "LM head and loss, linear cross-entropy",
    r"\bhouse\b|\bfront door\b": "architecture, README",
    r"\bthe definitions? of triton_kernels\b": "reference implementation",
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
        if re.search(word, text, re.IGNORECASE)
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
    if lines := found(word, tree):
        pytest.fail("\n".join([f"write: {WORDS[word]}", *lines]), pytrace=False)


def test_every_word_would_be_found():
    """Each pattern matches something that was once written here."""
    once = (
        "kept_bytes rebuilt `made again` products attention_half rivals planted statics composite foreign turned `by turns` "
        "card multiprocessor branch_scale mask_hides served_by `ckptkern tune` choose_level `general segment` cases.ways "
        "choose_route twin stock proof `machine code` benchmarks.gate priced judge shipped ragged `draws its` eager.dropped( "
        "widen `stand-in` serves `a mixture` `loss head` house `the definitions of triton_kernels`"
    )
    assert [word for word in WORDS if not found(word, {"a.md": once})] == []


def test_a_word_is_found():
    assert found(r"\bkept(_\w+)?\b", {"a.py": "x = 1\ndef kept_bytes(): ..."}) == ["a.py:2: def kept_bytes(): ..."]
