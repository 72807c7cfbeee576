"""What every module promises: its torch module's constructor, parameters, initialisation and results."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from types import MethodType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.cases import ACTIVATIONS, MODES, SEED, assert_same, assert_same_within_rounding, expected_mask
from support.drop_ins import raised
from torch import Tensor, nn

import ckptkern
from ckptkern import state
from ckptkern.memory import saved_tensors

WIDTHS = [7, 9, 6, 5]


class DropIn(NamedTuple):
    """ours, other    (options) -> modules with the same parameters
    unfused       (other, x, act, drop) -> y
    options       the options that only ours takes, with values other than the defaults
    masked        width of the tensor that dropout acts on
    """

    ours: Callable[..., nn.Module]
    other: Callable[..., nn.Module]
    unfused: Callable[..., Tensor]
    options: dict
    masked: int | None = None


def stack_of_torch(bias: bool = True, **factory) -> nn.Module:
    other = nn.Module()
    other.layers = nn.ModuleList(nn.Linear(k, n, bias, **factory) for k, n in itertools.pairwise(WIDTHS))
    return other


def stack_unfused(other: nn.Module, x: Tensor, act: Callable, drop: Callable) -> Tensor:
    for layer in other.layers:
        x = act(layer(x))
    return x


def mlp_of_torch(bias: bool = True, **factory) -> nn.Module:
    other = nn.Module()
    other.fc1, other.fc2 = nn.Linear(7, 12, bias, **factory), nn.Linear(12, 5, bias, **factory)
    return other


def gated_of_torch(bias: bool = False, **factory) -> nn.Module:
    other = nn.Module()
    other.gate_proj, other.up_proj = nn.Linear(7, 12, bias, **factory), nn.Linear(7, 12, bias, **factory)
    other.down_proj = nn.Linear(12, 5, bias, **factory)
    return other


DROP_INS = {
    "Linear": DropIn(
        lambda **o: ckptkern.nn.Linear(7, 5, **o),
        lambda **o: nn.Linear(7, 5, **o),
        lambda other, x, act, drop: act(other(x)),
        {"activation": "silu", "recompute": "full"},
    ),
    "LinearStack": DropIn(
        lambda **o: ckptkern.nn.LinearStack(WIDTHS, **o),
        stack_of_torch,
        stack_unfused,
        {"activation": "silu", "recompute": "selective", "workspace": "1MiB"},
    ),
    "MLP": DropIn(
        lambda **o: ckptkern.nn.MLP(7, 12, 5, **o),
        mlp_of_torch,
        lambda other, x, act, drop: other.fc2(drop(act(other.fc1(x)))),
        {"activation": "silu", "recompute": "selective", "workspace": "1MiB", "dropout": 0.25},
        masked=12,
    ),
    "GatedMLP": DropIn(
        lambda **o: ckptkern.nn.GatedMLP(7, 12, 5, **o),
        gated_of_torch,
        lambda other, x, act, drop: other.down_proj(drop(act(other.gate_proj(x)) * other.up_proj(x))),
        {"activation": "gelu", "recompute": "selective", "workspace": "1MiB", "dropout": 0.25},
        masked=12,
    ),
    "Dropout": DropIn(
        lambda p=0.25, **o: ckptkern.nn.Dropout(p, **o),
        lambda p=0.25, **o: nn.Dropout(p, **o),
        lambda other, x, act, drop: drop(x),
        {"p": 0.25},
        masked=7,
    ),
}
WITH_PARAMETERS = [name for name in DROP_INS if name != "Dropout"]
every_module = pytest.mark.parametrize("name", DROP_INS)
every_layer = pytest.mark.parametrize("name", WITH_PARAMETERS)


def seeded(build: Callable[..., nn.Module], **options) -> nn.Module:
    torch.manual_seed(3)
    return build(**options)


def data(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(5)).to(dtype)


def step(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and all gradients of one step, with the mask that SEED gives."""
    x = x.clone().requires_grad_()
    torch.manual_seed(SEED)
    y = function(x)
    (y * torch.arange(1, y.numel() + 1).view(y.shape)).sum().backward()
    grads = {key: p.grad for key, p in module.named_parameters()}
    module.zero_grad()
    return {"y": y.detach(), "x": x.grad, **grads}


def unfused_step(name: str, other: nn.Module, x: Tensor, activation: str, p: float) -> dict[str, Tensor]:
    def drop(h: Tensor) -> Tensor:
        mask = expected_mask(p, h.shape[:-1].numel(), h.shape[-1]).view(h.shape)
        return h * state.threshold_scale(p)[1] * mask if p else h

    return step(lambda x: DROP_INS[name].unfused(other, x, ACTIVATIONS[activation], drop), other, x)


