"""mlp: y = dropout(act(x w1^T + b1)) w2^T + b2, and gated_mlp: y = dropout(act(x wg^T) * (x wu^T)) wd^T (SwiGLU, GEGLU, ...).

Each is one region that saves its input and recomputes the rest in backward. mlp_block adds norms, dropout and the residual
(`residual`); `transformer_layer` runs the same sublayer.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor

from ..dispatch.choices import (
    Bytes,
    check_input,
    check_options,
    check_weight,
    choose_impl,
    choose_mode,
    choose_workspace,
    compute_dtype,
    matmul_precision,
)
from ..dispatch.shard import ACTIVE
from ..registration.functions import across_ranks, build
from ..registration.op import (
    Grads,
    Named,
    Op,
    by_chunks,
    in_order,
    mask,
    needed_names,
    rows_2d,
    token_chunks,
    unflattened,
    with_fields,
)
from ..sublayer.dropout import draw_state
from ..sublayer.lora import NO_UPDATES, LoRA, gather_lora, updates_of
from ..sublayer.residual import (
    AroundTensors,
    RandomStates,
    RowsOp,
    Sublayer,
    SublayerOptions,
    around,
    called,
    reference_inputs,
    reference_output,
)
from .branch import LAYERS, BranchOptions, MLPBranch, Sums, check_branch, reference, saves

# Live rows like the input's, in the accumulate dtype: beside the branch's own, and in an eager norm's backward.
AROUND_BRANCH, AROUND_NORM = 5, 10


@with_fields(AroundTensors, ..., updates_of(LAYERS), RandomStates)
class MLPTensors(NamedTuple):
    """The tensors of an MLP sublayer. Without a gate_weight, fc1 is `up` and fc2 `down`."""

    gate_weight: Tensor | None
    gate_bias: Tensor | None
    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None


OF_BRANCH = frozenset((*MLPTensors.own, *updates_of(LAYERS)._fields))


@with_fields(..., SublayerOptions)
class MLPOptions(NamedTuple):
    """Options of an MLP sublayer. gated: there is a gate_weight. first_column: of the hidden layer, where it is a shard. lora:
    of gate, up and down."""

    gated: bool
    activation: str
    dropout_p: float
    first_column: int
    backend: str


def bytes_around(sublayer: Sublayer, of_branch: int, widest: int) -> int:
    """Returns the bytes of a row's transient tensors. of_branch: those in the branch; widest: the branch's input or output
    features, whichever are more."""
    o = sublayer.o
    row = max(sublayer.x.itemsize, o.dtype.itemsize, 4) * widest
    beside = AROUND_BRANCH * row  # the branch's input and output, and their gradients
    return max(of_branch + beside, AROUND_NORM * row if o.backend == "eager" else beside)


class MLPSublayer(Sublayer):
    """An MLP sublayer of one input, in chunks of tokens."""

    def __init__(self, x: Tensor, t: MLPTensors, o: MLPOptions):
        super().__init__(x, t, o)
        self.branch = MLPBranch(t, self.o, self.x.shape[0], o.dtype, self.holds)

    def row_bytes(self) -> int:
        return bytes_around(self, self.branch.row_bytes(), max(self.x.shape[1], self.t.down_weight.shape[0]))

    def sums(self, need: Collection[str], chunks: int) -> Sums:
        inner = OF_BRANCH.intersection(need)
        return Sums(self.branch, inner | {"x"} if self.needs_dh(need) else inner, chunks)

    def forward(self) -> Named:
        """Computes the sublayer's output, "y", and what its branch saves."""
        f, saved = self.branch.forward_rows(self.inputs(), self.first_row)
        return saved | {"y": self.output(self.drop(f))}

    def backward(self, dy: Tensor, saved: Named, need: Collection[str], sums: Sums) -> Grads:
        """Computes the gradients that are not in `sums`."""
        h, f, branch, start = self.inputs(), None, self.branch, self.first_row
        # no mode saves f: it is recomputed by one matmul from a saved hidden layer, else by all
        if self.reads_branch(need):
            f = self.drop(branch.result_of(h, {} if branch.updates else saved, start))
        dy, df, grads = self.branch_gradients(dy, f, need)
        f = None
        dh = branch.backward_rows(df, h, saved, start, sums)
        h = df = None
        return grads | self.input_gradients(dh, dy, need) if sums.need_dx else grads


class MLPBlock(RowsOp):
    name = "mlp_block"
    Tensors, Options, Sublayer = MLPTensors, MLPOptions, MLPSublayer
    saves = staticmethod(saves)

    @staticmethod
    def in_torch_ops(x, t, o):
        return reference_output(x, reference(reference_inputs(x, t, o), t, o), t, o)


