"""Docstrings of the package, kernels, benchmarks and examples begin with a verb; names, also in tests, say what they hold."""

import ast
import re
from collections.abc import Iterator

import pytest
from test_architecture import ROOT

FOLDERS = ("ckptkern", "triton_kernels", "benchmarks", "examples")
ALLOWED = 5
# A class or a module may begin with a noun: "Lazy logits: ...". None begins with one of these.
HEADLESS = re.compile(
    r"(Of|Those|Is|Are|Has|Have|Does|Do|Can|May|Was|Were|With|Without|For|By|In|At|On|To|From|As|That|Which|What|Where|When|While|If|"
    r"Whether|How|Who|Whose|Its|Their|It|They|Them|And|But|Or|Also|Not|No|Into|After|Before|Between|Under|Over|Than|So|Like|Until|"
    r"Per|Through)(?=\s)"
)
# Nouns that end like a verb.
NOUNS = re.compile(
    r"(Arguments|Bits|Blocks|Bytes|Chunks|Columns|Devices|Elements|Errors|Experts|Fields|Files|Gradients|Groups|Heads|Indices|"
    r"Inputs|Keys|Kinds|Layers|Less|Lines|Log-probabilities|Masks|Modes|Modules|Names|Norms|Numbers|Offsets|Options|Outputs|"
    r"Parameters|Parts|Paths|Patterns|Plus|Regions|Results|Rows|Schemas|Seconds|Seeds|Shapes|Sizes|Slices|Statistics|Steps|Strides|"
    r"Tensors|This|Tiles|Tokens|Types|Values|Views|Weights|Words)\b"
)
VAGUE = {"one", "found", "made", "given"}


def fault(node: ast.AST, doc: str) -> str | None:
    """Returns what is wrong with the first sentence of a docstring."""
    sentence = re.split(r"(?<=[.?])\s", doc)[0]
    if doc.startswith("("):
        return "a tuple"
    if sentence.endswith("?"):
        return "a question"
    if HEADLESS.match(doc):
        return "headless"
    verb = re.match(r"[A-Z][a-z-]+s\b", doc) and not NOUNS.match(doc)
    return None if verb or isinstance(node, ast.ClassDef | ast.Module) else "no verb"


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        if documented and (doc := ast.get_docstring(node)):
            yield node, doc


def faults(tree: ast.Module) -> list[tuple[int, str, str]]:
    """Returns the line, what is wrong, and the beginning of each docstring that does not begin as it should."""
    pairs = ((node, doc, fault(node, doc)) for node, doc in docstrings(tree))
    return [(getattr(node, "lineno", 1), wrong, doc[:80]) for node, doc, wrong in pairs if wrong]


def vague(tree: ast.Module) -> list[tuple[int, str]]:
    """Returns the line and the name of each variable and parameter whose name says nothing."""
    bound = [
        (node.lineno, node.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    bound += [(node.lineno, node.arg) for node in ast.walk(tree) if isinstance(node, ast.arg)]
    return [(line, name) for line, name in bound if name in VAGUE]


@pytest.mark.parametrize(("check", "folders"), [(faults, FOLDERS), (vague, (*FOLDERS, "tests"))])
def test_docstrings_begin_with_a_verb_and_names_say_what_they_hold(check, folders):
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}
    wrong = [f"{name}:{': '.join(map(str, row))}" for name, tree in trees.items() for row in check(tree)]
    if len(wrong) > ALLOWED:
        pytest.fail("\n".join([f"{len(wrong)} (at most {ALLOWED}):", *sorted(wrong)]), pytrace=False)


@pytest.mark.parametrize(
    ("doc", "wrong"),
    [
        ("Returns the peak, in bytes.", None),
        ("Those of q and k.", "headless"),
        ("(dx, dw): gradients.", "a tuple"),
        ("Is it contiguous? A view may be.", "a question"),
        ("The gradients of q.", "no verb"),
        ("Gradients of q.", "no verb"),
    ],
)
def test_a_docstring_is_recognised(doc, wrong):
    tree = ast.parse(f'def f(one, x):\n    """{doc}"""\n    found = [made for made in x]\n    return found')
    assert faults(tree) == ([(1, wrong, doc)] if wrong else [])
    assert sorted(name for _, name in vague(tree)) == ["found", "made", "one"]
    assert faults(ast.parse(f'class C:\n    """{doc}"""')) == (
        [(1, wrong, doc)] if wrong and wrong != "no verb" else []
    )