@every_layer
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_same_state_dict_and_initialisation(name, bias):
    ours, other = (seeded(build, bias=bias) for build in DROP_INS[name][:2])
    assert list(ours.state_dict()) == list(other.state_dict())
    assert_same(ours.state_dict(), other.state_dict())
    assert any("bias" in key for key in ours.state_dict()) == bias
    third = DROP_INS[name].ours(bias=bias)
    third.load_state_dict(other.state_dict(), strict=True)
    other.load_state_dict(third.state_dict(), strict=True)
    assert_same(third.state_dict(), ours.state_dict())


@pytest.mark.sampled
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mode", MODES)
@every_layer
def test_results_are_the_compositions(name, mode, activation):
    options = {"dropout": 0.25} if DROP_INS[name].masked else {}
    ours = seeded(DROP_INS[name].ours, activation=activation, recompute=mode, dtype=torch.float64, **options)
    other = seeded(DROP_INS[name].other, dtype=torch.float64)
    x = data(torch.float64)
    expected = unfused_step(name, other, x, activation, 0.25 if options else 0.0)
    assert_same_within_rounding(step(ours, ours, x), expected)


def test_dropout_is_the_mask():
    module = ckptkern.nn.Dropout(0.25)
    assert_same_within_rounding(
        step(module, module, data()), unfused_step("Dropout", nn.Module(), data(), "relu", 0.25)
    )


@every_module
def test_training_and_evaluation(name):
    options = DROP_INS[name].options
    module, x = DROP_INS[name].ours(**options), data()
    p = options.get("dropout", options.get("p", 0.0))
    module.eval()
    assert torch.equal(module(x), module(x))
    other = DROP_INS[name].other()
    other.load_state_dict(module.state_dict())
    unfused = unfused_step(name, other, x, options.get("activation", "relu"), 0.0)
    assert_same_within_rounding(step(module, module, x), unfused)
    module.train()
    assert torch.equal(module(x), module(x)) == (p == 0.0)


@every_module
def test_options_reach_the_op_and_are_shown(name):
    module = DROP_INS[name].ours(**DROP_INS[name].options)
    for option, value in DROP_INS[name].options.items():
        assert getattr(module, option) == value
        assert f"{option}={value!r}" in module.extra_repr()
    assert f"{name}(" in repr(module)


ALL = {
    "Dropout": lambda: (ckptkern.nn.Dropout(0.25), (4, 8)),
    "Experts": lambda: (ckptkern.nn.Experts(3, 8, 12, "gelu", bias=True, recompute="selective"), (4, 8)),
    "GatedMLP": lambda: (ckptkern.nn.GatedMLP(8, 12, activation="gelu", recompute="selective", dropout=0.25), (4, 8)),
    "LayerStack": lambda: (ckptkern.nn.LayerStack((ckptkern.nn.MLP(8) for _ in range(4)), every=3), (4, 8)),
    "Linear": lambda: (ckptkern.nn.Linear(8, 8, activation="gelu", recompute="full"), (4, 8)),
    "LinearCrossEntropyLoss": lambda: (
        ckptkern.nn.LinearCrossEntropyLoss(8, 12, bias=True, softcap=3.0, recompute="none", workspace="1MiB"),
        (4, 8),
    ),
    "LinearStack": lambda: (ckptkern.nn.LinearStack([8, 6, 8], activation="silu", recompute="selective"), (4, 8)),
    "LlamaAttention": lambda: (ckptkern.nn.LlamaAttention(8, 2, 1, qk_norm=True, bias=True, dropout=0.25), (2, 4, 8)),
    "LlamaDecoderLayer": lambda: (
        ckptkern.nn.LlamaDecoderLayer(8, 2, 1, qk_norm=True, resid_dropout=0.25, recompute="full", workspace="1MiB"),
        (2, 4, 8),
    ),
    "MLP": lambda: (ckptkern.nn.MLP(8, dropout=0.25, recompute="none", workspace="1MiB"), (4, 8)),
    "MultiheadAttention": lambda: (ckptkern.nn.MultiheadAttention(8, 2, 0.25, recompute="full"), (2, 4, 8)),
    "Sequential": lambda: (ckptkern.nn.Sequential(*(ckptkern.nn.MLP(8) for _ in range(4)), segments=2), (4, 8)),
    "TransformerDecoderLayer": lambda: (
        ckptkern.nn.TransformerDecoderLayer(8, 2, 12, 0.25, recompute="full"),
        (4, 2, 8),
    ),
    "TransformerEncoderLayer": lambda: (
        ckptkern.nn.TransformerEncoderLayer(8, 2, 12, 0.25, recompute="full"),
        (4, 2, 8),
    ),
}


