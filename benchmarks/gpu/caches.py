"""What a part hands to the next on a machine that keeps nothing: the built extension, Triton's and inductor's caches, the tuned
table, in one archive.

Of a compiled kernel the intermediate code stays behind: Triton loads the rest. An archive that would be larger than the limit
leaves out inductor's files.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_BEHIND = (".ttir", ".ttgir", ".llir", ".source", ".lock")
SOURCES = "sources"  # beside the archive's files: of what the extension was built


def sources() -> str:
    """Returns a digest of what the extension is built from."""
    digest = hashlib.sha256()
    for path in (ROOT / "setup.py", *sorted((ROOT / "csrc").iterdir())):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def files_of(work: Path, inductor: bool = True) -> Iterator[Path]:
    folders = [work / "cache" / name for name in ("triton", "tuned", *(["inductor"] if inductor else []))]
    for path in [
        *work.glob("*/lib/ckptkern/_C*.so"),
        *(one for folder in folders for one in sorted(folder.rglob("*"))),
    ]:
        if path.is_file() and not path.name.endswith(LEFT_BEHIND):
            yield path


def pack(archive: Path, work: Path, limit: int) -> str:
    """Writes the archive, and returns a line about it. Files that end or change meanwhile belong to programs that run."""
    work.mkdir(parents=True, exist_ok=True)
    for inductor in (True, False):
        new = work / "caches.new"
        with tarfile.open(new, "w:gz", compresslevel=6) as packed:
            (work / SOURCES).write_text(sources())
            packed.add(work / SOURCES, SOURCES)
            for path in files_of(work, inductor):
                try:
                    packed.add(path, str(path.relative_to(work)))
                except FileNotFoundError:
                    continue
        if new.stat().st_size <= limit:
            break
    else:
        return f"no archive: of {new.stat().st_size} bytes, and at most {limit} come back"
    archive.write_bytes(new.read_bytes())
    return f"{new.stat().st_size:,} bytes" + ("" if inductor else ", without inductor's cache")


def unpack(archive: Path, work: Path) -> str:
    """Unpacks an archive where this machine builds and caches, and returns a line about it. Triton's groups name files by their
    place, which may be another one here."""
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


class Packer:
    """Packs in a thread, while the next step runs."""

    def __init__(self, archive: Path, work: Path, limit: int):
        self._arguments, self._thread = (archive, work, limit), threading.Thread()
        self.said = "not packed"

    def _pack(self) -> None:
        self.said = pack(*self._arguments)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._pack)
            self._thread.start()

    def finish(self) -> str:
        """Packs once more, and returns a line about the archive."""
        if self._thread.is_alive():
            self._thread.join()
        self._pack()
        return self.said
