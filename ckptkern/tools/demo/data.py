"""The demo's text and the batches drawn from it."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .config import Config


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, uint8 [n] each, with the files they came from."""

    train: Tensor
    held_out: Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def is_held_out(path: str) -> bool:
    """Whether a file (relative, '/'-separated) is held out: decided by its top-level name, about one in ten."""
    group = path.split("/")[0].removesuffix(".py")
    return hashlib.sha256(group.encode()).digest()[0] < 26


def load_corpus(root: Path | None = None, max_bytes: int = 16 * 2**20) -> Corpus:
    """Reads the ``.py`` files below root (default: the standard library) in sorted order, up to max_bytes in all.

    Installed packages, tests, unreadable files and files that repeat an earlier one byte for byte are left out.
    Raises FileNotFoundError if there is no source text to train on.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    files: dict[bool, list[str]] = {False: [], True: []}
    seen: set[bytes] = set()
    total = 0
    for path in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if skip.intersection(path.split("/")):
            continue
        try:
            text = (root / path).read_bytes()
        except OSError:
            continue
        digest = hashlib.sha256(text).digest()
        if not text or digest in seen:
            continue
        if total + len(text) > max_bytes:
            break
        seen.add(digest)
        total += len(text)
        texts[is_held_out(path)].append(text)
        files[is_held_out(path)].append(path)
    if not texts[False] or not texts[True]:
        raise FileNotFoundError(f"demo: wanted Python source files below {root} but found {total} bytes of them")
    train, held_out = (torch.frombuffer(bytearray(b"".join(texts[part])), dtype=torch.uint8) for part in (False, True))
    return Corpus(train, held_out, tuple(files[False]), tuple(files[True]))


def windows(text: Tensor, starts: Tensor, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The windows of text that begin at starts [B]: inputs and next bytes, int64 [B, seq_len] each, on device."""
    rows = text[starts[:, None] + torch.arange(seq_len + 1)].to(device=device, dtype=torch.int64)
    return rows[:, :-1], rows[:, 1:]


def training_batches(config: Config, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """One batch per step, drawn from the seed alone, so that every variant trains on the same batches."""
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        starts = torch.randint(len(text) - config.seq_len, (config.batch_size,), generator=generator)
        yield windows(text, starts, config.seq_len, torch.device(config.device))


def held_out_batches(config: Config, text: Tensor, batches: int = 8) -> list[tuple[Tensor, Tensor]]:
    """The same evenly spaced windows every time."""
    starts = torch.linspace(0, len(text) - config.seq_len - 1, batches * config.batch_size, dtype=torch.float64).long()
    return [windows(text, part, config.seq_len, torch.device(config.device)) for part in starts.chunk(batches)]
