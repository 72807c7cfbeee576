"""moe_mlp and grouped_gated_mlp: the experts of an MoE layer as one region, which saves its input and the routing."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import eager
from ..errors import DtypeError, ShapeError
from ..frozen import Frozen
from .dispatch.choices import (
    Bytes,
    cast_input,
    check_input,
    check_options,
    check_tensor,
    choose_impl,
    choose_mode,
    choose_workspace,
    matmul_precision,
    primitives,
)
from .registration.functions import build
from .registration.gradients import BiasGrad, WeightGrad
from .registration.op import (
    Chunks,
    Named,
    Op,
    OpTensors,
    beside_frozen,
    by_chunks,
    cast_parameter,
    in_order,
    mask,
    needed_names,
    rows_2d,
    token_chunks,
    unflattened,
)
from .sublayer.lora import NO_UPDATES, LoRA, gather_lora, grouped_low_rank, names_of

INDEX = 1
LAYERS = ("gate_up", "down")
UPDATES = tuple(name for layer in LAYERS for name in names_of(layer))
PARAMETERS = ("gate_up_weight", "gate_up_bias", "down_weight", "down_bias", *UPDATES)
READ_X = frozenset(("gate_up_weight", *names_of("gate_up")))  # gradients that read x
READ_H = frozenset(("down_weight", *names_of("down")))
OF_GU = READ_X | {"x", "gate_up_bias"}  # gradients that read that of [g | u]
ExpertsTensors = namedtuple("ExpertsTensors", ("index", "s", *PARAMETERS))


class _ExpertsGrad(WeightGrad):
    """WeightGrad of a^T b over each expert's rows."""

    def __init__(self, p, weight: Tensor, chunks: int, precision: str):
        super().__init__(weight, chunks)
        self.p, self.precision = p, precision

    def matmul(self, a: Tensor, b: Tensor, groups: eager.Groups, gathered: str) -> None:
        out = self.sum
        if out is None and self.chunks > 1:
            out = self.weight.new_zeros(self.weight.shape, dtype=eager.wide_of(self.dtype))
        elif out is None:
            out = self.dtype
        elif out.stride(-1) != 1:  # a main_grad, which the kernel cannot add to
            out = out.contiguous()
        total = self.p.experts_dw(a, b, groups, self.precision, out, gathered=gathered)
        self.sum = total if self.main is None or total is self.main else self.main.copy_(total)


def _bias_share(dy: Tensor, index: Tensor, bias: Tensor) -> Tensor:
    """Computes <dy[t], bias[e]> for every token-expert pair: the bias's part of the gradient of the pair's weight."""
    wide, dropped = eager.wide_of(dy.dtype), (index < 0) | (index >= len(bias))
    dy, bias, index = dy.to(wide), bias.to(wide), index.masked_fill(dropped, 0).long()
    shares = [(dy * bias[experts]).sum(1) for experts in index.unbind(1)] if len(bias) else [dy.new_zeros(dy.shape[0])]
    return torch.stack(shares, 1).masked_fill(dropped, 0)


def in_order_of_rows(groups: eager.Groups) -> eager.Groups:
    """Returns groups with which a launcher that gathers reads rows where they are."""
    return groups._replace(
        order=torch.arange(len(groups.order), device=groups.order.device, dtype=torch.int32), top_k=1
    )


