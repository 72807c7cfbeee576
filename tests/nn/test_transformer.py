"""nn.TransformerEncoderLayer and TransformerDecoderLayer against torch's, in float64: masks, stacks of torch's, errors."""

import functools
import warnings

import pytest
import torch
from support.drop_ins import (
    B,
    E,
    H,
    S,
    T,
    assert_drop_in,
    attention_mask,
    bool_mask,
    call,
    causal_mask,
    inputs_of,
    padding_mask,
    pair_of,
    pairwise,
    raised,
    tokens,
)
from torch.nn import functional as F

from ckptkern.memory import saved_tensors

LAYERS = {"encoder": "TransformerEncoderLayer", "decoder": "TransformerDecoderLayer"}
every_layer = pytest.mark.parametrize("kind", LAYERS)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched",
    "ignore:enable_nested_tensor",
    "ignore:The PyTorch API of nested",
    "ignore:Lower right",
)


def build(kind, **options):
    return pair_of(LAYERS[kind], **options)


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


FACTORS = {
    "layout": ("unbatched", "seq_first", "batch_first"),
    "norm_first": (False, True),
    "bias": (True, False),
    "activation": ("relu", "gelu", F.silu, torch.nn.ReLU(), torch.nn.GELU("tanh"), quick_gelu),
    "mask": ("none", "bool2", "bool3", "float2", "float3", "causal"),
    "padding": ("none", "bool", "float"),
    "training": (True, False),
    "recompute": ("none", "selective", "full"),
}
MEMORY = {"memory_mask": ("none", "bool2", "float3", "causal"), "memory_padding": ("none", "bool", "float")}


CASES = [("encoder", case) for case in pairwise(**FACTORS)] + [
    ("decoder", case) for case in pairwise(**FACTORS, **MEMORY)
]


@pytest.mark.parametrize(
    ("kind", "case"), [pytest.param(kind, *case.values, id=f"{kind}-{case.id}") for kind, case in CASES]
)
def test_equals_torch(kind, case):
    layout, options = case["layout"], {key: case[key] for key in ("activation", "bias", "norm_first", "recompute")}
    ours, theirs = (
        module.train(case["training"]) for module in build(kind, batch_first=layout == "batch_first", **options)
    )
    lead, batch = ((), 1) if layout == "unbatched" else ((B,), B)
    masks = [attention_mask(case["mask"], batch, H, T, T), padding_mask(case["padding"], lead, T)]
    hints = {("tgt_" if kind == "decoder" else "") + "is_causal": case["mask"] == "causal"}
    if kind == "decoder":
        masks.insert(1, attention_mask(case["memory_mask"], batch, H, T, S))
        masks.append(padding_mask(case["memory_padding"], lead, S))
        hints["memory_is_causal"] = case["memory_mask"] == "causal"
    assert_drop_in(
        ours, theirs, lambda m, **inputs: m(*inputs.values(), *masks, **hints), inputs_of(LAYERS[kind], layout)
    )


# -- torch's own stacks ------------------------------------------------------------------------------------------------


def stacks(kind, **options):
    """(ours, theirs): torch's stack of two layers, of our kind and of torch's, with one set of parameters."""
    stacks = []
    for layer in build(kind, **options):
        stack = getattr(torch.nn, f"Transformer{kind.capitalize()}")(
            layer, 2, torch.nn.LayerNorm(E, dtype=torch.float64)
        )
        with torch.no_grad():
            for parameter in stack.layers[1].parameters():
                parameter.mul_(1.1)
        stacks.append(stack)
    stacks[0].load_state_dict(stacks[1].state_dict())
    return stacks


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "batch_first", "masked"),
    [
        ("encoder", True, "padding"),
        ("encoder", False, "causal"),
        ("encoder", True, "both"),
        ("decoder", False, "both"),
    ],
)
def test_torchs_stacks_take_the_layers(kind, batch_first, masked, training):
    pair = stacks(kind, batch_first=batch_first, norm_first=not batch_first)
    ours, theirs = (module.train(training) for module in pair)
    mask = None if masked == "padding" else causal_mask(T, T)
    padding = None if masked == "causal" else padding_mask("bool", (B,), T if kind == "encoder" else S)
    masks = {"mask": mask, "src_key_padding_mask": padding}
    masks = masks if kind == "encoder" else {"tgt_mask": mask, "memory_key_padding_mask": padding}
    inputs = inputs_of(LAYERS[kind], "batch_first" if batch_first else "seq_first")
    assert_drop_in(ours, theirs, lambda m, **inputs: m(*inputs.values(), **masks), inputs)


