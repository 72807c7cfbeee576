"""The MLP that `mlp`, `gated_mlp` and the MLP sublayer of a layer share: forward, backward and reference implementation.

    h = dropout(act(x up^T + b))            y = h down^T + b
    h = dropout(act(x gate^T + b) * (x up^T + b))                         gated

A layer may have a low-rank update (`low_rank`). Then no kernel forms several steps at once, and tokens go through in the same
chunks in forward and backward, so that a chunk's hidden layer is recomputed by matmuls of the same shape, which have the same
bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ..dispatch.choices import primitives
from ..registration.gradients import BiasGrad, WeightGrad, row_bytes, token_chunks
from ..registration.rows import cast_parameter, row_count
from ..sublayer.dropout import apply_dropout, dropout_arguments
from ..sublayer.lora import low_rank, names_of

LAYERS = ("gate", "up", "down")
BIASES = frozenset(("gate_bias", "up_bias"))
WEIGHT, BIAS = ({layer: f"{layer}_{part}" for layer in LAYERS} for part in ("weight", "bias"))
OF_DOWN = frozenset(("down_weight", "down_bias", *names_of("down")))  # gradients that nothing behind h is read for
READ_H = OF_DOWN - {"down_bias"}
NOT_SUMMED = frozenset(("x", "down_bias"))  # over chunks


class BranchOptions(NamedTuple):
    """first_column: of the hidden layer, where it is a shard."""

    activation: str
    dropout_p: float
    recompute: str
    backend: str
    precision: str
    workspace: int
    first_column: int

    lora = ()


def saves(gated: bool, o: Any) -> tuple[str, ...]:
    """What forward saves besides its tensors: of what the activation reads (z, or g and u) and gives (h)."""
    if o.recompute == "full":
        return ()
    if not gated and o.activation == "relu":  # h gives both the weight's gradient and the mask
        return ("h",)
    before = ("g", "u") if gated else ("z",)
    return (*before, "h") if o.recompute == "none" else before


class MLPBranch:
    """One call. t: gate_weight (None: not gated), up_weight, down_weight, their biases, rng and what `low_rank` reads, by name;
    o: BranchOptions' fields and what `low_rank` reads. cast: of a parameter, once for all chunks and matmuls."""

    def __init__(self, t: Any, o: Any, rows: int, dtype: torch.dtype, cast: Callable = cast_parameter):
        self.t, self.o, self.p, self.dtype, self.cast = t, o, primitives(o.backend), dtype, cast
        self.copies: dict[str, Tensor] = {}  # of weights, and all that `inner` gives
        self.read_x: tuple[Tensor | None, ...] = ()
        self.dropout = eager.NO_DROPOUT if t.rng is None else dropout_arguments(t.rng, o.dropout_p, o.first_column)
        self.gated = t.gate_weight is not None
        self.first = LAYERS[:2] if self.gated else LAYERS[1:2]  # the layers that read x
        self.updates = {layer: low_rank(t, o, LAYERS, layer, rows, cast) for layer in LAYERS} if o.lora else {}

    def inner(self) -> tuple[Tensor | None, ...]:
        """Weight and bias of each layer that reads x, in the compute dtype."""
        if not self.read_x:
            t, cast, dtype, copies = self.t, self.cast, self.dtype, self.copies
            copies["up"] = up = cast(t.up_weight, dtype)
            self.read_x = up, cast(t.up_bias, dtype)
            if self.gated:
                copies["gate"] = gate = cast(t.gate_weight, dtype)
                self.read_x = gate, cast(t.gate_bias, dtype), *self.read_x
        return self.read_x

    def weight(self, layer: str) -> Tensor:
        """In the compute dtype."""
        weight = self.copies.get(layer)
        if weight is None:
            weight = self.copies[layer] = self.cast(getattr(self.t, WEIGHT[layer]), self.dtype)
        return weight

    # -- forward

    def linear(self, layer: str, x: Tensor, start: int) -> Tensor:
        y = self.p.linear(x, self.weight(layer), self.cast(getattr(self.t, BIAS[layer]), self.dtype))
        if not self.updates or self.updates[layer] is None:
            return y
        return self.updates[layer].add(self.p, y, x, start)

    def hidden(self, x: Tensor, start: int, save: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        """(h, [z] or [g, u], None unless `save`)."""
        o = self.o
        if self.updates:
            before = [self.linear(layer, x, start) for layer in self.first]
            return self.activated(before, start), before
        arguments = x, *self.inner(), o.activation, o.precision
        if self.gated:
            h, *before = self.p.gated_fwd(*arguments, dropout=self.dropout, row_base=start, save_gu=save)
            return h, before
        h, z, _ = self.p.linear_fwd(*arguments, dropout=self.dropout, row_base=start, save_z=save)
        return h, [z]

    def activated(self, before: list[Tensor], start: int) -> Tensor:
        """h of [z] or [g, u]."""
        h = self.p.act_fwd(before[0], before[1] if self.gated else None, self.o.activation)
        return apply_dropout(self.p, h, self.dropout, start)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(y, what `saves` names) of x [rows, d]."""
        names = saves(self.gated, self.o)
        if not self.updates or len(chunks := self.forward_chunks(x.shape[0])) == 1:
            return self.forward_rows(x, 0, names)
        made = [self.forward_rows(x[start:stop], start, names) for start, stop in chunks]
        saved = {name: torch.cat([of_chunk[name] for _, of_chunk in made]) for name in names}
        return torch.cat([y for y, _ in made]), saved

    def forward_rows(self, x: Tensor, start: int, names: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """`forward` of rows that begin at `start`."""
        h, before = self.hidden(x, start, len(names) > ("h" in names))
        y = self.linear("down", h, start)
        if not names:
            return y, {}
        if "h" in names and h is before[0]:
            h = h.clone()  # results of an op may not share memory
        return y, dict(zip(names, (h,) if names == ("h",) else (*before, h), strict=False))

    def forward_chunks(self, rows: int) -> list[tuple[int, int]]:
        """Those of backward, too, with low-rank updates."""
        hidden, features = self.t.up_weight.shape
        widest = max(features, self.t.down_weight.shape[0])
        # before and after the activation, both gradients, and copies that elementwise steps make
        held = (7 if self.gated else 4) * hidden + 2 * widest
        if self.o.lora_dtype.itemsize > self.dtype.itemsize:  # copies of dy and x for the updates' gradients
            held += 2 * self.o.lora_dtype.itemsize // self.dtype.itemsize * max(hidden, widest)
        bytes_ = row_bytes(self.dtype, self.t.up_weight.is_cuda, held, hidden, hidden + widest, 3 * hidden)
        return token_chunks(rows, bytes_, self.o.workspace)

    # -- backward

    def chunks(self, dy: Tensor) -> list[tuple[int, int]]:
        """[start, stop) of the rows that backward takes at once."""
        rows, o = dy.shape[0], self.o
        if o.workspace is None:  # before sizes that may be symbols are compared
            return [(0, rows)]
        if self.updates:
            return self.forward_chunks(rows)
        bytes_ = backward_bytes(
            *self.t.up_weight.shape, dy.shape[1], dy.dtype, dy.is_cuda, self.gated, self.t.rng is not None, o.backend,
            o.activation,
        )  # fmt: skip
        return [(0, rows)] if rows * bytes_ <= o.workspace else token_chunks(rows, bytes_, o.workspace)

    def hidden_gradients(self, dh: Tensor, before: list[Tensor], start: int) -> list[Tensor]:
        """Those of [z] or [g, u], of h's."""
        dh, activation = apply_dropout(self.p, dh, self.dropout, start), self.o.activation
        if not self.gated:
            return [self.p.act_bwd(dh, before[0], activation)[0]]
        g, u = before
        return [self.p.act_bwd(dh * u, g, activation)[0], dh * self.p.act_fwd(g, None, activation)]

    def fused_gradients(
        self, dy: Tensor, x: Tensor | None, before: list[Tensor], h: Tensor | None, start: int, sums: Sums
    ) -> tuple[list[Tensor], Tensor | None, tuple[Tensor | None, ...]]:
        """(gradients of [z] or [g, u], h if the down weight's gradient reads it, sums of those gradients' columns), in one
        kernel. before: empty if it is recomputed."""
        p, o, dropout, save_h, up = self.p, self.o, self.dropout, h is None and sums.read_h, sums.bias_part("up")
        if before:
            launcher = p.gated_act_grad if self.gated else p.act_grad
            arguments = dy, self.weight("down"), *before, o.activation, o.precision
        else:
            launcher = p.gated_bwd if self.gated else p.mlp_bwd
            arguments = x, *self.inner(), dy, self.weight("down"), o.activation, o.precision
        if self.gated:
            gate = sums.bias_part("gate")
            dg, du, made, *parts = launcher(
                *arguments, dropout=dropout, row_base=start, save_h=save_h, dbg=gate, dbu=up
            )
            return [dg, du], made if h is None else h, parts
        dz, made, part = launcher(*arguments, dropout=dropout, row_base=start, save_h=save_h, db=up)
        return [dz], made if h is None else h, (part,)

    def backward(
        self, dy: Tensor, x: Tensor | None, saved: dict[str, Tensor], need: Collection[str]
    ) -> dict[str, Tensor | None]:
        """Gradients by name, "x" among them, of what `need` names; x [rows, d] or None where it is not read."""
        chunks = self.chunks(dy)
        sums = Sums(self, need, len(chunks))
        need_dx, behind = "x" in need, not OF_DOWN.issuperset(need)
        dx = dy.new_empty((dy.shape[0], self.t.up_weight.shape[1])) if need_dx and len(chunks) > 1 else None

        def add(start: int, stop: int) -> None:
            nonlocal dx
            x_rows, dy_rows, h = x, dy, saved.get("h")
            before = [t for name, t in saved.items() if name != "h"] if saved else []
            if len(chunks) > 1:
                x_rows, dy_rows, h, *before = (t if t is None else t[start:stop] for t in (x, dy, h, *before))
            if behind and not self.updates:
                # relu's own result tells what z would
                before = [h] if not before and h is not None else before
                gradients, h, parts = self.fused_gradients(dy_rows, x_rows, before, h, start, sums)
                before = None
            else:
                if not saved and (behind or sums.read_h):
                    h, before = self.hidden(x_rows, start)
                elif h is None and sums.read_h:
                    h = self.activated(before, start)
                before = before if before and before[0] is not None else [h]
                gradients = None
            du = self.inner_gradient("down", dy_rows, behind, sums) if self.updates else None
            sums.add("down", dy_rows, du, h, start)
            h = None  # frees the largest tensor before the other gradients are formed
            if not behind:
                return
            if gradients is None:
                gradients = self.hidden_gradients(self.input_gradient("down", dy_rows, du, None, start), before, start)
                parts, before = (None,) * len(self.first), None
            dx_rows = None
            for place, layer in enumerate(self.first):
                d, part = gradients.pop(0), parts[place]
                du = self.inner_gradient(layer, d, need_dx, sums) if self.updates else None
                sums.add(layer, d, du, x_rows, start, part)
                if need_dx:
                    out = dx_rows if dx is None else dx[start:stop]
                    dx_rows = self.input_gradient(layer, d, du, out, start, add=dx_rows is not None)
            dx = dx_rows if need_dx and dx is None else dx

        if behind or sums.read_h:
            for start, stop in chunks:
                add(start, stop)
        grads = sums.results()
        if "down_bias" in need:
            grads["down_bias"] = eager.column_sum(dy, self.t.down_bias.dtype)
        if need_dx:
            grads["x"] = dx
        return grads

    def inner_gradient(self, layer: str, dy: Tensor, reads_input: bool, sums: Sums) -> Tensor | None:
        """What a low-rank update's gradients are made of, if any of them is needed."""
        update = self.updates.get(layer)
        return update.inner_gradient(dy) if update and (reads_input or sums.trains(layer)) else None

    def input_gradient(
        self, layer: str, dy: Tensor, du: Tensor | None, out: Tensor | None, start: int, *, add: bool = False
    ) -> Tensor:
        """What dy gives for the layer's input, in or added to `out`."""
        dx = self.p.mm(dy, self.weight(layer), out=out, add=add)
        if du is not None:
            self.updates[layer].add_input_gradient(self.p, du, dx, start)
        return dx


class Sums:
    """The gradients of weights, biases and updates that are needed, summed over chunks; that of down's bias apart, because it
    reads dy alone."""

    def __init__(self, branch: MLPBranch, need: Collection[str], chunks: int):
        self.branch, t = branch, branch.t
        self.totals: dict[str, WeightGrad | BiasGrad] = {}
        for name in need:
            if name not in NOT_SUMMED:
                of = getattr(t, name)
                self.totals[name] = BiasGrad(of, chunks) if name in BIASES else WeightGrad(of, chunks)
        self.read_h = not READ_H.isdisjoint(need)  # is h read?

    def trains(self, layer: str) -> bool:
        """Do they have a gradient of the layer's update?"""
        return bool(self.branch.updates) and not self.totals.keys().isdisjoint(names_of(layer))

    def bias_part(self, layer: str) -> bool | torch.dtype:
        """In which dtype a kernel sums a bias's gradient; False where it is not needed."""
        name = BIAS[layer]
        return name in self.totals and self.totals[name].part

    def add(
        self, layer: str, dy: Tensor, du: Tensor | None, x: Tensor | None, start: int, part: Tensor | None = None
    ) -> None:
        """part: the sum of dy's columns, if a kernel has formed it."""
        totals, weight, bias = self.totals, WEIGHT[layer], BIAS[layer]
        if weight in totals:
            totals[weight].add(dy, x)
        if bias in totals:
            totals[bias].add(eager.column_sum(dy, totals[bias].part) if part is None else part)
        if self.branch.updates and self.trains(layer):
            da, db = map(totals.get, names_of(layer))
            self.branch.updates[layer].add_gradients(self.branch.p, dy, du, x, da, db, start)

    def results(self) -> dict[str, Tensor | None]:
        return {name: total.result() for name, total in self.totals.items()}


@functools.cache
def backward_bytes(
    hidden: int, features: int, out: int, dtype: torch.dtype, on_gpu: bool, gated: bool, drops: bool, backend: str,
    activation: str,
) -> int:  # fmt: skip
    """Of a row's transient tensors in backward.

    They are z and dh, with dz over dh and h over z; or g, u, dg, du, h, with dg and du over dh and act(g).
    Implementations that write each result anew hold more; in the eager backend some activations do, and dropout holds
    two more and a mask.
    """
    eagerly, held = backend == "eager", 5 if gated else 2
    if eagerly:
        held += max(2 * drops, eager.ACTIVATIONS[activation].temporaries)
    if backend == "library":
        held += 1 if gated else 2
    masks = hidden if eagerly and drops else 0
    return row_bytes(dtype, on_gpu, held * hidden, masks, hidden + max(features, out), (3 if gated else 2) * hidden)


def reference(x: Tensor, t: Any, o: Any) -> Tensor:
    """The MLP of x [..., d] in differentiable PyTorch ops."""

    def linear(layer: str, rows: Tensor) -> Tensor:
        w, b = (cast_parameter(getattr(t, f"{layer}_{part}"), x.dtype) for part in ("weight", "bias"))
        update = low_rank(t, o, LAYERS, layer, row_count(x))
        y = F.linear(rows, w, b)
        return y if update is None else y + update.reference(rows)

    h = eager.act(linear("up" if t.gate_weight is None else "gate", x), o.activation)
    h = h if t.gate_weight is None else h * linear("up", x)
    return linear("down", eager.reference_dropout(h, dropout_arguments(t.rng, o.dropout_p, o.first_column)))
