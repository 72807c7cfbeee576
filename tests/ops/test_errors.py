"""What each op says about wrong arguments, the subject, the fact and the remedy, under its name: by a rule for every tensor and
option of the catalogue, and one by one. No error moves the generator."""

import contextlib
import re

import pytest
import torch
from support import catalog

from ckptkern import LoRA
from ckptkern.errors import DeviceError, DtypeError, LayoutError, ShapeError

OPS = {entry.name: entry for entry in (*catalog.OPS.values(), *catalog.OTHER_OPS)}


@contextlib.contextmanager
def refused(op: str, error: type | tuple[type, ...], message: str):
    before = torch.get_rng_state()
    with pytest.raises(error, match=f"(?s)^(?={op}: |packed sequences|linear_cross_entropy: Target).*{message}"):
        yield
    assert torch.equal(torch.get_rng_state(), before), "an error has moved the generator"


# -- tensors of every op -----------------------------------------------------------------------------------------------


def of_another_kind(t: torch.Tensor) -> torch.Tensor:
    return t.detach().int() if t.is_floating_point() else t.float()


# What replaces a tensor, the error, and what its message says.
WRONG = {
    "a number": (lambda t: 0.5, TypeError, "{label} must be .*, not float"),
    "of another kind": (of_another_kind, (DtypeError, ShapeError), "{label} must"),
    "elsewhere": (lambda t: t.detach().to("meta"), DeviceError, "{label} is on meta"),
    "with more columns": (lambda t: t.new_ones(*t.shape[:-1], t.shape[-1] + 2), ShapeError, ""),
    "of no dimensions": (lambda t: t.new_ones(()), ShapeError, ""),
    # of those that are trained
    "sparse": (lambda t: t.detach().to_sparse(), LayoutError, "{label} must be a dense tensor, not torch.sparse_coo"),
    "of another dtype": (lambda t: t.detach().double(), DtypeError, "float64"),
}
# Taken all the same: what is cast, what broadcasts, and sizes that no other tensor has.
TAKEN = re.compile(
    r"(?!moe_mlp \w+_bias).*(bias|norm|scale|shift|sinks|lora|expert_gate|(top_k|row)_weights)\S* of another dtype"
    r"|.* layer_scale a number|.* attn_mask of no dimensions|.* key_padding_mask of another kind"
    r"|scaled_dot_product_attention value with more columns|linear_act weight sparse|.*cu_seqlens with more columns"
    r"|dropout x (elsewhere|of another dtype|with more columns|of no dimensions)"
)


