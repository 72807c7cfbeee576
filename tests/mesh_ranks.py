"""n processes of a gloo group, on a mesh of one dimension, for one test."""

import importlib.util
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def _rank(file: str, name: str, rank: int, n: int, store: str, reports, arguments: tuple) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, n), rank=rank, world_size=n, timeout=timedelta(minutes=5)
        )
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, name)(init_device_mesh("cpu", (n,), mesh_dim_names=("tp",)), *arguments)
        reports.put((rank, None))
    except BaseException as error:
        traceback.print_exc()
        reports.put((rank, repr(error)))
    finally:
        dist.destroy_process_group()


def on_ranks(n: int, function, tmp_path: Path, *arguments) -> None:
    """Runs function(mesh, *arguments) in n processes; fails with the first of them that fails."""
    context = torch.multiprocessing.get_context("spawn")
    reports, store = context.Queue(), str(tmp_path / "store")
    given = (function.__globals__["__file__"], function.__name__)
    ranks = [context.Process(target=_rank, args=(*given, i, n, store, reports, arguments)) for i in range(n)]
    for rank in ranks:
        rank.start()
    try:
        for _ in ranks:
            rank, error = reports.get(timeout=400)
            assert error is None, f"rank {rank}: {error}"
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
