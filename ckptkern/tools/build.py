"""Builds the C++ extension ahead of its first use, for example in an image: ``python -m ckptkern build``."""

from __future__ import annotations

import argparse

from ..state import LOADED, extension


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m ckptkern build``."""
    parser.description = (
        "Build the C++ extension for this torch and Python into the user's cache or $CKPTKERN_CACHE, even if that failed "
        "before. The build needs a C++ compiler and ninja. Without the extension, Python code gives equal results with "
        "more host time."
    )


def main(args: argparse.Namespace) -> int:
    """Returns 0 if there is an extension, else 1."""
    try:
        where = LOADED.why if LOADED.module is not None else extension.built(again=True)
    except extension.Unavailable as error:
        print(f"there is no C++ extension: {error}")
        return 1
    print(where)
    return 0
