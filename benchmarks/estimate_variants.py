"""Counts a training step of a language model in each way to save memory: what users of PyTorch do, and what ckptkern does.

Nothing is computed. A few layers run on meta tensors, and every other layer adds what one more of its kind adds. Attention
counts as a fused kernel, which writes no scores. Parameters, their gradients and the optimizer's state are counted apart.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from .. import ops
from ..conversion.groups import group_layers
from ..conversion.recorder import Step, step_of
from ..conversion.report import Row
from ..extras import missing
from ..ops.dispatch.choices import workspace
from ..planning.timing import RATES
from . import estimate_liger as liger
from .baselines import SDPA_FORWARDS, checkpoint_options, chunked_loss, whole_loss
from .compiling import Chip, meta_as_on
from .estimate_model import forwards_of, layers_of, only

META = torch.device("meta")
ATTENTION = *SDPA_FORWARDS, torch.ops.ckptkern.attention_fwd.default  # in the body of ours, and as a whole


class Counted(NamedTuple):
    """A step's peaks before the layers' backward, in it, and after it; its bytes between forward and backward; and FLOPs of
    matmuls. Each grows linearly with the number of layers, but the highest of the peaks need not."""

    before: float
    layers: float
    after: float
    saved: float
    flops: float

    @property
    def peak(self) -> float:
        return max(self.before, self.layers, self.after)

    def plus(self, times: float, more: Counted, less: Counted) -> Counted:
        return Counted(*(a + times * (b - c) for a, b, c in zip(self, more, less, strict=True)))


class Variant(NamedTuple):
    """A way to save memory. name: in tables. is_ours: on the converted model. recompute: its mode. bounded: within the
    bounded workspace. every: layers per region. checkpoints: torch's activation checkpoints around layers. saves_attention:
    selective ones that save attention's result. chunks: the loss in checkpointed chunks of tokens. liger: Liger's kernels
    and loss."""

    name: str
    is_ours: bool = False
    recompute: str = "selective"
    bounded: bool = False
    every: int = 1
    checkpoints: bool = False
    saves_attention: bool = False
    chunks: bool = False
    liger: bool = False

    def named(self, layers: nn.ModuleList) -> str:
        """Returns the name, which says so if only the loss is Liger's."""
        return f"{self.name}'s loss" if self.liger and not liger.fits(layers) else self.name


VARIANTS = {
    "eager": Variant("eager PyTorch"),
    "checkpoint": Variant("checkpointing", checkpoints=True),
    "sac": Variant("selective checkpointing", checkpoints=True, saves_attention=True),
    "checkpoint-chunks": Variant("checkpointing, chunked loss", checkpoints=True, chunks=True),
    "sac-chunks": Variant("selective, chunked loss", checkpoints=True, saves_attention=True, chunks=True),
    "liger": Variant("Liger", liger=True),
    "checkpoint-liger": Variant("checkpointing, Liger", checkpoints=True, liger=True),
    "ckptkern": Variant("ckptkern, default", True),
    "ckptkern-full": Variant('ckptkern, "full"', True, "full"),
    "ckptkern-bounded": Variant('ckptkern, "full", bounded', True, "full", True),
    "ckptkern-every": Variant("ckptkern, bounded, every=4", True, "full", True, 4),
}


SLOW = ("ckptkern-every",)  # to count: a region of 4 layers takes 12 of them


