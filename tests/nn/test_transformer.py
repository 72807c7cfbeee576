"""nn.TransformerEncoderLayer and TransformerDecoderLayer against torch's, in float64."""

import re
import warnings

import pytest
import torch
from support.drop_ins import (
    DECODER,
    ENCODER,
    HIDDEN,
    B,
    E,
    H,
    S,
    T,
    assert_drop_in,
    attention_mask,
    bool_mask,
    causal_mask,
    float_mask,
    padding_mask,
    pairwise,
    raised,
    run,
    tokens,
)  # fmt: skip
from torch.nn import functional as F

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.nn.activations import named

LAYERS = {"encoder": "TransformerEncoderLayer", "decoder": "TransformerDecoderLayer"}
KINDS = {"encoder": ENCODER, "decoder": DECODER}
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched", "ignore:enable_nested_tensor")


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


def build(kind, **options):
    return KINDS[kind].build(**options)


def from_case(kind, case):
    pair = build(
        kind, activation=case["activation"], batch_first=case["layout"] == "batch_first", bias=case["bias"],
        norm_first=case["norm_first"], recompute=case["recompute"],
    )  # fmt: skip
    return [module.train(case["training"]) for module in pair]


def lead_and_batch(layout):
    return ((), 1) if layout == "unbatched" else ((B,), B)


@pytest.mark.sampled
@pytest.mark.parametrize("case", pairwise(**FACTORS))
def test_encoder_layer_equals_torch(case):
    lead, batch = lead_and_batch(case["layout"])
    mask, padding = attention_mask(case["mask"], batch, H, T, T), padding_mask(case["padding"], lead, T)

    def call(module, src):
        return module(src, mask, padding, is_causal=case["mask"] == "causal")

    assert_drop_in(*from_case("encoder", case), call, {"src": tokens(case["layout"], T)})


@pytest.mark.parametrize(
    "case",
    pairwise(
        **FACTORS,
        memory_mask=("none", "bool2", "float3", "causal"),
        memory_padding=("none", "bool", "float"),
    ),
)
def test_decoder_layer_equals_torch(case):
    lead, batch = lead_and_batch(case["layout"])
    mask, padding = attention_mask(case["mask"], batch, H, T, T), padding_mask(case["padding"], lead, T)
    memory_mask = attention_mask(case["memory_mask"], batch, H, T, S)
    memory_padding = padding_mask(case["memory_padding"], lead, S)

    def call(module, tgt, memory):
        return module(
            tgt, memory, mask, memory_mask, padding, memory_padding, tgt_is_causal=case["mask"] == "causal",
            memory_is_causal=case["memory_mask"] == "causal",
        )  # fmt: skip

    inputs = {"tgt": tokens(case["layout"], T), "memory": tokens(case["layout"], S)}
    assert_drop_in(*from_case("decoder", case), call, inputs)


@pytest.mark.parametrize("kind", LAYERS)
def test_positional_arguments_are_torchs(kind):
    args = (E, H, HIDDEN, 0.2, "gelu", 1e-3, True, True, False, "cpu", torch.float64)
    ours, theirs = (getattr(nn, LAYERS[kind])(*args) for nn in (ckptkern.nn, torch.nn))
    assert (ours.norm_first, ours.activation, ours.norm2.eps) == (True, F.gelu, 1e-3)
    assert (ours.self_attn.batch_first, ours.self_attn.dropout, ours.dropout2.p) == (True, 0.2, 0.2)
    assert {n: (p.shape, p.dtype) for n, p in ours.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in theirs.named_parameters()
    }
    with pytest.raises(ValueError, match="recompute must be one of"):
        getattr(ckptkern.nn, LAYERS[kind])(E, H, recompute="all")
    with pytest.raises(RuntimeError, match="activation should be relu/gelu, not tanh"):
        getattr(ckptkern.nn, LAYERS[kind])(E, H, activation="tanh")


