"""Computes around core attention what sublayers of attention and of latent attention share, forward and backward, and
defines their ops. A table of the sublayer's quantities decides what a backward computes (`Table`, `plan_of`)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ..registration.gradients import Delayed, Place, WeightGrad, add_matmul, arrived, is_late
from ..registration.op import Grads, Named, Names, SublayerOp, needed_names
from ..sublayer.lora import LowRank, names_of, reference_linear
from ..sublayer.residual import OF_NORM, RandomStates, Sublayer
from .core import CoreTensors, attend, attention_grads, core_of, merged_mask
from .rotary import positions_of, rotary_tables
from .tensors import Division, PositionTensors, batch_and_rows, part_of

# Quantities in forward's order, each with its operands (quantities and names of inputs), each with the values that its gradient
# reads besides the quantity's gradient and the parameters.
Operands = dict[str, Names]
Table = dict[str, Operands]
Saved = dict[str, Tensor | None]  # by name


def linear_operands(rows: str, letter: str) -> Operands:
    """Returns the operands of a linear layer that reads `rows`, and of its low-rank update. letter: names the layer, as "q"
    names wq and bq."""
    return {rows: (), f"b{letter}": ()} | dict.fromkeys((f"w{letter}", *names_of(letter)), (rows,))


def norm_operands(rows: str, norm: str, normed: bool) -> Operands:
    """Returns the operands of a norm and rotation; without a norm their gradients read no value. norm: the name of the
    weight."""
    return dict.fromkeys((rows, norm, f"{norm}_bias"), (rows,) if normed else ())


def input_operands(trailing: bool) -> Operands:
    """Returns the operands of h, the branch's input; their gradients read only x, which is always saved."""
    return dict.fromkeys(("x",) if trailing else ("x", *OF_NORM), ())


def from_core(gate: bool, trailing: bool, post_norm: bool) -> Table:
    """Returns the table from core attention to the output: o, the gated o, the branch's result f, z, which is added to x,
    and y."""
    heads = "q_heads", "k_heads", "v", "o"
    after = dict.fromkeys(("post_norm_weight", "post_norm_bias", "layer_scale"), ("f",))
    return {
        "o": dict.fromkeys(("q_heads", "k_heads", "v", "mask", "sinks"), heads),
        "gated": {"o": ("g",), "g": ("o", "g")} if gate else {"o": ()},
        "f": linear_operands("gated", "o"),
        "z": {"f": ("f",) if post_norm else ()} | after,
        "y": dict.fromkeys(("x", "z", "norm_weight", "norm_bias"), ("f",)) if trailing else {"x": (), "z": ()},
    }


class Plan(NamedTuple):
    """The plan of a backward. need: the inputs whose gradients are requested; formed: these and the quantities whose
    gradients lead to them; values: the quantities to read or to recompute."""

    need: frozenset[str]
    formed: frozenset[str]
    values: frozenset[str]


@functools.cache
def plan_of(table: Callable[..., Table], layout: tuple, need: frozenset[str], saved: frozenset[str]) -> Plan:
    """Follows the table of a sublayer with this layout, forward for gradients and backward for values. saved: the
    quantities that need no recompute."""
    quantities, formed = table(*layout), set(need)
    for name, operands in quantities.items():
        if not formed.isdisjoint(operands):
            formed.add(name)
    values: set[str] = set()
    for operands in quantities.values():
        values.update(*(read for operand, read in operands.items() if operand in formed))
    for name in reversed(quantities):
        if name in values and name not in saved:
            values |= quantities[name].keys() & quantities.keys()
    return Plan(need, frozenset(formed), frozenset(values))


class Layer(NamedTuple):
    """A linear layer in backward. letter: names its tensors, as in `linear_operands`; place: of its rows (of the output
    projection: columns) in the weight, None for all; update: its low-rank update; d, du: the gradients of its result and of
    the update's inner features."""

    letter: str
    place: Place | None
    update: LowRank | None
    d: Tensor
    du: Tensor | None = None


