"""transformer_layer with a mode for each sublayer: other bytes, the same results."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import ckptkern
from ckptkern.memory import saved_tensors

MODES = ("none", "selective", "full")
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
    """(output and gradients, saved bytes)."""
    torch.manual_seed(1)
    with saved_tensors([*layer.parameters(), *memory]) as saved:
        y = layer(x, *memory)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *memory, *layer.parameters()])], saved.bytes


@pytest.mark.parametrize("name", LAYERS)
def test_a_mode_for_each_half(name: str) -> None:
    layer, memory = LAYERS[name]()
    x = torch.randn(B, S, D, requires_grad=True)
    found = {}
    for mode in (*MODES, *itertools.product(MODES, MODES)):
        layer.recompute = mode
        found[mode] = run(layer, x, memory)
        torch.testing.assert_close(found[mode][0], found["none"][0], rtol=1e-4, atol=1e-5)
    bytes_ = {mode: saved for mode, (_, saved) in found.items()}
    between = 0 if name == "parallel" else 2 * ROW if name == "decoder" else ROW  # what each sublayer is given
    small = 64 * 5  # states of dropout
    assert bytes_["full", "full"] == pytest.approx(bytes_["full"] + between, abs=small)
    assert bytes_["selective", "full"] == pytest.approx(bytes_["selective"] + between, abs=small)
    row, branches = B * S * 48 * 4, 2 if name == "llama" else 1  # of the hidden layer: g and u, or z
    relu = name in ("encoder", "decoder")  # h alone is saved, in both modes
    for attention in MODES:
        least = bytes_[attention, "full"]
        assert bytes_[attention, "none"] == least + row * (1 if relu else branches + 1)
        assert bytes_[attention, "selective"] == least + row * branches
    assert bytes_["none", "full"] + row * (1 if relu else branches + 1) == pytest.approx(
        bytes_["none", "none"], abs=small
    )


def test_it_compiles() -> None:
    layer, x = ckptkern.nn.LlamaDecoderLayer(D, 4, intermediate_size=48), torch.randn(B, S, D, requires_grad=True)
    layer.recompute = ("selective", "none")
    expected, saved = run(layer, x, [])
    torch._dynamo.reset()
    found, _ = run(torch.compile(layer, backend="aot_eager", fullgraph=True), x, [])
    torch.testing.assert_close(found, expected)
    assert saved > ROW


@pytest.mark.parametrize("wrong", [("none", "some"), ("some", "none"), ("none",), ("none",) * 3, 3])
def test_a_wrong_pair(wrong: object) -> None:
    layer = ckptkern.nn.LlamaDecoderLayer(D, 4, intermediate_size=48)
    layer.recompute = wrong
    with pytest.raises(ValueError, match="recompute must be one of 'none', 'selective', 'full'"):
        layer(torch.randn(B, S, D))


@pytest.mark.parametrize("name", ["llama", "encoder", "decoder"])
@pytest.mark.parametrize("called", ["attention", "mlp"])
def test_a_pair_where_submodules_are_called(name: str, called: str) -> None:
    """One sublayer by its modules, which have a hook; the layer is an activation checkpoint then."""
    layer, memory = LAYERS[name]()
    x = torch.randn(B, S, D, requires_grad=True)
    place = {"llama": ("self_attn", "mlp")}.get(name, ("self_attn", "linear1"))[called == "mlp"]
    layer.recompute = ("selective", "none")
    expected, _ = run(layer, x, memory)
    layer.get_submodule(place).register_forward_hook(lambda *args: None)
    for pair in itertools.product(MODES, MODES):
        layer.recompute = pair
        found, saved = run(layer, x, memory)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        least = ROW + sum(one.nbytes for one in memory)
        assert saved > 2 * least if pair == ("none", "none") else saved <= least + 64 * 5, pair


@pytest.mark.parametrize("make", [
    lambda pair: ckptkern.nn.LlamaDecoderLayer(D, 4, intermediate_size=48, recompute=pair),
    lambda pair: ckptkern.nn.TransformerEncoderLayer(D, 4, 48, recompute=pair),
    lambda pair: ckptkern.nn.TransformerDecoderLayer.from_torch(nn.TransformerDecoderLayer(D, 4, 48), recompute=pair),
])  # fmt: skip
def test_constructors_take_a_pair(make) -> None:
    layer = make(("selective", "none"))
    assert layer.recompute == ("selective", "none")
    assert layer.self_attn.recompute == "selective"
    with pytest.raises(ValueError, match="recompute must be one of 'none', 'selective', 'full'"):
        make(("selective", "most"))
