"""What a sublayer of attention and one of latent attention do alike around core attention, and their ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from ... import eager
from ..registration.gradients import PartGrads
from ..registration.op import SublayerOp
from ..sublayer.lora import names_of
from ..sublayer.residual import AFTER_BRANCH, LAST, Sublayer, reads_branch
from .core import CoreOptions, CoreTensors, core_of
from .masks import merged_mask
from .rotary import positions_of, rotary_tables
from .tensors import batch_and_rows

OF_OUTPUT = frozenset(("wo", "bo", *names_of("o")))


def rotary_of(S: int, dim: int, t: Any, o: Any) -> tuple[Tensor | None, Tensor | None]:
    """Returns (cos, sin): those that were given, or None; for a theta, tables made here, in forward and again in backward."""
    context, whole = o.context, S if o.context is None else S * o.context.size
    if o.theta:
        positions = positions_of(whole, t.wo.device, t.cu)
        positions = positions if context is None else context.own(positions, 0)
        return rotary_tables(positions, dim, o.theta, interleaved=o.interleaved)
    if context is None or t.cos is None or t.cos.shape[-2] == S:
        return t.cos, t.sin
    return context.own(t.cos, -2), context.own(t.sin, -2)


def sublayer_core(t: Any, o: Any) -> eager.AttentionCore:
    mask = merged_mask(t.mask, t.padding, o.mask_is_exclusion)
    workspace = None if o.workspace is None else o.workspace // 2  # the other half is for heads and their gradients
    options = CoreOptions(
        dropout_p=o.dropout_p,
        scale=o.scale,
        left=o.left,
        right=o.right,
        max_q=o.max_len,
        max_k=o.max_len,
        backend=o.backend,
        precision=o.precision,
        fused=o.fused,
        softcap=o.softcap,
        first_plane=o.first_plane,
        planes=o.planes,
        workspace=workspace,
    )
    return core_of(CoreTensors(mask, t.slopes, t.sinks, t.rng, t.cu, t.cu), options)


class CoreSublayer(Sublayer):
    """What a sublayer around core attention computes, in `group_count` groups of heads, one after another. Subclasses have
    `attend`, which gives what the op saves, `branch`, which gives the branch's result from that, and `backward`."""

    group_count: int
    rotary_dim: int  # of tables that are made of a theta
    attend: Callable[[bool], dict[str, Tensor | None]]
    branch: Callable[[dict[str, Tensor | None]], Tensor]

    def __init__(self, x: Tensor, t: Any, o: Any, **options: bool | None):
        super().__init__(x, t, o, **options)
        self.B, self.S = batch_and_rows(x)

    def backward(
        self, dy: Tensor, saved: dict[str, Tensor], needs: int, f: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        """Returns gradients by name ("x" and the fields of the tensors) from dy [tokens, d]; what is not among the saved is
        recomputed.

        f: the branch's result, if it is at hand.
        """
        raise NotImplementedError

    @functools.cached_property
    def core(self) -> eager.AttentionCore:
        return sublayer_core(self.t, self.o)

    @functools.cached_property
    def angles(self) -> tuple[Tensor | None, Tensor | None]:
        return rotary_of(self.S, self.rotary_dim, self.t, self.o)

    def out_rows(self, heads: Tensor) -> Tensor:
        """Returns [B, H, S, N] as [tokens, H N], a view if memory is [B, S, H, N]."""
        return heads.transpose(1, 2).reshape(self.x.shape[0], heads.shape[1] * heads.shape[3])

    def behind_core(self, need: Collection[str]) -> set[str]:
        """Returns the inputs whose gradients come through the core."""
        return set(need) - OF_OUTPUT - AFTER_BRANCH - (LAST if self.trailing else set())

    def recomputed_branch(
        self, saved: dict[str, Tensor | None], need: Collection[str], f: Tensor | None
    ) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        """Returns (the branch's result, where backward reads it; what was saved, with what it had to be recomputed from). f:
        the result, if it is at hand."""
        if f is None and reads_branch(self.o, need):
            # what a norm after the branch read comes before the gradient that delta is made of
            saved = self.attend(self.group_count == 1) if saved.get("out") is None else saved
            f = self.branch(saved)
        return f, saved


def reads_core(need: Collection[str]) -> bool:
    """Are there gradients of what reads o?"""
    return not OF_OUTPUT.isdisjoint(need - {"bo"})


def add_part(name: str, grad: Tensor | None, dim: int, grads: PartGrads, index: int, count: int) -> None:
    """Adds group `index`'s gradient of a parameter with entries for each head along `dim`, or else shared by all heads."""
    whole = getattr(grads.t, name)
    if grad is None or count == 1 or whole.dim() <= 1 or whole.shape[dim] == 1:
        grads.add(name, grad)
    else:
        first = index * grad.shape[dim]
        grads.put(name, grad, (slice(None),) * dim + (slice(first, first + grad.shape[dim]),))


class CoreOp(SublayerOp):
    """Sublayer: a CoreSublayer. projected: names of what the core reads, which is saved at "none", beside o and lse of it."""

    Sublayer: type[CoreSublayer]
    projected: tuple[str, ...]

    @classmethod
    def saves(cls, o):
        return {"none": ("out", "lse", *cls.projected), "selective": ("out", "lse"), "full": ()}[o.recompute]

    @classmethod
    def compute(cls, x, t, o):
        sublayer = cls.Sublayer(x, t, o)
        saved = sublayer.attend(o.recompute == "none")
        return sublayer.output(sublayer.branch(saved)), saved

    @classmethod
    def gradients(cls, dy, x, t, o, saved, needs):
        return cls.Sublayer(x, t, o, shares=True).backward(dy, saved, needs)


def constants_of(kind: type) -> frozenset[int]:
    """Returns the places, among an op's inputs with x first, of those without a gradient: all from cos on, except the mask."""
    places = enumerate(("x", *kind._fields))
    return frozenset(i for i, name in places if i > kind._fields.index("cos") and name != "mask")
