"""TMA, mbarriers and warps of their own: what hand-written PTX does, what injected faults are found as, and whole kernels."""

from __future__ import annotations

import json
import re
from importlib import metadata

import emulator
import numpy as np
import pytest
from emulator import Fault, Tensor, TensorMap, Unknown
from emulator.numerics import from_bf16, high_half_of_64, to_bf16
from support.outside import start

THREADS, BYTES, BARRIER = 256, 1024, 2048  # a box has a word for each thread; the mbarrier comes after two boxes
IN, OUT = 1 << 44, 2 << 44
HEAD = """
.visible .entry snippet(
    .param .align 64 .b8 box[128],
    .param .u64 .ptr .global .align 16 out
)
.reqntid {threads}
.maxnreg 128
{{
    .reg .pred %p<8>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    ld.param.b64 %rd0, [out];
    mov.b64 %rd2, box;
    cvta.param.u64 %rd1, %rd2;
    mov.u32 %r0, %tid.x;
    setp.eq.u32 %p0, %r0, 0;
    shl.b32 %r1, %r0, 2;
    cvt.u64.u32 %rd3, %r1;
    add.s64 %rd4, %rd0, %rd3;
    {body}
    ret;
}}
"""
INIT = "@%p0 mbarrier.init.shared::cta.b64 [global_smem+2048], 1;"
INVAL = "@%p0 mbarrier.inval.shared::cta.b64 [global_smem+2048];"
EXPECT = "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [global_smem+2048], 1024;"
LOAD = (
    "@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [global_smem], [%rd1, {%r2, %r3}], [global_smem+2048];"
)
READ = "ld.shared.b32 %r4, [%r1];"
WRITE = "st.shared.b32 [%r1], %r0;"
RESULT = "st.global.b32 [%rd4], %r4;"
FENCE = "fence.proxy.async.shared::cta;"
STORE = "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r2, %r3}], [global_smem];"
COMMIT = "cp.async.bulk.commit_group;"
WAIT_READ = "cp.async.bulk.wait_group.read 0;"
BAR = "bar.sync 0;"


def wait(parity: int = 0, at: int = BARRIER) -> str:
    """As Triton writes it."""
    return f"""
    {{
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared::cta.b64 complete, [global_smem+{at}], {parity};
    @!complete bra.uni waitLoop;
    }}
    """


def corner(x: int, y: int) -> str:
    return f"mov.b32 %r2, {x}; mov.b32 %r3, {y};"


LOADED = (corner(0, 0), INIT, BAR, EXPECT, LOAD, wait(), READ, RESULT)
STORED = (corner(0, 0), WRITE, FENCE, BAR, STORE, COMMIT, WAIT_READ)


def described(tensor: np.ndarray, box: tuple[int, ...], swizzle: int = 0, fill: int = 0) -> TensorMap:
    return TensorMap(IN, tensor.shape, tensor.strides, box, tensor.itemsize, swizzle, fill)


def run(
    parts: tuple[str, ...],
    tensor: np.ndarray | None = None,
    box: TensorMap | None = None,
    threads: int = THREADS,
    shared: int = 4096,
) -> np.ndarray:
    """What a snippet leaves in `out`, a word for each thread; by default `tensor` is 8 x 32 words, one box."""
    tensor = np.arange(256, dtype=np.uint32).reshape(8, 32) if tensor is None else tensor
    out = np.zeros(threads, np.uint32)
    views = [Tensor(n, b, t.reshape(-1).view(np.uint8)) for n, b, t in (("in", IN, tensor), ("out", OUT, out))]
    text = HEAD.format(threads=threads, body="\n".join(parts))
    emulator.run(text, (1,), shared, [box or described(tensor, (8, 32)), np.uint64(OUT)], views)
    return out


def cut(tensor: np.ndarray, box: tuple[int, ...], start: tuple[int, ...], fill: int = 0) -> np.ndarray:
    """A box of a tensor, element by element."""
    found = np.full(box, fill, tensor.dtype)
    for place in np.ndindex(*box):
        at = tuple(np.add(start, place))
        if all(0 <= i < n for i, n in zip(at, tensor.shape, strict=True)):
            found[place] = tensor[at]
    return found