def stacks(kind, **kwargs):
    """(ours, theirs): torch's stack of two layers, of our kind and of torch's, with one set of parameters."""
    made = []
    for layer in build(kind, **kwargs):
        norm = torch.nn.LayerNorm(E, dtype=torch.float64)
        stack = getattr(torch.nn, f"Transformer{kind.capitalize()}")(layer, 2, norm)
        with torch.no_grad():
            for parameter in stack.layers[1].parameters():
                parameter.mul_(1.1)
        made.append(stack)
    made[0].load_state_dict(made[1].state_dict())
    return made


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("batch_first", "norm_first"), [(True, False), (False, True)])
@pytest.mark.parametrize("masked", ["padding", "causal", "both"])
def test_torchs_encoder_takes_the_layer(masked, batch_first, norm_first, training):
    ours, theirs = stacks("encoder", num_heads=4, batch_first=batch_first, norm_first=norm_first)
    assert all(type(layer) is ckptkern.nn.TransformerEncoderLayer for layer in ours.layers)
    padding = None if masked == "causal" else padding_mask("bool", (B,), T)
    mask = None if masked == "padding" else causal_mask(T, T)
    inputs = {"src": tokens("batch_first" if batch_first else "seq_first", T)}
    for module in (ours, theirs):
        module.train(training)
    assert_drop_in(ours, theirs, lambda m, src: m(src, mask=mask, src_key_padding_mask=padding), inputs)


@pytest.mark.parametrize("training", [True, False])
def test_torchs_decoder_takes_the_layer(training):
    ours, theirs = (module.train(training) for module in stacks("decoder"))
    inputs = {"tgt": tokens("seq_first", T), "memory": tokens("seq_first", S)}
    padding = padding_mask("bool", (B,), S)

    def call(module, tgt, memory):
        return module(tgt, memory, tgt_mask=causal_mask(T, T), memory_key_padding_mask=padding)

    assert_drop_in(ours, theirs, call, inputs)


def test_torchs_transformer_takes_the_stacks():
    (encoder, their_encoder), (decoder, their_decoder) = stacks("encoder"), stacks("decoder")
    ours = torch.nn.Transformer(E, H, custom_encoder=encoder, custom_decoder=decoder)
    theirs = torch.nn.Transformer(E, H, custom_encoder=their_encoder, custom_decoder=their_decoder)
    theirs.load_state_dict(ours.state_dict())
    inputs = {"src": tokens("seq_first", S), "tgt": tokens("seq_first", T)}
    assert_drop_in(ours, theirs, lambda m, src, tgt: m(src, tgt, tgt_mask=causal_mask(T, T)), inputs)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_inference_makes_nested_tensors(activation):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns where a layer is not fit for its nested tensors
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        ours, theirs = stacks("encoder", num_heads=4, batch_first=True, activation=activation)
        ours.norm = theirs.norm = None
        src, padding = tokens("batch_first", T, grad=False), padding_mask("bool", (B,), T)
        with torch.no_grad():
            mine, reference = (m.eval()(src, src_key_padding_mask=padding) for m in (ours, theirs))
    assert mine[padding].abs().max() == 0  # what a nested tensor is padded with
    torch.testing.assert_close(mine, reference)
    graded = ours(src, src_key_padding_mask=padding)
    assert graded[padding].abs().min() > 0
    torch.testing.assert_close(graded[~padding], reference[~padding])


def padded(memory, mask):
    return {"tgt_key_padding_mask" if memory else "src_key_padding_mask": mask}


def causal(memory):
    mask = causal_mask(T, T)
    return {"tgt_mask": mask, "tgt_is_causal": True} if memory else {"src_mask": mask, "is_causal": True}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m, x, *memory: m(x[0, 0], *memory),
        lambda m, x, *memory: m(x[..., :-1], *memory),
        lambda m, x, *memory: m(x.float(), *memory),
        lambda m, x, *memory: m(x, *memory, is_causal=True) if not memory else m(x, *memory, tgt_is_causal=True),
        lambda m, x, *memory: m(x, *memory, **{"memory_is_causal" if memory else "is_causal": True}),
        lambda m, x, *memory: m(x, *memory, torch.zeros(T, T + 1)),
        lambda m, x, *memory: m(x, *memory, torch.zeros(T, T, dtype=torch.int64)),
        lambda m, x, *memory: m(x, *[y[:, :1] for y in memory], torch.zeros(B, T, T)),
        lambda m, x, *memory: m(x[:, 0], *[y[..., :-1] for y in memory], torch.zeros(B * H, T, T)),
        lambda m, x, *memory: m(x.long(), *memory),
        lambda m, x, *memory: m(None, *memory),
        lambda m, x, *memory: m([x], *memory),
        lambda m, x, *memory: m(x, *[None for y in memory], [1]),
        lambda m, x, *memory: m(x, *memory, torch.zeros(T, T, dtype=torch.float16)),
        lambda m, x, *memory: m(x.float(), *[y.float() for y in memory], torch.zeros(T, T).double()),
        lambda m, x, *memory: m(x, *memory, **padded(memory, [1])),
        lambda m, x, *memory: m(x, *memory, **padded(memory, torch.zeros(B, T + 1, dtype=torch.bool))),
        lambda m, x, *memory: m(x, *memory, **padded(memory, torch.zeros(B, T, dtype=torch.int64))),
        lambda m, x, *memory: m(x, *memory, **padded(memory, torch.zeros(B, T, dtype=torch.float16))),
        lambda m, x, *memory: m(x, *memory, **padded(memory, torch.zeros(B, T, dtype=torch.int64)), **causal(memory)),
    ],
)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_wrong_input_raises_torchs_error(kind, norm_first, wrong):
    ours, theirs = build(kind, norm_first=norm_first)
    args = KINDS[kind].inputs().values()
    expected = raised(lambda: wrong(theirs, *args))
    assert raised(lambda: wrong(ours, *args)) == expected is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64], ids=str)
