"""Tensor parallelism on gloo processes against one process, in float64 unless it says otherwise."""

import copy
import functools
import importlib.util
import itertools

import pytest
import torch
from support.architectures import Llama, Stack, ids, with_tables
from support.interpreter import quicken
from support.masks import keep_mask
from support.ranks import on_ranks
from support.strategies import (
    BLOCKS,
    HEADS,
    HIDDEN,
    WIDTH,
    B,
    P,
    S,
    block,
    check_gradients,
    check_step,
    converted,
    llama,
    mine,
    split,
    step,
)
from support.timeline import Timeline
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptkern
from ckptkern import state
from ckptkern.memory import saved_tensors
from ckptkern.ops import sharded


@pytest.mark.parametrize("strategy", ["heads", "rows"])
@on_ranks(mesh="tp")
def test_packed_sequences_and_masks(mesh, strategy):
    """Packed sequences, and masks of which one is trained and has a part for each head."""
    unfused = block("llama with all", "selective")
    ours = split(unfused, mesh, strategy)
    padding = torch.arange(S) >= torch.tensor([S, 5, 3])[:, None]
    starts, bias = torch.tensor([0, 5, 16], dtype=torch.int32), torch.randn(1, HEADS, S, S, dtype=torch.float64)
    masks = [bias.clone().requires_grad_() for _ in range(2)]
    for lead, arguments in (
        ((16,), [{"cu_seqlens": starts}] * 2),
        (
            (B, S),
            [{"key_padding_mask": padding, "attn_mask": mask} for mask in masks],
        ),
    ):
        calls = [functools.partial(model, **kwargs) for model, kwargs in zip((unfused, ours), arguments, strict=True)]
        inputs = torch.randn(2, *lead, WIDTH, dtype=torch.float64)
        check_step(unfused, ours, mesh, strategy, f"{lead}", inputs=inputs, calls=calls)
    torch.testing.assert_close(masks[1].grad, masks[0].grad)


@on_ranks(mesh="tp")
def test_a_sublayer_communicates_once_forward_and_once_backward(mesh):
    """In backward also for the norms' weights; with rows it gathers dy, and x again."""
    counts = []
    for strategy in ("heads", "rows"):
        ours, x = (
            split(llama(), mesh, strategy),
            mine(torch.randn(B, S, WIDTH), mesh, strategy).clone().requires_grad_(),
        )
        with CommDebugMode() as forward:
            y = ours(x)
        with CommDebugMode() as backward:
            y.sum().backward()
        for mode in (forward, backward):
            counts.append({op.__name__.partition(".")[0]: n for op, n in mode.get_comm_counts().items() if n})
    assert counts == [
        {"all_reduce": 2},
        {"all_reduce": 2 + 1},
        {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2},
        {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2, "all_reduce": 1},
    ]


@on_ranks(mesh="tp")
def test_an_output_may_change_in_place(mesh):
    """It is what the collective wrote where no bias, dropout or x is added, and not a view of it."""
    unfused = ckptkern.nn.MLP(WIDTH, HIDDEN, bias=False, dtype=torch.float64)
    ours = split(unfused, mesh, "rows")
    calls = [lambda x, model=model: model(x).mul_(2) for model in (unfused, ours)]
    for lead in ((B, S), (S,)):
        inputs = torch.randn(2, *lead, WIDTH, dtype=torch.float64)
        check_step(unfused, ours, mesh, "rows", f"{lead}", inputs=inputs, calls=calls)


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
@on_ranks(mesh="tp")
def test_the_kernels_draw_parts_of_the_unsharded_masks(mesh):
    """In Triton's interpreter, float32."""
    quicken()
    with ckptkern.backend("triton"):
        for name, strategy in (("llama with all", "rows"), ("mlp", "heads"), ("gated mlp", "heads")):
            unfused = BLOCKS[name]()
            for parameter in unfused.parameters():
                nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
            x, weight = torch.randn(2, 2, 16, WIDTH, generator=torch.Generator().manual_seed(1))
            ours, close = split(unfused, mesh, strategy), {"tolerance": 1e-5, "atol": 1e-4, "rtol": 1e-4}
            check_step(unfused, ours, mesh, strategy, name, inputs=(x, weight), **close)
        narrow = split(ckptkern.nn.MLP(WIDTH, 96, dropout=P), mesh, "heads")
        with pytest.raises(RuntimeError, match="dropout masks need a multiple of 32 hidden units on each rank, not 48"):
            narrow(x)


# -- converted models


