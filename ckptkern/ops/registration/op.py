"""What an op is: (tensors, options) -> y, with some tensors saved for backward. `functions.build` makes it callable.

Op bodies run with autocast off and cast weights inside, so that a cast copy never lives from forward to backward; the public
function casts x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...state import Observed

_AUTOCAST = int(Observed.AUTOCAST)


class Op:
    """What an op is. Subclasses give these attributes and methods; `build()` makes it callable.

    name       the op's word, as users know it
    Options    a NamedTuple of what is no tensor: recompute, backend, precision and so on (of types that `codec.layout_of` says)
    forward    (tensors, options) -> (y, what it saves by name, at least what `saves` names)
    backward   (dy, tensors, saved by name, options, needs) -> a gradient for each tensor; None where it is not needed, or was
               added to a main_grad
    reference  (tensors, options) -> y, or a tuple of all results, in differentiable PyTorch ops: the reference implementation,
               for second order
    constants  places of tensors without a gradient; torch.func cannot tell and asks for all
    kernels    are there Triton kernels of it?
    """

    name: str
    Options: type
    forward: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    backward: Callable[..., Sequence[Tensor | None]]
    reference: Callable[..., Any]
    constants: frozenset[int] = frozenset()
    kernels = True
    inference_recompute = "full"  # the mode in which forward writes nothing for a backward

    @staticmethod
    def saves(options) -> tuple[str, ...]:
        """What forward saves for backward besides tensors: the one declaration of it. "y" is the result itself."""
        return ()

    @staticmethod
    def more_results(options) -> tuple[str, ...]:
        """Names of the results besides y, by which `forward` gives them among what it saves. Backward has the gradient of each
        among what was saved, as "d" and its name."""
        return ()

    @staticmethod
    def reads_x(options, needs: int) -> bool:
        """Does backward read the first tensor? If not, it is not saved."""
        return True

    @staticmethod
    def made_on_meta(x: Tensor, made: dict[str, Tensor], options) -> dict[str, Tensor]:
        """What forward saves by name, from what it gives in PyTorch ops on meta tensors, if kernels give other shapes."""
        return made

    @classmethod
    def reference_of(cls, saved: dict[str, Tensor], options) -> Callable[[Sequence[Tensor | None], Any], Any]:
        """`reference` with the decisions of forward, if it saved any."""
        return cls.reference

    @classmethod
    def missing_input(cls, dy: Tensor, tensors: Sequence[Tensor | None], options) -> Tensor:
        """Replaces an x that was not saved, when the reference is differentiated; raises if that needs it."""
        raise RuntimeError(
            f"{cls.name}: second-order gradients need the input, which was not saved because the weight that reads it "
            f"is frozen; use recompute='full', outside of a checkpoint"
        )


def to_save(op: type[Op], tensors: Sequence, results: Sequence, options, needs: int) -> list:
    """The flat list of tensors that backward is given, from the op's tensors and results [y, *more, *saved]."""
    flat = [*tensors, *results[1 + len(op.more_results(options)) :]]
    names = op.saves(options)
    if "y" in names:
        flat.insert(len(tensors) + names.index("y"), results[0])
    if not op.reads_x(options, needs):
        flat[0] = None
    return flat


def call_of(op: type[Op], flat: Sequence, options) -> tuple[Sequence[Tensor | None], dict[str, Tensor]]:
    """The inverse of `to_save`: (tensors, saved by name), as the op's backward takes them. Gradients of more results follow in
    `flat`."""
    names = names_of_saved(op, options)
    if not names:
        return flat, {}
    count = len(flat) - len(names)
    return flat[:count], dict(zip(names, flat[count:], strict=True))


def names_of_saved(op: type[Op], options) -> tuple[str, ...]:
    """What backward is given besides dy and tensors."""
    more = op.more_results(options)
    return (*op.saves(options), *("d" + name for name in more)) if more else op.saves(options)


def run_forward(op: type[Op], tensors: Sequence, options) -> list[Tensor]:
    """[y, *more, *saved] by the op's body."""
    y, made = op.forward(tensors, options)
    return results_of(op, options, y, made) if made else [y]


def results_of(op: type[Op], options, y: Tensor, made: dict[str, Tensor]) -> list[Tensor]:
    return [y, *[made[name] for name in (*op.more_results(options), *op.saves(options)) if name != "y"]]


def direct_forward(op: type[Op], tensors: Sequence, options, seen: int) -> list[Tensor]:
    """[y, *more, *saved] by the op's body, as the dispatcher would run it. That takes a tenth of a tiny mlp's host time itself.

    seen: what `observe` saw."""
    if not seen & _AUTOCAST:
        return run_forward(op, tensors, options)
    with torch._C._DisableAutocast():
        return run_forward(op, tensors, options)


def direct_backward(
    op: type[Op], dy: Tensor, flat: Sequence, options, needs: int, seen: int
) -> Sequence[Tensor | None]:
    """The gradients, likewise."""
    tensors, saved = call_of(op, flat, options)
    if not seen & _AUTOCAST:
        return op.backward(dy, tensors, saved, options, needs)
    with torch._C._DisableAutocast():
        return op.backward(dy, tensors, saved, options, needs)
