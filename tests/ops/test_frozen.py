"""Frozen weights: every op computes with them what it computes with the dequantised weights, saves no more, and stays within
its workspace."""

from unittest import mock

import pytest
import torch
from support import catalog
from support.cases import checkpointed, gradients, seeded
from support.catalog import Sizes
from support.properties import OF_OPS, Case, call_of, outcome
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern import Frozen
from ckptkern import frozen as kinds
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.ops.dispatch import choices


def is_matmul_weight(path, shape) -> bool:
    name = path.rpartition(".")[2]
    return (
        len(shape) > 1
        and ("weight" in name or path.startswith("weights."))
        and not name.startswith(("top_k", "router"))
    )


WITH_WEIGHTS = [
    name
    for name, entry in OF_OPS.items()
    if any(is_matmul_weight(*item) for item in catalog.input_shapes(entry.inputs(Sizes())).items())
]


def block_fp8(shape, dtype=torch.float32) -> Frozen:
    data = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)) + 0.5
    return Frozen(data, scales * shape[-1] ** -0.5, kind="block_fp8", dtype=torch.float32).to(dtype)


def frozen_and_dense(call: Case, dtype=torch.float32) -> tuple[dict, dict]:
    """Tensors by name with Frozen weights, and with what these stand for."""
    torch.manual_seed(0)
    leaves = call.make(dtype)
    frozen = {name: block_fp8(t.shape, dtype) for name, t in leaves.items() if is_matmul_weight(name, t.shape)}
    assert frozen
    return leaves | frozen, leaves | {name: tensor.dequantize() for name, tensor in frozen.items()}


def step(call: Case, tensors: dict) -> tuple[dict, int]:
    """(the results and the gradients of what is trained, bytes that are saved besides tensors)."""
    with saved_tensors(exclude=tensors.values()) as saved:
        results = call.results(tensors)
    return outcome(results, tensors), saved.bytes


@pytest.mark.parametrize(("workspace", "backend"), [(None, "eager"), (1, "eager"), (1, "triton")])
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_an_op_computes_with_frozen_weights_what_it_computes_with_the_dequantised(name, workspace, backend):
    """Kernels read addresses, which a Frozen refuses to give: they get what is dequantised."""
    more = {"workspace": workspace} if "workspace" in OF_OPS[name].parameters else {}
    for mode in range(len(OF_OPS[name].modes) or 1):
        call = call_of(name, mode=mode, **more)
        with ckptkern.backend(backend if call.entry.op.kernels else "eager"):
            (ours, saved), (theirs, saved_of_dense) = (step(call, tensors) for tensors in frozen_and_dense(call))
        torch.testing.assert_close(ours, theirs)
        assert saved == saved_of_dense


# -- memory ------------------------------------------------------------------------------------------------------------

LARGE = Sizes((4, 128), 96, 352, 600, heads=24, experts=4)  # weights take as much as chunks do
BOUNDED = dict.fromkeys(("attention_block", "transformer_layer", "linear_stack", "moe_mlp", "linear_cross_entropy"), ())
BOUNDED |= {"mlp_block": ("gate_weight", "lora")}


def passes(call: Case, tensors: dict, workspace: int) -> tuple[int, int]:
    """How far forward rises above what it saves and gives, and backward above the gradient of the input."""
    call, x = call.with_(workspace=workspace), next(iter(tensors.values()))
    with peak_memory("cpu") as forward, saved_tensors([*tensors.values(), *tree_leaves(call.others)]) as saved:
        y = call(tensors)
    dy = torch.ones_like(y)
    with peak_memory("cpu") as backward:
        torch.autograd.grad(y, x, dy)
    return forward.bytes - saved.bytes - y.nbytes, backward.bytes - x.nbytes


