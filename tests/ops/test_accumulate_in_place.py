"""Gradients that an op adds where they are summed: to a float32 main_grad, as Megatron-LM has it, or to an existing .grad."""

import contextlib
import copy
import functools
import re

import pytest
import torch
from support.cases import assert_same, assert_same_within_rounding, gradients, output_gradient
from support.catalog import Sizes
from support.properties import OF_OPS, call_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern.memory import memory_timeline, peak_memory
from ckptkern.ops.registration.functions import bodies_seen

NN, BF16 = ckptkern.nn, torch.bfloat16

# -- main_grad ---------------------------------------------------------------------------------------------------------


def with_main_grads(parameters) -> None:
    for p in parameters:
        p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape), False


# What has weights; of the heads, the loss's.
OPS = [name for name in OF_OPS if re.search("block|mlp|linear_act|linear_stack|layer|linear_cross", name)]


@pytest.mark.parametrize("workspace", [None, 1])
@pytest.mark.parametrize("name", OPS)
def test_sums_are_not_rounded(name, workspace):
    """Takes bfloat16 weights, in one part and in many: few sums are bfloat16 numbers; rounded they are what .grad would be."""
    more = {"workspace": workspace} if "workspace" in OF_OPS[name].parameters else {}
    call = call_of(name, sizes=Sizes((2, 150), experts=4), **more)
    expected, tensors = gradients(call, call.make(BF16)), call.make(BF16)
    weights = {name: t for name, t in tensors.items() if re.search(r"(?<!router_)weight$|weights\.", name)}
    with_main_grads(weights.values())
    call(tensors).backward(output_gradient(expected["y"]))
    for name, weight in weights.items():
        sums, rounded = weight.main_grad, weight.main_grad.to(BF16)
        assert (rounded - expected[name]).abs().max() <= 2**-6 * expected[name].abs().max(), name
        assert (sums == rounded)[sums != 0].float().mean() < 0.2, f"{name} was rounded before it was added"


def model(dtype=BF16) -> nn.Module:
    torch.manual_seed(0)
    layer = NN.LlamaDecoderLayer(32, 4, num_kv_heads=2).to(dtype)
    with_main_grads(layer.parameters())
    return layer


def grads(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() == 2]


X = torch.randn(2, 30, 32)
X16 = X.bfloat16()


def run(module, x=X16, **more) -> None:
    module(x).float().square().mean().backward(**more)


def inside(context):
    def step(module):
        with context():
            run(module)

    return step


STEPS = {
    "segment": lambda module: run(lambda x: ckptkern.checkpoint(module, x)),
    "torch's checkpoint": lambda module: run(
        lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    ),
    "offload": inside(lambda: ckptkern.storage.offload(min_bytes=0)),
    "a frozen weight": lambda module: [module.mlp.gate_proj.weight.requires_grad_(False), run(module)],
    # It sees the library op, whose result is rounded, and then added.
    "a FLOP counter": inside(lambda: FlopCounterMode(display=False)),
}


@pytest.mark.parametrize("how", STEPS)
def test_what_surrounds_an_op_loses_no_gradient(how):
    """A frozen weight is left alone."""
    ours, theirs = model(), model()
    STEPS[how](ours)
    run(theirs)
    for weight, other in zip(weights_of(ours), weights_of(theirs), strict=True):
        assert weight.grad is None
        assert weight.grad_added_to_main_grad == weight.requires_grad
        expected = other.main_grad * weight.requires_grad
        rounding = 2e-2 if how == "a FLOP counter" else 1e-6
        assert (weight.main_grad - expected).abs().max() <= rounding * other.main_grad.abs().max()