def exchanged(rows: np.ndarray, swizzle: int) -> np.ndarray:
    """The pieces of 16 bytes of each row where the swizzle puts them: c at c ^ (the number of its 128 bytes % pieces)."""
    pieces = rows.reshape(len(rows), -1, 4)
    found = np.empty_like(pieces)
    for row, piece in np.ndindex(*pieces.shape[:2]):
        found[row, piece ^ row * swizzle // 128 % (swizzle // 16)] = pieces[row, piece]
    return found.reshape(-1)


# --- loads and stores


CORNERS = [(0, 0), (-3, -5), (17, 30), (5, -32), (40, 3)]  # the last two are outside altogether


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("x", "y"), CORNERS)
def test_load(swizzle, x, y):
    tensor = np.random.default_rng(0).integers(1, 2**32, (37, 36), np.uint32)
    box = (BYTES // (swizzle or 64), (swizzle or 64) // 4)
    rows = cut(tensor, box, (y, x), 7)
    expected = exchanged(rows, swizzle) if swizzle else rows.reshape(-1)
    assert (run((corner(x, y), *LOADED[1:]), tensor, described(tensor, box, swizzle, 7)) == expected).all()


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("x", "y"), CORNERS)
def test_store(swizzle, x, y):
    tensor = np.full((37, 36), 999, np.uint32)
    box = (BYTES // (swizzle or 64), (swizzle or 64) // 4)
    run((corner(x, y), *STORED[1:]), tensor, described(tensor, box, swizzle))
    expected = np.full_like(tensor, 999)
    places = np.arange(256, dtype=np.uint32).reshape(box)  # what thread n wrote to word n lands at the place of word n
    moved = np.empty(256, np.uint32)
    moved[exchanged(places, swizzle) if swizzle else places.reshape(-1)] = np.arange(256)
    for (row, column), value in np.ndenumerate(moved.reshape(box)):
        if 0 <= row + y < 37 and 0 <= column + x < 36:
            expected[row + y, column + x] = value
    assert (tensor == expected).all()


@pytest.mark.parametrize("box", [(256,), (4, 8, 8), (2, 4, 4, 8), (2, 2, 4, 4, 4)])
def test_load_of_other_ranks(box):
    tensor = np.random.default_rng(1).integers(1, 2**32, tuple(n + 4 for n in box), np.uint32)
    coordinates = [f"{3 - axis}" for axis in range(len(box))]
    load = LOAD.replace("2d", f"{len(box)}d").replace("%r2, %r3", ", ".join(coordinates))
    expected = cut(tensor, box, tuple(map(int, reversed(coordinates))))
    assert (run((*LOADED[:4], load, *LOADED[5:]), tensor, described(tensor, box)) == expected.reshape(-1)).all()


def test_load_of_16_bit_elements():
    tensor = np.random.default_rng(2).integers(1, 2**16, (20, 40), np.uint16)
    out = run((corner(33, -1), *LOADED[1:]), tensor, described(tensor, (16, 32), fill=0x7FFF))
    assert (out.view(np.uint16) == cut(tensor, (16, 32), (-1, 33), 0x7FFF).reshape(-1)).all()


def test_every_phase_brings_its_box():
    second = (BAR, corner(8, 0), EXPECT, LOAD, wait(1), "ld.shared.b32 %r5, [%r1];", "add.u32 %r4, %r4, %r5;", RESULT)
    assert (run((*LOADED[:-1], *second))[:24] == 2 * np.arange(24) + 8).all()


def test_what_a_load_brings_is_stored_without_a_fence():
    """Both go through the asynchronous proxy."""
    tensor = np.arange(512, dtype=np.uint32).reshape(8, 64)
    run((*LOADED[:6], corner(32, 0), STORE, COMMIT, WAIT_READ), tensor, described(tensor, (8, 32)))
    assert (tensor[:, 32:] == tensor[:, :32]).all()


def test_written_once_wait_group_says_so():
    written = (*STORED[:-1], "cp.async.bulk.wait_group 0;", BAR)
    box = described(np.zeros((8, 32), np.uint32), (8, 32))
    body = (
        *written,
        "mov.b64 %rd5, 17592186044416;",
        "add.s64 %rd5, %rd5, %rd3;",
        "ld.global.b32 %r4, [%rd5];",
        RESULT,
    )
    assert (run(body, None, box) == np.arange(256)).all()
    with pytest.raises(Fault, match="race: read of in by thread 0 at what a TMA copy wrote"):
        run((*written[:-2], WAIT_READ, BAR, *body[len(written) :]), None, box)


def test_only_the_last_groups_stay():
    """The second store's source may not be written to yet, the first one's may."""
    other = STORE.replace("[global_smem]", "[global_smem+1024]").replace("%r2", "32")
    tensor = np.zeros((8, 64), np.uint32)
    both = (corner(0, 0), WRITE, "st.shared.b32 [%r1+1024], %r0;", FENCE, BAR, STORE, COMMIT, other, COMMIT)
    both = (*both, WAIT_READ.replace("0", "1"), BAR)
    run((*both, WRITE, WAIT_READ), tensor, described(tensor, (8, 32)))
    with pytest.raises(Fault, match="in flight: write of what an asynchronous instruction may still read"):
        run((*both, "st.shared.b32 [%r1+1024], %r0;", WAIT_READ), tensor, described(tensor, (8, 32)))


# --- mbarriers


def test_arrivals_of_several_warps_with_counts():
    """7 warps arrive, one of them for two, and release what they wrote."""
    body = (
        INIT.replace(", 1;", ", 8;"), BAR, WRITE, "bar.warp.sync -1;", "elect.sync %r5|%p1, -1;", "shr.u32 %r6, %r0, 5;",
        "setp.lt.u32 %p2, %r6, 6;", "and.pred %p2, %p1, %p2;", "setp.eq.u32 %p3, %r6, 6;", "and.pred %p3, %p1, %p3;",
        "@%p2 mbarrier.arrive.shared::cta.b64 _, [global_smem+2048];",
        "@%p3 mbarrier.arrive.shared::cta.b64 _, [global_smem+2048], 2;", wait(), "setp.lt.u32 %p4, %r0, 224;",
        "xor.b32 %r7, %r1, 128;", "setp.lt.u32 %p5, %r7, 896;", "@%p5 ld.shared.b32 %r4, [%r7];", RESULT,
    )  # fmt: skip
    expected = np.arange(256) ^ 32
    assert (run(body) == np.where(expected < 224, expected, 0)).all()
    with pytest.raises(Fault, match=r"hang.*at 2048, phase 0: 2 arrivals and 0 bytes to come"):
        run(tuple(part for part in body if not part.startswith("@%p3")))


def test_wait_for_the_phase_of_an_arrival():
    body = (
        INIT.replace(", 1;", ", 256;"), BAR, WRITE, "mbarrier.arrive.shared::cta.b64 %rd5, [global_smem+2048];",
        "again:", "mbarrier.test_wait.shared::cta.b64 %p1, [global_smem+2048], %rd5;", "@!%p1 bra again;",
        "xor.b32 %r7, %r1, 512;", "ld.shared.b32 %r4, [%r7];", RESULT,
    )  # fmt: skip
    assert (run(body) == np.arange(256) ^ 128).all()


def test_a_look_ahead_is_no_hang():
    """A test_wait that fails, once, before the arrival that only the same strand makes."""
    body = (*LOADED[:3], "mbarrier.test_wait.parity.shared::cta.b64 %p1, [global_smem+2048], 0;", *LOADED[3:])
    assert (run(body) == np.arange(256)).all()


def test_a_new_mbarrier_where_one_ended():
    again = (BAR, INVAL, *LOADED[1:])
    assert (run((*LOADED, *again)) == np.arange(256)).all()


def test_warps_go_their_own_ways_through_a_loop():
    """Each warp takes its case of a table, as Triton's worker warps do, and two of them another number of times."""
    body = (
        INIT.replace(", 1;", ", 64;"), BAR, "shr.u32 %r5, %r0, 5;", "mov.b32 %r6, 0;",
        "loop:", "bar.sync 1;", "add.s32 %r6, %r6, 1;", "setp.eq.s32 %p1, %r6, 3;", "@%p1 mov.b32 %r5, 3;",
        "min.u32 %r5, %r5, 3;", "table: .branchtargets first, second, third, done;", "brx.idx %r5, table;",
        "first:", wait(), "add.s32 %r4, %r4, 10;", "bra.uni loop;",
        "second:", "mbarrier.arrive.shared::cta.b64 _, [global_smem+2048];", "add.s32 %r4, %r4, 100;", "bra.uni loop;",
        "third:", "mbarrier.arrive.shared::cta.b64 _, [global_smem+2048];", "add.s32 %r4, %r4, 1000;", "bra.uni loop;",
        "done:", RESULT,
    )  # fmt: skip
    assert (run(body, threads=96).reshape(3, 32) == [[20], [200], [2000]]).all()


def test_elected():
    assert run(("elect.sync %r5|%p1, -1;", "@%p1 mov.b32 %r4, 1;", RESULT)).nonzero()[0].tolist() == list(
        range(0, 256, 32)
    )


def test_registers_change_hands():
    """The first warp group waits for those of the second, unless there were too few."""
    first = ("setp.lt.u32 %p1, %r0, 128;", "@%p1 bra first;", "setmaxnreg.dec.sync.aligned.u32 40;", "bra after;")
    body = (*first, "first:", "setmaxnreg.inc.sync.aligned.u32 216;", "mov.b32 %r4, 1;", "after:", BAR, RESULT)
    assert run(body).nonzero()[0].tolist() == list(range(128))
    with pytest.raises(Fault, match=r"hang: 1 strands wait for registers"):
        run(tuple(part.replace("216", "224") for part in body))
    with pytest.raises(Fault, match=r"registers: setmaxnreg to 136 of warps that have \[128\]"):
        run(tuple(part.replace("40", "136") for part in body))


# --- injected faults


def without(parts: tuple[str, ...], *dropped: str) -> tuple[str, ...]:
    return tuple(part for part in parts if part not in dropped)


def with_instead(parts: tuple[str, ...], **changes: str) -> tuple[str, ...]:
    """By the name of a part in capitals."""
    new = {globals()[name]: text for name, text in changes.items()}
    return tuple(new.get(part, part) for part in parts)


SECOND = (BAR, WRITE, FENCE, BAR, STORE, COMMIT, WAIT_READ)
ONE_WARP_WAITS = ("setp.gt.u32 %p1, %r0, 31;", "@%p1 bra after;", wait(), "after:")
INJECTED = {
    "no wait": (without(LOADED, wait()), "in flight: read of what an asynchronous copy has yet to write"),
    "another phase": ((*LOADED[:5], wait(1), *LOADED[6:]), "in flight: read of what an asynchronous copy has yet to write"),
    "a phase too many": ((*LOADED[:6], wait(1), *LOADED[6:]), "hang: .*2048, phase 1: 1 arrivals and 0 bytes to come"),
    "too few bytes": (with_instead(LOADED, EXPECT=EXPECT.replace("1024", "1008")), "hang: .*0 arrivals and -16 bytes to come"),
    "too many bytes": (with_instead(LOADED, EXPECT=EXPECT.replace("1024", "1040")), "hang: .*0 arrivals and 16 bytes to come"),
    "bytes of no phase": (with_instead(LOADED, EXPECT=EXPECT.replace("1024", "1048576")), "mbarrier: 1048576 bytes"),
    "no load": (without(LOADED, LOAD), "hang: .*0 arrivals and 1024 bytes to come"),
    "no arrival": (without(LOADED, EXPECT), "hang: .*1 arrivals and 0 bytes to come"),
    "never read": (LOADED[:5], "in flight: 1 copies at the end"),
    "another warp waited": ((*LOADED[:5], *ONE_WARP_WAITS, *LOADED[6:]), "race: read .* at what a TMA copy wrote, no barrier"),
    "no init": (without(LOADED, INIT), "mbarrier: no mbarrier.init has been at 2048"),
    "init of all": (with_instead(LOADED, INIT=INIT.removeprefix("@%p0 ")), "race: 256 threads begin or end one mbarrier"),
    "init for none": (with_instead(LOADED, INIT=INIT.replace(", 1;", ", 0;")), "mbarrier: init with a count of 0"),
    "no barrier after init": (without(LOADED, BAR), "race: use of an mbarrier .*thread 0 wrote, no barrier"),
    "init again": ((*LOADED, BAR, INIT), "mbarrier: init over the one at 2048"),
    "one arrival too many": (with_instead(LOADED, LOAD=EXPECT), "mbarrier: 1 arrivals at .*phase 0: 0 arrivals and 2048 bytes"),
    "overwritten": ((*LOADED[:3], "@%p0 st.shared.b32 [global_smem+2052], 0;", *LOADED[3:]), "mbarrier: .*overwritten"),
    "overwritten at once": ((INIT, "@%p0 st.shared.b32 [global_smem+2048], 0;", *LOADED[2:]), "mbarrier: .*overwritten"),
    "overwritten and begun again": (
        (*LOADED[:5], "@%p0 st.shared.b32 [global_smem+2048], 0;", INIT), "mbarrier: init over the one at 2048",
    ),
    "inval too early": ((*LOADED[:5], INVAL), "in flight: inval of the mbarrier"),
    "use after inval": ((*LOADED, BAR, INVAL, wait()), "mbarrier: no mbarrier"),
    "inval beside others": ((*LOADED, INVAL), "race: write of shared memory"),
    "load over what others read": ((*LOADED[:7], EXPECT, LOAD, wait(1)), "race: write .* another warp read, no barrier"),
    "load over what threads wrote": ((*LOADED[:2], WRITE, BAR, *LOADED[3:]), "proxy: TMA's write of what was written"),
    "load over a load": ((*LOADED[:5], LOAD, *LOADED[5:]), "in flight: write of what an asynchronous copy has yet to write"),
    "load to 64 bytes": (with_instead(LOADED, LOAD=LOAD.replace("[global_smem]", "[global_smem+64]")), "alignment: 128 bytes"),
    "load to the end": (with_instead(LOADED, LOAD=LOAD.replace("[global_smem]", "[global_smem+3200]")), "bounds: a box of"),
    "load by no map": (with_instead(LOADED, LOAD=LOAD.replace("[%rd1", "[%rd0")), "tensor map: none at 0x200000000000"),
    "load of another rank": (with_instead(LOADED, LOAD=LOAD.replace("{%r2, %r3}", "{%r2}")), "bounds: 1 coordinates"),
    "no fence": (without(STORED, FENCE), "proxy: TMA's read of what was written with no fence.proxy.async"),
    "no barrier before the store": (without(STORED, BAR), "race: TMA's read .*no b"),
    "store of nothing": (without(STORED, WRITE), "uninitialised"),
    "no wait at the end": (without(STORED, WAIT_READ), "in flight: 1 TMA stores may still read at the end"),
    "in no group": (without(STORED, COMMIT), "in flight: 1 TMA stores may still read at the end"),
    "overwritten before wait_group.read": ((*STORED[:-1], *SECOND), "in flight: write of what an asynchronous instruction"),
    "no barrier after wait_group.read": ((*STORED, *SECOND[1:]), "race: write of shared memory at what another warp read"),
    "stored twice unordered": ((*STORED, *SECOND), "race: write of in by thread 0 at what a TMA copy wrote"),
    "store of what is in flight": ((*LOADED[:5], STORE, COMMIT, WAIT_READ), "in flight: read"),
}  # fmt: skip


@pytest.mark.parametrize("name", INJECTED)
def test_injected(name):
    parts, found = INJECTED[name]
    with pytest.raises(Fault, match=found):
        run(parts)


def test_what_is_injected_into_is_right():
    assert (run(LOADED) == np.arange(256)).all()
    tensor = np.zeros((8, 32), np.uint32)
    run(STORED, tensor)
    assert (tensor.reshape(-1) == np.arange(256)).all()
    run((*STORED, "cp.async.bulk.wait_group 0;", *SECOND), tensor)


def test_a_map_beyond_its_tensor():
    tensor = np.zeros((8, 32), np.uint32)
    with pytest.raises(Fault, match="bounds: TMA's read"):
        run((corner(0, 1), *LOADED[1:]), tensor, TensorMap(IN, (9, 32), tensor.strides, (8, 32), 4))


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        (dict(base=IN + 8), "16 bytes"), (dict(strides=(136, 4)), "16 bytes"), (dict(strides=(128, 8)), "contiguous"),
        (dict(box=(257, 32)), "256 elements"), (dict(box=(8, 3)), "of 16 bytes"), (dict(swizzle=64), "as wide as the swizzle"),
        (dict(box=(8, 32, 1)), "axes"),
    ],
)  # fmt: skip
def test_limits_of_a_map(changes, limit):
    with pytest.raises(ValueError, match=limit):
        TensorMap(**{**dict(base=IN, shape=(8, 32), strides=(128, 4), box=(8, 32), item=4), **changes})


