"""Dropout, alone and in the regions: the mask is the state's, backward's is forward's, the generator is torch's."""

import functools

import pytest
import torch
from support.cases import MODES, SEED, P, Setup, Sizes, assert_same, expected_mask, gradients, make, setups

import ckptkern
from ckptkern import state
from ckptkern.ops.sublayer.dropout import replayed_dropout

WITH_DROPOUT = ("mlp", "gated_mlp", "dropout")
MASKED = setups(("identity",), dropout=(P,), ops=WITH_DROPOUT)


def spelling_inputs(setup: Setup, tokens: int, width: int) -> dict:
    """Inputs that make y the scaled mask: x of ones through layers that are the identity (up: the constant 1)."""
    eye, zeros = torch.eye(width), torch.zeros(width)
    tensors = {"x": torch.ones(tokens, width)}
    for name in setup.op.parameters(1, 1, 1):
        if name.startswith("up"):
            tensors[name] = torch.zeros(width, width) if "weight" in name else torch.ones(width)
        else:
            tensors[name] = eye.clone() if "weight" in name else zeros.clone()
    return {name: t.requires_grad_() for name, t in tensors.items()}


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("workspace", [None, 1], ids=["whole", "chunked"])
@pytest.mark.parametrize("setup", MASKED)
def test_backward_replays_the_mask_of_forward(setup, workspace, tokens):
    """With a gradient of ones, dx shows the mask that backward used; also with chunks of 128 tokens."""
    tensors = spelling_inputs(setup, tokens, 41)
    result = gradients(setup.with_(workspace=workspace).fused, tensors, torch.ones(tokens, 41))
    scaled = expected_mask(P, tokens, 41) * state.threshold_scale(P)[1]
    torch.testing.assert_close(result["y"], scaled, rtol=0, atol=0)
    assert torch.equal(result["x"], result["y"])


@pytest.mark.parametrize("setup", MASKED)
def test_mask_of_a_batch_is_that_of_its_tokens(setup):
    """Rows are tokens in memory order, whatever the batch shape."""
    flat = spelling_inputs(setup, 12, 9)
    folded = {**flat, "x": flat["x"].detach().view(2, 2, 3, 9)}
    assert torch.equal(setup.fused(folded).view(12, 9), setup.fused(flat))


@pytest.mark.parametrize("setup", MASKED)
def test_draws(setup):
    """Two calls differ, manual_seed and a restored generator state reproduce, seeds differ."""
    tensors = spelling_inputs(setup, 16, 32)

    def draw():
        return setup.call(tensors).detach()

    torch.manual_seed(1)
    saved = torch.get_rng_state()
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(draw(), first)
    torch.set_rng_state(saved)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    torch.manual_seed(2)
    assert not torch.equal(draw(), first)
    torch.manual_seed(1 + 2**16)  # a seed cut to 16 bits
    assert not torch.equal(draw(), first)


@pytest.mark.parametrize("workspace", [None, 1], ids=["whole", "chunked"])
@pytest.mark.parametrize("setup", setups(dropout=(P,), ops=WITH_DROPOUT))
def test_generator_after_a_step(setup, workspace):
    """Forward draws 16 bytes in every mode, backward nothing, so the draws that follow are the same."""
    tensors = make(setup, Sizes(lead=(150,)))
    torch.manual_seed(SEED)
    torch.randint(-(2**63), 2**63 - 1, (2,))
    expected = torch.get_rng_state()
    y = setup.with_(workspace=workspace).fused(tensors)
    assert torch.equal(torch.get_rng_state(), expected)
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("setup", setups(dropout=(0.0,), ops=("mlp", "gated_mlp")))
def test_nothing_is_drawn_without_dropout(setup):
    before = torch.get_rng_state()
    setup.call(make(setup)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("setup", setups(modes=("none", "full"), dropout=(P,), ops=WITH_DROPOUT))
def test_draw_in_another_generator_state_changes_nothing_in_backward(setup):
    """The mask is the same, whatever is drawn or seeded between forward and backward."""
    tensors = make(setup)
    expected = gradients(setup.fused, tensors)

    def disturbed(t):
        y = setup.fused(t)
        torch.manual_seed(99)
        torch.rand(1000)
        return y

    assert_same(gradients(disturbed, tensors), expected)


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9, 0.9999])
def test_probabilities(p):
    """p is rounded to k/65536, the scale is that of the rounded p, and saved elements are scaled in x's dtype."""
    threshold, scale = state.threshold_scale(p)
    x = torch.randn(33, 70, requires_grad=True)
    torch.manual_seed(SEED)
    y = ckptkern.dropout(x, p)
    mask = expected_mask(p, 33, 70)
    assert torch.equal(y, torch.where(mask, x * scale, 0))
    assert abs(mask.double().mean() - (1 - threshold / 65536)) < 5 * (p * (1 - p) / mask.numel()) ** 0.5 + 1e-9


