"""Each check on a kernel of a few lines that does right, and on the same one with one line of it wrong."""

import re

import emulator
import numpy as np
import pytest
from support.snippets import ptx_of, run

# a thread's place in a tensor of 32 bits (%rd10) and in shared memory (%r10); that of the thread 32 further on (%r12)
PLACE = """
mad.wide.u32 %rd10, %r1, 4, %rd1;
shl.b32 %r10, %r1, 2;
add.s32 %r11, %r1, 32;
and.b32 %r11, %r11, 63;
shl.b32 %r12, %r11, 2;
"""


def fault_of(body: str, *arrays: np.ndarray, **options) -> emulator.Fault:
    with pytest.raises(emulator.Fault) as found:
        run(body, *arrays, **options)
    return found.value


def numbers(count: int = 64) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


EXCHANGE = (
    PLACE
    + """
ld.global.b32 %r20, [%rd10];
st.shared.b32 [%r10], %r20;
bar.sync 0;
ld.shared.b32 %r21, [%r12];
st.global.b32 [%rd10], %r21;
"""
)


def test_an_exchange_through_shared_memory():
    x = numbers()
    run(EXCHANGE, x)
    assert (x == np.roll(np.arange(64), -32)).all()


def test_a_missing_barrier_is_a_race():
    fault = fault_of(EXCHANGE.replace("bar.sync 0;", ""), numbers())
    assert fault.kind in ("race", "uninitialised")
    swapped = EXCHANGE.replace("bar.sync 0;", "bar.sync 0;\nst.shared.b32 [%r10], %r20;")
    fault = fault_of(swapped, numbers())
    assert fault.kind == "race"
    assert re.search(r"read of shared memory by thread 0 at what thread 32 wrote, no barrier between", str(fault))


def test_the_line_of_the_source_is_named():
    fault = fault_of(EXCHANGE.replace("bar.sync 0;", ""), numbers())
    assert "ld.shared.b32 %r21, [%r12] [kernel.py:7]" in str(fault)


def test_a_read_before_a_write_of_another_warp_is_a_race():
    again = EXCHANGE + "st.shared.b32 [%r10], %r21;"
    assert "at what another warp read" in str(fault_of(again, numbers()))
    run(EXCHANGE + "bar.sync 0;\nst.shared.b32 [%r10], %r21;", numbers())


NEIGHBOUR = (
    PLACE
    + """
xor.b32 %r13, %r10, 4;
st.shared.b32 [%r10], %r1;
bar.warp.sync -1;
ld.shared.b32 %r21, [%r13];
st.global.b32 [%rd10], %r21;
"""
)


def test_threads_of_a_warp_need_bar_warp_sync():
    x = numbers()
    run(NEIGHBOUR, x)
    assert (x == numbers() ^ 1).all()
    assert "no bar.warp.sync" in str(fault_of(NEIGHBOUR.replace("bar.warp.sync -1;", ""), numbers()))


def test_what_nothing_wrote():
    fault = fault_of(PLACE + "ld.shared.b32 %r20, [%r10];", numbers())
    assert (fault.kind, "nothing wrote" in str(fault)) == ("uninitialised", True)


def test_bounds_of_tensors_and_shared_memory():
    assert fault_of(PLACE + "ld.global.b32 %r20, [%rd10+4];", numbers()).kind == "bounds"
    assert fault_of(PLACE + "st.global.b32 [%rd10+-4], %r1;", numbers()).kind == "bounds"
    assert fault_of(PLACE + "st.shared.b32 [%r10+3844], %r1;", numbers()).kind == "bounds"
    run(PLACE + "st.shared.b32 [%r10+3840], %r1;", numbers())
    assert fault_of("mov.u64 %rd3, 64;\nld.global.b32 %r20, [%rd3];", numbers()).kind == "bounds"


def test_bounds_are_those_of_the_view():
    allowed = np.ones(256, bool)
    allowed[100:104] = False
    fault = fault_of(PLACE + "ld.global.b32 %r20, [%rd10];", numbers(), allowed=allowed)
    assert "outside of the tensor's view" in str(fault)
    run(PLACE + "setp.ne.b32 %p1, %r1, 25;\n@%p1 ld.global.b32 %r20, [%rd10];", numbers(), allowed=allowed)


