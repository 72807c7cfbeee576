"""nn.Sequential and LayerStack: when they measure, what they save, modes inside, and what they refuse. The strategies of
Sequential are tested in tests/segments/test_sequential.py."""

import itertools

import pytest
import torch
from support.drop_ins import raised, step
from torch import nn

import ckptkern
from ckptkern.nn import LayerStack, LlamaDecoderLayer
from ckptkern.ops.attention.block import AttentionBlock
from ckptkern.segments import sequential


def model(layer=nn.Tanh, **options):
    return ckptkern.nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), layer()) for _ in range(12)), **options)


def test_settings_are_shown_and_sliced():
    module = model(segments="every 2", debug=False)
    assert list(module.state_dict()) == list(nn.Sequential(*module).state_dict())
    assert "segments='every 2'" in repr(module)
    assert (module[:3].segments, len(module[:3]), module[:3].options) == ("every 2", 3, {"debug": False})


def test_it_measures_once_a_shape(monkeypatch):
    module, x, calls = model(segments="1KiB"), torch.randn(3, 6), []
    measure = sequential._within
    monkeypatch.setattr(sequential, "_within", lambda *args: (calls.append(1), measure(*args))[1])
    for _ in range(3):
        module(x)
    assert len(calls) == 1
    module(x[:2])
    module.eval()(x)
    with torch.autocast("cpu", torch.bfloat16):
        module(x)
    assert len(calls) == 4


def test_any_layers_and_inputs():
    """A layer that occurs twice, meta tensors, and inputs that are no tensors."""
    x, act = torch.randn(3, 6), nn.Tanh()
    module = ckptkern.nn.Sequential(nn.Linear(6, 6), act, nn.Linear(6, 6), act, segments="every 1")
    torch.testing.assert_close(module(x), nn.Sequential(*module)(x))
    assert module.to("meta")(x.to("meta")).shape == x.shape
    module = ckptkern.nn.Sequential(nn.Flatten(), nn.Tanh(), segments="1GiB")
    module[0].forward = sum
    with pytest.raises(ValueError, match="needs an input to measure with"):
        module((x, x))
    module.segments = "every 1"
    assert torch.equal(module((x, x)), (x + x).tanh())


def test_what_sequential_refuses():
    with pytest.raises(ValueError, match=r"segments must be a number of segments, .* but is"):
        model(segments=2.0)
    with pytest.raises(TypeError, match=r"Sequential: recompute is not an option of ckptkern\.checkpoint"):
        model(recompute="full")
    for layers in (("x",), (None, 3)):
        ours, theirs = (raised(lambda nn=nn, layers=layers: nn.Sequential(*layers)) for nn in (ckptkern.nn, nn))
        assert ours == theirs is not None


# -- LayerStack --------------------------------------------------------------------------------------------------------

B, S, D = 2, 6, 32
ROW = B * S * D * 4  # bytes of a layer's input


def llama(mode="selective", layers=5, p=0.1):
    options = dict(intermediate_size=48, dropout=p, resid_dropout=p, recompute=mode)
    return [LlamaDecoderLayer(D, 4, **options) for _ in range(layers)]


def step_of(run, layers, *args, **options):
    """(output and gradients, saved bytes besides parameters and arguments)."""
    torch.manual_seed(3)
    x, held = torch.randn(B, S, D, requires_grad=True), [*itertools.chain(*args), *options.values()]
    return step(nn.ModuleList(layers), x, function=lambda _, x: run(x, *args, **options), held=held)


def in_turn(layers):
    def run(x, *args, **options):
        for layer in layers:
            x = layer(x, *args, **options)
        return x

    return run


