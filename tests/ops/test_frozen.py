"""Frozen weights: every op computes with them what it computes with the dequantised weights, saves no more, and stays within
its workspace."""

import functools
import sys
import types
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern import Frozen, LoRA
from ckptkern.frozen import kinds
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.ops import catalog
from ckptkern.ops.dispatch import choices

branch = sys.modules["ckptkern.ops.mlp.branch"]  # ckptkern.ops.mlp is the function

OPS = {entry.name: entry for entry in (*catalog.OPS.values(), *catalog.OTHER_OPS)}
WITH_WEIGHTS = tuple(
    name
    for name, entry in OPS.items()
    if any("weight" in one for one in catalog.input_shapes(entry.inputs(catalog.Sizes())))
)


def block_fp8(shape, seed=0):
    """A Frozen of random numbers, and what it stands for."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), generator=generator) + 0.5
    frozen = Frozen(data, scales * shape[-1] ** -0.5, kind="block_fp8", dtype=torch.float32)
    return frozen, frozen.dequantize()


def is_matmul_weight(path, shape):
    name = path.rpartition(".")[2]
    return (
        len(shape) > 1
        and ("weight" in name or path.startswith("weights."))
        and "top_k" not in name
        and "router" not in name
    )


def frozen_leaves(arguments):
    """(leaves with Frozen weights, leaves with what these stand for)."""
    leaves = catalog.random_leaves(arguments)
    found = {name: block_fp8(t.shape) for name, t in leaves.items() if is_matmul_weight(name, t.shape)}
    assert found
    return tuple(leaves | {name: pair[i] for name, pair in found.items()} for i in (0, 1))


def step(entry, arguments, leaves, **options):
    """(first result, gradients of what is trained, bytes that are saved besides the leaves)."""
    leaves = {name: t if not t.requires_grad else t.detach().requires_grad_() for name, t in leaves.items()}
    torch.manual_seed(0)
    with saved_tensors(exclude=leaves.values()) as saved:
        y = catalog.call(entry, arguments, leaves, **options)
    y = y[0] if isinstance(y, tuple) else y
    trained = {name: t for name, t in leaves.items() if t.requires_grad}
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return y, dict(zip(trained, torch.autograd.grad(y, list(trained.values()), dy), strict=True)), saved.bytes


@pytest.mark.parametrize("workspace", [None, 1])
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_an_op_computes_with_frozen_weights_what_it_computes_with_the_dequantised(name, workspace):
    entry = OPS[name]
    options = {"workspace": workspace} if "workspace" in entry.parameters else {}
    arguments = entry.inputs(catalog.Sizes())
    for mode in entry.modes or (None,):
        options |= {} if mode is None else {"recompute": mode}
        frozen, plain = frozen_leaves(arguments)
        (y, grads, saved), (y_, grads_, saved_) = (
            step(entry, arguments, leaves, **options) for leaves in (frozen, plain)
        )
        torch.testing.assert_close(y, y_)
        assert saved == saved_
        assert grads.keys() == grads_.keys()
        for one in grads:
            torch.testing.assert_close(grads[one], grads_[one], msg=f"{mode} {one}")


# -- memory ------------------------------------------------------------------------------------------------------------

D, HIDDEN, HEADS, TOKENS = 128, 352, 4, 1024  # weights take as much as chunks do


def weight(*shape):
    return block_fp8(shape)[0].to(torch.bfloat16)


def lora(n, k):
    return LoRA(*(torch.randn(shape).bfloat16().requires_grad_() for shape in ((4, k), (n, 4))), 0.5)


def attention_arguments():
    return dict(
        qkv_weight=(weight(D, D), weight(D, D), weight(D, D)), qkv_bias=None, out_weight=weight(D, D), out_bias=None,
        num_heads=HEADS, is_causal=True, norm="rms", lora={"q": lora(D, D), "out": lora(D, D)},
    )  # fmt: skip


def mlp_arguments(adapts=True):
    return dict(
        up_weight=weight(HIDDEN, D), up_bias=None, down_weight=weight(D, HIDDEN), down_bias=None,
        gate_weight=weight(HIDDEN, D), activation="silu", norm="rms",
        lora={"up": lora(HIDDEN, D), "down": lora(D, HIDDEN)} if adapts else None,
    )  # fmt: skip


def routing():
    index = torch.stack([torch.randperm(4)[:2] for _ in range(TOKENS)]).view(2, -1, 2)
    return dict(top_k_index=index, top_k_weights=torch.ones(index.shape).bfloat16())


TARGET = torch.arange(TOKENS).view(2, -1) % 600
BOUNDED = {
    "mlp_block": lambda: (ckptkern.mlp_block, mlp_arguments(adapts=False)),
    "mlp_block, LoRA": lambda: (ckptkern.mlp_block, mlp_arguments()),
    "attention_block": lambda: (ckptkern.attention_block, attention_arguments() | {"residual": True}),
    "transformer_layer": lambda: (
        ckptkern.transformer_layer,
        dict(attention_arguments=attention_arguments(), mlp_arguments=mlp_arguments()),
    ),
    "linear_stack": lambda: (
        ckptkern.linear_stack, dict(weights=[weight(HIDDEN, D), weight(D, HIDDEN)], activation="gelu"),
    ),
    "moe_mlp": lambda: (
        ckptkern.moe_mlp, routing() | dict(gate_up_weight=weight(4, 256, D), down_weight=weight(4, D, 128)),
    ),
    "linear_cross_entropy": lambda: (
        ckptkern.linear_cross_entropy, dict(linear_weight=weight(600, D), target=TARGET, reduction="none"),
    ),
}  # fmt: skip


def transient(op, arguments, workspace):
    """How far forward rises above what it saves and gives, and backward above the gradient of x."""
    torch.manual_seed(0)
    x = torch.randn(2, TOKENS // 2, D).bfloat16().requires_grad_()
    with peak_memory("cpu") as forward, saved_tensors([x]) as saved:
        y = op(x, **arguments, recompute="full", workspace=workspace)
    dy = torch.ones_like(y)
    with peak_memory("cpu") as backward:
        torch.autograd.grad(y, x, dy)
    return forward.bytes - saved.bytes - y.nbytes, backward.bytes - x.nbytes


@pytest.mark.parametrize("name", BOUNDED)
def test_dequantised_weights_count_against_the_workspace(name, monkeypatch):
    """From a little more than the least on, where one weight after the other is dequantised, to where all are held."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    op, arguments = BOUNDED[name]()
    least, whole = (max(transient(op, arguments, workspace)) for workspace in (1, 2**40))
    assert least < 0.75 * whole
    for times in (1.2, 2, 3, 5):
        found = transient(op, arguments, int(times * least))
        assert max(found) <= times * least, f"{found} in {times} times {least}"


