"""The field's tutorials with activation checkpoints: `python -m ckptkern examples` runs each one beside the unmodified model.

Every example is a model, an input, and the same forward pass written with regions. The run compares what is saved for
backward, and checks that gradients, outputs and buffers are those of the unmodified run, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import itertools
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


# -- the models -------------------------------------------------------------------------------------------------------


@example
def deep_net() -> Example:
    """Linear, LayerNorm, ReLU, 24 times, in regions of two."""
    layers = [nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU()) for _ in range(24)]
    model = nn.Sequential(*layers)
    return Example(model, lambda model, x: checkpoint_sequential(model, "every 2", x), torch.randn(256, 128))


class Block(nn.Module):
    """A residual block of someone's library, with dropout. The decorator makes every call a region."""

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
    """Residual blocks with dropout; each one is a region, by a decorator."""

    def segmented(model: nn.Module, x: Tensor) -> Tensor:
        for block in model:
            x = block.recomputed(x)
        return x

    return Example(nn.Sequential(*(Block(64) for _ in range(8))), segmented, torch.randn(256, 64))


@example
def transformer_encoder() -> Example:
    """torch's TransformerEncoder, with dropout: each layer is a region, and masks go through as keywords."""
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
    """Convolutions with BatchNorm in √L segments: the running statistics are updated once."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual(16) for _ in range(8)))
    return Example(model, lambda model, x: checkpoint_sequential(model, "sqrt", x), torch.randn(4, 3, 32, 32))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (8, 16, 32)
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(self.convs(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(self.convs(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(widths[0], 1, 1)

    @staticmethod
    def convs(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.SiLU(), nn.Conv2d(outer, outer, 3, padding=1), nn.SiLU()
        )

    @staticmethod
    def decode(up: nn.Module, x: Tensor, skip: Tensor) -> Tensor:
        return up(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))

    def forward(self, x: Tensor, run: Callable = lambda function, *args: function(*args)) -> Tensor:
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(run(lambda x, down=down: down(F.avg_pool2d(x, 2)), skips[-1]))
        x = skips.pop()
        for up in self.up:
            x = run(self.decode, up, x, skips.pop())
        return self.head(x)


@example
def unet() -> Example:
    """A U-Net: each decoder stage takes its skip as a second argument, and the concatenation is recomputed too."""
    return Example(UNet(), lambda model, x: model(x, checkpoint), torch.randn(2, 3, 32, 32))


@example
def nested() -> Example:
    """Regions of four blocks, with each block a region inside: less memory still, for one more forward pass."""

    def four(blocks: list[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x)
        return x

    def segmented(model: nn.Module, x: Tensor) -> Tensor:
        blocks = list(model)
        for i in range(0, len(blocks), 4):
            x = checkpoint(four, blocks[i : i + 4], x)
        return x

    return Example(nn.Sequential(*(Block(64) for _ in range(16))), segmented, torch.randn(256, 64))


# -- running them -----------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    unmodified: int  # bytes saved for backward
    segmented: int
    differ: list[str]  # what differs in any bit from the unmodified run


def run(name: str, seed: int = 0) -> Outcome:
    """One step of an example, unmodified and checkpointed, from one seed and the same parameters."""
    torch.manual_seed(seed)
    model, segmented, input = EXAMPLES[name]()

    def step(model: nn.Module, function) -> tuple[int, dict[str, Tensor]]:
        torch.manual_seed(seed + 1)
        x = input.clone().requires_grad_()
        with saved_tensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
            y = function(model, x)
        y.square().mean().backward()
        found = {"output": y.detach(), "gradient of the input": x.grad, "random state": torch.get_rng_state()}
        found |= {f"gradient of {key}": p.grad for key, p in model.named_parameters()}
        return saved.bytes, found | {f"buffer {key}": b for key, b in model.named_buffers()}

    ours = copy.deepcopy(model)
    before, expected = step(model, lambda model, x: model(x))
    after, found = step(ours, segmented)
    return Outcome(before, after, [key for key, value in expected.items() if not torch.equal(value, found[key])])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Runs the tutorials' models with activation checkpoints beside the unmodified models."
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXAMPLES)}; all if none is given")


def main(args: argparse.Namespace) -> int:
    if unknown := [name for name in args.names if name not in EXAMPLES]:
        print(f"ckptkern examples: no example {', '.join(unknown)}; there are {', '.join(EXAMPLES)}")
        return 2
    wrong = 0
    print(f"{'example':22} {'saved, eager':>12} {'checkpointed':>12}   ")
    for name in args.names or EXAMPLES:
        outcome = run(name)
        verdict = f"DIFFERS: {', '.join(outcome.differ)}" if outcome.differ else "same bits"
        wrong += bool(outcome.differ)
        print(f"{name:22} {format_size(outcome.unmodified):>12} {format_size(outcome.segmented):>12}   {verdict}")
        print(f"  {(EXAMPLES[name].__doc__ or '').strip()}")
    return 1 if wrong else 0
