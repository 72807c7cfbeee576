"""Kernels are tested on CPU tensors in Triton's interpreter, and the same tests run on a GPU under `pytest -m gpu`."""

import os
import signal
from collections.abc import Callable, Iterator

import outside
import pytest
import torch

GATE = "test_shipped_tiles_pass"


def pytest_configure(config: pytest.Config) -> None:
    # numpy's warnings of what floating point does by design, and what several tests make it do: inf - inf, overflow
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name == GATE)  # last: see shipped_gate


@pytest.fixture(scope="session", autouse=True)
def shipped_gate(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], tuple[int, str, str]] | None]:
    """Wait for the compile gate's (status, output, errors). It takes minutes, so it runs beside the other kernel tests, which
    keep one core busy."""
    if all(item.name != GATE for item in request.session.items):
        yield None
        return
    folder = tmp_path_factory.mktemp("gate")
    with open(folder / "out", "w") as out, open(folder / "error", "w") as error:
        process = outside.start("-m", "ckptkern.benchmarks.gate", stdout=out, stderr=error, start_new_session=True)

    def wait() -> tuple[int, str, str]:
        status = process.wait()
        return status, (folder / "out").read_text(), (folder / "error").read_text()

    yield wait
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.wait()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN (integers: the largest value), so that whatever a kernel fails to write is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
