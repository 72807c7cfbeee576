"""Attention by groups of heads: a workspace of one byte takes as many groups as there are, and changes rounding alone."""

import pytest
import torch
from support.blocks import BATCH, BLOCKS, HEADS, LENGTH, VARIANTS, Attention, Block, in_turn, joined_biases
from support.cases import (
    DTYPES,
    MODES,
    SAMPLES,
    SEED,
    assert_as_exact,
    assert_same,
    assert_same_within_rounding,
    clone,
    gradients,
    output_gradient,
    over_samples,
)
from triton.runtime.interpreter import InterpretedFunction

import ckptkern
from ckptkern import eager as _eager
from ckptkern.memory import memory_timeline, peak_memory, saved_tensors
from ckptkern.ops.attention import latent_sublayer as _latent_sublayer
from ckptkern.ops.attention import sublayer as _sublayer
from ckptkern.ops.registration import gradients as _gradients

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
# Whose kernels read what a group cuts: a mask's planes, slopes, biases, norms of heads, packed and rotated q and k.
ON_KERNELS = [
    block
    for block in GROUPED
    if block.name in ("llama", "slopes", "bias of samples", "normed heads", "gated heads", "latent")
]


@pytest.fixture(autouse=True)
def counts(monkeypatch) -> list[int]:
    """How many groups each sublayer took."""
    seen, division, latent_groups = [], _sublayer.division, _latent_sublayer.latent_groups

    def recorded(*args):
        made = division(*args)
        seen.append(made.groups)
        return made

    monkeypatch.setattr(_sublayer, "division", recorded)
    monkeypatch.setattr(_latent_sublayer, "latent_groups", lambda *args: seen.append(latent_groups(*args)) or seen[-1])
    return seen


@pytest.fixture
def few_rows(monkeypatch) -> None:
    """Chunks of rows where there are few rows: h is formed in four chunks."""
    monkeypatch.setattr(_gradients, "CHUNK_ROWS", 4)


def in_groups(block: Block) -> Block:
    return block.with_(workspace=1)


@pytest.mark.sampled
@pytest.mark.parametrize("block", in_turn(GROUPED) + in_turn(GROUPED, shift=1) + in_turn(GROUPED, shift=2))
@pytest.mark.usefixtures("few_rows")
def test_groups_change_rounding_alone(block, counts):
    tensors = block.make(torch.float64)
    whole = gradients(block.fused, tensors)
    assert set(counts) == {1}
    counts.clear()
    assert_same_within_rounding(gradients(in_groups(block).fused, tensors), whole)
    assert block.attention.kv_heads in counts


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        pytest.param(*one.values, dtype, id=f"{one.id}-{dtype}")
        for shift, dtype in enumerate(DTYPES)
        for one in in_turn(GROUPED, shift=shift)
    ],
)
@pytest.mark.usefixtures("few_rows")
def test_gradients_are_as_exact_as_torchs(block, dtype):
    draws = [block.make(dtype, seed=seed) for seed in range(2 * SAMPLES)]
    assert_as_exact(*map(joined_biases, over_samples(in_groups(block).fused, block.unfused, draws)))


@pytest.mark.parametrize("block", in_turn(ON_KERNELS, ("none", "full")))
def test_groups_on_the_kernels(block, counts):
    """Core attention, dropout planes, slopes and norms of a group's heads, interpreted: twice eager's error at most."""
    tensors = block.make(torch.bfloat16)
    with ckptkern.backend("triton"):
        ours = gradients(in_groups(block).fused, tensors)
    assert max(counts) > 1
    eager, exact = gradients(block.unfused, tensors), gradients(block.unfused, clone(tensors, torch.float64))
    assert_as_exact(*map(joined_biases, (ours, eager, exact)))