def test_all_and_nothing():
    x = torch.randn(5, 6, requires_grad=True)
    for mode in MODES:
        w = torch.randn(6, 6)
        y = ckptkern.mlp(x, w, None, w, torch.ones(6), dropout_p=1.0, recompute=mode)
        assert torch.equal(y, torch.ones(5, 6))
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros(5, 6))
    y = ckptkern.dropout(x, 1.0)
    assert torch.equal(y, torch.zeros(5, 6))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros(5, 6))
    assert ckptkern.dropout(x, 0.0) is x
    assert ckptkern.dropout(x, 0.9, training=False) is x


@pytest.mark.parametrize("setup", setups(("gelu",), ("full",), dropout=(P,), ops=("mlp", "gated_mlp")))
def test_evaluation_drops_nothing(setup):
    tensors = make(setup)
    before = torch.get_rng_state()
    y = setup.op.call(tensors, dropout_p=P, training=False, activation="gelu")
    assert torch.equal(y, setup.with_(dropout_p=0.0).call(tensors))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rounds_once(dtype):
    """An element is multiplied by the scale and rounded to the dtype once, and so is the gradient."""
    x = torch.randn(50, 20, dtype=torch.float64).to(dtype).requires_grad_()
    mask = expected_mask(0.25, 50, 20)
    torch.manual_seed(SEED)
    y = ckptkern.dropout(x, 0.25)
    assert y.dtype == dtype
    assert torch.equal(y, torch.where(mask, x * (4 / 3), 0))
    y.backward(x.detach())
    assert torch.equal(x.grad, y)


@pytest.mark.parametrize("shape", [(0,), (7,), (3, 0), (0, 3), (1, 1), (2, 3, 4, 5)], ids=str)
def test_shapes(shape):
    x = torch.ones(shape, requires_grad=True)
    torch.manual_seed(SEED)
    y = ckptkern.dropout(x, 0.5)
    rows = torch.Size(shape[:-1]).numel()
    assert torch.equal(y, 2.0 * expected_mask(0.5, rows, shape[-1]).view(shape))
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_same_state_for_the_hidden_layer_and_for_dropout_alone():
    """An mlp's dropout is `dropout` of its hidden layer."""
    x, w1, w2 = torch.randn(9, 4), torch.randn(11, 4), torch.randn(3, 11)
    torch.manual_seed(SEED)
    fused = ckptkern.mlp(x, w1, None, w2, None, "silu", 0.3)
    torch.manual_seed(SEED)
    parts = torch.nn.functional.linear(ckptkern.dropout(torch.nn.functional.silu(x @ w1.T), 0.3), w2)
    torch.testing.assert_close(fused, parts)


def test_rows_of_every_sample_get_their_part_of_the_mask():
    """What sequence parallelism gives a rank: rows 10 r to 10 r + 10 of every sample."""
    x, rng = torch.randn(3, 20, 40), state.draw(torch.empty(0))
    y = replayed_dropout(x, rng, P)
    for first in (0, 10):
        part = x[:, first : first + 10].clone().requires_grad_()
        drop = functools.partial(replayed_dropout, rng=rng, p=P, row_base=first, row_step=20)
        assert torch.equal(drop(part), y[:, first : first + 10])
        dy = torch.randn_like(part).requires_grad_()
        (dx,) = torch.autograd.grad(drop(part), part, dy, create_graph=True)
        assert torch.equal(dx, drop(dy))
        (ddy,) = torch.autograd.grad(dx, dy, part)  # by the reference
        assert torch.equal(ddy, drop(part))
