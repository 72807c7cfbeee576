"""Attention over sequences whose rows lie on several gloo processes, against one process; in float64 if nothing is said."""

import copy
import functools
import itertools
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.interpreter import quicken
from support.ranks import Ranks
from support.timeline import Timeline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.bias import causal_upper_left

import ckptkern
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.ops.registration.functions import bodies_seen

B, WIDTH, HEADS, KV_HEADS, D = 2, 24, 8, 4, 6
MODES = ("none", "selective", "full")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py"
ORDERS = ("contiguous", "zigzag")


def on_mesh(ranks: Ranks, n: int, function: Callable, *arguments) -> None:
    """function(mesh, *arguments) on n ranks."""
    ranks.run(n, _on_mesh, function.__name__, n, *arguments)


def _on_mesh(rank: int, name: str, n: int, *arguments) -> None:
    globals()[name](init_device_mesh("cpu", (n,), mesh_dim_names=("cp",)), *arguments)


def split(**options):
    from ckptkern.parallel import ContextParallel  # imports torch.distributed.tensor

    return ContextParallel(**options)


def own(x: Tensor, mesh: DeviceMesh, order: str, dim: int = -2) -> Tensor:
    from ckptkern.parallel import shard_sequence

    return shard_sequence(x, mesh, dim, order=order)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- attention_block


def _rotary(S: int) -> tuple[Tensor, Tensor]:
    return ckptkern.nn.rotary_tables(torch.arange(S), D)


