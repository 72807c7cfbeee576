"""Computes what is around the branch f of a sublayer, forward and backward.

h = norm(x) * (1 + norm_scale) + norm_shift
z = drop_path(layer_scale * post_norm(dropout(f(h))));  y = [x +] z, or norm([x +] z) for f(x)"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ... import eager
from ...errors import ShapeError
from ...frozen import Frozen, viewed
from ..dispatch.choices import (
    check_choice,
    check_flags,
    check_number,
    check_probability,
    check_tensor,
    choose_mode,
    choose_workspace,
    matmul_precision,
    primitives,
)
from ..dispatch.shard import ACTIVE
from ..registration.op import (
    Chunks,
    Grads,
    SublayerOp,
    beside_frozen,
    by_chunks,
    cast_parameter,
    needed_names,
    rows_2d,
    token_chunks,
)
from .dropout import draw_state, dropout_arguments
from .lora import update_dtype
from .samples import Samples, check_vectors, sample_shape

NORMS = ("layer", "rms")
NORM_TENSORS = 6  # float32 tensors of its input's shape that a norm's backward holds in PyTorch ops
VECTOR_TENSORS = NORM_TENSORS + 3  # plus a gradient times 1 + norm_scale, and results of chunks
OF_NORM = frozenset(("norm_weight", "norm_bias", "norm_scale", "norm_shift"))  # a leading norm's


Declared = TypeVar("Declared", bound=Callable)


class AroundTensors(NamedTuple):
    """Holds the tensors around a branch, which come first among the tensors of every sublayer."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    norm_scale: Tensor | None
    norm_shift: Tensor | None
    post_norm_weight: Tensor | None
    post_norm_bias: Tensor | None
    layer_scale: Tensor | None


class RandomStates(NamedTuple):
    """Holds the random states of a sublayer, which come last among its tensors: for dropout in the branch, for dropout of
    its result, for drop_path, and for the inputs of low-rank updates."""

    rng: Tensor | None = None
    resid_rng: Tensor | None = None
    path_rng: Tensor | None = None
    lora_rng: Tensor | None = None


class SublayerOptions(NamedTuple):
    """Holds the options of every sublayer. norm, post_norm: "" for none; branch_factor: layer_scale as a number; lora:
    scale and dropout_p of each layer's low-rank update, empty without updates; lora_dtype: `update_dtype`; dtype: the
    compute dtype."""

    norm: str
    norm_eps: float
    norm_first: bool
    post_norm: str
    post_norm_eps: float
    branch_factor: float
    resid_p: float
    path_p: float
    residual: bool
    recompute: str
    precision: str
    workspace: int
    lora: tuple[float, ...]
    lora_dtype: torch.dtype
    dtype: torch.dtype


def drawn(t, o, x: Tensor, training: bool):
    """Returns t with random states, which are drawn last so that an error leaves the generator unchanged."""
    drops = {"lora_rng": any(o.lora[1::2]), "rng": o.dropout_p, "resid_rng": o.resid_p, "path_rng": o.path_p}
    if not training or not any(drops.values()):
        return t
    of_sequence = {"path_rng", "rng"} if hasattr(o, "context") else {"path_rng"}  # masks of samples and of scores
    states = {name: draw_state(x, p, training, of_sequence=name in of_sequence) for name, p in drops.items()}
    return t._replace(**states)


