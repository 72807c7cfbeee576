"""What a warm forward and backward enters: files under ckptkern/ and functions in them, in the eager backend.

`python -m tests.support.entered [NAME]` prints the counts, or each function that NAME enters and how often. Comprehensions and
lambdas are not counted: whether these are functions depends on Python's version. Nor is what runs in place of the extension.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import torch

import ckptkern

ROOT = Path(ckptkern.__file__).parent
FEATURES, HIDDEN, CLASSES = 64, 128, 100


def trained(*shape: int) -> torch.Tensor:
    return torch.randn(shape).mul_(0.1).requires_grad_()


def calls() -> dict[str, Callable[[], torch.Tensor]]:
    """A plain call of each op, of x [2, 16, FEATURES], by name."""
    x, d = trained(2, 16, FEATURES), FEATURES
    layers = trained(HIDDEN, d), trained(HIDDEN), trained(d, HIDDEN), trained(d)
    norm = dict(norm="layer", norm_weight=trained(d), norm_bias=trained(d))
    mlp = dict(zip(("up_weight", "up_bias", "down_weight", "down_bias"), layers, strict=True)) | norm
    heads = dict(qkv_weight=trained(3 * d, d), qkv_bias=trained(3 * d), out_weight=trained(d, d), out_bias=trained(d))
    attention = heads | norm | dict(num_heads=4, is_causal=True, residual=True)
    head, target = trained(CLASSES, d), torch.arange(32).view(2, 16)
    return {
        "mlp": lambda: ckptkern.mlp(x, *layers),
        "linear_cross_entropy": lambda: ckptkern.linear_cross_entropy(x, head, target),
        "attention_block": lambda: ckptkern.attention_block(x, **attention),
        "transformer_layer": lambda: ckptkern.transformer_layer(x, attention, mlp),
    }


def entered(call: Callable[[], torch.Tensor]) -> Counter[CodeType]:
    """Counts how often a third forward and backward enters each function under ckptkern/."""
    for _ in range(2):
        call().sum().backward()
    counts: Counter[CodeType] = Counter()

    def on_event(frame, event: str, _) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        is_ours = ROOT in path.parents and (path.parent != ROOT / "state" or path.name == "__init__.py")
        if event == "call" and is_ours and not code.co_name.startswith("<"):
            counts[code] += 1

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        call().sum().backward()
    finally:
        sys.setprofile(before)
    return counts


def by_file(counts: Counter[CodeType]) -> dict[str, list[CodeType]]:
    files = defaultdict(list)
    for code in sorted(counts, key=lambda code: (code.co_filename, code.co_firstlineno)):
        files[str(Path(code.co_filename).relative_to(ROOT))].append(code)
    return files


def main() -> None:
    chosen = sys.argv[1:]
    for name, call in calls().items():
        if chosen and name not in chosen:
            continue
        counts = entered(call)
        files = by_file(counts)
        print(f"{name:22} {len(files):3} files {len(counts):4} functions {sum(counts.values()):5} calls")
        for file, codes in files.items() if chosen else ():
            print(f"  {file}")
            for code in codes:
                print(f"    {code.co_firstlineno:4} {getattr(code, 'co_qualname', code.co_name)} {counts[code]}")


if __name__ == "__main__":
    main()
