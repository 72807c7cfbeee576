"""Attention over sequences whose rows lie on several gloo processes, against one process; in float64 if nothing is said."""

import functools
import importlib.util
import itertools
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import strategies
from support.architectures import rotary
from support.cases import assert_as_exact
from support.interpreter import quicken
from support.ranks import Ranks, on_ranks
from support.strategies import MODES, check_step, split
from support.timeline import Timeline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_upper_left

import ckptkern
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.ops.registration.functions import bodies_seen
from ckptkern.parallel import context_parallel, shard_sequence

B, WIDTH, HEADS, KV_HEADS, D = 2, 24, 8, 4, 6
ORDERS = ("contiguous", "zigzag")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py"


def own(x: Tensor, mesh: DeviceMesh, order: str = "zigzag", dim: int = -2) -> Tensor:
    """This rank's rows."""
    return shard_sequence(x, mesh, dim, order=order)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- attention_block


def _bounds(S: int) -> Tensor:
    """Packed sequences: of which one begins and ends within a rank's rows, one covers several ranks, and one is empty."""
    return torch.tensor([0, 3, S // 2 + 5, S // 2 + 5, S - 2], dtype=torch.int32)


CALLS: dict[str, Callable[[int], dict]] = {
    "causal, rotary": lambda S: dict(is_causal=True, rotary=1e4),
    "all, tables": lambda S: dict(
        rotary=ckptkern.nn.rotary_tables(torch.arange(S), D),
        norm="layer",
        norm_weight=noise(WIDTH, seed=3),
        residual=True,
    ),
    "window, dropout": lambda S: dict(window_size=(9, 3), dropout_p=0.3),
    "slopes": lambda S: dict(is_causal=True, alibi_slopes=noise(HEADS, seed=2).abs().float()),
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
    "packed, causal": lambda S: dict(is_causal=True, rotary=1e4, cu_seqlens=_bounds(S)),
    "packed": lambda S: dict(cu_seqlens=_bounds(S), gate_weight=noise(HEADS, WIDTH, seed=7)),
    "packed, window": lambda S: dict(window_size=(5, 0), cu_seqlens=_bounds(S), max_seqlen=S),
}
TRAINED = ("sinks", "gate_weight", "norm_weight", "post_norm_weight")


def block(x: Tensor, ct: Tensor, options: dict, mode: str, packed_weight: bool = False, context=None) -> list[Tensor]:
    """[y, dx, gradients of parameters]"""
    weights = [noise(h * D, WIDTH, seed=20 + i).mul_(0.3) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    weights = [*([torch.cat(weights)] if packed_weight else weights), noise(WIDTH, HEADS * D, seed=30).mul_(0.3)]
    weights = [w.to(x.dtype).requires_grad_() for w in weights]
    trained = {k: options[k].to(x.dtype).clone().requires_grad_() for k in TRAINED if k in options}
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    qkv = weights[0] if packed_weight else weights[:-1]
    with context or torch.enable_grad():
        y = ckptkern.attention_block(
            x, qkv, None, weights[-1], None, HEADS, KV_HEADS, **options | trained, recompute=mode
        )
    y.backward(ct)  # outside of the context
    return [y.detach(), x.grad, *(p.grad for p in (*weights, *trained.values()))]


def on_this_rank(mesh: DeviceMesh, order: str, exchange: str, x: Tensor, ct: Tensor, *call) -> list[Tensor]:
    """block() of this rank's rows, gradients of parameters summed over ranks."""
    context = context_parallel(mesh, order=order, exchange=exchange)
    results = block(own(x, mesh, order), own(ct, mesh, order), *call, context=context)
    for part in results[2:]:
        dist.all_reduce(part)
    return results


def rows_of(whole: list[Tensor], mesh: DeviceMesh, order: str) -> list[Tensor]:
    return [*(own(tensor, mesh, order) for tensor in whole[:2]), *whole[2:]]


# Every fifth combination of a call, an order and a mode, from `first` on
SHORT = [(2, "gather", 0), (2, "heads", 1), (4, "gather", 2), (4, "heads", 3)]
LONG = [case for case in itertools.product((2, 4), ("gather", "heads"), range(5)) if case not in SHORT]


@pytest.mark.parametrize(
    ("n", "exchange", "first"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
@on_ranks(mesh="cp")
def test_a_block_over_ranks_is_the_block_of_one(mesh, n, exchange, first):
    S = 12 * n
    for i, (name, order, mode) in enumerate(itertools.islice(itertools.product(CALLS, ORDERS, MODES), first, None, 5)):
        options = CALLS[name](S)
        lead = () if "packed" in name else (B,)
        x, ct = noise(*lead, S, WIDTH, seed=1), noise(*lead, S, WIDTH, seed=2)
        call = x, ct, options, mode, i % 2 == 1
        torch.testing.assert_close(
            on_this_rank(mesh, order, exchange, *call),
            rows_of(block(*call), mesh, order),
            msg=lambda text, label=f"{name}, {order}, {mode}": f"{label}: {text}",
        )


@on_ranks(mesh="cp")
def test_16_bits(mesh):
    S, options = 32 * mesh.size(), dict(is_causal=True, rotary=1e4)
    x, ct = noise(B, S, WIDTH, seed=1), noise(B, S, WIDTH, seed=2)
    low = x.bfloat16(), ct.bfloat16(), options, "full"
    for exchange, order in (("gather", "zigzag"), ("heads", "contiguous")):
        exact, theirs = (rows_of(block(*call), mesh, order) for call in ((x, ct, options, "full"), low))
        ours = on_this_rank(mesh, order, exchange, *low)
        assert_as_exact(*(dict(enumerate(results)) for results in (ours, theirs, exact)))


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize(
    ("exchange", "order", "mode"), [("gather", "zigzag", "selective"), ("heads", "contiguous", "full")]
)
@on_ranks(mesh="cp")
def test_kernels_have_the_rows_of_the_whole_sequence(mesh, exchange, order, mode):
    """In Triton's interpreter, float32."""
    quicken()
    S = 32 * mesh.size()
    x, ct, odd = (noise(1, rows, WIDTH, seed=1, dtype=torch.float32) for rows in (S, S, 12))
    mask, slopes = noise(1, HEADS, S, S, seed=4).float(), noise(HEADS, seed=2).abs().float()
    call = x, ct, dict(window_size=(40, 3), alibi_slopes=slopes, attn_mask=mask, dropout_p=0.2), mode
    with ckptkern.backend("triton"):
        actual, expected = on_this_rank(mesh, order, exchange, *call), rows_of(block(*call), mesh, order)
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
        if exchange == "gather":
            with pytest.raises(RuntimeError, match="masks of multiples of 16 rows, not of 12 rows of a rank"):
                block(odd, odd, dict(dropout_p=0.3), "full", False, context_parallel(mesh))


@on_ranks(mesh="cp")
def test_peak_memory_is_within_the_workspace(mesh):
    """Memory rises by the workspace above what is saved, results and gradients, in groups of heads if all do not fit. Half of
    it is allowed beside: gloo's thread holds what it has sent for a while."""
    S, H, d = 256, 8, 64
    cases = itertools.product(("gather", "heads"), zip(ORDERS, (torch.float32, torch.bfloat16), MODES[1:], strict=True))
    for exchange, (order, dtype, mode) in cases:
        x = noise(B, S, d, seed=1, dtype=dtype).requires_grad_()
        weights = [noise(H * 16, d, seed=i, dtype=dtype).requires_grad_() for i in range(3)]
        out = noise(d, H * 16, seed=4, dtype=dtype).requires_grad_()
        inputs = [x, *weights, out]
        sizes = x.nbytes + sum(4 * tensor.numel() for tensor in inputs[1:])  # of parameters float32 sums
        for workspace in (2**23, 2**21):
            context = context_parallel(mesh, order=order, exchange=exchange)
            with context, peak_memory("cpu") as forward, saved_tensors(inputs) as saved:
                y = ckptkern.attention_block(
                    x, weights, None, out, None, H, is_causal=True, recompute=mode, workspace=workspace
                )
            ct = torch.ones_like(y)
            with peak_memory("cpu") as backward:
                torch.autograd.grad(y, inputs, ct)
            rises = forward.bytes - saved.bytes - y.nbytes, backward.bytes - sizes
            assert workspace // 8 < max(rises) <= 1.5 * workspace, (exchange, order, dtype, mode, workspace, rises)


@on_ranks(mesh="cp")
def test_keys_and_values_are_gathered_under_recompute(mesh):
    """While k and v come from the other ranks, backward forms q, and the gradients of o and of its weight. A whole layer at
    "full" gathers them twice: for o, of which the MLP's input is made, and, when the MLP's backward is done, for the
    gradients."""
    for mode in MODES:
        model = split(strategies.block("llama", mode), mesh, "contiguous")
        y = model(own(noise(B, 16, 32, seed=1), mesh, "contiguous").requires_grad_())
        with bodies_seen(), Timeline() as timeline:
            y.sum().backward()
        gathers = [collective for collective in timeline.collectives if collective.name == "all_gather_into_tensor"]
        matmuls = [0, 2] if mode == "full" else [2]
        assert [gather.count("matmul") for gather in gathers] == matmuls, f"{mode}: {timeline}"
        assert all(gather.waited and gather.count("elementwise") for gather in gathers), f"{mode}: {timeline}"
        assert [collective.name for collective in timeline.collectives if collective not in gathers] == [
            "reduce_scatter_tensor"
        ]


@on_ranks(mesh="cp")
def test_every_collective_is_waited_for(mesh):
    """A backward that needs no keys leaves no collective that nothing waits for."""
    x = noise(B, 8, WIDTH, seed=1)
    weights, out = [noise(h * D, WIDTH, seed=h) for h in (HEADS, KV_HEADS, KV_HEADS)], noise(WIDTH, HEADS * D, seed=5)
    for exchange, name in itertools.product(("gather", "heads"), ("sinks", "gate_weight")):
        trained = CALLS["sinks, gate"](8)[name].requires_grad_()
        with context_parallel(mesh, exchange=exchange):
            y = ckptkern.attention_block(x, weights, None, out, None, HEADS, KV_HEADS, **{name: trained})
        y.sum().backward()
        assert trained.grad is not None
        assert torch._C._distributed_c10d._get_work_registry_size() == 0, (exchange, name)


# -- blocks and converted models; test_blocks.py has every block


@on_ranks(mesh="cp")
def test_masks_of_torchs_modules_are_of_all_rows(mesh):
    """Masks of all rows in the arguments of torch's modules, True = hidden."""
    S = 8 * mesh.size()
    mask, padding = noise(S, S, seed=3) > 1.0, noise(3, S, seed=4) > 1.0
    attention = ckptkern.nn.MultiheadAttention(strategies.WIDTH, 4, batch_first=True, dtype=torch.float64)
    encoder = strategies.block("without dropout", "full")
    for layer, call in (
        (attention, lambda layer, x: layer(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)[0]),
        (attention, lambda layer, x: layer(x, x, x, attn_mask=causal_upper_left(S, S), need_weights=False)[0]),
        (encoder, lambda layer, x: layer(x, src_mask=mask, src_key_padding_mask=padding)),
    ):
        ours = split(layer, mesh, "zigzag")
        calls = functools.partial(call, layer), functools.partial(call, ours)
        check_step(layer, ours, mesh, "zigzag", "masks", length=S, calls=calls)


@on_ranks(mesh="cp")
def test_a_converted_model(mesh):
    """Also in evaluation, where its original forward would attend to this rank's rows."""
    S = 8 * mesh.size()
    model = strategies.converted("llama", dropout=False)
    model.embed = model.head = nn.Identity()
    ours = split(model, mesh, "contiguous", "layers.*")
    tables = tuple(table.double() for table in rotary(torch.empty(B, S, 1)))
    calls = [
        functools.partial(model, tables=tables),
        functools.partial(ours, tables=tuple(own(table, mesh, "contiguous", 1) for table in tables)),
    ]
    check_step(model, ours, mesh, "contiguous", "converted", length=S, calls=calls)
    x = noise(B, S, strategies.WIDTH, seed=1)
    ours.eval()
    with torch.no_grad():
        torch.testing.assert_close(calls[1](own(x, mesh, "contiguous")), own(calls[0](x), mesh, "contiguous"))


@on_ranks(mesh="cp")
def test_masks_of_rows_differ_and_those_of_samples_do_not(mesh):
    """Ranks that draw alike: dropout of rows differs between them, and drop_path drops the same samples."""
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


# -- the recipe


def _train_example(rank: int, steps: int, order: str) -> list[float]:
    return runpy.run_path(str(EXAMPLE))["train"](steps, order)


@pytest.mark.parametrize(
    ("n", "steps", "order"),
    [
        (2, 3, "zigzag"),
        pytest.param(2, 80, "zigzag", marks=pytest.mark.long),
        pytest.param(4, 3, "contiguous", marks=pytest.mark.long),
    ],
)
def test_the_example_trains_on_any_number_of_ranks_alike(ranks: Ranks, n, steps, order):
    alone = ranks.run(1, _train_example, 3, "zigzag")[0]
    for losses in ranks.run(n, _train_example, steps, order):
        torch.testing.assert_close(losses[:3], alone, atol=1e-4, rtol=1e-4)
        assert losses[-1] < (losses[0] if steps == 3 else 0.5 * losses[0])
