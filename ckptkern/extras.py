"""Finds what a command needs and an installation may lack: optional packages, and the programs of a checkout."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).resolve().parents[1]
NOT_INSTALLED = """ckptkern {command}: it is part of a checkout, and here only the package is installed. To get it:
    git clone CKPTKERN-REPOSITORY ckptkern && cd ckptkern && pip install --no-build-isolation --editable .
    python -m ckptkern {command}"""


def missing(*packages: str) -> str | None:
    """Returns a message with the missing packages and the command that installs them; None if all are installed."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if not absent:
        return None
    return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed: pip install {' '.join(absent)}"


def from_checkout(module: str, command: str) -> ModuleType:
    """Imports a module that only a checkout has. Without a checkout, says how to get one, and ends the process with status
    2."""
    sys.path += [path for path in (str(CHECKOUT), str(CHECKOUT / "tests")) if path not in sys.path]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise
        print(NOT_INSTALLED.format(command=command), file=sys.stderr)
        raise SystemExit(2) from error


@contextlib.contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Shows a progress bar inside the block, on a terminal where rich is installed. Yields a function of a stage's name and
    the number of stages before it."""
    if not sys.stderr.isatty() or missing("rich"):
        yield lambda *stage: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda name, done=None: bar.update(task, completed=done, description=f"{title}: {name or 'the model'}")