def test_map_of_a_descriptor_of_triton():
    meta = {"swizzle": 1, "elem_size": 2, "elem_type": 10, "block_size": [32, 16], "fp4_padded": False}
    tensor = np.arange(20 * 24, dtype=np.uint16).reshape(20, 24)
    box = TensorMap.of_triton(meta, IN, (20, 24), (24, 1), "nan")
    assert box == TensorMap(IN, (20, 24), (48, 2), (32, 16), 2, 32, box.fill)
    out = run((corner(16, 0), *LOADED[1:]), tensor, box).view(np.uint16)
    assert np.isnan(from_bf16(out)).sum() == 32 * 16 - 20 * 8
    with pytest.raises(NotImplementedError, match="4-bit"):
        TensorMap.of_triton({**meta, "fp4_padded": True}, IN, (20, 24), (24, 1))


MAP = "[%rd5 + 0]"  # in shared memory, from 3072 on
BEGIN = (
    "mov.b32 %r6, global_smem;", "add.s32 %r6, %r6, 3072;", "cvt.u64.u32 %rd5, %r6;", "add.s32 %r7, %r6, %r1;",
    "setp.lt.u32 %p1, %r0, 32;",
)  # fmt: skip
ZEROS = ("mov.b32 %r5, 0;", "bar.warp.sync -1;", "@%p1 st.shared.b32 [%r7], %r5;", "bar.warp.sync -1;")
FILL_WITH_NAN = f"@%p0 tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 {MAP}, 0x1;"
FIELDS = tuple(
    f"@%p0 tensormap.replace.tile.{field}.shared::cta.b1024.{kind} {MAP}, {value};"
    for field, kind, value in (
        ("global_address", "b64", "%rd6"), ("rank", "b32", "0x1"), ("box_dim", "b32", "0x0, %r8"),
        ("box_dim", "b32", "0x1, %r9"), ("global_dim", "b32", "0x0, %r8"), ("global_dim", "b32", "0x1, %r9"),
        ("global_stride", "b64", "0x0, %rd7"), ("element_stride", "b32", "0x0, %r10"),
        ("element_stride", "b32", "0x1, %r10"), ("elemtype", "b32", "0x7"),
    )
)  # fmt: skip
SIZES = (f"mov.b64 %rd6, {IN};", "mov.b64 %rd7, 128;", "mov.b32 %r8, 32;", "mov.b32 %r9, 8;", "mov.b32 %r10, 1;")
ACQUIRED = (
    "bar.warp.sync -1;",
    "@%p1 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    f" [%rd0 + 0], {MAP}, 0x80;",
    "@%p1 fence.proxy.tensormap::generic.acquire.gpu [%rd0 + 0], 0x80;",
    "mov.b64 %rd1, %rd0;",
)


