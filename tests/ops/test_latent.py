"""latent_attention_block: what its blocks in support/blocks.py do not test."""

from dataclasses import replace

import pytest
import torch
from support.blocks import HEADS, LENGTH, MLP, NOPE, ROPE, Block, Latent
from support.cases import MODES, assert_same, assert_same_within_rounding, clone, gradients, output_gradient

import ckptkern
from ckptkern.errors import DtypeError, ShapeError
from ckptkern.memory import saved_tensors
from ckptkern.ops.attention import latent_sublayer

PLAIN = Block("", Latent(norm=None, q_rank=6, rotary=True, dropout_p=0.0, resid_p=0.0, bias=False))
V = PLAIN.attention.v


def called(block: Block, **changes):
    """The block's function with other arguments."""
    return lambda t: ckptkern.latent_attention_block(
        t["x"], **block.attention.arguments(t) | {"recompute": block.recompute} | changes
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_without_a_norm_and_a_rotation_it_is_attention_of_joined_weights(backend, mode):
    """Wkvb Wkva, and of k the rows that all heads share."""
    block = PLAIN.with_(attention=Latent(norm=None, latent_norms=False, dropout_p=0.0, resid_p=0.0, bias=False))
    tensors, rank = block.make(), block.attention.kv_rank

    def joined(t):
        down, shared = t["kv_a_weight"].split([rank, ROPE])
        up = t["kv_b_weight"].unflatten(0, (HEADS, NOPE + V))
        k = torch.cat((up[:, :NOPE] @ down, shared.expand(HEADS, -1, -1)), 1).flatten(0, 1)
        # the op of one head dim: values with two rows of zeros, which the output does not read
        v = torch.nn.functional.pad(up[:, NOPE:] @ down, (0, 0, 0, NOPE + ROPE - V)).flatten(0, 1)
        out = torch.nn.functional.pad(t["out_weight"].unflatten(1, (HEADS, V)), (0, NOPE + ROPE - V)).flatten(1)
        return ckptkern.attention_block(
            t["x"], [t["q_weight"], k, v], None, out, None, HEADS, is_causal=True, residual=True
        )

    with ckptkern.backend(backend):
        ours = gradients(called(block, recompute=mode), tensors)
        assert_same_within_rounding(ours, gradients(joined, tensors))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_theta_stands_for_its_tables_which_it_does_not_save(mode, interleaved):
    tensors = PLAIN.make()
    tables = ckptkern.nn.rotary_tables(torch.arange(LENGTH), ROPE, 50.0, interleaved=interleaved)
    found, given = [], dict(rotary_interleaved=interleaved, recompute=mode)
    for rotary in (tables, 50.0):
        run = called(PLAIN, rotary=rotary, **given)
        with saved_tensors(exclude=[t for name, t in tensors.items() if name != "x"]) as saved:
            run(tensors)
        found.append((gradients(run, tensors), saved.bytes))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] - found[1][1] == 2 * LENGTH * ROPE * 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_fewer_columns_rotate_the_first_of_the_rotated_dimensions(interleaved):
    """As tables whose other angles are zero."""
    tensors = PLAIN.make(torch.float64)
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None].expand(LENGTH, 2)
    still, other = torch.zeros(LENGTH, 2, dtype=torch.float64), clone(tensors)
    whole = torch.cat((angles, still), -1)
    if not interleaved:  # of two columns these are 0 and 1, of four 0 and 2
        order = [0, 2, 1, 3]
        whole = whole[:, order]
        with torch.no_grad():
            for rows in (other["q_weight"].view(HEADS, NOPE + ROPE, -1)[:, NOPE:], other["kv_a_weight"][None, -ROPE:]):
                rows.copy_(rows[:, order])
    few, all_ = (
        called(PLAIN, rotary=(a.cos(), a.sin()), rotary_interleaved=interleaved)(t)
        for a, t in ((angles, tensors), (whole, other))
    )
    torch.testing.assert_close(few, all_)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lead", [(LENGTH,), (0, 5), (2, 0), (1, 1)], ids=str)
