"""What low-rank updates have besides what test_blocks.py holds of every variant of the sublayers."""

import pytest
import torch
import torch.nn.functional as F
from support.blocks import MLP, Attention, Block
from support.cases import SAMPLES, SEED, assert_as_exact, assert_same, assert_same_within_rounding, gradients

import ckptkern
from ckptkern import LoRA
from ckptkern.errors import DeviceError, DtypeError, ShapeError

GATED = Block(
    "gated", mlp=MLP(gated=True, activation="silu", lora=("gate", "up", "down"), lora_p=0.3), recompute="full"
)
PLAIN = Block("plain", mlp=MLP(activation="relu", lora=("up", "down"), lora_p=0.3), recompute="full")


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("block", [GATED, PLAIN], ids=str)
def test_chunks_of_tokens(block, backend):
    """A workspace too small for 300 tokens; masks and gradients as without."""
    tensors = block.make(lead=(300,))

    def small(t):
        torch.manual_seed(SEED)
        return ckptkern.mlp_block(t["x"], **block.mlp.arguments(t), recompute="full", workspace=1)

    with ckptkern.backend(backend):
        assert_same_within_rounding(gradients(small, tensors), gradients(block.fused, tensors))


def test_modes_of_chunks_have_the_same_bits():
    """Forward takes the chunks that backward takes."""
    tensors = GATED.make(lead=(300,))

    def at(mode):
        def small(t):
            torch.manual_seed(SEED)
            return ckptkern.mlp_block(t["x"], **GATED.mlp.arguments(t), recompute=mode, workspace=1)

        return gradients(small, tensors)

    for mode in ("selective", "none"):
        assert_same(at(mode), at("full"))


def test_a_frozen_layer_has_gradients_of_its_updates_alone():
    """As a LoRA fine-tuning has it: no matmul of a frozen weight's gradient, and the bits of all-trained."""
    block = Block(
        "llama", Attention(norm="rms", bias=False, packed=False, lora=("q", "v")), MLP(gated=True, lora=("down",))
    )
    frozen = [name for name in block.make() if "lora" not in name]
    grads = gradients(block.fused, block.make(frozen=frozen))
    assert sorted(name for name in grads if name != "y") == sorted(name for name in block.make() if "lora" in name)
    everything = gradients(block.fused, block.make())
    assert_same(grads, {name: everything[name] for name in grads})


SUBLAYERS = {
    "mlp": GATED.without_dropout(),
    "attention": Block("attention", Attention(packed=False, lora=("q", "v", "out"))).without_dropout(),
    "decoder": Block("decoder", Attention(), MLP(), Attention(key_features=8, causal=False, packed=False, lora=("k", "out")))
    .without_dropout(),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SUBLAYERS)
def test_float32_updates_of_a_16_bit_layer(name, dtype, mode):
    """As peft makes them: what is summed for A and B has float32's range and precision."""
    block, ours, eager, exact = SUBLAYERS[name].with_(recompute=mode), [], [], []
    for seed in range(SAMPLES):
        tensors = {
            key: t.detach().float().requires_grad_() if "lora" in key else t
            for key, t in block.make(dtype, lead=(2, 64), seed=seed).items()
        }
        double = {key: t.detach().double().requires_grad_() for key, t in tensors.items()}
        for results, function, given in (
            (ours, block.fused, tensors),
            (eager, block.unfused, tensors),
            (exact, block.unfused, double),
        ):
            results.append({key: g for key, g in gradients(function, given).items() if "lora" in key or key == "y"})
    joined = ({key: torch.stack([one[key] for one in results]) for key in ours[0]} for results in (ours, eager, exact))
    assert_as_exact(*joined)


def test_small_gradients_do_not_vanish_in_float16():
    x, w = torch.randn(16, 64).half(), (torch.randn(64, 64) / 8).half()
    a, b = (torch.randn(8, 64) / 8).requires_grad_(), (torch.randn(64, 8) * 1e-4).requires_grad_()
    y = ckptkern.mlp_block(x, w, None, w, None, "identity", lora={"up": LoRA(a, b, 1e-3)}, residual=False)
    y.backward(torch.full_like(y, 1e-4))
    z = (F.linear(x, w) + F.linear(F.linear(x.float(), a), b) * 1e-3).half()
    (expected,) = torch.autograd.grad(F.linear(z, w), a, torch.full_like(y, 1e-4))
    assert expected.norm() > 0
    assert (a.grad - expected).norm() < 0.01 * expected.norm()


def test_without_training_nothing_is_dropped():
    tensors = GATED.make()
    y = ckptkern.mlp_block(tensors["x"], **GATED.mlp.arguments(tensors), training=False)
    torch.testing.assert_close(y, GATED.without_dropout().unfused(tensors))


