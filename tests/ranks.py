"""Two processes of a gloo group for one test."""

import importlib.util
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def _rank(file: str, name: str, rank: int, store: str, reports) -> None:
    """The main function of a rank's process, which imports the test file by its path, whatever folder pytest runs in."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(minutes=10)
        )
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, name)(rank)
        reports.put((rank, None))
    except BaseException as error:
        traceback.print_exc()
        reports.put((rank, repr(error)))
    finally:
        dist.destroy_process_group()


def run_on_two(function, tmp_path: Path) -> None:
    """Runs function(rank) in two processes; fails if one of them fails or hangs."""
    context = torch.multiprocessing.get_context("spawn")
    reports, store = context.Queue(), str(tmp_path / "store")
    file = function.__globals__["__file__"]
    ranks = [context.Process(target=_rank, args=(file, function.__name__, rank, store, reports)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        assert sorted(reports.get(timeout=600) for _ in ranks) == [(0, None), (1, None)]
        for rank in ranks:
            rank.join(timeout=600)
            assert rank.exitcode == 0
    finally:
        for rank in ranks:
            rank.kill()
