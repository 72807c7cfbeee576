"""What the gradients of an attention sublayer's tensors are made of."""

from __future__ import annotations

from collections.abc import Collection

from ..sublayer.lora import names_of
from ..sublayer.residual import OF_NORM, after_branch
from .tensors import AttentionOptions, AttentionTensors

OF_OUTPUT = frozenset(("wo", "bo", *names_of("o")))


def behind_core(need: Collection[str], o: AttentionOptions) -> set[str]:
    """The inputs whose gradients come through the core."""
    return set(need) - OF_OUTPUT - after_branch(o)


def reads_core(need: Collection[str]) -> bool:
    """Are there gradients of what reads o?"""
    return not OF_OUTPUT.isdisjoint(need - {"bo"})


def gate_needs(inner: Collection[str], t: AttentionTensors) -> bool:
    """Does one of the gradients of `inner` have a part from the gate?"""
    of_gate = {"wg", "bg"} if t.wg is not None else {"wq", "bq", *names_of("q")}
    return not of_gate.isdisjoint(inner) or not {"x", *OF_NORM}.isdisjoint(inner)


def core_needs(inner: Collection[str], t: AttentionTensors) -> tuple[bool, bool]:
    """(need dq, need dk and dv) for the gradients of `inner`."""
    inner = set(inner) - {"mask", "sinks", "wg", "bg"}
    behind_q, of_q = {"q_norm", "q_norm_bias"}, {"wq", "bq", *names_of("q")}
    packed, read_by_q = of_q if t.wk is None else set(), {"x", *OF_NORM}
    behind_both = packed if t.key_value is not None else packed | read_by_q
    behind_q |= (of_q | read_by_q) - behind_both
    if behind_both & inner:
        return True, True
    return bool(behind_q & inner), bool(inner - behind_q)
