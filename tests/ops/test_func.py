"""Ops under torch.func, vmap and batched gradients."""

import itertools

import pytest
import torch
from support.calls import call_of, dropping
from support.cases import assert_same_within_rounding
from support.oracles import mlp as mlp_oracle
from torch.func import grad, jacrev, vmap

from ckptkern.ops import catalog

LINEAR = "linear_act", "linear_stack", "mlp", "gated_mlp"
BLOCKS = "mlp_block", "attention_block", "latent_attention_block", "transformer_layer"


@pytest.mark.parametrize("mode", [0, -1])
@pytest.mark.parametrize("name", LINEAR)
def test_vmap_over_models(name, mode):
    """One op over stacked models, a batch dimension in the middle, and no gradient at all."""
    call = call_of(name, mode=mode)
    models = [call.make(seed=seed) for seed in range(3)]
    stacked = {one: torch.stack([m[one].detach() for m in models], 1) for one in models[0]}
    out = vmap(call.unseeded, in_dims=(dict.fromkeys(stacked, 1),))(stacked)
    for i, model in enumerate(models):
        assert_same_within_rounding({"y": out[i]}, {"y": call.unseeded(model).detach()})


@pytest.mark.parametrize("name", ["mlp", "dropout"])
def test_masks_under_vmap(name):
    """randomness="same" is one mask for all samples, "different" one for each; "error" says so."""
    call = dropping(name, sizes=catalog.Sizes((8,), 9, 16))
    tensors = call.make()

    def outputs(randomness):
        x = tensors["x"].detach().expand(4, 8, 9).contiguous()
        return vmap(lambda one: call.unseeded({**tensors, "x": one}), randomness=randomness)(x)

    same, different = outputs("same"), outputs("different")
    assert all(torch.equal(same[0], same[i]) for i in range(1, 4))
    assert all(not torch.equal(different[i], different[j]) for i, j in itertools.combinations(range(4), 2))
    with pytest.raises(RuntimeError, match="randomness"):
        outputs("error")


def test_jacobians_and_gradients_of_gradients():
    call = call_of("mlp", sizes=catalog.Sizes((2,), 3, 4, 2), activation="silu", dropout_p=0.25)
    tensors = {name: t.detach() for name, t in call.make(torch.float64).items()}

    def oracle(t):
        torch.manual_seed(17)
        return mlp_oracle(**t, activation="silu", dropout_p=0.25)

    def found(function):
        def penalty(t):
            return sum(g.square().sum() for g in grad(lambda t: function(t).square().sum())(t).values())

        # chunk_size 1: the mask of a loop is the mask of one call
        return jacrev(lambda x: function({**tensors, "x": x}), chunk_size=1)(tensors["x"]), grad(penalty)(tensors)

    torch.testing.assert_close(found(call), found(oracle))