class Sublayer:
    """Computes a sublayer around its branch, for one input x [..., d]. t: its tensors, o: its options.

    shares: caches each cast parameter until its `last` use in backward. first_row, is_part: of a chunk of rows, whose
    gradients of parameters are addends. holds: whether dequantised Frozen weights are held, None to decide
    (`beside_frozen`).
    """

    first_row, is_part = 0, False

    def __init__(self, x: Tensor, t: Any, o: Any, *, shares: bool = False, holds: bool | None = None):
        if holds is None:
            o, holds = beside_frozen(t, o, o.dtype)
        self.shares, self.copies, self.holds, self.held = shares, {}, holds, {}
        self.p, self.x, self.t, self.o = primitives(o.backend), rows_2d(x), t, o
        self.lead, self.wide = x.shape[:-1], torch.promote_types(x.dtype, o.dtype)
        self.out_dtype = self.wide if o.residual else o.dtype
        self.leading, self.trailing = bool(o.norm) and o.norm_first, bool(o.norm) and not o.norm_first
        self.normed = t.norm_weight, t.norm_bias, o.norm_eps, o.norm  # arguments of `norm_fwd`
        self.modulated = t.norm_scale is not None or t.norm_shift is not None
        # the workspace for norms and vectors of samples; the rest is for tensors that are alive beside them
        self.quarter = None if o.workspace is None else o.workspace // 4

    def rows(self, start: int, stop: int):
        """Returns the sublayer of some rows of x."""
        if (start, stop) == (0, self.x.shape[0]):
            return self
        part = copy.copy(self)
        part.x, part.first_row, part.is_part = self.x[start:stop], self.first_row + start, True
        return part

    @property
    def by_sample(self) -> Samples:
        return Samples(self.lead, self.first_row, self.is_part)

    def cast(self, parameter: Tensor | None, dtype: torch.dtype | None = None, *, last: bool = True) -> Tensor | None:
        """Returns the parameter in a dtype, by default the compute dtype. last: whether no later matmul reads it.

        A Frozen parameter, or a view of one, is dequantised as a whole and held for the pass; if Frozen weights are not
        held, a Frozen is returned, which each matmul dequantises.
        """
        dtype = dtype or self.o.dtype
        if type(parameter) is Frozen:
            if not self.holds:
                return parameter.to(dtype)
            whole, views = parameter.whole()
            key = id(whole.parts[0]), dtype
            if key not in self.held:
                self.held[key] = whole, whole.dequantize(dtype)  # whole too, so that no other tensor gets its id
            return viewed(self.held[key][1], views)
        key = id(parameter), dtype
        _, copy = self.copies.pop(key, (None, None))
        copy = cast_parameter(parameter, dtype) if copy is None else copy
        if self.shares and not last and copy is not parameter:
            self.copies[key] = parameter, copy  # parameter too, so that no other tensor gets its id
        return copy

    def dtype_of(self, name: str, need: Collection[str]) -> torch.dtype | bool:
        """Returns the dtype of a gradient: its parameter's, True for an addend, which is not rounded, False if it is not
        needed."""
        return name in need and (self.is_part or getattr(self.t, name).dtype)

    def chunks(self) -> Chunks:
        """Returns [start, stop) of the rows that a pass computes at once. Subclasses define `row_bytes`, the transient
        bytes per row."""
        return token_chunks(self.x.shape[0], self.row_bytes, self.o.workspace)

    def norm_chunks(self, x: Tensor) -> Chunks:
        """Returns [start, stop) of the rows that a norm computes at once: PyTorch ops have transient tensors, kernels have
        none."""
        of_row = NORM_TENSORS * x.shape[1] * max(x.itemsize, 4)
        return token_chunks(x.shape[0], of_row, self.quarter if self.o.backend == "eager" else None)

    def vector_chunks(self) -> Chunks:
        """Returns [start, stop) of the rows to which vectors of samples are applied at once, in PyTorch ops in every
        backend."""

        def of_row():
            widest = max(self.x.shape[1], 0 if self.t.layer_scale is None else self.t.layer_scale.shape[-1])
            return VECTOR_TENSORS * widest * max(self.wide.itemsize, 4)

        return token_chunks(self.x.shape[0], of_row, self.quarter)

    def norm_fwd(self, x: Tensor, *arguments: Any) -> Tensor:
        """Computes the backend's norm_fwd in chunks. arguments: weight, bias, eps, kind, dtype."""
        chunks = self.norm_chunks(x)
        if len(chunks) == 1:
            return self.p.norm_fwd(x, *arguments)
        return by_chunks(chunks, lambda start, stop: {"y": self.p.norm_fwd(x[start:stop], *arguments)})["y"]

    def norm_bwd(
        self,
        dy: Tensor,
        x: Tensor,
        weight,
        eps: float,
        kind: str,
        *,
        residual: Tensor | None = None,
        overwrites: bool = False,
        **needs: bool | torch.dtype,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns (dx, dweight, dbias), computed in chunks. overwrites: whether dx may overwrite dy."""
        chunks = self.norm_chunks(x)
        if len(chunks) == 1:
            return self.p.norm_bwd(dy, x, weight, eps, kind, residual=residual, **needs)
        dx = dy if overwrites and dy.dtype == x.dtype else x.new_empty(x.shape)
        sums: list[Tensor | None] = [None, None]
        needs = {which: bool(dtype) for which, dtype in needs.items()}  # rounded once, in `finished`
        for start, stop in chunks:
            rows = slice(start, stop)
            before = None if residual is None else residual[rows]
            dx[rows], *part = self.p.norm_bwd(dy[rows], x[rows], weight, eps, kind, residual=before, **needs)
            sums = [grad if total is None else total.add_(grad) for total, grad in zip(sums, part, strict=True)]
        return dx, *sums

    def inputs(self) -> Tensor:
        """Returns h, the branch's input."""
        if not self.modulated:
            return self.norm_fwd(self.x, *self.normed, self.o.dtype) if self.leading else self.x.to(self.o.dtype)
        chunks = self.vector_chunks()
        if len(chunks) == 1:
            n, scale = self.norm_fwd(self.x, *self.normed, self.wide), self.t.norm_scale
            scale = None if scale is None else cast_parameter(scale + 1, n.dtype)
            shift = cast_parameter(self.t.norm_shift, n.dtype)
            for of, part in self.by_sample.parts(n):  # in place, each step rounded as PyTorch rounds it
                if scale is not None:
                    part.mul_(scale[of, None])
                if shift is not None:
                    part.add_(shift[of, None])
            scale = shift = None
            return n.to(self.o.dtype)
        h = self.x.new_empty(self.x.shape, dtype=self.o.dtype)
        for start, stop in chunks:
            h[start:stop] = self.rows(start, stop).inputs()
        return h

    def drop(self, f: Tensor) -> Tensor:
        """Applies residual dropout, forward and backward."""
        rng = self.t.resid_rng
        return f if rng is None else self.p.apply_dropout(f, dropout_arguments(rng, self.o.resid_p), self.first_row)

    def post_normed(self, f: Tensor) -> Tensor:
        """Returns post_norm(f), or f without one."""
        t, o = self.t, self.o
        if not o.post_norm:
            return f
        return self.norm_fwd(f, t.post_norm_weight, t.post_norm_bias, o.post_norm_eps, o.post_norm, self.out_dtype)

    def scaled(self, z: Tensor) -> Tensor:
        """Returns layer_scale * z, forward and backward."""
        z, scale = z.to(self.out_dtype), self.t.layer_scale
        z = z if self.o.branch_factor == 1.0 else z * self.o.branch_factor
        if scale is None:
            return z
        return z * cast_parameter(scale, z.dtype) if scale.dim() == 1 else self.by_sample.multiplied(z, scale)

    def drop_path(self, z: Tensor) -> Tensor:
        """Drops whole samples of z [tokens, e], forward and backward, by dropout of one value for each sample."""
        state, threshold, scale, _ = dropout_arguments(self.t.path_rng, self.o.path_p)
        samples = sample_shape(self.lead)
        saved = self.p.dropout(z.new_ones((samples[0], 1)), state, threshold, 1.0).view(samples) != 0
        if self.is_part:
            rows = torch.arange(self.first_row, self.first_row + z.shape[0], device=z.device)
            return torch.where(saved.view(-1)[rows // (math.prod(self.lead) // samples[0])][:, None], z * scale, 0)
        return torch.where(saved, z.reshape(*self.lead, z.shape[-1]) * scale, 0).view(z.shape)

    def total(self, f: Tensor) -> Tensor:
        """Returns the output before a trailing norm, from the branch's result f."""
        z = self.scaled(self.post_normed(f))
        z = z if self.t.path_rng is None else self.drop_path(z)
        return self.x + z if self.o.residual else z

    def output(self, f: Tensor) -> Tensor:
        """Returns the sublayer's output from the branch's result f."""
        y = self.total(f)
        return self.norm_fwd(y, *self.normed, y.dtype) if self.trailing else y

    def norm_gradients(
        self,
        dy: Tensor,
        read: Tensor,
        need: Collection[str],
        residual: Tensor | None = None,
        overwrites: bool = False,
        norm: str = "norm",
    ) -> Grads:
        """Returns the gradients of a norm by name: of its input `read` as "x", and of its weight and bias. norm: its name."""
        weight, bias = f"{norm}_weight", f"{norm}_bias"
        grads = self.norm_bwd(
            dy,
            read,
            getattr(self.t, weight),
            getattr(self.o, f"{norm}_eps"),
            getattr(self.o, norm),
            residual=residual,
            overwrites=overwrites,
            need_dweight=self.dtype_of(weight, need),
            need_dbias=self.dtype_of(bias, need),
        )
        return dict(zip(("x", weight, bias), grads, strict=True))

    def branch_gradients(self, dy: Tensor, f: Tensor | None, need: Collection[str]) -> tuple[Tensor, Tensor, dict]:
        """Returns (the gradient of x + z, the gradient of the branch's last matmul in its dtype, the gradients of
        parameters between them by name).

        f: the branch's result, if `reads_branch`.
        """
        o, grads = self.o, {}
        if self.trailing:
            grads = self.norm_gradients(dy, self.total(f), need)
            dy = grads.pop("x")
        df = dy if self.t.path_rng is None else self.drop_path(dy)
        if "layer_scale" in need and self.t.layer_scale.dim() == 1:
            dtype = self.dtype_of("layer_scale", need)
            grads["layer_scale"] = eager.column_sum(df * self.post_normed(f), dtype)
        elif "layer_scale" in need:
            total = 0
            for start, stop in self.vector_chunks():
                part, rows = self.rows(start, stop), slice(start, stop)
                total += part.by_sample.sums(df[rows].to(eager.wide_of(df.dtype)) * part.post_normed(f[rows]))
            grads["layer_scale"] = total
        df = self.scaled(df)
        if o.post_norm:
            grads |= self.norm_gradients(df, f, need, norm="post_norm")
            df = grads.pop("x")
        return dy, self.drop(df.to(o.dtype)), grads

    def reads_branch(self, need: Collection[str]) -> bool:
        """Returns whether backward reads the branch's result, which no mode saves."""
        return self.trailing or bool(self.o.post_norm) or "layer_scale" in need

    def needs_dh(self, need: Collection[str]) -> bool:
        """Returns whether any requested gradient needs that of h."""
        return "x" in need or (not self.trailing and not OF_NORM.isdisjoint(need))

    def input_gradients(self, dh: Tensor, dy: Tensor, need: Collection[str]) -> Grads:
        """Returns the gradients of x [tokens, d] and of a leading norm's parameters, from the gradient dh of the branch's
        input. May overwrite dh."""
        residual = dy if self.o.residual else None
        if self.modulated:
            return self.modulated_gradients(dh, residual, need)
        if self.leading:
            return self.norm_gradients(dh, self.x, need, residual, overwrites=True)
        return {"x": dh if residual is None else dh + residual}

    def modulated_gradients(self, dh: Tensor, residual: Tensor | None, need: Collection[str]) -> Grads:
        """Returns `input_gradients` for a norm with norm_scale or norm_shift."""
        chunks, grads = self.vector_chunks(), {}
        if len(chunks) > 1:
            dx = dh if dh.dtype == self.x.dtype else self.x.new_empty(self.x.shape)

            def backward(part, rows):
                return part.modulated_gradients(dh[rows], None if residual is None else residual[rows], need)

            return self.by_chunks(chunks, backward, {*need, "x"}, dx)
        if "norm_scale" in need or "norm_shift" in need:
            d = dh.to(eager.wide_of(self.wide))
            if "norm_shift" in need:
                grads["norm_shift"] = self.by_sample.sums(d)
            if "norm_scale" in need:
                grads["norm_scale"] = self.by_sample.sums(d * self.norm_fwd(self.x, *self.normed, self.wide))
            d = None
        if self.t.norm_scale is not None:
            dh = self.by_sample.multiplied(dh.to(self.wide), self.t.norm_scale + 1)
        return grads | self.norm_gradients(dh, self.x, need, residual)

    def by_chunks(
        self,
        chunks: Chunks,
        backward: Callable[[Any, slice], Grads],
        need: Collection[str],
        dx: Tensor | None = None,
    ) -> Grads:
        """Calls backward(sublayer of some rows, their slice) for each chunk. Returns the gradient of x by rows, in `dx` if
        given, and the sums of the others."""
        totals: Grads = {}

        def of_rows(start, stop):
            grads = backward(self.rows(start, stop), slice(start, stop))
            own = grads.pop("x", None)
            for name, grad in grads.items():
                if grad is not None:
                    totals[name] = grad if name not in totals else totals[name].add_(grad)
            return {"x": own} if "x" in need else {}

        return by_chunks(chunks, of_rows, dx if dx is None else {"x": dx}) | totals

    def finished(self, grads: Grads, need: Collection[str]) -> Grads:
        """Returns the gradients in the dtypes of their parameters, and that of x in x's shape."""
        for name, grad in grads.items():
            if isinstance(grad, Tensor) and name != "x":  # a delayed sum has its dtype
                grads[name] = grad.to(getattr(self.t, name).dtype)
        if "x" in need:
            grads["x"] = grads["x"].to(self.x.dtype).view(*self.lead, self.x.shape[1])
        return grads


class RowsOp(SublayerOp):
    """The op of a sublayer that computes chunks of rows separately. Its Sublayer also defines, for a chunk:

    forward   () -> results by name, the output as "y"
    backward  (dy, saved, need, sums) -> the gradients that are not in sums
    sums      (need, chunks) -> the sums over chunks of the branch's gradients
    """

    Sublayer: type[Sublayer]

    @classmethod
    def compute(cls, x, t, o):
        sublayer = cls.Sublayer(x, t, o)
        saved = by_chunks(sublayer.chunks(), lambda start, stop: sublayer.rows(start, stop).forward())
        return saved.pop("y"), saved

    @classmethod
    def gradients(cls, dy, x, t, o, saved, needs):
        sublayer, need = cls.Sublayer(x, t, o), needed_names(cls.Tensors, needs)
        chunks = sublayer.chunks()
        sums = sublayer.sums(need, len(chunks))

        def backward(part, rows):
            return part.backward(dy[rows], {name: tensor[rows] for name, tensor in saved.items()}, need, sums)

        if len(chunks) == 1:
            grads = sublayer.backward(dy, saved, need, sums)
        else:
            grads = sublayer.by_chunks(chunks, backward, need)
        return sublayer.finished(grads | sums.results(), need)


def in_torch_ops(x: Tensor, t: Any, o: Any) -> Sublayer:
    """Returns the sublayer in differentiable PyTorch ops."""
    return Sublayer(x, t, o._replace(backend="eager", workspace=None), holds=True)


def reference_inputs(x: Tensor, t: Any, o: Any) -> Tensor:
    """Returns h, computed in differentiable PyTorch ops."""
    return in_torch_ops(x, t, o).inputs().view(x.shape)


def reference_output(x: Tensor, f: Tensor, t: Any, o: Any) -> Tensor:
    """Returns the output from the branch's last matmul f, computed in differentiable PyTorch ops."""
    sublayer = in_torch_ops(x, t, o)
    return sublayer.output(sublayer.drop(rows_2d(f))).view(f.shape)


def check_norm(op: str, x: Tensor, name: str, kind: str | None, weight, bias, features: int) -> None:
    """Checks the kind, weight and bias of the norm `name`."""
    if kind is None:
        if weight is not None or bias is not None:
            raise ValueError(f"{op}: {name}_weight and {name}_bias need {name}='layer' or 'rms'")
        return
    check_choice(op, name, kind, (*NORMS, None))
    for which, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_tensor(op, f"{name}_{which}", parameter, x, (features,))


def around(
    op,
    x,
    probe,
    output,
    features,
    updates,
    summed=0,
    *,
    residual,
    training,
    norm,
    norm_eps,
    norm_first,
    post_norm,
    post_norm_eps,
    resid_dropout_p,
    layer_scale,
    drop_path_p,
    recompute,
    workspace,
    **tensors,
) -> tuple[dict, dict]:
    """Checks a sublayer's arguments around its branch; returns them as fields of AroundTensors and of SublayerOptions.

    probe: an empty tensor like x, in the compute dtype. output, features: name and rows of the branch's last weight.
    updates: from `gather_lora`. summed: see `choose_workspace`. tensors: the other fields of AroundTensors.
    """
    if residual and features != x.shape[-1]:
        raise ShapeError(f"{op}: residual needs {output} with {x.shape[-1]} rows, but it has {features}")
    check_probability(op, resid_dropout_p)
    check_probability(op, drop_path_p)
    check_flags(op, norm_first=norm_first, residual=residual, training=training)
    for name, kind, eps in (("norm", norm, norm_eps), ("post_norm", post_norm, post_norm_eps)):
        of_input = name == "norm" and norm_first
        weight, bias = tensors[f"{name}_weight"], tensors[f"{name}_bias"]
        check_norm(op, x, name, kind, weight, bias, x.shape[-1] if of_input else features)
        check_number(op, f"{name}_eps", eps)
    branch_factor = 1.0
    if layer_scale is not None and not isinstance(layer_scale, Tensor):
        check_number(op, "layer_scale", layer_scale)
        branch_factor, layer_scale = float(layer_scale), None
    elif layer_scale is not None:
        check_tensor(op, "layer_scale", layer_scale, x)
        if layer_scale.shape != (features,):
            also = f"be a number, have shape ({features},), or "
            layer_scale = check_vectors(op, x, "layer_scale", layer_scale, features, also)
    for name in ("norm_scale", "norm_shift"):  # as [B, d]
        if (value := tensors[name]) is not None:
            if norm is None or not norm_first:
                raise ValueError(
                    f"{op}: {name} needs a norm before the branch; pass norm='layer' or 'rms' and norm_first=True"
                )
            tensors[name] = check_vectors(op, x, name, value, x.shape[-1])
    of_updates, numbers = updates
    options = dict(
        norm=norm or "",
        norm_eps=float(norm_eps),
        norm_first=norm_first,
        post_norm=post_norm or "",
        post_norm_eps=float(post_norm_eps),
        branch_factor=branch_factor,
        resid_p=float(resid_dropout_p),
        path_p=float(drop_path_p),
        residual=residual,
        recompute=choose_mode(recompute),
        precision=matmul_precision(probe),
        workspace=choose_workspace(op, workspace, probe, summed),
        lora=numbers,
        lora_dtype=update_dtype(x, probe.dtype, of_updates.values()) if numbers else probe.dtype,
        dtype=probe.dtype,
    )
    return tensors | of_updates | {"layer_scale": layer_scale}, options


def called(gather: Callable, apply: Callable) -> Callable[[Declared], Declared]:
    """Decorates a function that declares a sublayer's arguments and has no body, so that a call runs the op.

    gather: (its name, **arguments) -> the op's tensors, without random states, and its options; apply: the result of
    `build`.
    """

    def decorated(declared):
        name, defaults = declared.__name__, {n: p.default for n, p in inspect.signature(declared).parameters.items()}

        @functools.wraps(declared)
        def call(*args, **kwargs):
            declared(*args, **kwargs)  # raises Python's TypeError for wrong arguments
            arguments = defaults | dict(zip(defaults, args, strict=False)) | kwargs
            if (sharded := getattr(ACTIVE.shard, name, None)) is not None:
                return sharded(**arguments)
            t, o = gather(name, **arguments)
            return apply(o, arguments["x"], *drawn(t, o, arguments["x"], arguments["training"]))

        return call

    return decorated