def test_alignment():
    fault = fault_of(PLACE + "ld.global.v2.b32 {%r20, %r21}, [%rd10];", numbers(66))
    assert (fault.kind, "8 bytes at an address that is 4 off" in str(fault)) == ("alignment", True)
    assert fault_of(PLACE + "st.shared.b32 [%r10+2], %r1;", numbers()).kind == "alignment"


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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cp.async.wait_group 1;", ""), ("cp.async.wait_group 1;", "cp.async.wait_group 2;"), ("cp.async.wait_group 0;", ""),
        ("cp.async.commit_group;", ""), ("cp.async.wait_group 1;", "st.shared.b32 [%r10], %r1;"),
    ],
)  # fmt: skip
def test_a_copy_lands_at_its_wait(old, new):
    y = np.zeros(256, np.uint32)
    run(COPY, numbers(256), y)
    assert (y == numbers(256)).all()
    assert fault_of(COPY.replace(old, new), numbers(256), y).kind == "in flight"


def test_a_copy_that_nobody_waits_for():
    short = COPY.partition("cp.async.wait_group 1;")[0]
    assert "pending at the end" in str(fault_of(short, numbers(256), numbers(256)))


def test_a_barrier_for_all_that_some_do_not_reach():
    some = "setp.lt.u32 %p1, %r1, {};\n@%p1 bra $THERE;\nbar.sync 0;\n$THERE:"
    assert "32 of 64 threads reach barrier 0" in str(fault_of(some.format(32), numbers()))
    assert "a part of a warp" in str(fault_of(some.format(40), numbers()))
    run(some.format(0), numbers())


def test_two_ctas_at_one_place():
    store = PLACE + "mov.u32 %r30, %ctaid.x;\nst.global.b32 [%rd10], %r1;"
    assert "what another CTA wrote" in str(fault_of(store, numbers(), grid=(2,)))
    read = PLACE + "ld.global.b32 %r20, [%rd1];\nmov.u32 %r30, %ctaid.x;\nsetp.eq.b32 %p1, %r30, 1;\n"
    read += "@%p1 st.global.b32 [%rd10], %r1;"
    assert "what another CTA read" in str(fault_of(read, numbers(), grid=(2,)))
    run(read, numbers(), grid=(1,))


def test_ctas_run_in_the_order_that_is_asked_for():
    last = "mov.u32 %r2, %ctaid.x;\nmad.wide.u32 %rd10, %r2, 4, %rd1;\nsetp.eq.b32 %p1, %r1, 0;\n"
    last += "@%p1 st.global.b32 [%rd10], %r2;"
    x = np.full(4, 9, np.uint32)
    counts = run(last, x, grid=(4,), programs=[3, 1])
    assert x.tolist() == [9, 1, 9, 3]
    assert counts.ctas == 2


def test_a_race_through_global_memory():
    through = PLACE + "st.global.b32 [%rd10], %r1;\nbar.sync 0;\nmad.wide.u32 %rd11, %r11, 4, %rd1;\n"
    through += "ld.global.b32 %r20, [%rd11];"
    run(through, numbers())
    assert fault_of(through.replace("bar.sync 0;", ""), numbers()).kind == "race"


