"""Comparisons of results and gradients, layouts of tensors, and what watches the ops that run."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import triton
from support.masks import keep_mask
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

MODES = ("none", "selective", "full")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = 17
P = 0.3

Tensors = dict[str, Tensor]
each_backend = pytest.mark.parametrize("backend", ["eager", "triton"])


def expected_mask(p: float, rows: int, cols: int, seed: int = SEED, device: torch.device | str = "cpu") -> Tensor:
    """The mask of the first draw after torch.manual_seed(seed), whose definition tests/test_state.py tests."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=device)
    return keep_mask(drawn, p, rows, cols)


def seeded(function: Callable[[Tensors], Tensor]) -> Callable[[Tensors], Tensor]:
    """Returns `function` with one seed for the masks of all calls."""

    def run(tensors: Tensors) -> Tensor:
        torch.manual_seed(SEED)
        return function(tensors)

    return run


def clone(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """New leaves with the same values, strides and requires_grad."""
    return {
        name: t.detach().to(dtype, copy=True, memory_format=torch.preserve_format).requires_grad_(t.requires_grad)
        for name, t in tensors.items()
    }


def output_gradient(y: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)


def gradients(function: Callable[[Tensors], Tensor], tensors: Tensors, dy: Tensor | None = None) -> Tensors:
    """{"y": y, name: gradient of <dy, y>} for the tensors that need one, zeros where y does not depend on it; dy is random
    unless given."""
    y = function(tensors)
    wanted = [name for name, t in tensors.items() if t.requires_grad]
    assert y.requires_grad == bool(wanted)
    if wanted:
        y.backward(output_gradient(y) if dy is None else dy)
    results = {"y": y.detach()}
    for name in wanted:
        t = tensors[name]
        results[name], t.grad = torch.zeros_like(t) if t.grad is None else t.grad, None
    return results


def checkpointed(function: Callable[[Tensors], Tensor], wrap: Callable) -> Callable[[Tensors], Tensor]:
    """function inside an activation checkpoint, wrap(function of values, *values)."""
    return lambda tensors: wrap(lambda *values: function(dict(zip(tensors, values, strict=True))), *tensors.values())


# -- comparisons -------------------------------------------------------------------------------------------------------


def compared(ours: Tensors, theirs: Tensors, case: object, than: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields (name, our tensor, the other) of tensors with the same names, dtypes and shapes."""
    assert ours.keys() == theirs.keys(), f"{case}: {list(ours)} but {than}: {list(theirs)}"
    for name, other in theirs.items():
        kinds = [(tensor.dtype, tensor.shape) for tensor in (ours[name], other)]
        assert kinds[0] == kinds[1], f"{case}: {name} is {kinds[0]}, but of {than} {kinds[1]}"
        yield name, ours[name], other


def assert_same(ours: Tensors, theirs: Tensors, case: object = "ours", than: str = "theirs", sums: str = "") -> None:
    """Bit for bit, dtypes included; `sums`, a regular expression of names, once compiled, up to the order of float32 sums."""
    for name, mine, other in compared(ours, theirs, case, than):
        summed = sums and re.fullmatch(sums, name) and not triton.knobs.runtime.interpret
        message = functools.partial("{}: {} has other bits than that of {}: {}".format, case, name, than)
        torch.testing.assert_close(mine, other, **({} if summed else {"rtol": 0, "atol": 0}), msg=message)


def norm(t: Tensor) -> float:
    return torch.linalg.vector_norm(t.double()).item()


def assert_same_within_rounding(ours: Tensors, theirs: Tensors, case: object = "ours", than: str = "theirs") -> None:
    """Two thirds of the digits of each tensor's norm agree, or the difference is rounding of the largest tensor.

    Use it for two ways to one result, if a library may sum their matmuls in another order because operands have another
    layout, size or offset. Rounding grows with the length of the sums to some ten units in the last place, and to more in a
    single element of a sum that cancels, so norms are compared. A value read from the wrong place is an error of order one.
    The gradient of a key's bias, or of a key that is the only one seen, is nothing but rounding of the larger gradients.
    """
    largest = max(map(norm, theirs.values()), default=0.0)
    for name, mine, other in compared(ours, theirs, case, than):
        eps = torch.finfo(other.dtype).eps if other.is_floating_point() else 0.0
        difference, size = norm(mine.double() - other), norm(other)
        allowed = max(eps ** (2 / 3) * size, 16 * eps * largest)
        assert difference <= allowed, (
            f"{case}: {name} differs from that of {than} by {difference:.3g}, at a norm of {size:.3g}; rounding explains "
            f"{allowed:.3g}"
        )


def assert_as_exact(ours: Tensors, eager: Tensors, exact: Tensors) -> None:
    """Error of each tensor against float64 at most twice eager PyTorch's own, plus half an ulp of the result's norm.

    Rounding the result once may cost half an ulp even if PyTorch happens to be exact.
    """
    assert ours.keys() == exact.keys()
    for name, mine, other in compared(ours, eager, "ours", "PyTorch"):
        error, eager_error = (norm(tensor.double() - exact[name]) for tensor in (mine, other))
        half_ulp = torch.finfo(other.dtype).eps / 2 * norm(exact[name])
        assert error <= 2 * eager_error + half_ulp, f"{name}: error {error:.3g}, PyTorch's own is {eager_error:.3g}"


SAMPLES = 12


def resampled(tensors: Tensors, seed: int) -> Tensors:
    """Other values of the same shapes, requires_grad and root mean squares; dense strides stay."""
    generator = torch.Generator().manual_seed(seed)
    fresh = clone(tensors)
    with torch.no_grad():
        for t in fresh.values():
            t.copy_(torch.randn(t.shape, generator=generator, dtype=torch.float64) * t.double().square().mean().sqrt())
    return fresh


def check_exactness(
    ours: Callable[[Tensors], Tensor], unfused: Callable[[Tensors], Tensor], tensors: Tensors, dy: Tensor | None = None
) -> None:
    """The rule of `assert_as_exact` for two functions of `tensors`; if one draw of the inputs misses it, twelve decide, whose
    outputs and gradients are stacked, so that the norm of an error is its root mean square.

    For one draw the ratio is partly chance and depends on the processor's library: where a result is a single number,
    PyTorch is sometimes exact, and where sums of few rows cancel, as in attention blocks in float32, the error is up to 4.5
    times PyTorch's, but over twelve samples at most 1.8 times. A wrong function is wrong in all samples.
    """

    def stacked(function: Callable, samples: Sequence[Tensors], dtype: torch.dtype | None = None) -> Tensors:
        sent = dy if dy is None or dtype is None else dy.to(dtype)
        # not a clone if the dtype stays: a clone may have other strides
        results = [gradients(function, clone(t, dtype) if dtype else t, sent) for t in samples]
        return {name: torch.stack([result[name] for result in results]) for name in results[0]}

    def compare(*samples: Tensors) -> None:
        assert_as_exact(stacked(ours, samples), stacked(unfused, samples), stacked(unfused, samples, torch.float64))

    try:
        compare(tensors)
    except AssertionError:
        compare(tensors, *(resampled(tensors, seed) for seed in range(1, SAMPLES)))


@contextlib.contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """In deterministic mode torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# -- layouts -----------------------------------------------------------------------------------------------------------


def whole_numbers(tensors: Tensors) -> Tensors:
    """The tensors' values rounded to -2 ... 2: their sums and matmuls are exact, in whatever order a library adds."""
    return {name: t.detach().mul(2).round().clamp(-2, 2).requires_grad_(t.requires_grad) for name, t in tensors.items()}


def transposed(t: Tensor) -> Tensor:
    """t with the strides of its transpose."""
    return t.mT.contiguous().mT if t.dim() > 1 else t


def padded_rows(t: Tensor) -> Tensor:
    """t with rows 7 elements apart more than they are long, starting at an odd address."""
    around = t.new_full((*t.shape[:-1], t.shape[-1] + 7), float("nan"))
    around[..., 3:-4] = t
    return around[..., 3:-4]


def every_other(t: Tensor) -> Tensor:
    """t with strides of 2."""
    return torch.stack((t, torch.full_like(t, float("nan") if t.is_floating_point() else 9)), -1)[..., 0]


# -- what runs ---------------------------------------------------------------------------------------------------------

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
# op -> matmuls, for attention of each head; the left operand's place among the arguments; the right one's dimension that is
# the result's
_MATMULS = {
    "aten::mm": (1, 0, -1), "aten::matmul": (1, 0, -1), "aten::linear": (1, 0, -2), "aten::addmm": (1, 1, -1),
    "aten::addmm_": (1, 1, -1), _FLASH: (2, 0, -2), f"{_FLASH}_backward": (5, 1, -2),
}  # fmt: skip
_COPIES = {"aten::_to_copy": 0, "aten::copy_": 1}  # the place of the source among the arguments
_OTHER_PRODUCTS = {"aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot", "aten::convolution"}


class Watch(TorchDispatchMode):
    """Sees the aten ops that run, also those inside the bodies of ckptkern's ops.

    flops       multiply-adds times two of all matmuls
    registered  the same, by the formulas registered for ckptkern's ops and, outside of them, for aten's
    dtypes      (left, right) of every matmul, in order
    strings     every string argument of ckptkern's ops, in order: modes, activations, ...
    casts       how often the memory at an address is copied to another dtype
    """

    def __init__(self):
        super().__init__()
        self.flops, self.registered, self.dtypes, self.strings, self.casts = 0, 0, [], [], Counter()
        self.depth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "ckptkern":
            self.strings += [
                string for arg in args if isinstance(arg, list) for string in arg if isinstance(string, str)
            ]
            self.depth += 1
            with self:
                out = func.redispatch(_CPU, *args, **kwargs)
            self.depth -= 1
            if func._overloadpacket in flop_registry:
                self.registered += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            return out
        name = func._schema.name
        assert name not in _OTHER_PRODUCTS, name
        if name in _MATMULS:
            matmuls, at, dim = _MATMULS[name]
            left, right = args[at : at + 2]
            flops = matmuls * 2 * left.numel() * right.shape[dim]
            self.flops += flops
            self.registered += 0 if self.depth else flops
            self.dtypes.append((left.dtype, right.dtype))
        out = func(*args, **kwargs)
        if name in _COPIES:
            source = args[_COPIES[name]]
            self.casts[source.data_ptr()] += out.dtype != source.dtype
        return out


class NoSync(Watch):
    """Raises where a value, or a shape that depends on values, would have to come from the device."""

    SYNCS = ("item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name.removeprefix("aten::") not in self.SYNCS, func
        if func is torch.ops.aten.index.Tensor:
            assert not any(tensor is not None and tensor.dtype == torch.bool for tensor in args[1])
        return super().__torch_dispatch__(func, types, args, kwargs)


def with_copies(monkeypatch: pytest.MonkeyPatch, copies: bool) -> None:
    """Lets a CPU multiply every 16-bit type through float32 copies, or none, whatever this processor multiplies."""
    for module in ("eager.linear", "ops.registration.gradients", "ops.mlp.branch"):
        monkeypatch.setattr(sys.modules[f"ckptkern.{module}"], "upcasts", lambda dtype: copies and dtype.itemsize == 2)
