"""A small network in ckptkern's regions, trained by several ranks and, for comparison, by one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from support.architectures import GPT, HEADS, HIDDEN, WIDTH, Bert, Stack, ids
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern

KINDS = ("converted", "modules", "segments")
STEPS = 3


class Segment(nn.Module):
    """A layer, as an activation checkpoint or as it is."""

    def __init__(self, layer: nn.Module, recomputed: bool):
        super().__init__()
        self.layer, self.recomputed = layer, recomputed

    def forward(self, x: Tensor) -> Tensor:
        return ckptkern.checkpoint(self.layer, x) if self.recomputed else self.layer(x)


class Tiled(nn.Module):
    """A feed-forward layer in chunks of rows, or as it is."""

    def __init__(self, chunks: int | None):
        super().__init__()
        self.mlp, self.chunks = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)), chunks

    def forward(self, x: Tensor) -> Tensor:
        return x + (ckptkern.tiled(self.mlp, x, self.chunks) if self.chunks else self.mlp(x))


class Network(Stack):
    """An embedding, two layers and a head that has the embedding's weight."""

    def forward(self, ids: Tensor, skip: int | None = None) -> Tensor:
        """skip: the number of a layer that is not called."""
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            if i != skip:
                x = layer(x)
                x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


def layer_of(kind: str, p: float, ours: bool) -> nn.Module:
    drop_in = ckptkern.nn.TransformerEncoderLayer if ours else nn.TransformerEncoderLayer
    return {
        "converted": lambda: GPT(p),
        "modules": lambda: drop_in(WIDTH, HEADS, HIDDEN, p, batch_first=True),
        "segments": lambda: Segment(Bert(p), ours),
        "tiled": lambda: Tiled(5 if ours else None),
    }[kind]()


def build(kind: str, p: float = 0.0, ours: bool = True, device: str = "cpu") -> Network:
    """ours: with ckptkern's regions, or as it was before."""
    torch.manual_seed(0)
    network = Network(lambda: layer_of(kind, p, ours)).to(device)
    if kind == "converted" and ours:
        convert(network)
    if kind == "modules" and ours:
        network.load_state_dict(build(kind, p, ours=False).state_dict())
    return network


def convert(network: nn.Module) -> None:
    conversion = ckptkern.convert(network, ids().to(network.head.weight.device))
    assert [row.replaced_by for row in conversion.converted] == 2 * ["transformer_layer"], conversion


def reference(kind: str, p: float) -> Network:
    """What one process trains: ckptkern's masks are not torch's, otherwise the plain network."""
    return build(kind, p, ours=kind not in ("segments", "tiled") and p > 0)


class Cast(nn.Module):
    """What MixedPrecisionPolicy(bfloat16, float32) computes: a bfloat16 copy runs, and its gradients are added in float32."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor) -> Tensor:
        low = copy.deepcopy(self.network).bfloat16()
        low.zero_grad()
        for p, wide in zip(low.parameters(), self.network.parameters(), strict=True):

            def hand_on(p: Tensor, wide: Tensor = wide) -> None:
                wide.grad = p.grad.float() if wide.grad is None else wide.grad + p.grad.float()

            p.register_post_accumulate_grad_hook(hand_on)
        return low(ids)


# -- training


def loss_of(network: nn.Module, step: int, micro: int, rank: int, skips: bool = False) -> Tensor:
    """skips: whether in some steps some ranks leave out a layer."""
    torch.manual_seed(1000 + 100 * step + 10 * micro + rank)  # of the masks
    tokens = ids(100 * step + 10 * micro + rank).to(next(network.parameters()).device)
    logits = network(tokens, **({"skip": step} if skips and (step == 1 or rank == 0) else {}))
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


Step = tuple[dict[tuple[int, int], float], list[Tensor | None]]  # losses by micro-batch and rank, and gradients


def steps(
    network: nn.Module,
    ranks: Sequence[int],
    micros: int = 1,
    skips: bool = False,
    accumulating: Callable[[bool], AbstractContextManager] = lambda last: contextlib.nullcontext(),
) -> Iterator[Step]:
    """Trains on the average of these ranks' losses, each with its rank's masks.

    accumulating: makes the context of a micro-batch, given whether it is the step's last.
    """
    optimizer = optimizer_of(network)
    for step in range(STEPS):
        losses = {}
        for micro in range(micros):
            with accumulating(micro == micros - 1):
                for rank in ranks:
                    loss = loss_of(network, step, micro, rank, skips)
                    losses[micro, rank] = loss.item()
                    (loss / len(ranks)).backward()
        yield losses, [p.grad if p.grad is None else whole(p.grad).clone() for p in network.parameters()]
        optimizer.step()
        optimizer.zero_grad()


def alone(network: nn.Module, size: int, *options, **more) -> Iterator[Step]:
    """The steps of one process that computes all ranks' losses."""
    return steps(network, range(size), *options, **more)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check(
    network: nn.Module, expected: Iterator[Step], rank: int, *options, rtol: float = 1e-5, atol: float = 1e-5, **more
) -> None:
    """Trains as `alone` did, with the options of `steps`: losses, gradients and, through the steps, parameters are the same."""
    for (losses, grads), (of_all, wanted) in zip(steps(network, [rank], *options, **more), expected, strict=True):
        torch.testing.assert_close(losses, {place: of_all[place] for place in losses}, rtol=rtol, atol=atol)
        for mine, theirs in zip(grads, wanted, strict=True):
            if mine is None or theirs is None:
                assert not any(tensor is not None and tensor.any() for tensor in (mine, theirs)), (mine, theirs)
            else:
                torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
