"""Checks optional packages when a command that needs them runs, so its --help needs none."""

from __future__ import annotations

import importlib.util


def missing(*packages: str) -> str | None:
    """Returns a message that names the missing packages and the command that installs them; None if all are
    installed."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if not absent:
        return None
    return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed: pip install {' '.join(absent)}"
