"""linear_act: y = act(x w^T + b) as one region; and linear_stack: k such layers as one region."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import eager
from ...frozen import Frozen
from ..dispatch.choices import (
    Bytes,
    cast_input,
    check_input,
    check_options,
    check_weight,
    choose_impl,
    choose_mode,
    choose_workspace,
    compose,
    matmul_precision,
    primitives,
)
from ..registration.functions import build
from ..registration.gradients import BiasGrad, WeightGrad
from ..registration.op import (
    Op,
    OpTensors,
    beside_frozen,
    by_chunks,
    cast_parameter,
    needed,
    row_bytes,
    rows_2d,
    token_chunks,
    unflattened,
)
from ..sublayer.lora import reference_linear

X, W, B = range(3)  # places in linear_act's tensors; X in linear_stack's too


class LinearActOptions(NamedTuple):
    activation: str
    recompute: str
    backend: str
    precision: str


class LinearAct(Op):
    name = "linear_act"
    Options = LinearActOptions

    @staticmethod
    def saves(o):
        """Returns the names of what forward saves: for relu at "none" its own output, which the next layer saves anyway."""
        if o.activation == "identity" or o.recompute == "full":
            return ()
        if o.activation == "relu":
            return ("bits",) if o.recompute == "selective" else ("y",)
        return ("z",)

    @staticmethod
    def reads_x(o, needs):
        return needed(needs, W) or (o.recompute == "full" and o.activation != "identity")

    @staticmethod
    def forward(tensors, o):
        x, w, b = tensors
        p, rows, saves = primitives(o.backend), rows_2d(x), LinearAct.saves(o)
        w, b = cast_parameter(w, x.dtype), cast_parameter(b, x.dtype)
        if o.activation == "identity":  # without an epilogue our kernel gains nothing
            y, z, bits = p.linear(rows, w, b), None, None
        else:
            keep = dict(save_z="z" in saves, save_bits="bits" in saves)
            y, z, bits = p.linear_fwd(rows, w, b, o.activation, o.precision, **keep)
        return unflattened(y, x), {"z": z, "bits": bits}

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        (x, w, b), p, whole = tensors, primitives(o.backend), dy
        dy, x = rows_2d(dy), None if x is None else rows_2d(x)
        recomputes = o.activation != "identity" and not saved
        w_ = cast_parameter(w, dy.dtype) if recomputes or needed(needs, X) else None
        db_dtype = needed(needs, B) and b.dtype
        if o.activation == "identity":
            dz, db = dy, eager.column_sum(dy, db_dtype) if db_dtype else None
        elif recomputes:
            dz, db = p.linear_bwd(x, w_, cast_parameter(b, dy.dtype), dy, o.activation, o.precision, db=db_dtype)
        else:
            ((name, read),) = saved.items()
            dz, db = p.act_bwd(dy, rows_2d(read), o.activation, bits=name == "bits", db=db_dtype)
        dw = WeightGrad(w, 1)
        if needed(needs, W):
            dw.add(dz, x)
        return (
            unflattened(p.mm(dz, w_), whole) if needed(needs, X) else None,
            dw.result() if needed(needs, W) else None,
            db,
        )

    @staticmethod
    def reference(tensors, o):
        x, w, b = tensors
        return eager.act(reference_linear(x, w, b), o.activation)

    @classmethod
    def missing_input(cls, dy, tensors, o):
        if o.activation == "identity":  # linear: the gradient of x does not depend on x
            return dy.new_zeros((*dy.shape[:-1], tensors[W].shape[1]))
        return super().missing_input(dy, tensors, o)


_apply_act = build(LinearAct)


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "relu", *, recompute: str = "selective"
) -> Tensor:
    """Computes y = act(x weight^T + bias).

    x [..., k], weight [n, k], bias [n] or None -> y [..., n].

    activation: a name in ckptkern.ACTIVATIONS.
    recompute: what is saved besides parameters, and matmuls in forward + backward ("identity" saves x):

                     relu                                     others    matmuls
        "none"       x, y (no memory of its own in a chain)   x, z      3
        "selective"  x, 1 bit per element                     x, z      3
        "full"       x                                        x         4

    A sparse weight runs torch's own ops.
    Raises: see Conventions.
    """
    check_options("linear_act", activation, recompute)
    check_input("linear_act", x, jagged=True)
    if isinstance(weight, Tensor) and weight.layout is not torch.strided:
        compose("linear_act", f"the kernels cover dense weights, not {weight.layout}")
        return eager.act(torch.nn.functional.linear(x, weight, bias), activation)
    check_weight("linear_act", "weight", weight, bias, x, x.shape[-1], "input")
    x = cast_input("linear_act", x, weight)
    impl = choose_impl("linear_act", x, weight.shape[1], 0, weight.shape[0])
    options = LinearActOptions(
        activation=activation, recompute=choose_mode(recompute), backend=impl, precision=matmul_precision(x)
    )
    return _apply_act(options, x, weight, bias)


# -- linear_stack


def _split(tensors: OpTensors) -> tuple[Tensor, Sequence[Tensor], OpTensors]:
    """Returns x, the weights and the biases."""
    count = len(tensors) // 2
    return tensors[0], tensors[1 : 1 + count], tensors[1 + count :]


def _cast(weights: Sequence[Tensor], biases: OpTensors, dtype: torch.dtype) -> list[tuple]:
    """Casts each layer's weight and bias to a dtype."""
    return [tuple(cast_parameter(t, dtype) for t in layer) for layer in zip(weights, biases, strict=True)]


