"""Comparisons of results and gradients, layouts of tensors, and what watches the ops that run."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ckptkern import eager, state

MODES = ("none", "selective", "full")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = {name: activation.act for name, activation in eager.ACTIVATIONS.items()}
SEED = 17
P = 0.3

Tensors = dict[str, Tensor]


def expected_mask(p: float, rows: int, cols: int, seed: int = SEED, device: torch.device | str = "cpu") -> Tensor:
    """The mask of the first draw after torch.manual_seed(seed), whose definition tests/test_state.py tests."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=device)
    return state.keep_mask(drawn, p, rows, cols)


def seeded(function: Callable[[Tensors], Tensor]) -> Callable[[Tensors], Tensor]:
    """function, drawing the masks of `fused`."""

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
    """{"y": y, name: gradient of <dy, y>} for the tensors that need one; dy is random unless given."""
    y = function(tensors)
    wanted = {name: t for name, t in tensors.items() if t.requires_grad}
    assert y.requires_grad == bool(wanted)
    if wanted:
        y.backward(output_gradient(y) if dy is None else dy)
    grads = {name: t.grad for name, t in wanted.items()}
    for t in wanted.values():
        t.grad = None
    return {"y": y.detach(), **grads}


def assert_same(ours: Tensors, theirs: Tensors, sums: str = "") -> None:
    """Bit for bit, dtypes included; `sums`, a regular expression of names, once compiled, up to the order of float32 sums."""
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype, name
        if sums and re.fullmatch(sums, name) and not triton.knobs.runtime.interpret:
            torch.testing.assert_close(ours[name], theirs[name])
            continue
        assert torch.equal(ours[name], theirs[name]), f"{name}: {(ours[name] - theirs[name]).abs().max()}"


def assert_same_within_rounding(ours: Tensors, theirs: Tensors) -> None:
    """Two thirds of the digits of each tensor's norm agree, or the difference is rounding of the largest tensor.

    Use it for two ways to one result, if a library may sum their matmuls in another order because operands have another
    layout, size or offset. Rounding grows with the length of the sums to some ten units in the last place, and to more in a
    single element of a sum that cancels, so norms are compared. A value read from the wrong place is an error of order one.
    The gradient of a key's bias, or of a key that is the only one seen, is nothing but rounding of the larger gradients.
    """
    assert ours.keys() == theirs.keys()
    largest = max((torch.linalg.vector_norm(t.double()).item() for t in theirs.values()), default=0.0)
    for name, reference in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (reference.dtype, reference.shape), name
        assert reference.dtype.itemsize >= 4, "16-bit results are compared by assert_as_exact"
        eps = torch.finfo(reference.dtype).eps
        difference = torch.linalg.vector_norm(ours[name].double() - reference.double()).item()
        norm = torch.linalg.vector_norm(reference.double()).item()
        assert difference <= max(eps ** (2 / 3) * norm, 16 * eps * largest), f"{name}: {difference:.3g} of {norm:.3g}"


def assert_as_exact(ours: Tensors, eager: Tensors, exact: Tensors) -> None:
    """Error of each tensor against float64 at most twice eager PyTorch's own, plus half an ulp of the result's norm.

    Rounding the result once may cost half an ulp even if PyTorch happens to be exact.
    """
    assert ours.keys() == eager.keys() == exact.keys()
    for name, reference in exact.items():
        assert ours[name] is not None, f"{name} has no gradient"
        assert (ours[name].dtype, ours[name].shape) == (eager[name].dtype, reference.shape), name
        error = torch.linalg.vector_norm(ours[name].double() - reference).item()
        eager_error = torch.linalg.vector_norm(eager[name].double() - reference).item()
        half_ulp = torch.finfo(eager[name].dtype).eps / 2 * torch.linalg.vector_norm(reference).item()
        assert error <= 2 * eager_error + half_ulp, f"{name}: error {error:.3g}, PyTorch's own is {eager_error:.3g}"


SAMPLES = 12


def over_samples(
    ours: Callable[[Tensors], Tensor],
    unfused: Callable[[Tensors], Tensor],
    samples: Sequence[Tensors],
    dy: Tensor | None = None,
) -> tuple:
    """(ours, eager, exact) of `assert_as_exact`: outputs and gradients of every draw of the inputs, stacked.

    The norm of an error is then its root mean square. Where sums of few rows cancel, the error of one draw is chance: for
    the attention blocks in float32 it is up to 4.5 times PyTorch's, but over twelve samples at most 1.8 times.
    """

    def stacked(function: Callable[[Tensors], Tensor], dtype: torch.dtype | None = None) -> Tensors:
        sent = dy if dy is None or dtype is None else dy.to(dtype)
        # not a clone if the dtype stays: a clone may have other strides
        results = [gradients(function, clone(t, dtype) if dtype else t, sent) for t in samples]
        assert all(t is not None for result in results for t in result.values()), "a gradient is missing"
        return {name: torch.stack([result[name] for result in results]) for name in results[0]}

    return stacked(ours), stacked(unfused), stacked(unfused, torch.float64)


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
    """The rule of `assert_as_exact` for two functions of `tensors`; if one draw of the inputs misses it, twelve decide.

    For one draw the ratio is partly chance and depends on the processor's library: where a result is a single number,
    PyTorch is sometimes exact. A wrong function is wrong in all samples.
    """
    try:
        assert_as_exact(*over_samples(ours, unfused, [tensors], dy))
    except AssertionError:
        samples = [tensors, *(resampled(tensors, seed) for seed in range(1, SAMPLES))]
        assert_as_exact(*over_samples(ours, unfused, samples, dy))


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
    around = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))
    around[..., ::2] = t
    return around[..., ::2]


