"""The MLP sublayer of a layer: MLP or gated MLP and what is around it (`residual`). `mlp_block` and `transformer_layer` are
made of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from ..registration.gradients import by_chunks
from ..registration.op import needed_names
from ..sublayer.lora import names_of
from ..sublayer.residual import Sublayer, reads_branch, reference_inputs, reference_output
from .branch import LAYERS, MLPBranch, Sums, reference

# Rows like the input's, in the dtype of its sums, that are alive beside the branch's own, and in a norm's backward (eager).
AROUND_BRANCH, AROUND_NORM = 5, 10
OF_BRANCH = frozenset(
    name for layer in LAYERS for name in (f"{layer}_weight", f"{layer}_bias", *names_of(layer))
)  # MLPTensors' fields


class MLPTensors(NamedTuple):
    """The tensors of an MLP sublayer. gate_weight None: a plain MLP, whose fc1 is `up` and fc2 `down`. LAYER_lora_a,
    LAYER_lora_b: low-rank updates (`low_rank`)."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    norm_scale: Tensor | None
    norm_shift: Tensor | None
    post_norm_weight: Tensor | None
    post_norm_bias: Tensor | None
    layer_scale: Tensor | None
    gate_weight: Tensor | None
    gate_bias: Tensor | None
    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None
    gate_lora_a: Tensor | None
    gate_lora_b: Tensor | None
    up_lora_a: Tensor | None
    up_lora_b: Tensor | None
    down_lora_a: Tensor | None
    down_lora_b: Tensor | None
    rng: Tensor | None = None
    resid_rng: Tensor | None = None
    path_rng: Tensor | None = None
    lora_rng: Tensor | None = None


class MLPOptions(NamedTuple):
    """The sublayer's other arguments. gated: is there a gate_weight? norm, post_norm "" is none; first_column: of the hidden
    layer, where it is a shard; lora: scale and dropout_p of the low-rank update of each of gate, up and down."""

    gated: bool
    norm: str
    norm_eps: float
    norm_first: bool
    post_norm: str
    post_norm_eps: float
    branch_factor: float
    activation: str
    dropout_p: float
    first_column: int
    resid_p: float
    path_p: float
    residual: bool
    recompute: str
    backend: str
    precision: str
    workspace: int
    lora: tuple[float, ...]
    lora_dtype: torch.dtype
    dtype: torch.dtype


def bytes_around(sublayer: Sublayer, of_branch: int, widest: int) -> int:
    """Returns bytes of a row's transient tensors. of_branch: those in the branch; widest: features of what it reads or
    gives."""
    o = sublayer.o
    row = max(sublayer.x.dtype.itemsize, o.dtype.itemsize, 4) * widest
    beside = AROUND_BRANCH * row  # what the branch reads and gives, and their gradients
    return max(of_branch + beside, AROUND_NORM * row if o.backend == "eager" else beside)


class MLPSublayer(Sublayer):
    """What an MLP sublayer computes, for one input, in chunks of tokens."""

    def __init__(self, x: Tensor, t: MLPTensors, o: MLPOptions):
        super().__init__(x, t, o)
        self.branch = MLPBranch(t, self.o, self.x.shape[0], o.dtype, self.holds)

    def row_bytes(self) -> int:
        return bytes_around(self, self.branch.row_bytes(), max(self.x.shape[1], self.t.down_weight.shape[0]))

    def forward(self) -> dict[str, Tensor]:
        """The sublayer's output, "y", and what its branch saves."""
        f, saved = self.branch.forward_rows(self.inputs(), self.first_row)
        return saved | {"y": self.output(self.drop(f))}

    def backward(
        self, dy: Tensor, saved: dict[str, Tensor], need: Collection[str], sums: Sums
    ) -> dict[str, Tensor | None]:
        """The gradients that are not in `sums`."""
        h, f, branch, start = self.inputs(), None, self.branch, self.first_row
        if reads_branch(
            self.o, need
        ):  # which no mode saves: by one matmul from the hidden layer if that was saved, or all
            whole = branch.updates or not saved
            f = self.drop(branch.forward_rows(h, start)[0] if whole else branch.result_of(saved, start))
        dy, df, grads = self.branch_gradients(dy, f, need)
        f = None
        dh = branch.backward_rows(df, h, saved, start, sums)
        h = df = None
        return grads | self.input_gradients(dh, dy, need) if sums.need_dx else grads


def mlp_sublayer(x: Tensor, t: MLPTensors, o: MLPOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """(y [tokens, e], what the branch saves)."""
    sublayer = MLPSublayer(x, t, o)
    saved = by_chunks(sublayer.chunks(), lambda start, stop: sublayer.rows(start, stop).forward())
    return saved.pop("y"), saved


def mlp_sublayer_backward(
    dy: Tensor, x: Tensor, t: MLPTensors, o: MLPOptions, saved: dict[str, Tensor], needs: int
) -> dict:
    """Gradients by name ("x" and MLPTensors' fields) from dy [tokens, e]."""
    sublayer, need = MLPSublayer(x, t, o), needed_names(MLPTensors, needs)
    chunks = sublayer.chunks()
    inner = need.intersection(OF_BRANCH) | ({"x"} if sublayer.needs_dh(need) else set())
    sums = Sums(sublayer.branch, inner, len(chunks))

    def backward(part: MLPSublayer, rows: slice) -> dict[str, Tensor | None]:
        if part is sublayer:
            return part.backward(dy, saved, need, sums)
        return part.backward(dy[rows], {name: one[rows] for name, one in saved.items()}, need, sums)

    return sublayer.finished(sublayer.by_chunks(chunks, backward, need) | sums.results(), need)


def mlp_reference(x: Tensor, t: MLPTensors, o: MLPOptions) -> Tensor:
    """The sublayer in differentiable PyTorch ops."""
    return reference_output(x, reference(reference_inputs(x, t, o), t, o), t, o)
