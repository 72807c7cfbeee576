"""Options as arguments of library ops, and back."""

from typing import NamedTuple

import pytest
import torch
from torch.types import IntLikeType

from ckptkern.ops.registration.codec import layout_of, pack, replaced, unpack, values_of


class Inner(NamedTuple):
    recompute: str
    p: float
    dtype: torch.dtype
    left: IntLikeType | None
    flag: bool


class Outer(NamedTuple):
    parts: tuple[Inner, ...]
    alone: Inner | None
    numbers: tuple[float, ...]
    rows: IntLikeType
    recompute: str
    count: int


INNER = Inner("full", 0.5, torch.bfloat16, None, True)
EXAMPLES = [
    Outer((), None, (), 3, "none", -1),
    Outer((INNER, INNER._replace(left=0, flag=False)), INNER, (1.0, 2.0), 2**40, "selective", 2**61),
]


@pytest.mark.parametrize("options", EXAMPLES)
def test_options_come_back(options):
    layout = layout_of(Outer)
    lists = pack(layout, options)
    assert unpack(layout, lists) == options
    kinds = (int, float, str, int)
    assert all(type(one) is kind for kind, values in zip(kinds, lists, strict=True) for one in values)
    found = unpack(layout, lists)
    assert all(type(one.flag) is bool for one in found.parts)


def test_inner_options_are_found_and_replaced():
    options = EXAMPLES[1]
    changed = replaced(options, recompute="x", p=0.25)
    assert values_of(changed, "recompute") == ["x"] * 4
    assert values_of(changed, "p") == [0.25] * 3
    assert values_of(options, "recompute") == ["selective", "full", "full", "full"]
    assert replaced(options, workspace=None) == options


@pytest.mark.parametrize("kind", [list, dict[str, int], complex])
def test_a_type_that_no_list_holds(kind):
    with pytest.raises(TypeError, match="no list of a schema holds"):
        layout_of(NamedTuple("Options", [("value", kind)]))
