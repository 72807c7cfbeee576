"""Checks optional packages when a command that needs them runs, so its --help needs none."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator


def missing(*packages: str) -> str | None:
    """Returns a message that names the missing packages and the command that installs them; None if all are
    installed."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if not absent:
        return None
    return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed: pip install {' '.join(absent)}"


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar on a terminal where rich is installed, which goes when all is done. Yields what is told each stage, and how many
    were before it."""
    if not sys.stderr.isatty() or missing("rich"):
        yield lambda *stage: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda name, done=None: bar.update(task, completed=done, description=f"{what}: {name or 'the model'}")
