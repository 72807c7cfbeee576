"""The MLP shared by `mlp`, `gated_mlp` and a layer's MLP sublayer: forward, backward and reference implementation.

    h = dropout(act(x up^T + b))            y = h down^T + b
    h = dropout(act(x gate^T + b) * (x up^T + b))                         gated

Forward and backward take tokens in the same chunks, so that a chunk's hidden layer is recomputed by matmuls of the same shape,
with the same bits. A layer may have a low-rank update (`low_rank`); then no kernel fuses several steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ... import eager
from ...eager import upcasts
from ...errors import ShapeError
from ...frozen import Frozen
from ..dispatch.choices import check_weight, primitives
from ..registration.gradients import THREAD, BiasGrad, Late, WeightGrad
from ..registration.op import Grads, Named, Names, beside_frozen, cast_parameter, row_bytes, row_count
from ..sublayer.dropout import dropout_arguments
from ..sublayer.lora import low_rank, names_of, reference_linear

LAYERS = ("gate", "up", "down")
WEIGHT, BIAS = ({layer: f"{layer}_{part}" for layer in LAYERS} for part in ("weight", "bias"))
OF_DOWN = frozenset(("down_weight", "down_bias", *names_of("down")))  # gradients that do not need dh
READ_H = OF_DOWN - {"down_bias"}
# gated -> the parameters of the layers that read x, in the kernels' order
INNER = {False: ("up_weight", "up_bias"), True: ("gate_weight", "gate_bias", "up_weight", "up_bias")}


def check_branch(
    op: str,
    x: Tensor,
    t: Mapping[str, Tensor | None],
    prefix: str = "",
    hidden: str = "the hidden layer",
    *,
    needs_gate: bool = False,
) -> None:
    """Checks that the layers fit each other and x.

    t: weights and biases by name, the gate's None without a gate. prefix: put before parameters' names in messages; hidden: the
    name there of the rows that the last layer reads.
    """
    gate, up, features = t["gate_weight"], t["up_weight"], x.shape[-1]
    check_weight(op, f"{prefix}up_weight", up, t["up_bias"], x, features, "input")
    if gate is not None or needs_gate:
        check_weight(op, f"{prefix}gate_weight", gate, t["gate_bias"], x, features, "input")
        if gate.shape != up.shape:
            raise ShapeError(
                f"{op}: {prefix}gate_weight and {prefix}up_weight must have one shape, but have {tuple(gate.shape)} and "
                f"{tuple(up.shape)}"
            )
    elif t["gate_bias"] is not None:
        raise ValueError(f"{op}: {prefix}gate_bias needs {prefix}gate_weight")
    check_weight(op, f"{prefix}down_weight", t["down_weight"], t["down_bias"], x, up.shape[0], hidden)


class BranchOptions(NamedTuple):
    """Options of an MLP. gated: there is a gate_weight. first_column: of the hidden layer, where it is a shard."""

    gated: bool
    activation: str
    dropout_p: float
    recompute: str
    backend: str
    precision: str
    workspace: int
    first_column: int

    lora = ()


def saves(o) -> Names:
    """Returns the names of what forward saves: what the activation reads (z, or g and u) and returns (h)."""
    if o.recompute == "full":
        return ()
    if not o.gated and o.activation == "relu":  # h gives both the weight's gradient and the mask
        return ("h",)
    before = ("g", "u") if o.gated else ("z",)
    return (*before, "h") if o.recompute == "none" else before


class MLPBranch:
    """An MLP in one call, applied to ranges of rows.

    t: gate_weight (None: not gated), up_weight, down_weight, their biases, rng and what `low_rank` reads, by name.
    o: BranchOptions' fields and what `low_rank` reads.
    holds: whether dequantised Frozen weights are held; None asks `beside_frozen`.

    by_step: no kernel forms several matmuls at once, because of low-rank updates, or Frozen weights that are not held.
    """

    def __init__(self, t, o, rows: int, dtype: torch.dtype, holds: bool | None = None):
        if holds is None:
            o, holds = beside_frozen((t.gate_weight, t.up_weight, t.down_weight), o, dtype)
        self.holds = holds
        self.t, self.o, self.p, self.dtype = t, o, primitives(o.backend), dtype
        self.copies: Named = {}
        self.dropout = eager.NO_DROPOUT if t.rng is None else dropout_arguments(t.rng, o.dropout_p, o.first_column)
        self.gated = o.gated
        self.first = ("gate", "up") if self.gated else ("up",)  # the layers that read x
        self.inner = INNER[self.gated]
        self.updates = {layer: low_rank(t, o, LAYERS, layer, rows) for layer in LAYERS} if o.lora else {}
        self.by_step = bool(self.updates) or not holds

    def parameter(self, name: str):
        """Returns the parameter in the compute dtype, cast once for all chunks and matmuls. A Frozen parameter that is not held
        is dequantised for each caller."""
        parameter = getattr(self.t, name)
        frozen = type(parameter) is Frozen
        if parameter is None or (parameter.dtype is self.dtype and not frozen):
            return parameter
        if name in self.copies:
            return self.copies[name]
        copy = cast_parameter(parameter, self.dtype)
        if self.holds or not frozen:
            self.copies[name] = copy
        return copy

    # -- forward

    def linear(self, layer: str, x: Tensor, start: int, out: Tensor | None = None) -> Tensor:
        arguments = x, self.parameter(WEIGHT[layer]), self.parameter(BIAS[layer])
        y = self.p.linear(*arguments) if out is None else self.p.linear(*arguments, out=out)
        update = self.updates.get(layer)
        return y if update is None else update.add(self.p, y, x, start)

    def hidden(self, x: Tensor, start: int, save: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        """Computes h, and [z] or [g, u], whose members may be None unless `save`."""
        o = self.o
        if self.by_step:
            before = [self.linear(layer, x, start) for layer in self.first]
            return self.activated(before, start), before
        arguments = x, *map(self.parameter, self.inner), o.activation, o.precision
        if self.gated:
            h, *before = self.p.gated_fwd(*arguments, dropout=self.dropout, row_base=start, save_gu=save)
            return h, before
        h, z, _ = self.p.linear_fwd(*arguments, dropout=self.dropout, row_base=start, save_z=save)
        return h, [z]

    def activated(self, before: list[Tensor], start: int) -> Tensor:
        """Computes h from [z] or [g, u]."""
        h = self.p.act_fwd(before[0], before[1] if self.gated else None, self.o.activation)
        return self.p.apply_dropout(h, self.dropout, start)

    def forward_rows(self, x: Tensor, start: int, y: Tensor | None = None) -> tuple[Tensor, Named]:
        """Computes y of rows x [rows, d] that begin at `start`, in the tensor `y` if there is one; returns y and what `saves`
        names."""
        names = saves(self.o)
        h, before = self.hidden(x, start, bool(names) and names != ("h",))
        y = self.linear("down", h, start, y)
        if not names:
            return y, {}
        if "h" in names and h is before[0]:
            h = h.clone()  # results of an op may not share memory
        return y, dict(zip(names, (h,) if names == ("h",) else (*before, h), strict=False))

    def result_of(self, x: Tensor, saved: Named, start: int) -> Tensor:
        """Computes y of rows x that begin at `start`: by one matmul if what `saves` names was saved, else by all."""
        if not saved:
            return self.forward_rows(x, start)[0]
        hidden = saved["h"] if "h" in saved else self.activated(list(saved.values()), start)
        return self.linear("down", hidden, start)

    def row_bytes(self) -> int:
        """Returns the bytes of a row's transient tensors in either pass.

        They are z and dh, with dz over dh and h over z; or g, u, dg, du, h, with dg and du over dh and act(g). Implementations
        that write each result to new memory hold more, as do some activations in the eager backend; dropout there holds two
        more and a mask.
        """
        (hidden, features), out, on_gpu = self.t.up_weight.shape, self.t.down_weight.shape[0], self.t.up_weight.is_cuda
        widest, masks, beside = max(features, out), hidden, 3 * hidden
        if self.by_step:  # before and after the activation, both gradients, and copies that elementwise steps make
            held = (7 if self.gated else 4) * hidden + 2 * widest
            if (
                self.updates and self.o.lora_dtype.itemsize > self.dtype.itemsize
            ):  # copies of dy and x for their gradients
                held += 2 * self.o.lora_dtype.itemsize // self.dtype.itemsize * max(hidden, widest)
        else:
            drops, held = self.t.rng is not None, 5 if self.gated else 2
            masks, beside = 0, (3 if self.gated else 2) * hidden
            if self.o.backend == "eager":
                held += max(2 * drops, eager.ACTIVATIONS[self.o.activation].temporaries)
                masks = hidden if drops else 0
            elif self.o.backend == "library":
                # writes dz over dh, h over z; dg, du over g, u and h over dh; dropout to new memory
                held += drops - (2 if self.gated else 0)
            held *= hidden
        return row_bytes(self.dtype, on_gpu, held, masks, hidden + widest, beside)

    # -- backward

    def backward_rows(
        self, dy: Tensor, x: Tensor | None, saved: Named, start: int, sums: Sums, dx: Tensor | None = None
    ) -> Tensor | None:
        """Adds the gradients that dy [rows, e] of rows that begin at `start` gives to the sums; returns dx [rows, d], in `dx`
        if there is one. x: None where it is not read; saved: what `saves` names."""
        p, o, behind, gradients = self.p, self.o, sums.behind, None
        h, before = saved.get("h"), [t for name, t in saved.items() if name != "h"]
        if type(dy) is Late and dy.finish is not None and behind and self.gated and not saved:
            h, before = self.hidden(x, start, save=True)  # else one kernel recomputes and reads dy at once
            dy = dy.arrived()
        if (
            behind and not self.by_step
        ):  # one kernel, which returns [dz] or [dg, du], h, and sums of the gradients' columns
            if type(dy) is Late and o.backend == "triton":  # other implementations recompute first and then read dy
                dy = dy.arrived()
            if before or h is not None:  # relu's result holds the mask
                launcher = p.gated_act_grad if self.gated else p.act_grad
                read = dy, self.parameter("down_weight"), *(before or [h])
            else:
                launcher = p.gated_bwd if self.gated else p.mlp_bwd
                read = x, *map(self.parameter, self.inner), dy, self.parameter("down_weight")
            up, save_h = sums.parts["up"], h is None and sums.read_h
            wanted = dict(dbg=sums.parts["gate"], dbu=up) if self.gated else dict(db=up)
            wanted |= dict(dropout=self.dropout, row_base=start, save_h=save_h)
            results, count = launcher(*read, o.activation, o.precision, **wanted), len(self.first)
            gradients, h, parts = [*results[:count]], results.h if h is None else h, results[count + 1 :]
            before = read = results = None
        elif behind or sums.read_h:
            if not saved:
                h, before = self.hidden(x, start)
            elif h is None and sums.read_h:
                h = self.activated(before, start)
            before = before if before and before[0] is not None else [h]
        dy = dy.arrived() if type(dy) is Late else dy
        du = self.inner_gradient("down", dy, behind, sums) if self.updates else None
        sums.add("down", dy, du, h, start)
        h = None  # frees the largest tensor before the other gradients are formed
        if not behind:
            return None
        if gradients is None:  # step by step
            dh = p.mm(dy, self.parameter("down_weight"))
            if du is not None:
                self.updates["down"].add_input_gradient(p, du, dh, start)
            dh = p.apply_dropout(dh, self.dropout, start)
            gradients = [p.act_bwd(dh * before[1] if self.gated else dh, before[0], o.activation)[0]]
            if self.gated:
                gradients.append(dh * p.act_fwd(before[0], None, o.activation))
            parts, before, dh = (None, None), [], None
        for place, layer in enumerate(self.first):
            d = gradients.pop(0)
            du = self.inner_gradient(layer, d, sums.need_dx, sums) if self.updates else None
            sums.add(layer, d, du, x, start, parts[place])
            if sums.need_dx:
                dx = p.mm(d, self.parameter(WEIGHT[layer]), out=dx, add=place > 0)
                if du is not None:
                    self.updates[layer].add_input_gradient(p, du, dx, start)
        return dx

    def inner_gradient(self, layer: str, dy: Tensor, reads_input: bool, sums: Sums) -> Tensor | None:
        """Returns the gradient of the inner features of a layer's low-rank update, or None if no gradient reads it."""
        update = self.updates.get(layer)
        return update.inner_gradient(dy) if update and (reads_input or sums.trains(layer)) else None


