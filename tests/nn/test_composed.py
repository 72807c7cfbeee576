"""Modules that no op stands for: adapters, hooks, parametrised, quantised, sparse and sharded weights. They call their parts as
one activation checkpoint."""

import copy
import functools
import itertools
import logging

import pytest
import torch
from support.cases import assert_same_within_rounding
from support.drop_ins import DROP_INS, B, E, T, call, inputs_of, ours_of, pair_of, run, step
from support.wrappers import Int8Weight
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint as torchs

import ckptkern
from ckptkern.ops.dispatch import choices


class LoRA(nn.Module):
    """Hugging Face PEFT's Linear: y = W x + B A dropout(x)."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.dropout = layer.requires_grad_(False), nn.Dropout(0.25)
        self.a = nn.Linear(layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, layer.out_features, bias=False)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x):
        return self.layer(x) + self.b(self.a(self.dropout(x)))


def each_linear(change, module):
    """Gives every nn.Linear to `change`, which changes it or returns what takes its place. Torch's attention calls no out_proj,
    so that nothing can take its place."""
    for path, child in [*module.named_modules()]:
        if isinstance(child, nn.Linear):
            owner, _, name = path.rpartition(".")
            changed = change(child) if name != "out_proj" else None
            if path and changed is not None:
                setattr(module.get_submodule(owner), name, changed)
    return module


def normed(module):
    for child in [*module.modules()]:
        if isinstance(child, nn.MultiheadAttention):
            parametrizations.weight_norm(child, "in_proj_weight")
    return each_linear(lambda linear: parametrizations.weight_norm(linear) and None, module)


def quantized(linear):
    linear.weight = nn.Parameter(Int8Weight.of(linear.weight), requires_grad=False)


def dense(linear):
    """The weight that the quantised one stands for."""
    linear.weight = nn.Parameter(Int8Weight.of(linear.weight).dense(), requires_grad=False)


CHANGES = {
    "LoRA": functools.partial(each_linear, LoRA),
    "weight_norm": normed,
    "int8": functools.partial(each_linear, quantized),
    "hook": functools.partial(each_linear, lambda linear: linear.register_forward_hook(lambda *_: None) and None),
}
LAYERS = ["MLP", "TransformerEncoderLayer", "TransformerDecoderLayer", "LlamaDecoderLayer"]
# a Linear has no part that an adapter could take the place of, and its own hooks run before its forward
CASES = [
    (name, how)
    for name in DROP_INS
    for how in CHANGES
    if name not in ("Linear", "MultiheadAttention") or how == "weight_norm" or (name == "Linear" and how == "int8")
]


def build(name, how, recompute, dropout=0.25):
    torch.manual_seed(1)
    options = {"Linear": {"activation": "gelu"}, "LinearStack": {}}.get(name, {"dropout": dropout})
    return CHANGES[how](ours_of(name, recompute=recompute, **options))


def step_of(name, module, around=lambda function, *args: function(*args)):
    """(output and gradients, saved bytes) of a step with one seed."""
    torch.manual_seed(4)
    inputs = [x.detach().float().requires_grad_() for x in inputs_of(name).values()]
    weights = [part for p in module.parameters() if isinstance(p, Int8Weight) for part in (p.int_data, p.scale)]
    return step(
        module, *inputs, function=lambda module, *args: around(functools.partial(call, module), *args), held=weights
    )


@pytest.mark.parametrize(("name", "how"), CASES)
def test_saved_bytes_are_those_of_a_checkpoint(name, how):
    """Results are the same as without a region, dropout included."""
    expected, whole = step_of(name, build(name, how, "none"))
    _, torchs_saved = step_of(name, build(name, how, "none"), lambda *args: torchs(*args, use_reentrant=False))
    arguments = sum(4 * x.numel() for x in inputs_of(name).values())
    for recompute in ("full",) if name in ("Linear", "LinearStack", "MLP", "GatedMLP") else ("selective", "full"):
        actual, saved = step_of(name, build(name, how, recompute))
        torch.testing.assert_close(actual, expected)
        assert saved == arguments <= torchs_saved < whole


@pytest.mark.parametrize("name", LAYERS)
def test_one_region_at_a_time(name):
    """The layer's parts make no regions inside it, and it makes none inside another or without gradients."""
    module, calls = build(name, "hook", "full"), []
    parts = [m for m in module.modules() if type(m) is nn.Linear]
    for part in parts:
        part.register_forward_hook(lambda *_: calls.append(None))
    for around in (
        lambda function, *args: function(*args),
        ckptkern.checkpoint,
        functools.partial(torchs, use_reentrant=False),
    ):
        calls.clear()
        step_of(name, module, around)
        assert len(calls) <= 2 * len(parts)  # the last call may save nothing
    calls.clear()
    with torch.no_grad():
        assert step_of(name, module)[1] == 0
    assert len(calls) == len(parts)


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_that_are_given_back_before_backward(name):
    """torch.func.functional_call's own parameters are those of the recompute."""
    module, inputs = build(name, "LoRA", "full").eval().requires_grad_(), [x.float() for x in inputs_of(name).values()]
    parameters = {key: (2 * p).detach().requires_grad_() for key, p in module.named_parameters()}
    y = torch.func.functional_call(module, parameters, tuple(inputs))
    grads = torch.autograd.grad(y.square().sum(), [*parameters.values()])
    module.load_state_dict(parameters, strict=False)
    torch.testing.assert_close(grads, torch.autograd.grad(module(*inputs).square().sum(), [*module.parameters()]))


