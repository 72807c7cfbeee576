"""The MLP of a half whose layers have low-rank updates: each product, its update, then the activation by itself.

Tokens go through in the same chunks in forward and backward, so that a chunk's hidden layer is rebuilt by products of the same
shape, which have the same bits.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import eager
from ._choices import primitives
from ._gradients import BiasGrad, WeightGrad, row_bytes, token_chunks
from ._needs import needed
from ._rows import cast_parameter, row_count
from .dropout import dropout_arguments, dropped
from .low_rank import gradient_flops, lora_flops, low_rank, names_of
from .mlp import hidden_activation_kept

LAYERS = ("gate", "up", "down")
GATED = tuple(f"{layer}_{part}" for layer in LAYERS for part in ("weight", "bias"))  # the gate may be None
UPDATES = tuple(name for layer in LAYERS for name in names_of(layer))
# the op's inputs after x, by the names of a half's tensors
LowRankTensors = collections.namedtuple("LowRankTensors", (*GATED, *UPDATES, "lora_rng", "rng"))


class LowRankOptions(NamedTuple):
    activation: str
    dropout_p: float
    recompute: str
    backend: str
    precision: str
    workspace: int
    first_column: int
    lora: tuple[float, ...]
    lora_dtype: torch.dtype


INPUTS, OPTIONS = len(LowRankTensors._fields), len(LowRankOptions._fields)


class Layers:
    """The linear layers of one call, for `rows` tokens of `dtype`. cast: of a parameter, once for all chunks and products."""

    def __init__(self, t: LowRankTensors, o: LowRankOptions, rows: int, dtype: torch.dtype, cast: Callable):
        self.t, self.o, self.p, self.dtype = t, o, primitives(o.backend), dtype
        self.cast = functools.cache(lambda name: cast(getattr(t, name), dtype))
        self.dropout = dropout_arguments(t.rng, o.dropout_p, o.first_column)
        self.gated = t.gate_weight is not None
        self.first = ("gate", "up") if self.gated else ("up",)  # the layers that read x
        self.updates = {layer: low_rank(t, o, LAYERS, layer, rows, cast) for layer in LAYERS}

    def forward(self, layer: str, x: Tensor, start: int) -> Tensor:
        y = self.p.product(x, self.cast(f"{layer}_weight"), self.cast(f"{layer}_bias"))
        pair = self.updates[layer]
        return y if pair is None else pair.add(self.p, y, x, start)

    def inner_gradient(self, layer: str, dy: Tensor) -> Tensor | None:
        pair = self.updates[layer]
        return pair if pair is None else pair.inner_gradient(dy)

    def input_gradient(self, layer: str, dy: Tensor, du: Tensor | None, dx: Tensor | None, start: int) -> Tensor:
        """dx + what dy gives, in dx if there is one."""
        dx = self.p.mm(dy, self.cast(f"{layer}_weight"), out=dx, add=dx is not None)
        if du is not None:
            self.updates[layer].add_input_gradient(self.p, du, dx, start)
        return dx

    def before_activation(self, x: Tensor, start: int) -> list[Tensor]:
        """[z], or [g, u]."""
        return [self.forward(layer, x, start) for layer in self.first]

    def hidden(self, before: list[Tensor], start: int) -> Tensor:
        made = self.p.act_fwd(before[0], before[1] if self.gated else None, self.o.activation)
        return dropped(self.p, made, self.dropout, start)

    def hidden_gradients(self, dh: Tensor, before: list[Tensor], start: int) -> list[Tensor]:
        """Those of `before`."""
        dh = dropped(self.p, dh, self.dropout, start)
        if not self.gated:
            return [self.p.act_bwd(dh, before[0], self.o.activation)[0]]
        g, u = before
        return [self.p.act_bwd(dh * u, g, self.o.activation)[0], dh * self.p.act_fwd(g, None, self.o.activation)]

    def chunks(self, rows: int) -> list[tuple[int, int]]:
        hidden, features = self.t.up_weight.shape
        widest = max(features, self.t.down_weight.shape[0])
        like = self.t.up_weight.new_empty(0, dtype=self.dtype)
        # before and after the activation, both gradients, and copies that elementwise steps make
        held = (7 if self.gated else 4) * hidden + 2 * widest
        if self.o.lora_dtype.itemsize > self.dtype.itemsize:  # copies of dy and x for the updates' gradients
            held += 2 * self.o.lora_dtype.itemsize // self.dtype.itemsize * max(hidden, widest)
        return token_chunks(rows, row_bytes(like, held, hidden, hidden + widest, 3 * hidden), self.o.workspace)


class Sums:
    """The gradients of weights, biases and updates that are needed, summed over chunks."""

    def __init__(self, layers: Layers, needs: int, chunks: int):
        self.layers = layers
        wanted = [name for i, name in enumerate(LowRankTensors._fields, 1) if needed(needs, i)]
        tensors = {name: getattr(layers.t, name) for name in wanted}
        wide = layers.o.backend == "wide"
        self.totals = {
            name: BiasGrad(tensor.dtype, chunks) if name.endswith("_bias") else WeightGrad(tensor, chunks, wide=wide)
            for name, tensor in tensors.items()
        }

    def of(self, layer: str) -> set[str]:
        return {name for name in self.totals if name.startswith(layer)}

    def trains(self, layer: str) -> bool:
        """Do they have a gradient of the layer's update?"""
        return not self.totals.keys().isdisjoint(names_of(layer))

    def read(self, layer: str) -> bool:
        """Do they read the layer's input?"""
        return bool(self.of(layer) - {f"{layer}_bias"})

    def add(self, layer: str, dy: Tensor, du: Tensor | None, x: Tensor | None, start: int) -> None:
        totals, layers = self.totals, self.layers
        if f"{layer}_weight" in totals:
            totals[f"{layer}_weight"].add(dy, x)
        if f"{layer}_bias" in totals:
            total = totals[f"{layer}_bias"]
            total.add(eager.column_sum(dy, total.part))
        da, db = (totals.get(name) for name in names_of(layer))
        if da is not None or db is not None:
            layers.updates[layer].add_gradients(layers.p, dy, du, x, da, db, start)

    def results(self) -> dict[str, Tensor]:
        return {name: total.result() for name, total in self.totals.items()}