_apply = build(MLPBlock)
across = across_ranks(_apply)


def gather(op, x, *, activation, dropout_p, lora, **others) -> tuple[MLPTensors, MLPOptions]:
    """Checks all arguments of mlp_block; returns the sublayer's tensors, still without random states, and its options."""
    check_options(op, activation, others["recompute"], dropout_p)
    check_input(op, x)
    t = {name: others.pop(name) for name in MLPTensors.own}
    check_branch(op, x, t)
    weights = {layer: t[f"{layer}_weight"] for layer in LAYERS}
    updates = NO_UPDATES if lora is None else gather_lora(op, x, lora, weights)
    probe = x.new_empty(0, dtype=compute_dtype(op, x, *weights.values()))
    (features, hidden), gated = weights["down"].shape, weights["gate"] is not None
    tensors, options = around(op, x, probe, "down_weight", features, updates, weights["up"].numel(), **others)
    o = MLPOptions(
        gated=gated,
        activation=activation,
        dropout_p=float(dropout_p),
        first_column=0,
        backend=choose_impl(op, probe, x.shape[-1], hidden, features, name="gated_mlp" if gated else "mlp"),
        **options,
    )
    return MLPTensors(**t, **tensors), o


@called(gather, _apply)
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
    norm_scale: Tensor | None = None,
    norm_shift: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_first: bool = True,
    post_norm: str | None = None,
    post_norm_weight: Tensor | None = None,
    post_norm_bias: Tensor | None = None,
    post_norm_eps: float = 1e-5,
    lora: Mapping[str, LoRA] | None = None,
    layer_scale: Tensor | float | None = None,
    resid_dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    residual: bool = True,
    training: bool = True,
    recompute: str = "full",
    workspace: Bytes = None,
) -> Tensor:
    """Computes an MLP sublayer with its norms, dropouts and residual as one region.

        h = norm(x) * (1 + norm_scale) + norm_shift
        f = down(dropout(act(up(h))))  or  down(dropout(act(gate(h)) * up(h)))
        z = drop_path(layer_scale * post_norm(dropout(f)))
        y = [x +] z                                           norm_first=False: y = norm([x +] z), h = x

    x [..., d], up_weight and gate_weight [n, d], down_weight [e, n] -> y [..., e].
    norm, post_norm: None, "layer" or "rms".
    norm_scale, norm_shift: a vector for each sample, [B, d] or [B, 1, ..., d] (adaLN: DiT, SD3, Flux).
    layer_scale: a number, a vector [e], or one for each sample, [B, e] or [B, 1, ..., e] (adaLN's gate).
    dropout_p, resid_dropout_p, drop_path_p: dropout of the hidden layer, of f, and of whole samples of z (stochastic depth;
    x [tokens, d] is one sample).
    lora: a LoRA for each of "gate", "up", "down".
    recompute, workspace: see mlp and gated_mlp. Norms are always recomputed. A norm after the branch or a trained
    layer_scale makes backward recompute f: by one matmul, at "full" by all.
    Raises: see Conventions.
    """


# -- mlp and gated_mlp: no norm, residual or dropout around them

BranchTensors = namedtuple("BranchTensors", (*MLPTensors.own, "rng"))


class MLP(Op):
    name = "mlp"
    Options = BranchOptions
    saves = staticmethod(saves)
    first_weights = mask(BranchTensors, "gate_weight", "up_weight")

    @classmethod
    def reads_x(cls, o, needs):
        return o.recompute == "full" or bool(needs & cls.first_weights)

    @staticmethod
    def forward(tensors, o):
        x, *t = tensors
        rows = rows_2d(x)
        branch = MLPBranch(BranchTensors(*t), o, rows.shape[0], rows.dtype)
        chunks = token_chunks(rows.shape[0], branch.row_bytes, branch.o.workspace)
        if len(chunks) == 1:
            y, saved = branch.forward_rows(rows, 0)
        else:
            y = rows.new_empty((rows.shape[0], branch.t.down_weight.shape[0]))
            saved = by_chunks(
                chunks, lambda start, stop: branch.forward_rows(rows[start:stop], start, y[start:stop])[1]
            )
        return unflattened(y, x), saved

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        (x, *t), rows = tensors, rows_2d(dy)
        branch, x = MLPBranch(BranchTensors(*t), o, rows.shape[0], rows.dtype), None if x is None else rows_2d(x)
        chunks = token_chunks(rows.shape[0], branch.row_bytes, branch.o.workspace)
        sums = Sums(branch, needed_names(BranchTensors, needs), len(chunks))
        if len(chunks) == 1:
            dx = branch.backward_rows(rows, x, saved, 0, sums)
        else:
            dx = rows.new_empty((rows.shape[0], branch.t.up_weight.shape[1])) if sums.need_dx else None
            for start, stop in chunks:
                x_rows, dx_rows = (tensor if tensor is None else tensor[start:stop] for tensor in (x, dx))
                of_rows = {name: tensor[start:stop] for name, tensor in saved.items()}
                branch.backward_rows(rows[start:stop], x_rows, of_rows, start, sums, dx_rows)
        grads = sums.results()
        if sums.need_dx:
            grads["x"] = unflattened(dx, dy)
        return in_order(grads, BranchTensors, needs)

    @staticmethod
    def reference(tensors, o):
        x, *t = tensors
        return reference(x, BranchTensors(*t), o)