class Gradients:
    """Collects gradients of parameters by name, over groups of heads. Each group writes its part at its `place` of one
    tensor; where all groups read the same weight, a float32 sum is rounded once.

    t: the parameters, a NamedTuple; parts: the number of addends of a sum. A gradient that was added to a main_grad is
    None. totals: the gradients of the projections' inputs, summed over groups; shared: those of k and v, until the last group
    that shares these.
    """

    plan: Plan

    def __init__(self, t: Any, parts: int):
        self.t, self.parts = t, parts
        self.sums: dict[str, WeightGrad] = {}
        self.grads: dict[str, Any] = {}
        self.wholes: Named = {}
        self.totals: Named = {}
        self.shared: dict[int, Tensor] = {}

    def whole(self, name: str) -> Tensor:
        """Returns the tensor that the parts of a gradient are written into."""
        if name not in self.wholes:
            parameter = getattr(self.t, name)
            self.wholes[name] = parameter.new_empty(parameter.shape)
        return self.wholes[name]

    def of_weight(self, name: str, place: Place | None, chunks: int = 1) -> WeightGrad:
        """Returns the sum over chunks for the weight's part at `place`; pass it to `written` when complete."""
        whole = None if place is None else functools.partial(self.whole, name)
        return WeightGrad(getattr(self.t, name), chunks, place=place, whole=whole)

    def written(self, sums: dict[str, WeightGrad]) -> None:
        """Stores the results of complete sums."""
        for name, grad in sums.items():
            if name not in self.sums:
                result, before = grad.result(), self.grads.get(name)
                if isinstance(result, Delayed) and before is not None:
                    before.sums.extend(result.sums)
                else:
                    self.grads[name] = result

    def sum_of(self, name: str) -> WeightGrad:
        """Returns the sum for a weight that all parts read."""
        if name not in self.sums:
            self.sums[name] = WeightGrad(getattr(self.t, name), self.parts)
        return self.sums[name]

    def put(self, name: str, grad: Tensor | None, place: Place | None) -> None:
        """Stores the gradient of the part at `place`, None for the whole."""
        if place is None or grad is None:
            self.grads[name] = grad
        else:
            self.grads[name] = whole = self.whole(name)
            whole[place] = grad

    def add(self, name: str, grad: Tensor | None) -> None:
        """Adds to a sum that is rounded later."""
        before = self.grads.get(name)
        self.grads[name] = grad if before is None else before.add_(grad)

    def results(self) -> dict[str, Any]:
        return self.grads | {name: total.result() for name, total in self.sums.items()}