def test_wrong_masks_of_the_memory_raise_torchs_error(dtype):
    pair, x, memory = build("decoder"), tokens("seq_first", T), tokens("seq_first", S)
    for masks in (
        {"memory_mask": torch.zeros(T, S, dtype=dtype)},
        {"memory_key_padding_mask": torch.zeros(B, S).to(dtype)},
    ):
        errors = [raised(lambda m=module, masks=masks: m(x, memory, **masks)) for module in pair]
        assert errors[0] == errors[1]


@pytest.mark.parametrize("name", ["self_attn", "dropout", "dropout1", "dropout2"])
@pytest.mark.parametrize("how", ["p", "eval"])
def test_each_dropout_is_its_modules(name, how):
    """Each dropout acts by itself, and not when its module is in evaluation."""
    layer, other = build("encoder", norm_first=True)
    x = tokens("seq_first", T)
    module = getattr(layer, name)
    setattr(module, "dropout" if name == "self_attn" else "p", 0.5)
    reference = other(x)
    if how == "eval":
        module.eval()
        torch.testing.assert_close(layer(x), reference)
        return
    assert not torch.allclose(layer(x), reference)
    setattr(module, "dropout" if name == "self_attn" else "p", 1.0)
    setattr(getattr(other, name), "dropout" if name == "self_attn" else "p", 1.0)
    torch.testing.assert_close(layer(x), other(x))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "name", ["self_attn", "norm1", "dropout1", "linear1", "activation", "dropout", "linear2", "dropout2"]
)
def test_hooks_of_submodules_run(name, kind):
    ours, theirs = build(kind)
    seen = []
    for module in (ours, theirs):
        module.activation = torch.nn.GELU()
        getattr(module, name).register_forward_hook(lambda module, args, output: seen.append(module))
    inputs = KINDS[kind].inputs()
    assert_drop_in(ours, theirs, lambda m, **inputs: m(*inputs.values()), inputs)
    assert seen == [getattr(ours, name), getattr(ours, name), getattr(theirs, name)]  # ours is recomputed in backward


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_torchs_activations_are_known():
    """A layer calls what it does not know, which no comparison of results shows."""
    known = {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", F.silu: "silu"}
    known |= {
        torch.nn.ReLU(): "relu",
        torch.nn.GELU(): "gelu",
        torch.nn.GELU("tanh"): "gelu_tanh",
        torch.nn.SiLU(): "silu",
    }
    hooked = torch.nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    known |= dict.fromkeys((F.elu, torch.nn.Tanh(), hooked, type("Own", (torch.nn.ReLU,), {})()))
    assert {activation: named(activation) for activation in known} == known


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("activation", [torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU])
@pytest.mark.parametrize("name", ["self_attn", "norm1", "linear1", "activation"])
def test_a_forward_of_the_instances_own_is_called(name, activation, kind):
    ours, theirs = build(kind)
    for module in (ours, theirs):
        module.activation = activation()
        part = getattr(module, name)
        own = part.forward

        def forward(*args, own=own, **kwargs):
            y = own(*args, **kwargs)
            return (2 * y[0], y[1]) if isinstance(y, tuple) else 2 * y

        part.forward = forward
    inputs = KINDS[kind].inputs()
    assert_drop_in(ours, theirs, lambda m, **inputs: m(*inputs.values()), inputs)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("padding", [None, "bool", "float"])
@pytest.mark.parametrize("mask", [None, "bool", "float", "of heads"])
def test_masks_are_saved_as_they_are_given(mask, padding, recompute):
    """Every layer keeps the model's own mask: no inverted, merged or upcast copy."""
    layer, other = build("encoder", batch_first=True, recompute=recompute)
    x = tokens("batch_first", T)
    masks = {"float": float_mask(T, T), "bool": bool_mask(T, T), "of heads": bool_mask(B * H, T, T)}
    given = {"src_mask": masks.get(mask), "src_key_padding_mask": padding and padding_mask(padding, (B,), T)}
    with saved_tensors(exclude=[*layer.parameters(), *(m for m in given.values() if m is not None)]) as found:
        layer(x, **given)
    assert found.bytes == 8 * B * T * (E if recompute == "full" else E + E + H), found.tensors
    assert_drop_in(layer, other, lambda m, x: m(x, **given), {"x": x})


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_replaced_submodules_and_overridden_halves_are_called(norm_first, kind):
    ours, theirs = build(kind, norm_first=norm_first)
    inputs = KINDS[kind].inputs()

    def call(module, **inputs):
        return module(*inputs.values())

    for module in (ours, theirs):
        module.linear2.__class__ = Doubled
    assert_drop_in(ours, theirs, call, inputs)
    ours, theirs = build(kind, norm_first=norm_first)
    for module in (ours, theirs):
        base = type(module)
        module.__class__ = type("Own", (base,), {
            "_sa_block": lambda self, x, *args, **kwargs: -x,
            "_ff_block": lambda self, x: 3 * x.sin(),
        })  # fmt: skip
        module.requires_grad_(False)
        module.norm1.requires_grad_()
        for name, parameter in list(module.named_parameters()):
            if not parameter.requires_grad:
                owner, _, leaf = name.rpartition(".")
                delattr(module.get_submodule(owner), leaf)
                module.get_submodule(owner).register_buffer(leaf, parameter.detach())
    assert_drop_in(ours, theirs, call, inputs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in LAYERS for name in ("_sa_block", "_ff_block")] + [("decoder", "_mha_block")],
)
def test_a_half_of_the_instances_own_is_called(kind, name, norm_first, masked):
    ours, theirs = build(kind, norm_first=norm_first)
    for module in (ours, theirs):
        own = getattr(module, name)

        def sublayer(*args, own=own, **kwargs):
            return 2 * own(*args, **kwargs)

        setattr(module, name, sublayer)
    inputs = KINDS[kind].inputs()
    masks = {("tgt_mask" if kind == "decoder" else "src_mask"): bool_mask(T, T)} if masked else {}
    assert_drop_in(ours, theirs, lambda m, **inputs: m(*inputs.values(), **masks), inputs)


