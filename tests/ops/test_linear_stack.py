"""linear_stack: the checks that it has besides those of all ops."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.cases import ACTIVATIONS, MODES, SEED, check_exactness, gradients

import ckptkern


def stack(widths: list[int], dtype: torch.dtype = torch.float32) -> dict:
    generator = torch.Generator().manual_seed(SEED)
    tensors = {"x": torch.randn(13, widths[0], generator=generator)}
    for i, (k, n) in enumerate(itertools.pairwise(widths)):
        tensors[f"w{i}"] = torch.randn(n, k, generator=generator) * (2 / k) ** 0.5
        tensors[f"b{i}"] = torch.randn(n, generator=generator)
    return {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}


def layers_of(t: dict) -> tuple[list, list]:
    depth = len(t) // 2
    return [t[f"w{i}"] for i in range(depth)], [t[f"b{i}"] for i in range(depth)]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("widths", [[5, 6], [5, 6, 7], [9, 1, 9, 2], [8] * 5, [70, 65, 3, 66, 64]], ids=str)
def test_depths_and_widths(widths, activation, mode, dtype):
    """One layer, two, and more, narrow and wide, growing and shrinking."""
    tensors = stack(widths, dtype)

    def fused(t):
        return ckptkern.linear_stack(t["x"], *layers_of(t), activation, recompute=mode)

    def unfused(t):
        h = t["x"]
        for w, b in zip(*layers_of(t), strict=True):
            h = ACTIVATIONS[activation](F.linear(h, w, b))
        return h

    check_exactness(fused, unfused, tensors)


def test_one_layer_is_a_linear_act():
    tensors = stack([5, 6])
    for mode in MODES:
        one = gradients(lambda t, mode=mode: ckptkern.linear_stack(t["x"], *layers_of(t), recompute=mode), tensors)
        act = gradients(lambda t: ckptkern.linear_act(t["x"], t["w0"], t["b0"]), tensors)
        for name in one:
            assert torch.equal(one[name], act[name]), (mode, name)


def test_containers():
    """Weights and biases may be lists, tuples, ParameterLists or generators."""
    tensors = stack([5, 6, 7])
    weights, biases = layers_of(tensors)
    expected = ckptkern.linear_stack(tensors["x"], weights, biases)
    for kind in (tuple, iter, torch.nn.ParameterList):
        assert torch.equal(ckptkern.linear_stack(tensors["x"], kind(weights), kind(biases)), expected)


def test_wrong_numbers_of_layers():
    tensors = stack([5, 6, 7])
    x, (weights, biases) = tensors["x"], layers_of(tensors)
    with pytest.raises(ValueError, match="linear_stack: at least one weight is needed"):
        ckptkern.linear_stack(x, [])
    with pytest.raises(ValueError, match="linear_stack: 2 weights need as many biases, but got 1"):
        ckptkern.linear_stack(x, weights, biases[:1])
    with pytest.raises(ValueError, match="linear_stack: either every layer has a bias or none has"):
        ckptkern.linear_stack(x, weights, [biases[0], None])
    with pytest.raises(ValueError, match=r"weights\[0\]'s output has 6 features but weights\[1\] has in_features=5"):
        ckptkern.linear_stack(x, [weights[0], weights[0]])
    with pytest.raises(ValueError, match=r"linear_stack: weights\[0\] must be \[out_features, in_features\]"):
        ckptkern.linear_stack(x, [biases[0]])


def test_no_biases():
    tensors = stack([5, 6, 7])
    weights, _ = layers_of(tensors)
    expected = ckptkern.linear_stack(tensors["x"], weights)
    assert torch.equal(ckptkern.linear_stack(tensors["x"], weights, [None, None]), expected)
    assert torch.equal(expected, F.linear(F.linear(tensors["x"], weights[0]).relu(), weights[1]).relu())
