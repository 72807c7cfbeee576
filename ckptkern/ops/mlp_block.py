"""mlp_block: [norm ->] MLP or gated MLP [-> dropout] [-> + x] as one segment. Its halves also serve `transformer_layer`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import eager
from ..errors import ShapeError
from ._common import (
    check_flags,
    check_input,
    check_number,
    check_probability,
    check_statics,
    check_weight,
    choose_backend,
    choose_level,
    choose_workspace,
    compute_dtype,
    draw_state,
    dropout_arguments,
    matmul_precision,
    primitives,
)  # fmt: skip
from ._op import Op, build, needed
from .attention_block import check_norm, composite_norm, tokens, with_lead
from .gated_mlp import GatedMLP
from .mlp import MLP


class MLPTensors(NamedTuple):
    """The tensors of an MLP half. gate_weight None: a plain MLP, whose fc1 is `up` and fc2 `down`."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    gate_weight: Tensor | None
    gate_bias: Tensor | None
    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None
    rng: Tensor | None
    resid_rng: Tensor | None


class MLPOptions(NamedTuple):
    norm: str
    norm_eps: float
    norm_first: bool
    activation: str
    dropout_p: float
    resid_p: float
    residual: bool
    recompute: str
    backend: str
    precision: str
    workspace: int
    dtype: torch.dtype


TENSOR_SCHEMA = (
    "Tensor? norm_weight, Tensor? norm_bias, Tensor? gate_weight, Tensor? gate_bias, Tensor up_weight, Tensor? up_bias, "
    "Tensor down_weight, Tensor? down_bias, Tensor? rng, Tensor? resid_rng"
)
OPTION_SCHEMA = (
    "str norm, float norm_eps, bool norm_first, str activation, float dropout_p, float resid_p, bool residual, "
    "str recompute, str backend, str precision, int workspace, ScalarType dtype"
)
TENSORS = len(MLPTensors._fields)
OPTIONS = len(MLPOptions._fields)
# the MLP ops' inputs after x, by MLPTensors' names
PLAIN = ("up_weight", "up_bias", "down_weight", "down_bias")
GATED = ("gate_weight", "gate_bias", *PLAIN)


class MLPHalf:
    """What an MLP half computes, for one input."""

    def __init__(self, x: Tensor, t: MLPTensors, o: MLPOptions):
        self.p, self.x, self.t, self.o = primitives(o.backend), tokens(x), t, o
        self.op, self.names = (MLP, PLAIN) if t.gate_weight is None else (GatedMLP, GATED)
        self.arguments = (*(getattr(t, name) for name in self.names), t.rng)
        self.statics = (o.activation, o.dropout_p, o.recompute, o.backend, o.precision, o.workspace)

    def inputs(self) -> Tensor:
        o = self.o
        if o.norm and o.norm_first:
            return self.p.norm_fwd(self.x, self.t.norm_weight, self.t.norm_bias, o.norm_eps, o.norm, o.dtype)
        return self.x.to(o.dtype)

    def drop(self, f: Tensor) -> Tensor:
        if self.t.resid_rng is None:
            return f
        return self.p.dropout(f, *dropout_arguments(self.t.resid_rng, self.o.resid_p))

    def total(self, f: Tensor) -> Tensor:
        return self.x + f if self.o.residual else f


def mlp_half(x: Tensor, t: MLPTensors, o: MLPOptions):
    """(y [tokens, e], kept): what the MLP op keeps at this level, `empty(0)` where it keeps nothing."""
    half = MLPHalf(x, t, o)
    f, *kept = half.op.forward(half.inputs(), *half.arguments, *half.statics)
    y = half.total(half.drop(f))
    if o.norm and not o.norm_first:
        y = half.p.norm_fwd(y, t.norm_weight, t.norm_bias, o.norm_eps, o.norm, y.dtype)
    return y, kept


