"""Every op once, for whoever runs all of them: `selftest`, `autotune`, benchmarks and tests.

An entry has example inputs of any sizes, and for each option one value that differs from its default, with the arguments that
go with it. What is saved for backward follows from the op's description, on meta tensors.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..memory import saved_tensors
from .attention.block import AttentionBlock, attention_block
from .attention.latent import LatentAttentionBlock, latent_attention_block
from .attention.sdpa import Attention, scaled_dot_product_attention, varlen_attn
from .cross_entropy.loss import linear_cross_entropy, selected_log_probs
from .cross_entropy.op import LinearCrossEntropy
from .dispatch.checks import MODES
from .dispatch.choices import backend
from .distillation.loss import linear_distillation, linear_topk_distillation
from .distillation.op import LinearDistillation
from .examples import ACROSS_RANKS, SPLIT, Arguments, Normal, P, Sizes
from .examples import alone as _alone
from .examples import fixed as _fixed
from .examples import gain as _gain
from .examples import normal as _normal
from .examples import together as _with
from .experts import Experts, grouped_gated_mlp, moe_mlp
from .mlp.block import MLPBlock, mlp_block
from .mlp.gated_mlp import GatedMLP, gated_mlp
from .mlp.linear_act import LinearAct, linear_act
from .mlp.linear_stack import LinearStack, linear_stack
from .mlp.mlp import MLP, mlp
from .moe.block import MoEBlock, moe_block
from .registration.op import Op
from .sublayer.dropout import Dropout, dropout
from .sublayer.lora import LoRA
from .transformer_layer import LAYER_OPS, transformer_layer


def _x(s: Sizes) -> Arguments:
    return {"x": _normal(*s.lead, s.features)}


# -- linear layers and MLPs --------------------------------------------------------------------------------------------


def _linear_act(s: Sizes) -> Arguments:
    return dict(x=_normal(*s.lead, s.features), weight=_normal(s.out, s.features), bias=_normal(s.out))


def _linear_stack(s: Sizes) -> Arguments:
    widths = s.features, s.hidden, s.hidden, s.out
    weights = [_normal(n, k) for k, n in itertools.pairwise(widths)]
    return _x(s) | dict(weights=weights, biases=[_normal(n) for n in widths[1:]])


def _mlp(s: Sizes) -> Arguments:
    fc1 = dict(fc1_weight=_normal(s.hidden, s.features), fc1_bias=_normal(s.hidden))
    return _x(s) | fc1 | dict(fc2_weight=_normal(s.out, s.hidden), fc2_bias=_normal(s.out))


def _gated_mlp(s: Sizes) -> Arguments:
    first = dict(_weight=_normal(s.hidden, s.features), _bias=_normal(s.hidden))
    return dict(
        x=_normal(*s.lead, s.features), **{f"gate{end}": one for end, one in first.items()},
        **{f"up{end}": one for end, one in first.items()}, down_weight=_normal(s.out, s.hidden), down_bias=_normal(s.out),
    )  # fmt: skip


def _mlp_branch(s: Sizes) -> Arguments:
    return dict(
        up_weight=_normal(s.hidden, s.features), up_bias=_normal(s.hidden),
        down_weight=_normal(s.features, s.hidden), down_bias=_normal(s.features),
    )  # fmt: skip


def _mlp_options(default: str) -> Callable[[Sizes], dict[str, Arguments]]:
    activation = "silu" if default != "silu" else "gelu"
    return lambda s: _alone(activation=activation, dropout_p=P) | _with({"dropout_p": P}, training=False)


def _around(s: Sizes) -> dict[str, Arguments]:
    """What both blocks have."""
    d, found = s.features, _alone(layer_scale=_normal(s.features), resid_dropout_p=P, drop_path_p=P)
    for norm in ("norm", "post_norm"):
        given = {norm: "layer", f"{norm}_weight": _gain(d), f"{norm}_bias": _normal(d)}
        found |= dict.fromkeys(given, given) | {f"{norm}_eps": given | {f"{norm}_eps": 0.1}}
    samples = s.lead[0] if len(s.lead) > 1 else 1
    vectors = {name: _normal(samples, d) for name in ("norm_scale", "norm_shift", "layer_scale")}
    adaptive = dict.fromkeys(("norm_scale", "norm_shift"), found["norm"] | vectors)
    return found | adaptive | _with(found["norm"], norm_first=False) | _with({"resid_dropout_p": P}, training=False)


def _lora(rows: int, columns: int) -> LoRA:
    return LoRA(_normal(2, columns), _normal(rows, 2), 0.5, P)


def _mlp_block_options(s: Sizes) -> dict[str, Arguments]:
    gate = dict(gate_weight=_normal(s.hidden, s.features), gate_bias=_normal(s.hidden))
    lora = {"up": _lora(s.hidden, s.features), "down": _lora(s.features, s.hidden)}
    return _around(s) | dict.fromkeys(gate, gate) | _alone(activation="silu", dropout_p=P, lora=lora, residual=False)


# -- attention ---------------------------------------------------------------------------------------------------------

HEAD_DIM = 4


def _attention(s: Sizes, kv_heads: int | None = None) -> Arguments:
    own, packed = s.heads * HEAD_DIM, (s.heads + 2 * (kv_heads or s.heads)) * HEAD_DIM
    return dict(
        qkv_weight=_normal(packed, s.features), qkv_bias=_normal(packed), out_weight=_normal(s.features, own),
        out_bias=_normal(s.features), num_heads=s.heads,
    )  # fmt: skip


def _ends(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def _slopes(s: Sizes) -> Tensor:
    return 0.5 ** torch.arange(1, s.heads + 1)


def _seen(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril(1)


def _attention_options(s: Sizes) -> dict[str, Arguments]:
    B, S, d, D, own = *s.lead, s.features, HEAD_DIM, s.heads * HEAD_DIM
    q_norm = {"qk_norm": (_gain(D), _gain(D))}
    packed = dict(x=_normal(s.tokens, d), cu_seqlens=_ends(0, 2, s.tokens))
    padding = torch.ones(B, S, dtype=torch.bool).triu(2)  # one token of the first sequence
    lora = {"qkv": _lora(3 * s.heads * D, d), "out": _lora(d, s.heads * D)}
    gate = dict(gate_weight=_normal(s.heads, d), gate_bias=_normal(s.heads))
    gated = dict(qkv_weight=[_normal(rows, d) for rows in (2 * own, own, own)], qkv_bias=None)
    return {
        **_around(s), **_with(_attention(s, 1), num_kv_heads=1), "cu_seqlens": packed, **_with(packed, max_seqlen=2),
        "qk_norm": q_norm, **_with({"attn_mask": _seen(S, S)}, mask_is_exclusion=True),
        **_with(q_norm, qk_norm_kind="layer", qk_norm_eps=0.1), **_with({"rotary": 100.0}, rotary_interleaved=True),
        **_with({"gate_weight": _normal(own, d)}, gate_bias=_normal(own)), "gate_weight": gate,
        **_with(gated, gate_in_query=True),
        **_alone(
            key_value=_normal(B, S + 1, d), qkv_layout="heads", rotary=100.0, is_causal=True, attn_mask=_normal(S, S),
            key_padding_mask=padding, window_size=(1, 0), alibi_slopes=_slopes(s), scale=0.7,
            softcap=2.0, sinks=_normal(s.heads), dropout_p=P, lora=lora, residual=True,
        ),
    }  # fmt: skip


LATENT_HEAD = 2, 4, 3  # of q and k what no position rotates and what one does, and of v


def _latent(s: Sizes) -> Arguments:
    nope, rope, v = LATENT_HEAD
    return dict(
        x=_normal(*s.lead, s.features), q_weight=_normal(s.heads * (nope + rope), s.features),
        kv_a_weight=_normal(s.hidden + rope, s.features), kv_b_weight=_normal(s.heads * (nope + v), s.hidden),
        out_weight=_normal(s.features, s.heads * v), num_heads=s.heads,
    )  # fmt: skip


def _latent_options(s: Sizes) -> dict[str, Arguments]:
    (B, S), d, (nope, rope, v), rank = s.lead, s.features, LATENT_HEAD, s.out
    q_a = dict(q_a_weight=_normal(rank, d), q_weight=_normal(s.heads * (nope + rope), rank))
    return {
        **_around(s), "q_a_weight": q_a, **_with(q_a, q_a_bias=_normal(rank), q_a_norm_weight=_gain(rank)),
        **_with({"kv_a_norm_weight": _gain(s.hidden)}, latent_norm_eps=0.1),
        **_with({"attn_mask": _seen(S, S)}, mask_is_exclusion=True),
        **_with({"rotary": 100.0}, rotary_interleaved=True),
        **_alone(
            q_bias=_normal(s.heads * (nope + rope)), kv_a_bias=_normal(s.hidden + rope), kv_a_norm_weight=_gain(s.hidden),
            kv_b_bias=_normal(s.heads * (nope + v)), out_bias=_normal(d), rotary=100.0, is_causal=True,
            attn_mask=_normal(S, S), key_padding_mask=torch.ones(B, S, dtype=torch.bool).triu(2), window_size=(1, 0),
            scale=0.7, softcap=2.0, dropout_p=P, residual=True,
        ),
    }  # fmt: skip


def _layer_inputs(s: Sizes) -> Arguments:
    return dict(x=_normal(*s.lead, s.features), attention_arguments=_attention(s), mlp_arguments=_mlp_branch(s))


def _layer_options(s: Sizes) -> dict[str, Arguments]:
    crossed = _attention(s) | {"key_value": _normal(s.lead[0], s.lead[1] + 1, s.features)}
    dropped = {"mlp_arguments": _mlp_branch(s) | {"dropout_p": P}}
    return _alone(cross_attention_arguments=crossed, parallel=True) | _with(dropped, training=False)


def _latent_layer_inputs(s: Sizes) -> Arguments:
    return _layer_inputs(s) | {"attention_arguments": {name: one for name, one in _latent(s).items() if name != "x"}}


def _latent_layer_options(s: Sizes) -> dict[str, Arguments]:
    return {name: one for name, one in _layer_options(s).items() if name != "cross_attention_arguments"}


def _sdpa_inputs(s: Sizes) -> Arguments:
    B, S = s.lead
    rows = {"query": S, "key": S + 1, "value": S + 1}
    return {name: _normal(B, s.heads, length, HEAD_DIM) for name, length in rows.items()}


def _sdpa_options(s: Sizes) -> dict[str, Arguments]:
    one = dict.fromkeys(("key", "value"), _normal(s.lead[0], 1, s.lead[1] + 1, HEAD_DIM))
    return _with(one, enable_gqa=True) | _alone(
        attn_mask=_normal(s.lead[1], s.lead[1] + 1), dropout_p=P, is_causal=True, scale=0.7, window_size=(1, 0),
        alibi_slopes=_slopes(s), softcap=2.0, sinks=_normal(s.heads),
    )  # fmt: skip


def _varlen_inputs(s: Sizes) -> Arguments:
    names, ends = ("query", "key", "value"), _ends(0, 2, s.tokens)
    packed = dict.fromkeys(names, _normal(s.tokens, s.heads, HEAD_DIM))
    return packed | dict(cu_seq_q=ends, cu_seq_k=ends, max_q=s.tokens - 2, max_k=s.tokens - 2)


def _varlen_options(s: Sizes) -> dict[str, Arguments]:
    one = dict.fromkeys(("key", "value"), _normal(s.tokens, 1, HEAD_DIM))
    return _with(one, enable_gqa=True) | _alone(is_causal=True, scale=0.7, window_size=(1, 0))


# -- experts and the loss ----------------------------------------------------------------------------------------------


def _experts(s: Sizes) -> Arguments:
    gate_up, down = _normal(s.experts, 2 * s.hidden, s.features), _normal(s.experts, s.features, s.hidden)
    return dict(gate_up_weight=gate_up, down_weight=down)


def _moe_mlp(s: Sizes) -> Arguments:
    index = torch.arange(2 * s.tokens).view(*s.lead, 2) // 3 % s.experts
    biases = dict(gate_up_bias=_normal(s.experts, 2 * s.hidden), down_bias=_normal(s.experts, s.features))
    routing = dict(top_k_index=index, top_k_weights=_normal(*s.lead, 2))
    return {"x": _normal(*s.lead, s.features)} | routing | _experts(s) | biases


def _experts_lora(s: Sizes) -> dict[str, LoRA]:
    layers = {"gate_up": (2 * s.hidden, s.features, 0.5), "down": (s.features, s.hidden, 0.25)}
    return {one: LoRA(_normal(s.experts, 2, d), _normal(s.experts, n, 2), c) for one, (n, d, c) in layers.items()}


def _moe_block(s: Sizes) -> Arguments:
    x, router = _normal(*s.lead, s.features), _normal(s.experts, s.features)
    return dict(x=x, router_weight=router, top_k=2) | _experts(s)


def _moe_block_options(s: Sizes) -> dict[str, Arguments]:
    d, n = s.features, s.hidden
    shared = dict(
        shared_gate_weight=_normal(n, d), shared_gate_bias=_normal(n), shared_up_weight=_normal(n, d),
        shared_up_bias=_normal(n), shared_down_weight=_normal(d, n), shared_down_bias=_normal(d),
        shared_expert_gate=_normal(1, d),
    )  # fmt: skip
    four = {"router_weight": _normal(4, d)} | _experts(s._replace(experts=4))
    groups = four | dict(num_groups=2, top_groups=1)
    return (
        _around(s)
        | dict.fromkeys(shared, shared)
        | _with(shared, lora=_experts_lora(s) | {"shared_gate": _lora(n, d), "shared_down": _lora(d, n)})
        | _with(groups, num_groups=2, top_groups=1, group_score="max")
        | _with({"router_dtype": torch.float32}, router_bias=_normal(s.experts))
        | _alone(
            activation="gelu", scoring="sigmoid", normalize=False, score_bias=torch.linspace(-0.5, 0.5, s.experts),
            routed_scaling_factor=2.5, router_dtype=torch.float32, gate_up_bias=_normal(s.experts, 2 * n),
            down_bias=_normal(s.experts, d), residual=False,
        )
    )  # fmt: skip


def _moe_layer_inputs(s: Sizes) -> Arguments:
    return _layer_inputs(s) | {"mlp_arguments": {name: one for name, one in _moe_block(s).items() if name != "x"}}


def _latent_moe_layer_inputs(s: Sizes) -> Arguments:
    return _moe_layer_inputs(s) | {"attention_arguments": _latent_layer_inputs(s)["attention_arguments"]}


def _moe_layer_options(s: Sizes) -> dict[str, Arguments]:
    dropped = {"mlp_arguments": _moe_layer_inputs(s)["mlp_arguments"] | {"resid_dropout_p": P}}
    return _alone(parallel=True) | _with(dropped, training=False)


def _grouped_gated_mlp(s: Sizes) -> Arguments:
    offs = torch.arange(1, s.experts + 1, dtype=torch.int32) * (s.tokens // s.experts)
    return dict(x=_normal(s.tokens, s.features), offs=offs) | _experts(s)


def _cross_entropy(s: Sizes) -> Arguments:
    target = torch.arange(s.tokens).view(s.lead) % s.out
    weight, bias = _normal(s.out, s.features), _normal(s.out)
    return dict(input=_normal(*s.lead, s.features), linear_weight=weight, target=target, linear_bias=bias)


def _cross_entropy_options(s: Sizes) -> dict[str, Arguments]:
    weight = torch.linspace(0.5, 2.0, s.out)
    return _with({"reduction": "sum"}, weight=weight) | _alone(
        reduction="none", ignore_index=1, label_smoothing=0.1, logit_scale=0.7, softcap=3.0, z_loss=0.1, return_lse=True,
        return_log_probs=True, return_entropy=True, return_accuracy=True, top_k=3, lora=_lora(s.out, s.features), **SPLIT,
    )  # fmt: skip


def _selected(s: Sizes) -> Arguments:
    given = _cross_entropy(s)
    hidden, weight, tokens, bias = given.values()
    return dict(hidden=hidden, weight=weight, tokens=tokens, bias=bias)


def _selected_options(s: Sizes) -> dict[str, Arguments]:
    return _alone(temperature=1.5, return_entropy=True, ignore_index=1, lora=_lora(s.out, s.features), **SPLIT)


def _distillation(s: Sizes) -> Arguments:
    d, e = s.features, s.hidden
    return dict(
        student_input=_normal(*s.lead, d), student_weight=_normal(s.out, d), student_bias=_normal(s.out),
        teacher_input=_fixed(*s.lead, e), teacher_weight=_fixed(s.out, e), teacher_bias=_fixed(s.out),
    )  # fmt: skip


def _distillation_options(s: Sizes) -> dict[str, Arguments]:
    mask = torch.arange(s.tokens).view(s.lead) % 3 > 0
    return _with({"beta": 0.3}, mask=mask, reduction="none") | _alone(
        beta=1.0, temperature=1.5, softcap=3.0, teacher_softcap=2.0
    )


def _topk_distillation(s: Sizes) -> Arguments:
    teacher, k = _distillation(s), 3
    student = {name: one for name, one in teacher.items() if name.startswith("student")}
    tokens = (torch.arange(s.tokens)[:, None] + 2 * torch.arange(k)).view(*s.lead, k) % s.out
    log_probs = _fixed(*s.lead, s.out).log_softmax(-1).gather(-1, tokens)
    return student | dict(teacher_log_probs=log_probs, teacher_tokens=tokens)


def _topk_distillation_options(s: Sizes) -> dict[str, Arguments]:
    shared = {name: one for name, one in _distillation_options(s).items() if "softcap" not in name}
    return shared | _alone(add_tail_bucket=False, group=ACROSS_RANKS, vocab_start=ACROSS_RANKS)


def _of_probabilities(s: Sizes) -> Arguments:
    given = _cross_entropy(s)
    return given | {"target": torch.nn.functional.one_hot(given["target"], s.out).float()}


def _of_probabilities_options(s: Sizes) -> dict[str, Arguments]:
    return {name: one for name, one in _cross_entropy_options(s).items() if name != "ignore_index"}


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
        return self.chosen(sizes) | _alone(**common)


OPS = {
    entry.name: entry
    for entry in (
        Entry(linear_act, LinearAct, _linear_act, lambda s: _alone(activation="gelu")),
        Entry(linear_stack, LinearStack, _linear_stack, lambda s: _alone(activation="gelu")),
        Entry(mlp, MLP, _mlp, _mlp_options("gelu")),
        Entry(gated_mlp, GatedMLP, _gated_mlp, _mlp_options("silu")),
        Entry(mlp_block, MLPBlock, lambda s: _x(s) | _mlp_branch(s), _mlp_block_options),
        Entry(attention_block, AttentionBlock, lambda s: _x(s) | _attention(s), _attention_options),
        Entry(latent_attention_block, LatentAttentionBlock, _latent, _latent_options),
        Entry(transformer_layer, LAYER_OPS[0], _layer_inputs, _layer_options),
        Entry(scaled_dot_product_attention, Attention, _sdpa_inputs, _sdpa_options),
        Entry(varlen_attn, Attention, _varlen_inputs, _varlen_options),
        Entry(moe_mlp, Experts, _moe_mlp, lambda s: _alone(activation="gelu", lora=_experts_lora(s))),
        Entry(moe_block, MoEBlock, _moe_block, _moe_block_options),
        Entry(
            grouped_gated_mlp, Experts, _grouped_gated_mlp,
            lambda s: _alone(activation="gelu", row_weights=_normal(s.tokens), lora=_experts_lora(s)),
        ),
        Entry(linear_cross_entropy, LinearCrossEntropy, _cross_entropy, _cross_entropy_options),
        Entry(selected_log_probs, LinearCrossEntropy, _selected, _selected_options),
        Entry(linear_distillation, LinearDistillation, _distillation, _distillation_options),
        Entry(linear_topk_distillation, LinearCrossEntropy, _topk_distillation, _topk_distillation_options),
        Entry(dropout, Dropout, _x, lambda s: _alone(p=P, training=False)),
    )
}  # fmt: skip

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


# -- calls -------------------------------------------------------------------------------------------------------------


def _mapped(
    tree: Any, of_normal: Callable[[str, Normal], Any], of_tensor: Callable[[Tensor], Tensor], path: str = ""
) -> Any:
    """The arguments with other leaves; `path` names an input, such as "mlp_arguments.up_weight" or "weights.0"."""
    if isinstance(tree, Normal):
        return of_normal(path, tree)
    if isinstance(tree, Tensor):
        return of_tensor(tree)
    if isinstance(tree, dict):
        items = [(name, value, f"{path}.{name}" if path else name) for name, value in tree.items()]
        return {name: _mapped(value, of_normal, of_tensor, where) for name, value, where in items}
    if isinstance(tree, list | tuple):
        values = [_mapped(value, of_normal, of_tensor, f"{path}.{i}") for i, value in enumerate(tree)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def input_shapes(arguments: Arguments) -> dict[str, tuple[int, ...]]:
    """The shapes of what is trained, by name."""
    found: dict[str, tuple[int, ...]] = {}
    _mapped(arguments, lambda path, one: found.setdefault(path, one.shape), lambda t: t)
    return found


def call(entry: Entry, arguments: Arguments, leaves: dict[str, Tensor], **more: Any) -> Any:
    """The op's result. arguments: the entry's, whose trained inputs are `leaves`, by name; None for one that is not there."""
    given = _mapped(arguments, lambda path, _: leaves.get(path), lambda t: t.to(next(iter(leaves.values())).device))
    return entry.function(**given | more)


def random_leaves(
    arguments: Arguments, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """The trained inputs, which keep the size of what passes through them."""
    generator, found = torch.Generator(device).manual_seed(seed), {}
    wide = torch.promote_types(dtype, torch.float32)

    def random(path: str, one: Normal) -> None:
        scale = 0.25 if one.mean else max(one.shape[-1], 1) ** -0.5 if "weight" in path and len(one.shape) > 1 else 1.0
        value = one.mean + scale * torch.randn(one.shape, generator=generator, dtype=wide, device=device)
        found[path] = value.to(dtype).requires_grad_()

    _mapped(arguments, random, lambda t: t)
    return found


def _meta_leaves(arguments: Arguments, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = input_shapes(arguments)
    return {name: torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for name, shape in shapes.items()}


def saved_bytes(entry: Entry, arguments: Arguments, dtype: torch.dtype, **options: Any) -> int:
    """What `saves` declares, and x where backward reads it: bytes besides parameters."""
    leaves = _meta_leaves(arguments, dtype)
    first = next(iter(leaves))
    with backend("eager"), saved_tensors(exclude=[t for name, t in leaves.items() if name != first]) as saved:
        call(entry, arguments, leaves, **options)
    return saved.bytes
