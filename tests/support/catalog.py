"""The catalogue: every op once, for the tests that run all of them.

An entry has example inputs of any sizes, and for each option one value that differs from its default, with the arguments that
go with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from support.example_inputs import OPS as INPUTS
from support.example_inputs import (
    Arguments,
    Normal,
    Sizes,
    call,
    input_shapes,
    layer_of,
    normal,
    random_leaves,
    saved_bytes,
    x_of,
)
from torch import Tensor

from ckptkern.ops.attention.block import AttentionBlock, attention_block
from ckptkern.ops.attention.latent import LatentAttentionBlock, latent_attention_block
from ckptkern.ops.attention.sdpa import Attention, scaled_dot_product_attention, varlen_attn
from ckptkern.ops.cross_entropy.loss import linear_cross_entropy, selected_log_probs
from ckptkern.ops.cross_entropy.op import LinearCrossEntropy
from ckptkern.ops.dispatch.choices import MODES
from ckptkern.ops.distillation import LinearDistillation, linear_distillation, linear_topk_distillation
from ckptkern.ops.experts import Experts, grouped_gated_mlp, moe_mlp
from ckptkern.ops.mlp.linear import LinearAct, LinearStack
from ckptkern.ops.mlp.mlp import MLP, GatedMLP, MLPBlock, mlp_block
from ckptkern.ops.moe import MoEBlock, moe_block
from ckptkern.ops.registration.op import Op
from ckptkern.ops.sublayer.dropout import Dropout, dropout
from ckptkern.ops.sublayer.lora import LoRA
from ckptkern.ops.transformer_layer import LAYER_OPS, transformer_layer

__all__ = [
    "ACROSS_RANKS", "HEAD_DIM", "IN_TORCH_OPS", "OPS", "OTHER_OPS", "Arguments", "Entry", "Normal", "P", "Sizes", "call",
    "gain", "input_shapes", "normal", "random_leaves", "saved_bytes",
]  # fmt: skip

HEAD_DIM = 4
P = 0.25  # k/65536 exactly, so that torch's scale is ours
ACROSS_RANKS = "needs several processes"  # an option's value
SPLIT = {"group": ACROSS_RANKS, "vocab_start": ACROSS_RANKS}


def gain(*shape: int) -> Normal:
    return Normal(shape, 1.0)


def fixed(*shape: int) -> Tensor:
    """Numbers without a period."""
    return torch.arange(torch.Size(shape).numel()).square().sin().view(shape)


def alone(**values: Any) -> dict[str, Arguments]:
    """Options that go without others."""
    return {name: {name: value} for name, value in values.items()}


def together(common: Arguments, **values: Any) -> dict[str, Arguments]:
    """Options that go with others."""
    return {name: common | {name: value} for name, value in values.items()}


# -- blocks ----------------------------------------------------------------------------------------------------------------


def branch_of_mlp(s: Sizes) -> Arguments:
    return layer_of("up_", s.hidden, s.features) | layer_of("down_", s.features, s.hidden)


def branch_of_attention(s: Sizes, kv_heads: int | None = None) -> Arguments:
    own, packed = s.heads * HEAD_DIM, (s.heads + 2 * (kv_heads or s.heads)) * HEAD_DIM
    return layer_of("qkv_", packed, s.features) | layer_of("out_", s.features, own) | {"num_heads": s.heads}


def layer_inputs(s: Sizes) -> Arguments:
    return x_of(s) | dict(attention_arguments=branch_of_attention(s), mlp_arguments=branch_of_mlp(s))


# -- linear layers and MLPs --------------------------------------------------------------------------------------------


def _mlp_options(default: str) -> Callable[[Sizes], dict[str, Arguments]]:
    activation = "silu" if default != "silu" else "gelu"
    return lambda s: alone(activation=activation, dropout_p=P) | together({"dropout_p": P}, training=False)


def _around(s: Sizes) -> dict[str, Arguments]:
    """What both blocks have."""
    d, calls = s.features, alone(layer_scale=normal(s.features), resid_dropout_p=P, drop_path_p=P)
    for norm in ("norm", "post_norm"):
        options = {norm: "layer", f"{norm}_weight": gain(d), f"{norm}_bias": normal(d)}
        calls |= dict.fromkeys(options, options) | {f"{norm}_eps": options | {f"{norm}_eps": 0.1}}
    samples = s.lead[0] if len(s.lead) > 1 else 1
    vectors = {name: normal(samples, d) for name in ("norm_scale", "norm_shift", "layer_scale")}
    adaptive = dict.fromkeys(("norm_scale", "norm_shift"), calls["norm"] | vectors)
    return (
        calls | adaptive | together(calls["norm"], norm_first=False) | together({"resid_dropout_p": P}, training=False)
    )


def _lora(rows: int, columns: int) -> LoRA:
    return LoRA(normal(2, columns), normal(rows, 2), 0.5, P)


def _mlp_block_options(s: Sizes) -> dict[str, Arguments]:
    gate = dict(gate_weight=normal(s.hidden, s.features), gate_bias=normal(s.hidden))
    lora = {"up": _lora(s.hidden, s.features), "down": _lora(s.features, s.hidden)}
    return _around(s) | dict.fromkeys(gate, gate) | alone(activation="silu", dropout_p=P, lora=lora, residual=False)


# -- attention ---------------------------------------------------------------------------------------------------------


def _ends(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def _slopes(s: Sizes) -> Tensor:
    return 0.5 ** torch.arange(1, s.heads + 1)


def _seen(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril(1)


def _attention_options(s: Sizes) -> dict[str, Arguments]:
    B, S, d, D, own = *s.lead, s.features, HEAD_DIM, s.heads * HEAD_DIM
    q_norm = {"qk_norm": (gain(D), gain(D))}
    packed = dict(x=normal(s.tokens, d), cu_seqlens=_ends(0, 2, s.tokens))
    padding = torch.ones(B, S, dtype=torch.bool).triu(2)  # one token of the first sequence
    lora = {"qkv": _lora(3 * s.heads * D, d), "out": _lora(d, s.heads * D)}
    gate = dict(gate_weight=normal(s.heads, d), gate_bias=normal(s.heads))
    gated = dict(qkv_weight=[normal(rows, d) for rows in (2 * own, own, own)], qkv_bias=None)
    return {
        **_around(s),
        **together(branch_of_attention(s, 1), num_kv_heads=1),
        "cu_seqlens": packed,
        **together(packed, max_seqlen=2),
        "qk_norm": q_norm,
        **together({"attn_mask": _seen(S, S)}, mask_is_exclusion=True),
        **together(q_norm, qk_norm_kind="layer", qk_norm_eps=0.1),
        **together({"rotary": 100.0}, rotary_interleaved=True),
        **together({"gate_weight": normal(own, d)}, gate_bias=normal(own)),
        "gate_weight": gate,
        **together(gated, gate_in_query=True),
        **alone(
            key_value=normal(B, S + 1, d),
            qkv_layout="heads",
            rotary=100.0,
            is_causal=True,
            attn_mask=normal(S, S),
            key_padding_mask=padding,
            window_size=(1, 0),
            alibi_slopes=_slopes(s),
            scale=0.7,
            softcap=2.0,
            sinks=normal(s.heads),
            dropout_p=P,
            lora=lora,
            residual=True,
        ),
    }


LATENT_HEAD = 2, 4, 3  # of q and k what no position rotates and what one does, and of v


def _latent(s: Sizes) -> Arguments:
    nope, rope, v = LATENT_HEAD
    return dict(
        x=normal(*s.lead, s.features),
        q_weight=normal(s.heads * (nope + rope), s.features),
        kv_a_weight=normal(s.hidden + rope, s.features),
        kv_b_weight=normal(s.heads * (nope + v), s.hidden),
        out_weight=normal(s.features, s.heads * v),
        num_heads=s.heads,
    )


def _latent_options(s: Sizes) -> dict[str, Arguments]:
    (B, S), d, (nope, rope, v), rank = s.lead, s.features, LATENT_HEAD, s.out
    q_a = dict(q_a_weight=normal(rank, d), q_weight=normal(s.heads * (nope + rope), rank))
    return {
        **_around(s),
        "q_a_weight": q_a,
        **together(q_a, q_a_bias=normal(rank), q_a_norm_weight=gain(rank)),
        **together({"kv_a_norm_weight": gain(s.hidden)}, latent_norm_eps=0.1),
        **together({"attn_mask": _seen(S, S)}, mask_is_exclusion=True),
        **together({"rotary": 100.0}, rotary_interleaved=True),
        **alone(
            q_bias=normal(s.heads * (nope + rope)),
            kv_a_bias=normal(s.hidden + rope),
            kv_a_norm_weight=gain(s.hidden),
            kv_b_bias=normal(s.heads * (nope + v)),
            out_bias=normal(d),
            rotary=100.0,
            is_causal=True,
            attn_mask=normal(S, S),
            key_padding_mask=torch.ones(B, S, dtype=torch.bool).triu(2),
            window_size=(1, 0),
            scale=0.7,
            softcap=2.0,
            dropout_p=P,
            residual=True,
        ),
    }


def _layer_options(s: Sizes) -> dict[str, Arguments]:
    crossed = branch_of_attention(s) | {"key_value": normal(s.lead[0], s.lead[1] + 1, s.features)}
    dropped = {"mlp_arguments": branch_of_mlp(s) | {"dropout_p": P}}
    return alone(cross_attention_arguments=crossed, parallel=True) | together(dropped, training=False)


def _latent_layer_inputs(s: Sizes) -> Arguments:
    return layer_inputs(s) | {"attention_arguments": {name: value for name, value in _latent(s).items() if name != "x"}}


def _latent_layer_options(s: Sizes) -> dict[str, Arguments]:
    return {name: value for name, value in _layer_options(s).items() if name != "cross_attention_arguments"}


def _sdpa_inputs(s: Sizes) -> Arguments:
    B, S = s.lead
    rows = {"query": S, "key": S + 1, "value": S + 1}
    return {name: normal(B, s.heads, length, HEAD_DIM) for name, length in rows.items()}


def _sdpa_options(s: Sizes) -> dict[str, Arguments]:
    heads = dict.fromkeys(("key", "value"), normal(s.lead[0], 1, s.lead[1] + 1, HEAD_DIM))
    return together(heads, enable_gqa=True) | alone(
        attn_mask=normal(s.lead[1], s.lead[1] + 1),
        dropout_p=P,
        is_causal=True,
        scale=0.7,
        window_size=(1, 0),
        alibi_slopes=_slopes(s),
        softcap=2.0,
        sinks=normal(s.heads),
    )


def _varlen_inputs(s: Sizes) -> Arguments:
    names, ends = ("query", "key", "value"), _ends(0, 2, s.tokens)
    packed = dict.fromkeys(names, normal(s.tokens, s.heads, HEAD_DIM))
    return packed | dict(cu_seq_q=ends, cu_seq_k=ends, max_q=s.tokens - 2, max_k=s.tokens - 2)


def _varlen_options(s: Sizes) -> dict[str, Arguments]:
    heads = dict.fromkeys(("key", "value"), normal(s.tokens, 1, HEAD_DIM))
    return together(heads, enable_gqa=True) | alone(is_causal=True, scale=0.7, window_size=(1, 0))


# -- experts and the loss ----------------------------------------------------------------------------------------------


def _experts(s: Sizes) -> Arguments:
    gate_up, down = normal(s.experts, 2 * s.hidden, s.features), normal(s.experts, s.features, s.hidden)
    return dict(gate_up_weight=gate_up, down_weight=down)


def _moe_mlp(s: Sizes) -> Arguments:
    index = torch.arange(2 * s.tokens).view(*s.lead, 2) // 3 % s.experts
    biases = dict(gate_up_bias=normal(s.experts, 2 * s.hidden), down_bias=normal(s.experts, s.features))
    routing = dict(top_k_index=index, top_k_weights=normal(*s.lead, 2))
    return {"x": normal(*s.lead, s.features)} | routing | _experts(s) | biases


def _experts_lora(s: Sizes) -> dict[str, LoRA]:
    layers = {"gate_up": (2 * s.hidden, s.features, 0.5), "down": (s.features, s.hidden, 0.25)}
    return {name: LoRA(normal(s.experts, 2, d), normal(s.experts, n, 2), c) for name, (n, d, c) in layers.items()}


def _moe_block(s: Sizes) -> Arguments:
    x, router = normal(*s.lead, s.features), normal(s.experts, s.features)
    return dict(x=x, router_weight=router, top_k=2) | _experts(s)


def _moe_block_options(s: Sizes) -> dict[str, Arguments]:
    d, n = s.features, s.hidden
    shared = dict(
        shared_gate_weight=normal(n, d),
        shared_gate_bias=normal(n),
        shared_up_weight=normal(n, d),
        shared_up_bias=normal(n),
        shared_down_weight=normal(d, n),
        shared_down_bias=normal(d),
        shared_expert_gate=normal(1, d),
    )
    four = {"router_weight": normal(4, d)} | _experts(s._replace(experts=4))
    groups = four | dict(num_groups=2, top_groups=1)
    return (
        _around(s)
        | dict.fromkeys(shared, shared)
        | together(shared, lora=_experts_lora(s) | {"shared_gate": _lora(n, d), "shared_down": _lora(d, n)})
        | together(groups, num_groups=2, top_groups=1, group_score="max")
        | together({"router_dtype": torch.float32}, router_bias=normal(s.experts))
        | alone(
            activation="gelu",
            scoring="sigmoid",
            normalize=False,
            score_bias=torch.linspace(-0.5, 0.5, s.experts),
            routed_scaling_factor=2.5,
            router_dtype=torch.float32,
            gate_up_bias=normal(s.experts, 2 * n),
            down_bias=normal(s.experts, d),
            residual=False,
        )
    )


def _moe_layer_inputs(s: Sizes) -> Arguments:
    return layer_inputs(s) | {"mlp_arguments": {name: value for name, value in _moe_block(s).items() if name != "x"}}


def _latent_moe_layer_inputs(s: Sizes) -> Arguments:
    return _moe_layer_inputs(s) | {"attention_arguments": _latent_layer_inputs(s)["attention_arguments"]}


def _moe_layer_options(s: Sizes) -> dict[str, Arguments]:
    dropped = {"mlp_arguments": _moe_layer_inputs(s)["mlp_arguments"] | {"resid_dropout_p": P}}
    return alone(parallel=True) | together(dropped, training=False)


def _grouped_gated_mlp(s: Sizes) -> Arguments:
    offs = torch.arange(1, s.experts + 1, dtype=torch.int32) * (s.tokens // s.experts)
    return dict(x=normal(s.tokens, s.features), offs=offs) | _experts(s)


def _cross_entropy(s: Sizes) -> Arguments:
    target = torch.arange(s.tokens).view(s.lead) % s.out
    weight, bias = normal(s.out, s.features), normal(s.out)
    return dict(input=normal(*s.lead, s.features), linear_weight=weight, target=target, linear_bias=bias)


def _cross_entropy_options(s: Sizes) -> dict[str, Arguments]:
    weight = torch.linspace(0.5, 2.0, s.out)
    return together({"reduction": "sum"}, weight=weight) | alone(
        reduction="none",
        ignore_index=1,
        label_smoothing=0.1,
        logit_scale=0.7,
        softcap=3.0,
        z_loss=0.1,
        return_lse=True,
        return_log_probs=True,
        return_entropy=True,
        return_accuracy=True,
        top_k=3,
        lora=_lora(s.out, s.features),
        **SPLIT,
    )


def _selected(s: Sizes) -> Arguments:
    inputs = _cross_entropy(s)
    hidden, weight, tokens, bias = inputs.values()
    return dict(hidden=hidden, weight=weight, tokens=tokens, bias=bias)


def _selected_options(s: Sizes) -> dict[str, Arguments]:
    return alone(temperature=1.5, return_entropy=True, ignore_index=1, lora=_lora(s.out, s.features), **SPLIT)


def _distillation(s: Sizes) -> Arguments:
    d, e = s.features, s.hidden
    return dict(
        student_input=normal(*s.lead, d),
        student_weight=normal(s.out, d),
        student_bias=normal(s.out),
        teacher_input=fixed(*s.lead, e),
        teacher_weight=fixed(s.out, e),
        teacher_bias=fixed(s.out),
    )


def _distillation_options(s: Sizes) -> dict[str, Arguments]:
    mask = torch.arange(s.tokens).view(s.lead) % 3 > 0
    return together({"beta": 0.3}, mask=mask, reduction="none") | alone(
        beta=1.0, temperature=1.5, softcap=3.0, teacher_softcap=2.0
    )


def _topk_distillation(s: Sizes) -> Arguments:
    teacher, k = _distillation(s), 3
    student = {name: tensor for name, tensor in teacher.items() if name.startswith("student")}
    tokens = (torch.arange(s.tokens)[:, None] + 2 * torch.arange(k)).view(*s.lead, k) % s.out
    log_probs = fixed(*s.lead, s.out).log_softmax(-1).gather(-1, tokens)
    return student | dict(teacher_log_probs=log_probs, teacher_tokens=tokens)


def _topk_distillation_options(s: Sizes) -> dict[str, Arguments]:
    shared = {name: value for name, value in _distillation_options(s).items() if "softcap" not in name}
    return shared | alone(add_tail_bucket=False, group=ACROSS_RANKS, vocab_start=ACROSS_RANKS)


def _of_probabilities(s: Sizes) -> Arguments:
    inputs = _cross_entropy(s)
    return inputs | {"target": torch.nn.functional.one_hot(inputs["target"], s.out).float()}


def _of_probabilities_options(s: Sizes) -> dict[str, Arguments]:
    return {name: value for name, value in _cross_entropy_options(s).items() if name != "ignore_index"}


# -- the table ---------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """function: the public one. op: its description. inputs: what must be given. chosen: the options that only it has.
    of: what it is called on, if that is not all that it is called on."""

    function: Callable[..., Any]
    op: type[Op]
    inputs: Callable[[Sizes], Arguments]
    chosen: Callable[[Sizes], dict[str, Arguments]]
    of: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.function.__name__, self.of)))

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    @property
    def modes(self) -> tuple[str, ...]:
        """The values of `recompute`, the default first; none if the op has one way to run."""
        if "recompute" not in self.parameters:
            return ()
        return tuple(sorted(MODES, key=lambda mode: mode != self.parameters["recompute"].default))

    def every_option(self, sizes: Sizes = Sizes()) -> dict[str, Arguments]:  # noqa: B008 (a frozen value)
        """For each option the arguments that give it another value than its default's."""
        common = {"recompute": self.modes[-1]} if self.modes else {}
        common |= {"workspace": 1} if "workspace" in self.parameters else {}
        return self.chosen(sizes) | alone(**common)


