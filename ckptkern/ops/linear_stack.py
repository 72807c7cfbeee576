"""linear_stack: k layers of Linear + activation as one segment: only its input lives until backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .. import eager
from ._checks import check_input, check_statics, check_weight
from ._choices import cast_input, choose_backend, choose_level, choose_workspace, matmul_precision, primitives
from ._gradients import BiasGrad, WeightGrad, row_bytes, token_chunks
from ._needs import needed
from ._op import Op, build
from ._rows import cast_parameter, row_count, rows_2d, unflattened

X = 0


def _kept(activation: str, recompute: str) -> tuple[bool, bool]:
    """(keep every layer's h (relu) or z (others), keep the 1-bit mask of the last layer)."""
    return recompute in ("none", "selective"), recompute == "full" and activation == "relu"


def _cast_all(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [cast_parameter(t, dtype) for t in tensors]


def _narrow_backward(p, width, dy, rows, weights, biases, bits, activation, precision, needs):
    """`LinearStack.backward` of a chain that fits one kernel, for rows of tokens."""
    L = len(weights)
    packed = p.pack_stack(weights, biases, width, rows.dtype)
    dx, dw, db = p.stack_bwd(rows, *packed, dy, bits, activation, precision, dx=needed(needs, X))
    dws = [
        dw[i, : w.shape[0], : w.shape[1]].to(w.dtype, copy=True, memory_format=torch.contiguous_format)
        if needed(needs, 1 + i) else None for i, w in enumerate(weights)
    ]  # fmt: skip
    dbs = [
        db[i, : w.shape[0]].to(biases[i].dtype, copy=True) if needed(needs, 1 + L + i) else None
        for i, w in enumerate(weights)
    ]
    return dx, dws, dbs


def _narrow_width(backend: str, recompute: str, x: Tensor, weights: Sequence[Tensor]) -> int | None:
    """Padded width of a chain that fits one kernel, or None if each layer is a kernel of its own."""
    if backend == "eager" or recompute in ("none", "selective"):
        return None
    return primitives(backend).stack_width(x, [weights[0].shape[1], *(w.shape[0] for w in weights)])


class LinearStack(Op):
    """Flat tensors: x, L weights, L biases (None where there are none)."""

    name = "linear_stack"
    inference_level = "forward"  # "full" keeps relu's mask
    inputs = "Tensor x, Tensor[] weights, Tensor[] biases"
    kept = "Tensor? bits, Tensor[] hidden"
    statics = "str activation, str recompute, str backend, str precision, int workspace"
    results = "(Tensor y, Tensor bits, Tensor[] hidden)"
    grads = "(Tensor dx, Tensor[] dw, Tensor[] db)"

    @classmethod
    def arguments(cls, tensors):
        L = (len(tensors) - 1) // 2
        return tensors[0], list(tensors[1 : L + 1]), [b for b in tensors[L + 1 :] if b is not None]

    @classmethod
    def tensors(cls, inputs):
        x, weights, biases = inputs
        return x, *weights, *(biases or [None] * len(weights))

    @classmethod
    def input_count(cls, saved, statics):
        per_layer = 3 if _kept(*statics[:2])[0] else 2
        return (len(saved) - 2) // per_layer * 2 + 1

    @classmethod
    def backward_arguments(cls, saved, statics):
        count = cls.input_count(saved, statics)
        return *cls.arguments(saved[:count]), saved[count], list(saved[count + 1 :])

    @classmethod
    def flat(cls, results):
        first, second, third = results
        return (first, *second, *third) if isinstance(second, list) else (first, second, *third)

    @staticmethod
    def forward(x, weights, biases, activation, recompute, backend, precision, workspace):
        p, rows = primitives(backend), rows_2d(x)
        keep_hidden, keep_bits = _kept(activation, recompute)
        out_features = weights[-1].shape[0]
        width = _narrow_width(backend, recompute, x, weights)
        hidden = []
        if width is not None:
            packed = p.pack_stack(weights, biases, width, x.dtype)
            y, bits = p.stack_fwd(rows, *packed, out_features, activation, precision, keep_bits=keep_bits)
        else:
            weights, biases = _cast_all(weights, x.dtype), _cast_all(biases, x.dtype) or [None] * len(weights)
            y, last = rows, len(weights) - 1
            for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
                y, z, bits = p.linear_fwd(
                    y, w, b, activation, precision, keep_z=keep_hidden and activation != "relu",
                    keep_bits=keep_bits and i == last,
                )  # fmt: skip
                if activation != "relu" and keep_hidden:
                    hidden.append(z.clone() if z is y else z)
                elif keep_hidden and i != last:
                    hidden = [*hidden, y]  # Dynamo of torch 2.11 makes hidden a tuple
        return unflattened(y, x.shape[:-1]), bits if keep_bits else None, hidden

    @staticmethod
    def forward_fake(x, weights, biases, activation, recompute, *statics):
        keep_hidden, keep_bits = _kept(activation, recompute)
        M, N = row_count(x), weights[-1].shape[0]
        hidden = []
        if keep_hidden:
            hidden = [x.new_empty((M, w.shape[0])) for w in (weights[:-1] if activation == "relu" else weights)]
        return (
            x.new_empty((*x.shape[:-1], N)),
            x.new_empty((M, (N + 7) // 8), dtype=torch.uint8) if keep_bits else x.new_empty(0),
            hidden,
        )

    @staticmethod
    def saved(tensors, outputs, statics, needs):
        keep_hidden, keep_bits = _kept(*statics[:2])
        y, bits, *hidden = outputs
        if keep_hidden and statics[0] == "relu":
            hidden = [*hidden, y]  # Dynamo of torch 2.11 makes hidden a tuple
        return [*tensors, bits if keep_bits else None, *hidden]

    @staticmethod
    def backward(
        dy, x, weights, biases, bits, hidden, activation, recompute, backend, precision, workspace, needs
    ):  # fmt: skip
        p, L = primitives(backend), len(weights)
        M = row_count(dy)
        dy, rows = rows_2d(dy), rows_2d(x)
        width = _narrow_width(backend, recompute, x, weights)
        need_dw = [needed(needs, 1 + i) for i in range(L)]
        need_db = [needed(needs, 1 + L + i) for i in range(L)]
        if width is not None:
            dx, *others = _narrow_backward(p, width, dy, rows, weights, biases, bits, activation, precision, needs)
            return None if dx is None else unflattened(dx, x.shape[:-1]), *others
        ws, bs = _cast_all(weights, dy.dtype), _cast_all(biases, dy.dtype) or [None] * L
        stored = [rows_2d(h) for h in hidden]
        # every z or h, the last h, and z, dh, dz, h of the current layer, with what its activation's gradient holds
        widths = [w.shape[0] for w in weights]
        temporaries = eager.ACTIVATIONS[activation].temporaries if backend == "eager" else 0
        held, summed = sum(widths) + (4 + temporaries) * max(widths), max(sum(w.shape) for w in weights)
        chunks = token_chunks(M, row_bytes(dy, held, 0, summed, sum(widths) + 3 * max(widths)), workspace)
        weight_grads = [WeightGrad(w, len(chunks)) for w in weights]
        bias_grads = [BiasGrad(b.dtype, len(chunks)) for b in biases] or [None] * L
        sums = [need and grad.part for need, grad in zip(need_db, bias_grads, strict=True)]
        dx = dy.new_empty((M, x.shape[-1])) if needed(needs, X) else None
        lowest = 0 if needed(needs, X) else next((i for i in range(L) if need_dw[i] or need_db[i]), L)
        relu = activation == "relu"

        def add(start: int, stop: int) -> None:
            part = slice(start, stop)
            dy_rows = dy[part]
            # kept[i]: layer i's h (relu) or z (others) for i < L - 1; layer L - 1 is rebuilt in its tile, or read from bits
            if stored:
                kept = [h[part] for h in stored]
                h_last = kept[L - 2] if relu and L > 1 else None
                dz, db = p.act_bwd(dy_rows, kept[L - 1], activation, db=sums[L - 1])
            else:
                kept, h = [], rows[part]
                for w, b in zip(ws[:-1], bs[:-1], strict=True):
                    h, z, _ = p.linear_fwd(h, w, b, activation, precision, keep_z=not relu)
                    kept.append(h if relu else z)
                h_last = h
                if bits is not None:
                    dz, db = p.act_bwd(dy_rows, bits[part], activation, bits=True, db=sums[L - 1])
                else:
                    dz, db = p.linear_bwd(h, ws[-1], bs[-1], dy_rows, activation, precision, db=sums[L - 1])
            for i in range(L - 1, lowest - 1, -1):
                if need_db[i]:
                    bias_grads[i].add(db)
                if i == 0:
                    if need_dw[0]:
                        weight_grads[0].add(dz, rows[part])
                    if needed(needs, X):
                        torch.mm(dz, ws[0], out=dx[part])
                    break
                h = kept[i - 1] if relu else h_last if i == L - 1 else None
                dz_below = None
                if i == lowest and h is None and need_dw[i]:
                    h = p.act_fwd(kept[i - 1], None, activation)
                elif i > lowest:
                    dz_below, made, db = p.act_grad(
                        dz, ws[i], kept[i - 1], activation, precision, keep_h=h is None and need_dw[i],
                        h_over_z=not stored, db=sums[i - 1],
                    )  # fmt: skip
                    h = made if h is None else h
                if need_dw[i]:
                    weight_grads[i].add(dz, h)
                dz = dz_below

        for start, stop in chunks if lowest < L else ():
            add(start, stop)
        return (
            unflattened(dx, x.shape[:-1]) if needed(needs, X) else dx,
            [grad.result() if need else None for grad, need in zip(weight_grads, need_dw, strict=True)],
            [grad.result() if need else None for grad, need in zip(bias_grads, need_db, strict=True)],
        )

    @staticmethod
    def backward_fake(dy, x, weights, biases, bits, hidden, *statics_and_needs):
        needs, L = statics_and_needs[-1], len(weights)
        return (
            dy.new_empty(x.shape if needed(needs, X) else 0),
            [w.new_empty(w.shape) if needed(needs, 1 + i) else dy.new_empty(0) for i, w in enumerate(weights)],
            [biases[i].new_empty(biases[i].shape) if needed(needs, 1 + L + i) else dy.new_empty(0) for i in range(L)],
        )

    @staticmethod
    def composite(x, weights, biases, activation, *statics):
        for w, b in zip(_cast_all(weights, x.dtype), _cast_all(biases, x.dtype) or [None] * len(weights), strict=True):
            x = eager.act(torch.nn.functional.linear(x, w, b), activation)
        return x

    @staticmethod
    def forward_flops(x, weights, *args, out_val=None):
        return 2 * row_count(x) * sum(w.numel() for w in weights)

    @staticmethod
    def backward_flops(dy, x, weights, biases, bits, hidden, activation, *statics_and_needs, out_val=None):
        needs, L = statics_and_needs[-1], len(weights)
        lowest = 0 if needed(needs, X) else min(
            (i for i in range(L) if needed(needs, 1 + i) or needed(needs, 1 + L + i)), default=L
        )  # fmt: skip
        rebuilt = [] if hidden or lowest == L else weights[:-1] if bits is not None else weights
        chain = [w for i, w in enumerate(weights) if i > lowest or needed(needs, X)]
        own = [w for i, w in enumerate(weights) if needed(needs, 1 + i)]
        return 2 * row_count(dy) * sum(w.numel() for group in (rebuilt, chain, own) for w in group)


_apply = build(LinearStack)


def linear_stack(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    activation: str = "relu",
    *,
    recompute: str = "full",
    workspace: int | str | None = None,
) -> Tensor:
    """k layers h <- act(h w_l^T + b_l), starting from x, as ONE segment.

    x [..., n_0], weights: k tensors [n_{l+1}, n_l], biases: k tensors [n_{l+1}] or None -> y [..., n_k] in x's dtype
    (autocast's inside torch.autocast). float16, bfloat16, float32; float64 in PyTorch ops. Chains whose widths are all
    <= 64 run in one kernel forward and one backward. There, a token whose hidden layer overflows to inf may give NaN where
    separate layers would not.

    activation: a name in ckptkern.ACTIVATIONS, after every layer, the last included.
    recompute: what is kept for backward besides parameters, and the products run, forward + backward:

        "none", "selective"  every h (relu) or x and every z (others)              3k
        "full"               x, and 1 bit per element of y (relu) / x (others)     4k - 1 / 4k

    workspace: bytes of transient memory in backward, an int or "64MiB"; tokens are taken in equal chunks that fit, of 128 at
    least. Default: 1/32 of the GPU's memory but at least 256 MiB; 1 GiB elsewhere. The float32 sums of the weights' gradients,
    which more than one chunk needs, are not counted.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (activation, level,
    workspace), RuntimeError (backend).
    """
    op = "linear_stack"
    check_statics(op, activation, recompute)
    check_input(op, x, jagged=True)
    for name, given in (("weights", weights), ("biases", () if biases is None else biases)):
        if isinstance(given, Tensor) or not isinstance(given, Iterable):
            raise TypeError(f"{op}: {name} must be a list of tensors, not {type(given).__name__}")
    weights = list(weights)
    biases = [None] * len(weights) if biases is None else list(biases)
    if not weights:
        raise ValueError(f"{op}: at least one weight is needed")
    if len(biases) != len(weights):
        raise ValueError(f"{op}: {len(weights)} weights need as many biases, but got {len(biases)}")
    if any(b is None for b in biases) and any(b is not None for b in biases):
        raise ValueError(f"{op}: either every layer has a bias or none has")
    features = x.shape[-1]
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        check_weight(op, f"weights[{i}]", w, b, x, features, "input" if i == 0 else f"weights[{i - 1}]'s output")
        features = w.shape[0]
    x = cast_input(op, x, *weights)
    statics = (
        activation, choose_level(recompute), choose_backend(op, x), matmul_precision(x), choose_workspace(op, workspace, x),
    )  # fmt: skip
    return _apply(statics, x, *weights, *biases)
