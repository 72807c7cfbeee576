"""transformer_layer with a level for each half: other bytes, the same results."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import ckptkern
from ckptkern.memory import kept_tensors

LEVELS = ("none", "selective", "full")
B, S, D = 2, 6, 32
ROW = B * S * D * 4  # bytes of x


def parallel_layer(recompute) -> tuple[nn.Module, list]:
    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
            self.up, self.down = nn.Linear(D, 48), nn.Linear(48, D)
            self.recompute = recompute

        def forward(self, x: Tensor) -> Tensor:
            attention = {
                "qkv_weight": self.qkv.weight, "qkv_bias": self.qkv.bias, "out_weight": self.out.weight,
                "out_bias": self.out.bias, "num_heads": 4, "dropout_p": 0.1,
            }  # fmt: skip
            mlp = {
                "up_weight": self.up.weight, "up_bias": self.up.bias, "down_weight": self.down.weight,
                "down_bias": self.down.bias, "activation": "gelu",
            }  # fmt: skip
            return ckptkern.transformer_layer(x, attention, mlp, parallel=True, recompute=self.recompute)

    return Parallel(), []


LAYERS = {
    "llama": lambda: (ckptkern.nn.LlamaDecoderLayer(D, 4, intermediate_size=48, resid_dropout=0.1), []),
    "encoder": lambda: (ckptkern.nn.TransformerEncoderLayer(D, 4, 48, 0.1, batch_first=True), []),
    "decoder": lambda: (
        ckptkern.nn.TransformerDecoderLayer(D, 4, 48, 0.1, batch_first=True), [torch.randn(B, 3, D, requires_grad=True)]
    ),
    "parallel": lambda: parallel_layer("full"),
}  # fmt: skip


def run(layer: nn.Module, x: Tensor, memory: list[Tensor]) -> tuple[list[Tensor], int]:
    """(output and gradients, kept bytes)."""
    torch.manual_seed(1)
    with kept_tensors([*layer.parameters(), *memory]) as kept:
        y = layer(x, *memory)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *memory, *layer.parameters()])], kept.bytes


@pytest.mark.parametrize("name", LAYERS)
def test_a_level_for_each_half(name: str) -> None:
    layer, memory = LAYERS[name]()
    x = torch.randn(B, S, D, requires_grad=True)
    found = {}
    for level in (*LEVELS, *itertools.product(LEVELS, LEVELS)):
        layer.recompute = level
        found[level] = run(layer, x, memory)
        torch.testing.assert_close(found[level][0], found["none"][0], rtol=1e-4, atol=1e-5)
    bytes_ = {level: kept for level, (_, kept) in found.items()}
    between = 0 if name == "parallel" else 2 * ROW if name == "decoder" else ROW  # what each half is given
    small = 64 * 5  # states of dropout
    assert bytes_["full", "full"] == pytest.approx(bytes_["full"] + between, abs=small)
    assert bytes_["selective", "full"] == pytest.approx(bytes_["selective"] + between, abs=small)
    for attention in LEVELS:
        assert bytes_[attention, "selective"] == bytes_[attention, "full"]
    hidden = bytes_["full", "none"] - bytes_["full", "full"]
    assert hidden >= B * S * 48 * 4, "what the MLP keeps"
    assert bytes_["none", "full"] + hidden == pytest.approx(bytes_["none", "none"], abs=small)


def test_it_compiles() -> None:
    layer, x = ckptkern.nn.LlamaDecoderLayer(D, 4, intermediate_size=48), torch.randn(B, S, D, requires_grad=True)
    layer.recompute = ("selective", "none")
    expected, kept = run(layer, x, [])
    torch._dynamo.reset()
    found, _ = run(torch.compile(layer, backend="aot_eager", fullgraph=True), x, [])
    torch.testing.assert_close(found, expected)
    assert kept > ROW


@pytest.mark.parametrize("wrong", [("none", "some"), ("some", "none"), ("none",), ("none",) * 3, 3])
def test_a_wrong_pair(wrong: object) -> None:
    layer = ckptkern.nn.LlamaDecoderLayer(D, 4, intermediate_size=48)
    layer.recompute = wrong
    with pytest.raises(ValueError, match="recompute must be one of 'none', 'selective', 'full'"):
        layer(torch.randn(B, S, D))
