"""torch.func's transforms and functional_call, forward-mode AD and parametrize.cached(), through regions and chunks."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

import ckptkern
from ckptkern.memory import saved_tensors

WIDTH, TOKENS = 4, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x):
        return self.outer(self.inner(x + self.shift).tanh())


class Decorated(Layer):
    @ckptkern.checkpointed
    def forward(self, x):
        return super().forward(x)


class Adapted(nn.Module):
    """Makes its layer call its submodules."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).tanh()


def patched(layers, x):
    with ckptkern.patch_torch():
        for layer in layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    return x


def each(call):
    def run(layers, x):
        for layer in layers:
            x = call(layer, x)
        return x

    return run


def within(layers, x):
    """A region that finds its layers in its closure, and regions inside."""

    def run(x):
        for layer in layers:
            x = ckptkern.checkpoint(layer, x)
        return x

    return ckptkern.checkpoint(run, x)


def stacked(layers, x):
    stack = ckptkern.nn.LayerStack(every=1)
    stack._modules.update(layers._modules)
    return stack(x)


def in_segments(segments):
    def run(layers, x):
        sequential = ckptkern.nn.Sequential(segments=segments)
        sequential._modules.update(layers._modules)
        return sequential(x)

    return run


WAYS = {
    "checkpoint": each(ckptkern.checkpoint),
    "checkpoint of a method": each(lambda layer, x: ckptkern.checkpoint(layer.forward, x)),
    "checkpoint with values": each(lambda layer, x: ckptkern.checkpoint(layer, x, determinism_check="values")),
    "checkpoint with debug": each(lambda layer, x: ckptkern.checkpoint(layer, x, debug=True)),
    "checkpoint with decisions": each(
        lambda layer, x: ckptkern.checkpoint(layer, x, context_fn=ckptkern.saved_decisions)
    ),
    "patched": patched,
    "within": within,
    "checkpoint_sequential": lambda layers, x: ckptkern.checkpoint_sequential(layers, 2, x),
    "checkpoint_sequential in bytes": lambda layers, x: ckptkern.checkpoint_sequential(layers, "600B", x),
    "Sequential": in_segments(2),
    "Sequential in bytes": in_segments("600B"),
    "LayerStack": stacked,
    "tiled": each(lambda layer, x: ckptkern.tiled(layer, x, chunks=2)),
    "tiled in a workspace": each(lambda layer, x: ckptkern.tiled(layer, x, workspace=64)),
    "tiled, checked": each(lambda layer, x: ckptkern.tiled(layer, x, chunks=3, check=True)),
}
PLAIN = each(lambda layer, x: layer(x))


class Model(nn.Module):
    def __init__(self, run, kind=Layer):
        super().__init__()
        self.layers, self.run = nn.Sequential(*(kind() for _ in range(3))), run

    def forward(self, x):
        return self.run(self.layers, x)


def models(way, kind=Layer):
    """One that runs its layers in this way, and one that just calls them, with the same numbers."""
    torch.manual_seed(0)
    model = Model(WAYS[way], kind).double()
    plain = copy.deepcopy(model)
    plain.run = PLAIN
    return model, plain


def tokens(*shape):
    return torch.randn(*shape, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss(f):
    return lambda x: f(x).square().sum()


def dual(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(tokens(), tokens().cos()))).tangent


def trained_under_vmap(f):
    return torch.autograd.grad(loss(vmap(f))(tokens(2)), [*f.parameters()])


def of_parameters(f):
    return grad(lambda parameters: functional_call(f, parameters, (tokens(),)).square().sum())(
        dict(f.named_parameters())
    )


