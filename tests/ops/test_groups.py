"""Attention by groups of heads: a workspace of one byte takes as many groups as there are, and changes rounding alone."""

import pytest
import torch
from blocks import BATCH, BLOCKS, HEADS, LENGTH, VARIANTS, Attention, Block, in_turn, joined_biases
from cases import (
    DTYPES,
    SAMPLES,
    assert_as_exact,
    assert_same,
    assert_same_within_rounding,
    gradients,
    over_samples,
)

from ckptkern.memory import saved_tensors
from ckptkern.ops.attention import sublayer as _sublayer

OPTIONS = (
    Block("slopes", Attention(slopes=(HEADS,), layout="heads", kv_heads=2)),
    Block("slopes of samples", Attention(slopes=(BATCH, HEADS), causal=False, packed=False)),
    Block("bias of samples", Attention(mask=(BATCH, HEADS, LENGTH, LENGTH), kv_heads=2, padded=True)),
    Block("bias of one head", Attention(mask=(1, 1, 1, LENGTH), kv_heads=2)),
    Block("normed heads", Attention(kv_heads=2, qk_norm="layer", rotary=True, batched_tables=True)),
    Block("low-rank in heads", Attention(kv_heads=2, layout="heads", lora=("qkv", "out"), lora_p=0.3)),
    Block("low-rank after a norm", Attention(lora=("qkv", "out"), norm_first=False, kv_heads=2)),
)  # fmt: skip
GROUPED = [
    block for block in (*BLOCKS, *VARIANTS, *OPTIONS)
    if block.attention is not None and block.attention.kv_heads > 1 and not block.attention.qk_norm.endswith("all")
]  # fmt: skip


@pytest.fixture(autouse=True)
def counts(monkeypatch) -> list[int]:
    """How many groups each sublayer took."""
    seen, count = [], _sublayer.group_count
    monkeypatch.setattr(_sublayer, "group_count", lambda *args: seen.append(count(*args)) or seen[-1])
    return seen


def in_groups(block: Block) -> Block:
    return block.with_(workspace=1)


@pytest.mark.parametrize("block", in_turn(GROUPED) + in_turn(GROUPED, shift=1) + in_turn(GROUPED, shift=2))
def test_groups_change_rounding_alone(block, counts):
    tensors = block.make(torch.float64)
    whole = gradients(block.fused, tensors)
    assert set(counts) == {1}
    counts.clear()
    assert_same_within_rounding(gradients(in_groups(block).fused, tensors), whole)
    assert block.attention.kv_heads in counts


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        pytest.param(*one.values, dtype, id=f"{one.id}-{dtype}")
        for shift, dtype in enumerate(DTYPES)
        for one in in_turn(GROUPED, shift=shift)
    ],
)
def test_gradients_are_as_exact_as_torchs(block, dtype):
    draws = [block.make(dtype, seed=seed) for seed in range(2 * SAMPLES)]
    assert_as_exact(*map(joined_biases, over_samples(in_groups(block).fused, block.unfused, draws)))


@pytest.mark.parametrize("block", in_turn(GROUPED, ("none", "full")))
def test_every_mode_gives_the_same_bits(block):
    """Recompute takes the groups of forward."""
    tensors = block.make(torch.bfloat16)
    ours, selective = (gradients(in_groups(one).fused, tensors) for one in (block, block.with_(recompute="selective")))
    if block.recompute == "none":  # its q, k and v are of one matmul for all heads
        assert_same({"y": ours["y"]}, {"y": selective["y"]})
    else:
        assert_same(ours, selective)


@pytest.mark.parametrize("block", in_turn(GROUPED))
def test_what_is_saved_does_not_change(block):
    def saved(block):
        tensors = block.make()
        with saved_tensors([t for name, t in tensors.items() if name != "x"]) as found:
            block.fused(tensors)
        return found.bytes

    assert saved(in_groups(block)) == saved(block)