def test_fields_that_a_map_leaves_at_zero():
    """As Triton from 3.9 on makes one in 128 bytes of zeros; it does so again for the next map there."""
    load = (corner(0, 4), *LOADED[1:])
    below = np.arange(256) + 128
    zero, nan = np.where(below < 256, below, 0), np.where(below < 256, below, 0x7FFFFFFF)
    assert (run((*BEGIN, *ZEROS, *SIZES, *FIELDS, *ACQUIRED, *load)) == zero).all()
    assert (run((*BEGIN, *ZEROS, *SIZES, *FIELDS, FILL_WITH_NAN, *ACQUIRED, *load)) == nan).all()
    assert (run((*BEGIN, *ZEROS, FILL_WITH_NAN, *ZEROS, *SIZES, *FIELDS, *ACQUIRED, *load)) == zero).all()
    with pytest.raises(Fault, match="interleave_layout"):
        run((*BEGIN, *SIZES, *FIELDS, *ACQUIRED, *load))


def test_high_half_of_64():
    a, b = np.random.default_rng(3).integers(0, 2**64, (2, 1000), np.uint64)
    assert high_half_of_64(a, b).tolist() == [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (".shared::cluster", ".shared::cluster.multicast::cluster", "modifier .multicast::cluster"),
        (".2d", ".2d.im2col", "modifier .im2col"),
        (".tensor.2d.shared::cluster", ".shared::cluster", "form"),
        (".arrive.expect_tx", ".arrive.noComplete", "modifier .noComplete"),
        ("mbarrier.arrive.expect_tx.", "mbarrier.arrive.expect_tx.relaxed.", "form"),
        (
            "mbarrier.try_wait.parity.shared::cta",
            "mbarrier.try_wait.parity.shared::cluster",
            "modifier .shared::cluster",
        ),
        ("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "modifier .reduce"),
    ],
)
def test_unknown(old, new, what):
    parts = tuple(part.replace(old, new) for part in LOADED)
    assert parts != LOADED
    with pytest.raises(Unknown, match=re.escape(what)):
        run(parts)