def _packed(p, weights: Sequence[Tensor], biases: OpTensors, width: int, dtype: torch.dtype):
    """Packs a chain that fits one kernel, with Frozen weights dequantised."""
    weights = [w.dequantize(dtype) if type(w) is Frozen else w for w in weights]
    return p.pack_stack(weights, [b for b in biases if b is not None], width, dtype)


def _narrow_width(o: LinearStackOptions, x: Tensor, weights: Sequence[Tensor]) -> int | None:
    """Returns the padded width of a chain that fits one kernel, or None if each layer is a kernel of its own."""
    if o.backend == "eager" or o.recompute in ("none", "selective"):
        return None
    return primitives(o.backend).stack_width(x, [weights[0].shape[1], *(w.shape[0] for w in weights)])


def _row_bytes(o: LinearStackOptions, weights: Sequence[Tensor], dtype: torch.dtype, on_gpu: bool) -> int:
    """Returns the bytes of a row's transient tensors in backward: every z or h, the last h, and z, dh, dz, h of the current
    layer, with what its activation's gradient holds. Forward takes no more, and the same chunks."""
    widths = [w.shape[0] for w in weights]
    temporaries = eager.ACTIVATIONS[o.activation].temporaries if o.backend == "eager" else 0
    held, summed = sum(widths) + (4 + temporaries) * max(widths), max(sum(w.shape) for w in weights)
    return row_bytes(dtype, on_gpu, held, 0, summed, sum(widths) + 3 * max(widths))


class LinearStackOptions(NamedTuple):
    """Options of linear_stack. layers: the number of weights, and of biases, which may all be None."""

    activation: str
    recompute: str
    backend: str
    precision: str
    workspace: int
    layers: int