_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_FACTORS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::matmul": (0, 1),
    "aten::linear": (0, 1),
}
_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
# op -> matmuls [Sq, D] x [D, Sk] per head, and q's place among the arguments
_CORES = {_FLASH: (2, 0), f"{_FLASH}_backward": (5, 1)}
_OTHER_PRODUCTS = {"aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot", "aten::convolution"}


class Watch(TorchDispatchMode):
    """Sees the aten ops that run, also those inside the bodies of ckptkern's ops.

    flops       multiply-adds times two of all matmuls
    registered  the same, by the formulas registered for ckptkern's ops and, outside of them, for aten's
    dtypes      (left, right) of every matmul, in order
    strings     every string argument of ckptkern's ops, in order: modes, activations, ...
    """

    def __init__(self):
        super().__init__()
        self.flops, self.registered, self.dtypes, self.strings = 0, 0, [], []
        self.depth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "ckptkern":
            self.strings += [one for arg in args if isinstance(arg, list) for one in arg if isinstance(one, str)]
            self.depth += 1
            with self:
                out = func.redispatch(_CPU, *args, **kwargs)
            self.depth -= 1
            if func._overloadpacket in flop_registry:
                self.registered += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            return out
        name = func._schema.name
        assert name not in _OTHER_PRODUCTS, name
        if name in _FACTORS:
            left, right = (args[i] for i in _FACTORS[name])
            right = right.t() if name == "aten::linear" else right
            flops = 2 * left.numel() * right.shape[-1]
        elif name in _CORES:
            matmuls, at = _CORES[name]
            left, right = args[at], args[at + 1]
            flops = matmuls * 2 * left.numel() * right.shape[-2]
        if name in _FACTORS or name in _CORES:
            self.flops += flops
            self.registered += 0 if self.depth else flops
            self.dtypes.append((left.dtype, right.dtype))
        return func(*args, **kwargs)


def with_copies(monkeypatch: pytest.MonkeyPatch, copies: bool) -> None:
    """Lets a CPU multiply every 16-bit type through float32 copies, or none, whatever this processor multiplies."""
    for module in ("eager.linear", "ops.registration.gradients"):
        monkeypatch.setattr(sys.modules[f"ckptkern.{module}"], "upcasts", lambda dtype: copies and dtype.itemsize == 2)


def live_tensors() -> int:
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


def assert_flat_memory(call, tensors: dict[str, torch.Tensor], name: str, steps: int = 47) -> None:
    """With the garbage collector off, steps leave no tensor behind, and dropping a graph frees its output and input `name`."""

    def forward():
        x = tensors[name] * 1
        return x, call({**tensors, name: x})

    def step():
        x, y = forward()
        y.square().mean().backward()
        return weakref.ref(x), weakref.ref(y)

    gc.disable()
    gc.freeze()  # what is there already is not looked through, and counted, again and again
    try:
        for _ in range(3):
            step()
        before = live_tensors()
        for _ in range(steps):
            dead = step()
        assert live_tensors() == before
        assert [ref() for ref in dead] == [None, None]
        dropped = weakref.ref(forward()[1])
        assert dropped() is None
    finally:
        gc.unfreeze()
        gc.enable()


def through_export(call: Callable[[Tensors], Tensor], tensors: Tensors) -> Tensors:
    """`gradients` of a graph made by torch.export, which calls the bare ops; seeded."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            rest = {
                name.replace(".", "-"): t for name, t in tensors.items() if name != "x"
            }  # torch splits names at dots
            self.rest = torch.nn.ParameterDict(rest)

        def forward(self, x: Tensor) -> Tensor:
            return call({"x": x, **{name.replace("-", "."): t for name, t in self.rest.items()}})

    exported = torch.export.export(Module(), (tensors["x"],)).module()
    leaves = {"x": clone(tensors)["x"]}
    rest = {name.removeprefix("rest."): parameter for name, parameter in exported.named_parameters()}
    leaves |= {name.replace("-", "."): parameter for name, parameter in rest.items()}

    def run(leaves: Tensors) -> Tensor:
        torch.manual_seed(SEED)
        return exported(leaves["x"])

    return gradients(run, leaves)
