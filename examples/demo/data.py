"""Loads the demo's text, tokenizes it, and draws batches."""

from __future__ import annotations

import collections
import re
import sysconfig
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

# A word, digits or punctuation, with the space before it, or white space.
WORD = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+| ?[^\sA-Za-z_0-9]+|\s+")
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def load_text(root: Path | None = None, max_bytes: int = 2**24) -> list[bytes]:
    """Reads the ``.py`` files below root (default: the standard library) in sorted order, up to max_bytes in all.

    Installed packages, tests, unreadable files and files that repeat an earlier one byte for byte are left out.
    Raises FileNotFoundError if there is no source text to train on.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts: dict[bytes, None] = {}  # in order
    total = 0
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.intersection(path.relative_to(root).parts):
            continue
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if text and text not in texts:
            total += len(text)
            if total > max_bytes:
                break
            texts[text] = None
    if not texts:
        raise FileNotFoundError(f"demo: wanted Python source files of at most {max_bytes} bytes below {root}")
    return [*texts]


def load_corpus(vocabulary: int, max_bytes: int) -> tuple[Tensor, list[bytes]]:
    """Returns the standard library's source text, as tokens of its own vocabulary."""
    return tokenized(b"".join(load_text(max_bytes=max_bytes)), vocabulary)


def tokenized(text: bytes, size: int) -> tuple[Tensor, list[bytes]]:
    """Returns ids, int64 [n], and the bytes of each of `size` tokens, or of fewer if the text has few words.

    The vocabulary is the 256 bytes and the text's most frequent words; other words are spelled in bytes.
    """
    words = WORD.findall(text)
    counts = collections.Counter(word for word in words if len(word) > 1)
    vocabulary = [*(bytes([byte]) for byte in range(256)), *(word for word, _ in counts.most_common(size - 256))]
    token = {word: place for place, word in enumerate(vocabulary)}
    return torch.tensor(
        [token_id for word in words for token_id in ([token[word]] if word in token else word)]
    ), vocabulary


def batches(config: Namespace, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (tokens, next tokens) for each step, int64 [batch_size, seq_len] each, drawn from the seed alone, so that every
    variant trains on the same batches."""
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        starts = torch.randint(len(ids) - config.seq_len, (config.batch_size,), generator=generator)
        rows = ids[starts[:, None] + torch.arange(config.seq_len + 1)].to(config.device)
        yield rows[:, :-1], rows[:, 1:]
