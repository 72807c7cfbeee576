"""What ops refuse by a rule, for every tensor and option of the catalogue, and one by one what the sublayers of a layer refuse.
No refusal moves the generator."""

import contextlib
import re

import pytest
import torch

import ckptkern
from ckptkern import LoRA
from ckptkern.errors import DeviceError, DtypeError, LayoutError, ShapeError
from ckptkern.ops import catalog
from ckptkern.ops.catalog import OPS


@contextlib.contextmanager
def refused(op: str, error: type | tuple[type, ...], message: str):
    before = torch.get_rng_state()
    with pytest.raises(error, match=f"(?s)^{op}: .*{message}"):
        yield
    assert torch.equal(torch.get_rng_state(), before), "an error has moved the generator"


# -- tensors of every op -----------------------------------------------------------------------------------------------

# What replaces a tensor that is trained, the error, and what its message says.
WRONG = {
    "a number": (lambda t: 0.5, TypeError, "{label} must be .*, not float"),
    "integers": (lambda t: t.detach().long(), DtypeError, "{label} must be .*floating point, not torch.int64"),
    "elsewhere": (lambda t: t.detach().to("meta"), DeviceError, "{label} is on meta"),
    "sparse": (lambda t: t.detach().to_sparse(), LayoutError, "{label} must be a dense tensor, not torch.sparse_coo"),
    "of another dtype": (lambda t: t.detach().double(), DtypeError, "float64"),
    "with more columns": (lambda t: t.new_ones(*t.shape[:-1], t.shape[-1] + 2), ShapeError, ""),
    "of no dimensions": (lambda t: t.new_ones(()), ShapeError, ""),
}
# Taken all the same: what is cast, what broadcasts, and sizes that no other tensor has.
TAKEN = re.compile(
    r"(?!moe_mlp \w+_bias).*(bias|norm|scale|shift|sinks|lora|expert_gate|(top_k|row)_weights)\S* of another dtype"
    r"|.* layer_scale a number|.* attn_mask of no dimensions|scaled_dot_product_attention value with more columns"
    r"|dropout x (elsewhere|of another dtype|with more columns|of no dimensions)|linear_act weight sparse"
)


def arguments_with(entry) -> dict[str, dict]:
    """For each tensor that is trained, by name, arguments that have it."""
    found = {}
    for chosen in ({}, *entry.every_option().values()):
        given = entry.inputs(catalog.Sizes()) | chosen
        if catalog.ACROSS_RANKS not in given.values():
            found = dict.fromkeys(catalog.input_shapes(given), given) | found
    return found


def label_of(place: str) -> str:
    """How messages call a tensor: weights[1] of a stack, "the bias of fc1_weight"; "" where they say more than its name."""
    name = re.sub(r"\w+_arguments\.", "", place)
    if re.fullmatch(r"x|input|hidden|student_input|query|key|value", name):
        return f"(input|{name})"
    if re.search(r"norm|lora|router|shared_expert|scale|shift|qkv_\w+\.", name):
        return ""
    weight = re.sub(r"\.(\d)", r"\\[\1\\]", name.replace("biases", "weights").replace("bias", "weight"))
    return f"(the bias of {weight}|{name})" if "bias" in name else weight


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_tensor(name):
    entry = OPS[name]
    for place, given in arguments_with(entry).items():
        leaves = catalog.random_leaves(given)
        others = {one: t for one, t in leaves.items() if one != place}
        for kind, (replaced, error, message) in WRONG.items():
            taken = TAKEN.match(f"{name} {place} {kind}")
            message = message.format(label=label_of(place))
            with contextlib.nullcontext() if taken else refused(name, error, message):
                catalog.call(entry, given, others | {place: replaced(leaves[place])})


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
        return (TypeError, ValueError), f"{option} must be an int.*, not {{!r}}", ("a", 2.5, torch.tensor(2))
    message = f"({option} must be a .*number.*, not|no gradient is formed for {option})"
    return (TypeError, ValueError), message, ("a", True, (1.0,), LEARNED)


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_option(name):
    entry, chosen = OPS[name], OPS[name].every_option()
    for option in entry.parameters.keys() - {*UNCHECKED}:
        given = entry.inputs(catalog.Sizes()) | chosen.get(option, {})
        value = given.get(option, entry.parameters[option].default)
        if not isinstance(value, str | int | float) or name in AS_TORCH.get(option, ()):
            continue
        error, message, wrong = wrong_values(option, value)
        for one in wrong:
            with refused(name, error, message.replace("{!r}", re.escape(repr(one)))):
                catalog.call(entry, given, catalog.random_leaves(given), **{option: one})


