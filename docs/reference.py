"""Writes signatures and docstrings into the pages of docs/reference, for readers of the repository and of the site.

A heading names an object: `# ckptkern.mlp` on a function's own page, `## ckptkern.nn.Linear` and `### Linear.from_torch` on
a page of several objects. The text below such a heading is generated; the text above the first one is written by hand.
A table's row that begins with a link, such as "| [`mlp`](functions/mlp.md) |", gets the first sentence of the docstring.
To list a new function, add its row to functions.md: its page is created.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

PAGES = Path(__file__).resolve().parent / "reference"
HEADING = re.compile(r"^(##? ckptkern\.\S+|### \S+)$", re.MULTILINE)
ROW = re.compile(r"^\| \[`(\w+)`\]\(functions/\w+\.md\) \|.*$", re.MULTILINE)
INDENT = "    "
# Aliases that mean nothing to who has not read the code.
ALIASES = {"Bytes": "int | str | None", "Device": "torch.device | str | int | None"}


class Bare(str):
    """Holds a string that inspect shows without quotes: annotations are strings already."""

    __repr__ = str.__str__


def annotation(hint: object) -> object:
    text = getattr(hint, "__forward_arg__", hint)  # a NamedTuple's field has a ForwardRef
    return Bare(ALIASES.get(text, text)) if isinstance(text, str) else text


def default(value: object) -> object:
    if isinstance(value, str):
        return Bare(json.dumps(value, ensure_ascii=False))  # in double quotes
    return Bare(value.__name__) if inspect.isfunction(value) else value


def parameters(signature: inspect.Signature) -> list[str]:
    """Returns the parameters as in source, with the `*` and the `/` between their kinds."""
    texts, kinds = [], [param.kind for param in signature.parameters.values()]
    for index, param in enumerate(signature.parameters.values()):
        if param.kind is param.KEYWORD_ONLY and not {param.KEYWORD_ONLY, param.VAR_POSITIONAL} & {*kinds[:index]}:
            texts.append("*")
        texts.append(str(param.replace(annotation=annotation(param.annotation), default=default(param.default))))
        if param.kind is param.POSITIONAL_ONLY and param.POSITIONAL_ONLY not in kinds[index + 1 :]:
            texts.append("/")
    return texts


def definition(function: Callable) -> str:
    signature = inspect.signature(function)
    inner = parameters(signature)
    result = "" if signature.return_annotation is signature.empty else f" -> {annotation(signature.return_annotation)}"
    line = f"def {function.__name__}({', '.join(inner)}){result}: ..."
    if len(line) > 88:
        line = (
            f"def {function.__name__}(\n"
            + "".join(f"{INDENT}{parameter},\n" for parameter in inner)
            + f"){result}: ..."
        )
    if hasattr(function, "__wrapped__") and inspect.isgeneratorfunction(inspect.unwrap(function)):
        line = f"@contextmanager\n{line}"
    return line


def base_name(base: type) -> str:
    if base is tuple:
        return "NamedTuple"
    name = base.__qualname__ if base.__module__ == "builtins" else f"{base.__module__}.{base.__qualname__}"
    return re.sub(r"^torch\.nn\.modules\.\w+\.", "torch.nn.", name)


def class_definition(cls: type) -> str:
    """Returns the class with its bases, and its fields or its constructor, if ckptkern defines one."""
    bases = [base_name(base) for base in cls.__bases__ if base is not object and not base.__name__.startswith("_")]
    head = f"class {cls.__name__}" + (f"({', '.join(bases)})" if bases else "")
    if dataclasses.is_dataclass(cls) or hasattr(cls, "_fields"):
        inner = "\n".join(parameters(inspect.signature(cls))).replace(" = <factory>", "")
    else:
        constructors = (cls.__init__, cls.__new__)
        own = [method for method in constructors if (getattr(method, "__module__", None) or "").startswith("ckptkern")]
        if not own:
            return f"{head}: ..."
        inner = definition(own[0])
    return f"{head}:\n{textwrap.indent(inner, INDENT)}"


def stub(owner: object, name: str) -> str:
    member = inspect.getattr_static(owner, name)
    if isinstance(member, type):
        return class_definition(member)
    decorator = {property: "@property\n", classmethod: "@classmethod\n"}.get(type(member), "")
    return decorator + definition(getattr(member, "fget", None) or getattr(member, "__func__", member))


def markdown(doc: str, names: set[str]) -> str:
    """Returns a docstring as Markdown: indented blocks are fenced, and a paragraph begins at every argument that is explained,
    at Raises, and after a line that ends early with a full stop."""
    name = "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or "(?!)"
    begin = r"(?:^|(?<=\. ))"  # a line's or a sentence's beginning
    explained = re.compile(rf"{begin}((?:{name})(?:, (?:{name}))*): ", re.MULTILINE)
    section = re.compile(rf"{begin}(?=(?:Raises|Saved for backward)\b)", re.MULTILINE)
    parts: list[str] = []
    for part in re.split(r"\n\s*\n", doc):
        if part.startswith(INDENT):
            parts.append(f"```text\n{textwrap.dedent(part)}\n```")
            continue
        part = explained.sub(lambda match: f"\n\n**`{match[1].replace(', ', '`, `')}`**: ", section.sub("\n\n", part))
        part = re.sub(r"^(?=.*\.\n).{,90}\n(?=\S)", r"\g<0>\n", part, flags=re.MULTILINE)
        parts += [re.sub(r"\n +", "\n", text.strip()) for text in part.split("\n\n") if text.strip()]
    return "\n\n".join(parts)


def entry(owner: object, name: str) -> str:
    """Returns the text below an object's heading: its signature and its docstring."""
    member = getattr(owner, name)
    names = set(getattr(member, "__annotations__", {}))
    if callable(member) and not (isinstance(member, type) and issubclass(member, BaseException)):
        names |= set(inspect.signature(member).parameters)
    return f"```pyi\n{stub(owner, name)}\n```\n\n{markdown(inspect.getdoc(member), names)}\n"


