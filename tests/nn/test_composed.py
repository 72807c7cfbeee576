"""Modules that no op stands for: adapters, hooks, parametrised and quantised weights. They are activation checkpoints."""

import pytest
import torch
from support.wrappers import Int8Weight
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint as torchs

import ckptkern
from ckptkern.memory import saved_tensors

E, H, B, S = 16, 4, 2, 24


class LoRA(nn.Module):
    """Hugging Face PEFT's Linear: y = W x + B A dropout(x). With `dora`, the columns of W + B A have learnt lengths."""

    def __init__(self, layer: nn.Linear, dora: bool):
        super().__init__()
        self.layer, self.dropout = layer.requires_grad_(False), nn.Dropout(0.25)
        self.a = nn.Linear(layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, layer.out_features, bias=False)
        self.length = nn.Parameter(layer.weight.norm(dim=1) * 1.5) if dora else None

    @property
    def weight(self):
        return self.layer.weight

    @property
    def bias(self):
        return self.layer.bias

    def forward(self, x):
        y = F.linear(x, self.weight)
        y = y + self.b(self.a(self.dropout(x)))
        if self.length is not None:
            y = y * (self.length / (self.weight + self.b.weight @ self.a.weight).norm(dim=1).detach())
        return y if self.bias is None else y + self.bias


def each_linear(module, change):
    """Gives every nn.Linear to `change`, which changes it or returns what takes its place."""
    for path, one in [*module.named_modules()]:
        if isinstance(one, nn.Linear):
            owner, _, name = path.rpartition(".")
            made = change(one)
            if path and made is not None:
                setattr(module.get_submodule(owner), name, made)
    return module


def adapted(dora):
    def change(module):
        attention = isinstance(module, nn.MultiheadAttention) or hasattr(module, "linear1")
        return each_linear(module, lambda one: None if attention and "Quant" in type(one).__name__ else LoRA(one, dora))

    return change


def normed(module):
    for one in [*module.modules()]:
        if isinstance(one, nn.MultiheadAttention):
            parametrizations.weight_norm(one, "in_proj_weight")
    each_linear(module, lambda one: parametrizations.weight_norm(one) and None)
    return module


def quantized(linear):
    linear.weight = nn.Parameter(Int8Weight.of(linear.weight), requires_grad=False)


CHANGES = {
    "LoRA": adapted(False),
    "DoRA": adapted(True),
    "weight_norm": normed,
    "int8": lambda module: each_linear(module, quantized),
    "hook": lambda module: each_linear(module, lambda one: one.register_forward_hook(lambda *_: None) and None),
}
MODULES = {
    "Linear": lambda **o: ckptkern.nn.Linear(E, E, activation="gelu", **o),
    "LinearStack": lambda **o: ckptkern.nn.LinearStack([E, 2 * E, E], **o),
    "MLP": lambda **o: ckptkern.nn.MLP(E, dropout=0.25, **o),
    "GatedMLP": lambda **o: ckptkern.nn.GatedMLP(E, 3 * E, dropout=0.25, **o),
    "MultiheadAttention": lambda **o: ckptkern.nn.MultiheadAttention(E, H, 0.25, batch_first=True, **o),
    "TransformerEncoderLayer": lambda **o: ckptkern.nn.TransformerEncoderLayer(E, H, 64, 0.25, batch_first=True, **o),
    "TransformerDecoderLayer": lambda **o: ckptkern.nn.TransformerDecoderLayer(E, H, 64, 0.25, batch_first=True, **o),
    "LlamaAttention": lambda **o: ckptkern.nn.LlamaAttention(E, H, 2, dropout=0.25, **o),
    "LlamaDecoderLayer": lambda **o: ckptkern.nn.LlamaDecoderLayer(E, H, 2, dropout=0.25, resid_dropout=0.25, **o),
}
# LoRA takes a Linear's place, or torch calls no out_proj; a Linear's own hooks run before its forward
CASES = [
    (name, change)
    for name in MODULES
    for change in CHANGES
    if not (name in ("Linear", "MultiheadAttention") and change in ("LoRA", "DoRA", "hook"))
]