@pytest.mark.parametrize("how", ["second order", "compiled", "torch.func"])
def test_where_gradients_are_values_they_are_returned(how):
    """The gradient is `.grad`, or the function's result, and main_grad stays as it is."""
    module, plain = NN.MLP(32, 48), NN.MLP(32, 48)
    plain.load_state_dict(module.state_dict())
    with_main_grads(module.parameters())
    run(plain, X)
    if how == "second order":
        run(module, X, create_graph=True)
    elif how == "compiled":
        run(torch.compile(module, backend="aot_eager", fullgraph=True), X)
    results = {name: p.grad for name, p in module.named_parameters()}
    if how == "torch.func":
        loss = torch.func.grad(lambda p: torch.func.functional_call(module, p, (X,)).square().mean())
        results = loss(dict(module.named_parameters()))
    assert_same_within_rounding({name: grad.detach() for name, grad in results.items()}, grads(plain))
    for p in module.parameters():
        assert not p.main_grad.any()
        assert not p.grad_added_to_main_grad


def test_another_main_grad_is_refused():
    module = NN.MLP(32, 48)
    for wrong in (torch.zeros(48, 32, dtype=BF16), torch.zeros(32, 48)):
        module.fc1.weight.main_grad = wrong
        with pytest.raises(TypeError, match="main_grad must be float32 and of its parameter's shape"):
            run(module, X)


def test_float32_weights_under_autocast():
    """Matmuls of bfloat16 operands are summed without rounding there, too."""
    ours, low = model(torch.float32), model()
    ours.load_state_dict(low.state_dict())
    with torch.autocast("cpu", BF16):
        run(ours.mlp, X.bfloat16().float())
    run(low.mlp)
    for p, q in zip(weights_of(ours.mlp), weights_of(low.mlp), strict=True):
        torch.testing.assert_close(p.main_grad, q.main_grad)
        assert p.main_grad.any()


def test_megatrons_hook_finds_all_gradients():
    """It hangs on the node that accumulates a parameter's gradient, which also runs without a gradient, and adds `.grad` unless
    an op has added to main_grad: here, those of norms."""
    plain, module, seen = model(), model(), []
    for p in plain.parameters():
        del p.main_grad

    def hook_of(name, p):
        def hook(*_):
            seen.append(name)
            if p.grad is not None and not p.grad_added_to_main_grad:
                p.main_grad.add_(p.grad)
            p.grad = None

        return hook

    nodes = []  # alive, as Megatron-LM holds them
    for name, p in module.named_parameters():
        nodes.append(p.expand_as(p).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(hook_of(name, p))
    for _ in range(2):
        run(plain)
        run(module)
    assert sorted(seen) == sorted(2 * [name for name, _ in module.named_parameters()])
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, q.grad.float(), rtol=2e-2, atol=1e-2 * q.grad.abs().max().item())


# -- .grad -------------------------------------------------------------------------------------------------------------

D, V = 16, 600


class Tied(nn.Module):
    """An embedding whose weight the LM head and its loss shares, a layer, an MLP that is called twice, and experts."""

    def __init__(self):
        super().__init__()
        self.token, self.layer, self.mlp = nn.Embedding(V, D), NN.LlamaDecoderLayer(D, 2, 1, 24), NN.MLP(D, 32)
        self.experts, self.stack = NN.Experts(3, D, 24), NN.LinearStack([D, 80, D])
        self.loss = NN.LinearCrossEntropyLoss(D, V, linear_weight=self.token.weight)

    def forward(self, ids):
        x = self.mlp(self.mlp(self.layer(self.token(ids))))
        index = torch.arange(x.shape[0] * x.shape[1]).view(*x.shape[:-1], 1) % 3
        return self.loss(self.stack(x + self.experts(x, index, torch.ones(*x.shape[:-1], 1))), ids)


IDS = torch.randint(V, (3, 2, 40), generator=torch.Generator().manual_seed(1))


def pair(dtype=torch.float64) -> list[Tied]:
    """Of one model: as autograd has it, and with gradients that are added in place."""
    torch.manual_seed(0)
    plain = Tied().to(dtype)
    ours = copy.deepcopy(plain)
    ckptkern.accumulate_in_place(ours)
    return [plain, ours]


