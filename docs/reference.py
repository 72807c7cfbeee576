"""Signatures and docstrings in the pages of docs/reference, which a clone, a code host and the site show alike.

A page lists objects by headings, `## ckptkern.nn.Linear` and `### Linear.from_torch`; what follows such a heading is written
again by `make docs`. Text above the first of them is the page's own.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

PAGES = Path(__file__).resolve().parent / "reference"
HEADING = re.compile(r"^(## ckptkern\.\S+|### \S+)$", re.MULTILINE)
INDENT = "    "


class Bare(str):
    """A string that inspect shows without quotes: annotations are strings already."""

    __repr__ = str.__str__


def annotation(given: object) -> object:
    text = getattr(given, "__forward_arg__", given)  # of a NamedTuple's field
    return Bare(text) if isinstance(text, str) else text


def default(given: object) -> object:
    if isinstance(given, str):
        return Bare(json.dumps(given, ensure_ascii=False))  # in double quotes
    return Bare(given.__name__) if inspect.isfunction(given) else given


def parameters(signature: inspect.Signature) -> list[str]:
    """The parameters as in source, with the `*` and the `/` between their kinds."""
    found, kinds = [], [parameter.kind for parameter in signature.parameters.values()]
    for index, one in enumerate(signature.parameters.values()):
        if one.kind is one.KEYWORD_ONLY and not {one.KEYWORD_ONLY, one.VAR_POSITIONAL} & {*kinds[:index]}:
            found.append("*")
        found.append(str(one.replace(annotation=annotation(one.annotation), default=default(one.default))))
        if one.kind is one.POSITIONAL_ONLY and one.POSITIONAL_ONLY not in kinds[index + 1 :]:
            found.append("/")
    return found


def definition(function: Callable) -> str:
    signature = inspect.signature(function)
    inner = parameters(signature)
    result = "" if signature.return_annotation is signature.empty else f" -> {annotation(signature.return_annotation)}"
    line = f"def {function.__name__}({', '.join(inner)}){result}: ..."
    if len(line) > 88:
        line = f"def {function.__name__}(\n" + "".join(f"{INDENT}{one},\n" for one in inner) + f"){result}: ..."
    if hasattr(function, "__wrapped__") and inspect.isgeneratorfunction(inspect.unwrap(function)):
        line = f"@contextmanager\n{line}"
    return line


def base_name(base: type) -> str:
    if base is tuple:
        return "NamedTuple"
    name = base.__qualname__ if base.__module__ == "builtins" else f"{base.__module__}.{base.__qualname__}"
    return re.sub(r"^torch\.nn\.modules\.\w+\.", "torch.nn.", name)


def class_definition(given: type) -> str:
    """The class with its bases, and its fields or, where it is ckptkern's own, its constructor."""
    bases = [base_name(base) for base in given.__bases__ if base is not object and not base.__name__.startswith("_")]
    head = f"class {given.__name__}" + (f"({', '.join(bases)})" if bases else "")
    if dataclasses.is_dataclass(given) or hasattr(given, "_fields"):
        inner = "\n".join(parameters(inspect.signature(given))).replace(" = <factory>", "")
    else:
        made_by = (given.__init__, given.__new__)
        own = [one for one in made_by if (getattr(one, "__module__", None) or "").startswith("ckptkern")]
        if not own:
            return f"{head}: ..."
        inner = definition(own[0])
    return f"{head}:\n{textwrap.indent(inner, INDENT)}"


def stub(owner: object, name: str) -> str:
    given = inspect.getattr_static(owner, name)
    if isinstance(given, type):
        return class_definition(given)
    decorator = {property: "@property\n", classmethod: "@classmethod\n"}.get(type(given), "")
    return decorator + definition(getattr(given, "fget", None) or getattr(given, "__func__", given))


def markdown(doc: str, names: set[str]) -> str:
    """A docstring's paragraphs, also those that begin after a line that ends early, one for each argument that it explains, and
    its indented blocks fenced."""
    some = "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or "(?!)"
    begin = r"(?:^|(?<=\. ))"  # of a line or a sentence
    explained = re.compile(rf"{begin}((?:{some})(?:, (?:{some}))*): ", re.MULTILINE)
    section = re.compile(rf"{begin}(?=(?:Raises|Saved for backward)\b)", re.MULTILINE)
    parts: list[str] = []
    for part in re.split(r"\n\s*\n", doc):
        if part.startswith(INDENT):
            parts.append(f"```text\n{textwrap.dedent(part)}\n```")
            continue
        part = explained.sub(lambda match: f"\n\n**`{match[1].replace(', ', '`, `')}`**: ", section.sub("\n\n", part))
        part = re.sub(r"^(?=.*\.\n).{,90}\n(?=\S)", r"\g<0>\n", part, flags=re.MULTILINE)
        parts += [re.sub(r"\n +", "\n", one.strip()) for one in part.split("\n\n") if one.strip()]
    return "\n\n".join(parts)


def entry(owner: object, name: str) -> str:
    """What follows an object's heading."""
    given = getattr(owner, name)
    names = set(getattr(given, "__annotations__", {}))
    if callable(given) and not (isinstance(given, type) and issubclass(given, BaseException)):
        names |= set(inspect.signature(given).parameters)
    return f"```pyi\n{stub(owner, name)}\n```\n\n{markdown(inspect.getdoc(given), names)}\n"


def page(text: str) -> str:
    """The page with what its headings name, as it is now."""
    own, *rest = HEADING.split(text)
    parts, module = [own], ""
    for heading in rest[::2]:
        path = heading.split()[1]
        if heading.startswith("## "):
            module = path.rpartition(".")[0]
            owner, name = importlib.import_module(module), path.rpartition(".")[2]
        else:
            owner_name, _, name = path.rpartition(".")
            owner = getattr(importlib.import_module(module), owner_name)
        parts.append(f"{heading}\n\n{entry(owner, name)}\n")
    return "".join(parts).rstrip() + "\n"


def main() -> None:
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(page(path.read_text()))


if __name__ == "__main__":
    main()
