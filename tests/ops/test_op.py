"""What every op is to autograd: which node, what surrounds it and changes nothing, what is refused, what is not written to."""

import functools
import itertools
import re

import pytest
import torch
from support import catalog
from support.cases import (
    Tensors,
    Watch,
    assert_same,
    assert_same_within_rounding,
    checkpointed,
    gradients,
    output_gradient,
)
from support.properties import OF_OPS, call_of, dropping
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ckptkern
from ckptkern.memory import saved_tensors

BF16 = torch.bfloat16
bf16_autocast = functools.partial(torch.autocast, "cpu", dtype=BF16)


def modes_of(name: str) -> list[int]:
    """The places of the default mode and of the one that is farthest from it."""
    return [0, -1] if OF_OPS[name].modes else [0]


EACH = [pytest.param(dropping(name, mode=i), id=f"{name}-{i}") for name in OF_OPS for i in modes_of(name)]
FIRST = [case for case in EACH if case.id.endswith("-0")]


# -- what surrounds an op and changes no bit ---------------------------------------------------------------------------


@pytest.mark.parametrize("call", FIRST)
def test_what_changes_no_bit(call):
    tensors = call.make()
    expected = gradients(call, tensors)
    with torch.inference_mode():
        call(tensors)
    assert_same(gradients(call, tensors), expected, "after inference")
    for context in (torch.autocast("cpu", enabled=False), Watch()):  # Watch sees the library op
        with context:
            actual = gradients(call, tensors)
        assert_same(actual, expected, f"inside {context}")
    with bf16_autocast():
        expected = gradients(call, tensors)
    with bf16_autocast():
        with torch.no_grad():
            call(tensors)  # casts weights, which the step that follows does not take
        actual = gradients(call, tensors)
    assert_same(actual, expected, "after no_grad")


KERNELS = "mlp", "attention_block", "latent_attention_block", "varlen_attn", "moe_mlp", "linear_cross_entropy"
STRIDED = [(*case.values, "eager") for case in EACH]
STRIDED += [(call_of(name), "triton") for name in KERNELS]


@pytest.mark.parametrize(("call", "backend"), STRIDED, ids=str)
def test_saved_tensors_may_come_back_with_other_strides(call, backend):
    """As a saved-tensor hook may give them back. Kernels read lse and delta as if both had one layout."""

    def strided(t):
        return t.mT.contiguous().mT if t.dim() >= 2 else torch.stack((t, t), -1)[..., 0]

    def run(t):
        with saved_tensors_hooks(lambda t: t, strided):
            return call(t)

    with ckptkern.backend(backend):
        assert_same_within_rounding(gradients(run, call.make()), gradients(call, call.make()))


# -- inside an activation checkpoint -----------------------------------------------------------------------------------

WRAPPED = {
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "ours": ckptkern.checkpoint,
}


# All but the one that has a mode and no option for it.
IN_A_CHECKPOINT = [case for case in FIRST if not case.id.startswith("linear_topk")]


def watched(function, tensors: Tensors) -> Watch:
    with Watch() as watch:
        watch.gradients = gradients(function, tensors)
    return watch


def with_wrapper(wrap, call):
    """sin saves its input, so that a recompute runs to the end of the region."""
    return checkpointed(lambda t: call(t).sin(), wrap)


@pytest.mark.parametrize("way", WRAPPED)
@pytest.mark.parametrize("call", IN_A_CHECKPOINT)
def test_inside_a_checkpoint(call, way):
    """It is what "none" is without one, and nothing is recomputed twice; under autocast, no cast of forward is missing in the
    recompute, or the other way round."""
    none, wrapped = call.with_(recompute="none") if call.entry.modes else call, with_wrapper(WRAPPED[way], call)
    for enabled in (True, False):
        with bf16_autocast(enabled=enabled):
            none(call.make())  # fills whatever cache there is
            expected, ours = watched(lambda t: none(t).sin(), call.make()), watched(wrapped, call.make())
        assert_same(ours.gradients, expected.gradients)
    with torch.no_grad(), Watch() as forward:
        none(call.make())
    assert ours.flops <= expected.flops + forward.flops
    recomputed = [mode for mode in ours.strings if mode in ("none", "selective", "full")][
        -2:
    ]  # layers: of both sublayers
    assert set(recomputed) <= {"none"}, f"backward runs in the modes {recomputed}"