def _entry(op: type[Op], chosen: Callable[[Sizes], dict[str, Arguments]]) -> Entry:
    """That of an op whose inputs the package has."""
    known = INPUTS[op.name]
    return Entry(known.function, op, known.inputs, chosen)


OPS = {
    entry.name: entry
    for entry in (
        _entry(LinearAct, lambda s: alone(activation="gelu")),
        _entry(LinearStack, lambda s: alone(activation="gelu")),
        _entry(MLP, _mlp_options("gelu")),
        _entry(GatedMLP, _mlp_options("silu")),
        Entry(mlp_block, MLPBlock, lambda s: x_of(s) | branch_of_mlp(s), _mlp_block_options),
        Entry(attention_block, AttentionBlock, lambda s: x_of(s) | branch_of_attention(s), _attention_options),
        Entry(latent_attention_block, LatentAttentionBlock, _latent, _latent_options),
        Entry(transformer_layer, LAYER_OPS[0], layer_inputs, _layer_options),
        Entry(scaled_dot_product_attention, Attention, _sdpa_inputs, _sdpa_options),
        Entry(varlen_attn, Attention, _varlen_inputs, _varlen_options),
        Entry(moe_mlp, Experts, _moe_mlp, lambda s: alone(activation="gelu", lora=_experts_lora(s))),
        Entry(moe_block, MoEBlock, _moe_block, _moe_block_options),
        Entry(
            grouped_gated_mlp,
            Experts,
            _grouped_gated_mlp,
            lambda s: alone(activation="gelu", row_weights=normal(s.tokens), lora=_experts_lora(s)),
        ),
        Entry(linear_cross_entropy, LinearCrossEntropy, _cross_entropy, _cross_entropy_options),
        Entry(selected_log_probs, LinearCrossEntropy, _selected, _selected_options),
        Entry(linear_distillation, LinearDistillation, _distillation, _distillation_options),
        Entry(linear_topk_distillation, LinearCrossEntropy, _topk_distillation, _topk_distillation_options),
        Entry(dropout, Dropout, x_of, lambda s: alone(p=P, training=False)),
    )
}

# A function's other ops, which other arguments choose.
OTHER_OPS = (
    Entry(transformer_layer, LAYER_OPS[2], _latent_layer_inputs, _latent_layer_options, of="latents"),
    Entry(transformer_layer, LAYER_OPS[1], _moe_layer_inputs, _moe_layer_options, of="experts"),
    Entry(transformer_layer, LAYER_OPS[3], _latent_moe_layer_inputs, _moe_layer_options, of="latents and experts"),
)

# Arguments of which a function gives in PyTorch ops what its op gives of the arguments above.
IN_TORCH_OPS = (
    Entry(linear_cross_entropy, LinearCrossEntropy, _of_probabilities, _of_probabilities_options, of="probabilities"),
)