def _bounds(S: int) -> Tensor:
    """Packed sequences: of which one begins and ends within a rank's rows, one covers several ranks, and one is empty."""
    return torch.tensor([0, 3, S // 2 + 5, S // 2 + 5, S - 2], dtype=torch.int32)


CALLS: dict[str, Callable[[int], dict]] = {
    "causal, rotary": lambda S: dict(is_causal=True, rotary=1e4),
    "all, tables": lambda S: dict(rotary=_rotary(S), norm="layer", norm_weight=noise(WIDTH, seed=3), residual=True),
    "window, dropout": lambda S: dict(window_size=(9, 3), dropout_p=0.3),
    "slopes": lambda S: dict(
        is_causal=True, alibi_slopes=torch.rand(HEADS, generator=torch.Generator().manual_seed(2))
    ),
    "small workspace": lambda S: dict(is_causal=True, dropout_p=0.2, workspace=1),
    "masks": lambda S: dict(
        attn_mask=noise(B, HEADS, S, S, seed=4), key_padding_mask=noise(B, S, seed=5) > 0.8, dropout_p=0.2
    ),
    "mask of columns": lambda S: dict(attn_mask=noise(1, 1, 1, S, seed=4), is_causal=True),
    "sinks, gate": lambda S: dict(
        is_causal=True, sinks=noise(HEADS, seed=6), gate_weight=noise(HEADS, WIDTH, seed=7), softcap=5.0
    ),
    "norms, bias": lambda S: dict(is_causal=True, qk_norm=(noise(D, seed=8), noise(D, seed=9)), rotary=1e4),
    "post norm": lambda S: dict(window_size=(7, 0), post_norm="rms", post_norm_weight=noise(WIDTH, seed=3)),
}
PACKED: dict[str, Callable[[int], dict]] = {
    "causal": lambda S: dict(is_causal=True, rotary=1e4, cu_seqlens=_bounds(S)),
    "all": lambda S: dict(cu_seqlens=_bounds(S), gate_weight=noise(HEADS, WIDTH, seed=7)),
    "window": lambda S: dict(window_size=(5, 0), cu_seqlens=_bounds(S), max_seqlen=S),
}
TRAINED = ("sinks", "gate_weight", "norm_weight", "post_norm_weight")


def block(x: Tensor, ct: Tensor, options: dict, mode: str, packed_weight: bool = False, context=None) -> tuple:
    """(y, dx, gradients of parameters)"""
    weights = [noise(h * D, WIDTH, seed=20 + i).mul_(0.3) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    weights = [*([torch.cat(weights)] if packed_weight else weights), noise(WIDTH, HEADS * D, seed=30).mul_(0.3)]
    weights = [w.to(x.dtype).requires_grad_() for w in weights]
    trained = {k: options[k].to(x.dtype).clone().requires_grad_() for k in TRAINED if k in options}
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    qkv = weights[0] if packed_weight else weights[:-1]

    def forward() -> Tensor:
        return ckptkern.attention_block(
            x, qkv, None, weights[-1], None, HEADS, KV_HEADS, **options | trained, recompute=mode
        )

    if context is None:
        y = forward()
    else:
        with context():
            y = forward()
    y.backward(ct)  # outside of the context
    return y.detach(), x.grad, [p.grad for p in (*weights, *trained.values())]


def in_context(mesh: DeviceMesh, order: str, exchange: str):
    from ckptkern.parallel import context_parallel

    return functools.partial(context_parallel, mesh, order=order, exchange=exchange)


def _check_block(mesh: DeviceMesh, exchange: str) -> None:
    S = 12 * mesh.size()
    x, ct = noise(B, S, WIDTH, seed=1), noise(B, S, WIDTH, seed=2)
    cases = list(itertools.product(CALLS.items(), ORDERS, MODES))
    for i, ((name, call), order, mode) in enumerate(cases if mesh.size() == 2 else cases[::2]):
        options, packed_weight = call(S), i % 2 == 1
        y, dx, dw = block(x, ct, options, mode, packed_weight)
        mine = functools.partial(own, mesh=mesh, order=order)
        z, dz, parts = block(mine(x), mine(ct), options, mode, packed_weight, in_context(mesh, order, exchange))
        what = f"{name}, {order}, {mode}"
        torch.testing.assert_close(z, mine(y), msg=what)
        torch.testing.assert_close(dz, mine(dx), msg=what)
        for part, whole in zip(parts, dw, strict=True):
            dist.all_reduce(part)
            torch.testing.assert_close(part, whole, msg=what)


@pytest.mark.parametrize(("n", "exchange"), [(2, "gather"), (2, "heads"), (4, "gather"), (4, "heads")])
def test_a_block_over_ranks_is_the_block_of_one(n, exchange, ranks):
    on_mesh(ranks, n, _check_block, exchange)


def _check_packed(mesh: DeviceMesh, exchange: str) -> None:
    S = 16 * mesh.size()
    for call, order, mode in itertools.product(PACKED.values(), ORDERS, MODES):
        x, ct, options = noise(S, WIDTH, seed=1), noise(S, WIDTH, seed=2), call(S)
        y, dx, dw = block(x, ct, options, mode)
        mine = functools.partial(own, mesh=mesh, order=order)
        z, dz, parts = block(mine(x), mine(ct), options, mode, False, in_context(mesh, order, exchange))
        torch.testing.assert_close(z, mine(y))
        torch.testing.assert_close(dz, mine(dx))
        for part, whole in zip(parts, dw, strict=True):
            dist.all_reduce(part)
            torch.testing.assert_close(part, whole)


@pytest.mark.parametrize(("n", "exchange"), [(2, "heads"), (4, "gather")])
def test_packed_sequences(n, exchange, ranks):
    on_mesh(ranks, n, _check_packed, exchange)


def _check_16_bits(mesh: DeviceMesh, exchange: str) -> None:
    """bfloat16: errors against float64 at most twice those of one process."""
    S, options = 32 * mesh.size(), dict(is_causal=True, rotary=1e4)
    x, ct = noise(B, S, WIDTH, seed=1), noise(B, S, WIDTH, seed=2)
    exact = block(x, ct, options, "full")
    y, dx, dw = block(x.bfloat16(), ct.bfloat16(), options, "full")
    for order in ORDERS:
        mine = functools.partial(own, mesh=mesh, order=order)
        z, dz, parts = block(
            mine(x).bfloat16(), mine(ct).bfloat16(), options, "full", False, in_context(mesh, order, exchange)
        )
        for part in parts:
            dist.all_reduce(part)
        ones = zip((z, dz, *parts), (mine(y), mine(dx), *dw), (mine(exact[0]), mine(exact[1]), *exact[2]), strict=True)
        for ours, theirs, true in ones:
            errors = [(one.double() - true).norm() / true.norm() for one in (ours, theirs)]
            assert errors[0] <= 2 * errors[1], errors


@pytest.mark.parametrize("exchange", ["gather", "heads"])
def test_16_bits(exchange, ranks):
    on_mesh(ranks, 4, _check_16_bits, exchange)


def _check_kernels(mesh: DeviceMesh, exchange: str) -> None:
    """In Triton's interpreter, float32."""
    quicken()
    S = 32 * mesh.size()
    x, ct = noise(1, S, WIDTH, seed=1, dtype=torch.float32), noise(1, S, WIDTH, seed=2, dtype=torch.float32)
    slopes, mask = torch.rand(HEADS, generator=torch.Generator().manual_seed(2)), noise(1, HEADS, S, S, seed=4).float()
    call = dict(window_size=(40, 3), alibi_slopes=slopes, attn_mask=mask, dropout_p=0.2), "zigzag", "selective"
    if exchange == "heads":
        call = dict(window_size=(9, 3), dropout_p=0.3), "contiguous", "full"
    with ckptkern.backend("triton"):
        options, order, mode = call
        y, dx, dw = block(x, ct, options, mode)
        mine = functools.partial(own, mesh=mesh, order=order)
        z, dz, parts = block(mine(x), mine(ct), options, mode, False, in_context(mesh, order, exchange))
        torch.testing.assert_close(z, mine(y), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(dz, mine(dx), atol=1e-4, rtol=1e-4)
        for part, whole in zip(parts, dw, strict=True):
            dist.all_reduce(part)
            torch.testing.assert_close(part, whole, atol=1e-3, rtol=1e-3)
        odd = noise(1, 12, WIDTH, seed=1, dtype=torch.float32)
        if exchange == "gather":
            with pytest.raises(
                RuntimeError, match="the kernels draw masks of multiples of 16 rows, not of 12 rows of a rank"
            ):
                block(odd, odd, dict(dropout_p=0.3), "full", False, in_context(mesh, "contiguous", exchange))


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["gather", "heads"])
def test_kernels_have_the_rows_of_the_whole_sequence(exchange, ranks):
    pytest.importorskip("triton")
    on_mesh(ranks, 2, _check_kernels, exchange)


def _check_peak(mesh: DeviceMesh) -> None:
    """Memory rises by the workspace above what is saved, results and gradients, in groups of heads if all do not fit. Half of
    it is allowed beside: gloo's thread keeps what it has sent for a while."""
    S, H, d = 256, 8, 64
    for exchange, order, dtype, mode in itertools.product(
        ("gather", "heads"), ORDERS, (torch.float32, torch.bfloat16), ("selective", "full")
    ):
        x = noise(B, S, d, seed=1, dtype=dtype).requires_grad_()
        weights = [noise(H * 16, d, seed=i, dtype=dtype).requires_grad_() for i in range(3)]
        out = noise(d, H * 16, seed=4, dtype=dtype).requires_grad_()
        inputs = [x, *weights, out]
        sizes = x.nbytes + sum(4 * one.numel() for one in inputs[1:])  # of parameters float32 sums
        for workspace in (2**23, 2**21):
            call = functools.partial(
                ckptkern.attention_block,
                x,
                weights,
                None,
                out,
                None,
                H,
                is_causal=True,
                recompute=mode,
                workspace=workspace,
            )
            with in_context(mesh, order, exchange)(), peak_memory("cpu") as forward, saved_tensors(inputs) as saved:
                y = call()
            ct = torch.ones_like(y)
            with peak_memory("cpu") as backward:
                torch.autograd.grad(y, inputs, ct)
            rises = forward.bytes - saved.bytes - y.nbytes, backward.bytes - sizes
            assert workspace // 8 < max(rises) <= 1.5 * workspace, (exchange, order, dtype, mode, workspace, rises)


def test_peak_memory_is_within_the_workspace(ranks):
    on_mesh(ranks, 2, _check_peak)


def _check_order(mesh: DeviceMesh) -> None:
    """While k and v come from the other ranks, backward forms q, and the gradients of o and of its weight. A whole layer at
    "full" gathers them twice: for o, of which the MLP's input is made, and, when the MLP's backward is done, for the
    gradients."""
    for mode in MODES:
        model = parallelize_module(_llama(recompute=mode), mesh, split())
        y = model(own(noise(B, 16, WIDTH, seed=1), mesh, "contiguous").requires_grad_())
        with bodies_seen(), Timeline() as timeline:
            y.sum().backward()
        gathers = [one for one in timeline.collectives if one.name == "all_gather_into_tensor"]
        matmuls = [0, 2] if mode == "full" else [2]
        assert [one.count("matmul") for one in gathers] == matmuls, f"{mode}: {timeline}"
        assert all(one.waited and one.count("elementwise") for one in gathers), f"{mode}: {timeline}"
        assert [one.name for one in timeline.collectives if one not in gathers] == ["reduce_scatter_tensor"]


def test_keys_and_values_are_gathered_under_recompute(ranks):
    on_mesh(ranks, 2, _check_order)


# -- blocks and converted models


def _llama(**options) -> nn.Module:
    return ckptkern.nn.LlamaDecoderLayer(WIDTH, 6, 2, 40, dtype=torch.float64, **options)


BLOCKS = {
    "llama": lambda **o: _llama(dropout=0.25, **o),
    "attention": lambda **o: ckptkern.nn.LlamaAttention(WIDTH, 6, 2, dropout=0.25, dtype=torch.float64, **o),
    "encoder": lambda **o: ckptkern.nn.TransformerEncoderLayer(
        WIDTH, 4, 40, 0.0, batch_first=True, dtype=torch.float64, **o
    ),
}


def step(model: nn.Module, x: Tensor, ct: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = model(x)
    y.backward(ct)
    return y.detach(), x.grad


def check_gradients(unfused: nn.Module, ours: nn.Module, mesh: DeviceMesh) -> None:
    for (name, p), q in zip(unfused.named_parameters(), ours.parameters(), strict=True):
        grad = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad.clone()
        dist.all_reduce(grad, group=mesh.get_group())
        torch.testing.assert_close(grad, p.grad, msg=name)


def _check_blocks(mesh: DeviceMesh) -> None:
    n, S = mesh.size(), 8 * mesh.size()
    x, ct = noise(B, S, WIDTH, seed=1), noise(B, S, WIDTH, seed=2)
    for (name, make), order, mode in itertools.product(BLOCKS.items(), ORDERS, MODES):
        torch.manual_seed(0)
        unfused = make(recompute=mode)
        ours = parallelize_module(copy.deepcopy(unfused), mesh, split(order=order))
        y, dx = step(unfused, x, ct)
        mine = functools.partial(own, mesh=mesh, order=order)
        z, dz = step(ours, mine(x), mine(ct))
        torch.testing.assert_close(z, mine(y), msg=name)
        torch.testing.assert_close(dz, mine(dx), msg=name)
        check_gradients(unfused, ours, mesh)
        if mode != "none":
            saved = []
            for model, rows in ((unfused, x), (ours, mine(x).clone())):
                with saved_tensors() as found:
                    model(rows)
                saved.append(found.bytes - sum(p.numel() * p.element_size() for p in model.parameters()))
            assert saved[1] * n <= saved[0] + 64 * n, (name, mode, saved)  # 16 bytes of each random state


@pytest.mark.parametrize("n", [2, 4])
def test_blocks_of_ckptkern_nn(n, ranks):
    on_mesh(ranks, n, _check_blocks)


def _check_torchs_masks(mesh: DeviceMesh) -> None:
    """Masks of all rows in the arguments of torch's modules, True = hidden."""
    S = 6 * mesh.size()
    x, ct = noise(B, S, WIDTH, seed=1), noise(B, S, WIDTH, seed=2)
    mask, padding = noise(S, S, seed=3) > 1.0, noise(B, S, seed=4) > 1.0
    torch.manual_seed(0)
    attention = ckptkern.nn.MultiheadAttention(WIDTH, 4, batch_first=True, dtype=torch.float64)
    calls = (
        (BLOCKS["encoder"](), lambda layer, rows: layer(rows, src_mask=mask, src_key_padding_mask=padding)),
        (attention, lambda layer, x: layer(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)[0]),
        (
            copy.deepcopy(attention),
            lambda layer, x: layer(x, x, x, attn_mask=causal_upper_left(S, S), need_weights=False)[0],
        ),
    )
    for layer, call in calls:
        whole, part = x.clone().requires_grad_(), own(x, mesh, "zigzag").clone().requires_grad_()
        y = call(layer, whole)
        y.backward(ct)
        layer.zero_grad()
        parallelize_module(layer, mesh, split(order="zigzag"))
        z = call(layer, part)
        z.backward(own(ct, mesh, "zigzag"))
        torch.testing.assert_close(z, own(y, mesh, "zigzag"))
        torch.testing.assert_close(part.grad, own(whole.grad, mesh, "zigzag"))


def test_masks_of_torchs_modules_are_of_all_rows(ranks):
    on_mesh(ranks, 2, _check_torchs_masks)


def _check_waits(mesh: DeviceMesh) -> None:
    """A backward that needs no keys leaves no collective that nothing waits for."""
    x = noise(B, 8, WIDTH, seed=1)
    weights, out = [noise(h * D, WIDTH, seed=h) for h in (HEADS, KV_HEADS, KV_HEADS)], noise(WIDTH, HEADS * D, seed=5)
    for exchange, name in itertools.product(("gather", "heads"), ("sinks", "gate_weight")):
        trained = CALLS["sinks, gate"](8)[name].requires_grad_()
        with in_context(mesh, "contiguous", exchange)():
            y = ckptkern.attention_block(x, weights, None, out, None, HEADS, KV_HEADS, **{name: trained})
        y.sum().backward()
        assert trained.grad is not None
        assert torch._C._distributed_c10d._get_work_registry_size() == 0, (exchange, name)


def test_every_collective_is_waited_for(ranks):
    on_mesh(ranks, 2, _check_waits)


def _check_converted(mesh: DeviceMesh) -> None:
    """A model of transformers, with its loss over this rank's tokens."""
    S, order = 8 * mesh.size(), "contiguous"
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        hidden_size=WIDTH, intermediate_size=40, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes)).double()
    ids = torch.randint(0, 64, (B, S), generator=torch.Generator().manual_seed(3))
    ours = copy.deepcopy(model)
    labels = torch.cat((ids[:, 1:], ids.new_full((B, 1), -100)), 1)
    conversion = ckptkern.convert(ours, ids)
    parallelize_module(ours, mesh, {"model.layers.*": split(order=order)})
    logits = model(ids).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").div(100).backward()
    mine = functools.partial(own, mesh=mesh, order=order, dim=1)
    positions = torch.arange(S)[None]
    hidden = ours.model(mine(ids), position_ids=mine(positions)).last_hidden_state
    torch.testing.assert_close(ours.lm_head(hidden), mine(logits))
    loss = ckptkern.linear_cross_entropy(hidden, ours.lm_head.weight, mine(labels), reduction="sum")
    loss.div(100).backward()
    check_gradients(model, ours, mesh)
    assert [row.replaced_by for row in conversion].count("transformer_layer") == 2, conversion
    with torch.no_grad():  # no original forward, which would attend to this rank's rows
        torch.testing.assert_close(ours.eval()(mine(ids), position_ids=mine(positions)).logits, mine(logits))


def test_a_converted_model_on_two_ranks_trains_as_on_one(ranks):
    pytest.importorskip("transformers")
    on_mesh(ranks, 2, _check_converted)


def _check_composed(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    from ckptkern.parallel import TensorParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    x, ct = noise(B, 16, WIDTH, seed=1), noise(B, 16, WIDTH, seed=2)
    for first, order, sequence in (("cp", "zigzag", False), ("tp", "contiguous", True)):
        torch.manual_seed(0)
        unfused = _llama(dropout=0.25)
        ours = copy.deepcopy(unfused)
        styles = {"cp": split(order=order), "tp": TensorParallel(sequence_parallel=sequence)}
        for name in ("cp", "tp") if first == "cp" else ("tp", "cp"):
            ours = parallelize_module(ours, mesh[name], styles[name])
        y, dx = step(unfused, x, ct)

        def mine(whole: Tensor, order=order, sequence=sequence) -> Tensor:
            part = own(whole, mesh["cp"], order)
            return part.chunk(2, -2)[mesh["tp"].get_local_rank()] if sequence else part

        z, dz = step(ours, mine(x), mine(ct))
        torch.testing.assert_close(z, mine(y))
        torch.testing.assert_close(dz, mine(dx))
        check_gradients(unfused, ours, mesh["cp"])
    torch.manual_seed(0)
    unfused = nn.Sequential(*(_llama(recompute="full") for _ in range(2)))
    ours = parallelize_module(copy.deepcopy(unfused), mesh["cp"], {"*": split(order="zigzag")})
    for layer in ours:
        fully_shard(layer, mesh=mesh["cp"])
    fully_shard(ours, mesh=mesh["cp"])
    y, dx = step(unfused, x, ct)
    z, dz = step(ours, own(x, mesh["cp"], "zigzag"), own(ct, mesh["cp"], "zigzag"))
    torch.testing.assert_close(z, own(y, mesh["cp"], "zigzag"))
    torch.testing.assert_close(dz, own(dx, mesh["cp"], "zigzag"))
    for p, q in zip(unfused.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor() * 2, p.grad)  # FSDP2 takes the mean over ranks


def test_with_tensor_parallel_and_fsdp2(ranks):
    ranks.run(4, _check_composed)


def _check_regions(mesh: DeviceMesh) -> None:
    """An activation checkpoint's recompute and a compiled block attend over all ranks, too."""
    from ckptkern.parallel import context_parallel

    S = 8 * mesh.size()
    x, ct = noise(B, S, WIDTH, seed=1), noise(B, S, WIDTH, seed=2)
    torch.manual_seed(0)
    layer = _llama()
    y, dx = step(copy.deepcopy(layer), x, ct)
    part = own(x, mesh, "zigzag").requires_grad_()
    with context_parallel(mesh, order="zigzag"):
        z = ckptkern.checkpoint(layer, part)
    z.backward(own(ct, mesh, "zigzag"))
    torch.testing.assert_close(z, own(y, mesh, "zigzag"))
    torch.testing.assert_close(part.grad, own(dx, mesh, "zigzag"))
    styled = parallelize_module(copy.deepcopy(layer), mesh, split(order="zigzag"))
    compiled = torch.compile(styled, fullgraph=True, backend="aot_eager")
    z, dz = step(compiled, own(x, mesh, "zigzag"), own(ct, mesh, "zigzag"))
    torch.testing.assert_close(z, own(y, mesh, "zigzag"))
    torch.testing.assert_close(dz, own(dx, mesh, "zigzag"))


def test_activation_checkpoints_and_compiled_blocks(ranks):
    on_mesh(ranks, 2, _check_regions)


def _check_masks(mesh: DeviceMesh) -> None:
    """Ranks that draw alike: dropout of rows differs between them, and drop_path drops the same samples."""
    from ckptkern.parallel import context_parallel

    x = torch.ones(64, 8, 32, dtype=torch.float64)
    ones, zeros = torch.ones(32, 32, dtype=torch.float64), torch.zeros(32, dtype=torch.float64)

    def block(**options) -> Tensor:
        torch.manual_seed(3)
        return ckptkern.attention_block(x, torch.cat((ones,) * 3), None, ones, zeros, 4, **options)

    with context_parallel(mesh):
        rows, samples = block(resid_dropout_p=0.5), block(drop_path_p=0.5)
        torch.manual_seed(3)
        hidden = ckptkern.mlp(x, ones, None, torch.eye(32, dtype=torch.float64), None, dropout_p=0.5)
    for mask, alike in ((rows, False), (samples, True), (hidden, False)):
        others = [torch.empty_like(mask) for _ in range(mesh.size())]
        dist.all_gather(others, mask)
        assert 0 < (mask == 0).double().mean() < 1
        assert all(torch.equal(mask, other) for other in others) == alike


def test_masks_of_rows_differ_and_those_of_samples_do_not(ranks):
    on_mesh(ranks, 2, _check_masks)


# -- the recipe


def _check_example(rank: int, steps: int, order: str) -> list[float]:
    return runpy.run_path(str(EXAMPLE))["train"](steps, order)


def test_the_example_trains_on_any_number_of_ranks_alike(ranks):
    alone = ranks.run(1, _check_example, 3, "zigzag")[0]
    for n, steps, order in ((2, 80, "zigzag"), (4, 3, "contiguous")):
        for losses in ranks.run(n, _check_example, steps, order):
            torch.testing.assert_close(losses[:3], alone, atol=1e-4, rtol=1e-4)
            assert steps == 3 or losses[-1] < 0.5 * losses[0]


# -- errors


def _check_errors(mesh: DeviceMesh) -> None:
    from ckptkern.parallel import ContextParallel, context_parallel, shard_sequence

    def refused(error: type[Exception], match: str, function: Callable, order="contiguous", exchange="gather") -> None:
        with context_parallel(mesh, order=order, exchange=exchange), pytest.raises(error, match=match):
            function()

    x, odd = noise(B, 8, WIDTH, seed=1), noise(B, 7, WIDTH, seed=1)
    cu = torch.tensor([0, 14], dtype=torch.int32)
    call = functools.partial(block, ct=x, mode="full")
    refused(
        ValueError, "key_value does not go with a sequence on several ranks", lambda: call(x, options=dict(key_value=x))
    )
    refused(ckptkern.errors.ShapeError, "an even number of rows", lambda: call(odd, options={}), "zigzag")
    mask = torch.zeros(16, 16, dtype=torch.float64, requires_grad=True)
    refused(ValueError, "no gradient of attn_mask is formed", lambda: call(x, options=dict(attn_mask=mask)))
    refused(
        ValueError,
        r"dropout_p with cu_seqlens .* exchange='heads'",
        lambda: call(odd[0], options=dict(cu_seqlens=cu, dropout_p=0.1)),
    )
    refused(ValueError, "max_seqlen=13 must not be below the longest sequence",
            lambda: call(odd[0], options=dict(cu_seqlens=cu, max_seqlen=13)))  # fmt: skip
    refused(
        ValueError,
        "a window that sees later rows",
        lambda: call(odd[0], options=dict(cu_seqlens=cu, window_size=(3, 3))),
    )
    refused(ckptkern.errors.ShapeError, r"attn_mask of shape \(8, 8\) does not broadcast to \(2, 8, 16, 16\)",
            lambda: call(x, options=dict(attn_mask=torch.zeros(8, 8, dtype=torch.float64))))  # fmt: skip
    one = noise(WIDTH, WIDTH, seed=2)
    attention = functools.partial(ckptkern.attention_block, x, [one] * 3, None, one, None, 3)
    refused(ValueError, "needs num_kv_heads that the 2 ranks divide, not 3", attention, exchange="heads")
    q = noise(1, 2, 8, 4, seed=3)
    refused(RuntimeError, "this rank's rows alone", lambda: ckptkern.scaled_dot_product_attention(q, q, q))
    refused(RuntimeError, "this rank's rows alone", lambda: ckptkern.varlen_attn(q[0], q[0], q[0], cu, cu, 8, 8))
    mha = ckptkern.nn.MultiheadAttention(WIDTH, 4, batch_first=True, dtype=torch.float64)
    refused(RuntimeError, "this rank's rows alone", lambda: mha(x, x, x, need_weights=True))
    with context_parallel(mesh):
        trained = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(
            ckptkern.attention_block(trained, [one] * 3, None, one, None, 4).square().sum(), trained, create_graph=True
        )
    with pytest.raises(NotImplementedError, match="no second-order gradients over a context-parallel group"):
        dx.sum().backward()
    with pytest.raises(ValueError, match="takes a multiple of 4 rows, not 6"):
        shard_sequence(noise(1, 6, 2, seed=1), mesh, order="zigzag")
    with pytest.raises(ValueError, match="order"):
        ContextParallel(order="ring")
    with pytest.raises(TypeError, match="MLP is not a fused block with self-attention"):
        parallelize_module(ckptkern.nn.MLP(8, 8), mesh, split())
    built = nn.TransformerEncoderLayer(WIDTH, 4, 40, 0.0, batch_first=True).double()
    ckptkern.convert(built, x)
    parallelize_module(built, mesh, split())
    for again in (ckptkern.revert, lambda model: ckptkern.convert(model, x)):
        with pytest.raises(ValueError, match="already sharded by ContextParallel"):
            again(built)
    layer = parallelize_module(_llama(), mesh, split())
    with pytest.raises(ValueError, match="are split already"):
        parallelize_module(layer, mesh, split())
    with pytest.raises(
        ValueError, match=r"equal parts of a sequence, but their inputs have the shapes \(2, 4, 24\), \(2, 6, 24\)"
    ):
        layer(noise(2, 4 + 2 * dist.get_rank(), WIDTH, seed=1))


def test_errors_say_what_was_wanted(ranks):
    on_mesh(ranks, 2, _check_errors)
