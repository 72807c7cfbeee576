"""Defines baselines of the cases, each a maker `(model, x) -> function` on the model's own parameters.

A maker that raises ImportError is reported as missing: its library is not installed, or it needs a GPU.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .. import ops
from .heads import Distillation, LMHeadLoss
from .models import MLP, GatedMLP, LlamaLayer, MoE, attend

Function = Callable[[Tensor], Tensor]
Maker = Callable[[nn.Module, Tensor], Function]

# -- MLPs and experts -------------------------------------------------------------------------------------------------


def flash_attn_mlp(activation: str, model: MLP, x: Tensor) -> Function:
    """Returns flash-attn's FusedMLP at checkpoint level 2, which saves x only. It has no erf GELU."""
    fused_mlp_func = importlib.import_module("flash_attn.ops.fused_dense").fused_mlp_func
    # -1 for GELU, because its authors found the unfused GEMM quicker on H100; ReLU's bit mask needs the fused one
    options = dict(activation=activation, checkpoint_lvl=2, heuristic=0 if activation == "relu" else -1)
    return lambda x: fused_mlp_func(x, model.fc1.weight, model.fc2.weight, model.fc1.bias, model.fc2.bias, **options)


def quack_mlp(activation: str, model: MLP, x: Tensor) -> Function:
    """Returns QuACK's recomputing MLP, which has no biases and no erf GELU."""
    mlp_func = importlib.import_module("quack.mlp").mlp_func
    return lambda x: mlp_func(x, model.fc1.weight, model.fc2.weight, activation, recompute=True)


def _liger(module: str, name: str, x: Tensor) -> Any:
    """Returns a function of liger_kernel.ops, whose kernels are Triton's."""
    function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
    if not (x.is_cuda or importlib.import_module("triton").knobs.runtime.interpret):
        raise ImportError("liger-kernel runs on a GPU only")
    return function


def liger_swiglu(model: GatedMLP, x: Tensor) -> Function:
    """Returns Liger's SwiGLU: torch's matmuls around one kernel that recomputes silu(g) in backward."""
    silu_mul = _liger("swiglu", "LigerSiLUMulFunction", x)
    return lambda x: model.down(silu_mul.apply(model.gate(x), model.up(x)))


def liger_tiled(model: nn.Module, x: Tensor) -> Function:
    """Returns Liger's and DeepSpeed's tiled MLP: ceil(tokens / width) tiles, each of which runs once more in backward."""
    tiled = importlib.import_module("liger_kernel.ops.tiled_mlp").apply_tiled_mlp
    return lambda x: tiled(lambda module, tile: module(tile), model, x)


def liger_layer(model: LlamaLayer, x: Tensor) -> Function:
    """Returns a Llama layer as Liger patches it: its RMSNorm, rotary embedding and SwiGLU, torch's matmuls and attention."""
    rms_norm, rope = _liger("rms_norm", "LigerRMSNormFunction", x), _liger("rope", "LigerRopeFunction", x)
    attention, block = model.attention, model.block
    swiglu = liger_swiglu(block.mlp, x)

    def function(x: Tensor) -> Tensor:
        q, k, v = attention.split(rms_norm.apply(x, attention.norm.weight, attention.norm.eps))
        q, k = rope.apply(q, k, *attention.tables(x))
        x = x + attention.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + swiglu(rms_norm.apply(x, block.norm.weight, block.norm.eps))

    return function


def liger_moe(model: MoE, x: Tensor) -> Function:
    """Returns Liger's fused experts, which save gate and up of each token-expert pair."""
    fused = _liger("fused_moe", "LigerFusedMoEFunction", x)
    keep_largest_tiles()

    def function(x: Tensor) -> Tensor:
        index, weights = model.routing(x)
        return fused.apply(x, model.gate_up, model.down, index.int(), weights)

    return function


def keep_largest_tiles() -> None:
    """Leaves few of the 200 configurations that Liger's expert kernels autotune, a second each: of matmuls those with the
    largest tiles and at most 4 stages, of other kernels the one that Liger takes without autotuning."""
    kernels = importlib.import_module("liger_kernel.ops.fused_moe_kernels")
    pinned = {"BLOCK_H": 128, "BLOCK_K": 4}
    for kernel in vars(kernels).values():
        configs = getattr(kernel, "configs", None) or []
        if any("BLOCK_N" in config.kwargs for config in configs):
            most = max(math.prod(config.kwargs.values()) for config in configs)
            kernel.configs = [c for c in configs if math.prod(c.kwargs.values()) == most and c.num_stages <= 4]
        elif configs:
            kernel.configs = [c for c in configs if c.kwargs == pinned and c.num_warps == 4] or configs[:1]


def experts_by_turns(model: MoE, x: Tensor) -> Function:
    """Returns a loop over experts. The host knows their rows, which it would have to read from a router's device."""
    return model.interleaved