class LinearStack(Op):
    """The op of linear_stack. Tensors: x, weights, biases."""

    name = "linear_stack"
    Options = LinearStackOptions
    inference_recompute = "forward"  # "full" saves relu's mask

    @staticmethod
    def saves(o):
        """Returns the names of what forward saves: every layer's h (relu; the last is y) or z (others), or the last layer's
        1-bit mask."""
        if o.recompute in ("none", "selective"):
            names = tuple(f"hidden{i}" for i in range(o.layers))
            return (*names[:-1], "y") if o.activation == "relu" else names
        return ("bits",) if o.recompute == "full" and o.activation == "relu" else ()

    @staticmethod
    def forward(tensors, o):
        x, weights, biases = _split(tensors)
        o, _ = beside_frozen(weights, o, x.dtype)
        p, rows, saves, saved = primitives(o.backend), rows_2d(x), LinearStack.saves(o), {}
        width = _narrow_width(o, x, weights)
        save_bits = "bits" in saves
        if width is not None:
            packed = _packed(p, weights, biases, width, x.dtype)
            last = weights[-1].shape[0]
            y, saved["bits"] = p.stack_fwd(rows, *packed, last, o.activation, o.precision, save_bits=save_bits)
            return unflattened(y, x), saved
        layers = _cast(weights, biases, x.dtype)
        save_z = o.recompute in ("none", "selective") and o.activation != "relu"

        def of_rows(start, stop):
            h, results = rows[start:stop], {}
            for i, (w, b) in enumerate(layers):
                h, z, bits = p.linear_fwd(
                    h, w, b, o.activation, o.precision, save_z=save_z, save_bits=save_bits and i == o.layers - 1
                )
                if f"hidden{i}" in saves:
                    results[f"hidden{i}"] = z.clone() if z is h else z if save_z else h
            return results | {"y": h} | ({"bits": bits} if save_bits else {})

        saved = by_chunks(token_chunks(rows.shape[0], _row_bytes(o, weights, x.dtype, x.is_cuda), o.workspace), of_rows)
        return unflattened(saved["y"], x), saved

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        x, weights, biases = _split(tensors)
        o, _ = beside_frozen(weights, o, dy.dtype)
        p, L, activation, precision = primitives(o.backend), o.layers, o.activation, o.precision
        bits, stored = saved.get("bits"), [rows_2d(t) for name, t in saved.items() if name != "bits"]
        parameters, needs_x, needs_of = tensors[1:], needed(needs, X), [needed(needs, 1 + i) for i in range(2 * L)]
        dy, rows = rows_2d(dy), rows_2d(x)
        width = _narrow_width(o, x, weights)
        if width is not None:
            packed, whole = _packed(p, weights, biases, width, rows.dtype), torch.contiguous_format
            dx, dw, db = p.stack_bwd(rows, *packed, dy, bits, activation, precision, dx=needs_x)
            gradients = [None if dx is None else unflattened(dx, x)]
            of_biases = db if biases[0] is not None else dw  # without biases none is needed
            for grad, t, need in zip((*dw, *of_biases), parameters, needs_of, strict=True):
                part = grad[tuple(map(slice, t.shape))] if need else None
                gradients.append(part if part is None else part.to(t.dtype, copy=True, memory_format=whole))
            return gradients
        layers = _cast(weights, biases, dy.dtype)
        chunks = token_chunks(dy.shape[0], _row_bytes(o, weights, dy.dtype, dy.is_cuda), o.workspace)
        grads = [
            need and (WeightGrad if i < L else BiasGrad)(t, len(chunks))
            for i, (t, need) in enumerate(zip(parameters, needs_of, strict=True))
        ]
        weight_grads, bias_grads = grads[:L], grads[L:]
        sums = [grad and grad.part for grad in bias_grads]
        dx = dy.new_empty((dy.shape[0], x.shape[-1])) if needs_x else None
        lowest = 0 if needs_x else next((i for i in range(L) if weight_grads[i] or bias_grads[i]), L)
        relu = activation == "relu"

        def add(start, stop):
            part, h = slice(start, stop), rows[start:stop]
            # each layer's h (relu) or z (others), and its input where it is known: other activations compute most from z
            before, inputs = [t[part] for t in stored], [h, *[None] * (L - 1)]
            if not stored:  # the last layer is recomputed in its tile, or read from bits
                for w, b in layers[:-1]:
                    h, z, _ = p.linear_fwd(h, w, b, activation, precision, save_z=not relu)
                    before.append(h if relu else z)
                inputs[-1] = h
            if relu:
                inputs[1:] = before[: L - 1]
            if stored or bits is not None:
                read = before[-1] if stored else bits[part]
                dz, db = p.act_bwd(dy[part], read, activation, bits=not stored, db=sums[-1])
            else:
                dz, db = p.linear_bwd(inputs[-1], *layers[-1], dy[part], activation, precision, db=sums[-1])
            for i in range(L - 1, lowest - 1, -1):
                if bias_grads[i]:
                    bias_grads[i].add(db)
                h, dz_below = inputs[i], None
                if i > lowest:
                    wanted = dict(save_h=h is None and bool(weight_grads[i]), h_over_z=not stored, db=sums[i - 1])
                    dz_below, recomputed, db = p.act_grad(
                        dz, layers[i][0], before[i - 1], activation, precision, **wanted
                    )
                    h = recomputed if h is None else h
                elif h is None and weight_grads[i]:
                    h = p.act_fwd(before[i - 1], None, activation)
                if weight_grads[i]:
                    weight_grads[i].add(dz, h)
                if i == 0 and needs_x:
                    p.mm(dz, layers[0][0], out=dx[part])
                dz = dz_below

        for start, stop in chunks if lowest < L else ():
            add(start, stop)
        return [unflattened(dx, x) if needs_x else None, *(grad.result() if grad else None for grad in grads)]

    @staticmethod
    def reference(tensors, o):
        x, weights, biases = _split(tensors)
        for w, b in zip(weights, biases, strict=True):
            x = eager.act(reference_linear(x, w, b), o.activation)
        return x


_apply_stack = build(LinearStack)


def linear_stack(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    activation: str = "relu",
    *,
    recompute: str = "full",
    workspace: Bytes = None,
) -> Tensor:
    """Computes k layers h <- act(h w_l^T + b_l), starting from x, as one region.

    x [..., n_0], k weights [n_{l+1}, n_l], k biases [n_{l+1}] or None -> y [..., n_k]. Widths that are all <= 64 run in one
    kernel per pass; there an infinite hidden value may give NaN.

    activation: a name in ckptkern.ACTIVATIONS, applied after every layer.
    recompute: what is saved besides parameters, and matmuls in forward + backward:

        "none", "selective"  every h (relu) or x and every z (others)              3k
        "full"               x, and 1 bit per element of y (relu) / x (others)     4k - 1 / 4k

    Raises: see Conventions.
    """
    op = "linear_stack"
    check_options(op, activation, recompute)
    check_input(op, x, jagged=True)
    for name, values in (("weights", weights), ("biases", () if biases is None else biases)):
        if isinstance(values, Tensor) or not isinstance(values, Iterable):
            raise TypeError(f"{op}: {name} must be a list of tensors, not {type(values).__name__}")
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
    impl = choose_impl(op, x, max(max(w.shape) for w in weights), 0, features)
    options = LinearStackOptions(
        activation=activation,
        recompute=choose_mode(recompute),
        backend=impl,
        precision=matmul_precision(x),
        workspace=choose_workspace(op, workspace, x, max(w.numel() for w in weights)),
        layers=len(weights),
    )
    return _apply_stack(options, x, *weights, *biases)
