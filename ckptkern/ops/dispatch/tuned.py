"""The table of implementations that `python -m ckptkern autotune` measured on this machine: a file for each device, read once a
process."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from .implementations import IMPLS, SIZES

FORMAT = 4  # 2 had tiles, 3 a row for few and one for many rows
Table = dict[tuple[str, str, int], str]  # op, dtype, place of the size in SIZES -> implementation


def folder() -> Path:
    """$CKPTKERN_CACHE, or ckptkern in the user's cache."""
    if chosen := os.environ.get("CKPTKERN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptkern"


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def machine(device_type: str, index: int | None) -> dict[str, str]:
    """What a table is valid for: device and versions; on a CPU its number of threads, too."""
    if device_type == "cuda":
        device = torch.cuda.get_device_name(index)
    else:
        device = f"{_processor()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    return {"device": device, **{name: _version(name) for name in ("torch", "triton", "ckptkern")}}


def path(device_type: str, index: int | None) -> Path:
    device = machine(device_type, index)["device"]
    return folder() / f"implementations-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def read(file: Path, wanted: dict[str, str]) -> Table:
    """The table in `file`. Raises ValueError with what is wrong: it is damaged, or for another machine or version."""
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        known, came, table = data["format"] == FORMAT, {}, {}
        if known:
            came = {name: data["machine"][name] for name in wanted}
            table = {(row["op"], row["dtype"], SIZES.index(row["features"])): row["impl"] for row in data["impls"]}
        if not all(isinstance(impl, str) for impl in table.values()):
            raise TypeError("an implementation that is not a string")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from None
    if not known:
        raise ValueError(f"another version of ckptkern wrote it: its format is {data['format']!r}, not {FORMAT}")
    if other := [f"{name} {came[name]}, not {wanted[name]}" for name in wanted if came[name] != wanted[name]]:
        raise ValueError(f"it was made for {'; '.join(other)}")
    if unknown := set(table.values()) - set(IMPLS):
        raise ValueError(f"it names unknown implementations: {', '.join(sorted(map(str, unknown)))}")
    return table


def rows(file: Path) -> list[dict[str, Any]]:
    """All that a valid file says of each matmul, times included."""
    return json.loads(file.read_text())["impls"]


@functools.cache
def table(device_type: str, index: int | None) -> Table:
    """What was tuned for this device; nothing if there is no such file, or none that can be used, which is said once."""
    if device_type not in ("cpu", "cuda") or (device_type == "cuda" and not torch.cuda.is_available()):
        return {}
    file: Path | None = None
    try:
        file = path(device_type, index)
        return read(file, machine(device_type, index))
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: there is no home
        warnings.warn(
            f"{file or 'the table of tuned implementations'} is not used, because {error}. Matmuls take the default "
            "implementations; `python -m ckptkern autotune` writes the file again",
            stacklevel=2,
        )
        return {}


def write(file: Path, wanted: dict[str, str], impls: list[dict[str, Any]]) -> None:
    """All at once, so that no other process reads half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"format": FORMAT, "machine": wanted, "impls": impls}, indent=1) + "\n")
    draft.replace(file)
