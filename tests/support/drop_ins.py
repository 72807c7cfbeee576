"""Modules beside the torch modules that they replace: pairwise options, equal parameters, outputs and gradients
compared in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ckptkern

E, H, HIDDEN, B, T, S = 12, 3, 20, 2, 5, 7  # width, heads, hidden width, samples, tokens, tokens of a memory


def pairwise(valid: Callable[[dict[str, Any]], bool] = lambda case: True, **factors: Sequence[Any]) -> list:
    """pytest parameters: dicts that together hold every pair of two factors' values that a valid case can hold."""
    names = list(factors)
    rows = list(itertools.product(*(range(len(values)) for values in factors.values())))
    rows = random.Random(0).sample(rows, min(len(rows), 4000))  # any pair is in a hundred of them, and greed costs 1 s
    cases = [(row, {name: factors[name][i] for name, i in zip(names, row, strict=True)}) for row in rows]
    wanted = [(set(itertools.combinations(enumerate(row), 2)), case) for row, case in cases if valid(case)]
    missing, chosen = set().union(*(pairs for pairs, _ in wanted)), []
    while missing:
        pairs, case = max(wanted, key=lambda one: len(one[0] & missing))
        chosen.append(case)
        missing -= pairs
        wanted = [one for one in wanted if not one[0].isdisjoint(missing)]
    return [pytest.param(case, id="-".join(_word(value) for value in case.values())) for case in chosen]


def _word(value: Any) -> str:
    unfused = isinstance(value, str | bool | tuple | torch.dtype)
    return str(value) if unfused else getattr(value, "__name__", type(value).__name__)


def both_of(ours: type, theirs: type, *args: Any, **kwargs: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(ours, theirs) in float64 with one set of parameters. None of them is zero or one, as torch initialises some.

    `recompute` is given to ours alone. state_dict goes both ways, strictly.
    """
    recompute = {"recompute": kwargs.pop("recompute")} if "recompute" in kwargs else {}
    mine = ours(*args, **kwargs, **recompute, dtype=torch.float64)
    other = theirs(*args, **kwargs, dtype=torch.float64)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    mine.load_state_dict(other.state_dict(), strict=True)
    other.load_state_dict(mine.state_dict(), strict=True)
    return mine, other


def tokens(layout: str, length: int, width: int = E, grad: bool = True) -> Tensor:
    shape = {"unbatched": (length, width), "seq_first": (length, B, width), "batch_first": (B, length, width)}[layout]
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


class Kind(NamedTuple):
    """A module of torch's by the name of its class; called with a memory or without, and attention with weights or without."""

    name: str
    memory: bool = False
    need_weights: bool | None = None  # None: a layer

    def __str__(self) -> str:
        return f"{self.name}{' with memory' * self.memory}{' with weights' * bool(self.need_weights)}"

    def build(self, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
        args = [E, options.pop("num_heads", H)]
        if self.need_weights is None:
            args, options = [*args, HIDDEN], {"dropout": 0.0, "layer_norm_eps": 1e-3} | options
        return both_of(getattr(ckptkern.nn, self.name), getattr(torch.nn, self.name), *args, **options)

    def inputs(self, layout: str = "seq_first", width: int = E, grad: bool = True) -> dict[str, Tensor]:
        """x and, of this width, memory."""
        made = {"x": tokens(layout, T, grad=grad)}
        return made | ({"memory": tokens(layout, S, width, grad)} if self.memory else {})

    def call(self, module: torch.nn.Module, x: Tensor, memory: Tensor | None = None, **options: Any) -> Tensor:
        """The output alone."""
        if self.need_weights is None:
            return module(*(x,) if memory is None else (x, memory), **options)
        keys = x if memory is None else memory
        return module(x, keys, keys, need_weights=self.need_weights, **options)[0]


ENCODER, DECODER = Kind("TransformerEncoderLayer"), Kind("TransformerDecoderLayer", memory=True)
ATTENTION = [Kind("MultiheadAttention", memory, weights) for memory in (False, True) for weights in (False, True)]


def raised(call: Callable[[], Any]) -> tuple[type, str] | None:
    """The class and the message of what call() raises; None if it returns."""
    try:
        call()
    except Exception as error:  # whatever it is: what torch's module raises is compared with it
        return type(error), str(error)
    return None


def run(module: torch.nn.Module, call: Callable[..., Any], inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Outputs of call(module, **inputs) and the gradients of a random function of them."""
    inputs = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in inputs.items()}
    outputs = call(module, **inputs)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
    generator = torch.Generator().manual_seed(5)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
    trained = dict(module.named_parameters())
    trained |= {name: t for name, t in inputs.items() if t.requires_grad}
    grads = torch.autograd.grad(outputs, list(trained.values()), dys, allow_unused=True)
    return {f"output {i}": y.detach() for i, y in enumerate(outputs)} | dict(zip(trained, grads, strict=True))


def assert_drop_in(
    ours: torch.nn.Module, theirs: torch.nn.Module, call: Callable[..., Any], inputs: dict[str, Tensor]
) -> None:
    """Outputs and gradients of both are equal within float64's rounding."""
    mine, reference = run(ours, call, inputs), run(theirs, call, inputs)
    assert list(mine) == list(reference)
    for name, wanted in reference.items():
        got = mine[name]
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            assert wanted.isfinite().all(), name
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def bool_mask(*shape: int, p: float = 0.4) -> Tensor:
    """True = hidden; the first key is visible to everyone, so that torch's own weights are not NaN."""
    mask = torch.rand(shape) < p
    mask[..., 0] = False
    return mask


def float_mask(*shape: int) -> Tensor:
    """Added to the scores, with some -inf."""
    return torch.randn(shape, dtype=torch.float64).masked_fill(bool_mask(*shape), -torch.inf)


def causal_mask(L: int, S: int) -> Tensor:
    return torch.full((L, S), -torch.inf, dtype=torch.float64).triu(1)


def padding_mask(kind: str, lead: tuple[int, ...], S: int) -> Tensor | None:
    """kind: none, bool (left-aligned tokens) or float."""
    if kind == "none":
        return None
    mask = torch.zeros(*lead, S, dtype=torch.bool)
    mask.view(-1, S)[-1, S - 2 :] = True
    return mask if kind == "bool" else torch.where(mask, -torch.inf, 0.25).double()


def attention_mask(kind: str, B: int, H: int, L: int, S: int) -> Tensor | None:
    """kind: none, bool2, bool3, float2, float3 or causal."""
    if kind == "none":
        return None
    if kind == "causal":
        return causal_mask(L, S)
    shape = (L, S) if kind.endswith("2") else (B * H, L, S)
    return bool_mask(*shape) if kind.startswith("bool") else float_mask(*shape)


def dropout_is_one_mask(module: torch.nn.Module, call: Callable[..., Tensor], x: Tensor) -> None:
    """Training samples anew, a seed samples again, and the gradient is that of the function that forward computed."""

    def value(x: Tensor) -> Tensor:
        torch.manual_seed(11)
        return call(module, x)

    assert not torch.equal(call(module, x), call(module, x))
    assert torch.equal(value(x), value(x))
    x = x.detach().requires_grad_()
    y = value(x)
    dy, dx, step = torch.randn_like(y), torch.randn_like(x), 1e-5
    (grad,) = torch.autograd.grad(y, x, dy)
    with torch.no_grad():
        rise = (value(x + step * dx) - value(x - step * dx)) / (2 * step)
    torch.testing.assert_close((grad * dx).sum(), (rise * dy).sum(), rtol=1e-6, atol=1e-8)