def build(name, change, recompute):
    torch.manual_seed(1)
    return CHANGES[change](MODULES[name](recompute=recompute))


def call(name, module, x, *memory):
    if name == "MultiheadAttention":
        return module(x, x, x, need_weights=False)[0]
    return module(x, *memory)


def step(name, module, run=lambda function, *args: function(*args), *, backward=True):
    """(output and gradients, saved bytes) of a step with one seed."""
    seeds = (2, 3) if name == "TransformerDecoderLayer" else (2,)
    inputs = [torch.randn(B, S, E, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in seeds]
    trained = [p for p in module.parameters() if p.requires_grad]
    weights = [getattr(p, "int_data", p) for p in module.parameters()]
    scales = [p.scale for p in module.parameters() if isinstance(p, Int8Weight)]
    torch.manual_seed(4)
    with saved_tensors(exclude=[*weights, *scales]) as saved:
        y = run(lambda *inputs: call(name, module, *inputs), *inputs)
    if not backward:
        return y, saved.bytes
    grads = torch.autograd.grad(y.square().sum(), [*inputs, *trained], allow_unused=True)
    return [y.detach(), *grads], saved.bytes


@pytest.mark.parametrize(("name", "change"), CASES)
def test_saved_bytes_are_those_of_torchs_checkpoint(name, change):
    """Results are the same as without a region, dropout included."""
    inputs = 4 * B * S * E * (2 if name == "TransformerDecoderLayer" else 1)
    expected, whole = step(name, build(name, change, "none"))
    _, torchs_saved = step(name, build(name, change, "none"), lambda *args: torchs(*args, use_reentrant=False))
    modes = ("full",) if name in ("Linear", "LinearStack", "MLP", "GatedMLP") else ("selective", "full")
    for recompute in modes:
        made, saved = step(name, build(name, change, recompute))
        torch.testing.assert_close(made, expected)
        assert saved == inputs <= torchs_saved < whole


@pytest.mark.parametrize("name", ["MLP", "TransformerEncoderLayer", "TransformerDecoderLayer", "LlamaDecoderLayer"])
def test_one_region_at_a_time(name):
    """The layer's parts make no regions inside it, and it makes none inside another or without gradients."""
    module, calls = build(name, "hook", "full"), []
    parts = [one for one in module.modules() if type(one) is nn.Linear]
    for one in parts:
        one.register_forward_hook(lambda *_: calls.append(None))
    for run in (
        lambda function, *args: function(*args),
        ckptkern.checkpoint,
        lambda *args: torchs(*args, use_reentrant=False),
    ):
        calls.clear()
        step(name, module, run)
        assert len(calls) <= 2 * len(parts)  # the last call may save nothing
    calls.clear()
    with torch.no_grad():
        assert not step(name, module, backward=False)[1]
    assert len(calls) == len(parts)


@pytest.mark.parametrize("name", ["MLP", "TransformerEncoderLayer", "LlamaDecoderLayer"])
def test_parameters_that_are_given_back_before_backward(name):
    """torch.func.functional_call's own parameters are those of the recompute."""
    module = build(name, "LoRA", "full").eval()
    given = {key: (2 * p).detach().requires_grad_() for key, p in module.named_parameters()}
    x = torch.randn(B, S, E)
    made = torch.autograd.grad(torch.func.functional_call(module, given, (x,)).square().sum(), [*given.values()])
    with torch.no_grad():
        for key, p in module.requires_grad_().named_parameters():
            p.copy_(given[key])
    torch.testing.assert_close(made, torch.autograd.grad(module(x).square().sum(), [*module.parameters()]))


def test_where_saved_tensors_cannot_be_hooked():
    module = build("LlamaDecoderLayer", "LoRA", "full").eval()
    x, parameters = torch.randn(B, S, E), dict(module.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    torch.testing.assert_close(
        {key: g.sum(0) for key, g in each.items()}, torch.func.grad(loss)(parameters, x), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(torch.export.export(module, (x,), strict=True).module()(x), module(x))


def test_cached_parametrisations():
    """The weights that the cache keeps are computed before the region, and are not there in its recompute."""
    module, grads = build("MLP", "weight_norm", "full").eval(), []
    x = torch.randn(B, S, E)
    for context in (parametrize.cached, torch.enable_grad):
        with context():
            y = module(module(x))
        grads.append(torch.autograd.grad(y.square().sum(), [*module.parameters()]))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ["MLP", "TransformerEncoderLayer", "TransformerDecoderLayer", "LlamaDecoderLayer"])
def test_compiles_without_a_graph_break(name):
    torch._dynamo.reset()
    module = build(name, "LoRA", "selective").eval()
    made, _ = step(name, torch.compile(module, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(made, step(name, module)[0])


@pytest.mark.parametrize("name", MODULES)
def test_kernels_alone(name):
    """Under backend("triton") a module calls its submodules, whose own operations are no error."""
    module = build(name, "int8", "full").eval()
    with ckptkern.backend("triton"):
        made, _ = step(name, module)
    torch.testing.assert_close(made, step(name, module)[0], atol=1e-4, rtol=1e-4)


def test_dropout_of_packed_sequences():
    """A dropout that drops nothing changes nothing; tokens of other sequences stay unseen."""
    module, x = build("LlamaAttention", "hook", "full"), torch.randn(9, E)
    cu = torch.tensor([0, 2, 6, 9], dtype=torch.int32)
    for masks in ({}, {"window_size": (1, 0)}):
        made = []
        for module.dropout in (0.0, 1e-9):
            made.append(module(x, cu_seqlens=cu, max_seqlen=4, **masks))
        torch.testing.assert_close(*made)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def _check_parallel(rank: int) -> None:
    """DTensor weights of two ranks, as parallelize_module leaves them, give the whole layer's results."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    attention = {f"self_attn.{one}_proj": ColwiseParallel() for one in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    gated = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    plans = {
        "MLP": {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()},
        "GatedMLP": gated,
        "LlamaDecoderLayer": attention | {f"mlp.{name}": style for name, style in gated.items()},
        "TransformerEncoderLayer": {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()},
    }
    for name, plan in plans.items():
        torch.manual_seed(0)
        module = MODULES[name](recompute="full").eval()
        x = torch.randn(B, S, E, requires_grad=True)
        expected = module(x)
        grads = torch.autograd.grad(expected.square().sum(), [x, *module.parameters()])
        parallelize_module(module, mesh, plan)
        locals_ = [getattr(p, "_local_tensor", p) for p in module.parameters()]
        with saved_tensors(exclude=locals_) as saved:
            y = module(x)
        torch.testing.assert_close(y, expected)
        assert saved.bytes == x.nbytes, (name, saved)
        made = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
        for mine, whole in zip(made, grads, strict=True):
            torch.testing.assert_close(getattr(mine, "full_tensor", lambda mine=mine: mine)(), whole)


def test_tensor_parallelism_over_two_processes(ranks):
    ranks.run(2, _check_parallel)


def _check_sharded(rank: int) -> None:
    """FSDP2 around the region, and around modules inside it, whose parameters it exchanges between the two runs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, x = init_device_mesh("cpu", (2,)), torch.randn(B, S, E, generator=torch.Generator().manual_seed(5))
    for kind, keep in (("layer", True), ("layer", False), ("parts", True), ("parts", False)):
        whole, sharded = (build("LlamaDecoderLayer", "LoRA", "full").eval() for _ in range(2))
        for part in [sharded] if kind == "layer" else [one for one in sharded.modules() if isinstance(one, LoRA)]:
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


def test_fsdp2_over_two_processes(ranks):
    ranks.run(2, _check_sharded)
