"""Kernels are tested on CPU tensors in Triton's interpreter, and the same tests run on a GPU under `pytest -m gpu`."""

from collections.abc import Iterator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # numpy's warnings of what floating point does by design, and what several tests make it do: inf - inf, overflow
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


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


@pytest.fixture
def repeats(device):
    """How often a result is computed again: what differs from run to run on a GPU, the interpreter runs in one order."""
    return 9 if device == "cuda" else 1
