"""The launches of the kernels of linear cross-entropy: functions of a Case and its Inputs."""

from __future__ import annotations

from .launchers import precision_of


def _head(case, inputs):
    """(x, w, b, target, class weights) of an LM head with its loss, its scalars and TokenGradients: with all options for
    "everything"."""
    from ckptkern.eager import Head
    from ckptkern.results import TokenGradients

    everything, wide = case.activation == "everything", "float32"
    M, K, V = (inputs.sizes(case)[letter] for letter in "MKN")
    x, w = inputs(M, K, dtype=case.dtype), inputs(V, K, dtype=case.dtype, scale=K**-0.5)
    bias = None if case.activation == "plain" else inputs(V, dtype=x.dtype)
    target, weights = inputs(M, dtype="int64"), inputs(V, dtype=wide) if everything else None
    ignored = -100 if case.op == "cross_entropy_fwd" else 3  # forward gives something for ignored tokens, too
    head = Head(0.5, 5.0 * everything, inputs.first_row + ignored, inputs.first_row, precision_of(case))
    gradients = TokenGradients(
        *(inputs(M, dtype=wide) if is_given else None for is_given in (True, True, everything, everything))
    )
    return (x, w, bias, target, weights), head, gradients


def _fwd(case, inputs):
    tensors, head, _ = _head(case, inputs)
    keep = case.extras or case.activation == "saved"
    everything = case.activation == "everything"
    outputs = inputs.backend.cross_entropy_fwd(
        *tensors, head, weighted=everything, keep=keep, entropy=everything, arg_max=everything, logits=everything
    )
    # what exponentials are relative to differs between backends
    return *outputs.statistics, outputs.logits if head.softcap else None, outputs.z


def _bwd(case, inputs):
    (x, w, *others), head, gradients = _head(case, inputs)
    dz, lse = inputs(len(x), len(w), dtype=x.dtype), inputs(len(x), dtype="float32")
    return dz, inputs.backend.cross_entropy_bwd(x, w, *others, lse, gradients, head, dz, db=case.extras)


def _saved_bwd(case, inputs):
    (x, w, _, *others), head, gradients = _head(case, inputs)
    M, V, wide = len(x), len(w), "float32"
    saved, dz = (inputs(M, V, dtype=x.dtype) for _ in range(2))
    lse, z_t, part = (inputs(M, dtype=wide) for _ in range(3))
    parts = None if head.softcap else part.expand(inputs.backend.slice_count(x, V), M).contiguous()
    db = inputs.backend.cross_entropy_saved_bwd(
        saved, parts, z_t, inputs.first_row % 1024, *others, lse, gradients, head, dz, db=case.extras
    )
    return dz, db


LAUNCHES = {"cross_entropy_fwd": _fwd, "cross_entropy_bwd": _bwd, "cross_entropy_saved_bwd": _saved_bwd}
MATMULS = ("cross_entropy_fwd", "cross_entropy_bwd")
# What takes an activation's place in launchers without one, the heaviest first.
VARIANTS = {
    "cross_entropy_fwd": ("everything", "plain", "saved"),
    "cross_entropy_bwd": ("everything", "plain"),
    "cross_entropy_saved_bwd": ("everything", "plain"),
}