def mlp_half_backward(dy: Tensor, x: Tensor, t: MLPTensors, o: MLPOptions, kept, needs: int) -> dict:
    """Gradients by name ("x" and MLPTensors' fields) from dy [tokens, e]; kept as the MLP op's backward takes it."""
    half, grads = MLPHalf(x, t, o), {}
    p, need = half.p, lambda name: needed(needs, 0 if name == "x" else 1 + MLPTensors._fields.index(name))
    trailing = bool(o.norm) and not o.norm_first
    h = half.inputs()
    if trailing:
        # the trailing norm reads x + f: its branch is the one thing that no level keeps
        f = half.op.forward(h, *half.arguments, *half.statics[:2], "full", *half.statics[3:])[0]
        dy, grads["norm_weight"], grads["norm_bias"] = p.norm_bwd(
            dy, half.total(half.drop(f)), t.norm_weight, o.norm_eps, o.norm, need_dweight=need("norm_weight"),
            need_dbias=need("norm_bias"),
        )  # fmt: skip
    df = half.drop(dy.to(o.dtype))
    need_dh = need("x") or (not trailing and (need("norm_weight") or need("norm_bias")))
    inner_needs = int(need_dh) | sum(1 << i for i, name in enumerate(half.names, 1) if need(name))
    made = half.op.backward(df, h, *half.arguments, *kept, *half.statics, inner_needs)
    grads |= {
        name: grad
        for i, (name, grad) in enumerate(zip(half.names, made[1:], strict=False), 1)
        if needed(inner_needs, i)
    }
    if need_dh:
        residual = dy if o.residual else None
        if o.norm and o.norm_first:
            grads["x"], grads["norm_weight"], grads["norm_bias"] = p.norm_bwd(
                made[0], half.x, t.norm_weight, o.norm_eps, o.norm, residual=residual, need_dweight=need("norm_weight"),
                need_dbias=need("norm_bias"),
            )  # fmt: skip
        else:
            grads["x"] = made[0] if residual is None else made[0] + residual
    if need("x"):
        grads["x"] = grads["x"].to(x.dtype).view(x.shape)
    for name in ("norm_weight", "norm_bias"):
        if grads.get(name) is not None:
            grads[name] = grads[name].to(getattr(t, name).dtype)
    return grads


def mlp_composite(x: Tensor, t: MLPTensors, o: MLPOptions) -> Tensor:
    """The half in differentiable PyTorch ops."""
    op, names = (MLP, PLAIN) if t.gate_weight is None else (GatedMLP, GATED)
    h = composite_norm(x, t.norm_weight, t.norm_bias, o.norm, o.norm_eps) if o.norm and o.norm_first else x
    arguments = (getattr(t, name) for name in names)
    f = op.composite(
        h.to(o.dtype), *arguments, t.rng, o.activation, o.dropout_p, o.recompute, o.backend, o.precision, o.workspace
    )
    f = eager.composite_dropout(f, dropout_arguments(t.resid_rng, o.resid_p))
    y = x + f if o.residual else f
    return composite_norm(y, t.norm_weight, t.norm_bias, o.norm, o.norm_eps) if o.norm and not o.norm_first else y


