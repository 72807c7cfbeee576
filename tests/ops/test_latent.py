"""latent_attention_block: groups of heads, and tables of positions."""

import pytest
import torch
from support.cases import gradients, output_gradient

from ckptkern.ops import catalog
from ckptkern.ops.attention import latent_sublayer

ENTRY, SIZES = catalog.OPS["latent_attention_block"], catalog.Sizes((2, 7), 10, 8, 6, heads=4)
NOPE, ROPE, _ = catalog.LATENT_HEAD
ARGUMENTS = ENTRY.inputs(SIZES) | ENTRY.every_option(SIZES)["q_a_norm_weight"]


def called(**changes):
    return lambda t: catalog.call(ENTRY, ARGUMENTS, t, **changes)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_fewer_columns_rotate_the_first_of_the_rotated_dimensions(interleaved):
    """As tables whose other angles are zero."""
    tensors = catalog.random_leaves(ARGUMENTS, torch.float64)
    few = torch.arange(7, dtype=torch.float64)[:, None].expand(7, 2)
    all_, other = torch.cat((few, torch.zeros_like(few)), -1), {name: t.detach().clone() for name, t in tensors.items()}
    if not interleaved:  # of two columns these are 0 and 1, of four 0 and 2
        order = [0, 2, 1, 3]
        all_ = all_[:, order]
        for rows in (other["q_weight"].view(4, NOPE + ROPE, -1)[:, NOPE:], other["kv_a_weight"][None, -ROPE:]):
            rows.copy_(rows[:, order])
    found, expected = (
        called(rotary=(angles.cos(), angles.sin()), rotary_interleaved=interleaved)(t)
        for angles, t in ((few, tensors), (all_, other))
    )
    torch.testing.assert_close(found, expected)


def test_the_fewest_groups(monkeypatch):
    """As many groups as the workspace makes necessary; the same number in both passes."""
    seen, latent_groups = [], latent_sublayer.latent_groups
    monkeypatch.setattr(latent_sublayer, "latent_groups", lambda *args: seen.append(latent_groups(*args)) or seen[-1])
    tensors, found = catalog.random_leaves(ARGUMENTS), []
    for workspace in (2**40, *(int(1.1**n) for n in range(160, 0, -1))):
        seen.clear()
        gradients(called(recompute="full", workspace=workspace), tensors)
        assert len(set(seen)) == 1
        found.append(seen[0])
    assert list(dict.fromkeys(found)) == [1, 2, 4]


def test_gradients_of_latents_and_of_the_shared_part_of_k_are_summed_in_float32():
    """Over 128 groups, whose terms would each be rounded to bfloat16."""
    sizes = catalog.Sizes((1, 32), 32, 16, heads=128)
    tensors = catalog.random_leaves(ENTRY.inputs(sizes), torch.bfloat16)

    def grads(workspace, dtype=torch.bfloat16):
        t = {name: one.detach().to(dtype).requires_grad_() for name, one in tensors.items()}
        y = catalog.call(ENTRY, ENTRY.inputs(sizes), t, scale=0.02, rotary=100.0, workspace=workspace)
        dx, dkv_a = torch.autograd.grad(y, (t["x"], t["kv_a_weight"]), output_gradient(y))
        return [g.double() for g in (dx, *dkv_a.split([16, ROPE]))]

    exact, of_groups, of_all = grads(None, torch.float64), grads(1), grads(None)
    for want, mine, whole in zip(exact, of_groups, of_all, strict=True):
        assert (mine - want).norm() < 1.1 * (whole - want).norm()
