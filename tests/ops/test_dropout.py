"""Dropout, alone and in the ops: the mask is the state's, backward's is forward's, the generator is torch's."""

import functools

import pytest
import torch
from support.cases import MODES, SEED, expected_mask
from support.catalog import Sizes
from support.properties import OF_OPS, call_of

import ckptkern
from ckptkern import state
from ckptkern.ops.sublayer.dropout import replayed_dropout

# Every probability of every op, alone, in every mode.
DROPPED = [
    call_of(name, option, mode=mode, sizes=Sizes((32, 3)))
    for name, entry in OF_OPS.items()
    for option in entry.every_option()
    if option in ("p", "dropout_p", "resid_dropout_p", "drop_path_p")
    for mode in range(len(entry.modes) or 1)
]


@pytest.mark.parametrize("call", DROPPED, ids=str)
def test_draws(call):
    """Forward draws 16 bytes, backward nothing. Seeds reproduce, and differ. What is seeded in between changes nothing."""
    leaves = call.make()

    def step(seed, between):
        """The result and gradients, and the generator's state after forward."""
        torch.manual_seed(seed)
        y = call.unseeded(leaves)
        drawn = torch.get_rng_state()
        torch.manual_seed(between)
        before = torch.get_rng_state()
        grads = torch.autograd.grad(y.sum(), list(leaves.values()))
        assert torch.equal(torch.get_rng_state(), before), "backward draws"
        return [y, *grads], drawn

    torch.manual_seed(SEED)
    torch.randint(-(2**63), 2**63 - 1, (2,))
    expected = torch.get_rng_state()
    results, drawn = step(SEED, SEED)
    assert torch.equal(drawn, expected), "forward draws something else than 16 bytes"
    for other in (SEED, SEED + 1, SEED + 2**16):  # the last one would be the first if a seed were cut to 16 bits
        same = all(map(torch.equal, results, step(other, 99)[0]))
        assert same == (other == SEED), f"seeds {SEED} and {other} give {'one mask' if same else 'two masks'}"


SHAPES = (0,), (7,), (3, 0), (0, 3), (1, 1), (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("p", "shape"), [*((p, (33, 70)) for p in (1e-3, 0.1, 0.9, 0.9999)), *((0.5, shape) for shape in SHAPES)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_probabilities(dtype, p, shape):
    """p is rounded to k/65536 and the scale is that of the rounded p. An element is multiplied by it and rounded to the dtype
    once, and so is the gradient."""
    threshold, scale = state.threshold_scale(p)
    x = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
    torch.manual_seed(SEED)
    y = ckptkern.dropout(x, p)
    mask = expected_mask(p, torch.Size(shape[:-1]).numel(), shape[-1]).view(shape)
    assert torch.equal(y, torch.where(mask, x * scale, 0))
    y.backward(x.detach())
    assert torch.equal(x.grad, y)
    if mask.numel() > 1000:
        assert abs(mask.double().mean() - (1 - threshold / 65536)) < 5 * (p * (1 - p) / mask.numel()) ** 0.5 + 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_all_and_nothing(mode):
    """Nothing is drawn where nothing is dropped."""
    x, w, before = torch.randn(5, 6, requires_grad=True), torch.randn(6, 6), torch.get_rng_state()
    mlp = functools.partial(ckptkern.mlp, x, w, None, w, None, recompute=mode)
    assert ckptkern.dropout(x, 0.0) is ckptkern.dropout(x, 0.9, training=False) is x
    assert torch.equal(mlp(dropout_p=0.5, training=False), mlp())
    assert torch.equal(torch.get_rng_state(), before)
    for y in (mlp(dropout_p=1.0), ckptkern.dropout(x, 1.0)):
        assert not y.any()
        assert not torch.autograd.grad(y.sum(), x)[0].any()


def test_rows_of_every_sample_get_their_part_of_the_mask():
    """What sequence parallelism gives a rank: rows 10 r to 10 r + 10 of every sample."""
    x, rng = torch.randn(3, 20, 40), state.draw(torch.empty(0))
    y = replayed_dropout(x, rng, 0.3)
    for first in (0, 10):
        part = x[:, first : first + 10].clone().requires_grad_()
        drop = functools.partial(replayed_dropout, rng=rng, p=0.3, row_base=first, row_step=20)
        assert torch.equal(drop(part), y[:, first : first + 10])
        dy = torch.randn_like(part).requires_grad_()
        (dx,) = torch.autograd.grad(drop(part), part, dy, create_graph=True)
        assert torch.equal(dx, drop(dy))
        (ddy,) = torch.autograd.grad(dx, dy, part)  # by the reference
        assert torch.equal(ddy, drop(part))
