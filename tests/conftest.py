"""Kernels run in Triton's interpreter, except under `pytest -m gpu` on a machine with CUDA and `--device emulated`."""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support import gpu_runs
from support.outside import ROOT, TRITON_CACHE

if TYPE_CHECKING:
    from support.ranks import Ranks

sys.path.append(
    str(ROOT)
)  # benchmarks.gpu and others that are not installed; last, so that an installed ckptkern is tested


STARTED = pytest.StashKey[float]()
ALL = pytest.StashKey[bool]()
# seconds each: --quick leaves them out, unless they are named
PROGRAMS = "tests/benchmarks", "tests/examples", "tests/tools"


def cache_without_tables() -> str:
    """Makes a folder for CKPTKERN_CACHE that has the user's extensions and no tuned table, and returns its path."""
    cache = os.environ.get("CKPTKERN_CACHE")
    extensions = Path(
        cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ckptkern"), "extension"
    )
    folder = tempfile.mkdtemp(prefix="ckptkern-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.symlink(extensions.resolve(), Path(folder, "extension"))
    return folder


def runs_all(config: pytest.Config) -> bool:
    """Returns whether the tests marked `long` run too: with --all or --device emulated, on a GPU, and named by their ids."""
    named = any("::" in str(argument) for argument in config.args) or "long" in config.option.markexpr
    return config.option.all or named or gpu_runs.is_gpu_run(config) or config.option.device == "emulated"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="only the first case of every test function that is not marked `slow` or `long`",
    )
    parser.addoption("--all", action="store_true", help="the tests marked `long` too, as `make test-all` runs them")
    parser.addoption("--sample", action="store_true", help="of the default tiles, what CI runs on the emulator")
    parser.addoption(
        "--device",
        choices=("interpreted", "emulated"),
        default="interpreted",
        help="what runs the kernels of tests/triton_kernels on a CPU: Triton's interpreter (default), or the emulator of "
        "their compiled code, on each architecture",
    )
    parser.addoption(
        "--results",
        type=Path,
        metavar="FILE.csv",
        help="of a run with -m gpu or --counterparts: a row after a test; a test that passed in the file is left out",
    )
    parser.addoption("--counterparts", action="store_true", help="only the CPU counterparts of the tests marked gpu")
    parser.addoption(
        "--without-counterpart", action="store_true", help="with -m gpu: only the tests that have no CPU counterpart"
    )
    parser.addoption(
        "--list-gpu", action="store_true", help="print the tests marked gpu with their CPU counterparts, and run none"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Decoration decides whether a kernel is interpreted or compiled, Triton's own too, so this comes before every import.
    assert "triton" not in sys.modules, "a conftest.py or a plugin has imported triton"
    on_gpu = config.option.markexpr == "gpu" and torch.cuda.is_available()
    if config.option.device == "emulated":
        os.environ["TRITON_INTERPRET"] = "0"
        os.environ.setdefault("TRITON_CACHE_DIR", TRITON_CACHE)
    elif not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
        if importlib.util.find_spec("triton"):
            from support.interpreter import check_masks, quicken

            quicken()
            check_masks()
    os.environ["CKPTKERN_CACHE"] = cache_without_tables()
    os.environ["HF_HUB_OFFLINE"] = "1"  # bitsandbytes fetches a kernel for some CPUs where `kernels` is installed
    # Test tensors are small: on busy cores, waiting for a second OpenMP thread takes longer than the work.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Inductor's C++ is compiled without vectors: it would try each of the processor's kinds in a process, 9 s in every run.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    results, worker = config.option.results, getattr(config, "workerinput", None)
    config.stash[ALL] = runs_all(config) if worker is None else worker["all"]
    if worker is None:
        config.stash[gpu_runs.PASSED] = gpu_runs.passed_in(results) if results else frozenset()
        if results:
            config.pluginmanager.register(gpu_runs.Results(config, results))
    else:
        config.stash[gpu_runs.PASSED] = frozenset(worker["passed"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """pytest-xdist's: all workers leave out the same tests, also one that starts later in place of another."""
    node.workerinput["passed"] = [*node.config.stash[gpu_runs.PASSED]]
    node.workerinput["all"] = node.config.stash[ALL]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    place = collection_path.as_posix().removeprefix(f"{ROOT.as_posix()}/")
    if config.option.quick and place in PROGRAMS and not any(place in str(named) for named in config.args):
        return True
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return (
        True if is_test and gpu_runs.is_gpu_run(config) and not gpu_runs.may_have_gpu_tests(collection_path) else None
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.list_gpu:
        pytest.exit("\n".join(["", *gpu_runs.listed(items)]), returncode=0)
    gpu_run = gpu_runs.is_gpu_run(config)
    if gpu_run:
        chosen = gpu_runs.chosen(items, config, config.stash[gpu_runs.PASSED])
        config.hook.pytest_deselected(items=list({*items} - {*chosen}))
        items[:] = chosen
    if config.option.quick:
        fast = [item for item in items if not {"slow", "long"} & {*item.keywords}]
        first = {item.nodeid.partition("[")[0]: item for item in reversed(fast)}
        left_out = {*items} - {*first.values()}
    else:
        left_out = set() if config.stash[ALL] else {item for item in items if "long" in item.keywords}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    if not gpu_run:
        items.sort(
            key=lambda item: not {"slow", "long"} & {*item.keywords}
        )  # first: the others fill the other cores meanwhile
    if not torch.cuda.is_available():
        reason = "needs a CUDA device"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        reason = "this run interprets the kernels: use pytest -m gpu"
    else:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the CPU time of a long run, by folder and of the slowest tests, and what the emulator ran."""
    reports = [
        report
        for outcomes in terminalreporter.stats.values()
        for report in outcomes
        if getattr(report, "when", "") == "teardown"
    ]
    seconds = {report.nodeid: dict(report.user_properties).get("cpu", 0.0) for report in reports}
    if sum(seconds.values()) > 60:
        folders: dict[str, float] = {}
        for test, spent in seconds.items():
            folder = os.path.dirname(test.partition("::")[0])
            folders[folder] = folders.get(folder, 0.0) + spent
        terminalreporter.section(f"{sum(seconds.values()):.0f} CPU seconds")
        for rows in (folders, dict(sorted(seconds.items(), key=lambda row: row[1])[:-11:-1])):
            for name, spent in sorted(rows.items(), key=lambda row: -row[1]):
                terminalreporter.write_line(f"{spent:7.0f}  {name}")
    emulated_summary(terminalreporter)


def emulated_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what the emulator ran, by kernel and architecture."""
    totals: dict[tuple[str, int], list[float]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, launches in getattr(report, "user_properties", ()):
                if name == "launches" and report.when == "teardown":
                    for kernel, arch, *numbers in launches:
                        total = totals.setdefault((kernel, arch), [0, 0, 0.0, 0.0])
                        for n, number in enumerate((1, *numbers)):
                            total[n] += number
    if totals:
        terminalreporter.section("emulated")
        terminalreporter.write_line(
            f"{'kernel':28} {'':6} {'launches':>9} {'CTAs':>9} {'compiled, s':>12} {'ran, s':>9}"
        )
    for (kernel, arch), (launches, ctas, compiled, ran) in sorted(totals.items()):
        terminalreporter.write_line(f"{kernel:28} sm_{arch:<3} {launches:9} {ctas:9} {compiled:12.1f} {ran:9.1f}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _gives_memory_back() -> Iterator[None]:
    """glibc keeps what recorded steps and traces freed in small pieces: gigabytes in a process that runs all files."""
    yield
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@pytest.fixture(autouse=True)
def _forgets_accelerate() -> Iterator[None]:
    """The precision of a process's first Accelerator is every later one's, and Trainer and Lightning make one too."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For peaks: torch's flash kernel for CPUs allocates a buffer for each thread, which no workspace bounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for the tests of torch.distributed; none is started before it is used."""
    from support.ranks import Ranks

    with Ranks() as ranks:
        yield ranks


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Notes the test's CPU time. After an illegal access nothing runs on the GPU in this process any more: later tests would
    fail without a fault."""
    yield
    item.user_properties.append(("cpu", cpu_seconds() - item.stash[STARTED]))
    if "gpu" not in item.keywords or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # torch.AcceleratorError is one; every path below ends the process or the run
        if hasattr(item.config, "workerinput"):  # pytest-xdist names the test and starts another worker
            os._exit(1)
        pytest.exit(f"the GPU is lost to this process after {item.nodeid}: {error}", returncode=3)
