"""The launchers of ckptkern.triton_kernels as a table, and the two rules by which their results are checked.

A launcher has the arguments and results of the function of the same name in `ckptkern.eager`, so one description covers
three calls: the kernel, eager PyTorch in the same dtype, and eager PyTorch in float64 as the exact result. The description is
the code-generation check's: `Small` gives its cases tensors with data, and `Small.again` the same ones once more, in
other dtypes, strides or places.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container
from types import ModuleType

import torch
import triton
from codegen.cases import AttentionCase, Case, Inputs
from codegen.launchers import LAUNCHERS, Launcher
from support import launchers as eager
from support.cases import SAMPLES
from torch import Tensor

from ckptkern import state, triton_kernels

ACTIVATIONS = tuple(eager.ACTIVATIONS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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


def far_apart(x: Tensor, dim: int = 0) -> Tensor:
    """x with the last element of dimension `dim` beyond element 2**31. A CPU maps memory where it is touched, and an offset
    that wraps round in 32 bits lands in zeros before x; a GPU has all of the memory, and none before x."""
    strides, before = list(x.stride()), 0 if x.is_cuda else 2**31
    strides[dim] = 2**31 // (x.shape[dim] - 1) // 16 * 16 + 16
    extent = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)) + 1
    storage = torch.UntypedStorage((before + extent) * x.element_size(), device=x.device)
    return x.new_empty(0).set_(storage, before, x.shape, strides).copy_(x)


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
    norms = [tensor.double().norm().item() for tensor in references.values() if tensor.is_floating_point()]
    unit = max(norms, default=0.0) or 1.0
    for name, value in ours.items():
        assert value.dtype == eagers[name].dtype, name
        assert value.shape == references[name].shape, name
        if value.dtype == torch.uint8:
            continue  # bits of z: compared exactly, where z itself is at hand
        ours_error, eagers_error = (error(tensor, references[name], unit) for tensor in (value, eagers[name]))
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


# -- the cases of the code-generation check on tensors with data ----------------------------------------------------------


class Small(Inputs):
    """Normal numbers, of sizes that take two of a GPU's tiles each way and several steps; `again` gives the same ones."""

    ROWS, FEATURES, HIDDEN = 200, 128, 320
    UNALIGNED = (137, 83, 301, 69)
    SCALAR, SCALAR_UNALIGNED = (72, 64, 96, 64), (73, 41, 109, 34)  # float32 without tensor cores takes long
    BATCH, LENGTH, HEADS = 2, 136, 4
    EXPERTS = 3
    backend, exact, rest = triton_kernels, False, None

    def __init__(self, device: str):
        self.device, self.given = device, []

    def again(
        self, backend: ModuleType, *, exact: bool = False, change: Callable[[Tensor], Tensor] = Tensor.clone
    ) -> Small:
        """Returns the inputs of the next launch: those of the first, in float64 if `exact`, else changed by `change`."""
        other = copy.copy(self)
        other.backend, other.exact, other.change, other.rest = backend, exact, change, iter(self.given)
        return other

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> Tensor:
        values = torch.randn(shape) * scale
        if not dtype.is_floating_point:  # a mask of int8, bits, or classes
            values = values > -0.5 if dtype == torch.int8 else torch.randint(256, shape)
        return self.remember(values.to(self.device, dtype))

    def remember(self, tensor: Tensor) -> Tensor:
        if self.rest is None:
            self.given.append(tensor.clone())
            return tensor
        same = next(self.rest)
        return same.double() if self.exact and same.is_floating_point() else self.change(same)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float64 if self.exact else super().dtype(name)

    def promised(self, result: Tensor) -> Tensor:
        """The part of a result that a launcher promises."""
        return result

    def sizes(self, case: Case) -> dict[str, int]:
        scalar = self.SCALAR_UNALIGNED if case.unaligned else self.SCALAR
        return dict(zip("MKND", scalar, strict=True)) if "ieee" in case.kind else super().sizes(case)

    def dropout(self, wanted: bool) -> tuple:
        seed = self.remember(torch.tensor(STATE, device=self.device))
        return (seed, *state.threshold_scale(0.1), 0) if wanted else eager.NO_DROPOUT

    def lengths(self, batch: int, length: int) -> dict:
        cu = self.remember(torch.tensor([0, length // 3, length][: batch + 1], dtype=torch.int32, device=self.device))
        return {"cu_q": cu, "cu_k": cu, "max_q": length, "max_k": length}

    def groups(self, tokens: int) -> eager.Groups:
        """Expert 1 has no rows."""
        index = 2 * torch.randint(2, (tokens, self.TOP_K), device=self.device)
        *tensors, top_k = eager.route(index, self.EXPERTS)
        return eager.Groups(*map(self.remember, tensors), top_k)

    def statistics(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, core) -> tuple[Tensor, Tensor]:
        """lse and delta: for the kernel always the first ones, for eager PyTorch its own, as exact as it is."""
        _, *own = eager.attn_fwd(q, k, v, core, do=do)
        copies = [self.remember(tensor) for tensor in own]
        return tuple(own if self.backend is eager else copies)


class Tails(Small):
    """Sizes of two of the interpreter's tiles each way, the last of which is not full; one expert in three has no rows."""

    ROWS, FEATURES, HIDDEN = 64, 32, 64
    UNALIGNED = SCALAR_UNALIGNED = (37, 45, 41, 35)
    SCALAR = (64, 32, 64, 32)
    LENGTH, HEADS = 37, 2


def named(results) -> dict[str, Tensor]:
    """Results by their place; for lse 0 where a row sees nothing, and beside it which rows these are."""
    results = results if isinstance(results, tuple) else (results,)
    masked = {}
    for n, result in enumerate(results):
        if result is not None:
            nothing = result == -math.inf
            masked |= {f"{n}": result.masked_fill(nothing, 0), f"{n} of nothing": nothing.to(torch.uint8)}
    return masked


def check_results(results: Callable[[], tuple[dict, dict, dict]], slack: float = EPS) -> dict[str, Tensor]:
    """`assert_accurate` of (ours, eagers, exact), which `results` returns of inputs that it draws; if one draw misses it,
    twelve decide, as in `cases.check_exactness`: a sum that cancels to a single number is sometimes exact in eager PyTorch."""
    first = results()
    try:
        assert_accurate(*first, slack=slack)
    except AssertionError:
        drawn = [first]
        for seed in range(1, SAMPLES):
            torch.manual_seed(seed)
            drawn.append(results())
        stacked = (
            {name: torch.stack([results[name] for results in each]) for name in each[0]}
            for each in zip(*drawn, strict=True)
        )
        assert_accurate(*stacked, slack=slack)
    return first[0]


def check_like_eager(case: Case | AttentionCase, inputs: type[Small], device: str, slack: float = EPS) -> None:
    """`check_results` of a case of the code-generation check, and exactly the rows that see nothing."""

    def results() -> tuple[dict, dict, dict]:
        first = inputs(device)
        launches = first, first.again(eager), first.again(eager, exact=True)
        of_all = [named(case.launch(inputs)) for inputs in launches]
        ours, eagers, exact = ({name: first.promised(tensor) for name, tensor in results.items()} for results in of_all)
        for name in ours:
            assert not name.endswith("nothing") or torch.equal(ours[name], exact[name]), name
        return ours, eagers, exact

    check_results(results, slack)
