"""Processes of a group, which run functions of test files for tests with the fixture `ranks`:

    def _check_sum(rank, factor): ...

    def test_sum(ranks):
        ranks.run(4, _check_sum, 2)

They are forked once from a process that has imported torch, and each function gets a fresh process group. A rank that raises or
dies ends the others, and its error is the test's.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

IMPORTED = ["torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "ckptkern"]
COLLECTIVE = timedelta(minutes=10)  # longer than anyone waits for a rank
TOGETHER = 0.5  # seconds in which others fail because one has gone


class RankError(AssertionError):
    """The errors of the ranks that failed first."""


def _load(file: str, name: str, loaded: dict[str, Any]) -> Callable:
    """A function of a test file, which is imported by its path, whatever folder pytest runs in."""
    if file not in loaded:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        loaded[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[file])
    return getattr(loaded[file], name)


def _serve(rank: int, pipe: Connection, stacks: str) -> None:
    """The main function of a rank's process."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"))  # noqa: SIM115 (open as long as the process lives)
    loaded: dict[str, Any] = {}
    while True:
        try:
            file, name, arguments, size, store, backend = pipe.recv()
        except EOFError:  # the tests' process has gone
            return
        try:
            if dist.is_initialized():  # not earlier: another rank may still have been reading from this one
                dist.destroy_process_group()
            store = dist.FileStore(store, size)
            if backend == "nccl":
                torch.cuda.set_device(rank)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE)
            torch.manual_seed(0)
            pipe.send((True, _load(file, name, loaded)(rank, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """Processes that are started when they are first needed, and again after a failure.

    patience: seconds until ranks that have not reported are taken to hang.
    """

    def __init__(self, patience: float = 600):
        self.patience = patience
        self.started: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self.folder = tempfile.TemporaryDirectory()
        self.tasks = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        self.stop()
        self.folder.cleanup()

    def run(self, size: int, function: Callable, *arguments, backend: str = "gloo") -> list[Any]:
        """function(rank, *arguments) on each of `size` ranks; what they returned.

        function: of a test file's top level. Arguments and results are pickled. backend: with "nccl" each rank has a GPU.
        Raises RankError.
        """
        __tracebackhide__ = True  # pytest shows the ranks' own
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        for rank in range(len(self.started), size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self.stacks(rank)), daemon=True)
            process.start()
            theirs.close()
            self.started.append((process, ours))
        self.tasks += 1
        store = os.path.join(self.folder.name, f"store-{self.tasks}")
        file = function.__globals__["__file__"]
        for _, pipe in self.started[:size]:
            pipe.send((file, function.__name__, arguments, size, store, backend))
        try:
            return self.results(size)
        except BaseException:
            self.stop()
            raise

    def results(self, size: int) -> list[Any]:
        __tracebackhide__ = True
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        end = time.monotonic() + self.patience
        while len(found) + len(failed) < size and (left := end - time.monotonic()) > 0:
            places = {}
            for rank, (process, pipe) in enumerate(self.started[:size]):
                if rank not in found and rank not in failed:
                    places |= {pipe: rank, process.sentinel: rank}
            ready = wait(places, left)
            for rank in sorted({places[one] for one in ready}):
                process, pipe = self.started[rank]
                try:
                    done, value = pipe.recv()
                except (EOFError, ConnectionError):
                    process.join()
                    done, value = False, f"died with exit code {process.exitcode}, without a report"
                (found if done else failed)[rank] = value
            if failed:
                end = min(end, time.monotonic() + TOGETHER)
        if failed:
            raise RankError("\n".join(f"rank {rank} of {size}: {text}" for rank, text in failed.items()))
        if len(found) < size:
            raise RankError("\n".join(self.where(rank) for rank in range(size) if rank not in found))
        return [found[rank] for rank in range(size)]

    def stacks(self, rank: int) -> str:
        return os.path.join(self.folder.name, f"stacks-{rank}")

    def where(self, rank: int) -> str:
        """What a rank is doing that has not reported."""
        os.kill(self.started[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)  # the signal's handler writes
        return f"rank {rank} has not reported in {self.patience:g} s:\n{Path(self.stacks(rank)).read_text()}"

    def stop(self) -> None:
        for process, _ in self.started:
            process.kill()
        for process, pipe in self.started:
            process.join()
            pipe.close()
        self.started = []