def test_threads_that_part_meet_again():
    """A loop that each thread runs another number of times, with a barrier after it."""
    loop = (
        PLACE
        + """
    mov.b32 %r20, 0;
    mov.b32 %r21, 0;
    $LOOP:
    add.s32 %r20, %r20, %r21;
    add.s32 %r21, %r21, 1;
    setp.le.s32 %p1, %r21, %r1;
    @%p1 bra $LOOP;
    bar.sync 0;
    st.global.b32 [%rd10], %r20;
    """
    )
    x = numbers()
    run(loop, x)
    assert (x == np.arange(64) * (np.arange(64) + 1) // 2).all()


def test_warps_meet_at_a_named_barrier():
    """Warp 0 writes what warp 1 reads, in branches of their own, as producers and consumers do."""
    named = (
        PLACE
        + """
    setp.ge.u32 %p1, %r1, 32;
    @%p1 bra $CONSUMER;
    st.shared.b32 [%r10], %r1;
    bar.arrive 1, 64;
    bra.uni $END;
    $CONSUMER:
    bar.sync 1, 64;
    ld.shared.b32 %r20, [%r12];
    st.global.b32 [%rd10], %r20;
    $END:
    """
    )
    x = numbers()
    run(named, x)
    assert (x[32:] == np.arange(32)).all()
    assert fault_of(named.replace("bar.sync 1, 64;", ""), numbers()).kind in ("race", "uninitialised")
    assert fault_of(named.replace("bar.arrive 1, 64;", ""), numbers()).kind == "barrier"


def test_a_loop_without_end(monkeypatch):
    monkeypatch.setattr(emulator.launch, "BLOCKS", 100)
    assert fault_of("$LOOP:\nadd.s32 %r2, %r1, 1;\nbra.uni $LOOP;", numbers()).kind == "hang"
    assert fault_of("trap;", numbers()).kind == "trap"


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
    with pytest.raises(emulator.Unknown, match=re.escape(named)) as found:
        run(statement, numbers())
    assert "[kernel.py:7]" in str(found.value)


@pytest.mark.parametrize(("modifier", "least"), [("", -12), (".relu", 0)])
def test_a_minimum_that_may_not_be_negative(modifier, least):
    """Thread t has min(t - 12, 9): Triton's windows of attention on sm_90."""
    x = numbers()
    body = f"sub.s32 %r2, %r1, 12;\nmov.b32 %r3, 9;\nmin{modifier}.s32 %r4, %r2, %r3;\nst.global.b32 [%rd10], %r4;"
    run(PLACE + body, x)
    assert (x.view(np.int32) == (np.arange(64) - 12).clip(least, 9)).all()


def test_parameters_are_counted():
    with pytest.raises(ValueError, match="kernel has 2 parameters; 1 were given"):
        emulator.run(ptx_of("", 2), (1,), 0, [np.uint64(0)], [])


def test_a_tensor_of_more_than_2_to_the_31_elements():
    """Only what is touched takes memory."""
    x = np.zeros(2**32 + 64, np.uint8)
    far = "add.s64 %rd10, %rd1, 4294967296;\ncvt.u64.u32 %rd11, %r1;\nadd.s64 %rd10, %rd10, %rd11;\n"
    far += "cvt.u16.u32 %rs1, %r1;\nst.global.b8 [%rd10], %rs1;"
    run(far, x)
    assert (x[-64:] == np.arange(64)).all()
    assert not x[:64].any()
    wrapped = far.replace("4294967296", "4294967360")
    assert fault_of(wrapped, x).kind == "bounds"


def test_two_values_at_one_address():
    """Equal ones are allowed: layouts repeat values."""
    assert "two threads write different values" in str(fault_of("st.global.b32 [%rd1], %r1;", numbers()))
    run("mov.b32 %r2, 5;\nst.global.b32 [%rd1], %r2;", numbers())


# zeros in shared memory, and a matmul of a warp group that reads them: a at 0, b at 2048, rows of 16 bytes, no swizzle
PRODUCT = """
shl.b32 %r10, %r1, 5;
mov.b32 %r2, 0;
st.shared.v4.b32 [%r10], {%r2, %r2, %r2, %r2};
st.shared.v4.b32 [%r10+16], {%r2, %r2, %r2, %r2};
fence.proxy.async.shared::cta;
bar.sync 0;
mov.u64 %rd10, 68720001024;
mov.u64 %rd11, 68720001152;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20, %r21, %r22, %r23}, %rd10, %rd11, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mad.wide.u32 %rd12, %r1, 4, %rd1;
st.global.b32 [%rd12], %r20;
"""


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("bar.sync 0;", "", "race"),
        ("fence.proxy.async.shared::cta;", "", "proxy"),
        ("wgmma.fence.sync", "cvt.u64.u32 %rd13, %r1;\nadd.s64 %rd11, %rd11, %rd13;\nwgmma.fence.sync", "barrier"),
        ("68720001152", "68720001272", "bounds"),
        ("wgmma.commit", "st.shared.b32 [%r10], %r2;\nwgmma.commit", "in flight"),
    ],
)
def test_a_matmul_of_a_warp_group(old, new, kind):
    x = np.full(128, 9, np.uint32)
    run(PRODUCT, x, threads=128)
    assert not x.any()
    assert fault_of(PRODUCT.replace(old, new), x, threads=128).kind == kind


COPIED = PRODUCT.replace(
    "st.shared.v4.b32 [%r10+16], {%r2, %r2, %r2, %r2};",
    """
add.s32 %r11, %r10, 16;
cp.async.cg.shared.global [ %r11 + 0 ], [ %rd1 + 0 ], 0x10;
cp.async.commit_group;
cp.async.wait_group 0;
""",
)


def test_copies_need_a_fence():
    """After they have landed, as what threads wrote themselves does."""
    fence, x = "fence.proxy.async.shared::cta;\n", np.zeros(128, np.uint32)
    run(COPIED, x, threads=128)
    late = COPIED.replace(fence, "").replace("add.s32 %r11", fence + "add.s32 %r11")
    assert fault_of(late, x, threads=128).kind == "proxy"