# -- one by one --------------------------------------------------------------------------------------------------------

X, QKV, OUT, MEMORY = torch.randn(2, 7, 10), torch.randn(72, 10), torch.randn(10, 24), torch.randn(2, 5, 8)
UP, DOWN, CU = torch.randn(12, 10), torch.randn(10, 12), torch.tensor([0, 4, 4, 7], dtype=torch.int32)
A, B, MASK, PADDING = torch.randn(2, 10), torch.randn(12, 2), torch.zeros(7, 7), torch.zeros(2, 7, dtype=torch.bool)
THREE, ONES, ROWS, NORM = QKV.chunk(3), torch.ones(6), X[0, 0], {"norm": "layer"}
ATTENTION = dict(qkv_weight=QKV, qkv_bias=None, out_weight=OUT, out_bias=None, num_heads=4)
MLP = dict(up_weight=UP, up_bias=None, down_weight=DOWN, down_bias=None)
ARGUMENTS = {
    "linear_stack": dict(x=X, weights=[UP, DOWN]),
    "mlp": dict(x=X, fc1_weight=UP, fc1_bias=None, fc2_weight=DOWN, fc2_bias=None),
    "mlp_block": dict(x=X, **MLP),
    "attention_block": dict(x=X, **ATTENTION),
    "transformer_layer": dict(x=X, attention_arguments=ATTENTION | {"dropout_p": 0.5}, mlp_arguments=MLP),
    "moe_mlp": dict(
        x=X[0], top_k_index=torch.zeros(7, 1, dtype=torch.int64), top_k_weights=torch.ones(7, 1),
        gate_up_weight=torch.randn(3, 24, 10), down_weight=torch.randn(3, 10, 12),
    ),
    "linear_cross_entropy": dict(input=X[0], linear_weight=UP, target=torch.zeros(7, dtype=torch.int64)),
}  # fmt: skip


def update(*given, layer="up") -> dict:
    return {"lora": {layer: LoRA(*given)}}