@pytest.mark.slow
def test_where_saved_tensors_cannot_be_hooked():
    module, x = build("LlamaDecoderLayer", "LoRA", "full").eval(), torch.randn(B, T, E)
    parameters = dict(module.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    whole = torch.func.grad(loss)(parameters, x)
    torch.testing.assert_close({key: g.sum(0) for key, g in each.items()}, whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.export.export(module, (x,), strict=True).module()(x), module(x))


def test_cached_parametrisations():
    """The weights that the cache keeps are computed before the region, and are not there in its recompute."""
    module, grads, x = ours_of("MLP"), [], torch.randn(B, E)
    normed(module)
    for context in (parametrize.cached, torch.enable_grad):
        with context():
            y = module(module(x))
        grads.append(torch.autograd.grad(y.square().sum(), [*module.parameters()]))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ["MLP", "TransformerDecoderLayer"])
def test_compiled(name):
    torch._dynamo.reset()
    module, inputs = build(name, "LoRA", "selective").eval(), {key: x.float() for key, x in inputs_of(name).items()}
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(module, compiled, inputs), run(module, call, inputs))


@pytest.mark.parametrize("name", [name for name in DROP_INS if name != "MultiheadAttention"])
def test_quantised_weights(name, caplog):
    """Results are those of the dense weights; a line of the log says why. Under backend("triton") a module calls its parts,
    whose own operations are no error."""
    choices.log_once.cache_clear()
    module = ours_of(name, recompute="full")
    other = each_linear(dense, copy.deepcopy(module))
    each_linear(quantized, module)
    inputs = {key: x.detach().float().requires_grad_() for key, x in inputs_of(name).items()}
    with caplog.at_level(logging.INFO, "ckptkern"):
        actual, expected = run(module, call, inputs), run(other, call, inputs)
    assert any("Int8Weight has operations of its own" in record.message for record in caplog.records)
    assert_same_within_rounding(actual, expected)
    with ckptkern.backend("triton"):
        torch.testing.assert_close(run(module, call, inputs), actual, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.parametrize("name", ["Linear", "LinearStack", "MLP", "GatedMLP", "MultiheadAttention"])
def test_a_sparse_weight(name, layout):
    """Torch computes it, and what torch computes or refuses depends on its release and the layout."""
    results = []
    for module in pair_of(name):
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)][-1]
        linear.weight = nn.Parameter(linear.weight.detach().relu().to_sparse(layout=layout))
        try:
            y = call(module, torch.ones(B, T, E).double())
            y.square().sum().backward()
            results.append([y, *(p.grad.to_dense() for p in module.parameters())])
        except RuntimeError as error:
            results.append(type(error))
    assert len({isinstance(result, list) for result in results}) == 1
    if isinstance(results[1], list):
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["Linear", "LinearStack", "MLP", "GatedMLP"])
def test_jagged_rows(name):
    module, x = ours_of(name), torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)], layout=torch.jagged)
    torch.testing.assert_close(module(x).values(), module(x.values()))


# -- two processes -----------------------------------------------------------------------------------------------------


def _check_fsdp(rank):
    """FSDP2 around the region, and around modules inside it, whose parameters it exchanges between the two runs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, x = init_device_mesh("cpu", (2,)), torch.randn(B, T, E, generator=torch.Generator().manual_seed(5))
    for kind, keep in itertools.product(("LlamaDecoderLayer", "LoRA"), (True, False)):
        whole, sharded = (build("LlamaDecoderLayer", "LoRA", "full").eval() for _ in range(2))
        for part in [m for m in sharded.modules() if type(m).__name__ == kind]:
            fully_shard(part, mesh=mesh, reshard_after_forward=not keep)
        network = nn.Sequential(sharded, sharded)
        fully_shard(network, mesh=mesh)
        for _ in range(2):  # the second step starts with what the first left
            network.zero_grad()
            whole.zero_grad()
            network(x).square().sum().backward()
            whole(whole(x)).square().sum().backward()
            for mine, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
                if theirs.grad is not None:
                    torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, atol=1e-3, rtol=1e-4)


def test_fsdp(ranks):
    ranks.run(2, _check_fsdp)
