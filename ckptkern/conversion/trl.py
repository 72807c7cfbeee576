"""Makes TRL's fused LM head run linear_cross_entropy: since version 1.16 its trainers read the head's weight themselves and
never call the head, so they take no lazy logits of it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..extras import missing
from ..ops.dispatch.choices import parse_bytes
from ..segments.patch import Patch
from .tokens import NEVER

NAME = "patch_trl"
# Of trl.kernels.ChunkedLogProbFunction.forward in TRL 1.16: its arguments, and what it returns after the log-probabilities.
ARGUMENTS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

_patches: list[Patch] = []  # not yet removed, oldest first


def patch_trl(workspace: int | str | None = None) -> Patch:
    """Makes the fused LM head of TRL's trainers run `ckptkern.linear_cross_entropy`, until the result's ``remove()``, or the
    end of a ``with`` block.

        ckptkern.convert(model, input_ids=ids, labels=ids)
        ckptkern.patch_trl()
        trl.SFTTrainer(model, ...).train()

    For TRL 1.16's SFT, DPO, KTO, GRPO and RLOO, which compute a token's log-probability, entropy and accuracy from the hidden
    states and lm_head.weight in buffers of 4,096 tokens x 32,768 classes. Here their memory is bounded by `workspace` (see
    linear_cross_entropy), no float32 gradient of the whole weight is formed, and logits are float32 where TRL rounds them to
    the hidden states' dtype. Saves 8 bytes a token for backward. The latest patch's workspace holds until all are removed.

    Raises ImportError, which says what to install, RuntimeError if TRL's function is not that of 1.16, ValueError (workspace);
    a call raises RuntimeError for a weight that DeepSpeed's ZeRO-3 has split.
    """
    size = parse_bytes(NAME, workspace)
    if hint := missing("trl"):
        raise ImportError(hint)
    try:
        from trl.kernels import ChunkedLogProbFunction as function
    except ImportError:
        function = None
    if function is None or tuple(inspect.signature(function.forward).parameters) != ARGUMENTS:
        raise RuntimeError(
            f"ckptkern.{NAME}: this version of TRL has no trl.kernels.ChunkedLogProbFunction with the arguments of TRL 1.16. "
            "Leave the patch out: where TRL reads logits, those of a converted model are lazy"
        )
    function.apply = functools.partial(token_log_probs, size)
    return Patch(_patches, functools.partial(delattr, function, "apply"))


def token_log_probs(
    workspace: int | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
    chunk_size: int, final_logit_softcapping: float | None = None, logit_scale: float = 1.0, outputs: tuple[str, ...] = OUTPUTS,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Computes what TRL's function returns: log-probabilities of targets [N], and the outputs that are asked for, else None:
    entropy [N], log(sum p^2) [N], mean logit [N], is the target the arg max? [N], of logits
    softcap tanh(logit_scale (hidden weight^T + bias) / softcap) / temperature. hidden [N, d], weight [V, d], bias [V]."""
    if hasattr(weight, "ds_id"):
        raise RuntimeError(
            f"ckptkern.{NAME}: DeepSpeed's ZeRO-3 has split the head's weight, which backward would not gather. Leave the "
            "patch out"
        )
    if not torch.is_autocast_enabled(hidden.device.type):  # TRL computes in the hidden states' dtype
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    cap = None if final_logit_softcapping is None else final_logit_softcapping / temperature
    scale = logit_scale / temperature

    def statistics(factor: float = 1.0, **options: Any):
        return ops.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction="none", ignore_index=NEVER, logit_scale=factor * scale,
            softcap=None if cap is None else factor * cap, workspace=workspace, **options,
        )  # fmt: skip

    wants_squares, wants_mean = "log_sum_sq_probs" in outputs, "mean_logits" in outputs
    found = statistics(
        return_log_probs=True,
        return_entropy="entropy" in outputs,
        return_accuracy="is_top1" in outputs,
        return_lse=wants_squares or wants_mean,
        label_smoothing=float(wants_mean),  # the loss is then lse - the mean logit
    )
    with torch.no_grad():  # sum p^2 = sum exp(2 z - 2 lse)
        squared = statistics(2.0, return_lse=True).lse - 2 * found.lse if wants_squares else None
        mean = found.lse - found.loss if wants_mean else None
    top = found.accuracy.bool() if found.accuracy is not None else None
    return found.log_probs, found.entropy, squared, mean, top
