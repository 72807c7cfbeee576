"""Blocks on a tensor-parallel group of gloo processes against one process, in float64 unless it says otherwise."""

import copy
import importlib.util
import itertools

import pytest
import torch
import torch.distributed as dist
from support.architectures import ARCHITECTURES, DropPath, Llama, Stack, adapted, ids, with_tables
from support.interpreter import quicken
from support.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern import state
from ckptkern.memory import saved_tensors
from ckptkern.ops import sharded
from ckptkern.parallel import TensorParallel

B, S, WIDTH, HEADS, HIDDEN, P = 3, 8, 32, 8, 128, 0.25
MODES = ("none", "selective", "full")
SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])


# -- blocks


def _llama(**options) -> nn.Module:
    return ckptkern.nn.LlamaDecoderLayer(WIDTH, HEADS, 4, HIDDEN, **options)


def _encoder(norm_first: bool, **options) -> nn.Module:
    return ckptkern.nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, P, batch_first=True, norm_first=norm_first, **options
    )


def torch_decoder() -> nn.Module:
    return ckptkern.nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, P, batch_first=True)


BLOCKS = {
    "mlp": lambda **o: ckptkern.nn.MLP(WIDTH, HIDDEN, dropout=P, **o),
    "relu mlp": lambda **o: ckptkern.nn.MLP(WIDTH, HIDDEN, WIDTH // 2, "relu", **o),
    "gated mlp": lambda **o: ckptkern.nn.GatedMLP(WIDTH, HIDDEN, dropout=P, bias=True, **o),
    "attention": lambda **o: ckptkern.nn.LlamaAttention(WIDTH, HEADS, 4, dropout=P, **o),
    "llama": _llama,
    "llama with all": lambda **o: _llama(
        dropout=P, resid_dropout=P, qk_norm=True, attention_bias=True, mlp_bias=True, **o
    ),
    "packed, norm before": lambda **o: _encoder(True, **o),
    "packed, norm after": lambda **o: _encoder(False, **o),
}
TAIL = {"packed, norm after"}  # what the norm behind a branch reads is saved


def block(name: str, mode: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = BLOCKS[name](recompute=mode, dtype=torch.float64)
    for parameter in made.parameters():  # biases and norms are not zeros and ones
        nn.init.normal_(parameter, std=0.3)
    return made


def split(model: nn.Module, mesh: DeviceMesh, names: str | None = None, sequence: bool = False) -> nn.Module:
    """A copy whose blocks of these names, or which itself, is split over the mesh."""
    style = TensorParallel(sequence_parallel=sequence)
    return parallelize_module(copy.deepcopy(model), mesh, {names: style} if names else style)


def mine(x: torch.Tensor, mesh: DeviceMesh, sequence: bool) -> torch.Tensor:
    """This rank's rows under sequence parallelism."""
    return x.chunk(mesh.size(), -2)[mesh.get_local_rank()] if sequence else x


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(unfused: nn.Module, ours: nn.Module, what: str, tolerance: float = 1e-10) -> None:
    largest = max(p.grad.abs().max() for p in unfused.parameters() if p.grad is not None)
    for (name, p), q in zip(unfused.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{what}: {name}"
        if p.grad is not None:
            assert isinstance(q.grad, DTensor) == isinstance(q, DTensor)
            error = (whole(q.grad) - p.grad).abs().max() / largest
            assert error < tolerance, f"{what}: {name} differs by {error:.1e}"


def step(model: nn.Module, x: torch.Tensor, weight: torch.Tensor, seed: int = 1):
    """(y, dx, what was saved) of a training step."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    with saved_tensors(model) as saved:
        y = model(x)
    (y * weight).sum().backward()
    return y.detach(), x.grad, saved


def check_step(unfused, ours, mesh, x, weight, what: str, sequence: bool = False, tolerance=1e-10, **close) -> tuple:
    """Results and gradients. Returns what both have saved."""
    y, dx, saved_eager = step(unfused, x, weight)
    z, dz, saved = step(ours, mine(x, mesh, sequence), mine(weight, mesh, sequence))
    expected = mine(y, mesh, sequence), mine(dx, mesh, sequence)
    torch.testing.assert_close((z, dz), expected, msg=lambda text: f"{what}: {text}", **close)
    check_gradients(unfused, ours, what, tolerance)
    return saved_eager, saved


def check_saved(name: str, unfused, ours, n: int, sequence: bool) -> None:
    """The inputs of both sublayers, whole or this rank's rows; a part of everything else."""
    inputs = [size for shape, _, size in unfused.tensors if shape == (B, S, WIDTH)]
    states = [size for shape, dtype, size in unfused.tensors if dtype == torch.int64]
    sublayers = 1 if "mlp" in name or name == "attention" else 2
    expected = sublayers * inputs[0] // (n if sequence else 1) + sum(states)
    expected += (unfused.bytes - sum(inputs) - sum(states)) // n
    if name in TAIL:
        rows = (ours.bytes - expected) * (n if sequence else 1)
        statistics = 4 * B * S * 8  # mean and rstd of both norms
        assert rows == 2 * inputs[0] + statistics, f"{name}: {ours}"
    else:
        assert ours.bytes == expected, f"{name}: {ours}"


@SEQUENCE
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.long)])
@on_ranks(mesh="tp")
def test_a_block_on_n_ranks_is_the_block_on_one(mesh, n, sequence):
    """Results, gradients and saved bytes in every mode. With dropout too, so each rank samples its part of the masks."""
    for name, mode in itertools.product(BLOCKS, MODES):
        unfused, what = block(name, mode), f"{name}, {mode}"
        ours = split(unfused, mesh, sequence=sequence)
        assert ours.state_dict().keys() == unfused.state_dict().keys()
        x = torch.randn(B, S, WIDTH, dtype=torch.float64)
        weight = torch.randn(B, S, WIDTH // 2 if name == "relu mlp" else WIDTH, dtype=torch.float64)
        saved = check_step(unfused, ours, mesh, x, weight, what, sequence)
        check_saved(name, *saved, n, sequence)
        unfused.eval(), ours.eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(mine(x, mesh, sequence)), mine(unfused(x), mesh, sequence), msg=what)


