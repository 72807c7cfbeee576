"""Tensor parallelism on gloo processes against one process, in float64 unless it says otherwise."""

import copy
import importlib.util
import itertools

import pytest
import torch
import torch.distributed as dist
from support.architectures import ARCHITECTURES, Llama, Stack, adapted, ids, with_tables
from support.interpreter import quicken
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
    whole,
)
from support.timeline import Timeline
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptkern
from ckptkern import state
from ckptkern.memory import saved_tensors
from ckptkern.ops import sharded
from ckptkern.parallel import TensorParallel

STRATEGIES = pytest.mark.parametrize("strategy", ["heads", "rows"])


@STRATEGIES
@on_ranks(mesh="tp")
def test_packed_sequences_and_masks(mesh, strategy):
    """Packed sequences, and masks of which one is trained and has a part for each head."""
    unfused = block("llama with all", "selective")
    ours = split(unfused, mesh, strategy)
    bias = torch.randn(1, HEADS, S, S, dtype=torch.float64)
    padding = torch.arange(S) >= torch.tensor([S, 5, 3])[:, None]
    starts = torch.tensor([0, 5, 16], dtype=torch.int32)
    for lead, arguments in (((16,), {"cu_seqlens": starts}), ((B, S), {"key_padding_mask": padding})):
        x, weight = torch.randn(2, *lead, WIDTH, dtype=torch.float64)
        results = []
        for model, rows in ((unfused, "heads"), (ours, strategy)):
            model.zero_grad()
            given = mine(x, mesh, rows).clone().requires_grad_()
            mask = bias.clone().requires_grad_()
            torch.manual_seed(1)
            y = model(given, **arguments, attn_mask=None if "cu_seqlens" in arguments else mask)
            (y * mine(weight, mesh, rows)).sum().backward()
            results.append((y, given.grad, mask.grad))
        (y, dx, dmask), found = results
        torch.testing.assert_close(found, (mine(y, mesh, strategy), mine(dx, mesh, strategy), dmask))
        check_gradients(unfused, ours, str(list(arguments)))


@on_ranks(mesh="tp")
def test_a_sublayer_communicates_once_forward_and_once_backward(mesh):
    layer, x = llama(), torch.randn(B, S, WIDTH)
    expected = {
        "heads": ({"all_reduce": 2}, {"all_reduce": 2 + 1}),  # one more for the norms' weights
        "rows": (
            {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2},
            {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2, "all_reduce": 1},  # dy, and x again
        ),
    }
    for strategy, counts in expected.items():
        ours, seen = split(layer, mesh, strategy), []
        with CommDebugMode() as forward:
            y = ours(mine(x, mesh, strategy).clone().requires_grad_())
        with CommDebugMode() as backward:
            y.sum().backward()
        for mode in (forward, backward):
            seen.append({op.__name__.partition(".")[0]: n for op, n in mode.get_comm_counts().items() if n})
        assert tuple(seen) == counts


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
        with pytest.raises(RuntimeError, match="the kernels draw masks of shards of 32 n hidden units, not of 48"):
            narrow(x)


# -- converted models


class Rows(torch.autograd.Function):
    """This rank's rows of x; backward gathers, or, `back`, the other way round."""

    @staticmethod
    def forward(ctx, x, mesh, back):
        ctx.call = mesh, back
        if not back:
            return mine(x, mesh, "rows").contiguous()
        parts = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(parts, x.contiguous(), group=mesh.get_group())
        return torch.cat(parts, -2)

    @staticmethod
    def backward(ctx, dy):
        mesh, back = ctx.call
        return Rows.forward(ctx, dy, mesh, not back), None, None


