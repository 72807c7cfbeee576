"""What each op says about wrong arguments: the subject, the fact and the remedy, under the op's name."""

import pytest
import torch

from ckptkern.ops import catalog

ones, zeros = torch.ones, torch.zeros
# Of catalog.Sizes(): 2 samples of 3 tokens with 6 features; 5 hidden ones, 7 outputs or classes, 2 heads of 4, 3 experts.
UP, DOWN = zeros(4, 6), zeros(6, 4)
ROUTES = "top_k_index must be (2, 3, 'k') for an input of shape (2, 3, 6), with k of at least 1, but has shape"
EXPERTS = "gate_up_weight must be [experts, 2 hidden, 6] for an input with 6 features, but has shape"
SEQUENCES = "packed sequences must begin in order and within 0..6, but cu_seqlens is"
DIVERGENCES = {  # of both distillations
    "beta must be between 0 (forward KL) and 1 (reverse KL), not 1.5": dict(beta=1.5),
    "temperature must be positive and finite, not 0.0": dict(temperature=0.0),
    "mask must have shape (2, 3), but has (3,)": dict(mask=ones(3).bool()),
}
DIVERGENCE_TYPES = {
    "mask must be bool, True for tokens that count, not torch.float32": dict(mask=ones(2, 3)),
    "mask must be a Tensor, not list": dict(mask=[True]),
}
WRONG = {
    ("linear_stack", ValueError): {
        "at least one weight is needed": dict(weights=[], biases=None),
        "3 weights need as many biases, but got 1": dict(biases=[zeros(5)]),
        "either every layer has a bias or none has": dict(biases=[zeros(5), None, None]),
        "weights[0]'s output has 4 features but weights[1] has in_features=6": dict(weights=[UP, UP], biases=None),
        "weights[0] must be [out_features, in_features]": dict(weights=[zeros(6)], biases=None),
    },
    ("gated_mlp", ValueError): {
        "gate_weight and up_weight must have one shape, but have (4, 6) and (5, 6)": dict(
            gate_weight=UP, up_weight=zeros(5, 6), gate_bias=None, up_bias=None
        ),
    },
    ("scaled_dot_product_attention", TypeError): {
        "alibi_slopes must be floating point": dict(alibi_slopes=torch.arange(2)),
        "alibi_slopes must be a Tensor, not list": dict(alibi_slopes=[0.5] * 2),
    },
    ("scaled_dot_product_attention", ValueError): {
        "query has head dim 4 but key has 3": dict(key=zeros(2, 2, 4, 3)),
        "key has 4 rows but value has 5": dict(value=zeros(2, 2, 5, 4)),
        "enable_gqa=True": dict(query=zeros(2, 4, 3, 4)),
        "must divide": dict(query=zeros(2, 3, 3, 4), enable_gqa=True),
        "batch sizes must be equal or 1": dict(key=zeros(4, 2, 4, 4)),
        "must be [..., S, D]": dict(query=zeros(4)),
        "does not broadcast": dict(attn_mask=zeros(5, 4)),
        "window_size must be": dict(window_size=(-2, 0)),
        "softcap must be above 0 and finite, not 0": dict(softcap=0),
        "alibi_slopes is on meta": dict(alibi_slopes=ones(2, device="meta")),
        "alibi_slopes must be": dict(alibi_slopes=ones(3)),
    },
    ("scaled_dot_product_attention", RuntimeError): {
        "should not be set": dict(attn_mask=zeros(3, 4), is_causal=True),
    },
    ("varlen_attn", ValueError): {
        "must be [tokens, heads, head_dim]": dict(query=zeros(1, 6, 2, 4)),
        "must be int32": dict(cu_seq_q=torch.tensor([0, 2, 6])),
        "input is on cpu but cu_seq_q is on meta": dict(cu_seq_q=zeros(3, dtype=torch.int32, device="meta")),
        "sequences but cu_seq_k has": dict(cu_seq_q=zeros(2, dtype=torch.int32)),
        "must have one shape": dict(key=zeros(5, 2, 4)),
        "need enable_gqa=True": dict(query=zeros(6, 4, 4)),
        "max_q must be an integer of at least 0, not -1": dict(max_q=-1),
        "max_k must be an integer of at least 0, not None": dict(max_k=None),
        # PyTorch ops read the bounds and check them; the kernels do not, because the host would have to wait.
        f"{SEQUENCES} [0, 6, 2]": dict(cu_seq_q=torch.tensor([0, 6, 2]).int()),
        f"{SEQUENCES} [0, 2, 7]": dict(cu_seq_q=torch.tensor([0, 2, 7]).int()),
        f"{SEQUENCES} [-1, 2, 6]": dict(cu_seq_q=torch.tensor([-1, 2, 6]).int()),
    },
    ("varlen_attn", TypeError): {
        "cu_seq_k must be a Tensor, not NoneType": dict(cu_seq_k=None),
    },
    ("latent_attention_block", ValueError): {
        "for 3 heads of D_n": dict(num_heads=3),
        "num_heads must be": dict(num_heads=0),
        "weights must be q_weight": dict(q_weight=zeros(11, 6)),
        "kv_a_norm_weight must have shape (5,)": dict(kv_a_norm_weight=ones(7)),
        "q_a_weight has 4 features but q_weight has in_features=6": dict(q_a_weight=UP),
        "input has 6 features but q_weight has in_features=5": dict(q_weight=zeros(12, 5)),
        "q_a_bias and q_a_norm_weight need q_a_weight": dict(q_a_norm_weight=ones(6)),
        "weights must be": dict(out_weight=zeros(6, 7)),
        "the bias of kv_b_weight must have shape": dict(kv_b_bias=ones(3)),
        "with R even and at most 4": dict(rotary=(ones(3, 6), ones(3, 6))),
        "residual needs out_weight with 6 rows": dict(out_weight=zeros(5, 6), residual=True),
        "no gradient is formed for key_padding_mask": dict(key_padding_mask=zeros(2, 3, requires_grad=True)),
    },
    ("transformer_layer-latents", TypeError): {
        "attention_arguments has 'qkv_weight', but its arguments are q_weight,": dict(
            attention_arguments={"kv_a_weight": UP, "qkv_weight": UP}
        ),
        "attention_arguments must have q_weight": dict(attention_arguments={"kv_a_weight": UP}),
    },
    ("transformer_layer-latents", ValueError): {
        "with a kv_a_weight go without cross_attention_arguments": dict(
            cross_attention_arguments=dict(
                key_value=UP, qkv_weight=UP, qkv_bias=None, out_weight=UP, out_bias=None, num_heads=2
            )
        ),
    },
    ("moe_mlp", TypeError): {
        "top_k_index must be a Tensor, not list": dict(top_k_index=[[0, 1]]),
        "top_k_index must hold integers, not torch.float32": dict(top_k_index=zeros(2, 3, 2)),
        "top_k_index must hold integers, not torch.bool": dict(top_k_index=zeros(2, 3, 2).bool()),
    },
    ("moe_mlp", ValueError): {
        f"{ROUTES} (6,)": dict(top_k_index=zeros(6).long()),
        f"{ROUTES} (2, 3, 0)": dict(top_k_index=zeros(2, 3, 0).long(), top_k_weights=zeros(2, 3, 0)),
        "top_k_index and top_k_weights must have one shape, but have (2, 3, 2) and (2, 3, 1)": dict(
            top_k_weights=zeros(2, 3, 1)
        ),
        "gate_up_weight must be [experts, 2 hidden, features], but has shape (4, 6)": dict(gate_up_weight=UP),
        f"{EXPERTS} (3, 6, 10); pass gate_up_weight.transpose(1, 2) for [experts, 6, 2 hidden]": dict(
            gate_up_weight=zeros(3, 6, 10)
        ),
        f"{EXPERTS} (3, 9, 6)": dict(gate_up_weight=zeros(3, 9, 6)),
        "down_weight must have shape (3, 6, 5) beside gate_up_weight (3, 10, 6), but has (2, 6, 5)": dict(
            down_weight=zeros(2, 6, 5)
        ),
        "gate_up_bias must have shape (3, 10) beside gate_up_weight (3, 10, 6), but has (3, 5)": dict(
            gate_up_bias=zeros(3, 5)
        ),
        "down_bias must be [experts, features], but has shape (4,)": dict(down_bias=zeros(4)),
        "input is on cpu but top_k_index is on meta": dict(top_k_index=zeros(2, 3, 2, device="meta").long()),
    },
    ("grouped_gated_mlp", ValueError): {
        "input must be [rows, features], but has shape (1, 6, 6)": dict(x=zeros(1, 6, 6)),
        "offs must have shape (3,), the end of each expert's rows, but has (4,)": dict(offs=torch.arange(4)),
        "row_weights must have shape (6,), one value for each row, but has (6, 2)": dict(row_weights=zeros(6, 2)),
    },
    ("grouped_gated_mlp", TypeError): {
        "offs must hold integers, not torch.float32": dict(offs=ones(3)),
    },
    ("moe_block", ValueError): {
        "top_k must be an integer of at least 1, not 0": dict(top_k=0),
        "top_k=4 is more than the 3 experts that a token may choose from": dict(top_k=4),
        "top_k=2 is more than the 1 experts that a token may choose from": dict(num_groups=3, top_groups=1),
        "num_groups=3 needs top_groups": dict(num_groups=3),
        "num_groups must divide the 3 experts": dict(num_groups=2, top_groups=1),
        "score_bias must have shape (3,), but has (5,)": dict(score_bias=zeros(5)),
        "score_bias gets no gradient; detach it": dict(score_bias=zeros(3, requires_grad=True)),
        "router_weight must have 3 rows, one for each expert of gate_up_weight, but it has 4": dict(router_weight=UP),
        "shared_expert_gate needs shared_up_weight": dict(shared_expert_gate=zeros(1, 6)),
        "shared_up_weight needs shared_down_weight": dict(shared_up_weight=UP),
        "shared_down_weight must have 6 rows": dict(shared_up_weight=UP, shared_down_weight=DOWN[1:]),
        "shared_expert_gate must have one row, but has 4": dict(
            shared_up_weight=UP, shared_down_weight=DOWN, shared_expert_gate=UP
        ),
        "norm_weight and norm_bias need norm='layer' or 'rms'": dict(norm_weight=ones(6)),
        "router_dtype must be torch.float32, or None for the compute dtype, not torch.float16": dict(
            router_dtype=torch.float16
        ),
    },
    ("linear_cross_entropy", TypeError): {
        "target must be int64, or floating point for probabilities, not torch.int32": dict(target=zeros(2, 3).int()),
        "target must be a Tensor, not list": dict(target=[1, 2]),
        "top_k must be an int or None, not True": dict(top_k=True),
    },
    ("linear_cross_entropy", ValueError): {
        "shape (2, 3), a class": dict(target=zeros(3, 2).long()),
        "shape (2, 3, 7), probab": dict(target=zeros(2, 3)),
        "input has 6 features but linear_weight": dict(linear_weight=zeros(7, 8)),
        "must be [out_features": dict(linear_weight=zeros(7, 2, 6)),
        "must have shape (7,)": dict(linear_bias=zeros(6)),
        "a value for each class, but has shape (6,)": dict(weight=ones(6)),
        "weight gets no gradient": dict(weight=ones(7, requires_grad=True)),
        "label_smoothing must be between 0 and 1, not 1.5": dict(label_smoothing=1.5),
        "softcap must be positive or None, not 0.0": dict(softcap=0.0),
        "top_k must be from 1 to 7, not 0": dict(top_k=0),
        "top_k must be from 1 to 7, not 8": dict(top_k=8),
        "vocab_start needs a group": dict(vocab_start=3),
    },
    ("selected_log_probs", ValueError): {
        "temperature must be positive, not 0.0": dict(temperature=0.0),
        "hidden has 6 features but weight has in_features=8": dict(weight=zeros(7, 8)),
        "tokens must have shape (2, 3)": dict(tokens=zeros(5, 3).long()),
        "vocab_start needs a group": dict(vocab_start=3),
    },
    ("selected_log_probs", TypeError): {
        "tokens must be int64": dict(tokens=zeros(2, 3, 7)),
    },
    ("selected_log_probs", IndexError): {"Target 7 is out of bounds": dict(tokens=torch.full((2, 3), 7))},
    ("linear_distillation", ValueError): {
        **DIVERGENCES,
        "softcap must be positive and finite or None, not inf": dict(softcap=float("inf")),
        "teacher_softcap must be positive and finite or None": dict(teacher_softcap=-1),
        "teacher_input must have the student's leading shape (2, 3), but has (2, 4)": dict(teacher_input=zeros(2, 4, 5)),
        "student_weight has 7 classes but teacher_weight has 8": dict(teacher_weight=zeros(8, 5), teacher_bias=None),
        "slice off rows that only pad it": dict(teacher_weight=zeros(8, 5), teacher_bias=None),
        "teacher_input has 5 features but teacher_weight has in_features=9": dict(teacher_weight=zeros(7, 9)),
    },
    ("linear_distillation", TypeError): DIVERGENCE_TYPES,
    ("linear_topk_distillation", ValueError): {
        **DIVERGENCES,
        "teacher_log_probs must have shape (2, 3, 'k') with k > 0, but has (2, 3)": dict(teacher_log_probs=zeros(2, 3)),
        "with k > 0, but has (2, 3, 0)": dict(teacher_log_probs=zeros(2, 3, 0), teacher_tokens=zeros(2, 3, 0).long()),
        "teacher_tokens must have the shape of teacher_log_probs, (2, 3, 3), but has (2, 3, 2)": dict(
            teacher_tokens=zeros(2, 3, 2).long()
        ),
    },
    ("linear_topk_distillation", TypeError): DIVERGENCE_TYPES | {
        "teacher_tokens must be int64": dict(teacher_tokens=zeros(2, 3, 3)),
    },
    ("linear_topk_distillation", IndexError): {
        "Target -1 is out of bounds": dict(teacher_tokens=torch.full((2, 3, 3), -1)),
    },
}  # fmt: skip
OPS = {entry.name: entry for entry in (*catalog.OPS.values(), *catalog.OTHER_OPS)}


@pytest.mark.parametrize(
    ("name", "error", "message"), [(*of, message) for of, messages in WRONG.items() for message in messages]
)
def test_wrong_arguments(name, error, message):
    """Before anything is drawn."""
    entry, changes = OPS[name], WRONG[name, error][message]
    arguments = entry.inputs(catalog.Sizes())
    arguments |= {"dropout_p": 0.5} if "dropout_p" in entry.parameters else {}
    before = torch.get_rng_state()
    with pytest.raises(error) as found:
        catalog.call(entry, arguments, catalog.random_leaves(arguments), **changes)
    said = str(found.value)
    assert message in said
    assert said.startswith((f"{entry.function.__name__}: ", "packed sequences", "linear_cross_entropy: Target"))
    assert torch.equal(torch.get_rng_state(), before)