def test_the_mask_gets_a_gradient():
    ours, theirs = build("encoder")
    inputs = {"src": tokens("seq_first", T), "mask": torch.randn(T, T).double().requires_grad_()}
    y = ours(*inputs.values())
    assert type(y.grad_fn.next_functions[0][0]).__name__ == "TransformerLayerFunctionBackward"
    assert_drop_in(ours, theirs, lambda m, src, mask: m(src, mask), inputs)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_token_that_sees_nothing_has_no_attention(norm_first):
    ours, _ = build("encoder", norm_first=norm_first)
    x, hidden = tokens("seq_first", T), bool_mask(T, T)
    hidden[2] = True
    y = ours(x, hidden)
    mid = x + ours.self_attn.out_proj.bias
    mid = mid if norm_first else ours.norm1(mid)
    branch = ours._ff_block(ours.norm2(mid) if norm_first else mid)
    torch.testing.assert_close(y[2], (mid + branch if norm_first else ours.norm2(mid + branch))[2])
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("hidden", [-1e9, torch.finfo(torch.float32).min])
def test_a_padded_sequence_of_finite_floats_equals_torchs(hidden):
    ours, theirs = (module.float() for module in build("encoder", batch_first=True))
    src, padding = torch.randn(B, T, E), torch.zeros(B, T)
    padding[1] = hidden
    torch.testing.assert_close(
        ours(src, src_key_padding_mask=padding), theirs(src, src_key_padding_mask=padding), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_autocast_gives_torchs_dtype(kind, norm_first, dtype):
    """The dtypes of the output and all gradients are torch's, whatever comes in."""
    ours, theirs = (module.float() for module in build(kind, norm_first=norm_first))
    inputs = KINDS[kind].inputs()
    inputs = {name: t.detach().to(dtype).requires_grad_() for name, t in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        mine, reference = (run(module, lambda m, **given: m(*given.values()), inputs) for module in (ours, theirs))
    assert {name: t.dtype for name, t in mine.items()} == {name: t.dtype for name, t in reference.items()}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("parameters", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_autocast_raises_torchs_error_beside_float64(kind, parameters, norm_first):
    dtype = torch.float64 if parameters == torch.float32 else torch.float32
    args = [torch.randn(T, B, E, dtype=dtype)] + ([torch.randn(S, B, E, dtype=dtype)] if kind == "decoder" else [])
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (raised(lambda m=m: m.to(parameters)(*args)) for m in build(kind, norm_first=norm_first))
    assert ours == theirs
    assert ours[0] is RuntimeError


@pytest.mark.parametrize("shape", [(T, 0, E), (0, B, E), (0, E)], ids=str)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", LAYERS)
def test_empty_input(kind, recompute, shape):
    layer, _ = build(kind, dropout=0.1, recompute=recompute)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    memory = [torch.randn(S, *shape[1:], dtype=torch.float64)] if kind == "decoder" else []
    y = layer(x, *memory)
    grads = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    assert y.shape == x.shape
    assert [grad.shape for grad in grads] == [x.shape, *(p.shape for p in layer.parameters())]
    assert all(grad.abs().sum() == 0 for grad in grads)


@pytest.mark.filterwarnings("ignore:There is a performance drop because")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_each_sample(kind, norm_first):
    ours, theirs = build(kind, norm_first=norm_first)
    x, memory = torch.randn(3, T, E, dtype=torch.float64), torch.randn(3, S, E, dtype=torch.float64)
    samples = (x,) if kind == "encoder" else (x, memory)

    def per_sample(module):
        def loss(parameters, *inputs):
            return torch.func.functional_call(module, parameters, inputs).sin().sum()

        parameters = {name: p.detach() for name, p in module.named_parameters()}
        grad = torch.func.grad(loss, tuple(range(1 + len(samples))))
        grads, *others = torch.func.vmap(grad, (None,) + (0,) * len(samples))(parameters, *samples)
        return grads | {f"input {i}": other for i, other in enumerate(others)}

    mine, reference = per_sample(ours), per_sample(theirs)
    assert list(mine) == list(reference)
    torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("kind", LAYERS)
def test_compiles_without_a_graph_break(kind):
    ours, theirs = build(kind, recompute="selective")
    inputs = KINDS[kind].inputs()
    compiled = torch.compile(lambda *args: ours(*args), backend="aot_eager", fullgraph=True)

    def call(module, **inputs):
        return (compiled if module is ours else theirs)(*inputs.values())

    assert_drop_in(ours, theirs, call, inputs)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("which", ["mask", "padding"])
def test_evaluation_reads_additive_masks_as_training_does(which, dtype, train):
    """torch's inference kernel reads them as bool and gives NaN or wrong numbers. Ours does what torch does in training."""
    torch.manual_seed(0)
    layer = ckptkern.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).train(train)
    other = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    other.load_state_dict(layer.state_dict())
    x, mask, padding = torch.randn(2, 4, 8), torch.randn(4, 4), torch.zeros(2, 4).index_fill(1, torch.tensor(3), -2.0)
    masks = (mask.to(dtype), None) if which == "mask" else (None, padding.to(dtype))
    try:
        expected = other(x, *masks)
    except RuntimeError as error:
        with torch.no_grad(), pytest.raises(RuntimeError, match=re.escape(str(error))):
            layer(x, *masks)
        return
    with torch.no_grad():
        torch.testing.assert_close(layer(x, *masks), expected.detach())


def test_an_overridden_half_gets_the_masks_it_was_given():
    """The override may take masks of any shape and dtype."""

    class Biased(ckptkern.nn.TransformerEncoderLayer):
        def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
            self.seen = attn_mask
            return 0 * x

    layer, bias = Biased(8, 2, 16, 0.0, batch_first=True).eval(), torch.randn(2, 4, 4, dtype=torch.bfloat16)
    x = torch.randn(3, 4, 8)
    with torch.no_grad():
        y = layer(x, bias)
    assert layer.seen is bias
    torch.testing.assert_close(y, layer(x, bias))


class Wrapped(torch.nn.Module):
    """Attention wrapped in another module, as adapters do, has no batch_first."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, *args, **kwargs):
        return self.attention(*args, **kwargs)


def test_a_self_attention_without_batch_first():
    ours = ckptkern.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    x = torch.randn(5, 2, 8)
    expected = ours(x)
    ours.self_attn = Wrapped(ours.self_attn)
    torch.testing.assert_close(ours(x), expected)
