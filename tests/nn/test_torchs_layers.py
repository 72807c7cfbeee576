"""What MultiheadAttention and the transformer layers promise alike: initialisation, dropout, saved bytes, autocast, errors."""

import pytest
import torch
from support.cases import MODES, assert_as_exact
from support.drop_ins import (
    ATTENTION,
    DECODER,
    ENCODER,
    HIDDEN,
    B,
    E,
    H,
    S,
    T,
    dropout_is_one_mask,
    padding_mask,
    raised,
    run,
)

import ckptkern
from ckptkern.memory import saved_tensors

LAYERS = [ENCODER, DECODER]
EACH = [pytest.param(kind, {}, id=str(kind)) for kind in ATTENTION]
EACH += [
    pytest.param(kind, {"norm_first": first}, id=f"{kind}-{'pre' if first else 'post'}-norm")
    for kind in LAYERS
    for first in (False, True)
]


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        *(
            ("MultiheadAttention", (E, H), o)
            for o in ({}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 4, "vdim": 6})
        ),
        *((kind.name, (E, H, HIDDEN), {}) for kind in LAYERS),
    ],
    ids=str,
)
def test_same_initialisation_and_state_dict(name, args, options):
    made = []
    for nn in (ckptkern.nn, torch.nn):
        torch.manual_seed(3)
        made.append(getattr(nn, name)(*args, **options))
    ours, theirs = made
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert isinstance(ours, type(theirs))
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    if args[2:]:
        assert isinstance(ours.dropout1, ckptkern.nn.Dropout)
        assert ours.dropout1.p == theirs.dropout1.p == 0.1


PADDING = {ATTENTION[0].name: "", ENCODER.name: "src_", DECODER.name: "memory_"}


@pytest.mark.parametrize("kind", [*ATTENTION, *LAYERS], ids=str)
def test_inference_equals_torchs(kind):
    """Where torch takes its fast path."""
    ours, theirs = (module.eval() for module in kind.build(num_heads=4, batch_first=True))
    inputs = kind.inputs("batch_first", grad=False)
    mask = padding_mask("bool", (B,), S if kind.memory else T)
    with torch.no_grad():
        for options in ({}, {f"{PADDING[kind.name]}key_padding_mask": mask}):
            torch.testing.assert_close(*(kind.call(m, **inputs, **options) for m in (ours, theirs)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("kind", [ATTENTION[0], ENCODER], ids=str)
def test_nested_tensors_are_for_inference(kind):
    ours, theirs = (module.eval() for module in kind.build(num_heads=4, batch_first=True))
    x = torch.nested.nested_tensor([torch.randn(n, E).double() for n in (3, 5)])
    with torch.no_grad():
        torch.testing.assert_close(*(kind.call(m, x).unbind() for m in (ours, theirs)))
    with pytest.raises(
        AssertionError, match=r"does not support NestedTensor outside of its fast path.*grad is enabled"
    ):
        kind.call(ours, x)


@pytest.mark.sampled
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "options", "path"),
    [(*one.values, path) for one in EACH for path in ("self_attn", "dropout", "dropout1", "dropout2")
     if one.values[0] in LAYERS] + [(kind, {}, "") for kind in ATTENTION],
    ids=str,
)  # fmt: skip
def test_a_wrong_probability_raises_torchs_error(kind, options, path, training):
    inputs, errors, of_attention = kind.inputs(), [], path in ("", "self_attn")
    for module in kind.build(**options):
        setattr(module.get_submodule(path), "dropout" if of_attention else "p", 2)
        module.train(training)
        errors.append(raised(lambda m=module: kind.call(m, **inputs)))
    assert errors[0] == errors[1]
    assert (errors[0] is None) == (of_attention and not training)


@pytest.mark.parametrize(("kind", "options"), EACH)
def test_dropout_is_one_mask(kind, options):
    ours, _ = kind.build(dropout=0.3, **options)
    x, *memory = kind.inputs().values()
    memory = [one.detach() for one in memory]
    dropout_is_one_mask(ours, lambda m, x: kind.call(m, x, *memory), x)
    ours.eval()
    assert torch.equal(kind.call(ours, x, *memory), kind.call(ours, x, *memory))


# (elements of each token of x, of each of the memory beside the memory itself)
OF_CORE = {"none": (E + E + H, 2 * E), "selective": (E + H, 0), "full": (0, 0)}
SAVED = {
    **{(ATTENTION[0], mode): (E + x + memory, 0) for mode, (x, memory) in OF_CORE.items()},
    **{(ATTENTION[2], mode): (E + x, memory) for mode, (x, memory) in OF_CORE.items()},
    (ENCODER, "selective"): (E + E + H, 0), (ENCODER, "full"): (E, 0),
    (DECODER, "selective"): (E + 2 * (E + H), 0), (DECODER, "full"): (E, 0),
}  # fmt: skip
SAVED_CASES = [(kind, mode, layout, {}) for kind, mode in SAVED for layout in ("seq_first", "batch_first")]
SAVED_CASES += [(ATTENTION[2], mode, "seq_first", {"kdim": 5, "vdim": 5}) for mode in MODES]
SAVED_CASES += [(kind, mode, "seq_first", {"dropout": 0.1}) for kind, mode in SAVED if kind in LAYERS]
SAVED_CASES += [(ENCODER, mode, "seq_first", {"norm_first": True}) for mode in ("selective", "full")]


@pytest.mark.parametrize(("kind", "mode", "layout", "options"), SAVED_CASES, ids=str)
def test_saved_bytes(kind, mode, layout, options):
    """x and the memory; o and the logsumexp of each attention; projections at "none"; 16 bytes for each dropout."""
    module, _ = kind.build(recompute=mode, batch_first=layout == "batch_first", **options)
    inputs, width = kind.inputs(layout, options.get("kdim", E)), options.get("kdim", E) if kind.memory else 0
    of_x, of_memory = SAVED[kind, mode]
    with saved_tensors(exclude=module.parameters()) as found:
        kind.call(module, **inputs)
    draws = {ENCODER: 4, DECODER: 6}.get(kind, 0) if "dropout" in options else 0
    assert found.bytes == 8 * B * (T * of_x + S * (width + of_memory)) + 16 * draws, found.tensors


@pytest.mark.parametrize(("kind", "options"), EACH)
def test_autocast_is_as_exact_as_torch(kind, options):
    ours, theirs = kind.build(**options, **({"activation": "gelu"} if kind in LAYERS else {}))
    inputs = kind.inputs()
    exact = run(theirs, kind.call, inputs)
    single = {name: t.detach().float().requires_grad_() for name, t in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        mine, eager = (run(module.float(), kind.call, single) for module in (ours, theirs))
    assert kind in LAYERS or mine["output 0"].dtype == torch.bfloat16
    assert_as_exact(mine, eager, exact)
