"""Bugs injected in compiled kernels, and what the emulator says of them, as JSON: injected.py

For tests/emulated/test_injected.py, in a process of its own, without TRITON_INTERPRET, because a kernel that was decorated
under that cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import emulator
import torch
from emulator.emulated import emulated

from ckptkern import eager, triton_kernels
from ckptkern.triton_kernels import fences

BF16 = torch.bfloat16


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


def norm() -> tuple:
    x, weight = random(24, 256), random(256)
    return triton_kernels.norm_bwd(x, x, weight, 1e-5, "rms", residual=x, need_dweight=True)


def linear() -> tuple:
    return triton_kernels.linear_fwd(random(72, 192), random(72, 192), random(72), "relu", "ieee", save_z=True)


def attention() -> tuple:
    q = random(1, 1, 200, 64)
    return triton_kernels.attn_fwd(q, q, q, eager.AttentionCore(0.125, "ieee", (None, 0)))


LAUNCHES = {"norm": norm, "linear": linear, "attention": attention}

EVERYWHERE = tuple(LAUNCHES)


class Bug(NamedTuple):
    """What it is in the PTX, and what is put in its place; the kinds of fault that it is; kernels in which it must be found.

    In other places it may be covered: a barrier that another one makes redundant, a mask that is true everywhere, the last
    group of copies, a loop that does not run.
    """

    pattern: str
    replace: Callable[[re.Match], str]
    kinds: frozenset[str]
    kernels: tuple[str, ...] = EVERYWHERE


def bug(pattern: str, replace: Callable[[re.Match], str] | str, kinds: str, *kernels: str) -> Bug:
    change = (lambda match: replace) if isinstance(replace, str) else replace
    return Bug(pattern, change, frozenset(kinds.split(", ")), kernels or EVERYWHERE)


BUGS = {
    "barrier dropped": bug(r"\bbar\.sync[ \t]+0;", "", "race"),
    "wait for copies dropped": bug(r"\bcp\.async\.wait_group[ \t]+\d+;", "", "in flight"),
    "wait for copies too lax": bug(
        r"\bcp\.async\.wait_group[ \t]+(\d+);", lambda match: f"cp.async.wait_group {int(match[1]) + 1};", "in flight"
    ),
    "group of copies not closed": bug(r"\bcp\.async\.commit_group;", "", "in flight"),
    "store to shared memory dropped": bug(r"(?:@%p\d+ )?\bst\.shared[^;]*;", "", "uninitialised, results"),
    # under Triton 3.6 the fences that we add behind the waits for copies cover attention's
    "fence before wgmma dropped": bug(
        r"\bfence\.proxy\.async[^;]*;", "", "proxy", "linear", *["attention"] * (not fences.MISSING)
    ),
    "wait for wgmma dropped": bug(r"\bwgmma\.wait_group[^;]*;", "", "in flight, results", "linear", "attention"),
    "mask of a store dropped": bug(r"@%p\d+ (st\.global)", lambda match: match[1], "bounds, race"),
    "mask of a load dropped": bug(r"@%p\d+ (ld\.global)", lambda match: match[1], "bounds", "linear", "attention"),
    "mask of a copy dropped": bug(
        r"(cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x\w+), %r\d+;", lambda match: f"{match[1]};", "bounds"
    ),
    "load 2 bytes further": bug(
        r"(ld\.global[^\[]*\[ %rd\d+ \+ )0", lambda match: f"{match[1]}2", "alignment, bounds", "norm", "attention"
    ),
    "matrix read 16 bytes further": bug(
        r"(ldmatrix[^\[]*\[%r\d+)(\+(\d+))?\]", lambda match: f"{match[1]}+{int(match[3] or 0) + 16}]",
        "bounds, uninitialised, race, in flight, results",
    ),
    "shuffle from another lane": bug(
        r"(shfl\.sync\.bfly\.b32 [^,]*,[^,]*, )(\d+)", lambda match: match[1] + ("2" if match[2] == "1" else "1"),
        "race, results", "norm", "attention",
    ),
}  # fmt: skip
PER_BUG = 3  # places at most, spread over the kernel


def change(kernel: str, pattern: str, replace: Callable[[re.Match], str], place: int) -> Callable[[str], str]:
    """PTX with the bug at the place-th occurrence in `kernel`; that of other kernels as it is."""

    def changed(ptx: str) -> str:
        if ptx != kernel:
            return ptx
        match = list(re.finditer(pattern, ptx))[place]
        return ptx[: match.start()] + replace(match) + ptx[match.end() :]

    return changed


def flat(results) -> list[torch.Tensor]:
    return [result for result in results if result is not None]


def seen(launch: Callable, arch: int, inject: Callable[[str], str], good: list[torch.Tensor]) -> str:
    """The kind of fault, "results" where only they are other ones, or "nothing"."""
    try:
        with emulated(arch, change=inject):
            results = flat(launch())
    except emulator.Fault as fault:
        return fault.kind
    same = all(
        torch.equal(result.nan_to_num(9), other.nan_to_num(9)) for result, other in zip(results, good, strict=True)
    )
    return "nothing" if same else "results"


def is_wrong(name: str, kernel: str, arch: int, counts: Counter) -> bool:
    """Must the bug be seen in this kernel, and is not, or as what it is not?"""
    bug = BUGS[name]
    # sm_80 has no wgmma, which reads shared memory itself
    absent = arch == 80 if name.endswith("wgmma dropped") else (name[:6], kernel, arch) == ("matrix", "linear", 90)
    if absent or kernel not in bug.kernels:
        return False
    return not any(counts[kind] for kind in bug.kinds) or bool(counts.keys() - bug.kinds - {"nothing", "results"})


def main() -> tuple[list[str], Counter]:
    """(bugs that were not found as what they are, how often any was seen as what)."""
    faults, total = [], Counter()
    for arch in (80, 90):
        for kernel, launch in LAUNCHES.items():
            texts: list[str] = []
            with emulated(arch, change=lambda ptx, texts=texts: texts.append(ptx) or ptx):
                good = flat(launch())
            for name, (pattern, replace, *_) in BUGS.items():
                count = len(re.findall(pattern, texts[0]))
                places = sorted({round(n * (count - 1) / max(PER_BUG - 1, 1)) for n in range(PER_BUG)}) if count else []
                counts = Counter(
                    seen(launch, arch, change(texts[0], pattern, replace, place), good) for place in places
                )
                faults += (
                    [f"{name}, {kernel}, sm_{arch}: {dict(counts)}"] if is_wrong(name, kernel, arch, counts) else []
                )
                total += counts
    return faults, total


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    json.dump(main(), sys.stdout)
