"""The demo's text, its tokens, and the batches drawn from them."""

from __future__ import annotations

import collections
import hashlib
import heapq
import itertools
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .config import Config

# Merges stay inside these: a word, digits or punctuation, with the space before it, or white space.
WORD = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+| ?[^\sA-Za-z_0-9]+|\s+")


class Corpus(NamedTuple):
    """ids: int64 [n], the text as tokens; vocabulary: the bytes of each token; bytes and files that the text has."""

    ids: Tensor
    vocabulary: list[bytes]
    bytes: int
    files: int


def load_text(root: Path | None = None, max_bytes: int = 2**24) -> list[bytes]:
    """Reads the ``.py`` files below root (default: the standard library) in sorted order, up to max_bytes in all.

    Installed packages, tests, unreadable files and files that repeat an earlier one byte for byte are left out.
    Raises FileNotFoundError if there is no source text to train on.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    texts: dict[bytes, bytes] = {}
    total = 0
    for path in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if skip.intersection(path.split("/")):
            continue
        try:
            text = (root / path).read_bytes()
        except OSError:
            continue
        digest = hashlib.sha256(text).digest()
        if not text or digest in texts:
            continue
        if total + len(text) > max_bytes:
            break
        texts[digest] = text
        total += len(text)
    if not texts:
        raise FileNotFoundError(f"demo: wanted Python source files of at most {max_bytes} bytes below {root}")
    return list(texts.values())


def load_corpus(vocabulary: int, max_bytes: int) -> Corpus:
    """The standard library's source text, as tokens of a vocabulary that is trained on it."""
    texts = load_text(max_bytes=max_bytes)
    text = b"".join(texts)
    return Corpus(*tokenized(text, vocabulary), len(text), len(texts))


def tokenized(text: bytes, size: int) -> tuple[Tensor, list[bytes]]:
    """Byte-pair encoding (Sennrich et al., arXiv 1508.07909) of a text, trained on the text itself.

    Begins with the 256 bytes and joins the most frequent pair of neighbours into a token (of equals the first in order of
    ids) until there are `size` tokens, or no pair is left. Returns ids, int64 [n], and the bytes of each token.
    """
    stream = WORD.findall(text)
    counts = collections.Counter(stream)
    words = {word: list(word) for word in counts}
    pairs: dict[tuple[int, int], int] = collections.Counter()
    places = collections.defaultdict(set)  # the words in which a pair is, or was
    for word, count in counts.items():
        for pair in itertools.pairwise(word):
            pairs[pair] += count
            places[pair].add(word)
    vocabulary = [bytes([byte]) for byte in range(256)]
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    while heap and len(vocabulary) < size:
        count, pair = heapq.heappop(heap)
        if pairs[pair] != -count:  # it has become rarer since, and is in the heap with that count too
            continue
        changed = collections.Counter()
        for word in places.pop(pair):
            before, after = words[word], joined(words[word], pair, len(vocabulary))
            words[word] = after
            for one in itertools.pairwise(before):
                changed[one] -= counts[word]
            for one in itertools.pairwise(after):
                changed[one] += counts[word]
                places[one].add(word)
        vocabulary.append(vocabulary[pair[0]] + vocabulary[pair[1]])
        for one, change in changed.items():
            pairs[one] += change
            if change and pairs[one]:
                heapq.heappush(heap, (-pairs[one], one))
    return torch.tensor([token for word in stream for token in words[word]]), vocabulary


def joined(ids: list[int], pair: tuple[int, int], token: int) -> list[int]:
    """The ids with `token` in place of each occurrence of the pair, from the left."""
    result: list[int] = []
    place = 0
    while place < len(ids):
        found = (ids[place], *ids[place + 1 : place + 2]) == pair
        result.append(token if found else ids[place])
        place += 1 + found
    return result


def batches(config: Config, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, next tokens) for each step, int64 [batch_size, seq_len] each, drawn from the seed alone, so that every
    variant trains on the same batches."""
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        starts = torch.randint(len(ids) - config.seq_len, (config.batch_size,), generator=generator)
        rows = ids[starts[:, None] + torch.arange(config.seq_len + 1)].to(config.device)
        yield rows[:, :-1], rows[:, 1:]
