"""What linear_cross_entropy and selected_log_probs return of each token beside its loss, against float64 logits."""

import math

import pytest
import torch
import torch.nn.functional as F
from ops.test_cross_entropy import IGNORED, ours
from support import oracles
from support.cases import clone, each_backend, gradients

import ckptkern


@each_backend
def test_the_first_of_equal_logits_is_the_arg_max(backend):
    """In a slice of columns, and of slices; and the only one that is not -inf."""
    t = {"x": torch.randn(3, 4), "weight": torch.zeros(300, 4), "bias": torch.zeros(300)}
    t["bias"][[40, 45, 250]] = 2.0
    target = torch.tensor([40, 45, IGNORED])
    with ckptkern.backend(backend):
        outputs, mean = (ours(target, return_accuracy=True, reduction=reduction)(t) for reduction in ("none", "mean"))
        t["bias"][:290] = -torch.inf
        t["bias"][295] = 1.0
        last = ours(target.clamp_min(295), return_accuracy=True)(t)
    assert outputs.arg_max.tolist() == [40, 40, 0]
    assert outputs.accuracy.tolist() == [1, 0, 0]
    assert mean.accuracy == 0.5  # of the two that count
    assert last.arg_max.tolist() == [295] * 3
    assert last.accuracy == 1


def selected(tokens, function=ckptkern.selected_log_probs, **options):
    return lambda t: function(t["x"], t["weight"], tokens, bias=t["bias"], **options)


@each_backend
@pytest.mark.parametrize("mode", ["none", "full"])
def test_entropy_of_certain_even_and_masked_tokens(mode, backend):
    """0 and log V to the last digits, though logits are large; classes of -inf have no share and no gradient."""
    V, d = 300, 4
    t = {"x": torch.zeros(3, d), "weight": torch.zeros(V, d), "bias": torch.full((V,), 1000.0)}
    t["x"][1, 0], t["weight"][7, 0], t["bias"][100:] = 200.0, 1.0, -torch.inf
    t = {name: tensor.requires_grad_() for name, tensor in t.items()}
    tokens = torch.tensor([5, 7, IGNORED])
    with ckptkern.backend(backend):
        grads = gradients(lambda t: selected(tokens, return_entropy=True, recompute=mode)(t).entropy, t, torch.ones(3))
    torch.testing.assert_close(grads.pop("y"), torch.tensor([math.log(100), 0.0, 0.0]), rtol=1e-4, atol=1e-30)
    assert all(grad.abs().max() < 1e-4 for grad in grads.values())


@each_backend
@pytest.mark.parametrize(("mode", "updated"), [("none", False), ("full", False), ("full", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_certain_candidate(dtype, mode, updated, backend):
    """p - 1 is rounded once: with p of 0.998 it is lost where p is rounded before."""
    x = torch.eye(8, 16).to(dtype) * 4
    t = {"x": x, "weight": F.pad(x * 0.75, (0, 0, 0, 292)), "bias": torch.zeros(300, dtype=dtype)}
    t = {name: tensor.requires_grad_() for name, tensor in t.items()}
    lora = ckptkern.LoRA(x.new_zeros(4, 16), x.new_zeros(300, 4)) if updated else None

    def total(**options):
        return lambda t: selected(torch.arange(8)[:, None], **options)(t).sum()

    exact = gradients(total(function=oracles.selected_log_probs), clone(t, torch.float64))
    with ckptkern.backend(backend):
        actual = gradients(total(recompute=mode, workspace=1, lora=lora), t)
    for name in t:
        assert (actual[name].double() - exact[name]).norm() < 0.01 * exact[name].norm(), name