class ExpertsBranch:
    """The experts of one call, for any rows of tokens.

    parameters: the tensors that PARAMETERS names; o: ExpertsOptions, or an object with its fields; dtype: that of the rows;
    holds: whether dequantised Frozen weights are held, None asks `beside_frozen`. If not, PyTorch ops dequantise one expert at
    a time.
    """

    def __init__(self, parameters: OpTensors, o, dtype: torch.dtype, holds: bool | None = None):
        if holds is None:
            o, holds = beside_frozen(parameters, o, dtype)
        o = o if holds else o._replace(backend="eager")
        self.p, self.o, self.dtype = primitives(o.backend), o, dtype
        self.named = dict(zip(PARAMETERS, parameters, strict=True))
        self.w, self.b, self.wd, self.bd = (
            t.to(dtype) if type(t) is Frozen and not holds else cast_parameter(t, dtype) for t in parameters[:4]
        )
        self.updates = grouped_low_rank(self.named, o.experts_lora, LAYERS, dtype, o.precision)

    def sums(self, need: Collection[str], chunks: int) -> dict:
        """Returns, by name, the sums over chunks of the gradients of PARAMETERS that are needed."""
        return {
            name: BiasGrad(parameter, chunks)
            if "bias" in name
            else _ExpertsGrad(self.p, parameter, chunks, self.o.precision)
            for name, parameter in self.named.items()
            if name in need
        }

    def gate_up(self, x: Tensor, groups: eager.Groups) -> Tensor:
        """Computes [g | u] of rows in the experts' order."""
        p, o, update = self.p, self.o, self.updates.get("gate_up")
        if update is None:
            return p.experts_fwd(x, self.w, self.b, groups, o.activation, o.precision, save_gu=True)[1]
        rows = eager.gather_rows(x, groups)
        return update.add(p, p.experts_gemm(rows, self.w, self.b, groups, o.precision, transposed=True), rows, groups)

    def forward(self, x: Tensor, s: Tensor, groups: eager.Groups, gu: Tensor | None = None) -> Named:
        """Returns "y" of x [rows, d], and "gu", a row for each of x's, if backward does not recompute it. gu: the saved tensor,
        in backward."""
        p, o, save_gu = self.p, self.o, self.o.recompute != "full"
        if gu is None and "gate_up" in self.updates:
            gu = self.gate_up(x, groups)
        if gu is None:
            h, gu = p.experts_fwd(x, self.w, self.b, groups, o.activation, o.precision, save_gu=save_gu)
        else:
            h = p.act_fwd(*gu.reshape(-1, self.w.shape[1]).chunk(2, 1), o.activation)
        gu = gu if save_gu else None
        y = p.experts_gemm(h, self.wd, self.bd, groups, o.precision, transposed=True)
        if "down" in self.updates:
            self.updates["down"].add(p, y, h, groups)
        h = None
        outputs = {"y": p.experts_combine(y, s, groups)}
        return outputs | {"gu": gu.view(x.shape[0], groups.top_k * self.w.shape[1])} if save_gu else outputs

    def backward(
        self,
        dy: Tensor,
        x: Tensor | None,
        index: Tensor,
        s: Tensor,
        gu: Tensor | None,
        groups: eager.Groups,
        need: Collection[str],
        sums: dict,
    ) -> Named:
        """Returns "dx" and "ds" if `need` names "x" and "s"; adds the other gradients to `sums`. gu: None, or as `forward`
        returned it."""
        p, o, bd = self.p, self.o, self.named["down_bias"]
        gu = None if gu is None else gu.reshape(-1, self.w.shape[1])
        of_gu, of_s, reads_h = not need.isdisjoint(OF_GU), "s" in need, not need.isdisjoint(READ_H)
        behind = of_gu or of_s  # a needed gradient reads that of h
        (a, b), update, du = names_of("down"), self.updates.get("down"), None
        if update is not None and (behind or a in need):  # not yet weighted
            du = update.inner(p, eager.gather_rows(dy, groups), groups, back=True)
        # h times its weight; the gradients of [g | u] and of the weights; what an update adds to dh
        hs = dgu = ds = added = None
        if gu is None and (self.updates if behind else reads_h):
            gu = self.gate_up(x, groups)
        if behind:
            arguments, wanted = (groups, o.activation, o.precision), dict(hs=reads_h, dgu=of_gu, ds=of_s)
            if gu is None:
                hs, dgu, ds = p.experts_bwd(x, self.w, self.b, dy, self.wd, s, *arguments, **wanted)
            else:
                added = (
                    None if du is None else p.experts_gemm(du, update.a, None, groups, o.precision, transposed=False)
                )
                hs, dgu, ds = p.experts_act_grad(gu, dy, self.wd, s, *arguments, added=added, **wanted)
        elif reads_h:  # forward's h, without the matmul of its gradient
            hs, wide = p.act_fwd(*gu.chunk(2, 1), o.activation), eager.wide_of(dy.dtype)
            hs = (hs.to(wide) * s.reshape(-1)[groups.order].to(wide)[:, None]).to(dy.dtype)
        gu = added = None
        gradients = {}
        if "s" in need:
            gradients["ds"] = ds if bd is None else ds + _bias_share(dy, index, bd)
        if "down_weight" in need:
            sums["down_weight"].add(dy, hs, groups, "a")
        # hs is weighted, so dA = du^T hs and dB = dy^T (hs A^T) are weighted once
        if a in need:
            sums[a].add(du, hs, in_order_of_rows(groups), "a")
        if b in need:
            sums[b].add(dy, update.inner(p, hs, groups), groups, "a")
        hs = du = None  # freed before the other gradients are formed
        if "gate_up_weight" in need:
            sums["gate_up_weight"].add(dgu, x, groups, "b")
        if "gate_up_bias" in need:
            sums["gate_up_bias"].add(p.experts_sums(dgu, None, groups, gathered=False))
        if "down_bias" in need:
            sums["down_bias"].add(p.experts_sums(dy, s, groups, gathered=True))
        (a, b), update = names_of("gate_up"), self.updates.get("gate_up")
        if b in need:
            u = update.inner(p, eager.gather_rows(x, groups), groups)
            sums[b].add(dgu, u, in_order_of_rows(groups), "a")
            u = None
        if update is not None and not need.isdisjoint(("x", a)):
            du = update.inner(p, dgu, groups, back=True)
        if a in need:
            sums[a].add(du, x, groups, "b")
        if "x" in need:
            rows = p.experts_gemm(dgu, self.w, None, groups, o.precision, transposed=False)
            dgu = None
            if du is not None:
                rows.add_(p.experts_gemm(du, update.a, None, groups, o.precision, transposed=False))
            gradients["dx"] = p.experts_combine(rows, None, groups)
        return gradients

    def row_bytes(self, top_k: int) -> int:
        """Returns the bytes of a token's transient tensors in either pass, whichever its experts are."""
        d, N, size = *self.wd.shape[1:], self.dtype.itemsize
        pair = size * (3 * N + d)  # weighted h, the gradients of g and u, and their part of dx
        if self.updates:  # g and u with their update beside them; the tokens' rows; u and du
            pair += size * (4 * N + d + 2 * max(update.a.shape[1] for update in self.updates.values()))
        token = 2 * d * max(size, 4)
        if self.o.backend == "eager":
            # one expert may have all: its rows, g, u, act(g), h, dh and steps between, or float32 copies
            pair += size * (8 * N + 2 * d) + (0 if size >= 4 else 8 * (2 * N + d))
            token *= 2
        return top_k * pair + token

    def chunks(self, index: Tensor) -> Chunks:
        """Returns the [start, stop) ranges of tokens that forward and backward take at once. index: [T, top_k]."""
        return token_chunks(len(index), lambda: self.row_bytes(index.shape[1]), self.o.workspace)