def test_inference_makes_nested_tensors():
    """Torch's encoder does, and pads what comes out with zeros. Nested tensors are for inference only."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns where a layer is not fit for its nested tensors
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        ours, theirs = stacks("encoder", args=(E, 4, 20))
        ours.norm = theirs.norm = None
        src, padding = tokens("batch_first", T, grad=False), padding_mask("bool", (B,), T)
        with torch.no_grad():
            mine, reference = (m.eval()(src, src_key_padding_mask=padding) for m in (ours, theirs))
    assert mine[padding].abs().max() == 0
    torch.testing.assert_close(mine, reference)
    graded = ours(src, src_key_padding_mask=padding)
    assert graded[padding].abs().min() > 0
    torch.testing.assert_close(graded[~padding], reference[~padding])


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("path", ["self_attn", "dropout", "dropout1", "dropout2"])
@every_layer
def test_each_dropout_is_its_modules(kind, path, training):
    """A wrong probability, set later, raises torch's error. A dropout acts by itself, and not in evaluation of its own."""
    pair, inputs = build(kind), inputs_of(LAYERS[kind])
    parts = [module.train(training).get_submodule(path) for module in pair]

    def calls(p):
        for part in parts:
            setattr(part, "dropout" if path == "self_attn" else "p", p)
        return [functools.partial(call, module, **inputs) for module in pair]

    torch.testing.assert_close(*(call() for call in calls(1.0)))
    ours, theirs = map(raised, calls(2))
    assert ours == theirs
    assert (ours is None) == (path == "self_attn" and not training)
    for part in parts:
        part.eval()
    torch.testing.assert_close(*(call() for call in calls(0.5)))


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("mask", ["bool2", "bool3", "float2"])
def test_masks_are_saved_as_they_are_given(mask, padding, recompute):
    """Every layer keeps the model's own mask: no inverted, merged or upcast copy."""
    layer, _ = build("encoder", recompute=recompute)
    x, mask, padding = tokens("batch_first", T), attention_mask(mask, B, H, T, T), padding_mask(padding, (B,), T)
    with saved_tensors(exclude=[*layer.parameters(), mask, *([] if padding is None else [padding])]) as saved:
        layer(x, mask, padding)
    assert saved.bytes == 8 * B * T * (E if recompute == "full" else E + E + H), saved.tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "masks", [{"src_mask": torch.randn(T, T)}, {"src_key_padding_mask": torch.arange(B * T).view(B, T) / 9}]
)
def test_evaluation_reads_additive_masks_as_training_does(masks, dtype):
    """torch's inference kernel reads them as bool and gives NaN or wrong numbers. Ours does what torch does in training."""
    layer, other = (module.float() for module in build("encoder", args=(E, 2, 20)))
    call = functools.partial(other, torch.randn(B, T, E), **{name: mask.to(dtype) for name, mask in masks.items()})
    error = raised(call)
    for module in (layer, layer.eval()):
        with torch.no_grad():
            assert raised(functools.partial(module, *call.args, **call.keywords)) == error
            if error is None:
                torch.testing.assert_close(module(*call.args, **call.keywords), call())


# -- subclasses, wrappers, no tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("of_class", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, f"_{part}_block") for kind in LAYERS for part in ("sa", "ff")] + [("decoder", "_mha_block")],
)
def test_an_overridden_sublayer_is_called(kind, name, norm_first, of_class):
    """On the instance, and in a subclass, with the mask that the layer was given, in evaluation too."""
    mask, pair, masks = bool_mask(T, T), build(kind, norm_first=norm_first), []
    for module in pair:
        own = getattr(type(module) if of_class else module, name)

        def sublayer(*args, own=own, **kwargs):
            masks.extend(mask for mask in args if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool)
            return 2 * own(*args, **kwargs)

        if of_class:
            module.__class__ = type("Own", (type(module),), {name: sublayer})
        else:
            setattr(module, name, sublayer)
    call, inputs = lambda m, **inputs: m(*inputs.values(), mask), inputs_of(LAYERS[kind])
    assert_drop_in(*pair, call, inputs)
    masks.clear()
    with torch.no_grad():
        call(pair[0].eval(), **inputs)
    assert name != "_sa_block" or (len(masks) == 1 and masks[0] is mask)


def test_a_self_attention_without_batch_first():
    """As adapters wrap it."""

    class Wrapped(torch.nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, *args, **kwargs):
            return self.attention(*args, **kwargs)

    ours, theirs = build("encoder", batch_first=False)
    ours.self_attn, x = Wrapped(ours.self_attn), tokens("seq_first", T)
    torch.testing.assert_close(ours(x), theirs(x))