class Answers(TorchDispatchMode):
    """Answers True where a model branches on a meta tensor's value, as in the usual batch: consecutive positions, no
    padding."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def fused_attention() -> contextlib.AbstractContextManager:
    """Runs torch's scaled_dot_product_attention as on a GPU, where it saves q, k, v, o and lse; on meta it writes scores
    out."""
    return mock.patch.object(F, "scaled_dot_product_attention", ops.scaled_dot_product_attention)


class Training(nn.Module):
    """A model and its loss of token ids, which are also the labels."""

    def __init__(self, model: nn.Module, variant: Variant):
        super().__init__()
        self.model, self.variant = model, variant

    def forward(self, ids: Tensor) -> Tensor:
        if self.variant.chunks:
            return chunked_loss(self.model, ids)
        if not self.variant.liger:
            return whole_loss(self.model, ids)
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        targets = F.pad(ids[:, 1:], (0, 1), value=-100).flatten()  # the label of the last does not count
        return liger.Loss.apply(hidden, self.model.get_output_embeddings().weight, targets)


@contextlib.contextmanager
def prepared(model: nn.Module, variant: Variant) -> Iterator[nn.Module]:
    """Yields the model in this variant, with its loss."""
    name, layers = layers_of(model)
    with contextlib.ExitStack() as stack:
        options = checkpoint_options(*(ATTENTION if variant.saves_attention else ()))
        for layer in layers if variant.checkpoints else ():
            layer.forward = functools.partial(checkpoint, layer.forward, **options)
            stack.callback(delattr, layer, "forward")
        if variant.liger:
            stack.enter_context(liger.patched(model, layers))
        forwards = list(forwards_of(model))
        for forward in forwards:
            forward.recompute = variant.recompute
        if variant.every > 1:
            rows = [Row(f"{name}.{i}", type(layer).__name__, "converted") for i, layer in enumerate(layers)]
            group_layers(model, rows, variant.every)
        try:
            yield Training(model, variant)
        finally:
            for forward in forwards:
                forward.group = None


CHIPS = {"h200": (90, 132, 232448), "h100": (90, 132, 232448), "a100": (80, 108, 166912)}


def on(gpu: str | None) -> contextlib.AbstractContextManager:
    """Lets ckptkern's ops allocate as their kernels on this GPU do; without a GPU or Triton, as with PyTorch's ops."""
    if gpu is None or missing("triton"):
        return contextlib.nullcontext()
    return meta_as_on(Chip(*CHIPS[gpu], RATES[gpu].memory), lambda kernel, grid, args, kwargs: None)


def count(model: nn.Module, variant: Variant, batch: int, tokens: int, size: int, gpu: str | None = None) -> Counted:
    """Counts a step of the model as it is. size: bytes of the workspace. gpu: as whose kernels ckptkern's ops allocate;
    None: as PyTorch's ops, which have all matmuls."""
    ids = torch.empty(batch, tokens, dtype=torch.int64, device=META)
    with contextlib.ExitStack() as stack:
        training = stack.enter_context(prepared(model, variant))
        if variant.is_ours:
            stack.enter_context(on(gpu))
        for context in (fused_attention(), workspace(size), Answers(), warnings.catch_warnings()):
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        layers = layers_of(model)[1]
        ends = [(str(i), layers[i]) for i in sorted({0, len(layers) - 1})]
        step = step_of(training, ((ids,), {}), ends, there=training.parameters())
    saved = next(stretch.start for stretch in step.stretches if stretch.backward)
    return Counted(*peaks_of(step, len(ends) - 1), saved, step.flops)


def peaks_of(step: Step, last: int) -> tuple[int, int, int]:
    """Returns the peaks before, in and after the backward of layers. last: region of the last layer. The first layer, region
    0, may have no backward."""
    heights = [stretch.highest for stretch in step.stretches]
    backward = [i for i, stretch in enumerate(step.stretches) if stretch.backward and stretch.region is not None]
    begin = next(i for i in backward if step.stretches[i].region == last)
    end = max((i + 1 for i in backward if step.stretches[i].region == 0), default=len(heights))
    return max(heights[:begin]), max(heights[begin:end]), max(heights[end:], default=0)


def depths(first: Sequence[int], unit: int) -> tuple[list[int], list[tuple[list[int], float]]]:
    """Returns the indices of the layers to count, and a list of (indices of further layers, how many times to add what they
    add).

    first: for each layer, the index of the first of its kind. unit: layers per region.
    """
    kinds = dict.fromkeys(first)
    base = list(range(min(len(first), max(2 * unit, 1 + max(kinds)))))
    more = []
    for kind in kinds:
        rest = [i for i in range(len(base), len(first)) if first[i] == kind]
        if rest:
            some = rest[:unit]
            more.append((some, len(rest) / len(some)))
    return base, more


def count_all(
    model: nn.Module, first: Sequence[int], variant: Variant, batch: int, tokens: int, size: int, gpu: str | None = None
) -> Counted:
    """Counts a step of the model with all its layers."""
    base, more = depths(first, variant.every)
    with only(model, base):
        counted = less = count(model, variant, batch, tokens, size, gpu)
    for some, times in more:
        with only(model, [*base, *some]):
            counted = counted.plus(times, count(model, variant, batch, tokens, size, gpu), less)
    return counted


def longest(peak_of: Callable[[int], float], tokens: int, peak: float, budget: float) -> tuple[int, bool]:
    """Returns the length at which the line through two lengths meets the budget, and whether it is cut at FURTHEST times
    `tokens`.

    The lengths are `tokens`, whose peak is known, and twice as many, or half if it does not fit. Only these two are counted.
    """
    other = max(1, tokens // 2) if peak > budget else 2 * tokens
    slope = (peak_of(other) - peak) / (other - tokens)
    length = int(tokens + (budget - peak) / slope) if slope > 0 else FURTHEST * tokens
    return max(0, min(length, FURTHEST * tokens)), length >= FURTHEST * tokens


FURTHEST = 16  # times the length that is asked for
