"""Processes of a group, which run functions of test files: whole tests, or what a test with the fixture `ranks` gives them.

    @on_ranks(4)
    def test_sum(rank): ...

    def test_sums(ranks):
        ranks.run(4, _sum, 2)  # _sum(rank, 2)

They are forked once from a process that has imported torch, and each function gets a fresh process group. A rank that raises or
dies ends the others, and its error is the test's.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import inspect
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
from torch.distributed.device_mesh import init_device_mesh

IMPORTED = ["torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "ckptkern"]
COLLECTIVE = timedelta(minutes=10)  # longer than anyone waits for a rank
TOGETHER = 0.5  # seconds in which others fail because one has gone


class RankError(AssertionError):
    """The errors of the ranks that failed first."""


def on_ranks(size: int = 2, mesh: str | None = None, backend: str = "gloo") -> Callable:
    """Makes a test of a function that each rank runs with its rank, or with a mesh whose dimension has this name, and with the
    test's parameters. size: of the group, unless the test has a parameter n."""

    def decorate(function: Callable) -> Callable:
        def test(ranks: Ranks, **arguments: Any) -> None:
            __tracebackhide__ = True
            ranks.run(arguments.get("n", size), test, mesh, arguments, backend=backend)

        first, *others = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature([first.replace(name="ranks"), *others])
        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        test.on_rank = function
        return test

    return decorate


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
            function = _load(file, name, loaded)
            if hasattr(function, "on_rank"):
                mesh, options = arguments
                first = rank if mesh is None else init_device_mesh("cpu", (size,), mesh_dim_names=(mesh,))
                function = functools.partial(function.on_rank, first, **options)
            else:
                function = functools.partial(function, rank, *arguments)
            pipe.send((True, function()))
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
        self.start(size, function, arguments, backend)
        try:
            return self.results(size)
        except BaseException:
            self.stop()
            raise

    def errors(self, size: int, function: Callable, *arguments, lost: int, code: int | None) -> dict[int, str]:
        """The errors of all ranks but `lost`, where function(rank, *arguments) ends that rank with this exit code, or lets it
        hang if that is None. Then ends all processes.

        Raises RankError for another rank that returns, for one that has not reported after `patience` seconds, and for a lost
        rank with another fate.
        """
        __tracebackhide__ = True
        self.start(size, function, arguments, "gloo")
        process = self.started[lost][0]
        try:
            results, failed = self.reports(size, lost)
            if results:
                raise RankError(
                    f"rank {lost} of {size} was to be lost, and others return without an error: {sorted(results)}"
                )
            if len(failed) < size - 1:
                raise RankError("\n".join(self.where(rank) for rank in range(size) if rank not in {lost, *failed}))
            if code is not None:
                process.join(self.patience)
            if process.exitcode != code:
                raise RankError(f"rank {lost} of {size} was to end with {code}, and has {process.exitcode}")
            return failed
        finally:
            self.stop()

    def start(self, size: int, function: Callable, arguments: tuple, backend: str) -> None:
        """Has each rank begin, in a process that is started if there is none."""
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
        file = getattr(function, "on_rank", function).__globals__["__file__"]
        for _, pipe in self.started[:size]:
            pipe.send((file, function.__name__, arguments, size, store, backend))

    def results(self, size: int) -> list[Any]:
        __tracebackhide__ = True
        results, failed = self.reports(size)
        if failed:
            raise RankError("\n".join(f"rank {rank} of {size}: {text}" for rank, text in failed.items()))
        if len(results) < size:
            raise RankError("\n".join(self.where(rank) for rank in range(size) if rank not in results))
        return [results[rank] for rank in range(size)]

    def reports(self, size: int, lost: int | None = None) -> tuple[dict[int, Any], dict[int, str]]:
        """(what ranks returned, their errors) when all but `lost` have reported, or none will for want of patience. If none is
        lost, an error gives the others half a second."""
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        end = time.monotonic() + self.patience
        while left := {*range(size)} - {lost, *results, *failed}:
            if (seconds := end - time.monotonic()) <= 0:
                break
            places = {
                handle: rank for rank in left for handle in (self.started[rank][1], self.started[rank][0].sentinel)
            }
            for rank in sorted({places[handle] for handle in wait(places, seconds)}):
                process, pipe = self.started[rank]
                try:
                    done, value = pipe.recv()
                except (EOFError, ConnectionError):
                    process.join()
                    done, value = False, f"died with exit code {process.exitcode}, without a report"
                (results if done else failed)[rank] = value
            if failed and lost is None:
                end = min(end, time.monotonic() + TOGETHER)
        return results, failed

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