X, UP, DOWN = torch.randn(3, 8), torch.randn(12, 8), torch.randn(8, 12)
A, B, TRAINED = torch.randn(2, 8), torch.randn(12, 2), torch.ones((), requires_grad=True)
ERRORS = {
    "no dict": (TypeError, "lora must be a dict of ckptkern.LoRA by layer, not list", [LoRA(A, B)]),
    "another layer": (ValueError, "lora has 'q', but the layers are 'up', 'down'", {"q": LoRA(A, B)}),
    "a alone": (TypeError, r"lora\['up'\] must be ckptkern.LoRA", {"up": (A,)}),
    "a tensor": (TypeError, r"lora\['up'\] must be ckptkern.LoRA\(a, b, scale, dropout_p\), not Tensor", {"up": A}),
    "a rotated": (ShapeError, r"must be \[r, 8\] and \[12, r\], but have shapes \(8, 2\)", {"up": LoRA(A.t(), B)}),
    "another rank": (ShapeError, r"must be \[r, 8\] and \[12, r\]", {"up": LoRA(A, B[:, :1])}),
    "a vector": (ShapeError, r"must be \[r, 8\] and \[12, r\]", {"up": LoRA(A[0], B)}),
    "integers": (DtypeError, r"b of lora\['up'\] must be floating point", {"up": LoRA(A, B.int())}),
    "no number": (TypeError, r"the scale of lora\['up'\] must be a number", {"up": LoRA(A, B, "1")}),
    "a trained scale": (ValueError, "no gradient is formed for the scale", {"up": LoRA(A, B, TRAINED)}),
    "a probability": (ValueError, "dropout probability has to be", {"up": LoRA(A, B, 1.0, 2.0)}),
    "elsewhere": (DeviceError, r"a of lora\['up'\] is on meta", {"up": LoRA(A.to("meta"), B)}),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "lora"), ERRORS.values(), ids=ERRORS)
def test_errors(error, message, lora):
    with pytest.raises(error, match=message):
        ckptkern.mlp_block(X, UP, None, DOWN, None, lora=lora)


def test_an_update_of_packed_weights_is_for_self_attention():
    weight, update = torch.randn(24, 8), LoRA(torch.randn(2, 8), torch.randn(24, 2))
    with pytest.raises(ValueError, match="pass three weights"):
        ckptkern.attention_block(X, weight, None, torch.eye(8), None, 2, key_value=X, lora={"qkv": update})


def test_a_plain_tuple_will_do():
    update = torch.randn(8, 2)
    y = ckptkern.mlp_block(X, UP, None, DOWN, None, lora={"down": (torch.randn(2, 12), update)}, training=False)
    assert y.shape == X.shape


GATE_UP, EXPERTS_A, EXPERTS_B = torch.randn(3, 24, 8), torch.randn(3, 2, 8), torch.randn(3, 24, 2)


@pytest.mark.parametrize(("error", "message", "lora"), [
    (ShapeError, r"must be \[3, r, 8\] and \[3, 24, r\]", LoRA(A, B)),
    (ValueError, "is an update of experts, which has no dropout; pass dropout_p=0", LoRA(EXPERTS_A, EXPERTS_B, 1.0, 0.5)),
])  # fmt: skip
def test_errors_of_experts(error, message, lora):
    index, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(error, match=message):
        ckptkern.moe_mlp(X, index, weights, GATE_UP, torch.randn(3, 8, 12), lora={"gate_up": lora})


def test_an_update_of_a_head_is_not_split_over_ranks():
    with pytest.raises(ValueError, match="is not split over a process group; leave out one of both"):
        ckptkern.linear_cross_entropy(X, UP, torch.zeros(3, dtype=torch.int64), lora=LoRA(A, B), group=object())


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_head_with_an_update_in_chunks_of_both(backend):
    """Of tokens and of the vocabulary; every result, and float32 factors of a 16-bit head."""
    torch.manual_seed(0)
    x, w, bias, target = torch.randn(300, 24), torch.randn(600, 24) / 3, torch.randn(600), torch.arange(300) * 7 % 600
    leaves = [one.requires_grad_() for one in (x, torch.randn(3, 24) / 2, torch.randn(600, 3) / 2, bias)]
    target[::5] = -100
    options = dict(
        label_smoothing=0.1, softcap=4.0, return_entropy=True, return_log_probs=True, return_accuracy=True, top_k=3
    )

    def results(workspace, weight=w, **lora):
        given = dict(target=target, linear_bias=bias, workspace=workspace, **options, **lora)
        with ckptkern.backend(backend):
            found = ckptkern.linear_cross_entropy(x, weight, **given)
        total = found.loss + found.entropy.square().sum() + found.log_probs.sum()
        return [*(found.loss, found.entropy, found.log_probs, found.accuracy, *found.top_k)], torch.autograd.grad(
            total, leaves
        )

    update = LoRA(leaves[1], leaves[2], 0.5)
    merged = results(None, weight=w + 0.5 * leaves[2] @ leaves[1])
    for workspace in (1, 2**30):
        torch.testing.assert_close(results(workspace, lora=update), merged, rtol=1e-3, atol=1e-4)


def test_a_head_s_float32_update_of_16_bits():
    x, w = torch.randn(64, 32).bfloat16(), (torch.randn(96, 32) / 6).bfloat16()
    a, b = (torch.randn(4, 32) / 6).requires_grad_(), (torch.randn(96, 4) * 1e-3).requires_grad_()
    target = torch.arange(64)
    ckptkern.linear_cross_entropy(x, w, target, lora=LoRA(a, b, 2.0)).backward()
    z = F.linear(x.float(), w.float()) + 2.0 * F.linear(F.linear(x.float(), a), b)
    for grad, one in zip((a.grad, b.grad), torch.autograd.grad(F.cross_entropy(z, target), (a, b)), strict=True):
        assert grad.dtype == torch.float32
        assert (grad - one).norm() < 0.01 * one.norm()