def test_input_gradients_are_summed_in_float32():
    """Over 32 groups, whose 96 terms would each be rounded to bfloat16."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": (64, 32), "q": (128, 32), "k": (128, 32), "v": (128, 32), "out": (32, 128)}
    tensors = {name: torch.randn(shape, generator=draw).bfloat16().requires_grad_() for name, shape in shapes.items()}

    def dx(workspace, dtype=torch.bfloat16):
        x, *qkv, out = (t.detach().to(dtype).requires_grad_() for t in tensors.values())
        y = ckptkern.attention_block(x, qkv, None, out, None, 32, scale=0.02, workspace=workspace)
        return torch.autograd.grad(y, x, output_gradient(y))[0].double()

    exact = dx(None, torch.float64)
    of_groups, of_all = ((dx(workspace) - exact).norm() for workspace in (1, None))
    assert of_groups < 1.1 * of_all


@pytest.mark.parametrize("block", in_turn(GROUPED, ("none", "full")))
@pytest.mark.usefixtures("few_rows")
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


@pytest.mark.parametrize("name", ["llama", "crossing", "low-rank in heads", "bias of samples", "latent"])
@pytest.mark.usefixtures("few_rows")
def test_parts_of_a_main_grad(name):
    """Each group adds to its part of a weight's main_grad, which then has what all heads at once would add."""
    block = next(one for one in GROUPED if one.name == name).with_(recompute="full")
    whole, tensors = gradients(block.fused, block.make()), block.make()
    weights = {name: t for name, t in tensors.items() if name.endswith(("weight", "lora_a", "lora_b")) and t.dim() == 2}
    for weight in weights.values():
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    in_groups(block).fused(tensors).backward(output_gradient(whole["y"]))
    for name, weight in weights.items():
        assert weight.grad is None
        assert weight.grad_added_to_main_grad
        torch.testing.assert_close(weight.main_grad - 1, whole[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences(mode):
    """Slopes of each sequence and each head; planes of the dropout mask by sequence."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": (9, 12), "qkv": (8 * 4, 12), "out": (12, 4 * 4), "sinks": (4,), "gate": (4 * 4, 12)}
    tensors = {name: torch.randn(shape, generator=draw).double().requires_grad_() for name, shape in shapes.items()}
    options = dict(
        cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32), alibi_slopes=torch.tensor([0.1, 0.2, 0.7, 1.5]), rotary=10.0,
        dropout_p=0.3, is_causal=True, recompute=mode,
    )  # fmt: skip

    def run(workspace):
        def block(t):
            torch.manual_seed(SEED)
            return ckptkern.attention_block(
                t["x"], t["qkv"], None, t["out"], None, 4, 2, workspace=workspace, sinks=t["sinks"], gate_weight=t["gate"],
                **options,
            )  # fmt: skip

        return gradients(block, tensors)

    assert_same_within_rounding(run(1), run(None))


def test_a_compiled_block(counts):
    block = next(one for one in GROUPED if one.name == "llama").with_(recompute="full")
    tensors = block.make()
    expected = gradients(in_groups(block).fused, tensors)
    torch._dynamo.reset()
    counts.clear()
    compiled = torch.compile(in_groups(block).call, backend="aot_eager", fullgraph=True)

    def seeded(t):
        torch.manual_seed(SEED)
        return compiled(t)

    assert_same(gradients(seeded, tensors), expected)
    assert block.attention.kv_heads in counts


def test_the_fewest_groups(counts):
    """As many groups as the workspace makes necessary, all or none of them in each kv head; the same number in both passes."""
    block = Block("many heads", Attention(kv_heads=4, dropout_p=0.0), recompute="full")
    tensors, found = block.make(), []
    for workspace in (2**40, *(int(1.1**n) for n in range(160, 0, -1))):
        counts.clear()
        gradients(block.with_(workspace=workspace).fused, tensors)
        assert len(set(counts)) == 1
        found.append(counts[0])
    assert list(dict.fromkeys(found)) == [1, 2, 4]


@pytest.mark.parametrize(("backend", "mode", "options", "factor"), [
    ("triton", "full", {"gate_in_query": True}, 1.05), ("eager", "selective", {"gate_in_query": True, "qk_norm": True}, 7),
    ("triton", "full", {"sinks": True}, 3), ("triton", "selective", {"gate": True, "sinks": True}, 2),
], ids=str)  # fmt: skip
def test_many_heads_with_a_gate_and_sinks(backend, mode, options, factor, monkeypatch):
    """In 32 groups, beside which o times the gate is large; and as many sums of rows as there are columns of heads. Kernels are
    not run: here they are what their launchers allocate."""
    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **options: None)
    H, D, d, options = 32, 8, 32, dict(options)
    rows = 2 * H * D if options.get("gate_in_query") else H * D
    shapes = {"x": (2, 80, d), "q": (rows, d), "k": (H * D, d), "v": (H * D, d), "out": (d, H * D)}
    shapes |= {"gate": (H * D, d)} if options.pop("gate", False) else {}
    shapes |= {"sinks": (H,)} if options.pop("sinks", False) else {}
    shapes |= {"q_norm": (D,), "k_norm": (D,)} if options.pop("qk_norm", False) else {}
    tensors = {name: torch.randn(shape).bfloat16().requires_grad_() for name, shape in shapes.items()}
    if "q_norm" in tensors:
        options["qk_norm"] = tensors["q_norm"], tensors["k_norm"]

    def transient(workspace: int) -> int:
        with ckptkern.backend(backend), memory_timeline("cpu") as forward:
            y = ckptkern.attention_block(
                tensors["x"], [tensors[name] for name in "qkv"], None, tensors["out"], None, H, sinks=tensors.get("sinks"),
                gate_weight=tensors.get("gate"), is_causal=True, recompute=mode, residual=True, rotary=100.0,
                workspace=workspace, **options,
            )  # fmt: skip
        dy = torch.ones_like(y)
        with peak_memory("cpu") as backward:
            grads = torch.autograd.grad(y, list(tensors.values()), dy)
        return max(forward.peak - forward.bytes[-1], backward.bytes - sum(grad.nbytes for grad in grads))

    workspace = int(factor * transient(1))
    assert transient(workspace) <= workspace


# -- the peak ----------------------------------------------------------------------------------------------------------

ROWS, WIDTH = (4, 160), 48
PEAKS = {
    "packed": dict(),
    "pre-norm, grouped queries": dict(kv_heads=4, norm="rms", residual=True, rotary=100.0),
    "post-norm": dict(norm="layer", norm_first=False, residual=True, resid_dropout_p=0.1),
    "normed heads": dict(norm="rms", qk_norm=True, rotary=100.0),
    "gate and sinks": dict(norm="rms", kv_heads=4, gate=True, sinks=True),
}  # fmt: skip


def transient(name: str, dtype: torch.dtype, mode: str, workspace: int) -> tuple[int, int]:
    """How far forward rises above what it saves and gives, and backward above the gradients."""
    options, generator = dict(PEAKS[name]), torch.Generator().manual_seed(SEED)
    kv_heads, D = options.pop("kv_heads", 8), WIDTH // 8
    shapes = {"x": (*ROWS, WIDTH), "qkv": (WIDTH + 2 * kv_heads * D, WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"q": (D,), "k": (D,)} if options.pop("qk_norm", False) else {}
    shapes |= {"gate": (WIDTH, WIDTH)} if options.pop("gate", False) else {}
    shapes |= {"sinks": (8,)} if options.pop("sinks", False) else {}
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()
    }
    if "q" in tensors:
        options["qk_norm"] = tensors["q"], tensors["k"]
    options |= {"gate_weight": tensors.get("gate"), "sinks": tensors.get("sinks")}
    torch.manual_seed(SEED)
    with peak_memory("cpu") as forward, saved_tensors(list(tensors.values())) as saved:
        y = ckptkern.attention_block(
            tensors["x"], tensors["qkv"], None, tensors["out"], None, 8, kv_heads, is_causal=True, recompute=mode,
            workspace=workspace, **options,
        )  # fmt: skip
    dy = output_gradient(y)
    with peak_memory("cpu") as backward:
        grads = torch.autograd.grad(y, list(tensors.values()), dy)
    sums = sum(g.nbytes if name == "x" else 2 * 4 * g.numel() for name, g in zip(tensors, grads, strict=True))
    return forward.bytes - saved.bytes - y.nbytes, backward.bytes - sums


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PEAKS)
def test_peak(name, mode, dtype, monkeypatch):
    """What is transient fits a workspace in which a group fits; one group at a time takes little over half of all at once.

    Without oneDNN, which takes blocks of its own on processors that multiply bfloat16.
    """
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    least, whole = (max(transient(name, dtype, mode, workspace)) for workspace in (1, 2**40))
    assert least < 0.6 * whole
    # of a group whose core attention runs at once: with less, it runs in blocks, which take less
    floor = max(least, *transient(name, dtype, mode, int(1.3 * least)))
    # float32 copies by which some processors multiply bfloat16 are counted to within a tenth
    room = 1.1 if _eager.upcasts(dtype) else 1.0
    for workspace in (int(1.3 * floor), int(2 * floor), int(3 * floor)):
        assert max(transient(name, dtype, mode, workspace)) <= room * workspace