@pytest.mark.parametrize("name", BOUNDED)
def test_dequantised_weights_count_against_the_workspace(name, monkeypatch):
    """From a little more than the least on, where one weight after the other is dequantised, to where all are held."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    call = call_of(name, *BOUNDED[name], recompute="full", sizes=LARGE)
    tensors, _ = frozen_and_dense(call, torch.bfloat16)
    least, whole = (max(passes(call, tensors, workspace)) for workspace in (1, 2**40))
    assert least < 0.75 * whole
    for times in (1.2, 2.5, 5):
        held = passes(call, tensors, int(times * least))
        assert max(held) <= times * least, f"forward and backward hold {held} bytes in {times} times {least}"


@pytest.mark.parametrize(("workspace", "holds"), [("1GiB", True), (1, False)])
@pytest.mark.parametrize(
    ("name", "weights", "again"), [("mlp_block", 3, 3), ("attention_block", 2, 2), ("transformer_layer", 4, 6)]
)
def test_a_weight_is_dequantised_once_in_each_pass_if_it_is_held(name, weights, again, workspace, holds, monkeypatch):
    """A layer dequantises the weights of its attention again, to form their gradients: the MLP's pass, which comes in between,
    has a workspace of its own."""
    call = call_of(name, *BOUNDED[name], recompute="full", sizes=LARGE, workspace=workspace)
    before, count = kinds.KINDS["block_fp8"], []
    tensors, _ = frozen_and_dense(call, torch.bfloat16)
    counted = before._replace(dequantized=lambda *args: count.append(1) or before.dequantized(*args))
    monkeypatch.setitem(kinds.KINDS, "block_fp8", counted)
    y = call(tensors)
    forward = len(count)
    y.sum().backward()
    counts = forward, len(count) - forward
    assert (counts == (weights, again)) == holds, f"forward and backward dequantise {counts} weights"
    assert counts >= (weights, again)


# -- how ops are called ------------------------------------------------------------------------------------------------

BLOCK = call_of(
    "mlp_block", "gate_weight", "lora", sizes=Sizes((3, 7), 24, 40), activation="silu", norm="rms", dropout_p=0.25
)


def trained(tensors):
    return {name: t for name, t in tensors.items() if t.requires_grad}


def second_order(function, tensors):
    leaves = [*trained(tensors).values()]
    grads = torch.autograd.grad(function(tensors).square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(grads[0].square().sum(), leaves)


def of_transform(function, tensors):
    leaves = {name: t.detach() for name, t in trained(tensors).items()}
    return torch.func.grad(lambda leaves: function(tensors | leaves).square().sum())(leaves)


def compiled(function, tensors):
    return gradients(seeded(torch.compile(BLOCK.unseeded, backend="aot_eager", fullgraph=True)), tensors)


def in_a_checkpoint(function, tensors):
    return gradients(checkpointed(function, ckptkern.checkpoint), tensors)


CALLS = {
    "alone": gradients, "a checkpoint": in_a_checkpoint, "second order": second_order, "torch.func": of_transform,
    "torch.compile": compiled,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_frozen_weights_however_an_op_is_called(name):
    """No matmul forms a gradient of them, where transforms form those of dense ones: torch.func asks for the gradients of all
    inputs."""
    with mock.patch.object(choices, "compose", side_effect=AssertionError("in PyTorch ops")):
        torch.testing.assert_close(*(CALLS[name](BLOCK, tensors) for tensors in frozen_and_dense(BLOCK)))
    if name != "torch.compile":  # which traces nothing that a mode sees
        flops = []
        for tensors in frozen_and_dense(BLOCK):
            with FlopCounterMode(display=False) as counter:
                CALLS[name](BLOCK, tensors)
            flops.append(counter.get_total_flops())
        assert flops[0] < flops[1] if name in ("second order", "torch.func") else flops[0] == flops[1]


def test_a_dtype_that_is_not_xs_is_refused():
    call = call_of("gated_mlp", gate_bias=None, up_bias=None, down_bias=None)
    tensors, _ = frozen_and_dense(call)
    low = {name: t.to(torch.bfloat16) for name, t in tensors.items()}
    with pytest.raises(ckptkern.errors.DtypeError, match=r"input is torch\.bfloat16 but a parameter is torch\.float32"):
        call(tensors | {"x": low["x"]})
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(call(tensors), call(low))
