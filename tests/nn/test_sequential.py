"""nn.Sequential: the checks that it has besides those of the strategies, in tests/segments/test_sequential.py; LayerStack."""

import copy
import importlib
import pickle

import pytest
import torch
from support.drop_ins import raised
from torch import nn

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.nn import LayerStack, LlamaDecoderLayer


def model(**options):
    torch.manual_seed(1)
    return ckptkern.nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), **options)


def gradients(module, x):
    module.zero_grad()
    module(x).square().sum().backward()
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("segments", ["sqrt", 2, "every 2", "1KiB"])
def test_copies(segments, copied):
    """Also after a step, when the parts are known."""
    module, x = model(segments=segments, determinism_check="none"), torch.randn(3, 6)
    expected = gradients(module, x)
    other = copied(module)
    assert repr(other) == repr(module)
    assert other.options == {"determinism_check": "none"}
    for got, wanted in zip(gradients(other, x), expected, strict=True):
        assert torch.equal(got, wanted)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    for got, wanted in zip(gradients(module, x), expected, strict=True):
        assert torch.equal(got, wanted)


def test_meta_tensors():
    module, x = model().to("meta"), torch.empty(3, 6, device="meta", requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


@pytest.mark.parametrize("segments", [None, 2.0, [2], {2}], ids=repr)
def test_wrong_segments_at_construction(segments):
    with pytest.raises(ValueError, match=r"segments must be a number of segments, .* but is"):
        model(segments=segments)


def test_wrong_options_at_construction():
    with pytest.raises(TypeError, match=r"Sequential: recompute is not an option of ckptkern\.checkpoint"):
        model(recompute="full")


@pytest.mark.parametrize("layers", [("x",), (3,), (None, 3)], ids=str)
def test_wrong_layers_raise_torchs_error(layers):
    ours, theirs = (raised(lambda nn=nn: nn.Sequential(*layers)) for nn in (ckptkern.nn, nn))
    assert ours == theirs is not None


B, S, D = 2, 6, 32
ROW = B * S * D * 4  # bytes of a layer's input


def llama(mode="selective", layers=5, p=0.1):
    torch.manual_seed(2)
    options = dict(intermediate_size=48, dropout=p, resid_dropout=p, recompute=mode)
    return [LlamaDecoderLayer(D, 4, **options) for _ in range(layers)]


def step(run, parameters, *given):
    """(output and gradients, saved bytes)."""
    torch.manual_seed(3)
    x = torch.randn(B, S, D, requires_grad=True)
    with saved_tensors([*parameters, *(one for pair in given for one in pair)]) as saved:
        y = run(x, *given)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])], saved.bytes


def in_turn(layers):
    def run(x, *given):
        for layer in layers:
            x = layer(x, *given)
        return x

    return run


@pytest.mark.parametrize("every", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("mode", ["selective", "full", ("selective", "none")])
def test_a_stack_saves_the_inputs_of_groups(mode, every):
    """The last group, of what remains, saves what its layers do; the results, dropout too, are those of the loop."""
    layers = llama(mode)
    parameters = [p for layer in layers for p in layer.parameters()]
    expected, all_saved = step(in_turn(layers), parameters)
    found, saved = step(LayerStack(layers, every), parameters)
    torch.testing.assert_close(found, expected)
    groups = -(-len(layers) // every)
    last = len(layers) - (groups - 1) * every
    state = 5200  # of the random generator, and small things, for each segment
    assert 0 <= saved - ((groups - 1) * ROW + last * all_saved // len(layers)) <= groups * state


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_in_a_stack_layers_keep_to_their_modes(mode, monkeypatch):
    """In a segment of one's own they do not: there they run at "none"."""
    module = importlib.import_module("ckptkern.ops.transformer_layer")
    sublayer, seen = module.any_sublayer, []
    monkeypatch.setattr(module, "any_sublayer", lambda x, t, o: seen.append(o.recompute) or sublayer(x, t, o))
    stack, x = LayerStack(llama(mode, 4)), torch.randn(B, S, D, requires_grad=True)
    stack(x).sum().backward()
    assert seen == [mode] * (4 + 2), "forward, and the first group again"
    seen.clear()
    ckptkern.checkpoint(stack[0], x).sum().backward()
    assert seen == ["none"] * 2
    seen.clear()
    with pytest.raises(TypeError, match="positional"):  # an error inside leaves nothing behind
        stack(x, 1, 2, 3)
    ckptkern.checkpoint(stack[0], x).sum().backward()
    assert seen == ["none"] * 2


def test_arguments_of_all_layers_are_saved_once():
    layers = llama(p=0.0)
    tables = ckptkern.nn.rotary_tables(torch.arange(S) + 3, D // 4)
    parameters = [p for layer in layers for p in layer.parameters()]
    expected, _ = step(in_turn(layers), parameters, tables)
    found, _ = step(LayerStack(layers), parameters, tables)
    torch.testing.assert_close(found, expected)
    other, _ = step(LayerStack(layers), parameters)
    assert not torch.allclose(other[0], found[0])
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    with saved_tensors([*parameters, mask]) as saved:
        y = LayerStack(layers)(torch.randn(B, S, D, requires_grad=True), attn_mask=mask, is_causal=False)
    y.sum().backward()
    assert saved.bytes < 12 * ROW


class Named(nn.Module):
    """Its arguments are called as options of checkpoint."""

    def forward(self, x, debug=0.0, early_stop=0.0):
        return x.sin() + debug + early_stop


def test_keywords_are_the_layers():
    layers, x = [Named() for _ in range(5)], torch.randn(3, 4, requires_grad=True)
    expected = x
    for layer in layers:
        expected = layer(expected, debug=0.5, early_stop=2.0)
    found = LayerStack(layers, debug=False)(x, debug=0.5, early_stop=2.0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (found, expected)))


def test_a_stack_is_a_module_list():
    layers = llama()
    stack, unfused = LayerStack(layers, 3, determinism_check="none"), nn.ModuleList(layers)
    assert list(stack.state_dict()) == list(unfused.state_dict())
    part = stack[1:4]
    assert (type(part), len(part), part.every, part.options) == (LayerStack, 3, 3, {"determinism_check": "none"})
    x = torch.randn(B, S, D)
    for other in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert (other.every, other.options) == (3, stack.options)
        other.eval()
        stack.eval()
        assert torch.equal(other(x), stack(x))
    with torch.no_grad():
        assert not stack(x).requires_grad
    assert LayerStack()(x) is x


def test_a_stack_compiles_and_nests():
    layers = llama(p=0.0, layers=4)
    parameters = [p for layer in layers for p in layer.parameters()]
    expected, _ = step(in_turn(layers), parameters)
    torch._dynamo.reset()
    compiled = torch.compile(LayerStack(layers), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, parameters)[0], expected)
    for checkpoint in (ckptkern.checkpoint, torch.utils.checkpoint.checkpoint):
        nested = step(lambda x, run=checkpoint: run(LayerStack(layers), x, use_reentrant=False), parameters)
        torch.testing.assert_close(nested[0], expected)


def test_what_a_stack_refuses():
    with pytest.raises(ValueError, match="LayerStack: every must be"):
        LayerStack(llama(), 0)
    with pytest.raises(TypeError, match=r"LayerStack: recompute is not an option of ckptkern\.checkpoint"):
        LayerStack(llama(), recompute="full")
    stack = LayerStack([nn.MultiheadAttention(4, 2), nn.Identity()])
    with pytest.raises(TypeError, match=r"a layer must return a tensor.*but MultiheadAttention returned tuple"):
        stack(torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4))