def dequantised(monkeypatch, run):
    """How often a whole weight is dequantised in run()."""
    before, calls = kinds.KINDS["block_fp8"], []
    counted = before._replace(dequantized=lambda *given: calls.append(1) or before.dequantized(*given))
    with monkeypatch.context() as patch:
        patch.setitem(kinds.KINDS, "block_fp8", counted)
        result = run()
    return len(calls), result


@pytest.mark.parametrize(("workspace", "holds"), [("1GiB", True), (1, False)])
def test_a_weight_is_dequantised_once_in_each_pass_if_it_is_held(workspace, holds, monkeypatch):
    """A layer dequantises the weights of its attention again, to form their gradients: the MLP's pass, which comes in between,
    has a workspace of its own."""
    x = torch.randn(2, TOKENS // 2, D).bfloat16().requires_grad_()
    cases = (ckptkern.mlp_block, mlp_arguments(), 3, 3), (*BOUNDED["attention_block"](), 4, 4)
    for op, arguments, count, again in (*cases, (*BOUNDED["transformer_layer"](), 7, 7 + 4)):
        options = arguments | dict(recompute="full", workspace=workspace)
        forward, y = dequantised(monkeypatch, functools.partial(op, x, **options))
        backward, _ = dequantised(monkeypatch, y.sum().backward)
        assert ((forward, backward) == (count, again)) == holds
        assert forward >= count
        assert backward >= again


# -- how ops are called ------------------------------------------------------------------------------------------------


def block(x, a, b, *weights, **options):
    gate, up, down = weights
    return ckptkern.mlp_block(
        x, up, None, down, None, gate_weight=gate, activation="silu", norm="rms", dropout_p=0.25,
        lora={"up": LoRA(a, b, 0.5)}, **options,
    )  # fmt: skip


def given():
    """(x and a trained update, Frozen weights, what these stand for)."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 7, 24), (4, 24), (40, 4)
    trained = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    pairs = [block_fp8(shape, seed) for seed, shape in enumerate(((40, 24), (40, 24), (24, 40)))]
    return trained, *zip(*pairs, strict=True)


def gradients(run, trained, weights, order=1):
    torch.manual_seed(0)
    y = run(*trained, *weights)
    grads = torch.autograd.grad(y.square().sum(), trained, create_graph=order == 2)
    if order == 1:
        return [y, *grads]
    return [*grads, *torch.autograd.grad(grads[0].square().sum(), trained)]


def of_transform(run, trained, weights):
    def loss(*trained):
        return run(*trained, *weights).square().sum()

    torch.manual_seed(0)
    return torch.func.grad(loss, argnums=(0, 1, 2))(*trained)


CALLS = {
    "a library op, seen by a mode": lambda run, *given: counted(run, *given)[1],
    "torch's checkpoint": lambda run, *given: gradients(
        functools.partial(checkpoint, run, use_reentrant=False), *given
    ),
    "our checkpoint": lambda run, *given: gradients(functools.partial(ckptkern.checkpoint, run), *given),
    "second order": functools.partial(gradients, order=2),
    "torch.func": of_transform,
    "torch.compile": lambda run, *given: gradients(torch.compile(run, backend="aot_eager", fullgraph=True), *given),
}


def counted(run, trained, weights):
    """(FLOPs of a step, its gradients)."""
    with FlopCounterMode(display=False) as counter:
        found = gradients(run, trained, weights)
    return counter.get_total_flops(), found


@pytest.mark.parametrize("name", CALLS)
def test_frozen_weights_however_an_op_is_called(name):
    trained, frozen, plain = given()
    with mock.patch.object(choices, "compose", side_effect=AssertionError("in PyTorch ops")):
        found = CALLS[name](block, trained, frozen)
    torch.testing.assert_close(found, CALLS[name](block, trained, plain))


def test_no_matmul_forms_a_gradient_of_a_frozen_weight():
    trained, frozen, plain = given()
    assert counted(block, trained, frozen)[0] == counted(block, trained, plain)[0]
    more = counted(block, trained, [one.requires_grad_() for one in plain])[0]  # autograd.grad does not ask for them
    assert counted(block, trained, frozen)[0] == more
    y = block(*trained, *frozen)
    y.sum().backward()
    assert all(one.grad is None for one in frozen)


@pytest.mark.parametrize("name", ["second order", "torch.func"])
def test_transforms_form_no_gradient_of_a_frozen_weight(name):
    """Of a dense weight they do: torch.func asks for the gradients of all inputs."""
    trained, frozen, plain = given()
    flops = []
    for weights in (frozen, plain):
        with FlopCounterMode(display=False) as counter:
            CALLS[name](block, trained, weights)
        flops.append(counter.get_total_flops())
    assert flops[0] < flops[1]


def test_kernels_get_what_is_dequantised():
    """Triton reads addresses, which a Frozen refuses to give."""
    trained, frozen, _plain = given()
    with ckptkern.backend("triton"), mock.patch.object(choices, "_constant_device_reason", return_value=None):
        seen = []
        kernels = types.SimpleNamespace(**vars(ckptkern.eager))
        for launcher in ("linear", "mm", "gated_fwd", "gated_bwd", "act_fwd", "act_bwd"):
            function = getattr(ckptkern.eager, launcher)
            setattr(kernels, launcher, lambda *a, f=function, **k: seen.extend(map(type, a)) or f(*a, **k))
        for workspace in (1, "1GiB"):
            with mock.patch.object(branch, "primitives", return_value=kernels):
                ckptkern.gated_mlp(trained[0], *frozen, workspace=workspace).sum().backward()
    assert seen
    assert Frozen not in seen


def test_a_dtype_that_is_not_xs_is_refused():
    trained, frozen, _ = given()
    with pytest.raises(ckptkern.errors.DtypeError, match=r"input is torch\.bfloat16 but a parameter is torch\.float32"):
        ckptkern.gated_mlp(trained[0].bfloat16(), *frozen)
    y = ckptkern.gated_mlp(trained[0].bfloat16(), *(one.to(torch.bfloat16) for one in frozen))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ckptkern.gated_mlp(trained[0], *frozen), y)