def in_rows(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Gives a layer its rows, and the rest of the model all of them."""

    def after(module, args, y):
        return (Rows.apply(y[0], mesh, True), *y[1:]) if isinstance(y, tuple) else Rows.apply(y, mesh, True)

    layer.register_forward_pre_hook(lambda module, args: (Rows.apply(args[0], mesh, False), *args[1:]))
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
    for sizes, weights in (({"kdim": 16, "vdim": 16}, False), ({}, True), ({}, False)):
        torch.manual_seed(0)
        options = {"batch_first": True, "dtype": torch.float64} | sizes
        unfused = ckptkern.nn.MultiheadAttention(WIDTH, HEADS, 0.0 if weights else P, **options)
        nn.init.normal_(unfused.in_proj_bias)
        x, memory = torch.randn(B, S, WIDTH, dtype=torch.float64), torch.randn(B, 5, 16, dtype=torch.float64)
        ours, results = split(unfused, mesh, "heads"), []
        for model in (unfused, ours):
            given = (memory if sizes else x).clone().requires_grad_()
            torch.manual_seed(1)
            y, seen = model(x if sizes else given, given, given, need_weights=weights)
            y.square().sum().backward()
            results.append((y, given.grad, *([seen] if weights else [])))
        torch.testing.assert_close(results[1], results[0])
        check_gradients(unfused, ours, f"{sizes}, need_weights={weights}")


# -- with other parts of torch


@on_ranks(4)
def test_fsdp2_over_tensor_parallel_blocks(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unfused = nn.Sequential(*(block("llama with all", "selective", seed) for seed in (0, 1)))
    ours = split(unfused, mesh["tp"], "heads", "*")
    for layer in ours:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(ours, mesh=mesh["dp"])
    torch.manual_seed(2)
    samples, replica = torch.randn(2, B, S, WIDTH, dtype=torch.float64), mesh["dp"].get_local_rank()
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2, foreach=False) for model in (unfused, ours)]
    for i in range(2):
        for model, optimizer, which in zip((unfused, ours), optimizers, ((0, 1), (replica,)), strict=True):
            optimizer.zero_grad()
            for j in which:
                torch.manual_seed(10 * i + j)  # the ranks of a tensor-parallel group alike, replicas differently
                (model(samples[j]).square().mean() / len(which)).backward()
        check_gradients(unfused, ours, f"step {i}", tolerance=1e-9)
        norms = [whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) for model in (unfused, ours)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()


@on_ranks(mesh="tp")
def test_autocast_and_dtensor_inputs(mesh):
    unfused = block("llama with all", "selective").float()
    x, weight = torch.randn(2, B, S, WIDTH, generator=torch.Generator().manual_seed(3))
    ours = split(unfused, mesh, "heads")
    with torch.autocast("cpu", torch.bfloat16):
        (y, dx, _), (z, dz, saved) = (step(model, x, weight) for model in (unfused, ours))
    assert z.dtype == y.dtype
    for one, other in ((z, y), (dz, dx)):
        assert (one - other).abs().max() < 0.05 * other.abs().max()
    check_gradients(unfused, ours, "autocast", tolerance=0.05)
    assert {dtype for shape, dtype, _ in saved.tensors if len(shape) == 4} == {torch.bfloat16}
    given = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
    torch.manual_seed(1)
    torch.testing.assert_close(ours(given), step(unfused, x, weight)[0])


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
    mask = state.keep_mask(state.draw(x), P, B * S, HIDDEN // 2).repeat(1, 2).view(B, S, HIDDEN)
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
    for one in (model, unfused):
        one.layers[0].mlp.register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(model(ids()), unfused(ids()))


def refused(module: nn.Module, mesh: DeviceMesh, error: type, match: str, names: str | None = None, **options) -> None:
    style = TensorParallel(**options)
    with pytest.raises(error, match=match):
        parallelize_module(module, mesh, {names: style} if names else style)


@on_ranks(mesh="tp")
def test_what_cannot_be_split_in_rows_or_heads(mesh):
    sandwich = ARCHITECTURES["sandwich"].model()
    decoder = ckptkern.nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, P, batch_first=True)
    assert ckptkern.convert(sandwich, ids()).converted
    refused(sandwich, mesh, ValueError, "norm over all heads at once", "layers.*")
    for model, names in ((converted("decoder"), "layers.*"), (nn.Sequential(decoder), "*")):
        match = "has cross-attention, which sequence_parallel does not support"
        refused(model, mesh, ValueError, match, names, sequence_parallel=True)
    attention = split(ckptkern.nn.MultiheadAttention(WIDTH, HEADS), mesh, "rows")
    x, memory = torch.randn(2, B, S, WIDTH)
    with pytest.raises(ValueError, match="sequence_parallel does not go with cross-attention"):
        attention(x, memory, memory, need_weights=False)
    rows = split(llama(), mesh, "rows")
    rows.mlp.register_forward_hook(lambda module, args, y: 2 * y)
    with pytest.raises(RuntimeError, match="calls its submodules, which sequence_parallel does not support"):
        rows(torch.randn(B, S // 2, WIDTH))


class Activated(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.fc(x))


@on_ranks(4, mesh="tp")
def test_errors_say_what_was_wanted(mesh):
    attention, mlp = ckptkern.nn.LlamaAttention, ckptkern.nn.MLP
    activated, stack = Activated(), ARCHITECTURES["llama"].model()
    lora, twice = adapted(ARCHITECTURES["llama"].model()), split(mlp(8, 32), mesh, "heads")
    for model, *inputs in ((activated, torch.randn(2, 4, 8)), (lora, ids())):
        assert ckptkern.convert(model, *inputs).converted
    divides = "which must be a multiple of the mesh's size, 4"
    for module, error, match, *names in (
        (attention(WIDTH, 6, head_dim=4), ValueError, f"num_heads=6, {divides}"),
        (attention(WIDTH, HEADS, 2), ValueError, f"num_kv_heads=2, {divides}"),
        (mlp(8, 30), ValueError, r"fc1.weight has shape \(30, 8\), whose dimension 0 must be a multiple"),
        (nn.Linear(8, 8), TypeError, "Linear is not a fused block; name blocks of ckptkern.nn"),
        (stack, TypeError, "Stack is not a fused block"),
        (activated, TypeError, "Activated is a linear_act, which has no heads or hidden units"),
        (lora, ValueError, r"Llama has low-rank updates \(LoRA\), which cannot be split", "layers.*"),
        (twice, ValueError, "this MLP is split already"),
    ):
        refused(module, mesh, error, match, *names)
    with pytest.raises(TypeError, match="sequence_parallel must be a bool, not 'yes'"):
        TensorParallel(sequence_parallel="yes")
    with pytest.raises(ValueError, match="mesh must have one dimension, such as mesh\\['tp'\\], but has 2"):
        TensorParallel()._apply(mlp(8, 32), init_device_mesh("cpu", (2, 2)))
    for change in (lambda: ckptkern.convert(twice, torch.randn(2, 8)), lambda: ckptkern.revert(twice)):
        with pytest.raises(ValueError, match="already sharded by TensorParallel: convert first"):
            change()
    model = split(mlp(8, 128, dropout=P), mesh, "heads")
    torch.manual_seed(mesh.get_local_rank())
    with pytest.raises(RuntimeError, match="must draw the same dropout masks, but their random states differ"):
        model(torch.randn(2, 8))
    torch.manual_seed(0)
    x = torch.randn(2, 8, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(NotImplementedError, match="no second-order gradients"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_states_are_compared_without_the_host():
    """Off the CPU: a tensor of the meta device has nothing that the host could read."""
    with Timeline() as timeline:
        sharded.Shard("group", 0, 2).check_alike(torch.empty(2, dtype=torch.int64, device="meta"))
    assert timeline.steps[-1].name == "_assert_async"