def source_entry(module: ModuleType, name: str) -> str:
    """Returns the entry of a class whose module imports a framework, which need not be installed: from its source."""
    tree = ast.parse(Path(module.__file__).with_name(f"{module.MODULES[name]}.py").read_text())
    cls = next(node for node in tree.body if getattr(node, "name", None) == name)
    methods = {node.name: node.args for node in cls.body if isinstance(node, ast.FunctionDef)}
    head = f"class {name}({', '.join(map(ast.unparse, cls.bases))})"
    inner = f":\n{INDENT}def __init__({ast.unparse(methods['__init__'])}): ..." if "__init__" in methods else ": ..."
    names = {*methods, *(arg.arg for args in methods.values() for arg in (*args.args, args.vararg, args.kwarg) if arg)}
    return f"```pyi\n{head}{inner}\n```\n\n{markdown(ast.get_docstring(cls), names)}\n"


def row(match: re.Match) -> str:
    """Returns the row of an index, with the first sentence of the docstring."""
    paragraph = (
        inspect.getdoc(getattr(importlib.import_module("ckptkern"), match[1])).split("\n\n")[0].replace("\n", " ")
    )
    sentence = re.split(r"(?<=\.) |:$", paragraph)[0].replace("|", r"\|")
    return f"| [`{match[1]}`](functions/{match[1]}.md) | {sentence} |"


def page(text: str) -> str:
    """Returns the page with today's signatures and docstrings."""
    own, *rest = HEADING.split(text)
    parts, module = [ROW.sub(row, own)], ""
    for heading in rest[::2]:
        path = heading.split()[1]
        if not heading.startswith("### "):
            module = path.rpartition(".")[0]
            owner, name = importlib.import_module(module), path.rpartition(".")[2]
        else:
            owner_name, _, name = path.rpartition(".")
            owner = getattr(importlib.import_module(module), owner_name)
        text = source_entry(owner, name) if name in getattr(owner, "MODULES", ()) else entry(owner, name)
        parts.append(f"{heading}\n\n{text}\n")
    return "".join(parts).rstrip() + "\n"


def main() -> None:
    for name in ROW.findall((PAGES / "functions.md").read_text()):
        path = PAGES / "functions" / f"{name}.md"
        if not path.exists():
            path.write_text(f"# ckptkern.{name}\n")
    for path in sorted(PAGES.rglob("*.md")):
        path.write_text(page(path.read_text()))


if __name__ == "__main__":
    main()