REFUSED = {
    "linear_stack": (
        ("weights must be a list of tensors, not int", {"weights": 3}),
        ("weights must be a list of tensors, not Tensor", {"weights": UP}),
        ("biases must be a list of tensors, not Tensor", {"biases": UP[0]}),
    ),
    "mlp": (
        ("input must be a Tensor, not list", {"x": [[1.0]]}),
        ("fc1_weight must be a Tensor, not NoneType", {"fc1_weight": None}),
        (r"fc1_weight must be .*: pass fc1_weight.t\(\)", {"fc1_weight": UP.t()}),
        ("input must be a dense tensor, not nested", {
            "x": torch.nested.nested_tensor([X[0], X[0, :3]], layout=torch.strided)}),
    ),
    "mlp_block": (
        ("gate_bias needs gate_weight", {"gate_bias": UP[:, 0]}),
        ("residual needs down_weight with 10 rows", {"down_weight": DOWN[:9]}),
        ("lora must be a dict of ckptkern.LoRA by layer, not list", {"lora": [LoRA(A, B)]}),
        ("lora has 'q', but the layers are 'up', 'down'", update(A, B, layer="q")),
        (r"lora\['up'\] must be ckptkern.LoRA\(a, b, scale, dropout_p\), not Tensor", {"lora": {"up": A}}),
        (r"lora\['up'\] must be ckptkern.LoRA", {"lora": {"up": (A,)}}),
        (r"must be \[r, 10\] and \[12, r\], but have shapes \(10, 2\)", update(A.t(), B)),
        (r"must be \[r, 10\] and \[12, r\]", update(A, B[:, :1])),
        (r"the scale of lora\['up'\] must be a number", update(A, B, "1")),
        ("no gradient is formed for the scale", update(A, B, LEARNED)),
        ("dropout probability has to be", update(A, B, 1.0, 2.0)),
    ),
    "attention_block": (
        ("input must be", {"x": ROWS}),
        ("num_kv_heads=3 must divide num_heads=4", {"num_kv_heads": 3}),
        ("num_heads must be an integer of at least 1, not 0", {"num_heads": 0}),
        ("must be one tensor or three", {"qkv_weight": [QKV, QKV]}),
        ("needs q, k and v in one qkv_weight", {"qkv_weight": THREE, "qkv_layout": "heads"}),
        ("do not fit", {"qkv_weight": QKV[:70]}),
        ("residual needs out_weight with 10 rows", {"out_weight": OUT[:5], "residual": True}),
        ("need norm=", {"norm_weight": ROWS}),
        ("post_norm_weight and post_norm_bias need post_norm=", {"post_norm_weight": ROWS}),
        ("k's norm bias must have the shape of its weight", {"qk_norm": (ONES, (torch.ones(24), ONES))}),
        ("qk_norm must be a pair of tensors", {"qk_norm": (ONES,)}),
        ("rotary must be a pair of tensors or a number", {"rotary": ONES.numpy()}),
        ("rotary must be", {"rotary": (torch.ones(7, 8), torch.ones(7, 8))}),
        ("rotary is on meta", {"rotary": (torch.ones(7, 6, device="meta"),) * 2}),
        ("no gradient is formed for rotary", {"rotary": (torch.ones(7, 4, requires_grad=True),) * 2}),
        ("key_padding_mask must be a Tensor, not list", {"key_padding_mask": [True]}),
        ("key_padding_mask must be bool", {"key_padding_mask": PADDING[:, :6]}),
        ("no gradient is formed for key_padding_mask", {"key_padding_mask": PADDING.float().requires_grad_()}),
        ("no gradient is formed for alibi_slopes", {"alibi_slopes": torch.ones(4, requires_grad=True)}),
        ("cu_seqlens must be int32", {"cu_seqlens": CU}),
        ("cu_seqlens must be int32", {"x": X[0], "cu_seqlens": CU[:0]}),
        ("cu_seqlens is on meta", {"x": X[0], "cu_seqlens": CU.to("meta")}),
        ("no meaning for sequences packed", {"x": X[0], "cu_seqlens": CU, "key_padding_mask": PADDING[0]}),
        ("max_seqlen needs cu_seqlens, which is None", {"max_seqlen": 7}),
        (r"sinks must have a number for each query head, \[4\]", {"sinks": torch.ones(2)}),
        ("gate_weight must have 24 rows, one for each column of o, or 4, one for each head", {"gate_weight": QKV[:6]}),
        ("gate_bias needs gate_weight", {"gate_bias": torch.ones(4)}),
        ("gate_weight does not go with gate_in_query", {
            "gate_weight": QKV[:4], "qkv_weight": [QKV[:48], *QKV[24:].chunk(2)], "gate_in_query": True}),
        ("gate_in_query needs three weights", {"gate_in_query": True}),
        ("with gate_in_query", {"qkv_weight": THREE, "gate_in_query": True}),
        ("lora", {"gate_weight": QKV[:4], **update(A, torch.ones(4, 2), layer="gate")}),
        ("pass three weights", {"key_value": X, **update(A, torch.randn(72, 2), layer="qkv")}),
        (r"layer_scale must be a number, have shape \(10,\), or have shape \(2, 10\) or \(2, 1, 10\), one "
            r"vector for each sample of the input \(2, 7, 10\), but has \(9,\)", {"layer_scale": ROWS[:9]}),
        (r"layer_scale must .* but has \(1, 10\)", {"layer_scale": X[:1, 0]}),
        (r"layer_scale must .* but has \(2, 7, 10\)", {"layer_scale": X}),
        (r"norm_scale must have shape \(2, 10\) or \(2, 1, 10\), one vector for each sample", {**NORM, "norm_scale": X}),
        (r"norm_shift must have .* but has \(10,\)", {**NORM, "norm_shift": ROWS}),
        ("norm_scale is of a norm before the branch; pass norm='layer' or 'rms' and", {"norm_scale": X[:, 0]}),
        ("norm_shift is of a norm before the branch", {**NORM, "norm_first": False, "norm_shift": X[:, 0]}),
        ("attn_mask must be one mask or a pair of them, not 3", {"attn_mask": [MASK] * 3}),
        ("key_padding_mask does not go with a pair of masks", {"attn_mask": [MASK] * 2, "key_padding_mask": PADDING}),
        ("no gradient is formed for the second attn_mask", {"attn_mask": (MASK, MASK.clone().requires_grad_())}),
        (r"attn_mask of shape \(6, 7\) does not broadcast", {"attn_mask": (MASK, MASK[:6])}),
        (r"key_value must be \[B, S_k, d_k\] with the samples of the input", {"key_value": MEMORY[:1]}),
        ("key_value has 8 features but the input 10; qkv_weight must then be three weights", {"key_value": MEMORY}),
        ("key_value has 8 features but k_weight has in_features=10", {"key_value": MEMORY, "qkv_weight": THREE}),
        ("rotary is for self-attention and does not go with key_value", {"key_value": X, "rotary": 1e4}),
        ("cu_seqlens is for self-attention", {"x": X[0], "key_value": X[1], "cu_seqlens": CU}),
        ("qkv_layout is for self-attention", {"key_value": X, "qkv_layout": "heads"}),
        (r"of shape \(2, 5\), but is torch.bool of shape \(2, 7\)", {"key_value": X[:, :5], "key_padding_mask": PADDING}),
        (r"attn_mask of shape \(7, 7\) does not broadcast to \(2, 4, 7, 5\)", {"key_value": X[:, :5], "attn_mask": MASK}),
    ),
    "transformer_layer": (
        ("recompute is an argument of transformer_layer, not of", {"attention": {"recompute": "full"}}),
        ("attention_arguments has 'heads', but its arguments are qkv_weight,", {"attention": {"heads": 4}}),
        ("mlp_arguments has 'num_heads', but its arguments are up_weight,", {"mlp": {"num_heads": 4}}),
        ("mlp_arguments must have up_weight, up_bias, down_weight, down_bias", {"mlp_arguments": {}}),
        ("attention_arguments must be a dict of arguments by name, not list", {"attention_arguments": [1]}),
        ("out_weight must have 10 rows", {"attention": {"out_weight": OUT[:5], "residual": False}}),
        ("mlp_arguments has norm_first=False", {"parallel": True, "mlp": {**NORM, "norm_first": False}}),
        ("mlp_arguments has residual=False", {"parallel": True, "mlp": {"residual": False}}),
        ("down_weight must have 10 rows, but it has 9", {"parallel": True, "mlp": {"down_weight": DOWN[:9]}}),
        ("cross_attention_arguments must have key_value", {"cross": {}}),
        ("parallel sublayers take no cross_attention_arguments", {"parallel": True, "cross": {"key_value": X}}),
        ("out_weight must have 10 rows", {"cross": {"key_value": X, "out_weight": OUT[:5], "residual": False}}),
        *(("recompute must be one of 'none', 'selective', 'full'", {"recompute": one})
          for one in (("none", "some"), ("some", "none"), ("none",), ("none",) * 3, 3)),
    ),
    "moe_mlp": (
        (r"must be \[3, r, 10\] and \[3, 24, r\]", update(A, B, layer="gate_up")),
        ("is an update of experts, which has no dropout; pass dropout_p=0", update(
            torch.randn(3, 2, 10), torch.randn(3, 24, 2), 1.0, 0.5, layer="gate_up")),
    ),
    "linear_cross_entropy": (
        ("is not split over a process group; leave out one of both", {"lora": LoRA(A, B), "group": object()}),
    ),
}  # fmt: skip


def of_sublayers(arguments: dict, changes: dict) -> dict:
    """The arguments with changes; "attention", "mlp" and "cross" are changes of a layer's sublayers."""
    given = arguments | changes
    for name, place in (("attention",) * 2, ("mlp",) * 2, ("cross", "cross_attention")):
        if name in given:
            given[f"{place}_arguments"] = arguments.get(f"{place}_arguments", ATTENTION) | given.pop(name)
    return given


@pytest.mark.parametrize(("op", "message", "changes"), [(op, *row) for op, rows in REFUSED.items() for row in rows])
def test_one_by_one(op, message, changes):
    with refused(op, (TypeError, ValueError), message):
        getattr(ckptkern, op)(**of_sublayers(ARGUMENTS[op], changes))