class GatedMLP(MLP):
    name = "gated_mlp"


_apply_mlp, _apply_gated = build(MLP), build(GatedMLP)


def run(apply, op, x, t, activation, dropout_p, training, recompute, workspace) -> Tensor:
    """Checks the arguments of `mlp` or `gated_mlp` and applies it. t: its tensors, without a random state."""
    if ACTIVE.shard is not None:
        others = dict(dropout_p=dropout_p, training=training, recompute=recompute, workspace=workspace, residual=False)
        layers = {name: tensor for name, tensor in t._asdict().items() if name != "rng"}
        return mlp_block(x, **layers, activation=activation, **others)
    check_options(op, activation, recompute, dropout_p)
    check_input(op, x, jagged=True)
    if op == "mlp":
        check_weight(op, "fc1_weight", t.up_weight, t.up_bias, x, x.shape[-1], "input")
        check_weight(op, "fc2_weight", t.down_weight, t.down_bias, x, t.up_weight.shape[0], "the hidden layer")
    else:
        check_branch(op, x, t._asdict(), needs_gate=True)
    dtype = compute_dtype(op, x, t.gate_weight, t.up_weight, t.down_weight)
    x = x if x.dtype is dtype else x.to(dtype)
    options = BranchOptions(
        gated=t.gate_weight is not None,
        activation=activation,
        dropout_p=float(dropout_p),
        recompute=choose_mode(recompute),
        backend=choose_impl(op, x, x.shape[-1], t.up_weight.shape[0], t.down_weight.shape[0]),
        precision=matmul_precision(x),
        workspace=choose_workspace(op, workspace, x, t.up_weight.numel()),
        first_column=0,
    )
    return apply(options, x, *(t._replace(rng=draw_state(x, dropout_p, training)) if dropout_p else t))


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    *,
    training: bool = True,
    recompute: str = "full",
    workspace: Bytes = None,
) -> Tensor:
    """Computes y = dropout(act(x fc1_weight^T + fc1_bias)) fc2_weight^T + fc2_bias.

    x [..., d], fc1_weight [h, d], fc1_bias [h] or None, fc2_weight [e, h], fc2_bias [e] or None -> y [..., e].

    activation: a name in ckptkern.ACTIVATIONS, such as relu, gelu (erf), gelu_tanh or silu.
    dropout_p, training: dropout after the activation.
    recompute: what is saved besides parameters, and matmuls in forward + backward:

        "none"       x, h (relu); x, z, h (others)     6
        "selective"  x, h (relu); x, z (others)        6
        "full"       x                                 7

    Raises: see Conventions.
    """
    t = BranchTensors(None, None, fc1_weight, fc1_bias, fc2_weight, fc2_bias, None)
    return run(_apply_mlp, "mlp", x, t, activation, dropout_p, training, recompute, workspace)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "silu",
    dropout_p: float = 0.0,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    training: bool = True,
    recompute: str = "full",
    workspace: Bytes = None,
) -> Tensor:
    """Computes y = dropout(act(g) * u) down_weight^T + down_bias, g = x gate_weight^T + gate_bias, u = x up_weight^T + up_bias.

    x [..., d], gate_weight and up_weight [h, d], down_weight [e, h], biases [h], [h], [e] or None -> y [..., e]. SwiGLU is
    activation="silu", GEGLU "gelu" (Shazeer 2020, arXiv 2002.05202).

    dropout_p, training: dropout of the hidden layer.
    recompute: what is saved besides parameters, and matmuls in forward + backward:

        "none"       x, g, u, h    9
        "selective"  x, g, u       9
        "full"       x            11

    Raises: see Conventions.
    """
    t = BranchTensors(gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, None)
    return run(_apply_gated, "gated_mlp", x, t, activation, dropout_p, training, recompute, workspace)