@on_ranks(4, mesh="tp")
def test_a_block_on_four_ranks(mesh):
    for name, mode in zip(BLOCKS, itertools.cycle(MODES), strict=False):
        unfused = block(name, mode)
        weight = torch.randn(B, S, WIDTH // 2 if name == "relu mlp" else WIDTH, dtype=torch.float64)
        x = torch.randn(B, S, WIDTH, dtype=torch.float64)
        check_step(unfused, split(unfused, mesh, sequence=True), mesh, x, weight, name, True)


@SEQUENCE
@on_ranks(mesh="tp")
def test_packed_sequences_and_masks(mesh, sequence):
    """Packed sequences, and masks of which one is trained and has a part for each head."""
    unfused = block("llama with all", "selective")
    ours = split(unfused, mesh, sequence=sequence)
    bias = torch.randn(1, HEADS, S, S, dtype=torch.float64)
    padding = torch.arange(S) >= torch.tensor([S, 5, 3])[:, None]
    starts = torch.tensor([0, 5, 16], dtype=torch.int32)
    for lead, arguments in (((16,), {"cu_seqlens": starts}), ((B, S), {"key_padding_mask": padding})):
        x, weight = torch.randn(2, *lead, WIDTH, dtype=torch.float64)
        results = []
        for model, rows in ((unfused, False), (ours, sequence)):
            model.zero_grad()
            given = mine(x, mesh, rows).clone().requires_grad_()
            mask = bias.clone().requires_grad_()
            torch.manual_seed(1)
            y = model(given, **arguments, attn_mask=None if "cu_seqlens" in arguments else mask)
            (y * mine(weight, mesh, rows)).sum().backward()
            results.append((y, given.grad, mask.grad))
        (y, dx, dmask), found = results
        torch.testing.assert_close(found, (mine(y, mesh, sequence), mine(dx, mesh, sequence), dmask))
        check_gradients(unfused, ours, str(list(arguments)))


@on_ranks(mesh="tp")
def test_a_sublayer_communicates_once_forward_and_once_backward(mesh):
    layer, x = _llama(), torch.randn(B, S, WIDTH)
    expected = {
        False: ({"all_reduce": 2}, {"all_reduce": 2 + 1}),  # one more for the norms' weights
        True: (
            {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2},
            {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2, "all_reduce": 1},  # dy, and x again
        ),
    }
    for sequence, counts in expected.items():
        ours, seen = split(layer, mesh, sequence=sequence), []
        with CommDebugMode() as forward:
            y = ours(mine(x, mesh, sequence).clone().requires_grad_())
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
        for name, sequence in (("llama with all", True), ("mlp", False), ("gated mlp", False)):
            unfused = BLOCKS[name]()
            for parameter in unfused.parameters():
                nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
            x, weight = torch.randn(2, 2, 16, WIDTH, generator=torch.Generator().manual_seed(1))
            ours = split(unfused, mesh, sequence=sequence)
            check_step(unfused, ours, mesh, x, weight, name, sequence, 1e-5, atol=1e-4, rtol=1e-4)
        narrow = split(ckptkern.nn.MLP(WIDTH, 96, dropout=P), mesh)
        with pytest.raises(RuntimeError, match="the kernels draw masks of shards of 32 n hidden units, not of 48"):
            narrow(x)


# -- converted models


class Rows(torch.autograd.Function):
    """This rank's rows of x; backward gathers, or, `back`, the other way round."""

    @staticmethod
    def forward(ctx, x, mesh, back):
        ctx.call = mesh, back
        if not back:
            return mine(x, mesh, True).contiguous()
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


def converted(name: str, dropout: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[name].model()
    for module in model.modules():
        if isinstance(module, nn.Dropout) or (name == "gpt" and hasattr(module, "p")):
            module.p = P if dropout else 0.0
        elif isinstance(module, DropPath):
            module.drop_prob = P
    assert len(ckptkern.convert(model, ids()).converted) == 2
    return model.double()


@on_ranks(mesh="tp")
def test_grouped_layers(mesh):
    torch.manual_seed(0)
    unfused = Stack(Llama, with_tables, 5).double()
    ours = copy.deepcopy(unfused)
    assert len(ckptkern.convert(ours, ids(), recompute="full", every=2).groups) == 2
    parallelize_module(ours, mesh, {"layers.*": TensorParallel()})
    for model in (unfused, ours):
        model(ids()).square().mean().backward()
    check_gradients(unfused, ours, "grouped layers")


# Packed and transposed weights, masks of all heads, norms after the branch, parallel sublayers, sinks, output gates
SHORT = {"gpt": True, "gemma": False, "phi3": True, "relative bias": False, "parallel, one norm": True, "adaptive": False,
         "windows": True, "sinks": False, "gated columns": True, "gated heads": False, "decoder": False}  # fmt: skip
LONG = ["llama", "qwen", "bert", "vision", "adaptive by a table", "gated query", "torch decoder"]


@pytest.mark.parametrize(
    ("name", "sequence"),
    [
        pytest.param(name, sequence, marks=() if SHORT.get(name) == sequence else pytest.mark.long)
        for name, sequence in itertools.product([*SHORT, *LONG], (False, True))
        if not (sequence and "decoder" in name)
    ],
)
@on_ranks(mesh="tp")
def test_a_converted_model_on_two_ranks_trains_as_on_one(mesh, name, sequence):
    unfused = converted(name)
    ours = split(unfused, mesh, "layers.*", sequence)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, 0.9) for model in (unfused, ours)]
    for layer in ours.layers if sequence else ():
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
def test_cross_attention_on_two_ranks(mesh):
    """Three weights and one bias for all of them."""
    torch.manual_seed(0)
    unfused = ckptkern.nn.MultiheadAttention(WIDTH, HEADS, P, kdim=16, vdim=16, batch_first=True, dtype=torch.float64)
    nn.init.normal_(unfused.in_proj_bias)
    ours = split(unfused, mesh)
    x, memory = torch.randn(B, S, WIDTH, dtype=torch.float64), torch.randn(B, 5, 16, dtype=torch.float64)
    results = []
    for model in (unfused, ours):
        given = memory.clone().requires_grad_()
        torch.manual_seed(1)
        y, _ = model(x, given, given, need_weights=False)
        y.square().sum().backward()
        results.append((y, given.grad))
    torch.testing.assert_close(results[1], results[0])
    check_gradients(unfused, ours, "cross-attention")