def saved_and_loaded(module: nn.Module) -> nn.Module:
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved_and_loaded}


@pytest.mark.sampled
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", [name for name in ckptkern.nn.__all__ if isinstance(getattr(ckptkern.nn, name), type)])
def test_every_module_is_copied_with_its_settings(name, copied):
    """What a copy made after a step computes, its gradients and what it saves for them; it shares nothing with the original."""
    torch.manual_seed(3)
    module, shape = ALL[name]()
    x = torch.randn(shape)
    routed = torch.tensor([[0, 2]] * 4), torch.ones(4, 2)

    def call(module):
        others = {"MultiheadAttention": (x, x), "TransformerDecoderLayer": (x.flip(0),), "Experts": routed}
        inputs = (x, *(others | {"LinearCrossEntropyLoss": (torch.arange(len(x)),)}).get(name, ()))
        torch.manual_seed(SEED)
        with saved_tensors(exclude=[*module.parameters(), *inputs]) as saved:
            y = module(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        return y, torch.autograd.grad(y.square().sum(), list(module.parameters())) if saved.bytes else (), saved.bytes

    y, grads, saved = call(module)
    other = COPIES[copied](module)
    assert type(other) is type(module)
    assert repr(other) == repr(module)
    for one in (other, module):
        got, got_grads, got_saved = call(one)
        assert torch.equal(got, y)
        assert all(torch.equal(a, b) for a, b in zip(got_grads, grads, strict=True))
        assert got_saved == saved
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()


@every_layer
def test_factory_arguments(name):
    module = DROP_INS[name].ours(dtype=torch.bfloat16, device="meta")
    assert {(p.dtype, p.device.type) for p in module.parameters()} == {(torch.bfloat16, "meta")}
    assert module(data(torch.bfloat16).to("meta")).shape == (2, 4, 5)
    module = module.to_empty(device="cpu").float()
    assert module(data()).shape == (2, 4, 5)


@every_layer
def test_training_follows_torchs_module(name):
    """Ten optimiser steps give the losses of eager PyTorch."""

    def losses(build, function):
        module = seeded(build, dtype=torch.float64)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            loss = function(module, data(torch.float64)).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.item()

    activation = DROP_INS[name].ours().activation
    unfused = losses(
        DROP_INS[name].other, lambda other, x: DROP_INS[name].unfused(other, x, ACTIVATIONS[activation], lambda h: h)
    )
    assert list(losses(DROP_INS[name].ours, lambda module, x: module(x))) == pytest.approx(list(unfused), rel=1e-9)


@every_module
def test_inference_then_training(name):
    """Copies share nothing with the original (xformers#290)."""
    module = DROP_INS[name].ours(**DROP_INS[name].options)
    expected = step(module, module, data())
    with torch.inference_mode():
        module(data())
    module.eval()
    with torch.no_grad():
        module(data())
    module.train()
    assert_same(step(module, module, data()), expected)


@every_layer
def test_ensembles(name):
    """functional_call under vmap over stacked parameters, the model ensembling of torch.func's tutorial."""
    modules = [DROP_INS[name].ours() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(modules)

    def call(parameters, buffers, x):
        return torch.func.functional_call(modules[0], (parameters, buffers), (x,))

    out = torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, data())
    for module, y in zip(modules, out, strict=True):
        assert torch.equal(module(data()), y)


@every_module
def test_compiled(name):
    torch._dynamo.reset()
    module = DROP_INS[name].ours(**DROP_INS[name].options)
    expected = step(module, module, data())
    assert_same(step(torch.compile(module, backend="aot_eager", fullgraph=True), module, data()), expected)
    module.eval()
    with torch.no_grad():
        y = torch.compile(module, backend="aot_eager", fullgraph=True)(data())
        assert torch.equal(y, module(data()))


DYNAMIC = {
    "MLP": lambda: ckptkern.nn.MLP(16, dropout=0.1),
    "Dropout": lambda: ckptkern.nn.Dropout(0.1),
    "TransformerEncoderLayer": lambda: ckptkern.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
    "LlamaDecoderLayer": lambda: ckptkern.nn.LlamaDecoderLayer(16, 4, 2, resid_dropout=0.1),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_compiled_for_any_shape(name):
    """With dynamic=True a module's numbers are symbolic too, such as dropout's probability."""
    torch._dynamo.reset()
    module = seeded(DYNAMIC[name])
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in ((2, 8, 16), (3, 12, 16)):
        x = torch.randn(shape)
        assert_same(step(compiled, module, x), step(module, module, x))


@pytest.mark.parametrize("name", DYNAMIC)
def test_meta_tensors(name):
    x = torch.empty(2, 8, 16, device="meta")
    assert DYNAMIC[name]().to("meta")(x).shape == x.shape


def test_compiled_with_a_schedule_of_dropout():
    torch._dynamo.reset()
    module = seeded(DYNAMIC["MLP"])
    compiled, x = torch.compile(module, backend="aot_eager", fullgraph=True), torch.randn(4, 16)
    for p in (0.1, 0.2, 0.3):
        module.dropout = p
        assert_same(step(compiled, module, x), step(module, module, x))


@every_layer
def test_export(name):
    """torch.export sees one op, for any batch size."""
    module = DROP_INS[name].ours(**DROP_INS[name].options).eval()
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(module, (data(),), dynamic_shapes=({0: batch},))
    ours = [node for node in program.graph.nodes if "ckptkern" in str(node.target)]
    assert len(ours) == 1
    x = torch.randn(9, 4, 7)
    assert torch.equal(program.module()(x), module(x))


class Adapter(nn.Module):
    """A layer with weight and bias, like nn.Linear, and more: LoRA."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.weight.shape[-1], 2, bias=False, dtype=layer.weight.dtype)
        self.weight, self.bias = layer.weight, getattr(layer, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.down(x).sum(-1, keepdim=True)


LEAVES = {
    "LinearStack": ("layers.0", "layers.2"),
    "MLP": ("fc1", "fc2"),
    "GatedMLP": ("gate_proj", "up_proj", "down_proj"),
}


@pytest.mark.parametrize("how", ["adapter", "hook", "pre-hook", "forward"])
@pytest.mark.parametrize(("name", "leaf"), [(name, leaf) for name, leaves in LEAVES.items() for leaf in leaves])
def test_what_stands_for_a_layer_is_called(name, leaf, how):
    """With a wrapper, hooks, or a forward set on the instance, the results are those of the modules."""
    ours, other = seeded(DROP_INS[name].ours, dtype=torch.float64), seeded(DROP_INS[name].other, dtype=torch.float64)
    for module in (ours, other):
        layer, (owner, _, last) = module.get_submodule(leaf), leaf.rpartition(".")
        if how == "adapter":
            torch.manual_seed(4)
            setattr(module.get_submodule(owner), last, Adapter(layer))
        elif how == "hook":
            layer.register_forward_hook(lambda layer, args, y: 2 * y)
        elif how == "pre-hook":
            layer.register_forward_pre_hook(lambda layer, args: (-args[0],))
        else:
            layer.forward = lambda x, layer=layer: nn.Linear.forward(layer, x).sin()
    x = data(torch.float64)
    act = ACTIVATIONS[ours.activation]
    expected = step(lambda x: DROP_INS[name].unfused(other, x, act, lambda h: h), other, x)
    assert_same_within_rounding(step(ours, ours, x), expected)


def test_a_stack_of_mixed_biases():
    ours, other = seeded(DROP_INS["LinearStack"].ours), seeded(DROP_INS["LinearStack"].other)
    for module in (ours, other):
        module.layers[0].bias = None
    expected = unfused_step("LinearStack", other, data(), "relu", 0.0)
    assert_same_within_rounding(step(ours, ours, data()), expected)


@every_layer
def test_autocast_gives_its_dtype(name):
    module = DROP_INS[name].ours()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(data())
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}


WRONG = {
    "activation": ("tanh", "activation must be one of 'relu', .*, not 'tanh'"),
    "recompute": ("half", "recompute must be one of 'none', 'selective', 'full'(, 'packed')?, not 'half'"),
    "dropout": (1.5, "dropout probability has to be a number between 0 and 1, but got 1.5"),
    "workspace": ("plenty", "workspace must be a positive number of bytes or a string like '64MiB', not 'plenty'"),
}


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in WITH_PARAMETERS for option in DROP_INS[name].options]
)
def test_wrong_options_at_construction(name, option):
    value, message = WRONG[option]
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        DROP_INS[name].ours(**{option: value})


NO_WIDTHS = (
    (lambda: ckptkern.nn.MLP(None), "MLP: in_features must be an integer of at least 0, not None"),
    (lambda: ckptkern.nn.MLP("7"), "MLP: in_features must be an integer of at least 0, not '7'"),
    (lambda: ckptkern.nn.MLP(7, -1), "MLP: hidden_features must be an integer of at least 0, not -1"),
    (lambda: ckptkern.nn.MLP(7, 12, 5.0), "MLP: out_features must be an integer of at least 0, not 5.0"),
    (lambda: ckptkern.nn.GatedMLP(-7, 12), "GatedMLP: in_features must be an integer of at least 0, not -7"),
    (lambda: ckptkern.nn.GatedMLP(7, None), "GatedMLP: hidden_features must be an integer of at least 0, not None"),
    (lambda: ckptkern.nn.GatedMLP(7, 12, [5]), r"GatedMLP: out_features must be an integer of at least 0, not \[5\]"),
    (
        lambda: ckptkern.nn.LinearStack([7, None]),
        r"LinearStack: features\[1\] must be an integer of at least 0, not None",
    ),
    (lambda: ckptkern.nn.LinearStack([-7, 9]), r"LinearStack: features\[0\] must be an integer of at least 0, not -7"),
)


@pytest.mark.parametrize(("build", "message"), NO_WIDTHS, ids=[message.split(" must")[0] for _, message in NO_WIDTHS])
def test_widths_that_are_none(build, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        build()


@pytest.mark.parametrize("args", [(None, 5), ("7", 5), (-7, 5), (7, None), (7, -5), (7.0, 5)], ids=str)
def test_wrong_widths_of_a_linear_raise_torchs_error(args):
    ours, theirs = (raised(lambda linear=linear: linear(*args)) for linear in (ckptkern.nn.Linear, nn.Linear))
    assert ours == theirs is not None


@pytest.mark.parametrize("p", [None, "a", -1, 2], ids=str)
def test_a_wrong_probability_of_dropout_raises_torchs_error(p):
    for construct in (True, False):
        errors = []
        for dropout in (ckptkern.nn.Dropout, nn.Dropout):
            late = dropout()
            late.p = p
            errors.append(raised((lambda d=dropout: d(p)) if construct else (lambda late=late: late(data()))))
        assert errors[0] == errors[1] is not None


@pytest.mark.parametrize("activation", [0, "", False], ids=repr)
def test_no_activation_is_none_alone(activation):
    with pytest.raises(ValueError, match=f"Linear: activation must be one of .*, not {activation!r}"):
        ckptkern.nn.Linear(7, 5, activation=activation)


@every_layer
def test_wrong_input(name):
    with pytest.raises(ValueError, match=r"input has 6 features but .* has in_features=7"):
        DROP_INS[name].ours()(torch.ones(3, 6))


@every_module
@pytest.mark.parametrize("wrong", [None, "x", [1.0], 7], ids=repr)
def test_no_tensor(name, wrong):
    with pytest.raises(TypeError, match=f": input must be a Tensor, not {type(wrong).__name__}"):
        DROP_INS[name].ours()(wrong)


def test_defaults_are_those_of_torchs_modules():
    """A module in place of torch's computes what torch's did, without a further argument."""
    ours, other = (
        seeded(ckptkern.nn.Linear, in_features=7, out_features=5),
        seeded(nn.Linear, in_features=7, out_features=5),
    )
    assert torch.equal(ours(data()), other(data()))
    assert torch.equal(F.gelu(other(data())), seeded(DROP_INS["Linear"].ours, activation="gelu")(data()))
    assert isinstance(ours, nn.Linear)
    assert isinstance(ckptkern.nn.Dropout(), nn.Dropout)
    assert ckptkern.nn.Dropout().p == nn.Dropout().p


@pytest.mark.parametrize("name", [name for name in ckptkern.nn.__all__ if name != "rotary_tables"])
def test_scripting_is_refused_by_name(name):
    """Also inside another module. TorchScript's own message would be about `super().forward` or some line of ours."""
    kind = getattr(ckptkern.nn, name)
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for module in (layer, nn.ModuleList([layer])):
        with pytest.raises(NotImplementedError, match=rf"torch\.jit\.script: {name} is .* Use torch\.compile"):
            torch.jit.script(module)


def test_a_classs_own_forward_bound_to_the_instance_is_no_other():
    """Hugging Face's kernelize binds forward to the instances; a layer with such parts stays one op."""
    x = torch.randn(3, 7)
    for bound in (None, "own", "another's"):
        layer = ckptkern.nn.MLP(7, 12, 5)
        if bound is not None:
            layer.fc1.forward = MethodType(nn.Linear.forward, layer.fc1 if bound == "own" else nn.Linear(7, 12))
        y = layer(x)
        assert (type(y.grad_fn).__name__ == "AddmmBackward0") == (bound == "another's")
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), y)
