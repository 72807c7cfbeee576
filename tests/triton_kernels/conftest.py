"""Kernels are tested on CPU tensors in Triton's interpreter. The same tests run on a GPU under `pytest -m gpu`, and as compiled
for each architecture, on CPU tensors in the emulator, under `--device emulated`."""

from collections.abc import Iterator

import pytest
import torch

ARCHS = (80, 90)


def pytest_configure(config: pytest.Config) -> None:
    # numpy's warnings of what floating point does by design, and what several tests make it do: inf - inf, overflow
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.option.device == "emulated":
        metafunc.fixturenames.append("architecture")
        metafunc.parametrize("architecture", ARCHS, ids="sm_{}".format, indirect=True)


@pytest.fixture(autouse=True)
def architecture(request: pytest.FixtureRequest) -> Iterator[int | None]:
    """What the emulator runs kernels as, or None."""
    arch = getattr(request, "param", None)
    if arch is None:
        yield None
        return
    from emulator.emulated import emulated

    with emulated(arch) as launches:
        yield arch
    ran = [(launch.kernel, arch, launch.counts.ctas, launch.compiled, launch.ran) for launch in launches]
    request.node.user_properties.append(("launches", ran))


@pytest.fixture
def interpreted() -> bool:
    """Are the kernels interpreted, with one small tile each, rather than compiled?"""
    import triton  # not above: this file may be loaded before tests/conftest.py says whether Triton interprets

    return triton.knobs.runtime.interpret


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN (integers: the largest value), so that whatever a kernel fails to write is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def repeats(device):
    """How often a result is computed again: what differs from run to run on a GPU runs in one order elsewhere.

    Triton 3.6 puts no proxy fence between cp.async and wgmma (triton#9610); what that costs, if anything, is rare.
    """
    return 100 if device == "cuda" else 1