# -- LM heads ----------------------------------------------------------------------------------------------------------


def torch_chunks(model: LMHeadLoss, x: Tensor) -> Function:
    """Returns torch's linear_cross_entropy in chunks of tokens, from 2.13 on."""
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    if options is None:
        raise ImportError("this torch has no nn.LinearCrossEntropyOptions")
    return lambda x: model.signed(
        F.linear_cross_entropy(
            x,
            model.linear.weight,
            model.targets(x),
            linear_bias=model.linear.bias,
            reduction=model.reduction,
            options=options(),
        )
    )


def cut_cross_entropy(model: LMHeadLoss, x: Tensor) -> Function:
    """Returns Apple's cut cross-entropy without its filter of small gradients, which is not exact."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    head = model.linear
    bias = {} if head.bias is None else {"bias": head.bias}  # its releases do not know the argument
    return lambda x: model.signed(
        function(
            x, head.weight, model.targets(x), softcap=model.softcap, reduction=model.reduction, filter_eps=None, **bias
        )
    )


def liger_loss(model: LMHeadLoss, x: Tensor) -> Function:
    """Returns Liger's fused loss. It computes gradients in forward for a mean, and in backward from recomputed logits for
    each row's loss."""
    fused = _liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", x)
    head = model.linear

    def function(x: Tensor) -> Tensor:
        options = None, -100, 0.0, 0.0, model.reduction, model.softcap  # from the class weights on
        return model.signed(fused.apply(x, head.weight, model.targets(x), head.bias, *options)[0])

    return function


def liger_distillation(model: Distillation, x: Tensor) -> Function:
    """Returns Liger's fused Jensen-Shannon divergence at beta = 0, the mean KL divergence from the teacher. It has no
    biases."""
    fused = _liger("fused_linear_jsd", "LigerFusedLinearJSDFunction", x)
    return lambda x: fused.apply(x, model.linear.weight, x.detach(), model.teacher.weight, None, 0.0)


def in_chunks(rows: int) -> Maker:
    """Returns a loop of torch.utils.checkpoint over chunks of `rows`, as trainers write it themselves."""
    return lambda model, x: lambda x: model.reduced(model.chunked(x, rows))


# -- attention ---------------------------------------------------------------------------------------------------------


def sdpa_flash(model: nn.Module, x: Tensor) -> Function:
    """Returns the model with torch's flash attention instead of torch's own choice, which is cuDNN's on Hopper."""
    if not x.is_cuda:
        raise ImportError("SDPA has several fused backends on CUDA only")

    def function(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return model(x)

    return function


def own_core(model: nn.Module, x: Tensor) -> Function:
    """Returns ckptkern's op at "selective" with Triton kernels only, even where the table prefers torch's core attention."""
    if not x.is_cuda:
        raise ImportError("the core is one of several on CUDA only")

    def function(x: Tensor) -> Tensor:
        with ops.backend("triton"):
            return model.ours(x, "selective")

    return function


SDPA_FORWARDS = tuple(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention", "cudnn_attention", "efficient_attention", "flash_attention_for_cpu")
)


class SelectiveCheckpoint:
    """torch.utils.checkpoint that recomputes everything except core attention, whichever kernel runs it."""

    def __init__(self, model: nn.Module, x: Tensor):
        self.model, self.saved = model, None

    def contexts(self):
        forward, recompute = create_selective_checkpoint_contexts(list(SDPA_FORWARDS))
        self.saved = forward.storage
        return forward, recompute

    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False, context_fn=self.contexts)

    def unseen_bytes(self) -> int:
        """Returns the bytes that the last call saves out of sight of saved-tensor hooks."""
        tensors = [leaf.val for leaf in tree_leaves(dict(self.saved)) if isinstance(getattr(leaf, "val", None), Tensor)]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


# -- whole language models of transformers ----------------------------------------------------------------------------


def whole_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def chunked_loss(model: nn.Module, ids: Tensor, chunks: int = 16) -> Tensor:
    """Returns the loss in checkpointed chunks of tokens, as users of torch before 2.15 write it."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets, head = ids[:, 1:].flatten(), model.get_output_embeddings()

    def part(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).float(), target, reduction="sum")

    parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    return sum(checkpoint(part, *tensors, use_reentrant=False) for tensors in parts) / len(targets)


def checkpoint_options(*saves: Any) -> dict[str, Any]:
    """Returns arguments of torch's checkpoint. saves: ops whose results are saved (selective checkpointing)."""
    options: dict[str, Any] = {"use_reentrant": False}
    if saves:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(saves))
    return options


def checkpointed(model: nn.Module, *saves: Any) -> nn.Module:
    """Makes an activation checkpoint of each layer. saves: as in `checkpoint_options`."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_options(*saves))
    return model
