"""TMA and mbarriers: what hand-written PTX does, and what each injected fault is found as.

Whole kernels that load by TMA: tests/triton_kernels/test_persistent.py under --device emulated.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from emulator import Fault, TensorMap, Unknown
from support import snippets

# A box has a word for each of 256 threads. %p0: thread 0; %rd10, %r10: a thread's place in the result and in shared memory.
HEAD = """
mov.b64 %rd12, box;
cvta.param.u64 %rd11, %rd12;
mad.wide.u32 %rd10, %r1, 4, %rd2;
shl.b32 %r10, %r1, 2;
setp.eq.u32 %p0, %r1, 0;
"""
INIT = "@%p0 mbarrier.init.shared::cta.b64 [global_smem+2048], 1;\n"
INVAL = "@%p0 mbarrier.inval.shared::cta.b64 [global_smem+2048];\n"
EXPECT = "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [global_smem+2048], 1024;\n"
LOAD = (
    "@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [global_smem], [%rd11, {%r2, %r3}], [global_smem+2048];\n"
)
STORE = "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd11, {%r2, %r3}], [global_smem];\n"
OVERWRITE = "@%p0 st.shared.b32 [global_smem+2052], 0;\n"
READ = "ld.shared.b32 %r4, [%r10];\n"
WRITE = "st.shared.b32 [%r10], %r1;\n"
RESULT = "st.global.b32 [%rd10], %r4;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
COMMIT = "cp.async.bulk.commit_group;\n"
WAIT_READ = "cp.async.bulk.wait_group.read 0;\n"
BAR = "bar.sync 0;\n"


def wait(parity: int = 0) -> str:
    """As Triton writes it."""
    return f"""{{
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared::cta.b64 complete, [global_smem+2048], {parity};
    @!complete bra.uni waitLoop;
    }}
    """


def corner(x: int, y: int) -> str:
    return f"mov.b32 %r2, {x};\nmov.b32 %r3, {y};\n"


START = corner(0, 0)
LOADED = START + INIT + BAR + EXPECT + LOAD + wait() + READ + RESULT
STORED = START + WRITE + FENCE + BAR + STORE + COMMIT + WAIT_READ
WORDS = np.arange(256, dtype=np.uint32)


def described(tensor: np.ndarray, box: tuple[int, ...], swizzle: int = 0, fill: int = 0) -> TensorMap:
    return TensorMap(snippets.BASE, tensor.shape, tensor.strides, box, tensor.itemsize, swizzle, fill)


def run(body: str, tensor: np.ndarray | None = None, box: TensorMap | None = None) -> np.ndarray:
    """The result of `body`, a word for each thread; by default `tensor` is 8 x 32 words, one box."""
    tensor, out = WORDS.reshape(8, 32).copy() if tensor is None else tensor, np.zeros(256, np.uint32)
    snippets.run(HEAD + body, tensor, out, threads=256, box=box or described(tensor, (8, 32)))
    return out


def inside(shape: tuple[int, ...], box: tuple[int, ...], start: tuple[int, ...]) -> tuple[tuple, tuple]:
    """(where in the tensor what they share is, where in the box)"""
    axes = [np.arange(n) + first for n, first in zip(box, start, strict=True)]
    here = [(axis >= 0) & (axis < n) for axis, n in zip(axes, shape, strict=True)]
    return np.ix_(*(axis[one] for axis, one in zip(axes, here, strict=True))), np.ix_(*here)


def cut(tensor: np.ndarray, box: tuple[int, ...], start: tuple[int, ...], fill: int = 0) -> np.ndarray:
    there, here = inside(tensor.shape, box, start)
    found = np.full(box, fill, tensor.dtype)
    found[here] = tensor[there]
    return found


def exchanged(rows: np.ndarray, swizzle: int) -> np.ndarray:
    """The pieces of 16 bytes of each row where the swizzle puts them: c at c ^ (the number of its 128 bytes % pieces)."""
    pieces = rows.reshape(len(rows), -1, 4)
    found = pieces.copy()
    for row, piece in np.ndindex(*pieces.shape[:2]) if swizzle else ():
        found[row, piece ^ row * swizzle // 128 % (swizzle // 16)] = pieces[row, piece]
    return found.reshape(-1)


# --- loads and stores


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(
    ("x", "y"), [(0, 0), (-3, -5), (17, 30), (5, -32), (40, 3)]
)  # the last two are outside altogether
def test_load_and_store(swizzle, x, y):
    tensor = np.random.default_rng(0).integers(1, 2**32, (37, 36), np.uint32)
    box = (256 // (swizzle or 64) * 4, (swizzle or 64) // 4)
    out = run(LOADED.replace(START, corner(x, y)), tensor, described(tensor, box, swizzle, 7))
    assert (out == exchanged(cut(tensor, box, (y, x), 7), swizzle)).all()

    expected, (there, here) = tensor.copy(), inside(tensor.shape, box, (y, x))
    expected[there] = np.argsort(exchanged(WORDS.reshape(box), swizzle)).reshape(box)[here]
    run(STORED.replace(START, corner(x, y)), tensor, described(tensor, box, swizzle))
    assert (tensor == expected).all()


def test_what_a_load_brings_is_stored_without_a_fence():
    """Both go through the asynchronous proxy."""
    tensor = np.arange(512, dtype=np.uint32).reshape(8, 64)
    run(LOADED + corner(32, 0) + STORE + COMMIT + WAIT_READ, tensor, described(tensor, (8, 32)))
    assert (tensor[:, 32:] == tensor[:, :32]).all()


AGAIN = BAR + WRITE + FENCE + BAR + STORE + COMMIT + WAIT_READ
WAIT_WRITTEN = "cp.async.bulk.wait_group 0;\n"
READ_STORED = "mad.wide.u32 %rd13, %r1, 4, %rd1;\nld.global.b32 %r4, [%rd13];\n"
# one group of two stores, the second of which may still read when the first one's source is written again
TWO_STORES = START + WRITE + "st.shared.b32 [%r10+1024], %r1;\n" + FENCE + BAR + STORE + COMMIT
TWO_STORES += corner(32, 0) + STORE.replace("[global_smem]", "[global_smem+1024]") + COMMIT
TWO_STORES += WAIT_READ.replace("0", "1") + BAR + WRITE + WAIT_READ
# 7 warps arrive, one of them for two, and release what they wrote
ARRIVED = f"""
{INIT.replace("1;", "8;")} {BAR} {WRITE} bar.warp.sync -1;
elect.sync %r5|%p1, -1;
shr.u32 %r6, %r1, 5;
setp.lt.u32 %p2, %r6, 6;
and.pred %p2, %p1, %p2;
setp.eq.u32 %p3, %r6, 6;
and.pred %p3, %p1, %p3;
@%p2 mbarrier.arrive.shared::cta.b64 _, [global_smem+2048];
@%p3 mbarrier.arrive.shared::cta.b64 _, [global_smem+2048], 2;
{wait()} xor.b32 %r7, %r10, 128;
setp.lt.u32 %p5, %r7, 896;
@%p5 ld.shared.b32 %r4, [%r7];
{RESULT}"""
LOOK = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [global_smem+2048], 0;\n"
BOXES = np.tile(WORDS[::-1].reshape(8, 32), 2)  # two boxes side by side
RIGHT = {  # what is injected into, and what comes out
    "loaded": (LOADED, WORDS[::-1]),
    "a second phase": (LOADED + BAR + corner(8, 0) + EXPECT + LOAD + wait(1) + READ + RESULT, BOXES[:, 8:40].flatten()),
    "a look ahead is no hang": (LOADED.replace(EXPECT, LOOK + EXPECT), WORDS[::-1]),
    "a new mbarrier where one ended": (LOADED + BAR + INVAL + LOADED, WORDS[::-1]),
    "stored": (
        STORED + WAIT_WRITTEN + BAR + READ_STORED + RESULT,
        np.hstack([WORDS.reshape(8, 32), BOXES[:, 32:]])[:4].flatten(),
    ),
    "stored twice": (STORED + WAIT_WRITTEN + AGAIN, 0 * WORDS),
    "two stores": (TWO_STORES, 0 * WORDS),
    "arrivals of several warps with counts": (ARRIVED, np.where(WORDS ^ 32 < 224, WORDS ^ 32, 0)),
    "elected": ("elect.sync %r5|%p1, -1;\n@%p1 mov.b32 %r4, 1;\n" + RESULT, WORDS % 32 == 0),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_injected_into_is_right(name):
    body, expected = RIGHT[name]
    assert (run(body, BOXES.copy(), described(BOXES, (8, 32))) == expected).all()


# --- injected faults

ONE_WARP_WAITS = f"setp.gt.u32 %p1, %r1, 31;\n@%p1 bra after;\n{wait()}after:\n"
UNLANDED = "in flight: read of what an asynchronous copy has yet to write"
# name: (what it is injected into, the old part, the new one, what it is found as)
INJECTED = {
    "no wait": (LOADED, wait(), "", UNLANDED),
    "another phase": (LOADED, wait(), wait(1), UNLANDED),
    "a phase too many": (LOADED, READ, wait(1), "hang: .*2048, phase 1: 1 arrivals and 0 bytes to come"),
    "too few bytes": (LOADED, "1024;", "1008;", "hang: .*0 arrivals and -16 bytes to come"),
    "too many bytes": (LOADED, "1024;", "1040;", "hang: .*0 arrivals and 16 bytes to come"),
    "bytes of no phase": (LOADED, "1024;", "1048576;", "mbarrier: 1048576 bytes"),
    "no load": (LOADED, LOAD, "", "hang: .*0 arrivals and 1024 bytes to come"),
    "no arrival": (LOADED, EXPECT, "", "hang: .*1 arrivals and 0 bytes to come"),
    "an arrival of two": (ARRIVED, "048], 2;", "048];", "hang.*at 2048, phase 0: 1 arrivals and 0 bytes to come"),
    "never read": (LOADED, wait() + READ + RESULT, "", "in flight: 1 copies at the end"),
    "another warp waited": (LOADED, wait(), ONE_WARP_WAITS, "race: read .* at what a TMA copy wrote, no barrier"),
    "no init": (LOADED, INIT, "", "mbarrier: no mbarrier.init has been at 2048"),
    "init of all": (LOADED, INIT, INIT[5:], "race: 256 threads begin or end one mbarrier"),
    "init for none": (LOADED, "2048], 1;", "2048], 0;", "mbarrier: init with a count of 0"),
    "no barrier after init": (LOADED, BAR, "", "race: use of an mbarrier .*thread 0 wrote, no barrier"),
    "init again": (LOADED, RESULT, BAR + INIT, "mbarrier: init over the one at 2048"),
    "one arrival too many": (LOADED, LOAD, EXPECT, "mbarrier: 1 arrivals at .*phase 0: 0 arrivals and 2048 bytes"),
    "overwritten": (LOADED, EXPECT, OVERWRITE + EXPECT, "mbarrier: .*overwritten"),
    "overwritten at once": (LOADED, BAR, OVERWRITE, "mbarrier: .*overwritten"),
    "overwritten and begun again": (LOADED, wait(), OVERWRITE + INIT, "mbarrier: init over the one at 2048"),
    "inval too early": (LOADED, wait(), INVAL, "in flight: inval of the mbarrier"),
    "use after inval": (LOADED, RESULT, BAR + INVAL + wait(), "mbarrier: no mbarrier"),
    "inval beside others": (LOADED, RESULT, INVAL, "race: write of shared memory"),
    "load over what others read": (LOADED, RESULT, EXPECT + LOAD + wait(1), "race: write .* another warp read, no barrier"),
    "load over what threads wrote": (LOADED, BAR, WRITE + BAR, "proxy: TMA's write of what was written"),
    "load over a load": (LOADED, LOAD, LOAD + LOAD, "in flight: write of what an asynchronous copy has yet to write"),
    "load to 64 bytes": (LOADED, "[global_smem],", "[global_smem+64],", "alignment: 128 bytes"),
    "load to the end": (LOADED, "[global_smem],", "[global_smem+3200],", "bounds: a box of"),
    "load by no map": (LOADED, "[%rd11", "[%rd10", "tensor map: none at 0x20000000000"),
    "load of another rank": (LOADED, "{%r2, %r3}", "{%r2}", "bounds: 1 coordinates"),
    "no fence": (STORED, FENCE, "", "proxy: TMA's read of what was written with no fence.proxy.async"),
    "no barrier before the store": (STORED, BAR, "", "race: TMA's read .*no b"),
    "store of nothing": (STORED, WRITE, "", "uninitialised"),
    "no wait at the end": (STORED, WAIT_READ, "", "in flight: 1 TMA stores may still read at the end"),
    "in no group": (STORED, COMMIT, "", "in flight: 1 TMA stores may still read at the end"),
    "overwritten before wait_group.read": (STORED, WAIT_READ, AGAIN, "in flight: write of what an asynchronous instruction"),
    "no barrier after wait_group.read": (
        STORED, WAIT_READ, WAIT_READ + AGAIN.removeprefix(BAR), "race: write of shared memory at what another warp read",
    ),
    "stored twice unordered": (
        STORED, WAIT_READ, WAIT_READ + AGAIN, "race: write of tensor 0 by thread 0 at what a TMA copy wrote",
    ),
    "store of what is in flight": (LOADED, wait() + READ + RESULT, STORE + COMMIT + WAIT_READ, "in flight: read"),
    "read before it is written": (
        STORED, WAIT_READ, WAIT_READ + BAR + READ_STORED, "race: read of tensor 0 by thread 0 at what a TMA copy wrote",
    ),
    "overwritten in the last group": (
        TWO_STORES, BAR + WRITE, BAR + "st.shared.b32 [%r10+1024], %r1;\n",
        "in flight: write of what an asynchronous instruction may still read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INJECTED)
def test_injected(name):
    body, old, new, found = INJECTED[name]
    assert old in body
    wide = np.zeros((8, 64), np.uint32)
    with pytest.raises(Fault, match=found):
        run(body.replace(old, new), wide, described(wide, (8, 32)))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (".shared::cluster", ".shared::cluster.multicast::cluster", "modifier .multicast::cluster"),
        (".tensor.2d.shared::cluster", ".shared::cluster", "form"),
        (".arrive.expect_tx.", ".arrive.expect_tx.relaxed.", "form"),
        ("ld.shared", "setmaxnreg.inc.sync.aligned.u32 216;\nld.shared", "opcode"),
        ("ld.shared", "fence.proxy.tensormap::generic.acquire.gpu [%rd5], 0x80;\nld.shared", "modifier .tensormap"),
    ],
)
def test_unknown(old, new, what):
    """What none of our kernels asks for raises instead of being passed over."""
    assert old in LOADED
    with pytest.raises(Unknown, match=re.escape(what)):
        run(LOADED.replace(old, new))


# --- tensor maps


def test_a_map_beyond_its_tensor():
    tensor = np.zeros((8, 32), np.uint32)
    with pytest.raises(Fault, match="bounds: TMA's read"):
        run(LOADED.replace(START, corner(0, 1)), tensor, TensorMap(snippets.BASE, (9, 32), tensor.strides, (8, 32), 4))


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        (dict(base=8), "16 bytes"), (dict(strides=(136, 4)), "16 bytes"), (dict(box=(257, 32)), "256 elements"),
        (dict(box=(8, 3)), "of 16 bytes"), (dict(swizzle=64), "as wide as the swizzle"),
    ],
)  # fmt: skip
def test_limits_of_a_map(changes, limit):
    with pytest.raises(ValueError, match=limit):
        TensorMap(**{**dict(base=16, shape=(8, 32), strides=(128, 4), box=(8, 32), item=4), **changes})
