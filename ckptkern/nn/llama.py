"""A decoder layer of the Llama family: RMSNorm, rotary grouped-query attention and SwiGLU as one region."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import eager, ops
from ..ops.attention.arguments import diagonal_of
from ..ops.attention.core import merged_mask
from ..ops.attention.rotary import positions_of, rotary_tables
from ..ops.dispatch.choices import Bytes, check_number, check_positive, check_probability, modes_of_sublayers
from .activations import Activation
from .layer import Layer, check_counts, weights
from .mlp import GatedMLP
from .unmodified import composed, unmodified


def _eps(norm: nn.RMSNorm, x: Tensor) -> float:
    """Returns norm.eps; None means the eps of the dtype in which torch computes the norm, also under autocast."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if norm.eps is None else norm.eps


class LlamaAttention(Layer):
    """Computes causal self-attention with grouped heads, rotary embedding and optional RMS norms of each head's q and k.

    Parameters: q_proj.weight [H D, d], k_proj.weight and v_proj.weight [H_kv D, d], o_proj.weight [d, H D], their biases,
    q_norm.weight and k_norm.weight [D]. num_kv_heads defaults to num_heads, head_dim to hidden_size / num_heads.
    rope_theta: None if forward gets tables. See ckptkern.attention_block for the other options.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rope_theta: float | None = 10000.0,
        dropout: float = 0.0,
        *,
        recompute: str = "selective",
        workspace: Bytes = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = type(self).__name__
        check_counts(op, hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"{op}: num_heads={num_heads} must divide hidden_size={hidden_size}")
        if num_heads % num_kv_heads:
            raise ValueError(f"{op}: num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if rope_theta is not None:
            check_positive(op, "rope_theta", rope_theta)
        self.set_options(recompute, workspace, rope_theta=rope_theta, dropout=dropout)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim

        def linear(k, n):
            return nn.Linear(k, n, bias, device, dtype)

        self.q_proj = linear(hidden_size, num_heads * head_dim)
        self.k_proj = linear(hidden_size, num_kv_heads * head_dim)
        self.v_proj = linear(hidden_size, num_kv_heads * head_dim)
        self.o_proj = linear(num_heads * head_dim, hidden_size)
        for name in ("q_norm", "k_norm"):
            setattr(self, name, nn.RMSNorm(head_dim, norm_eps, device=device, dtype=dtype) if qk_norm else None)

    def block_arguments(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, **masks: Any) -> dict[str, Any]:
        """Returns the arguments of ckptkern.attention_block for an unmodified module."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        norms = {}
        if self.q_norm is not None:
            norms = {"qk_norm": (self.q_norm.weight, self.k_norm.weight), "qk_norm_eps": _eps(self.q_norm, x)}
        return {
            "qkv_weight": [projection.weight for projection in projections],
            "qkv_bias": [projection.bias for projection in projections],
            **weights(self, out="o_proj"),
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            **norms,
            **self._core_arguments(rotary, **masks),
        }

    def _core_arguments(
        self,
        rotary: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = True,
        window_size: tuple[int, int] | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> dict[str, Any]:
        """Returns the arguments in block_arguments that do not depend on submodules."""
        return {
            "rotary": self.rope_theta if rotary is None else rotary,
            "is_causal": is_causal,
            "attn_mask": attn_mask,
            "key_padding_mask": key_padding_mask,
            "window_size": window_size,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
            "dropout_p": self.dropout if self.training else 0.0,
        }

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, **masks: Any) -> Tensor:
        """Maps x [B, S, d] to y [B, S, d]. rotary, masks: as in LlamaDecoderLayer.forward."""
        if not self.is_unmodified():
            return composed(self._composed, x, rotary, **masks)
        return ops.attention_block(x, **self.block_arguments(x, rotary, **masks), **self.modes)

    def is_unmodified(self) -> bool:
        """Returns whether the parameters alone determine the result."""
        norms = q_norm, k_norm = self.q_norm, self.k_norm
        if not unmodified(nn.Linear, self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            return False
        # the op has one eps for both norms, and applies none if the weight is None
        return norms == (None, None) or (
            unmodified(nn.RMSNorm, *norms)
            and q_norm.eps == k_norm.eps
            and all(norm.weight is not None for norm in norms)
        )

    def _composed(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, **masks: Any) -> Tensor:
        """Computes forward by calling the submodules."""
        options = self._core_arguments(rotary, **masks)
        rows, S, cu = x if x.dim() == 3 else x[None], x.shape[-2], options["cu_seqlens"]
        if diagonal_of(type(self).__name__, options["attn_mask"], S, S) is not None:
            options |= {"attn_mask": None, "is_causal": True}
        q, k, v = (
            projection(rows).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (heads if norm is None else norm(heads) for heads, norm in ((q, self.q_norm), (k, self.k_norm)))
        tables = options["rotary"]
        if tables is not None:
            if not isinstance(tables, (tuple, list)):  # a theta
                tables = rotary_tables(positions_of(S, x.device, cu), self.head_dim, tables)
            q, k = (eager.heads_fwd(heads, None, 0.0, *tables) for heads in (q, k))
        left, right = options["window_size"] or (-1, -1)
        how = {"window_size": (left, 0 if options["is_causal"] else right), "enable_gqa": True}
        if cu is not None and not options["dropout_p"]:  # varlen_attn has no dropout
            longest = options["max_seqlen"] or S
            o = ops.varlen_attn(q[0], k[0], v[0], cu, cu, longest, longest, **how)[None]
        else:
            if cu is None:
                mask = merged_mask(options["attn_mask"], options["key_padding_mask"])
            else:  # [tokens, tokens]: True where two packed tokens are of one sequence
                place = torch.arange(S, device=x.device, dtype=torch.int32)
                sequence = torch.searchsorted(cu, place, right=True)
                mask = sequence[:, None] == sequence
            q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
            o = ops.scaled_dot_product_attention(q, k, v, mask, options["dropout_p"], **how).transpose(1, 2)
        y = self.o_proj(o.flatten(2))
        return y if x.dim() == 3 else y[0]


class LlamaDecoderLayer(Layer):
    """Computes h = x + attention(rms(x)), y = h + SwiGLU(rms(h)) as one region, with Hugging Face Llama's parameter names.

        input_layernorm.weight; self_attn.{q,k,v,o}_proj.weight [, .bias] [, self_attn.{q,k}_norm.weight]
        post_attention_layernorm.weight; mlp.{gate,up,down}_proj.weight [, .bias]

    intermediate_size defaults to 4 hidden_size; heads, qk_norm (Qwen3) and rope_theta are those of LlamaAttention.
    dropout: of attention weights. resid_dropout: of both branches.
    recompute: a mode, or a pair for attention and MLP: see ckptkern.transformer_layer.
    """

    has_sublayers = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        intermediate_size: int | None = None,
        head_dim: int | None = None,
        activation: Activation = "silu",
        rms_norm_eps: float = 1e-6,
        rope_theta: float | None = 10000.0,
        qk_norm: bool = False,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        dropout: float = 0.0,
        resid_dropout: float = 0.0,
        *,
        recompute: str | tuple[str, str] = "selective",
        workspace: Bytes = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = type(self).__name__
        check_counts(op, hidden_size=hidden_size)
        check_counts(op, 0, intermediate_size=intermediate_size)
        check_number(op, "rms_norm_eps", rms_norm_eps)
        check_probability(op, resid_dropout)
        self.set_options(recompute, workspace, resid_dropout=resid_dropout)
        of_attention, of_mlp = modes_of_sublayers(op, recompute)
        factory = {"workspace": workspace, "device": device, "dtype": dtype}
        self.input_layernorm = nn.RMSNorm(hidden_size, rms_norm_eps, device=device, dtype=dtype)
        self.self_attn = LlamaAttention(
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            attention_bias,
            qk_norm,
            rms_norm_eps,
            rope_theta,
            dropout,
            recompute=of_attention,
            **factory,
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, rms_norm_eps, device=device, dtype=dtype)
        hidden = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.mlp = GatedMLP(hidden_size, hidden, activation=activation, bias=mlp_bias, recompute=of_mlp, **factory)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, **masks: Any) -> Tensor:
        """Maps x [B, S, d], [S, d], or packed [tokens, d] with cu_seqlens int32 [N + 1] to y of the same shape.

        rotary: (cos, sin) of rotary_tables; layers that share the tables save them once. Without it each pass computes them.
        masks: attn_mask (bool, True = visible, or additive), key_padding_mask [B, S] (True = hidden), is_causal (default
        True), window_size, cu_seqlens, max_seqlen.
        """
        if not self.is_unmodified():
            return composed(self._composed, x, rotary, **masks)
        return ops.transformer_layer(x, **self.layer_arguments(x, rotary, **masks), **self.modes)

    def is_unmodified(self) -> bool:
        """Returns whether the parameters alone determine the result."""
        return (
            unmodified(nn.RMSNorm, self.input_layernorm, self.post_attention_layernorm)
            and unmodified((LlamaAttention, GatedMLP), self.self_attn, self.mlp)
            and self.self_attn.is_unmodified()
            and self.mlp.is_unmodified()
        )

    def layer_arguments(self, x: Tensor, *rotary: Any, **masks: Any) -> dict[str, dict[str, Any]]:
        """Returns the arguments of ckptkern.transformer_layer for an unmodified layer."""
        drop, mlp = self.resid_dropout if self.training else 0.0, self.mlp

        def normed(sublayer, norm):
            around = {"norm": "rms", "norm_weight": norm.weight, "norm_eps": _eps(norm, x)}
            return sublayer | around | {"residual": True, "resid_dropout_p": drop}

        options = {"activation": mlp.activation, "dropout_p": mlp.dropout if self.training else 0.0}
        attention = self.self_attn.block_arguments(x, *rotary, **masks)
        return {
            "attention_arguments": normed(attention, self.input_layernorm),
            "mlp_arguments": normed(mlp.block_arguments() | options, self.post_attention_layernorm),
        }

    def _composed(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, **masks: Any) -> Tensor:
        """Computes forward by calling the submodules."""
        branch = self.self_attn(self.input_layernorm(x), rotary, **masks)
        x = x + ops.dropout(branch, self.resid_dropout, self.training)
        branch = self.mlp(self.post_attention_layernorm(x))
        return x + ops.dropout(branch, self.resid_dropout, self.training)
