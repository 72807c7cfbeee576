"""Runs a kernel's CTAs, one after the other, and in each the threads that go together."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

import numpy as np

from .cta import CTA
from .memory import Fault, Memory
from .ptx import EXIT
from .translate import Program, translate

BLOCKS = 10**7  # that a launch may run before it is taken for one that hangs


@dataclasses.dataclass(eq=False, slots=True)
class Tensor:
    """An allocation that a launch may touch: its bytes at the address `base`; `allowed` bytes (None: all)."""

    name: str
    base: int
    data: np.ndarray
    allowed: np.ndarray | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Strand:
    """Threads that go together (None: all) until they reach block `until`, where those that parted from them wait.

    A branch whose threads do not agree makes two strands, which run in turns: warps go on on their own, as on a GPU, and a
    barrier that only one of the two reaches stays incomplete.
    """

    mask: np.ndarray | None
    block: int
    until: int
    parent: Strand | None = None
    children: int = 0
    waits: bool = False  # at a barrier


@dataclasses.dataclass
class Counts:
    """What a launch ran."""

    ctas: int = 0
    blocks: int = 0


def run_cta(program: Program, cta: CTA, counts: Counts) -> None:
    """Runs all threads to their end. Fault: what they did wrong."""
    registers = [
        np.bool_(False) if not width else np.zeros((), f"u{width}")[()] for width in program.kernel.registers.values()
    ]
    ready = deque([Strand(None, 0, len(program.blocks))])
    while ready:
        strand = ready.popleft()
        cta.strand = strand
        _turn(program, cta, strand, registers, ready, counts)
        ready.extend(cta.woken)
        cta.woken.clear()
    waiting = [(number, barrier) for number, barrier in cta.barriers.items() if barrier.waiting]
    if waiting:
        number, barrier = waiting[0]
        text = f"{int(barrier.arrived.sum())} of {barrier.wanted} threads reach barrier {number}"
        raise Fault("barrier", text, barrier.waiting[0][1])
    cta.finish()


def _turn(program: Program, cta: CTA, strand: Strand, registers: list, ready: deque, counts: Counts) -> None:
    """Runs a strand until it ends, parts, or has to wait."""
    blocks, kernel, number = program.blocks, program.kernel, cta.threads
    while strand.block != strand.until:
        here, mask = strand.block, strand.mask
        counts.blocks += 1
        if counts.blocks > BLOCKS:
            raise Fault("hang", f"{BLOCKS} blocks", kernel.name)
        if mask is None:
            taken = blocks[here](registers, cta, None)
        else:
            before = [registers[n] for n in program.writes[here]]
            taken = blocks[here](registers, cta, mask)
            for n, old in zip(program.writes[here], before, strict=True):
                if registers[n] is not old:
                    registers[n] = cta.blend(mask, registers[n], old)
        cta.fragments.clear()
        target, meeting = kernel.blocks[here].target, kernel.blocks[here].meeting
        end = len(blocks)
        after = here + 1
        if target is not None:
            active = cta.alive if mask is None else mask
            yes = active if taken is None else np.broadcast_to(taken, (number,)) & active
            if target == EXIT:
                cta.alive = cta.alive & ~yes
                strand.mask = active & ~yes
                after = here + 1 if strand.mask.any() else strand.until
            elif np.array_equal(yes, active):
                after = target
            elif yes.any():
                strand.block = end if meeting == EXIT else meeting
                strand.children = 2
                for block, threads in ((target, yes), (here + 1, active & ~yes)):
                    ready.append(Strand(threads, block, strand.block, strand))
                return
        strand.block = after
        if strand.waits:
            return
    _join(strand, cta, ready)


def _join(strand: Strand, cta: CTA, ready: deque) -> None:
    """Its parent goes on when both children are here."""
    parent = strand.parent
    if parent is None:
        return
    parent.children -= 1
    if not parent.children:
        mask = cta.alive if parent.mask is None else parent.mask & cta.alive
        parent.mask = None if mask.all() else mask
        if not mask.any():
            parent.block = parent.until
        ready.append(parent)


def granule_of(widths: Iterable[int]) -> int:
    """Bytes in which accesses are told apart: the least that a kernel moves, at most 4."""
    return min([*widths, 4])


def run(
    ptx: str,
    grid: tuple[int, ...],
    shared: int,
    arguments: list,
    tensors: list[Tensor],
    programs: Iterable[int] | None = None,
) -> Counts:
    """Runs the kernel of `ptx` on a grid of CTAs, with `shared` bytes of shared memory each.

    arguments: a numpy scalar a parameter, in order. programs: which CTAs run, in which order, by
    x + X (y + Y z); None: all.
    Raises Fault for what the kernel does wrong, ptx.Unknown for PTX that has no meaning here.
    """
    program = translate(ptx)
    kernel = program.kernel
    if len(arguments) != len(kernel.parameters):
        raise ValueError(f"{kernel.name} has {len(kernel.parameters)} parameters; {len(arguments)} were given")
    parameters = dict(zip(kernel.parameters, arguments, strict=True))
    granule = granule_of(kernel.widths("global"))
    memories = [
        Memory(t.name, t.data, granule, t.base, t.allowed) for t in sorted(tensors, key=lambda tensor: tensor.base)
    ]
    sizes = dict(zip("xyz", (*grid, 1, 1), strict=False))
    counts, time = Counts(), 1
    for number in range(int(np.prod(grid))) if programs is None else programs:
        place = {
            "x": number % sizes["x"],
            "y": number // sizes["x"] % sizes["y"],
            "z": number // sizes["x"] // sizes["y"],
        }
        special = {f"%ctaid.{axis}": np.uint32(at) for axis, at in place.items()}
        special |= {f"%nctaid.{axis}": np.uint32(size) for axis, size in sizes.items()}
        special |= {f"%ntid.{axis}": np.uint32(kernel.threads if axis == "x" else 1) for axis in "xyz"}
        special |= {"%tid.y": np.uint32(0), "%tid.z": np.uint32(0)}
        cta = CTA(kernel, shared, granule_of(kernel.widths("shared")), memories, parameters, special, time)
        with np.errstate(all="ignore"):
            run_cta(program, cta, counts)
        counts.ctas += 1
        time = cta.order.time + 1
    return counts