class MLPBlock(Op):
    name = "mlp_block"
    inputs = f"Tensor x, {TENSOR_SCHEMA}"
    kept = "Tensor?[] hidden"
    statics = OPTION_SCHEMA
    results = "(Tensor y, Tensor[] hidden)"
    grads = "Tensor[]"

    @classmethod
    def backward_arguments(cls, saved, statics):
        return *saved[: 1 + TENSORS], list(saved[1 + TENSORS :])

    @classmethod
    def input_count(cls, saved, statics):
        return 1 + TENSORS

    @classmethod
    def flat(cls, results):
        return (results[0], *results[1]) if isinstance(results, tuple) else tuple(results)

    @staticmethod
    def forward(x, *args):
        y, kept = mlp_half(x, MLPTensors(*args[:TENSORS]), MLPOptions(*args[TENSORS:]))
        return with_lead(y, x), kept

    @staticmethod
    def forward_fake(x, *args):
        t, o = MLPTensors(*args[:TENSORS]), MLPOptions(*args[TENSORS:])
        return fake_results(x, t, o)

    @staticmethod
    def saved(tensors, outputs, statics, needs):
        o = MLPOptions(*statics)
        _, *kept = outputs
        return [*tensors, *present(kept, o)]

    @staticmethod
    def backward(dy, x, *args):
        t, kept, rest = MLPTensors(*args[:TENSORS]), args[TENSORS], args[TENSORS + 1 :]
        grads = mlp_half_backward(tokens(dy), x, t, MLPOptions(*rest[:OPTIONS]), kept, rest[-1])
        return [grads[name] if needed(rest[-1], i) else None for i, name in enumerate(("x", *MLPTensors._fields))]

    @staticmethod
    def backward_fake(dy, x, *args):
        inputs = (x, *args[:TENSORS])
        return [t.new_empty(t.shape) if needed(args[-1], i) else dy.new_empty(0) for i, t in enumerate(inputs)]

    @staticmethod
    def composite(x, *args):
        return mlp_composite(x, MLPTensors(*args[:TENSORS]), MLPOptions(*args[TENSORS:]))

    @staticmethod
    def forward_flops(x, *args, out_val=None):
        return mlp_half_flops(x, MLPTensors(*args[:TENSORS]))

    @staticmethod
    def backward_flops(dy, x, *args, out_val=None):
        t, kept, rest = MLPTensors(*args[:TENSORS]), args[TENSORS], args[TENSORS + 1 :]
        return mlp_half_backward_flops(dy, x, t, MLPOptions(*rest[:OPTIONS]), kept, rest[-1])


def present(kept, o: MLPOptions) -> list[Tensor | None]:
    """kept with None for the tensors that the MLP op does not keep at this level."""
    if o.recompute == "full":
        return [None] * len(kept)
    if len(kept) == 2 and o.activation == "relu":  # plain: (z, h)
        return [None, kept[1]]
    return [*kept[:-1], kept[-1] if o.recompute == "none" else None]


def fake_results(x: Tensor, t: MLPTensors, o: MLPOptions):
    """(y, kept) of an MLP half, empty."""
    op, names = (MLP, PLAIN) if t.gate_weight is None else (GatedMLP, GATED)
    like = tokens(x).to(o.dtype)
    _, *kept = op.forward_fake(
        like, *(getattr(t, name) for name in names), t.rng, o.activation, o.dropout_p, o.recompute, o.backend,
        o.precision, o.workspace,
    )  # fmt: skip
    kept = [x.new_empty(0) if k is None else k for k in present(kept, o)]
    dtype = torch.promote_types(x.dtype, o.dtype) if o.residual else o.dtype
    return x.new_empty((*x.shape[:-1], t.down_weight.shape[0]), dtype=dtype), kept


def mlp_half_flops(x, t: MLPTensors) -> int:
    weights = sum(w.numel() for w in (t.gate_weight, t.up_weight, t.down_weight) if w is not None)
    return 2 * tokens(x).shape[0] * weights


def mlp_half_backward_flops(dy, x, t: MLPTensors, o: MLPOptions, kept, needs: int) -> int:
    fields = ("x", *MLPTensors._fields)
    need = {name for i, name in enumerate(fields) if needed(needs, i)}
    op, names = (MLP, PLAIN) if t.gate_weight is None else (GatedMLP, GATED)
    trailing = bool(o.norm) and not o.norm_first
    need_dh = bool(need & ({"x"} if trailing else {"x", "norm_weight", "norm_bias"}))
    inner = int(need_dh) | sum(1 << i for i, name in enumerate(names, 1) if name in need)
    flops = op.backward_flops(
        tokens(dy), tokens(x), *(getattr(t, name) for name in names), t.rng, *kept, o.activation, o.dropout_p,
        o.recompute, o.backend, o.precision, o.workspace, inner,
    )  # fmt: skip
    return flops + (mlp_half_flops(x, t) if trailing else 0)


_apply = build(MLPBlock)


