"""What a fault is, and how the place in a file that it changes is found by text that survives formatting."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """A mistake that a maintainer could make in one place, and the tests that should see it.

    file: from the repository's root. text: what stands there now. What is between « and », or all of it without these, becomes
    `instead`. Line breaks, spaces, quotes and a comma before a closing bracket do not count. tests: arguments of pytest, the
    smallest part of the suite first; the others are tried where that one sees nothing.
    """

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Returns the folder of the table to which it counts: "ops" for ckptkern/ops/mlp/branch.py."""
        first, *rest = Path(self.file).parts
        return rest[0] if first == "ckptkern" else first


class AnchorError(Exception):
    """A fault's text is not in its file exactly once, or what it becomes cannot be parsed."""


def pattern_of(text: str) -> str:
    """Returns a regular expression of the text's words and signs, with any white space between them."""
    tokens = re.findall(r"\w+|[^\w\s]", re.sub(r",\s*([)\]}])", r"\1", text))
    regex, before = "", ""
    for token in tokens:
        if before:
            regex += r"\s+" if is_word(before) and is_word(token) else r"\s*"
        if token in ")]}":
            regex += r"(?:,\s*)?"
        regex += "[\"']" if token in "\"'" else re.escape(token)
        before = token
    return (r"(?<!\w)" if is_word(tokens[0]) else "") + regex + (r"(?!\w)" if is_word(before) else "")


def is_word(token: str) -> bool:
    return bool(re.match(r"\w", token))


def changed(fault: Fault, source: str) -> str:
    """Returns the file's source with the fault in it. Raises AnchorError."""
    context, _, rest = fault.text.rpartition("«")
    replaced, _, after = rest.partition("»")
    parts = [f"({pattern_of(part)})" if part.strip() else "()" for part in (context, replaced, after)]
    hits = list(re.finditer(r"\s*".join(parts), source))
    if len(hits) != 1:
        raise AnchorError(
            f"{fault.name}: its text is {len(hits)} times in {fault.file}, not once: {fault.text!r}. Anchor the fault anew in "
            "tests/faults: give the code that stands there now, or more of what is around it"
        )
    start, stop = hits[0].span(2)
    if source[start:stop] == fault.instead:
        raise AnchorError(f"{fault.name}: it changes nothing, because `instead` is what stands in {fault.file}")
    changed = source[:start] + fault.instead + source[stop:]
    if fault.file.endswith(".py"):
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise AnchorError(
                f"{fault.name}: {fault.file} with the fault is no Python: {error}. Change `instead` in tests/faults"
            ) from error
    return changed


def problems(faults: Iterable[Fault], root: Path = ROOT) -> list[str]:
    """Returns what is wrong with the faults: places that are lost, and names that occur twice."""
    errors, names = [], set()
    for fault in faults:
        if fault.name in names:
            errors.append(f"{fault.name}: two faults have this name")
        names.add(fault.name)
        try:
            changed(fault, (root / fault.file).read_text())
        except OSError as error:
            errors.append(f"{fault.name}: {fault.file} cannot be read: {error.strerror}. Anchor the fault anew")
        except AnchorError as error:
            errors.append(str(error))
    return errors


def without_tests(faults: Iterable[Fault], root: Path = ROOT) -> list[str]:
    """Returns which files that should hold a test of a fault are not there."""
    errors = []
    for fault in faults:
        words = " ".join(fault.tests).split()
        paths = [word.partition("::")[0] for word in words if word.startswith("tests/")]
        errors += [
            f"{fault.name}: {path} is not there, in which a test should see it; name the file that has the test now"
            for path in paths
            if not (root / path).exists()
        ]
    return errors