TRANSFORMS = {
    "grad": lambda f: grad(loss(f))(tokens()),
    "vmap": lambda f: vmap(f)(tokens(2)),
    "vmap of grad": lambda f: vmap(grad(loss(f)))(tokens(2)),
    "grad of vmap": lambda f: grad(loss(vmap(f)))(tokens(2)),
    "jacrev": lambda f: jacrev(f)(tokens()),
    "jacfwd": lambda f: jacfwd(f)(tokens()),
    "jvp": lambda f: jvp(f, (tokens(),), (tokens().cos(),)),
    "vjp": lambda f: vjp(f, tokens())[1](tokens()),
    "hessian": lambda f: hessian(loss(f))(tokens()[:2]),
    "grad of parameters": of_parameters,
    "trained under vmap": trained_under_vmap,
    "dual numbers": dual,
    "vectorized": lambda f: torch.autograd.functional.jacobian(f, tokens(), vectorize=True),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_transforms_are_those_of_the_plain_function(way, transform):
    model, plain = models(way)
    actual, expected = (tree_leaves(TRANSFORMS[transform](m)) for m in (model, plain))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_decorated_methods_and_composed_layers(transform):
    model, plain = Model(PLAIN, Decorated), Model(PLAIN)
    plain.load_state_dict(model.state_dict())
    actual, expected = (tree_leaves(TRANSFORMS[transform](m.double())) for m in (model, plain))
    torch.testing.assert_close(actual, expected)


# -- functional_call


GIVEN = {  # what stands in the place of each parameter and buffer
    "tensors": lambda p: (p.detach() * 1.5).requires_grad_(p.is_floating_point()),
    "results": lambda p: p * 1.5,
    "parameters": lambda p: nn.Parameter(p.detach() * 1.5),
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("way", [*WAYS, "decorated"])
def test_functional_call(way, kind):
    """Backward runs after it, when the module has its own parameters back."""
    model, plain = models(way) if way != "decorated" else (Model(PLAIN, Decorated).double(), Model(PLAIN).double())
    plain.load_state_dict(model.state_dict())
    own = dict(model.named_parameters())

    def gradients(model):
        state = {name: GIVEN[kind](p) for name, p in own.items()}
        leaves = [*own.values()] if kind == "results" else [*state.values()]
        buffers = {name: buffer * 3 for name, buffer in model.named_buffers()}
        result = functional_call(model, (state, buffers), (tokens(),))
        return torch.autograd.grad(result.square().sum(), leaves)

    torch.testing.assert_close(gradients(model), gradients(plain))
    assert dict(model.named_parameters()) == own


def test_functional_call_updates_its_own_statistics_once():
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    before = copy.deepcopy(layer.state_dict())
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    expected = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    state = {name: (2 * p.detach()).requires_grad_() for name, p in layer.named_parameters()}
    x = torch.randn(5, WIDTH)
    y = functional_call(nn.Sequential(layer), _prefixed({**state, **expected}), (x,))
    wanted = torch.autograd.grad(y.square().sum(), [*state.values()])
    region = Model(each(ckptkern.checkpoint))
    region.layers = nn.Sequential(layer)
    y = functional_call(region, _prefixed(_prefixed({**state, **buffers}), "layers"), (x,))
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), [*state.values()]), wanted)
    torch.testing.assert_close(buffers, expected)
    torch.testing.assert_close(dict(layer.state_dict()), dict(before), rtol=0, atol=0)


def _prefixed(state, prefix="0"):
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


def test_a_change_in_place_of_a_given_tensor_is_an_error():
    model, _ = models("within")
    state = {name: p * 2 for name, p in model.named_parameters()}
    y = functional_call(model, state, (tokens(),))
    with torch.no_grad():
        state["layers.0.inner.weight"].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        y.sum().backward()


def test_a_parameter_that_was_exchanged_in_between():
    model, plain = models("checkpoint")
    y, expected = model(tokens()), plain(tokens())
    for m in (model, plain):
        m.layers[0].outer.weight = nn.Parameter(torch.zeros(WIDTH, 2 * WIDTH, dtype=torch.float64))
    own = [[layer.inner.weight for layer in m.layers] for m in (model, plain)]
    actual, wanted = torch.autograd.grad(y.sum(), own[0]), torch.autograd.grad(expected.sum(), own[1])
    torch.testing.assert_close(actual, wanted)


# -- parametrize.cached