def arguments_with(entry) -> dict[str, tuple[dict, bool]]:
    """For each tensor, by name, arguments that have it, and whether it is trained."""
    trained, others = {}, {}
    for chosen in ({}, *entry.every_option().values()):
        inputs = entry.inputs(catalog.Sizes()) | chosen
        if catalog.ACROSS_RANKS not in inputs.values():
            trained = dict.fromkeys(catalog.input_shapes(inputs), (inputs, True)) | trained
            others |= {name: (inputs, False) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return others | trained


def label_of(place: str) -> str:
    """How messages call a tensor: weights[1] of a stack, "the bias of fc1_weight"; "" where they say more than its name."""
    name = re.sub(r"\w+_arguments\.", "", place)
    if re.fullmatch(r"x|input|hidden|student_input|query|key|value", name):
        return f"(input|{name})"
    if re.search(r"norm|lora|router|shared_expert|scale|shift|qkv_\w+\.", name):
        return ""
    weight = re.sub(r"\.(\d)", r"\\[\1\\]", name.replace("biases", "weights").replace("bias", "weight"))
    return f"(the bias of {weight}|{name})" if "bias" in name else weight


@pytest.mark.parametrize("name", catalog.OPS)
def test_a_wrong_tensor(name):
    entry = OPS[name]
    for place, (inputs, is_trained) in arguments_with(entry).items():
        leaves = catalog.random_leaves(inputs)
        for kind, (replaced, error, message) in WRONG.items():
            if not is_trained and kind in ("sparse", "of another dtype"):
                continue
            taken = TAKEN.match(f"{name} {place} {kind}")
            message = (message if is_trained else message or "{label}").format(label=label_of(place))
            wrong = {place: replaced(leaves[place] if is_trained else inputs[place])}
            others = {path: t for path, t in leaves.items() if path != place}
            with contextlib.nullcontext() if taken else refused(name, error, message):
                catalog.call(entry, inputs, others | wrong, **({} if is_trained else wrong))


# -- options of every op -----------------------------------------------------------------------------------------------

NAN, LEARNED = float("nan"), torch.ones((), requires_grad=True)
# Any object as a bool, as in torch.
AS_TORCH = {"training": ("mlp", "gated_mlp", "dropout"), "is_causal": ("scaled_dot_product_attention", "varlen_attn")}
AS_TORCH |= {"enable_gqa": AS_TORCH["is_causal"]}
UNCHECKED = ("ignore_index", "group", "vocab_start")


def wrong_values(option: str, value: object) -> tuple[type | tuple[type, ...], str, tuple]:
    """(error, message, values) that an option refuses, of one that it takes."""
    if option == "workspace":
        wrong = (0, True, 1.5, "lots", b"5")
        return ValueError, "workspace must be a positive number of bytes or a string like '64MiB', not {!r}", wrong
    if option == "p" or option.endswith("_p"):
        wrong = (-0.1, 1.5, NAN, "0.5", None, torch.tensor(0.5))
        return ValueError, "dropout probability has to be a number between 0 and 1, but got {!r}", wrong
    if isinstance(value, bool):
        return TypeError, f"{option} must be a bool, not {{!r}}", ("x", 1)
    if isinstance(value, str):
        return ValueError, f"{option} must be one of .*, not {{!r}}", ("some", "", True)
    if isinstance(value, int):
        return (
            (TypeError, ValueError),
            f"{option} must be (an int|from 1).*, not {{!r}}",
            ("a", 2.5, True, -1, torch.tensor(2)),
        )
    message = f"({option} must be a .*number.*, not|no gradient is formed for {option})"
    return (TypeError, ValueError), message, ("a", True, (1.0,), LEARNED)


@pytest.mark.parametrize("name", catalog.OPS)
def test_a_wrong_option(name):
    entry, chosen = OPS[name], OPS[name].every_option()
    for option in entry.parameters.keys() - {*UNCHECKED}:
        inputs = entry.inputs(catalog.Sizes()) | chosen.get(option, {})
        value = inputs.get(option, entry.parameters[option].default)
        if not isinstance(value, str | int | float) or name in AS_TORCH.get(option, ()):
            continue
        error, message, wrong = wrong_values(option, value)
        for bad in wrong:
            with refused(name, error, message.replace("{!r}", re.escape(repr(bad)))):
                catalog.call(entry, inputs, catalog.random_leaves(inputs), **{option: bad})


# -- one by one --------------------------------------------------------------------------------------------------------

ones, zeros = torch.ones, torch.zeros
# Of catalog.Sizes(): 2 samples of 3 tokens with 6 features; 5 hidden ones, 7 outputs or classes, 2 heads of 4, 3 experts.
X, ROWS, UP, DOWN, QKV, OUT = zeros(2, 3, 6), zeros(3, 6), zeros(4, 6), zeros(6, 4), zeros(24, 6), zeros(6, 8)
MASK, PADDING = zeros(3, 3), zeros(2, 3).bool()
THREE = dict(qkv_weight=QKV.chunk(3), qkv_bias=None)
ATTENTION = dict(qkv_weight=QKV, qkv_bias=None, out_weight=OUT, out_bias=None, num_heads=2, dropout_p=0.5)
MLP = dict(up_weight=UP, up_bias=None, down_weight=DOWN, down_bias=None)
A, B = zeros(2, 6), zeros(5, 2)
SEQUENCES = "packed sequences must begin in order and within 0..6, but cu_seqlens is"


def update(*args, layer: str = "up") -> dict:
    return dict(lora={layer: LoRA(*args)})


def attention(**changes) -> dict:
    return dict(attention_arguments=ATTENTION | changes)


def cross(**changes) -> dict:
    return dict(cross_attention_arguments=ATTENTION | changes)


def feed_forward(**changes) -> dict:
    return dict(mlp_arguments=MLP | changes)


REFUSED = {
    "linear_topk_distillation": {
        "Target -1 is out of bounds": dict(teacher_tokens=torch.full((2, 3, 3), -1)),
    },
    "linear_stack": {
        "weights must be a list of tensors, not Tensor": dict(weights=UP),
        "at least one weight is needed": dict(weights=[], biases=None),
        "3 weights need as many biases, but got 1": dict(biases=[zeros(5)]),
        "either every layer has a bias or none has": dict(biases=[zeros(5), None, None]),
        "weights[0]'s output has 4 features but weights[1] has in_features=6": dict(weights=[UP, UP], biases=None),
    },
    "mlp": {
        "pass fc1_weight.t()": dict(fc1_weight=zeros(6, 5), fc1_bias=None),
        "input must be a dense tensor, not nested": dict(
            x=torch.nested.nested_tensor([ROWS, ROWS[:2]], layout=torch.strided)
        ),
    },
    "gated_mlp": {
        "gate_weight and up_weight must have one shape, but have (4, 6) and (5, 6)": dict(gate_weight=UP, gate_bias=None),
    },
    "mlp_block": {
        "gate_bias needs gate_weight": dict(gate_bias=ones(5)),
        "residual needs down_weight with 6 rows": dict(down_weight=zeros(5, 5), down_bias=None),
        "lora must be a dict of ckptkern.LoRA by layer, not list": dict(lora=[LoRA(A, B)]),
        "lora has 'q', but the layers are 'up', 'down'": update(A, B, layer="q"),
        "lora['up'] must be ckptkern.LoRA(a, b, scale, dropout_p), not Tensor": dict(lora={"up": A}),
        "must be [r, 6] and [5, r], but have shapes (6, 2)": update(A.t(), B),
        "the scale of lora['up'] must be a number": update(A, B, "1"),
        "dropout probability has to be": update(A, B, 1.0, 2.0),
    },
    "attention_block": {
        "input must be": dict(x=ROWS[0]),
        "num_kv_heads=3 must divide num_heads=2": dict(num_kv_heads=3),
        "must be one tensor or three": dict(qkv_weight=[QKV, QKV]),
        "residual needs out_weight with 6 rows": dict(out_weight=OUT[:5], out_bias=None, residual=True),
        "post_norm_weight and post_norm_bias need post_norm=": dict(post_norm_weight=ROWS[0]),
        "k's norm bias must have the shape of its weight": dict(qk_norm=(ones(4), (ones(8), ones(4)))),
        "qk_norm must be a pair of tensors": dict(qk_norm=(ones(4),)),
        "with R even and at most 4": dict(rotary=(ones(3, 6),) * 2),
        "rotary is on meta": dict(rotary=(ones(3, 4, device="meta"),) * 2),
        "no gradient is formed for rotary": dict(rotary=(ones(3, 4, requires_grad=True),) * 2),
        "cu_seqlens must be int32 [N + 1] and come with an input": dict(cu_seqlens=torch.arange(4).int()),
        "max_seqlen needs cu_seqlens, which is None": dict(max_seqlen=7),
        "gate_weight must have 8 rows, one for each column of o, or 2, one for each head": dict(gate_weight=UP),
        "gate_bias needs gate_weight": dict(gate_bias=ones(2)),
        "gate_in_query needs three weights": dict(gate_in_query=True),
        "with gate_in_query": THREE | dict(gate_in_query=True),
        "pass three weights": dict(key_value=X, **update(A, zeros(24, 2), layer="qkv")),
        "layer_scale must be a number, have shape (6,), or have shape (2, 6) or (2, 1, 6), one vector for each sample of the "
        "input (2, 3, 6), but has (5,)": dict(layer_scale=ones(5)),
        "attn_mask must be one mask or a pair of them, not 3": dict(attn_mask=[MASK] * 3),
        "key_padding_mask does not go with a pair of masks": dict(attn_mask=[MASK] * 2, key_padding_mask=PADDING),
        "no gradient is formed for the second attn_mask": dict(attn_mask=(MASK, zeros(3, 3, requires_grad=True))),
        "attn_mask of shape (2, 3) does not broadcast": dict(attn_mask=(MASK, MASK[:2])),
        "key_value must be [B, S_k, d_k] with the samples of the input": dict(key_value=X[:1]),
        "rotary is for self-attention and does not go with key_value": dict(key_value=X, rotary=1e4),
    },
    "latent_attention_block": {
        "for 3 heads of D_n": dict(num_heads=3),
        "q_a_weight has 4 features but q_weight has in_features=6": dict(q_a_weight=UP),
        "q_a_bias and q_a_norm_weight need q_a_weight": dict(q_a_norm_weight=ones(6)),
    },
    "transformer_layer": {
        "recompute is an argument of transformer_layer, not of": attention(recompute="full"),
        "attention_arguments has 'heads', but its arguments are qkv_weight,": attention(heads=4),
        "mlp_arguments must have up_weight, up_bias, down_weight, down_bias": dict(mlp_arguments={}),
        "attention_arguments must be a dict of arguments by name, not list": dict(attention_arguments=[1]),
        "out_weight must have 6 rows": attention(out_weight=OUT[:5], residual=False),
        "mlp_arguments has norm_first=False": dict(parallel=True, **feed_forward(norm="layer", norm_first=False)),
        "mlp_arguments has residual=False": dict(parallel=True, **feed_forward(residual=False)),
        "down_weight must have 6 rows, but it has 5": dict(parallel=True, **feed_forward(down_weight=DOWN[:5])),
        "cross_attention_arguments must have key_value": cross(),
        "recompute must be one of 'none', 'selective', 'full', not 'some'": dict(recompute=("none", "some")),
    },
    "transformer_layer-latents": {
        "attention_arguments has 'qkv_weight', but its arguments are q_weight,": dict(
            attention_arguments={"kv_a_weight": UP, "qkv_weight": UP}
        ),
        "with a kv_a_weight go without cross_attention_arguments": cross(key_value=X),
    },
    "scaled_dot_product_attention": {
        "query has head dim 4 but key has 3": dict(key=zeros(2, 2, 4, 3)),
        "key has 4 rows but value has 5": dict(value=zeros(2, 2, 5, 4)),
        "enable_gqa=True": dict(query=zeros(2, 4, 3, 4)),
        "batch sizes must be equal or 1": dict(key=zeros(4, 2, 4, 4)),
        "must be [..., S, D]": dict(query=zeros(4)),
        "window_size must be": dict(window_size=(-2, 0)),
        "softcap must be above 0 and finite, not 0": dict(softcap=0),
    },
    "varlen_attn": {
        "must be [tokens, heads, head_dim]": dict(query=zeros(1, 6, 2, 4)),
        "need enable_gqa=True": dict(query=zeros(6, 4, 4)),
        # PyTorch ops read the bounds and check them; the kernels do not, because the host would have to wait.
        f"{SEQUENCES} [0, 6, 2]": dict(cu_seq_q=torch.tensor([0, 6, 2]).int()),
        f"{SEQUENCES} [0, 2, 7]": dict(cu_seq_q=torch.tensor([0, 2, 7]).int()),
        f"{SEQUENCES} [-1, 2, 6]": dict(cu_seq_q=torch.tensor([-1, 2, 6]).int()),
    },
    "moe_mlp": {
        "but has shape (3, 6, 10); pass gate_up_weight.transpose(1, 2) for [experts, 6, 2 hidden]": dict(
            gate_up_weight=zeros(3, 6, 10)
        ),
        "[experts, 2 hidden, 6] for an input with 6 features, but has shape (3, 9, 6)": dict(gate_up_weight=zeros(3, 9, 6)),
        "down_weight must have shape (3, 6, 5) beside gate_up_weight (3, 10, 6), but has (2, 6, 5)": dict(
            down_weight=zeros(2, 6, 5)
        ),
        "updates experts, which have no dropout: dropout_p must be 0": update(
            zeros(3, 2, 6), zeros(3, 10, 2), 1.0, 0.5, layer="gate_up"
        ),
    },
    "grouped_gated_mlp": {
        "input must be [rows, features], but has shape (1, 6, 6)": dict(x=zeros(1, 6, 6)),
    },
    "moe_block": {
        "top_k=2 is more than the 1 experts that a token may choose from": dict(num_groups=3, top_groups=1),
        "num_groups=3 needs top_groups": dict(num_groups=3),
        "num_groups must divide the 3 experts": dict(num_groups=2, top_groups=1),
        "score_bias gets no gradient; detach it": dict(score_bias=zeros(3, requires_grad=True)),
        "router_weight must have 3 rows, one for each expert of gate_up_weight, but it has 4": dict(router_weight=UP),
        "shared_expert_gate needs shared_up_weight": dict(shared_expert_gate=zeros(1, 6)),
        "shared_up_weight needs shared_down_weight": dict(shared_up_weight=UP),
        "shared_down_weight must have 6 rows": dict(shared_up_weight=UP, shared_down_weight=DOWN[1:]),
        "shared_expert_gate must have one row, but has 4": dict(
            shared_up_weight=UP, shared_down_weight=DOWN, shared_expert_gate=UP
        ),
        "router_dtype must be torch.float32, or None for the compute dtype, not torch.float16": dict(
            router_dtype=torch.float16
        ),
    },
    "linear_cross_entropy": {
        "weight gets no gradient": dict(weight=ones(7, requires_grad=True)),
        "label_smoothing must be between 0 and 1, not 1.5": dict(label_smoothing=1.5),
        "softcap must be above 0 and finite, not 0.0": dict(softcap=0.0),
        "top_k must be from 1 to 7, not 8": dict(top_k=8),
        "vocab_start needs a group": dict(vocab_start=3),
        "is not split over a process group; leave out one of both": dict(lora=LoRA(A, zeros(7, 2)), group=object()),
    },
    "selected_log_probs": {
        "temperature must be positive, not 0.0": dict(temperature=0.0),
        "Target 7 is out of bounds": dict(tokens=torch.full((2, 3), 7)),
    },
    "linear_distillation": {
        "beta must be between 0 (forward KL) and 1 (reverse KL), not 1.5": dict(beta=1.5),
        "temperature must be above 0 and finite, not 0.0": dict(temperature=0.0),
        "teacher_softcap must be above 0 and finite": dict(teacher_softcap=-1),
        "teacher_input must have the student's leading shape (2, 3), but has (2, 4)": dict(teacher_input=zeros(2, 4, 5)),
        "slice off rows that only pad it": dict(teacher_weight=zeros(8, 5), teacher_bias=None),
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "message"), [(name, row) for name, rows in REFUSED.items() for row in rows])
def test_one_by_one(name, message):
    entry, arguments = OPS[name], OPS[name].inputs(catalog.Sizes())
    arguments |= {"dropout_p": 0.5} if "dropout_p" in entry.parameters else {}
    errors = (TypeError, ValueError, IndexError, RuntimeError)
    with refused(entry.function.__name__, errors, re.escape(message)):
        catalog.call(entry, arguments, catalog.random_leaves(arguments), **REFUSED[name][message])