def in_rows(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Gives a layer its rows, and the rest of the model all of them."""

    def moved(x, source, target):
        return DTensor.from_local(x, mesh, [source]).redistribute(placements=[target]).to_local()

    def after(module, args, y):
        x = moved(y[0] if isinstance(y, tuple) else y, Shard(1), Replicate())
        return (x, *y[1:]) if isinstance(y, tuple) else x

    layer.register_forward_pre_hook(lambda module, args: (moved(args[0], Replicate(), Shard(1)), *args[1:]))
    layer.register_forward_hook(after)


def grouped() -> nn.Module:
    torch.manual_seed(0)
    model = Stack(Llama, with_tables, 5)
    assert len(ckptkern.convert(model, ids(), recompute="full", every=2).groups) == 2
    return model.double()


# Packed and transposed weights, masks of all heads, norms after the branch, parallel sublayers, sinks, output gates
SHORT = {
    "rows": ["gpt", "phi3", "parallel, one norm", "windows", "gated columns"],
    "heads": ["gemma", "relative bias", "adaptive", "sinks", "gated heads", "decoder", "grouped"],
}
LONG = ["llama", "qwen", "bert", "vision", "adaptive by a table", "gated query", "torch decoder"]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=() if name in SHORT[strategy] else pytest.mark.long)
        for name, strategy in itertools.product([*SHORT["rows"], *SHORT["heads"], *LONG], SHORT)
        if strategy == "heads" or not ("decoder" in name or name == "grouped")
    ],
)
@on_ranks(mesh="tp")
def test_a_converted_model_on_two_ranks_trains_as_on_one(mesh, name, strategy):
    unfused = converted(name) if name != "grouped" else grouped()
    ours = split(unfused, mesh, strategy, "layers.*")
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, 0.9) for model in (unfused, ours)]
    for layer in ours.layers if strategy == "rows" else ():
        in_rows(layer, mesh)
    weight = None
    for i in range(2):
        losses = []
        for model, optimizer in zip((unfused, ours), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(i)
            with saved_tensors(model) as saved:
                y = model(ids(i))
            weight = torch.randn_like(y) if weight is None else weight
            loss = (y * weight).mean()
            loss.backward()
            losses.append(loss.item())
        hidden = 48 // mesh.size()
        assert not any(shape[-1] in (48, hidden) for shape, _, _ in saved.tensors), str(saved)
        assert losses[1] == pytest.approx(losses[0], rel=1e-9), f"losses {losses} in step {i}"
        check_gradients(unfused, ours, f"step {i}")
        for optimizer in optimizers:
            optimizer.step()


@on_ranks(mesh="tp")
def test_multihead_attention(mesh):
    """Three weights and one bias for all of them, in cross-attention. What has no sharded form, such as the weights of
    need_weights, runs on the whole parameters."""
    x, memory = torch.randn(B, S, WIDTH, dtype=torch.float64), torch.randn(B, 5, 16, dtype=torch.float64)

    def call(model, weights, memory):
        results = model(x if model.kdim == 16 else memory, memory, memory, need_weights=weights)
        return torch.cat([tensor.sin().flatten() for tensor in results if tensor is not None])

    for sizes, weights in (({"kdim": 16, "vdim": 16}, False), ({}, True), ({}, False)):
        p = 0.0 if weights else P
        unfused = ckptkern.nn.MultiheadAttention(WIDTH, HEADS, p, batch_first=True, dtype=torch.float64, **sizes)
        nn.init.normal_(unfused.in_proj_bias)
        ours = split(unfused, mesh, "heads")
        calls, inputs = (
            [functools.partial(call, model, weights) for model in (unfused, ours)],
            (memory if sizes else x, 1.0),
        )
        check_step(unfused, ours, mesh, "heads", f"{sizes}, {weights}", inputs=inputs, calls=calls)


# -- with other parts of torch


@on_ranks(mesh="tp")
def test_autocast_and_dtensor_inputs(mesh):
    unfused = block("llama with all", "selective").float()
    x, weight = torch.randn(2, B, S, WIDTH, generator=torch.Generator().manual_seed(3))
    ours = split(unfused, mesh, "heads")
    with torch.autocast("cpu", torch.bfloat16):
        (y, dx, _), (z, dz, saved) = (step(model, x, weight) for model in (unfused, ours))
    assert z.dtype == y.dtype
    for actual, other in ((z, y), (dz, dx)):
        assert (actual - other).abs().max() < 0.05 * other.abs().max()
    check_gradients(unfused, ours, "autocast", tolerance=0.05)
    assert {dtype for shape, dtype, _ in saved.tensors if len(shape) == 4} == {torch.bfloat16}
    sharded = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
    torch.manual_seed(1)
    torch.testing.assert_close(ours(sharded), step(unfused, x, weight)[0])


@on_ranks(mesh="tp")
def test_torchs_own_styles_on_the_inner_layers(mesh):
    """torch's styles put hooks on the inner layers, so that the block calls them, as one activation checkpoint."""
    torch.manual_seed(0)
    unfused = ckptkern.nn.MLP(WIDTH, HIDDEN, dtype=torch.float64)
    ours = parallelize_module(copy.deepcopy(unfused), mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    x, weight = torch.randn(2, B, S, WIDTH, dtype=torch.float64)
    saved_eager, saved = check_step(unfused, ours, mesh, "heads", "torch's styles", inputs=(x, weight))
    assert saved.bytes == saved_eager.bytes == x.nbytes
    ours.dropout = P  # drawn by a rank's own columns: both ranks have the mask of the first sublayer
    torch.manual_seed(1)
    mask = keep_mask(state.draw(x), P, B * S, HIDDEN // 2).repeat(1, 2).view(B, S, HIDDEN)
    scale = state.threshold_scale(P)[1]
    expected = unfused.fc2(torch.where(mask, nn.functional.gelu(unfused.fc1(x)) * scale, 0))
    torch.testing.assert_close(step(ours, x, weight)[0], expected)


@on_ranks(mesh="tp")
def test_calls_without_gradients_and_with_hooks(mesh):
    """Nothing is gathered for a call without gradients, in which an unsplit layer runs its original; a hook needs it."""
    unfused = converted("llama", dropout=False)
    model = split(unfused, mesh, "heads", "layers.*")
    for layer in model.layers:
        layer.forward.whole = None
    for mode in (True, False):
        with torch.no_grad():
            torch.testing.assert_close(model.train(mode)(ids()), unfused.train(mode)(ids()))
    for layer in model.layers:
        del layer.forward.whole
    for m in (model, unfused):
        m.layers[0].mlp.register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(model(ids()), unfused(ids()))


def test_states_are_compared_without_the_host():
    """Off the CPU: a tensor of the meta device has nothing that the host could read."""
    with Timeline() as timeline:
        sharded.Shard("group", 0, 2).check_alike(torch.empty(2, dtype=torch.int64, device="meta"))
    assert timeline.steps[-1].name == "_assert_async"
