"""Packages beside torch, which some commands want: looked for when a command runs, so that its help needs none."""

from __future__ import annotations

import importlib.util


def missing(*packages: str) -> str | None:
    """What to say where some of `packages` are not installed, with the command that installs them; else None."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if not absent:
        return None
    return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed: pip install {' '.join(absent)}"
