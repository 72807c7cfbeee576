"""Runs a short DDP training by torchrun many times, and counts the runs that do not exit as they should.

    python -m tests.support.exits --runs 200

Two ranks on the CPU train three steps of fused layers with dropout and an activation checkpoint. Then each interpreter exits
with the model, its last graph and its random states still there, which is when C++ state that outlives Python's has crashed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

RANKS, STEPS, WIDTH = 2, 3, 32
DONE = "has trained"
LIMIT = 600  # seconds of a run


def train() -> tuple:
    """What a rank runs; what it returns is there until the interpreter exits."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import ckptkern

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))

        def forward(self, x):
            return ckptkern.checkpoint(self.inner, x)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [
        ckptkern.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True),
        Checkpointed(),
        ckptkern.nn.MLP(WIDTH, 2 * WIDTH, dropout=0.1),
    ]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        loss = model(torch.randn(2, 8, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    graph = model(torch.randn(2, 8, WIDTH))
    print(f"rank {dist.get_rank()} {DONE}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    return model, optimizer, graph


def run(number: int) -> str | None:
    """What is wrong with one run of torchrun; None if nothing is."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    try:
        done = subprocess.run(
            [*torchrun, __file__, "--rank"],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return f"run {number}: has not ended after {LIMIT} s"
    trained = done.stdout.count(DONE)
    if done.returncode == 0 and trained == RANKS:
        return None
    return (
        f"run {number}: exit status {done.returncode}, {trained} of {RANKS} ranks have trained\n{done.stderr[-2000:]}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 if a run was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.exits", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank:
        global left  # as a training script's variables are
        left = train()
        return 0
    wrong = 0
    for number in range(1, args.runs + 1):
        if error := run(number):
            wrong += 1
            print(error, flush=True)
    print(f"{args.runs - wrong} of {args.runs} runs exit as they should")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