def _parts(args: tuple) -> tuple[LowRankTensors, LowRankOptions]:
    return LowRankTensors(*args[:INPUTS]), LowRankOptions(*args[-OPTIONS:])


class LowRankMLP:
    """Has the methods of the ops MLP and GatedMLP that a half calls, and keeps what they keep."""

    @staticmethod
    def kept(gated: bool, o: LowRankOptions) -> tuple[bool, ...]:
        """Which of (g, u, h), or of (z, h), are kept."""
        if not gated:
            return hidden_activation_kept(o.activation, o.recompute)
        return o.recompute != "full", o.recompute != "full", o.recompute == "none"

    @staticmethod
    def forward(x, *args, cast=cast_parameter):
        t, o = _parts(args)
        layers, made = Layers(t, o, x.shape[0], x.dtype, cast), []
        keeps = LowRankMLP.kept(layers.gated, o)
        for start, stop in layers.chunks(x.shape[0]):
            before = layers.before_activation(x[start:stop], start)
            h = layers.hidden(before, start)
            y = layers.forward("down", h, start)
            if keeps[-1] and h is before[0]:
                h = h.clone()  # results of an op may not share memory
            made.append([y, *(one if keep else None for one, keep in zip((*before, h), keeps, strict=True))])
        return tuple(one[0] if len(one) == 1 or one[0] is None else torch.cat(one) for one in zip(*made, strict=True))

    @staticmethod
    def forward_fake(x, *args):
        t, o = _parts(args)
        gated = t.gate_weight is not None
        hidden = (x.shape[0], t.up_weight.shape[0])
        kept = (x.new_empty(hidden if keep else 0) for keep in LowRankMLP.kept(gated, o))
        return x.new_empty((x.shape[0], t.down_weight.shape[0])), *kept

    @staticmethod
    def backward(dy, x, *args, cast=cast_parameter):
        needs, (t, o), kept = args[-1], _parts(args[:-1]), args[INPUTS : -1 - OPTIONS]
        layers, dx = Layers(t, o, x.shape[0], x.dtype, cast), None
        chunks = layers.chunks(x.shape[0])
        sums = Sums(layers, needs, len(chunks))
        need_dx = needed(needs, 0)
        behind = need_dx or any(map(sums.of, layers.first))
        dx = torch.empty_like(x) if need_dx and len(chunks) > 1 else None

        def add(start: int, stop: int) -> None:
            nonlocal dx
            x_rows, dy_rows = x[start:stop], dy[start:stop]
            *before, h = (None if one is None else one[start:stop] for one in kept)
            if before[0] is None and h is None and (behind or sums.read("down")):
                before = layers.before_activation(x_rows, start)
            if h is None and sums.read("down"):
                h = layers.hidden(before, start)
            if before[0] is None:
                before[0] = h  # of a relu, whose sign tells the same
            du = layers.inner_gradient("down", dy_rows) if behind or sums.trains("down") else None
            sums.add("down", dy_rows, du, h, start)
            h = None
            if not behind:
                return
            dh = layers.input_gradient("down", dy_rows, du, None, start)
            gradients = layers.hidden_gradients(dh, before, start)
            before = dh = dx_rows = None
            for layer, d in zip(layers.first, gradients, strict=True):
                du = layers.inner_gradient(layer, d) if need_dx or sums.trains(layer) else None
                sums.add(layer, d, du, x_rows, start)
                if need_dx:
                    dx_rows = layers.input_gradient(layer, d, du, dx_rows, start)
            if need_dx and dx is None:
                dx = dx_rows
            elif need_dx:
                dx[start:stop] = dx_rows

        for start, stop in chunks if behind or sums.of("down") else ():
            add(start, stop)
        grads = sums.results()
        return dx, *(grads.get(name) for name in LowRankTensors._fields)

    @staticmethod
    def composite(x, *args):
        t, o = _parts(args)

        def linear(layer: str, rows: Tensor) -> Tensor:
            w, b = (cast_parameter(getattr(t, f"{layer}_{part}"), x.dtype) for part in ("weight", "bias"))
            pair = low_rank(t, o, LAYERS, layer, row_count(x))
            y = F.linear(rows, w, b)
            return y if pair is None else y + pair.composite(rows)

        h = eager.act(linear("up" if t.gate_weight is None else "gate", x), o.activation)
        h = h if t.gate_weight is None else h * linear("up", x)
        return linear("down", eager.composite_dropout(h, dropout_arguments(t.rng, o.dropout_p, o.first_column)))

    @staticmethod
    def backward_flops(dy, x, *args):
        needs, (t, o), kept = args[-1], _parts(args[:-1]), args[INPUTS : -1 - OPTIONS]
        rows = row_count(dy)
        need = {name for i, name in enumerate(("x", *LowRankTensors._fields)) if needed(needs, i)}
        first = ("up",) if t.gate_weight is None else ("gate", "up")
        behind = bool(need - {name for name in need if name.startswith("down")})
        reads_h = bool({name for name in need if name.startswith("down")} - {"down_bias"})
        flops = 0
        for layer in (*first, "down"):
            weight, pair = getattr(t, f"{layer}_weight"), low_rank(t, o, LAYERS, layer, rows)
            product, (need_a, need_b) = 2 * rows * weight.numel(), (name in need for name in names_of(layer))
            reads = behind if layer == "down" else "x" in need
            flops += (reads + (f"{layer}_weight" in need)) * product + gradient_flops(rows, pair, reads, need_a, need_b)
            if layer != "down" and all(one is None for one in kept) and (behind or reads_h):
                flops += product + lora_flops(rows, pair, 1, 1)
        return flops
