"""Models of convolutions as people write them, and the blocks that gradient checkpointing takes of each."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

WIDTHS = (8, 16, 32)


def convs(inner, outer, inplace=True):
    """Two convolutions with norms, as a U-Net has at each level."""
    layers = [(nn.Conv2d(i, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace)) for i in (inner, outer)]
    return [layer for some in layers for layer in some]


class Block(nn.Module):
    """ConvNeXt's, of leaves alone."""

    def __init__(self, c):
        super().__init__()
        self.dw, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.GroupNorm(1, c)
        self.up, self.down = nn.Conv2d(c, 4 * c, 1), nn.Conv2d(4 * c, c, 1)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(self.dw(x)))))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(16) for _ in range(4)), nn.Linear(16, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Basic(nn.Module):
    """torchvision's BasicBlock: BatchNorm, a ReLU in place, a sum in place, and a shortcut."""

    def __init__(self, inner, outer, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        shortcut = [nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)]
        self.downsample = nn.Sequential(*shortcut) if inner != outer else None

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTHS[0], 3, padding=1)
        for i, (a, b) in enumerate(itertools.pairwise((WIDTHS[0], *WIDTHS))):
            setattr(self, f"layer{i}", nn.Sequential(Basic(a, b, 1 + (a != b)), Basic(b, b)))
        self.fc = nn.Linear(WIDTHS[-1], 10)

    def forward(self, x):
        x = self.layer2(self.layer1(self.layer0(self.stem(x))))
        return self.fc(x.mean((2, 3)))


class DoubleConv(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.net = nn.Sequential(*convs(inner, outer))

    def forward(self, x):
        return self.net(x)


class Up(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(inner, outer, 2, 2), DoubleConv(2 * outer, outer)

    def forward(self, x, skip):
        return self.conv(torch.cat([skip, self.up(x)], 1))


class UNet(nn.Module):
    """Its levels are attributes, and modules of classes of their own."""

    def __init__(self):
        super().__init__()
        a, b, c = WIDTHS
        self.inc, self.out = DoubleConv(3, a), nn.Conv2d(a, 2, 1)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(a, b))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(b, c))
        self.up1, self.up2 = Up(c, b), Up(b, a)

    def forward(self, x):
        a = self.inc(x)
        b = self.down1(a)
        return self.out(self.up2(self.up1(self.down2(b), b), a))


class Functional(nn.Module):
    """A U-Net whose levels are attributes, and nn.Sequential."""

    def __init__(self):
        super().__init__()
        a, b, c = WIDTHS
        self.enc1, self.enc2 = nn.Sequential(*convs(3, a, False)), nn.Sequential(*convs(a, b, False))
        self.mid, self.dec2 = nn.Sequential(*convs(b, c, False)), nn.Sequential(*convs(b + c, b, False))
        self.dec1, self.out = nn.Sequential(*convs(a + b, a, False)), nn.Conv2d(a, 1, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        x = self.mid(F.max_pool2d(b, 2))
        x = self.dec2(torch.cat([F.interpolate(x, scale_factor=2), b], 1))
        return self.out(self.dec1(torch.cat([F.interpolate(x, scale_factor=2), a], 1)))


def flat():
    """An nn.Sequential of layers."""
    layers = [layer for a, b in itertools.pairwise((3, *WIDTHS, 32)) for layer in convs(a, b, False)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Audio(nn.Module):
    """Convolutions before a transformer's layers."""

    def __init__(self):
        super().__init__()
        convolutions = [(nn.Conv1d(1 if i == 0 else 16, 16, 4, 2, 1), nn.GroupNorm(1, 16), nn.GELU()) for i in range(4)]
        self.features = nn.ModuleList(nn.Sequential(*convolution) for convolution in convolutions)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        for feature in self.features:
            x = feature(x)
        return self.encoder(x.transpose(1, 2))


def of_diffusers(name, **settings):
    diffusers = pytest.importorskip("diffusers")
    return getattr(diffusers, name)(norm_num_groups=8, **settings)


def of_transformers(name, **settings):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{name}ForImageClassification")(getattr(transformers, f"{name}Config")(**settings))


def unet():
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    return of_diffusers(
        "UNet2DConditionModel",
        sample_size=16,
        down_block_types=down,
        up_block_types=up,
        block_out_channels=(16, 32),
        cross_attention_dim=16,
        attention_head_dim=4,
    )


def vae():
    return of_diffusers(
        "AutoencoderKL",
        in_channels=4,
        out_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
    )


def diffused():
    sample = {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 9])}
    return sample | {"encoder_hidden_states": torch.randn(2, 7, 16)}


def images(channels=3):
    return {"x": torch.randn(2, channels, 32, 32)}


# name: (model, its call, the names or classes of the blocks that gradient checkpointing takes)
MODELS = {
    "listed": (Listed, lambda: images(16), ("Block",)),
    "ResNet": (ResNet, images, ("Basic",)),
    "U-Net": (UNet, images, ("inc", "down1", "down2", "Up")),
    "U-Net of nn.Sequential": (Functional, images, ("Sequential",)),
    "UNet2DConditionModel": (unet, diffused, ("ResnetBlock2D", "BasicTransformerBlock")),
    "AutoencoderKL": (vae, lambda: {"sample": torch.randn(2, 4, 16, 16)}, ("ResnetBlock2D",)),
    "ConvNeXt": (
        lambda: of_transformers("ConvNext", hidden_sizes=[8, 16, 32, 64], depths=[2, 2, 3, 2]),
        lambda: {"pixel_values": torch.randn(2, 3, 64, 64)},
        ("ConvNextLayer",),
    ),
    "transformers' ResNet": (
        lambda: of_transformers("ResNet", embedding_size=8, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2]),
        lambda: {"pixel_values": torch.randn(2, 3, 64, 64)},
        ("ResNetBottleNeckLayer",),
    ),
    "audio": (Audio, lambda: {"x": torch.randn(2, 1, 512)}, ("Sequential", "TransformerEncoderLayer")),
}  # fmt: skip
