"""Each check on a kernel of a few lines that does right, and on the same one with one line of it wrong."""

import re

import emulator
import numpy as np
import pytest
from support.snippets import run

# a thread's place in a tensor of 32 bits (%rd10) and in shared memory (%r10); that of the thread 32 further on (%r12)
PLACE = """
mad.wide.u32 %rd10, %r1, 4, %rd1;
shl.b32 %r10, %r1, 2;
add.s32 %r11, %r1, 32;
and.b32 %r11, %r11, 63;
shl.b32 %r12, %r11, 2;
"""
SAVE = "st.global.b32 [%rd10], %r21;\n"
LOAD = "ld.global.b32 %r20, [%rd10];\n"
STORE = "st.global.b32 [%rd10], %r1;\n"
SHARE = "st.shared.b32 [%r10], %r1;\n"
THREADS = np.arange(64)


def numbers(count: int = 64) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


EXCHANGE = f"{PLACE}{LOAD}st.shared.b32 [%r10], %r20;\nbar.sync 0;\nld.shared.b32 %r21, [%r12];\n{SAVE}"
NEIGHBOUR = f"{PLACE}xor.b32 %r13, %r10, 4;\n{SHARE}bar.warp.sync -1;\nld.shared.b32 %r21, [%r13];\n{SAVE}"
THROUGH = f"{PLACE}{STORE}bar.sync 0;\nmad.wide.u32 %rd11, %r11, 4, %rd1;\nld.global.b32 %r20, [%rd11];"
SOME = "setp.lt.u32 %p1, %r1, 0;\n@%p1 bra $THERE;\nbar.sync 0;\n$THERE:"
# a loop that each thread runs another number of times, with a barrier after it
LOOP = f"""{PLACE}
mov.b32 %r20, 0;
mov.b32 %r21, 0;
$LOOP:
add.s32 %r21, %r21, %r20;
add.s32 %r20, %r20, 1;
setp.le.s32 %p1, %r20, %r1;
@%p1 bra $LOOP;
bar.sync 0;
{SAVE}"""
# warp 0 writes what warp 1 reads, in branches of their own, as producers and consumers do
NAMED = f"""{PLACE}
setp.ge.u32 %p1, %r1, 32;
@%p1 bra $CONSUMER;
{SHARE}bar.arrive 1, 64;
bra.uni $END;
$CONSUMER:
bar.sync 1, 64;
ld.shared.b32 %r21, [%r12];
{SAVE}$END:
"""
COPY = """
shl.b32 %r10, %r1, 4;
mad.wide.u32 %rd10, %r1, 16, %rd1;
mad.wide.u32 %rd11, %r1, 16, %rd2;
cp.async.cg.shared.global [%r10], [%rd10], 0x10;
cp.async.commit_group;
cp.async.cg.shared.global [%r10+1024], [%rd10], 0x10;
cp.async.commit_group;
cp.async.wait_group 1;
ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r10];
cp.async.wait_group 0;
ld.shared.v4.b32 {%r24, %r25, %r26, %r27}, [%r10+1024];
st.global.v4.b32 [%rd11], {%r24, %r25, %r26, %r27};
"""
# zeros in shared memory, and a matmul of a warp group that reads them: a at 0, b at 2048, rows of 16 bytes, no swizzle
ZEROS = "st.shared.v4.b32 [%r10+16], {%r2, %r2, %r2, %r2};\n"
PRODUCT = f"""
shl.b32 %r10, %r1, 5;
mov.b32 %r2, 0;
st.shared.v4.b32 [%r10], {{%r2, %r2, %r2, %r2}};
{ZEROS}fence.proxy.async.shared::cta;
bar.sync 0;
mov.u64 %rd11, 68720001024;
mov.u64 %rd12, 68720001152;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r21, %r22, %r23, %r24}}, %rd11, %rd12, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mad.wide.u32 %rd10, %r1, 4, %rd1;
{SAVE}"""
# copies need a fence after they have landed, as what threads wrote themselves does
LANDED = "cp.async.commit_group;\ncp.async.wait_group 0;\n"
COPIED = PRODUCT.replace(
    ZEROS, f"add.s32 %r11, %r10, 16;\ncp.async.cg.shared.global [ %r11 + 0 ], [ %rd1 + 0 ], 0x10;\n{LANDED}"
)
FENCE = "fence.proxy.async.shared::cta;\n"
RESULTS = [
    (EXCHANGE, np.roll(THREADS, -32)), (NEIGHBOUR, THREADS ^ 1), (LOOP, THREADS * (THREADS + 1) // 2), (NAMED, THREADS % 32),
    (COPY, numbers(256)), (PRODUCT, np.zeros(128)), (COPIED, np.zeros(128)),
]  # fmt: skip


def launch(body: str, **options) -> np.ndarray:
    """Runs it, and returns the last of its tensors: of its group of warps, of two, or of a number a thread."""
    threads = 128 if "wgmma" in body else 64
    arrays = [numbers(256), 0 * numbers(256)] if "%rd2;" in body else [numbers(threads) * (threads == 64)]
    run(body, *arrays, threads=threads, **options)
    return arrays[-1]


@pytest.mark.parametrize(("body", "expected"), RESULTS, ids=range(len(RESULTS)))
def test_what_is_right_has_its_result(body, expected):
    assert (launch(body) == expected).all()


# what it is: (a kernel, the old part, the new one, what it is found as)
FAULTS = {
    "a missing barrier": (EXCHANGE, "bar.sync 0;", "", "^(race|uninitialised)"),
    "the line of the source": (EXCHANGE, "bar.sync 0;", "", r"ld\.shared\.b32 %r21, \[%r12\] \[kernel\.py:7\]"),
    "a write after a barrier": (
        EXCHANGE, "bar.sync 0;\n", "bar.sync 0;\nst.shared.b32 [%r10], %r20;\n",
        "^race: read of shared memory by thread 0 at what thread 32 wrote, no barrier between",
    ),
    "a write of what another warp reads": (EXCHANGE, SAVE, SHARE, "^race: .*at what another warp read"),
    "no barrier of a warp": (NEIGHBOUR, "bar.warp.sync -1;", "", "no bar.warp.sync"),
    "what nothing wrote": (NEIGHBOUR, SHARE, "", "^uninitialised: .*nothing wrote"),
    "beyond a tensor": (PLACE + LOAD, "%rd10]", "%rd10+4]", "^bounds"),
    "before a tensor": (PLACE + STORE, "%rd10]", "%rd10+-4]", "^bounds"),
    "in no tensor": (PLACE + LOAD, "[%rd10]", "[%rd3]", "^bounds"),
    "beyond shared memory": (PLACE + "st.shared.b32 [%r10+3840], %r1;", "3840", "3844", "^bounds"),
    "two words": (
        PLACE + LOAD, LOAD, "ld.global.v2.b32 {%r20, %r21}, [%rd10];", "^alignment: 8 bytes at an address that is 4 off",
    ),
    "half a word": (PLACE + SHARE, "[%r10]", "[%r10+2]", "^alignment"),
    "a copy not waited for": (COPY, "cp.async.wait_group 1;", "", "^in flight"),
    "a wait too lax": (COPY, "cp.async.wait_group 1;", "cp.async.wait_group 2;", "^in flight"),
    "the last wait": (COPY, "cp.async.wait_group 0;", "", "^in flight"),
    "no group": (COPY, "cp.async.commit_group;", "", "^in flight"),
    "a write over a copy": (COPY, "cp.async.wait_group 1;", "st.shared.b32 [%r10], %r1;", "^in flight"),
    "a copy at the end": (COPY, COPY.partition("cp.async.wait_group 1;")[2], "", "pending at the end"),
    "a barrier that some do not reach": (SOME, "%r1, 0", "%r1, 32", "^barrier: 32 of 64 threads reach barrier 0"),
    "a part of a warp": (SOME, "%r1, 0", "%r1, 40", "^barrier: .*a part of a warp"),
    "a race through global memory": (THROUGH, "bar.sync 0;", "", "^race"),
    "no wait at a named barrier": (NAMED, "bar.sync 1, 64;", "", "^(race|uninitialised)"),
    "no arrival at a named barrier": (NAMED, "bar.arrive 1, 64;", "", "^barrier"),
    "a trap": (PLACE, PLACE, "trap;", "^trap"),
    "two values at one address": (  # equal ones are allowed: layouts repeat values
        "mov.b32 %r2, 5;\nst.global.b32 [%rd1], %r2;", "%r2;", "%r1;", "two threads write different values",
    ),
    "no barrier before wgmma": (PRODUCT, "bar.sync 0;", "", "^race"),
    "no fence before wgmma": (PRODUCT, FENCE, "", "^proxy"),
    "a fence before the copy lands": (COPIED, LANDED + FENCE, FENCE + LANDED, "^proxy"),
    "a descriptor a thread": (
        PRODUCT, "wgmma.fence.sync", "cvt.u64.u32 %rd13, %r1;\nadd.s64 %rd12, %rd12, %rd13;\nwgmma.fence.sync", "^barrier",
    ),
    "wgmma beyond shared memory": (PRODUCT, "68720001152", "68720001272", "^bounds"),
    "a write of what wgmma reads": (PRODUCT, "wgmma.commit", "st.shared.b32 [%r10], %r2;\nwgmma.commit", "^in flight"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name):
    body, old, new, message = FAULTS[name]
    assert old in body
    launch(body)
    with pytest.raises(emulator.Fault, match=message):
        launch(body.replace(old, new))


def test_bounds_are_those_of_the_view():
    allowed = np.ones(256, bool)
    allowed[100:104] = False
    launch(f"{PLACE}setp.ne.b32 %p1, %r1, 25;\n@%p1 {LOAD}", allowed=allowed)
    with pytest.raises(emulator.Fault, match="outside of the tensor's view"):
        launch(PLACE + LOAD, allowed=allowed)


def test_two_ctas_at_one_place():
    block = "mov.u32 %r30, %ctaid.x;\n"
    read = f"{PLACE}ld.global.b32 %r20, [%rd1];\n{block}setp.eq.b32 %p1, %r30, 1;\n@%p1 {STORE}"
    for body, message in ((PLACE + block + STORE, "what another CTA wrote"), (read, "what another CTA read")):
        launch(body, grid=(1,))
        with pytest.raises(emulator.Fault, match=message):
            launch(body, grid=(2,))


def test_ctas_run_in_the_order_that_is_asked_for():
    last = "mov.u32 %r2, %ctaid.x;\nmad.wide.u32 %rd10, %r2, 4, %rd1;\nsetp.eq.b32 %p1, %r1, 0;\n"
    x = np.full(4, 9, np.uint32)
    counts = run(last + "@%p1 st.global.b32 [%rd10], %r2;", x, grid=(4,), programs=[3, 1])
    assert x.tolist() == [9, 1, 9, 3]
    assert counts.ctas == 2


def test_a_loop_without_end(monkeypatch):
    monkeypatch.setattr(emulator.launch, "BLOCKS", 100)
    with pytest.raises(emulator.Fault, match=r"^hang"):
        launch("$LOOP:\nadd.s32 %r2, %r1, 1;\nbra.uni $LOOP;")


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("frobnicate.b32 %r2, %r1;", "unknown opcode: frobnicate.b32 %r2, %r1"),
        ("add.rz.f32 %r2, %r1, %r1;", "unknown modifier .rz: add.rz.f32"),
        ("min.relu.u32 %r2, %r1, %r1;", "unknown form: min.relu.u32"),
        ("mov.u32 %r2, %clock;", "unknown operand %clock: mov.u32"),
        ("atom.global.add.u32 %r2, [%rd1], 1;", "unknown opcode: atom.global.add.u32"),
        ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r2}, {%r3}, {%r4}, {%r5};", "unknown modifier .m16n8k32"),
    ],
)
def test_what_has_no_meaning_is_named(statement, named):
    with pytest.raises(emulator.Unknown, match=rf"{re.escape(named)}.*\[kernel.py:7\]"):
        launch(statement)


@pytest.mark.parametrize(("modifier", "least"), [("", -12), (".relu", 0)])
def test_a_minimum_that_may_not_be_negative(modifier, least):
    """Thread t has min(t - 12, 9): Triton's windows of attention on sm_90."""
    x = launch(f"{PLACE}sub.s32 %r2, %r1, 12;\nmov.b32 %r3, 9;\nmin{modifier}.s32 %r21, %r2, %r3;\n{SAVE}")
    assert (x.view(np.int32) == (THREADS - 12).clip(least, 9)).all()


def test_a_tensor_of_more_than_2_to_the_31_elements():
    """Only what is touched takes memory."""
    x = np.zeros(2**32 + 64, np.uint8)
    far = "add.s64 %rd10, %rd1, 4294967296;\ncvt.u64.u32 %rd11, %r1;\nadd.s64 %rd10, %rd10, %rd11;\n"
    far += "cvt.u16.u32 %rs1, %r1;\nst.global.b8 [%rd10], %rs1;"
    run(far, x)
    assert (x[-64:] == THREADS).all()
    assert not x[:64].any()
    with pytest.raises(emulator.Fault, match=r"^bounds"):
        run(far.replace("4294967296", "4294967360"), x)
