"""Weights' gradients summed over micro-batches in Megatron-LM's float32 main_grad."""

import contextlib
import copy
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern.ops.registration.gradients import WeightGrad

WIDTH, HEADS, S = 32, 4, 300
MICROS = 3
MODULES = {
    "linear_act": lambda: ckptkern.nn.Linear(WIDTH, 48, activation="gelu"),
    "linear": lambda: ckptkern.nn.Linear(WIDTH, 48),
    "linear_stack": lambda: ckptkern.nn.LinearStack([WIDTH, 48, WIDTH]),
    "mlp": lambda: ckptkern.nn.MLP(WIDTH, 48),
    "mlp, in chunks": lambda: ckptkern.nn.MLP(WIDTH, 48, workspace=1),
    "gated_mlp": lambda: ckptkern.nn.GatedMLP(WIDTH, 48),
    "encoder layer": lambda: ckptkern.nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True),
    "llama layer": lambda: ckptkern.nn.LlamaDecoderLayer(WIDTH, HEADS, num_kv_heads=2),
}


def with_main_grads(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape), False
    return module


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().bfloat16()


def micro_batches():
    return torch.randn(MICROS, 2, S, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


def run(module: nn.Module, x: torch.Tensor) -> None:
    module(x).float().square().mean().backward()


def exact_sums(module: nn.Module, monkeypatch) -> dict[str, torch.Tensor]:
    """Of the matmuls that the weights' gradients are, before any rounding, by name."""
    names = {id(p): name for name, p in module.named_parameters()}
    sums: dict[str, torch.Tensor] = {}
    add = WeightGrad.add

    def recorded(self, a, b):
        name = names[id(self.weight)]
        sums[name] = sums.get(name, 0.0) + a.double().t() @ b.double()
        add(self, a, b)

    def summed(a, b, weight):
        """As `weight_grad`, which takes no object where one matmul is the sum."""
        grad = WeightGrad(weight, 1)
        grad.add(a, b)
        return grad.result()

    with monkeypatch.context() as patch:
        patch.setattr(WeightGrad, "add", recorded)
        patch.setattr(sys.modules["ckptkern.ops.mlp.branch"], "weight_grad", summed)
        for x in micro_batches():
            run(module, x)
    return sums


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("name", MODULES)
def test_sums_are_not_rounded(name, monkeypatch):
    unfused, module = make(name), with_main_grads(make(name))
    exact = exact_sums(unfused, monkeypatch)
    assert exact.keys() == weights_of(module).keys()
    for x in micro_batches():
        run(module, x)
    for path, weight in weights_of(module).items():
        assert weight.grad is None
        assert weight.grad_added_to_main_grad
        scale = exact[path].abs().max()
        assert (weight.main_grad - exact[path]).abs().max() < 2e-6 * scale, path
        rounded = weights_of(unfused)[path].grad
        assert (rounded - exact[path]).abs().max() > 1e-3 * scale, (
            "the sum in bfloat16 does not show what this test is for"
        )
    for path, p in module.named_parameters():
        if p.dim() < 2:
            torch.testing.assert_close(p.grad, unfused.get_parameter(path).grad, rtol=0, atol=0)
            assert not p.main_grad.any()
            assert not p.grad_added_to_main_grad


def test_frozen_weights_are_left_alone():
    module = with_main_grads(make("mlp"))
    module.fc1.weight.requires_grad_(False)
    run(module, micro_batches()[0])
    assert not module.fc1.weight.main_grad.any()
    assert not module.fc1.weight.grad_added_to_main_grad
    assert module.fc2.weight.main_grad.any()


@pytest.mark.parametrize("how", ["segment", "torch's checkpoint", "offload"])
@pytest.mark.parametrize("name", ["mlp", "llama layer"])
def test_under_hooks_on_saved_tensors(name, how):
    module, alone = with_main_grads(make(name)), with_main_grads(make(name))
    x = micro_batches()[0]
    if how == "offload":
        with ckptkern.storage.offload(min_bytes=0):
            y = module(x)
    else:
        checkpoint = ckptkern.checkpoint if how == "segment" else torch.utils.checkpoint.checkpoint
        y = checkpoint(module, x, use_reentrant=False)
    y.float().square().mean().backward()
    run(alone, x)
    for path, weight in weights_of(module).items():
        torch.testing.assert_close(weight.main_grad, alone.get_parameter(path).main_grad)
        assert weight.grad is None


@pytest.mark.parametrize("name", ["mlp", "linear_stack", "llama layer"])
def test_what_observes_an_op_loses_no_gradient(name):
    """A FLOP counter sees the library op, whose result is rounded, and then added."""
    module, alone = with_main_grads(make(name)), with_main_grads(make(name))
    x = micro_batches()[0]
    run(module, x)
    with FlopCounterMode(display=False):
        run(module, x)
    for _ in range(2):
        run(alone, x)
    for path, weight in weights_of(module).items():
        expected = alone.get_parameter(path).main_grad
        assert weight.grad is None
        assert (weight.main_grad - expected).abs().max() < 2e-2 * expected.abs().max()
        assert weight.main_grad.any()


def cross_attention(*weights: nn.Parameter, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    qkv = weights[:-1] if len(weights) > 2 else weights[0]
    return ckptkern.attention_block(x, qkv, None, weights[-1], None, HEADS, 2, key_value=memory)


@pytest.mark.parametrize("how", ["alone", "FLOP counter", "segment", "autocast"])
def test_rows_of_a_packed_weight_that_read_two_inputs(how):
    """A packed qkv_weight with key_value: its main_grad has what those of three weights have, and `.grad` nothing."""
    torch.manual_seed(0)
    rows, dtype = [WIDTH, WIDTH // 2, WIDTH // 2], torch.float32 if how == "autocast" else torch.bfloat16
    packed, out = (nn.Parameter(0.2 * torch.randn(n, WIDTH, dtype=dtype)) for n in (sum(rows), WIDTH))
    three = [nn.Parameter(one.clone()) for one in packed.detach().split(rows)]
    for p in (packed, out, *three):
        p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape), False
    checkpoint = (
        ckptkern.checkpoint if how == "segment" else lambda function, *args, **kwargs: function(*args, **kwargs)
    )
    for x in micro_batches():
        for weights in ((packed, out), (*three, out)):
            observer = FlopCounterMode(display=False) if how == "FLOP counter" else contextlib.nullcontext()
            with observer, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                y = checkpoint(cross_attention, *weights, x=x.to(dtype), memory=x.flip(0).to(dtype)[:, :50])
                y.float().square().sum().backward()
    assert packed.grad is None
    assert packed.grad_added_to_main_grad
    expected = torch.cat([one.main_grad for one in three])
    assert expected.any()
    assert (packed.main_grad - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("how", ["second order", "compiled", "torch.func"])
def test_where_gradients_are_values_they_are_returned(how):
    """The gradient is `.grad`, or the function's result, and main_grad stays as it is."""
    module, unfused = with_main_grads(make("mlp")), make("mlp")
    x = micro_batches()[0]
    run(unfused, x)
    if how == "second order":
        module(x).float().square().mean().backward(create_graph=True)
        grads = [p.grad.detach() for p in module.parameters()]
    elif how == "compiled":
        run(torch.compile(module, backend="aot_eager", fullgraph=True), x)
        grads = [p.grad for p in module.parameters()]
    else:
        parameters = dict(module.named_parameters())
        loss = torch.func.grad(lambda p: torch.func.functional_call(module, p, (x,)).float().square().mean())
        grads = list(loss(parameters).values())
    for p, grad, theirs in zip(module.parameters(), grads, unfused.parameters(), strict=True):
        torch.testing.assert_close(grad, theirs.grad, rtol=2e-2, atol=1e-4)
        assert not p.main_grad.any()
        assert not p.grad_added_to_main_grad


def test_another_main_grad_is_refused():
    module = with_main_grads(make("mlp"))
    for wrong in (torch.zeros(48, WIDTH, dtype=torch.bfloat16), torch.zeros(WIDTH, 48)):
        module.fc1.weight.main_grad = wrong
        with pytest.raises(TypeError, match="main_grad must be float32 and of its parameter's shape"):
            run(module, micro_batches()[0])


def test_float32_weights_under_autocast():
    """Matmuls of bfloat16 operands are summed without rounding there, too."""
    torch.manual_seed(0)
    module = with_main_grads(ckptkern.nn.MLP(WIDTH, 48))
    low = with_main_grads(copy.deepcopy(module).bfloat16())
    for p, q in zip(module.parameters(), low.parameters(), strict=True):
        p.data.copy_(q)
    for x in micro_batches():
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x.float())
        y.float().square().mean().backward()
        run(low, x)
    for p, q in zip(weights_of(module).values(), weights_of(low).values(), strict=True):
        torch.testing.assert_close(p.main_grad, q.main_grad)
        assert p.main_grad.any()


def test_megatrons_hook_finds_all_gradients():
    """It hangs on the node that accumulates a parameter's gradient, which also runs without a gradient, and adds `.grad` unless
    an op has added to main_grad: here, those of biases and norms."""
    unfused, module = make("encoder layer"), with_main_grads(make("encoder layer"))
    seen = []

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
    for x in micro_batches():
        run(unfused, x)
        run(module, x)
    assert sorted(seen) == sorted(MICROS * [name for name, _ in module.named_parameters()])
    for (_, p), q in zip(module.named_parameters(), unfused.parameters(), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, q.grad.float(), rtol=2e-2, atol=1e-2 * q.grad.abs().max().item())