# -- with other parts of torch


@on_ranks(4)
def test_fsdp2_over_tensor_parallel_blocks(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unfused = nn.Sequential(*(block("llama with all", "selective", seed) for seed in (0, 1)))
    ours = split(unfused, mesh["tp"], "*")
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
        check_gradients(unfused, ours, f"step {i}", 1e-9)
        norms = [whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) for model in (unfused, ours)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.slow
@on_ranks(mesh="tp")
def test_autocast_compile_checkpoint_and_dtensor_inputs(mesh):
    x = torch.randn(B, S, WIDTH, generator=torch.Generator().manual_seed(3))
    unfused = block("llama with all", "selective").float()
    ours = split(unfused, mesh)
    weight = torch.randn_like(x, requires_grad=False)
    dist.broadcast(weight, 0)
    with torch.autocast("cpu", torch.bfloat16):
        (y, dx, _), (z, dz, saved) = (step(model, x, weight) for model in (unfused, ours))
    assert z.dtype == y.dtype
    for one, other in ((z, y), (dz, dx)):
        assert (one - other).abs().max() < 0.05 * other.abs().max()
    check_gradients(unfused, ours, "autocast", 0.05)
    assert {dtype for shape, dtype, _ in saved.tensors if len(shape) == 4} == {torch.bfloat16}

    unfused, ours = unfused.double(), ours.double()
    x, weight = x.double(), weight.double()
    unfused.zero_grad(), ours.zero_grad()
    y, dx, _ = step(unfused, x, weight)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for model in (compiled, lambda x: ckptkern.checkpoint(ours, x)):
        ours.zero_grad()
        x = x.detach().requires_grad_()
        torch.manual_seed(1)
        z = model(x)
        (dz,) = torch.autograd.grad((z * weight).sum(), x)
        torch.testing.assert_close((z, dz), (y, dx))
    given = DTensor.from_local(x.detach(), mesh, [Replicate()]).redistribute(placements=[Shard(1)])
    torch.manual_seed(1)
    torch.testing.assert_close(ours(given), y)


@on_ranks(mesh="tp")
def test_torchs_own_styles_on_the_inner_layers(mesh):
    """torch's styles put hooks on the inner layers, so that the block calls them, as one activation checkpoint."""
    torch.manual_seed(0)
    unfused = ckptkern.nn.MLP(WIDTH, HIDDEN, dtype=torch.float64)
    ours = parallelize_module(copy.deepcopy(unfused), mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    x, weight = torch.randn(2, B, S, WIDTH, dtype=torch.float64)
    saved_eager, saved = check_step(unfused, ours, mesh, x, weight, "torch's styles")
    assert saved.bytes == saved_eager.bytes == x.nbytes
    ours.dropout = P  # drawn by a rank's own columns: both ranks have the mask of the first sublayer
    torch.manual_seed(1)
    mask = state.keep_mask(state.draw(x), P, B * S, HIDDEN // 2).repeat(1, 2).view(B, S, HIDDEN)
    scale = state.threshold_scale(P)[1]
    expected = unfused.fc2(torch.where(mask, nn.functional.gelu(unfused.fc1(x)) * scale, 0))
    torch.testing.assert_close(step(ours, x, weight)[0], expected)


@on_ranks(mesh="tp")
def test_what_has_no_sharded_form_runs_on_the_whole_parameters(mesh):
    torch.manual_seed(0)
    unfused = ckptkern.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    nn.init.normal_(unfused.in_proj_bias)
    ours = split(unfused, mesh)
    x = torch.randn(B, S, WIDTH, dtype=torch.float64)
    for need_weights in (True, False):
        results = [model(x, x, x, need_weights=need_weights) for model in (unfused, ours)]
        for one, other in zip(*results, strict=True):
            assert one is other is None or torch.equal(one, other) or not need_weights
        torch.testing.assert_close(results[1][0], results[0][0])
        for (y, _), model in zip(results, (unfused, ours), strict=True):
            model.zero_grad()
            y.square().sum().backward()
        check_gradients(unfused, ours, f"need_weights={need_weights}")

    unfused = converted("llama", dropout=False)
    model = split(unfused, mesh, "layers.*")
    for layer in model.layers:
        layer.forward.whole = (
            None  # nothing is gathered for a call without gradients, in which an unsplit layer runs its original
        )
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
    assert ckptkern.convert(sandwich, ids()).converted
    refused(sandwich, mesh, ValueError, "norm over all heads at once", "layers.*")
    for model, names in ((converted("decoder"), "layers.*"), (nn.Sequential(torch_decoder()), "*")):
        match = "has cross-attention, which sequence_parallel does not support"
        refused(model, mesh, ValueError, match, names, sequence_parallel=True)
    attention = split(ckptkern.nn.MultiheadAttention(WIDTH, HEADS), mesh, sequence=True)
    x, memory = torch.randn(2, B, S, WIDTH)
    with pytest.raises(ValueError, match="sequence_parallel does not go with cross-attention"):
        attention(x, memory, memory, need_weights=False)
    rows = split(_llama(), mesh, sequence=True)
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
    activated, llama = Activated(), ARCHITECTURES["llama"].model()
    lora, twice = adapted(ARCHITECTURES["llama"].model()), split(mlp(8, 32), mesh)
    for model, *inputs in ((activated, torch.randn(2, 4, 8)), (lora, ids())):
        assert ckptkern.convert(model, *inputs).converted
    divides = "which must be a multiple of the mesh's size, 4"
    for module, error, match, *names in (
        (attention(WIDTH, 6, head_dim=4), ValueError, f"num_heads=6, {divides}"),
        (attention(WIDTH, HEADS, 2), ValueError, f"num_kv_heads=2, {divides}"),
        (mlp(8, 30), ValueError, r"fc1.weight has shape \(30, 8\), whose dimension 0 must be a multiple"),
        (nn.Linear(8, 8), TypeError, "Linear is not a fused block; name blocks of ckptkern.nn"),
        (llama, TypeError, "Stack is not a fused block"),
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
    model = split(mlp(8, 128, dropout=P), mesh)
    torch.manual_seed(mesh.get_local_rank())
    with pytest.raises(RuntimeError, match="must draw the same dropout masks, but their random states differ"):
        model(torch.randn(2, 8))
    torch.manual_seed(0)
    x = torch.randn(2, 8, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(NotImplementedError, match="no second-order gradients"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


class Ops(TorchDispatchMode):
    """Their names, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_states_are_compared_without_the_host():
    """Off the CPU: a tensor of the meta device has nothing that the host could read."""
    with Ops() as ops:
        sharded.Shard("group", 0, 2).check_alike(torch.empty(2, dtype=torch.int64, device="meta"))
    assert ops.names[-1] == "aten::_assert_async.msg"
