"""Blocks split over gloo processes by each strategy, against one process, in float64."""

import itertools

import pytest
import torch
from support.ranks import on_ranks
from support.strategies import BLOCKS, MODES, WIDTH, B, S, block, check_step, mine, split, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptkern
from ckptkern.parallel import context_parallel

ROWS = ("attention", "llama", "without dropout")  # other masks are drawn by each rank of a context-parallel group
TAIL = ("packed, norm after", "without dropout")  # what the norm behind a branch reads is saved


def check_saved(name: str, strategy: str, mode: str, unfused, ours, n: int) -> None:
    """The inputs of both sublayers, whole or this rank's rows; a part of everything else."""
    if strategy in ("contiguous", "zigzag"):
        assert mode == "none" or ours.bytes * n <= unfused.bytes + 64 * n, f"{name}: {ours}"  # 16 of each random state
        return
    inputs = [size for shape, _, size in unfused.tensors if shape == (B, S, WIDTH)]
    states = [size for shape, dtype, size in unfused.tensors if dtype == torch.int64]
    shared = n if strategy == "rows" else 1
    sublayers = 1 if "mlp" in name or name == "attention" else 2
    expected = sublayers * inputs[0] // shared + sum(states) + (unfused.bytes - sum(inputs) - sum(states)) // n
    tail = 2 * inputs[0] + 4 * B * S * 8 if name in TAIL else 0  # and mean and rstd of both norms
    assert (ours.bytes - expected) * shared == tail, f"{name}, {mode}: {ours}"


@pytest.mark.parametrize(
    ("strategy", "n"),
    [
        pytest.param(strategy, n, marks=pytest.mark.long if n > 2 and strategy != "rows" else ())
        for n in (2, 4)
        for strategy in ("heads", "rows", "contiguous", "zigzag")
    ],
)
@on_ranks(mesh="ranks")
def test_a_block_on_n_ranks_is_the_block_on_one(mesh, n, strategy):
    """Results, gradients and saved bytes. With dropout too, so each rank samples its part of the masks."""
    names = BLOCKS if strategy in ("heads", "rows") else ROWS
    for name, mode in itertools.product(names, MODES) if n == 2 else zip(names, itertools.cycle(MODES), strict=False):
        unfused, label = block(name, mode), f"{name}, {mode}"
        ours = split(unfused, mesh, strategy)
        assert ours.state_dict().keys() == unfused.state_dict().keys()
        x, weight = torch.randn(2, B, S, WIDTH, dtype=torch.float64)
        weight = weight[..., : WIDTH // 2] if name == "relu mlp" else weight
        saved = check_step(unfused, ours, mesh, strategy, label, inputs=(x, weight))
        check_saved(name, strategy, mode, *saved, n)
        unfused.eval(), ours.eval()
        with torch.no_grad():
            actual, expected = ours(mine(x, mesh, strategy)), mine(unfused(x), mesh, strategy)
        torch.testing.assert_close(actual, expected, msg=label)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["heads", "zigzag"])
@on_ranks(mesh="ranks")
def test_compiled_blocks_and_activation_checkpoints(mesh, strategy):
    """A context around an activation checkpoint is that of its recompute, too."""
    unfused = block("llama", "selective")
    ours, plain = split(unfused, mesh, strategy), block("llama", "selective")

    def in_a_region(x: torch.Tensor) -> torch.Tensor:
        with context_parallel(mesh, order="zigzag"):
            return ckptkern.checkpoint(plain, x)

    calls = [
        (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")),
        (ours, lambda x: ckptkern.checkpoint(ours, x)),
    ]
    for module, call in [*calls, (plain, in_a_region)][: 2 + (strategy == "zigzag")]:
        check_step(unfused, module, mesh, strategy, "compiled or in a region", calls=(None, call))


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("llama with all", {"tp": "heads"}),
        ("llama", {"cp": "zigzag", "tp": "heads"}),
        ("llama", {"tp": "rows", "cp": "contiguous"}),
        ("llama", {"tp": "heads", "dp": "fully_shard"}),
        ("llama", {"cp": "zigzag", "cp of the same ranks": "fully_shard"}),
    ],
    ids=str,
)
@on_ranks(4)
def test_strategies_and_fsdp2_together(rank, name, steps):
    """In their order. Ranks of data parallelism have samples of their own; FSDP2 adds their gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp" if "dp" in steps else "cp", "tp"))
    unfused = ours = nn.Sequential(*(block(name, "selective", seed) for seed in range(2)))
    for where, strategy in steps.items():
        if strategy == "fully_shard":
            for module in (*ours, ours):
                fully_shard(module, mesh=mesh[where[:2]]).set_gradient_divide_factor(1.0)
        else:
            ours = split(ours, mesh[where], strategy, "*")

    def part(rows):
        if "dp" in steps:
            rows = rows.tensor_split(2)[mesh["dp"].get_local_rank()]
        for where in sorted(steps.keys() & {"cp", "tp"}):
            rows = mine(rows, mesh[where], steps[where])
        return rows

    sums = ("cp", steps["cp"]) if "fully_shard" not in steps.values() and "cp" in steps else ("tp", "heads")
    check_step(unfused, ours, mesh[sums[0]], sums[1], f"{steps}", part=part)
    if "dp" in steps:
        torch.testing.assert_close(
            *(whole(nn.utils.clip_grad_norm_(module.parameters(), 0.1)) for module in (unfused, ours))
        )
