"""The launchers of ckptkern.triton_kernels as a table, and the two rules by which their results are checked.

A launcher has the arguments and results of the function of the same name in `ckptkern.eager`, so one description covers
three calls: the kernel, eager PyTorch in the same dtype, and eager PyTorch in float64 as the exact result.
"""

from __future__ import annotations

from collections.abc import Container
from types import ModuleType

import torch
import triton
from torch import Tensor

from benchmarks.codegen.launchers import LAUNCHERS, Launcher
from ckptkern import eager, state, triton_kernels

ACTIVATIONS = tuple(eager.ACTIVATIONS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# For what does not depend on the activation: one per set of saved tensors, in bf16, whose rounding shows most.
ACTIVATIONS_AND_DTYPES = [
    (activation, dtype)
    for dtype in DTYPES
    for activation in (("relu", "gelu", "identity") if dtype is torch.bfloat16 else ("relu", "gelu"))
]
STATE = (-0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321)  # signed 64-bit words with every 16-bit piece in use
UNALIGNED = {"M": 37, "K": 45, "N": 41, "D": 35}  # two interpreter tiles each way, and none full

# launcher -> its row of ckptkern.triton_kernels.tile.TILES
TILE_NAMES = {launcher.name: launcher.tiles for launcher in LAUNCHERS.values() if launcher.matmul}

MATMULS = [launcher for launcher in LAUNCHERS.values() if launcher.matmul]
DROPPING = [launcher for launcher in LAUNCHERS.values() if launcher.dropout]


def inputs_of(launcher: Launcher, dtype: torch.dtype, device: str = "cpu", bias: bool = True, **sizes: int) -> dict:
    """Normal inputs; weights scaled so that every matmul has entries of size 1."""
    sizes = UNALIGNED | sizes
    tensors = {}
    for name, letters in launcher.inputs.items():
        shape = [sizes[letter] for letter in letters]
        tensor = torch.randn(shape)
        if name.startswith("w"):
            tensor /= max(sizes[letters.replace("N", "")], 1) ** 0.5
        tensors[name] = tensor.to(device, dtype)
    if not bias:
        tensors |= dict.fromkeys(launcher.biases)
    return tensors


def far_apart(x: Tensor) -> Tensor:
    """x with its last row beyond element 2**31. A CPU maps memory where it is touched: a page a row; a GPU, all of it."""
    (rows, *rest), inner = x.shape, x.stride()[1:]
    stride = 2**31 // (rows - 1) + 16
    storage = torch.UntypedStorage(((rows - 1) * stride + x[0].numel()) * x.element_size(), device=x.device)
    return x.new_empty(0).set_(storage, 0, (rows, *rest), (stride, *inner)).copy_(x)


def dropout_of(p: float, device: str = "cpu", col_base: int = 0) -> tuple[Tensor, int, float, int]:
    return torch.tensor(STATE, device=device), *state.threshold_scale(p), col_base


def call(launcher: Launcher, backend: ModuleType, tensors: dict, activation: str, **options) -> dict[str, Tensor]:
    """Every output by name."""
    options = dict.fromkeys(launcher.wants, True) | options
    precision = ("ieee",) if launcher.matmul else ()
    results = getattr(backend, launcher.name)(*tensors.values(), activation, *precision, **options)
    results = results if isinstance(results, tuple) else (results,)
    return {name: result for name, result in zip(launcher.outputs, results, strict=True) if result is not None}


def kernel(launcher: Launcher, tensors: dict, activation: str, **options) -> dict[str, Tensor]:
    return call(launcher, triton_kernels, tensors, activation, **options)


def exact(launcher: Launcher, tensors: dict, activation: str, **options) -> dict[str, Tensor]:
    wide = {name: None if t is None else t.double() for name, t in tensors.items()}
    return call(launcher, eager, wide, activation, **options)


EPS = torch.finfo(torch.float32).eps
# Sums over rows: partial sums of a tile are added up, so that the tile's height, which compiled launches of other alignment or
# another kernel choose otherwise, decides their last bits.
SUMS_OF_ROWS = {"db", "dbg", "dbu", "dweight", "dbias"}


def error(value: Tensor, reference: Tensor, unit: float = 1.0) -> float:
    """|value - reference| / |reference| in the Frobenius norm, or / unit if the reference is zero up to rounding."""
    reference = reference.double()
    norm = reference.norm().item()
    return (value.double() - reference).norm().item() / (norm if norm > EPS * unit else unit)


def assert_accurate(ours: dict, eagers: dict, references: dict, slack: float = EPS) -> None:
    """The tolerance of twice eager's error: our error against float64 is at most twice eager PyTorch's own in the same dtype.

    One float32 rounding is allowed in addition, for results in which eager happens to be exact. A result that is zero only
    because larger terms cancel (dq of a row that sees a single column) carries their rounding, so its error is measured
    against the largest result.
    """
    assert ours.keys() == eagers.keys() == references.keys()
    norms = [one.double().norm().item() for one in references.values() if one.is_floating_point()]
    unit = max(norms, default=0.0) or 1.0
    for name, value in ours.items():
        assert value.dtype == eagers[name].dtype, name
        assert value.shape == references[name].shape, name
        if value.dtype == torch.uint8:
            continue  # bits of z: compared exactly, where z itself is at hand
        ours_error, eagers_error = (error(one, references[name], unit) for one in (value, eagers[name]))
        assert ours_error <= 2 * eagers_error + slack, (
            f"{name}: error {ours_error:.3g}, eager's own is {eagers_error:.3g}"
        )


def assert_equal(ours: dict, others: dict, sums: Container[str] = ()) -> None:
    """Equal bits (0 and -0 apart), NaN equal to NaN; of `sums`, once compiled, what the order of float32 sums leaves equal."""
    assert ours.keys() == others.keys()
    interpreted = triton.knobs.runtime.interpret
    for name, value in ours.items():
        exact = {} if name in sums and not interpreted else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(
            value, others[name], **exact, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