def gather(
    op, x, up_weight, up_bias, down_weight, down_bias, activation="gelu", dropout_p=0.0, *, gate_weight=None,
    gate_bias=None, norm=None, norm_weight=None, norm_bias=None, norm_eps=1e-5, norm_first=True, resid_dropout_p=0.0,
    residual=True, training=True, recompute="full", workspace=None,
) -> tuple[MLPTensors, MLPOptions]:  # fmt: skip
    """Checks everything; returns the half's tensors, as yet without random states, and options."""
    check_statics(op, activation, recompute, dropout_p)
    check_probability(op, resid_dropout_p)
    check_flags(op, norm_first=norm_first, residual=residual, training=training)
    check_input(op, x)
    features = x.shape[-1]
    check_weight(op, "up_weight", up_weight, up_bias, x, features, "input")
    if gate_weight is not None:
        check_weight(op, "gate_weight", gate_weight, gate_bias, x, features, "input")
        if gate_weight.shape != up_weight.shape:
            raise ShapeError(
                f"{op}: gate_weight and up_weight must have one shape, but have {tuple(gate_weight.shape)} and "
                f"{tuple(up_weight.shape)}"
            )
    elif gate_bias is not None:
        raise ValueError(f"{op}: gate_bias needs gate_weight")
    check_weight(op, "down_weight", down_weight, down_bias, x, up_weight.shape[0], "the hidden layer")
    if residual and down_weight.shape[0] != features:
        raise ShapeError(f"{op}: residual needs down_weight with {features} rows, but it has {down_weight.shape[0]}")
    check_norm(op, x, norm, norm_weight, norm_bias, features if norm_first else down_weight.shape[0])
    check_number(op, "norm_eps", norm_eps)
    dtype = compute_dtype(op, x, gate_weight, up_weight, down_weight)
    t = MLPTensors(
        norm_weight, norm_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, None, None
    )
    probe = x.new_empty(0, dtype=dtype)
    o = MLPOptions(
        norm or "", float(norm_eps), norm_first, activation, float(dropout_p), float(resid_dropout_p),
        residual, choose_level(recompute), choose_backend(op, probe), matmul_precision(probe),
        choose_workspace(op, workspace, probe), dtype,
    )  # fmt: skip
    return t, o


def drawn(t: MLPTensors, o: MLPOptions, x: Tensor, training: bool) -> MLPTensors:
    """t with the random states: drawn last, so that an error leaves the generator alone."""
    if not training or o.dropout_p == o.resid_p == 0.0:
        return t
    return t._replace(rng=draw_state(x, o.dropout_p, training), resid_rng=draw_state(x, o.resid_p, training))


def mlp_block(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    *,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_first: bool = True,
    resid_dropout_p: float = 0.0,
    residual: bool = True,
    training: bool = True,
    recompute: str = "full",
    workspace: int | str | None = None,
) -> Tensor:
    """An MLP with everything round it, as one segment.

        h = norm(x);  f = down(dropout(act(up(h))))  or  down(dropout(act(gate(h)) * up(h)))
        y = [x +] dropout(f)                                  norm_first=False: y = norm([x +] dropout(f)), h = x

    x [..., d], up_weight and gate_weight [n, d], down_weight [e, n], biases or None -> y [..., e].
    norm: None, "layer" or "rms", with norm_weight and norm_bias or None.
    dropout_p of the hidden layer, resid_dropout_p of the branch: replayed from 16 bytes each.
    recompute, workspace: as in mlp and gated_mlp, with x the block's input: the norm is always rebuilt.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (choices),
    RuntimeError (backend).
    """
    t, o = gather(
        "mlp_block", x, up_weight, up_bias, down_weight, down_bias, activation, dropout_p, gate_weight=gate_weight,
        gate_bias=gate_bias, norm=norm, norm_weight=norm_weight, norm_bias=norm_bias, norm_eps=norm_eps,
        norm_first=norm_first, resid_dropout_p=resid_dropout_p, residual=residual, training=training,
        recompute=recompute, workspace=workspace,
    )  # fmt: skip
    return _apply(tuple(o), x, *drawn(t, o, x, training))
