"""Runs common tutorials' models with activation checkpoints beside the unmodified models: `python -m ckptkern examples`.

Every example is a model, an input, and the same forward pass written with regions. The run compares the bytes saved for
backward, and checks that outputs, gradients and buffers equal the unmodified run's bit for bit.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptkern import checkpoint, checkpoint_sequential, checkpointed
from ckptkern.memory import format_size, saved_tensors

EXAMPLES: dict[str, Callable[[], Example]] = {}


class Example(NamedTuple):
    model: nn.Module
    segmented: Callable[[nn.Module, Tensor], Tensor]  # (model, x) -> model(x)
    input: Tensor


def example(function: Callable[[], Example]) -> Callable[[], Example]:
    EXAMPLES[function.__name__.replace("_", "-")] = function
    return function


@example
def deep_net() -> Example:
    """Builds 24 layers of Linear, LayerNorm and ReLU, in regions of two."""
    layers = [nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU()) for _ in range(24)]
    model = nn.Sequential(*layers)
    return Example(model, lambda model, x: checkpoint_sequential(model, "every 2", x), torch.randn(256, 128))


class Block(nn.Module):
    """A library's residual block, with dropout. The decorator makes every call a region."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.fc2, self.drop = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm(x)))))

    @checkpointed
    def recomputed(self, x: Tensor) -> Tensor:
        return self.forward(x)


@example
def blocks() -> Example:
    """Builds residual blocks with dropout; each is a region, by a decorator."""

    def segmented(model: nn.Module, x: Tensor) -> Tensor:
        for block in model:
            x = block.recomputed(x)
        return x

    return Example(nn.Sequential(*(Block(64) for _ in range(8))), segmented, torch.randn(256, 64))


@example
def transformer_encoder() -> Example:
    """Builds torch's TransformerEncoder, with dropout; each layer is a region, and masks go through as keywords."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def segmented(model: nn.TransformerEncoder, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, src_key_padding_mask=None)
        return x

    return Example(model, segmented, torch.randn(4, 64, 64))


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(h)))


@example
def resnet() -> Example:
    """Builds convolutions with BatchNorm in √L segments; the running statistics are updated once."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual(16) for _ in range(8)))
    return Example(model, lambda model, x: checkpoint_sequential(model, "sqrt", x), torch.randn(4, 3, 32, 32))


def convs(inner: int, outer: int) -> nn.Sequential:
    layers = [nn.Conv2d(inner, outer, 3, padding=1), nn.SiLU(), nn.Conv2d(outer, outer, 3, padding=1), nn.SiLU()]
    return nn.Sequential(*layers)


class Up(nn.Module):
    """A decoder stage, of a small image and its encoder stage's larger one."""

    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.convs = convs(inner, outer)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convs(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1)
        self.down = nn.ModuleList(nn.Sequential(nn.AvgPool2d(2), convs(width, 2 * width)) for width in (8, 16))
        self.up = nn.ModuleList(Up(3 * width, width) for width in (16, 8))

    def forward(self, x: Tensor, run: Callable = lambda module, *args: module(*args)) -> Tensor:
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(run(down, skips[-1]))
        x = skips.pop()
        for up in self.up:
            x = run(up, x, skips.pop())
        return self.head(x)


@example
def unet() -> Example:
    """Builds a U-Net; each decoder stage takes its skip as a second argument, and recomputes the concatenation."""
    return Example(UNet(), lambda model, x: model(x, checkpoint), torch.randn(2, 3, 32, 32))


@example
def nested() -> Example:
    """Builds regions of four blocks, each block a region inside: less memory still, for one more forward pass."""

    def four(blocks: list[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x)
        return x

    def segmented(model: nn.Module, x: Tensor) -> Tensor:
        for i in range(0, len(model), 4):
            x = checkpoint(four, [*model[i : i + 4]], x)
        return x

    return Example(nn.Sequential(*(Block(64) for _ in range(16))), segmented, torch.randn(256, 64))


class Outcome(NamedTuple):
    unmodified: int  # bytes saved for backward
    segmented: int
    differ: list[str]  # what differs in any bit from the unmodified run


def run(name: str, seed: int = 0) -> Outcome:
    """Runs one step of an example, unmodified and checkpointed, from one seed and the same parameters."""
    torch.manual_seed(seed)
    model, segmented, input = EXAMPLES[name]()
    steps = []
    for copied, function in ((model, nn.Module.__call__), (copy.deepcopy(model), segmented)):
        torch.manual_seed(seed + 1)
        x = input.clone().requires_grad_()
        with saved_tensors(exclude=[*copied.parameters(), *copied.buffers()]) as saved:
            y = function(copied, x)
        y.square().mean().backward()
        tensors = {"output": y.detach(), "gradient of the input": x.grad, "random state": torch.get_rng_state()}
        tensors |= {f"gradient of {key}": p.grad for key, p in copied.named_parameters()}
        steps.append((saved.bytes, tensors | {f"buffer {key}": b for key, b in copied.named_buffers()}))
    (before, expected), (after, tensors) = steps
    return Outcome(before, after, [key for key, value in expected.items() if not torch.equal(value, tensors[key])])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m ckptkern examples``."""
    parser.description = "Run common tutorials' models with activation checkpoints beside the unmodified models."
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"example to run: {', '.join(EXAMPLES)} (default: all)"
    )


def main(args: argparse.Namespace) -> int:
    """Prints two lines per example. Returns 1 if a bit differs, 2 for an unknown name, else 0."""
    if unknown := [name for name in args.names if name not in EXAMPLES]:
        print(f"ckptkern examples: unknown {', '.join(unknown)}; choose from {', '.join(EXAMPLES)}")
        return 2
    outcomes = []
    print(f"{'example':22} {'saved, eager':>12} {'checkpointed':>12}   ")
    for name in args.names or EXAMPLES:
        outcome = run(name)
        outcomes.append(outcome)
        verdict = f"DIFFERS: {', '.join(outcome.differ)}" if outcome.differ else "same bits"
        print(f"{name:22} {format_size(outcome.unmodified):>12} {format_size(outcome.segmented):>12}   {verdict}")
        print(f"  {EXAMPLES[name].__doc__ or ''}")
    return int(any(outcome.differ for outcome in outcomes))
