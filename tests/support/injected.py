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

import emulator
import torch
from emulator.emulated import emulated

from ckptkern import eager, triton_kernels

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

# name -> (what it is in the PTX, what is put in its place)
BUGS: dict[str, tuple[str, Callable[[re.Match], str]]] = {
    "barrier dropped": (r"\bbar\.sync[ \t]+0;", lambda found: ""),
    "wait for copies dropped": (r"\bcp\.async\.wait_group[ \t]+\d+;", lambda found: ""),
    "wait for copies too lax": (
        r"\bcp\.async\.wait_group[ \t]+(\d+);", lambda found: f"cp.async.wait_group {int(found[1]) + 1};"
    ),
    "group of copies not closed": (r"\bcp\.async\.commit_group;", lambda found: ""),
    "store to shared memory dropped": (r"(?:@%p\d+ )?\bst\.shared[^;]*;", lambda found: ""),
    "fence before wgmma dropped": (r"\bfence\.proxy\.async[^;]*;", lambda found: ""),
    "wait for wgmma dropped": (r"\bwgmma\.wait_group[^;]*;", lambda found: ""),
    "mask of a store dropped": (r"@%p\d+ (st\.global)", lambda found: found[1]),
    "mask of a load dropped": (r"@%p\d+ (ld\.global)", lambda found: found[1]),
    "mask of a copy dropped": (
        r"(cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x\w+), %r\d+;", lambda found: f"{found[1]};"
    ),
    "load 2 bytes further": (r"(ld\.global[^\[]*\[ %rd\d+ \+ )0", lambda found: f"{found[1]}2"),
    "matrix read 16 bytes further": (
        r"(ldmatrix[^\[]*\[%r\d+)(\+(\d+))?\]", lambda found: f"{found[1]}+{int(found[3] or 0) + 16}]"
    ),
    "shuffle from another lane": (
        r"(shfl\.sync\.bfly\.b32 [^,]*,[^,]*, )(\d+)", lambda found: found[1] + ("2" if found[2] == "1" else "1")
    ),
}  # fmt: skip
PER_BUG = 3  # places at most, spread over the kernel


def change(kernel: str, pattern: str, replace: Callable[[re.Match], str], place: int) -> Callable[[str], str]:
    """PTX with the bug at the place-th occurrence in `kernel`; that of other kernels as it is."""

    def changed(ptx: str) -> str:
        if ptx != kernel:
            return ptx
        found = list(re.finditer(pattern, ptx))[place]
        return ptx[: found.start()] + replace(found) + ptx[found.end() :]

    return changed


def flat(results) -> list[torch.Tensor]:
    return [result for result in results if result is not None]


def seen(launch: Callable, arch: int, inject: Callable[[str], str], good: list[torch.Tensor]) -> str:
    """The kind of fault, "results" where only they are other ones, or "nothing"."""
    try:
        with emulated(arch, change=inject):
            found = flat(launch())
    except emulator.Fault as fault:
        return fault.kind
    same = all(torch.equal(one.nan_to_num(9), other.nan_to_num(9)) for one, other in zip(found, good, strict=True))
    return "nothing" if same else "results"


def main() -> dict[str, Counter]:
    """bug on sm_ARCH in kernel -> how often it was seen as what."""
    answers: dict[str, Counter] = {}
    for arch in (80, 90):
        for name, launch in LAUNCHES.items():
            texts: list[str] = []
            with emulated(arch, change=lambda ptx, texts=texts: texts.append(ptx) or ptx):
                good = flat(launch())
            for bug, (pattern, replace) in BUGS.items():
                count = len(re.findall(pattern, texts[0]))
                places = sorted({round(n * (count - 1) / max(PER_BUG - 1, 1)) for n in range(PER_BUG)}) if count else []
                kinds = Counter(seen(launch, arch, change(texts[0], pattern, replace, place), good) for place in places)
                if places:
                    answers[f"{bug}, {name}, sm_{arch}"] = kinds
    return answers


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    json.dump(main(), sys.stdout)
