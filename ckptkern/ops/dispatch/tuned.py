"""The table of implementations that `python -m ckptkern autotune` measured on this machine: one file per device, read once per
process."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from ...state.extension import cache
from .implementations import IMPLS, SIZES

FORMAT = 4  # format 2 had tiles, 3 separate entries for few and many rows
Key = tuple[str, str, int]  # op, dtype, one of SIZES
Row = dict[str, Any]  # a Key's values, its implementation and its measurements


def version_of(package: str, missing: str = "none") -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return missing


def machine(device_type: str, index: int | None) -> dict[str, str]:
    """Returns what a table is valid for: a device, and versions. On a CPU only interpreted kernels have a choice."""
    device = torch.cuda.get_device_name(index) if device_type == "cuda" else device_type
    return {"device": device, **{name: version_of(name) for name in ("torch", "triton", "ckptkern")}}


def path(device_type: str, index: int | None) -> Path:
    """Returns a device's file in $CKPTKERN_CACHE, or in ckptkern in the user's cache."""
    device = machine(device_type, index)["device"]
    return cache() / f"implementations-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def read(file: Path, wanted: dict[str, str]) -> tuple[dict[Key, Row], str | None]:
    """Returns the rows of `file`, and why it cannot be used, or None: it is damaged, or for another machine or version. A
    missing file has no rows."""
    came: dict[str, str] = {}
    rows: dict[Key, Row] = {}
    try:
        data = json.loads(file.read_text())
        if (version := data["format"]) == FORMAT:
            came = {name: data["machine"][name] for name in wanted}
            rows = {(row["op"], row["dtype"], SIZES[SIZES.index(row["features"])]): row for row in data["impls"]}
        unknown = {row["impl"] for row in rows.values()}.difference(IMPLS)
    except FileNotFoundError:
        return {}, None
    except OSError as error:
        return {}, str(error)
    except (KeyError, TypeError, ValueError) as error:
        return {}, f"it is damaged ({type(error).__name__}: {error})"
    if version != FORMAT:
        return {}, f"another version of ckptkern wrote it: its format is {version!r}, not {FORMAT}"
    if other := [f"{name} {came[name]}, not {wanted[name]}" for name in wanted if came[name] != wanted[name]]:
        return {}, f"it was made for {'; '.join(other)}"
    if unknown:
        return {}, f"it names unknown implementations: {', '.join(sorted(map(str, unknown)))}"
    return rows, None


@functools.cache
def table(device_type: str, index: int | None) -> dict[Key, Row]:
    """Returns the tuned rows of this device, none without a usable file. Warns once of a file that cannot be used."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return {}
    try:
        file = path(device_type, index)
        rows, why = read(file, machine(device_type, index))
    except RuntimeError as error:  # the user has no home folder
        file, rows, why = Path("the table of tuned implementations"), {}, str(error)
    if why:
        warnings.warn(
            f"{file} is not used, because {why}. Matmuls take the default implementations; `python -m ckptkern autotune` "
            "writes the file again",
            stacklevel=2,
        )
    return rows