@pytest.mark.parametrize(
    ("mode", "every"), [("selective", 1), ("full", 2), (("selective", "none"), 3), ("selective", 9)]
)
def test_a_stack_saves_the_inputs_of_groups(mode, every):
    """The last group, of what remains, saves what its layers do; the results, dropout too, are those of the loop."""
    layers = llama(mode)
    expected, all_saved = step_of(in_turn(layers), layers)
    actual, saved = step_of(LayerStack(layers, every), layers)
    torch.testing.assert_close(actual, expected)
    groups = -(-len(layers) // every)
    last = len(layers) - (groups - 1) * every
    state = 5200  # of the random generator, and small things, for each segment
    assert 0 <= saved - ((groups - 1) * ROW + last * all_saved // len(layers)) <= groups * state


@pytest.mark.parametrize("mode", ["none", "full"])
def test_in_a_stack_layers_keep_to_their_modes(mode, monkeypatch):
    """In a segment of one's own they do not: there they run at "none"."""
    compute, seen = AttentionBlock.compute, []
    monkeypatch.setattr(AttentionBlock, "compute", lambda x, t, o: seen.append(o.recompute) or compute(x, t, o))
    stack, x = LayerStack(llama(mode, 4)), torch.randn(B, S, D, requires_grad=True)
    stack(x).sum().backward()
    assert seen == [mode] * (4 + 2), "forward, and the first group again"
    with pytest.raises(TypeError, match="positional"):  # an error inside leaves nothing behind
        stack(x, 1, 2, 3)
    seen.clear()
    ckptkern.checkpoint(stack[0], x).sum().backward()
    assert seen == ["none"] * 2


def test_arguments_of_all_layers_are_saved_once():
    layers = llama(p=0.0)
    tables = ckptkern.nn.rotary_tables(torch.arange(S), D // 4, 50.0)
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    expected, _ = step_of(in_turn(layers), layers, tables, attn_mask=mask)
    actual, saved = step_of(LayerStack(layers), layers, tables, attn_mask=mask)
    torch.testing.assert_close(actual, expected)
    assert saved < 12 * ROW
    assert not torch.allclose(step_of(LayerStack(layers), layers)[0][0], actual[0])


class Named(nn.Module):
    """Its arguments are called as options of checkpoint."""

    def forward(self, x, debug=0.0, early_stop=0.0):
        return x.sin() + debug + early_stop


def test_keywords_are_the_layers():
    layers, x = [Named() for _ in range(5)], torch.randn(3, 4)
    actual, expected = (run(x, debug=0.5, early_stop=2.0) for run in (LayerStack(layers, debug=False), in_turn(layers)))
    torch.testing.assert_close(actual, expected)


@pytest.mark.slow
def test_a_stack_is_a_module_list_that_compiles_and_nests():
    layers = [ckptkern.nn.MLP(D) for _ in range(4)]
    stack = LayerStack(layers, 3, determinism_check="none")
    assert list(stack.state_dict()) == list(nn.ModuleList(layers).state_dict())
    part = stack[1:4]
    assert (type(part), len(part), part.every, part.options) == (LayerStack, 3, 3, {"determinism_check": "none"})
    x = torch.randn(B, S, D)
    with torch.no_grad():
        assert not stack(x).requires_grad
    assert LayerStack()(x) is x
    expected, _ = step_of(in_turn(layers), layers)
    torch._dynamo.reset()
    compiled = torch.compile(LayerStack(layers), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step_of(compiled, layers)[0], expected)
    nested, _ = step_of(lambda x: ckptkern.checkpoint(LayerStack(layers), x), layers)
    torch.testing.assert_close(nested, expected)


def test_what_a_stack_refuses():
    with pytest.raises(ValueError, match="LayerStack: every must be"):
        LayerStack(llama(), 0)
    with pytest.raises(TypeError, match=r"LayerStack: recompute is not an option of ckptkern\.checkpoint"):
        LayerStack(llama(), recompute="full")
    stack = LayerStack([nn.MultiheadAttention(4, 2), nn.Identity()])
    with pytest.raises(TypeError, match=r"a layer must return a tensor.*but MultiheadAttention returned tuple"):
        stack(torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4))