# --- Triton's kernels


AS_TOLD = (0, 1, 2, 3)  # the swizzle that Triton says, by CUtensorMapSwizzle
CODES = {
    "bf16": (to_bf16, from_bf16),
    "f16": (lambda x: x.astype(np.float16).view(np.uint16), lambda x: x.view(np.float16)),
}
M, N, K = 200, 72, 152
HEADS, T, SCALE = 2, 150, 0.125


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, dict]:
    if metadata.version("triton") < "3.7":
        pytest.skip("written in the Gluon of Triton 3.7 and later")
    path = tmp_path_factory.mktemp("tma") / "kernels.json"
    process = start("support/tma_kernels.py", str(path))
    assert process.wait() == 0
    return json.loads(path.read_text())


def call(kernel: dict, matrices: dict[str, np.ndarray], numbers: list, grid: tuple[int, ...], swizzles=AS_TOLD) -> None:
    """Launches a kernel as Triton does: for a descriptor its map, shape and strides; then the scratch memory."""
    scratch = np.zeros(max(kernel["scratch"], 16) * int(np.prod(grid)), np.uint8)
    tensors, arguments = [Tensor("scratch", 1 << 44, scratch)], []
    for (name, matrix), meta in zip(matrices.items(), kernel["maps"] or [None] * len(matrices), strict=True):
        base, shape = len(tensors) + 1 << 44, matrix.shape
        strides = tuple(stride // matrix.itemsize for stride in matrix.strides)
        tensors.append(Tensor(name, base, matrix.reshape(-1).view(np.uint8)))
        if meta is None:
            arguments.append(np.uint64(base))
            continue
        meta = {**meta, "swizzle": swizzles[meta["swizzle"]]}
        arguments += [TensorMap.of_triton(meta, base, shape, strides), *map(np.uint32, shape), *map(np.uint64, strides)]
    arguments += [*numbers, np.uint64(1 << 44), np.uint64(0)]
    emulator.run(kernel["ptx"], grid, kernel["shared"], arguments, tensors)


def random(kind: str, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: CODES[kind][0](rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}


def multiply(kernel: dict, kind: str, grid: tuple[int, ...] = (1,), swizzles=AS_TOLD) -> tuple[np.ndarray, np.ndarray]:
    """(what the kernel makes of random a and b, a b^T rounded once), as float32."""
    encode, decode = CODES[kind]
    matrices = random(kind, a=(M, K), b=(N, K)) | {"c": np.zeros((M, N), np.uint16)}
    call(kernel, matrices, [*map(np.uint32, (M, N, K))], grid, swizzles)
    a, b, c = (decode(matrix).astype(np.float32) for matrix in matrices.values())
    return c, decode(encode(a @ b.T)).astype(np.float32)


def attend(kernel: dict, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The same of attention with T rows of 64 by HEADS heads."""
    matrices = random(kind, **dict.fromkeys("qkv", (HEADS, T, 64))) | {"o": np.zeros((HEADS, T, 64), np.uint16)}
    call(kernel, matrices, [np.uint32(T), np.float32(SCALE)], (-(-T // 64), HEADS))
    q, k, v, o = (CODES[kind][1](matrix).astype(np.float32) for matrix in matrices.values())
    p = np.exp2(SCALE * q @ k.swapaxes(1, 2))
    return o, p / p.sum(2, keepdims=True) @ v


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(
    ("name", "grid"),
    [*((name, (n,)) for name in ("matmul", "specialized", "two groups") for n in (1, 3)), ("described", (4, 2))],
)
def test_linear(kernels, name, grid, kind):
    """Sums that differ in float32's last bits may round to the next number of 16 bits."""
    got, expected = multiply(kernels[f"{name} {kind}"], kind, grid)
    assert np.allclose(got, expected, rtol=2**-7 if kind == "bf16" else 2**-10, atol=1e-5)
    assert (got == expected).mean() > 0.99


@pytest.mark.parametrize("kind", CODES)
def test_attention(kernels, kind):
    """Its p is rounded to 16 bits, and so is its result of about 1."""
    got, expected = attend(kernels[f"attention {kind}"], kind)
    assert np.abs(got - expected).max() < 2 * (2**-9 if kind == "bf16" else 2**-12)


def changed(kernel: dict, pattern: str, replacement: str, count: int = 0) -> dict:
    ptx, times = re.subn(pattern, replacement, kernel["ptx"], count=count)
    assert times
    return {**kernel, "ptx": ptx}


@pytest.mark.parametrize(("name", "compute"), [("matmul", multiply), ("attention", attend)])
def test_two_warp_groups_of_one_tile(kernels, name, compute):
    """Triton 3.7.1's warp_specialize on sm_90 has both of its warp groups compute and store every tile."""
    kernel = kernels[f"{name} alike"]
    with pytest.raises(Fault, match=r"race: write of [co] by thread .* at what a TMA copy wrote"):
        compute(kernel, "f16")
    got, expected = compute(changed(kernel, r"@%p\d+ (cp\.async\.bulk\.tensor\.\dd\.global.*)", "", 1), "f16")
    assert np.allclose(got, expected, rtol=2**-10, atol=2**-11)


KERNEL_BUGS = {
    "the consumer's arrival dropped": ("specialized", r"@%p\d+ mbarrier\.arrive\.shared.*", "", "hang"),
    "one of two consumers' arrivals dropped": (
        "two groups", r"(?s)@%p\d+ mbarrier\.arrive\.shared[^;]*;(.*mbarrier\.arrive\.shared)", r"\1", "hang",
    ),
    "the consumer waits for another phase": (
        "specialized", r"(?s)^(.*?try_wait\.parity\S* \S+, \[%r\d+\], )%r\d+;", r"\g<1>1;", "in flight",
    ),
    "the producer expects one box of two": ("specialized", r"(expect_tx.*), 8192;", r"\1, 4096;", "in flight"),
    "it expects half a box": ("specialized", r"(expect_tx.*), 8192;", r"\1, 2048;", "hang"),
    "it expects a box too much": ("specialized", r"(expect_tx.*), 8192;", r"\1, 12288;", "hang"),
    "it expects one byte too much": ("two groups", r"(expect_tx.*), 24576;", r"\1, 24577;", "hang"),
    "the consumer's wait dropped": ("specialized", r"(?s)@!complete bra\.uni waitLoop;(.*@!comp)", r"\1", "in flight"),
    "the producer's wait dropped": ("specialized", r"(?s)(@!complete bra.*)@!complete bra\.uni waitLoop;", r"\1", "mbarrier"),
    "waits of one block dropped": ("matmul", r"@!complete bra\.uni waitLoop;", "", "in flight"),
    "proxy fence dropped": ("specialized", r"fence\.proxy\.async\S*;", "", "proxy"),
    "proxy fence of one block dropped": ("matmul", r"fence\.proxy\.async\S*;", "", "proxy"),
    "wait_group.read dropped": ("specialized", r"cp\.async\.bulk\.wait_group\.read\s+0;", "", "in flight"),
    "wait_group.read one too lax": ("two groups", r"(cp\.async\.bulk\.wait_group\.read\s+)0;", r"\g<1>1;", "in flight"),
    "wgmma's wait dropped": ("specialized", r"wgmma\.wait_group\S*\s+0;", "", "in flight|race"),
    "wgmma's wait for all but one dropped": ("matmul", r"wgmma\.wait_group\S*\s+1;", "", "in flight"),
    "barriers of the consumer dropped": ("specialized", r"bar\.sync\s+0, 128;", "", "race"),
    "a map that nobody acquires": ("described", r"@%p\d+ fence\.proxy\.tensormap.*", "", "tensor map"),
    "a map without a box": ("described", r"(@%p\d+ )?tensormap\.replace\.tile\.box_dim.* 0x1, .*", "", "tensor map"),
    "maps of all programs in one place": ("described", r"(mov\.u32\s+%r\d+, )%ctaid\.x;", r"\g<1>0;", "race"),
    "all init dropped": ("specialized", r"@%p\d+ mbarrier\.init.*", "", "mbarrier"),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNEL_BUGS)
def test_injected_in_a_kernel(kernels, name):
    of, pattern, replacement, kind = KERNEL_BUGS[name]
    with pytest.raises(Fault) as found:
        multiply(changed(kernels[f"{of} bf16"], pattern, replacement), "bf16", (4, 2) if of == "described" else (1,))
    assert re.fullmatch(kind, found.value.kind), found.value


@pytest.mark.parametrize("name", ["matmul", "specialized"])
def test_another_swizzle_gives_other_numbers(kernels, name):
    got, expected = multiply(kernels[f"{name} bf16"], "bf16", (1,), swizzles=(0, 1, 0, 3))
    assert (got == expected).mean() < 0.5
