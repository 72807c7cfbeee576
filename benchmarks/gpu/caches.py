"""Packs what a part hands to the next on a machine that keeps nothing: the built extension, Triton's and inductor's caches, and
the tuned table, in one archive.

A compiled kernel's intermediate code is left out: Triton loads the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_BEHIND = (".ttir", ".ttgir", ".llir", ".source", ".lock")
BUFFER = 2**17  # bytes that may not be in the file yet while it is written
SOURCES = "sources"  # digest of the extension's sources, beside the archive's files


def sources() -> str:
    """Returns a digest of the extension's sources."""
    digest = hashlib.sha256()
    for path in (ROOT / "setup.py", *sorted((ROOT / "csrc").iterdir())):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def units_of(work: Path) -> Iterator[list[Path]]:
    """Yields groups of files that are useful together, the most valuable first: the extension, the tuned table, the files of
    a kernel, and inductor's files."""
    yield [*work.glob("*/lib/ckptkern/_C*.so")]
    for name in ("tuned", "triton", "inductor"):
        folder = work / "cache" / name
        for unit in sorted(folder.iterdir(), key=os.path.getmtime) if folder.is_dir() else ():
            files = sorted(unit.rglob("*")) if unit.is_dir() else [unit]
            yield [path for path in files if path.is_file() and not path.name.endswith(LEFT_BEHIND)]


def pack(archive: Path, work: Path, limit: int) -> str:
    """Writes the archive, of at most `limit` bytes, and returns a line about it, also if the disk is full."""
    try:
        return _pack(archive, work, limit)
    except OSError as error:
        return f"not packed: {error}"


def _pack(archive: Path, work: Path, limit: int) -> str:
    work.mkdir(parents=True, exist_ok=True)
    (work / SOURCES).write_text(sources())
    new, left_out = work / "caches.new", 0
    with tarfile.open(new, "w:gz", compresslevel=6) as packed:
        packed.add(work / SOURCES, SOURCES)
        for unit in units_of(work):
            if new.stat().st_size + sum(path.stat().st_size for path in unit) + BUFFER > limit:
                left_out += len(unit)
                continue
            for path in unit:
                packed.add(path, str(path.relative_to(work)))
    archive.write_bytes(new.read_bytes())
    return f"{archive.stat().st_size:,} bytes" + (f", {left_out} files left out" if left_out else "")


def unpack(archive: Path, work: Path) -> str:
    """Unpacks an archive into this machine's folders, and returns a line about it. Triton's groups name files by their path,
    which may be another one here."""
    work.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
            names = packed.getnames()
    except (OSError, EOFError, tarfile.TarError) as error:  # a machine was cut while it wrote
        return f"not read, so everything is built and compiled again: {error}"
    for path in (work / "cache/triton").glob("*/__grp__*.json"):
        group = json.loads(path.read_text())
        group["child_paths"] = {name: str(path.parent / name) for name in group["child_paths"]}
        path.write_text(json.dumps(group))
    same = (work / SOURCES).read_text() == sources()
    for path in work.glob("*/lib/ckptkern/_C*.so") if same else ():
        os.utime(path)  # newer than its sources, which have just been copied here
    return f"{len(names)} files, the extension {'as it was built' if same else 'is built again'}"