class ExpertsOptions(NamedTuple):
    """Options of moe_mlp. experts_lora: the scale of the low-rank update of each of LAYERS, empty without updates."""

    activation: str
    recompute: str
    backend: str
    precision: str
    workspace: int
    experts_lora: tuple[float, ...]


FIRST_WEIGHTS = mask(ExpertsTensors, *READ_X)


class Experts(Op):
    name = "moe_mlp"
    Options = ExpertsOptions
    constants = frozenset({INDEX})

    @staticmethod
    def saves(o):
        return () if o.recompute == "full" else ("gu",)

    @staticmethod
    def reads_x(o, needs):
        return o.recompute == "full" or bool(needs & FIRST_WEIGHTS)

    @staticmethod
    def forward(tensors, o):
        x, index, s, *parameters = tensors
        rows, index, s = rows_2d(x), rows_2d(index), rows_2d(s)
        branch = ExpertsBranch(parameters, o, x.dtype)

        def of_tokens(start, stop):
            part = slice(start, stop)
            return branch.forward(rows[part], s[part], eager.route(index[part], len(branch.w)))

        saved = by_chunks(branch.chunks(index), of_tokens)
        return unflattened(saved.pop("y"), x), saved

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        x, index, s, *parameters = tensors
        rows, x, weights, index = rows_2d(dy), None if x is None else rows_2d(x), rows_2d(s), rows_2d(index)
        need = needed_names(ExpertsTensors, needs)
        branch = ExpertsBranch(parameters, o, dy.dtype)
        chunks = branch.chunks(index)
        sums = branch.sums(need, len(chunks))

        def of_tokens(start, stop):
            part = slice(start, stop)
            own = [None if t is None else t[part] for t in (rows, x, index, weights, saved.get("gu"))]
            gradients = branch.backward(*own, eager.route(own[2], len(branch.w)), need, sums)
            return gradients | {"ds": cast_parameter(gradients["ds"], s.dtype)} if "ds" in gradients else gradients

        gradients = by_chunks(chunks, of_tokens)
        grads = {name: total.result() for name, total in sums.items()}
        grads |= {"s": gradients["ds"].view(s.shape)} if "s" in need else {}
        grads |= {"x": unflattened(gradients["dx"], dy)} if "x" in need else {}
        return in_order(grads, ExpertsTensors, needs)

    @staticmethod
    def reference(tensors, o):
        """Runs every expert on every token, with zeros for tokens of other experts: no shape depends on values."""
        x, index, s, *parameters = tensors
        w, b, wd, bd = (cast_parameter(t, x.dtype) for t in parameters[:4])
        updates = grouped_low_rank(
            dict(zip(PARAMETERS, parameters, strict=True)), o.experts_lora, LAYERS, x.dtype, o.precision
        )

        def linear(layer, rows, w, b, e):
            y = F.linear(rows, w[e], None if b is None else b[e])
            return y + updates[layer].of_expert(e).reference(rows) if layer in updates else y

        wide = eager.wide_of(x.dtype)
        total = 0
        for e in range(w.shape[0]):
            chosen = index == e
            own = torch.where(chosen.any(-1, keepdim=True), x, 0)
            g, u = linear("gate_up", own, w, b, e).chunk(2, -1)
            y = linear("down", eager.act(g, o.activation) * u, wd, bd, e)
            total = total + y.to(wide) * torch.where(chosen, s.to(wide), 0).sum(-1, keepdim=True)
        return (total if w.shape[0] else torch.zeros_like(x, dtype=wide)).to(x.dtype)