def test_empty_and_unbatched(lead, mode):
    tensors = PLAIN.make(lead=lead)
    run = called(PLAIN, rotary=10.0, recompute=mode)
    ours = gradients(run, tensors)
    assert ours["y"].shape == tensors["x"].shape
    assert all(ours[name].shape == t.shape and ours[name].isfinite().all() for name, t in tensors.items())
    if len(lead) == 1:
        batched = tensors | {"x": tensors["x"].detach()[None].requires_grad_()}
        expected = gradients(run, batched)
        assert_same(ours, expected | {name: expected[name][0] for name in ("y", "x")})


def test_the_fewest_groups(monkeypatch):
    """As many groups as the workspace makes necessary; the same number in both passes."""
    seen, latent_groups = [], latent_sublayer.latent_groups
    monkeypatch.setattr(latent_sublayer, "latent_groups", lambda *args: seen.append(latent_groups(*args)) or seen[-1])
    tensors, found = PLAIN.with_(recompute="full").make(), []
    for workspace in (2**40, *(int(1.1**n) for n in range(160, 0, -1))):
        seen.clear()
        gradients(PLAIN.with_(recompute="full", workspace=workspace).fused, tensors)
        assert len(set(seen)) == 1
        found.append(seen[0])
    assert list(dict.fromkeys(found)) == [1, 2, 4]


def test_gradients_of_latents_and_of_the_shared_part_of_k_are_summed_in_float32():
    """Over 128 groups, whose terms would each be rounded to bfloat16."""
    draw, heads = torch.Generator().manual_seed(0), 128
    shapes = {
        "x": (32, 32),
        "q": (heads * 8, 32),
        "kv_a": (16 + 4, 32),
        "kv_b": (heads * 8, 16),
        "out": (32, heads * 4),
    }
    tensors = {name: torch.randn(shape, generator=draw).bfloat16().requires_grad_() for name, shape in shapes.items()}

    def grads(workspace, dtype=torch.bfloat16):
        x, *weights = (t.detach().to(dtype).requires_grad_() for t in tensors.values())
        y = ckptkern.latent_attention_block(x, *weights, heads, scale=0.02, rotary=100.0, workspace=workspace)
        dx, dkv_a = torch.autograd.grad(y, (x, weights[1]), output_gradient(y))
        return [g.double() for g in (dx, *dkv_a.split([16, 4]))]

    exact = grads(None, torch.float64)
    for i in range(3):
        of_groups, of_all = ((grads(workspace)[i] - exact[i]).norm() for workspace in (1, None))
        assert of_groups < 1.1 * of_all


def test_the_scale_is_that_of_both_parts_of_a_head():
    tensors = PLAIN.make()
    assert_same(gradients(called(PLAIN), tensors), gradients(called(PLAIN, scale=(NOPE + ROPE) ** -0.5), tensors))


def test_head_dims_that_no_kernel_covers():
    """Of q and k, or of v alone."""
    x, weight = torch.randn(5, 8), torch.randn
    for nope, v in ((255, 8), (8, 257)):
        weights = weight(nope + 2, 8), weight(4 + 2, 8), weight(nope + v, 4), weight(8, v)
        assert ckptkern.latent_attention_block(x, *weights, 1).isfinite().all()
        with (
            ckptkern.backend("triton"),
            pytest.raises(RuntimeError, match="the attention kernels cover head dims up to 256, not 257"),
        ):
            ckptkern.latent_attention_block(x, *weights, 1)