def train(model):
    for ids in IDS:
        model(ids).backward()


@pytest.mark.parametrize(
    ("workspace", "dtype", "seen"),
    [
        (1, torch.float64, False),
        (None, torch.float64, False),
        (None, torch.float64, True),
        (1, BF16, False),
    ],
)
def test_micro_batches_have_the_sums_of_autograd(workspace, dtype, seen):
    """seen: by a profiler. 16-bit gradients stay autograd's: they would be rounded once for each chunk."""
    plain, ours = pair(dtype)
    with ckptkern.workspace(workspace):
        train(plain)
        ours(IDS[0]).backward()
        places = {name: p.grad.data_ptr() for name, p in ours.named_parameters()}
        with memory_timeline(torch.device("cpu")) if seen else contextlib.nullcontext():
            for batch in IDS[1:]:
                ours(batch).backward()
    (assert_same if dtype == BF16 else assert_same_within_rounding)(grads(ours), grads(plain))
    assert places == {name: p.grad.data_ptr() for name, p in ours.named_parameters()}


def test_no_second_gradient_is_made():
    """The profiler that measures would take the ops' other path, in which the gradient is a result."""
    x, t = torch.randn(8, D, requires_grad=True), torch.arange(8)
    head = NN.LinearCrossEntropyLoss(D, 2**14, workspace="64KiB")

    def peak():
        head.linear.weight.grad, x.grad = torch.zeros_like(head.linear.weight), None
        loss = head(x, t)
        with peak_memory("cpu") as peaks, bodies_seen():
            loss.backward()
        return peaks.bytes

    before = peak()
    ckptkern.accumulate_in_place(head)
    assert before - peak() > 0.9 * head.linear.weight.nbytes
    ckptkern.accumulate_in_place(head, enabled=False)
    assert not hasattr(head.linear.weight, "main_grad")
    # What earlier steps left to the garbage collector may be freed meanwhile: some bytes less.
    assert abs(peak() - before) < 0.1 * head.linear.weight.nbytes


def retained(model):
    loss = model(IDS[0])
    for _ in range(3):
        loss.backward(retain_graph=True)


def compiled(model):
    torch._dynamo.reset()
    torch.compile(model.mlp, backend="aot_eager")(torch.ones(4, D, dtype=torch.float64)).sum().backward()


# What runs after three steps.
THEN = {
    "zero_grad": lambda model: [model.zero_grad(), train(model)],
    "gradients of some": lambda model: model(IDS[0]).backward(inputs=[model.token.weight, model.mlp.fc1.weight]),
    "create_graph": lambda model: model(IDS[0]).backward(create_graph=True),
    "a retained graph": retained,
    "a compiled layer": compiled,
}


@pytest.mark.parametrize("then", THEN.values(), ids=THEN)
def test_what_else_adds_to_gradients(then):
    models = pair()
    for m in models:
        train(m)
        then(m)
    plain, ours = models
    assert_same_within_rounding(grads(ours), grads(plain))
    asked = [dict(enumerate(torch.autograd.grad(m(IDS[0]), list(m.parameters())))) for m in models]
    assert_same_within_rounding(*reversed(asked))
    assert_same_within_rounding(grads(ours), grads(plain))


def test_hooks_get_what_they_would():
    seen: list[dict] = [{}, {}]

    def note(own, name, grad):
        own[name, len(own)] = grad.clone()

    for model, own in zip(pair(), seen, strict=True):
        for name, p in model.named_parameters():
            if name in ("token.weight", "mlp.fc1.weight"):
                p.register_hook(functools.partial(note, own, name))
            p.register_post_accumulate_grad_hook(lambda p, own=own, name=name: note(own, f"after {name}", p.grad))
        train(model)
    assert len(seen[0]) > 30
    assert_same_within_rounding(seen[1], seen[0])