class Sums:
    """The needed gradients of weights, biases and updates, summed over chunks.

    behind: a needed gradient reads that of h; read_h: one reads h. parts: the dtype in which a kernel sums a bias's gradient,
    by layer; False where it is not needed.
    """

    def __init__(self, branch: MLPBranch, need: Collection[str], chunks: int):
        self.branch, self.need = branch, need
        self.need_dx, self.behind, self.read_h = "x" in need, not OF_DOWN.issuperset(need), not READ_H.isdisjoint(need)
        self.once = chunks == 1 and not branch.updates  # `totals` then holds gradients
        self.totals = {}
        for name in () if self.once else need:
            if name != "x":
                of = getattr(branch.t, name)
                self.totals[name] = BiasGrad(of, chunks) if name in BIAS.values() else WeightGrad(of, chunks)
        self.parts: dict[str, bool | torch.dtype] = dict.fromkeys(LAYERS, False)
        for layer in LAYERS:
            if (bias := BIAS[layer]) in need:
                self.parts[layer] = getattr(branch.t, bias).dtype if self.once else self.totals[bias].part

    def trains(self, layer: str) -> bool:
        """Returns whether the layer's update needs a gradient."""
        return bool(self.branch.updates) and not self.need.isdisjoint(names_of(layer))

    def add(
        self, layer: str, dy: Tensor, du: Tensor | None, x: Tensor | None, start: int, part: Tensor | None = None
    ) -> None:
        """Adds a layer's gradients from dy and x. part: the sum of dy's columns, if a kernel has formed it."""
        totals, name, bias = self.totals, WEIGHT[layer], BIAS[layer]
        if bias in self.need and part is None:
            part = eager.column_sum(dy, self.parts[layer])
        if self.once:
            if name in self.need:
                weight = getattr(self.branch.t, name)
                plain = dy.dtype is weight.dtype and THREAD.stash is None and not hasattr(weight, "main_grad")
                if plain and not (dy.is_cpu and upcasts(dy.dtype)):
                    totals[name] = torch.mm(dy.t(), x)
                else:
                    grad = WeightGrad(weight, 1)
                    grad.add(dy, x)
                    totals[name] = grad.result()
            if bias in self.need:
                totals[bias] = part
            return
        if name in totals:
            totals[name].add(dy, x)
        if bias in totals:
            totals[bias].add(part)
        if self.trains(layer):
            da, db = map(totals.get, names_of(layer))
            self.branch.updates[layer].add_gradients(self.branch.p, dy, du, x, da, db, start)

    def results(self) -> Grads:
        return self.totals if self.once else {name: total.result() for name, total in self.totals.items()}


def reference(x: Tensor, t, o) -> Tensor:
    """Computes the MLP of x [..., d] in differentiable PyTorch ops."""

    def linear(layer, rows):
        update = low_rank(t, o, LAYERS, layer, row_count(x))
        return reference_linear(rows, getattr(t, WEIGHT[layer]), getattr(t, BIAS[layer]), update)

    h = eager.act(linear("up" if t.gate_weight is None else "gate", x), o.activation)
    h = h if t.gate_weight is None else h * linear("up", x)
    return linear("down", eager.apply_dropout(h, dropout_arguments(t.rng, o.dropout_p, o.first_column)))