class CoreSublayer(Sublayer):
    """Computes a sublayer around core attention for one input: every quantity once, from x and the saved tensors.

    `groups` yields sublayers of groups of heads, with their parts of weights, masks and slopes. The sublayer of all heads
    computes what lies around them, from x to h and from o to the output. Subclasses define

    table, layout          the quantities (`plan_of`)
    saved_as               the quantities in each saved tensor
    division, of_heads     the number of groups, and the dimension of each tensor along which its heads lie
    source, source_values  the input of the projections, and the quantities that need it
    projected              q, k, v of all heads, as they are saved
    heads                  q, k, v as the core reads them
    reference_heads        (h) -> (q, k, v), the gate of o or None, in differentiable PyTorch ops
    add_projection_gradients, input_gradient
    """

    table: Callable[..., Table]
    layout: tuple
    saved_as: tuple[tuple[str, Names], ...]
    source_values: frozenset[str]
    index, count = 0, 1  # this group's place and the number of groups; the sublayer of all heads is group 0 of 1
    whole: Any = None  # the sublayer of all heads, in a group
    places: Any = MappingProxyType({})  # a group's parts of tensors, by name
    division: Division
    D: int  # the head dim of core attention
    D_v: int  # the head dim that the output projection reads, at most D
    rotary_dim: int  # columns of the tables of a theta
    gate_letter = ""  # names the projection with o's gate, if there is one
    writes_buffer = False  # whether kernels write the gradients of q, k, v into `buffer`

    def __init__(self, x: Tensor, t: Any, o: Any, **options: bool | None):
        super().__init__(x, t, o, **options)
        self.B, self.S = batch_and_rows(x)

    @functools.cached_property
    def core(self) -> eager.AttentionCore:
        t, o = self.t, self.o
        masks = t.mask is not None or t.padding is not None
        mask = merged_mask(t.mask, t.padding, o.mask_is_exclusion) if masks else None
        if o.workspace is not None:
            o = o._replace(workspace=o.workspace // 2)  # the other half is for heads and their gradients
        return core_of(CoreTensors(mask, t.slopes, t.sinks, t.rng, t.cu, t.cu), o)

    @functools.cached_property
    def angles(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns (cos, sin): the given tables, tables computed from theta (in forward and again in backward), or (None,
        None)."""
        t, o, context, whole = (
            self.t,
            self.o,
            self.o.context,
            self.S if self.o.context is None else self.S * self.o.context.size,
        )
        if o.theta:
            positions = positions_of(whole, t.wo.device, t.cu)
            positions = positions if context is None else context.own(positions, 0)
            return rotary_tables(positions, self.rotary_dim, o.theta, interleaved=o.interleaved)
        if context is None or t.cos is None or t.cos.shape[-2] == self.S:
            return t.cos, t.sin
        return context.own(t.cos, -2), context.own(t.sin, -2)

    # -- groups of heads

    def groups(self) -> Iterator[Any]:
        """Yields the sublayer itself if it fits the workspace, else the sublayers of its groups of heads."""
        return iter((self,)) if self.division.groups == 1 else map(self.group, range(self.division.groups))

    def group(self, index: int) -> Any:
        part, count, t, o = copy.copy(self), self.division.groups, self.t, self.o
        part.index, part.count, part.whole, part.copies, part.angles = index, count, self, {}, self.angles
        H, part.places = o.num_heads // count, {}
        for name, dim in self.of_heads().items():
            if (whole := getattr(t, name)) is not None and whole.shape[dim] > 1:
                part.places[name] = (slice(None),) * dim + (part_of(whole.shape[dim], index, count),)
        part.t = t._replace(**{name: getattr(t, name)[place] for name, place in part.places.items()})
        counts = {
            name: max(getattr(o, name) // count, 1) for name in ("num_heads", "num_kv_heads") if name in o._fields
        }
        part.o, part.core = o._replace(**counts), self.core.of_heads(index * H, H, o.num_heads)
        return part

    def own(self, heads: Tensor, dim: int = 1) -> Tensor:
        """Returns this group's part of a tensor with all heads along `dim`."""
        place = (slice(None),) * dim + (part_of(heads.shape[dim], self.index, self.count),)
        return heads if self.count == 1 else heads[place]

    def add_part(self, name: str, grad: Tensor | None, grads: Gradients) -> None:
        """Adds this group's gradient of a parameter: its own part, or an addend where all groups read the parameter."""
        if name in self.places:
            grads.put(name, grad, self.places[name])
        else:
            grads.add(name, grad)

    # -- forward

    def attended(self, heads: Any, do: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns (o, lse, delta) of core attention on the result of `heads`."""
        if self.o.context is not None:
            return heads.attend(self.p, self.core, do)
        return attend(self.p, *heads, self.core, do)

    def attend(self, save_raw: bool) -> Saved:
        """Returns the saved tensors by name: out and lse, and the projections, which are raw and of all heads if
        `save_raw`."""
        source = self.source({})
        saved = self.projected(source) if save_raw or self.division.groups == 1 else {}
        heads: Saved = {}
        for group in self.groups():
            out, lse, _ = group.attended(group.heads(source, saved, save_raw, backward=False)[0])
            if self.D_v < self.D:  # copied: [B, H, S, D_v], in memory [B, S, H, D_v]
                out = out[..., : self.D_v]
                out = eager.empty_heads(out).copy_(out)
            if group is self:
                return {"out": out, "lse": lse} | saved
            if not heads:
                heads["out"] = eager.empty_heads(out[:, :1].expand(-1, self.o.num_heads, -1, -1))
                heads["lse"] = lse.new_empty((lse.shape[0], lse.shape[1] * group.count, *lse.shape[2:]))
            group.own(heads["out"]).copy_(out)
            group.own(heads["lse"]).copy_(lse)
            out = lse = None
        return heads | saved

    def filled(self, heads: Tensor) -> Tensor:
        """Pads [..., D_v] with zeros to [..., D]."""
        missing = self.D - heads.shape[-1]
        return F.pad(heads, (0, missing)) if missing else heads

    def out_rows(self, heads: Tensor) -> Tensor:
        """Returns [B, H, S, N] as [tokens, H N], a view if memory is [B, S, H, N]."""
        return heads.transpose(1, 2).reshape(self.x.shape[0], heads.shape[1] * heads.shape[3])

    updates: dict[str, LowRank] = MappingProxyType({})  # by the layer's letter

    def branch(self, saved: Saved) -> Tensor:
        """Returns dropout(gated(o) Wo^T + bo) [tokens, d]. saved: out, and the projections of all heads, if they were
        saved."""
        rows = self.out_rows(self.gated_heads(saved) if self.gate_letter else saved["out"])
        f = eager.linear(rows, self.cast(self.t.wo, last=False), self.cast(self.t.bo))
        if "o" in self.updates:
            self.updates["o"].add(self.p, f, rows)
        return self.drop(f)

    # -- backward

    def plan(self, need: frozenset[str], saved: Saved, f: Tensor | None = None) -> Plan:
        at_hand = {"f"} if f is not None else set()
        for name, quantities in self.saved_as:
            if saved.get(name) is not None:
                at_hand.update(quantities)
        return plan_of(
            type(self).table, (*self.layout, self.trailing, bool(self.o.post_norm)), need, frozenset(at_hand)
        )

    def backward(self, saved: Saved, needs: int) -> Grads:
        """Returns gradients by name ("x" and the fields of the tensors); recomputes what was not saved.

        saved: with "dy" [tokens, d]. It is emptied, so that each tensor ends where it has been read last.
        """
        need, f = needed_names(type(self.t), needs), None
        grads = Gradients(self.t, self.division.groups * len(self.division.chunks))
        grads.plan = self.plan(need, saved)
        if "f" in grads.plan.values:
            # the input of a norm after the branch is needed before the gradient from which delta is computed
            fits, attended = self.division.groups == 1, {}
            if saved.get("out") is None:
                attended = self.attend(fits)
            f = self.branch(saved | attended)
            if fits:  # groups of heads compute it again
                saved |= attended
            attended = None
            grads.plan = self.plan(need, saved, f)
        dy, df, gradients = self.branch_gradients(saved.pop("dy"), f, need)
        f = du = None
        source = None if grads.plan.values.isdisjoint(self.source_values) else self.source(saved)
        if "o" in self.updates and not grads.plan.formed.isdisjoint(("gated", *names_of("o"))):
            du = self.updates["o"].inner_gradient(df)
        for group in self.groups():
            if of_heads := group.core_gradients(source, df, du, saved, grads):
                group.add_projection_gradients(of_heads, source, grads)
        raw = getattr(source, "raw", None)
        group = of_heads = source = df = du = None  # frees what the input's gradient does not read
        saved.clear()
        dh = self.input_gradient(raw, grads)
        gradients |= grads.results()
        if dh is not None:
            gradients |= self.input_gradients(dh.to(self.o.dtype), dy, need)
        return self.finished(gradients, need)

    def core_gradients(
        self, source: Any, df: Tensor, du: Tensor | None, saved: Saved, grads: Gradients
    ) -> dict[str, Any]:
        """Recomputes what this group of heads needs and adds the gradients of the output projection, the mask and the
        sinks.

        Returns the gradients of q, k, v [B, H, S, D] ("heads") and of the gate, with the "raw" and "buffer" of `heads` and
        `buffer`; an empty dict if none leads to a requested gradient.
        """
        plan, heads, raw, gate = grads.plan, None, (None, None), None
        if "q_heads" in plan.values:
            heads, raw, gate = self.heads(source, saved, False, backward=True)
        elif "g" in plan.values:
            gate = self.gate_alone(source, saved)
        out, lse, do, delta = saved.get("out"), saved.get("lse"), None, None
        recomputes = out is None and "o" in plan.values
        if recomputes and is_late(df):
            # while df is on its way; delta, which needs df, is computed later
            out, lse, _ = self.attended(heads)
        df = arrived(df)
        share = None if gate is None else torch.sigmoid(gate).transpose(1, 2)
        if "gated" in plan.formed:
            do = add_matmul(None, df, self.cast(self.t.wo), wide=False)
            if du is not None:
                self.updates["o"].add_input_gradient(self.p, du, do)
            do = do.view(self.B, self.S, self.o.num_heads, self.D_v)
            do = (do if self.D_v == self.D else self.filled(do)).transpose(1, 2)
            do = do if share is None else do.mul_(share)
        if recomputes and out is None:
            out, lse, delta = self.attended(heads, do)
        elif not recomputes and out is not None and self.count > 1:
            # cloned so that lse's address is aligned as that of all heads
            out, lse = self.own(out), self.own(lse).clone(memory_format=torch.contiguous_format)
        rows = None
        if "gated" in plan.values:
            rows = self.out_rows((out if share is None else out * share)[..., : self.D_v])
        self.add_layer("o", df, rows, grads, du)
        if do is None:
            return {}
        rows = share = None
        results = {"raw": raw, "gate": self.gate_gradient(do, out, gate) if "g" in plan.formed else None}
        if "o" not in plan.formed:
            return results | {"heads": [None] * 3}
        if out.shape[-1] < self.D:
            out = eager.empty_heads(do).copy_(self.filled(out))
        results["buffer"] = buffer = self.buffer() if self.writes_buffer else None
        outs = [None] * 3 if buffer is None else [place.transpose(1, 2) for place in buffer[1]]
        needs = dict(need_dq="q_heads" in plan.formed, need_dkv="k_heads" in plan.formed or "v" in plan.formed)
        options = dict(delta=delta, need_dsinks="sinks" in plan.need, out=outs, **needs)
        if self.o.context is not None:
            *results["heads"], dsinks = heads.grads(self.p, do, out, lse, self.core, **options)
        else:
            mask_shape = self.t.mask.shape if "mask" in plan.need else None
            *results["heads"], dmask, _, dsinks = attention_grads(
                self.p, *heads, do, out, lse, self.core, dmask_shape=mask_shape, **options
            )
            if dmask is not None:
                self.add_part("mask", dmask, grads)
        if dsinks is not None:
            self.add_part("sinks", dsinks, grads)
        return results

    def add_layer(
        self, letter: str, d: Tensor, rows: Tensor | None, grads: Gradients, du: Tensor | None = None
    ) -> None:
        """Adds the gradients of a layer that reads `rows`."""
        layer = Layer(letter, self.places.get(f"w{letter}"), self.updates.get(letter), d, du)
        self.add_layer_gradients((layer,), ((slice(None), rows),), grads)

    def add_layer_gradients(
        self, layers: Sequence[Layer], read: Iterable[tuple[slice, Tensor]], grads: Gradients, chunks: int = 1
    ) -> None:
        """Adds the gradients of layers' biases, weights and low-rank updates. read: (place, rows) of the layers' input, for
        each of the chunks."""
        need, sums = grads.plan.need, []
        for letter, place, update, d, _ in layers:
            of_output, weight, bias, own = letter == "o", f"w{letter}", f"b{letter}", {}
            if bias in need and not (of_output and self.index):  # all groups share bo
                grads.put(bias, eager.column_sum(d, getattr(self.t, bias).dtype), None if of_output else place)
            if weight in need:
                own[weight] = grads.of_weight(weight, place, chunks)
            for i, name in enumerate(names_of(letter) if update is not None else ()):
                if name in need:  # all groups read A (of the output: B); the other matrix is split as the weight is
                    own[name] = grads.sum_of(name) if (i == 1) == of_output else grads.of_weight(name, place, chunks)
            sums.append(own)
        for place, rows in read if any(sums) else ():
            for (letter, _, update, d, du), own in zip(layers, sums, strict=True):
                d, du = (part if part is None or chunks == 1 else part[place] for part in (d, du))
                if (of_weight := own.get(f"w{letter}")) is not None:
                    of_weight.add(d, rows)
                if len(own) > (of_weight is not None):
                    update.add_gradients(self.p, d, du, rows, *map(own.get, names_of(letter)), place.start or 0)
        for own in sums:
            grads.written(own)


def saves(o: Any) -> Names:
    """Returns the names of what forward saves besides its tensors: core attention's results, and at "none" its inputs,
    `o.projected`."""
    return {"none": ("out", "lse", *o.projected), "selective": ("out", "lse"), "full": ()}[o.recompute]


class CoreOp(SublayerOp):
    """The op of a CoreSublayer, `Sublayer`."""

    Sublayer: type[CoreSublayer]
    saves = staticmethod(saves)

    @classmethod
    def compute(cls, x, t, o):
        sublayer = cls.Sublayer(x, t, o)
        saved = sublayer.attend(o.recompute == "none")
        return sublayer.output(sublayer.branch(saved)), saved

    @classmethod
    def gradients(cls, dy, x, t, o, saved, needs):
        return cls.Sublayer(x, t, o, shares=True).backward(saved | {"dy": dy}, needs)

    @classmethod
    def in_torch_ops(cls, x, t, o):
        """Computes the sublayer in differentiable PyTorch ops. Raises NotImplementedError for a part of a sequence."""
        if o.context is not None:
            raise NotImplementedError(
                "attention: second-order gradients are not supported over a context-parallel group"
            )
        sublayer = cls.Sublayer(x, t, o._replace(backend="eager", workspace=None), holds=True)
        heads, gate = sublayer.reference_heads(sublayer.inputs().view(x.shape))
        out = eager.attention_reference(*heads, sublayer.core)
        out = out.transpose(1, 2)
        out = out if gate is None else out * torch.sigmoid(gate)
        out = out.reshape(*x.shape[:-1], t.wo.shape[1])
        f = reference_linear(out, t.wo, t.bo, sublayer.updates.get("o"))
        return sublayer.output(sublayer.drop(f.flatten(0, -2))).view(f.shape)


def constants_of(kind: type) -> frozenset[int]:
    """Returns the indices, among an op's inputs with x first, of inputs that get no gradient."""
    names = {"slopes", "cu", *PositionTensors._fields, *RandomStates._fields} - {"mask"}
    return frozenset(i for i, name in enumerate(("x", *kind._fields)) if name in names)