class Noisy(nn.Module):
    """A parametrization that gives another weight each time, and another again when its factor is changed."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, weight):
        return self.factor * torch.tanh(weight) * (1 + torch.rand_like(weight))


def parametrized(model):
    for layer in model.layers:
        parametrize.register_parametrization(layer.inner, "weight", Noisy())
    return model


def nothing(model):
    pass


def changed(model):
    for layer in model.layers:
        layer.inner.parametrizations.weight[0].factor = -3.0


def removed(model):
    for layer in model.layers:
        parametrize.remove_parametrizations(layer.inner, "weight", leave_parametrized=False)


def cached_step(model, between, times=2, inside=False):
    """Gradients where each layer runs `times` times, with a weight of its own that is computed once."""
    torch.manual_seed(2)
    leaves = [*model.parameters()]
    with parametrize.cached():
        y = tokens()
        for _ in range(times):
            y = model(y)
        if inside:
            return torch.autograd.grad(y.square().sum(), leaves)
    between(model)
    grads = torch.autograd.grad(y.square().sum(), leaves)
    assert not parametrize._cache
    assert parametrize._cache_enabled == 0
    return grads


@pytest.mark.parametrize("between", [nothing, changed], ids=lambda function: function.__name__)
@pytest.mark.parametrize("way", [*WAYS, "decorated"])
def test_cached_weights_are_those_of_forward(way, between):
    model, plain = models(way) if way != "decorated" else (Model(PLAIN, Decorated).double(), Model(PLAIN).double())
    plain.load_state_dict(model.state_dict())
    expected = cached_step(parametrized(plain), between)
    torch.testing.assert_close(cached_step(parametrized(model), between), expected)


def test_a_parametrization_that_is_removed_before_backward():
    """It takes its property from the class, so the recompute cannot read the weight that forward had."""
    with pytest.raises(CheckpointError, match=r"Linear in the region .* was a ParametrizedLinear in forward"):
        cached_step(parametrized(models("checkpoint")[0]), removed)


@pytest.mark.parametrize("way", WAYS)
def test_backward_inside_of_cached(way):
    model, plain = models(way)
    expected = cached_step(parametrized(plain), nothing, inside=True)
    torch.testing.assert_close(cached_step(parametrized(model), nothing, inside=True), expected)


def test_only_backward_inside_of_cached():
    """Forward had a weight for each call."""
    model, plain = models("within")
    grads = []
    for m in (parametrized(model), parametrized(plain)):
        torch.manual_seed(2)
        y = m(m(tokens()))
        with parametrize.cached():
            grads.append(torch.autograd.grad(y.square().sum(), [*m.parameters()]))
            assert not parametrize._cache
    torch.testing.assert_close(*grads)


def test_a_region_whose_weights_are_cached_saves_its_input():
    model = parametrized(models("checkpoint")[0])
    with parametrize.cached():
        model(tokens())
        with saved_tensors(model) as saved:
            model(tokens())
    assert saved.bytes == 3 * tokens().nbytes


def test_chunks_share_the_weight_that_they_are_the_first_to_compute():
    layer = parametrized(Model(PLAIN)).layers[0]
    with parametrize.cached(), saved_tensors(layer) as saved:
        ckptkern.tiled(layer, tokens().float(), chunks=2)
    assert not [shape for shape, _, _ in saved.tensors if shape[-2:] == (TOKENS // 2, 2 * WIDTH)]


def test_a_change_in_place_of_a_cached_weight_is_an_error():
    model = parametrized(models("checkpoint")[0])
    with parametrize.cached():
        y = model(model(tokens()))
        with torch.no_grad():
            model.layers[2].inner.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("how", ["grad", "functional_call", "cached"])
@pytest.mark.parametrize("change", ["composed", "converted"])
def test_layers_that_call_their_submodules_and_groups_of_layers(change, how):
    """composed: an adapter makes a layer call its submodules. converted: into regions of two layers."""
    torch.manual_seed(0)

    def layer():
        mlp = ckptkern.nn.MLP(WIDTH, recompute="full")
        if change == "composed":
            mlp.fc1 = Adapted(mlp.fc1)
        return mlp

    model = nn.Sequential(*(layer() for _ in range(4))).double()
    plain = copy.deepcopy(model)
    for mlp in plain:
        mlp.recompute = "none"
    if change == "converted":
        ckptkern.convert(model, tokens(), recompute="full", every=2)
    expected, actual = (_of_layers(layers, how) for layers in (plain, model))
    torch.testing.assert_close(actual, expected)


def _of_layers(model, how):
    leaves = dict(model.named_parameters())
    if how == "grad":
        return tree_leaves(of_parameters(model))
    if how == "functional_call":
        y = functional_call(model, {name: leaf * 2 for name, leaf in leaves.items()}, (tokens(),))
        return torch.autograd.grad(y.square().sum(), [*leaves.values()])
    for layer in model:
        inner = layer.fc1.layer if isinstance(layer.fc1, Adapted) else layer.fc1
        parametrize.register_parametrization(inner, "weight", Noisy())
    leaves = [*model.parameters()]
    torch.manual_seed(2)
    with parametrize.cached():
        y = model(model(tokens()))
    for module in model.modules():
        if isinstance(module, Noisy):
            module.factor = -3.0
    return torch.autograd.grad(y.square().sum(), leaves)
