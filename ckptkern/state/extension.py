"""Finds the C++ extension `ckptkern._C`, or builds it: in the package, in the user's cache, or from csrc/ with ninja.

It is built once for each torch, Python, compiler and source, in a folder that only its owner may write; files that others may
write are not loaded. Without a compiler, ninja or such a folder, `portable` does the same in Python, and a warning says so.

CKPTKERN_EXTENSION: "auto"; "cached", which builds nothing; "python", which uses no extension; "required", which raises
ImportError without one. CKPTKERN_CACHE: the cache folder, by default ckptkern in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

VARIABLE, CHOICES = "CKPTKERN_EXTENSION", ("auto", "cached", "python", "required")
NAME = "ckptkern._C"
WAIT = 120.0  # seconds to wait for another process that builds
# -DNDEBUG, as Python's own flags have it: else checks of pybind11 abort where Python unwinds a thread. -g0: with debug
# information the extension is 35 times as large. -fopenmp, for at::parallel_for, is only a compile flag: the symbols come from
# the OpenMP runtime that torch ships, so that there is only one thread pool.
FLAGS = ["-O3", "-g0", "-DNDEBUG", "-fvisibility=hidden", *(["-fopenmp"] if sys.platform == "linux" else [])]
HERE = Path(__file__).resolve().parent


def folder_of_sources() -> Path:
    """Returns the folder csrc of a wheel or a checkout."""
    return next(path for path in (HERE.parent / "csrc", HERE.parents[1] / "csrc") if path.is_dir())


# runs in another process, because torch's builder also loads what it builds
BUILD = """
import sys
from torch.utils import cpp_extension
cpp_extension.load("_C", sys.argv[2:], extra_cflags={flags}, build_directory=sys.argv[1], is_python_module=False)
"""


class Loaded(NamedTuple):
    """The extension, or None. why: where it is from, or why there is none."""

    module: ModuleType | None
    why: str


class Unavailable(Exception):
    """Raised with the reason why there is no extension, and the remedy."""


def digest_of(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def compiler() -> Path | None:
    path = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    return None if path is None else Path(path).resolve()


def cache() -> Path:
    """Returns $CKPTKERN_CACHE, or ckptkern in the user's cache. Raises RuntimeError if there is no home."""
    folder = os.environ.get("CKPTKERN_CACHE")
    return Path(folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptkern")


def folders() -> tuple[Path, list[Path]]:
    """Returns the folder to build in, and the folders to search, the best match first."""
    sources = sorted(folder_of_sources().iterdir())
    source = digest_of(
        repr(FLAGS).encode(), *(part for path in sources for part in (path.name.encode(), path.read_bytes()))
    )
    common = f"torch{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{source}"
    compiler_path, by = compiler(), "none"
    if compiler_path is not None:
        status = compiler_path.stat()
        by = digest_of(f"{compiler_path} {status.st_size} {status.st_mtime_ns}".encode())[:8]
    folder = cache() / "extension"
    own = folder / f"{common}-{by}"
    return own, [own] if compiler_path is not None else sorted(folder.glob(f"{common}-*"))


def is_private(path: Path) -> bool:
    """Returns whether the path belongs to this user, and nobody else may write it."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def imported(path: Path) -> Loaded:
    spec = importlib.util.spec_from_file_location(NAME, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return Loaded(module, str(path))


def cached() -> Loaded | None:
    for folder in folders()[1]:
        path = folder / "_C.so"
        if path.exists():
            if not all(map(is_private, (path, folder, folder.parent))):
                raise Unavailable(f"others may write {path}, which is therefore not loaded. Delete {folder.parent}")
            return imported(path)
    return None


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits until no other process builds in the folder; the lock ends with its process."""
    import fcntl

    with open(folder / "lock", "w") as lock:
        end = time.monotonic() + WAIT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise Unavailable(
                        f"another process has been building the C++ extension for {WAIT:.0f} s. The next run will find it"
                    ) from None
                time.sleep(0.1)
        yield


def built(again: bool = False) -> Path:
    """Builds the extension, unless another process has built it meanwhile, and returns its path. again: tries again after a
    failure."""
    if compiler() is None:
        raise Unavailable("there is no C++ compiler (c++ or g++, or $CXX)")
    path = os.environ.get("PATH", "")
    if importlib.util.find_spec("ninja") is not None:  # this Python's scripts may not be on PATH
        import ninja

        path = os.pathsep.join([ninja.BIN_DIR, path])
    if shutil.which("ninja", path=path) is None:
        raise Unavailable("ninja is missing: pip install ninja")
    (folder, _), environment = folders(), os.environ | {"PATH": path, "PYTHONSAFEPATH": "1"}
    library, failed = folder / "_C.so", folder / "failed.txt"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for path in (folder.parent, folder):
            path.mkdir(mode=0o700, exist_ok=True)
            if not is_private(path):
                raise Unavailable(f"others may write {path}: delete it, or set CKPTKERN_CACHE to a folder of your own")
        with alone(folder):
            if library.exists():
                return library
            if failed.exists() and not again:
                raise Unavailable(f"its build failed before ({failed}); `python -m ckptkern build` tries again")
            print(
                f"ckptkern: building its C++ extension for torch {torch.__version__} in {folder}, once, in about a minute. "
                f"{VARIABLE}=cached builds nothing",
                file=sys.stderr,
                flush=True,
            )
            start = time.monotonic()
            with tempfile.TemporaryDirectory(dir=folder) as work:
                sources = sorted(folder_of_sources().glob("*.cpp"))
                command = [sys.executable, "-c", BUILD.format(flags=FLAGS), work, *map(str, sources)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    failed.write_text(done.stdout + done.stderr)
                    raise Unavailable(f"the build failed: {failed} says why")
                os.replace(Path(work, "_C.so"), library)
            failed.unlink(missing_ok=True)
            print(f"ckptkern: built in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            return library
    except (OSError, ImportError) as error:  # a read-only home, or no fcntl
        raise Unavailable(f"{type(error).__name__}: {error}") from error


def loaded() -> Loaded:
    """Returns the extension that CKPTKERN_EXTENSION allows, or why there is none."""
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, but is {choice!r}")
    if choice == "python":
        return Loaded(None, f"{VARIABLE}=python")
    path = HERE.parent / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"  # of a wheel for one torch
    if path.exists():
        extension = imported(path)
        built_for = extension.module.torch_version
        if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
            raise ImportError(
                f"ckptkern: {path.name} was built for torch {built_for}, and torch {torch.__version__} runs. Install "
                "the wheel for this torch, or the wheel for every machine: pip install --force-reinstall ckptkern"
            )
        return extension
    try:
        extension = cached()
        if extension is None and choice == "cached":
            return Loaded(None, f"no extension is built, and {VARIABLE}=cached builds none")
        return extension or imported(built())
    except (Unavailable, OSError, ImportError, RuntimeError) as error:  # RuntimeError: there is no home
        why = str(error)
    if choice == "required":
        raise ImportError(f"ckptkern: {VARIABLE}=required, but there is no C++ extension: {why}")
    warnings.warn(
        f"ckptkern runs in Python, with equal results and more host time, because there is no C++ extension: {why}. "
        f"{VARIABLE}=python runs so without this warning; `python -m ckptkern env` says what it costs",
        stacklevel=2,
    )
    return Loaded(None, why)


LOADED = loaded()