OWN = PLAIN.make()
ERRORS = {
    "heads": (ShapeError, "for 3 heads of D_n", {"num_heads": 3}),
    "no heads": (ValueError, "num_heads must be", {"num_heads": 0}),
    "rows of q": (ShapeError, "weights must be q_weight", {"q_weight": OWN["q_weight"][1:]}),
    "a latent that is too wide": (
        ShapeError, r"kv_a_norm_weight must have shape \(20,\)", {"kv_b_weight": torch.randn(HEADS * (NOPE + V), 20)}),
    "q's latent": (ShapeError, "q_a_weight has 6 features but q_weight has in_features=5", {"q_weight": torch.randn(28, 5)}),
    "q without its latent": (
        ShapeError, "input has 10 features but q_weight has in_features=6",
        {"q_a_weight": None, "q_a_norm_weight": None}),
    "a norm of no latent": (
        ValueError, "q_a_bias and q_a_norm_weight need q_a_weight", {"q_a_weight": None, "q_weight": torch.randn(28, 10)}),
    "a norm of another width": (ShapeError, r"kv_a_norm_weight must have shape \(8,\)", {"kv_a_norm_weight": torch.ones(7)}),
    "columns of the output": (ShapeError, "weights must be", {"out_weight": torch.randn(10, 21)}),
    "a bias": (ShapeError, "the bias of kv_b_weight must have shape", {"kv_b_bias": torch.ones(3)}),
    "no tensor": (TypeError, "kv_b_weight must be a Tensor", {"kv_b_weight": None}),
    "an odd rotation": (ShapeError, "with R even and at most 4", {"rotary": (torch.ones(7, 6), torch.ones(7, 6))}),
    "a residual of another width": (ShapeError, "residual needs out_weight with 10 rows", {"out_weight": torch.randn(5, 20)}),
    "a dtype": (DtypeError, "use one dtype, or torch.autocast", {"kv_b_weight": OWN["kv_b_weight"].double()}),
    "a number": (TypeError, "latent_norm_eps must be a number", {"latent_norm_eps": "small"}),
    "a trained padding mask": (
        ValueError, "no gradient is formed for key_padding_mask",
        {"key_padding_mask": torch.zeros(2, 7, requires_grad=True)}),
    "a mode": (ValueError, "recompute must be", {"recompute": "some"}),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "changes"), ERRORS.values(), ids=ERRORS)
def test_errors(error, message, changes):
    before = torch.get_rng_state()
    with pytest.raises(error, match=f"latent_attention_block: .*{message}"):
        called(PLAIN, dropout_p=0.5, **changes)(OWN)
    assert torch.equal(torch.get_rng_state(), before)


def test_errors_of_the_layer():
    """Its arguments are those of latent_attention_block; it has no cross-attention and no form on a shard."""
    own = PLAIN.attention.arguments(OWN)
    mlp = dict(up_weight=torch.randn(12, 10), up_bias=None, down_weight=torch.randn(10, 12), down_bias=None)
    with pytest.raises(TypeError, match="attention_arguments has 'qkv_weight', but its arguments are q_weight,"):
        ckptkern.transformer_layer(OWN["x"], own | {"qkv_weight": OWN["x"]}, mlp)
    with pytest.raises(TypeError, match="attention_arguments must have q_weight"):
        ckptkern.transformer_layer(OWN["x"], {"kv_a_weight": OWN["kv_a_weight"]}, mlp)
    cross = dict(
        key_value=OWN["x"], qkv_weight=torch.randn(30, 10), qkv_bias=None, out_weight=torch.randn(10, 10), out_bias=None,
        num_heads=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="with a kv_a_weight go without cross_attention_arguments"):
        ckptkern.transformer_layer(OWN["x"], own, mlp, cross_attention_arguments=cross)


@pytest.mark.parametrize("block", [PLAIN, PLAIN.with_(mlp=MLP(dropout_p=0.0, resid_p=0.0))], ids=["alone", "layer"])
def test_torch_func_forms_no_gradient_of_tables_and_masks(block):
    """It cannot tell which tensors have none, and asks for those of all."""
    block = block.with_(attention=replace(block.attention, padded=True))
    tensors = block.make()
    expected = torch.autograd.grad(block.call(tensors).sum(), tensors["x"])[0]
    ours = torch.func.grad(lambda x: block.call(tensors | {"x": x}).sum())(tensors["x"].detach())
    torch.testing.assert_close(ours, expected)