@pytest.mark.parametrize("name", ["mlp", "attention_block"])
def test_selective_checkpoint_may_save_the_op(name):
    call = dropping(name).with_(recompute="none")
    forward_op = getattr(torch.ops.ckptkern, f"{call.op}_fwd").default

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is forward_op else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    wrapped = with_wrapper(functools.partial(WRAPPED["not reentrant"], context_fn=contexts), call)
    ours, direct = watched(wrapped, call.make()), watched(lambda t: call(t).sin(), call.make())
    assert_same(ours.gradients, direct.gradients)
    assert ours.flops == direct.flops


# -- memory that is not the op's ---------------------------------------------------------------------------------------


def changed(t: torch.Tensor) -> None:
    """Other numbers that are in range, in place."""
    with torch.no_grad():
        t.logical_not_() if t.dtype is torch.bool else t.add_(1) if t.is_floating_point() else t.zero_()


@pytest.mark.parametrize("call", EACH)
def test_what_changes_before_backward_is_harmless_or_an_error(call):
    """Inputs, parameters, masks, targets, and the output."""
    expected, caught = gradients(call, call.make()), []
    for i in range(len(call.make()) + len(call.others) + 1):
        tensors, copy = call.make(), call.with_(**tree_map_only(torch.Tensor, torch.clone, call.arguments))
        y = copy(tensors)
        dy = output_gradient(y)
        changed([*tensors.values(), *copy.others, y][i])
        try:
            y.backward(dy)
        except RuntimeError as error:
            caught.append(str(error))
            continue
        assert_same({key: t.grad for key, t in tensors.items()}, {key: expected[key] for key in tensors})
    assert caught or call.op == "dropout"
    assert all(re.search("modified .*inplace", message) for message in caught), caught


class Made(Watch):
    """bytes: what forward ops return."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "ckptkern" and func._schema.name.endswith("_fwd"):
            self.bytes += sum(t.nbytes for t in out)
        return out


@pytest.mark.parametrize("name", [name for name in OF_OPS if OF_OPS[name].modes])
def test_inference_saves_nothing(name):
    """Without a gradient a forward op returns its results, also at "none", and two numbers for each token at most: choices of
    experts and statistics of the loss."""
    sizes = set()
    for mode, graded in itertools.product(("none", "full"), (False, True)):
        call = dropping(name, recompute=mode)
        with torch.set_grad_enabled(graded), Made() as allocated, saved_tensors() as saved:
            y = call(call.make(frozen=call.make() if graded else ()))
        assert (y.requires_grad, saved.bytes) == (False, 0)
        sizes.add(allocated.bytes)
    assert len(sizes) == 1, f'{sizes} bytes at "none" and at "full"'
    assert sizes.pop() <= y.nbytes + 8 * catalog.Sizes().tokens


@pytest.mark.parametrize("call", EACH)
def test_every_saved_tensor_is_unpacked_once(call):
    """Hooks of checkpointing and sharding fire once for each."""
    packed, unpacked = [], []

    def unpack(entry):
        unpacked.append(entry[0])
        return entry[1]

    def pack(t):
        packed.append(len(packed))
        return packed[-1], t.detach()

    with saved_tensors_hooks(pack, unpack):
        y = call(call.make())
    y.sum().backward()
    assert packed
    assert sorted(unpacked) == packed


# -- the node ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", FIRST)
def test_the_node_has_the_ops_name(call):
    """It shows in tracebacks of anomaly mode, profiles and drawings of the graph."""
    y = call(call.make())  # which holds its node
    nodes, seen = [y.grad_fn], []
    for node in nodes:
        seen.append(node.name())
        nodes += [function for function, _ in node.next_functions if function is not None]
    assert f"{call.entry.op.__name__}FunctionBackward" in seen