_apply = build(Experts)


def check_experts(op: str, x: Tensor, w: Tensor, b: Tensor | None, wd: Tensor, bd: Tensor | None) -> None:
    """Checks that the parameters are those of one set of experts, for inputs like x."""
    d = x.shape[-1]
    check_tensor(op, "gate_up_weight", w, x)
    shape = tuple(w.shape)
    if len(shape) != 3 or shape[2] != d or shape[1] % 2:
        hint = f"; pass gate_up_weight.transpose(1, 2) for [experts, {d}, 2 hidden]" if shape[1:2] == (d,) else ""
        raise ShapeError(
            f"{op}: gate_up_weight must be [experts, 2 hidden, {d}] for an input with {d} features, but has shape {shape}{hint}"
        )
    for name, tensor, wanted in (
        ("gate_up_bias", b, shape[:2]),
        ("down_weight", wd, (shape[0], d, shape[1] // 2)),
        ("down_bias", bd, (shape[0], d)),
    ):
        if tensor is not None or name == "down_weight":
            check_tensor(op, name, tensor, x, wanted, f" beside gate_up_weight {shape}")


def _check_integers(op: str, name: str, tensor: Tensor, x: Tensor) -> None:
    check_tensor(op, name, tensor, x, floating=False)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DtypeError(f"{op}: {name} must hold integers, not {tensor.dtype}")


def _call(op, x, index, s, parameters, lora, activation, recompute, workspace):
    """Applies the op. parameters: the first four of PARAMETERS."""
    w, _, wd, _ = parameters
    updates, numbers = NO_UPDATES if lora is None else gather_lora(op, x, lora, {"gate_up": w, "down": wd})
    x = cast_input(op, x, *parameters)
    options = ExpertsOptions(
        activation=activation,
        recompute=choose_mode(recompute),
        backend=choose_impl(op, x, x.shape[-1], wd.shape[2], x.shape[-1], name="moe_mlp"),
        precision=matmul_precision(x),
        workspace=choose_workspace(op, workspace, x, w.numel()),
        experts_lora=numbers[::2],
    )
    return _apply(options, x, index, s, *parameters, *map(updates.get, UPDATES))


def moe_mlp(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    lora: Mapping[str, LoRA] | None = None,
    recompute: str = "full",
    workspace: Bytes = None,
) -> Tensor:
    """Computes y[t] = sum_j top_k_weights[t, j] mlp_e(x[t]), e = top_k_index[t, j], where mlp_e is expert e's gated MLP.

        mlp_e(x) = (act(g) * u) down_weight[e]^T + down_bias[e],  [g | u] = x gate_up_weight[e]^T + gate_up_bias[e]

    x [..., d], top_k_index [..., k] of integers, top_k_weights [..., k] in any floating dtype, gate_up_weight [E, 2 h, d],
    down_weight [E, d, h], biases [E, 2 h] and [E, d] or None -> y [..., d], as in transformers 5.

    An index outside of 0..E - 1 drops its token-expert pair. An expert without tokens gets zero gradients. Results repeat bit
    for bit. CUDA graphs can capture a call.

    lora: a LoRA each of "gate_up" and "down", a [E, r, in_features] and b [E, out_features, r], without dropout.
    recompute: what is saved besides parameters, and matmuls in forward + backward, of T k rows; routing is top_k_index and
        top_k_weights:

        "none", "selective"  x, g, u, routing    9
        "full"               x, routing         11

    Raises: see Conventions.
    """
    op = "moe_mlp"
    check_options(op, activation, recompute)
    check_input(op, x)
    _check_integers(op, "top_k_index", top_k_index, x)
    check_tensor(op, "top_k_weights", top_k_weights, x)
    if top_k_index.shape[:-1] != x.shape[:-1] or top_k_index.dim() != x.dim() or not top_k_index.shape[-1]:
        raise ShapeError(
            f"{op}: top_k_index must be {(*x.shape[:-1], 'k')} for an input of shape {tuple(x.shape)}, with k of at least 1, "
            f"but has shape {tuple(top_k_index.shape)}"
        )
    if top_k_weights.shape != top_k_index.shape:
        raise ShapeError(
            f"{op}: top_k_index and top_k_weights must have one shape, but have {tuple(top_k_index.shape)} and "
            f"{tuple(top_k_weights.shape)}"
        )
    parameters = gate_up_weight, gate_up_bias, down_weight, down_bias
    check_experts(op, x, *parameters)
    return _call(op, x, top_k_index, top_k_weights, parameters, lora, activation, recompute, workspace)


def grouped_gated_mlp(
    x: Tensor,
    offs: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    row_weights: Tensor | None = None,
    lora: Mapping[str, LoRA] | None = None,
    recompute: str = "full",
    workspace: Bytes = None,
) -> Tensor:
    """Computes `moe_mlp` of rows that are already in the experts' order, as an all-to-all leaves them.

    x [R, d], offs [E] of integers: expert e has rows offs[e - 1] (0 for the first) to offs[e], as in
    torch.nn.functional.grouped_mm -> y [R, d], 0 from row offs[-1] on.

    row_weights: [R] or None, multiplies y's rows. Weights applied outside of the op would need its output saved.
    lora, recompute, workspace: see moe_mlp.
    Raises what moe_mlp raises.
    """
    op = "grouped_gated_mlp"
    check_options(op, activation, recompute)
    check_input(op, x)
    _check_integers(op, "offs", offs, x)
    if x.dim() != 2:
        raise ShapeError(f"{op}: input must be [rows, features], but has shape {tuple(x.shape)}")
    parameters = gate_up_weight, None, down_weight, None
    check_experts(op, x, *parameters)
    if tuple(offs.shape) != (len(gate_up_weight),):
        raise ShapeError(
            f"{op}: offs must have shape ({len(gate_up_weight)},), the end of each expert's rows, but has {tuple(offs.shape)}"
        )
    if row_weights is None:
        row_weights = x.new_ones(x.shape[0], dtype=eager.wide_of(x.dtype))
    check_tensor(op, "row_weights", row_weights, x, (x.shape[0],), ", one value for each row")
    rows = torch.arange(x.shape[0], device=x.device)
    index = torch.searchsorted(offs.to(rows.dtype), rows, right=True)  # the number of experts for rows beyond the last
    return _call(op, x, index[:, None], row_weights[:, None], parameters, lora, activation, recompute, workspace)
