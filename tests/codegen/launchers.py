"""A table of the launchers of matmuls and activations, for the launches of the code-generation check and for the tests
of their results.

A launcher has the arguments and results of the function of the same name in `ckptkern.eager`.
"""

from __future__ import annotations

import dataclasses

from ckptkern.results import GatedForward, GatedGradient, HiddenGradient, LinearForward


@dataclasses.dataclass(frozen=True)
class Launcher:
    """inputs: name -> shape in letters, in call order; outputs in order; wants: the flags that ask for all outputs."""

    name: str
    inputs: dict[str, str]
    outputs: tuple[str, ...]
    wants: tuple[str, ...]
    dropout: bool
    tiles: str = ""  # of a matmul, which takes a precision and a tile: its row of triton_kernels.tile.TILES

    def __str__(self) -> str:
        return self.name

    @property
    def matmul(self) -> bool:
        return bool(self.tiles)

    @property
    def biases(self) -> list[str]:
        return [name for name in self.inputs if name.startswith("b")]


_GATE = {"x": "MK", "wg": "NK", "bg": "N", "wu": "NK", "bu": "N"}
_GATED_GRADS = {"outputs": GatedGradient._fields, "wants": ("save_h", "dbg", "dbu"), "dropout": True}
_TABLE = [
    Launcher(
        "linear_fwd", {"x": "MK", "w": "NK", "b": "N"}, LinearForward._fields, ("save_z", "save_bits"), True, "linear"
    ),
    Launcher("linear_bwd", {"x": "MK", "w": "NK", "b": "N", "dh": "MN"}, ("dz", "db"), ("db",), False, "linear"),
    Launcher(
        "act_grad", {"dy": "MD", "w": "DN", "z": "MN"}, HiddenGradient._fields, ("save_h", "db"), True, "act_grad"
    ),
    Launcher(
        "mlp_bwd",
        {"x": "MK", "w1": "NK", "b1": "N", "dy": "MD", "w2": "DN"},
        HiddenGradient._fields,
        ("save_h", "db"),
        True,
        "dual",
    ),
    Launcher("gated_fwd", _GATE, GatedForward._fields, ("save_gu",), True, "dual"),
    Launcher("gated_bwd", {**_GATE, "dy": "MD", "wd": "DN"}, **_GATED_GRADS, tiles="triple"),
    Launcher("gated_act_grad", {"dy": "MD", "wd": "DN", "g": "MN", "u": "MN"}, **_GATED_GRADS, tiles="gated_act_grad"),
    Launcher("hidden_grad", {"dh": "MN", "z": "MN"}, HiddenGradient._fields, ("save_h", "db"), False),
    Launcher("gated_hidden_grad", {"dh": "MN", "g": "MN", "u": "MN"}, **_GATED_GRADS | {"dropout": False}),
    Launcher("act_fwd", {"z": "MN", "u": "MN"}, ("h",), (), False),
    Launcher("act_bwd", {"dy": "MN", "saved": "MN"}, ("dz", "db"), ("db",), False),
]
LAUNCHERS = {launcher.name: launcher for launcher in _TABLE}


def precision_of(case) -> str:
    """Of the matmuls of a Case or an AttentionCase."""
    return "tf32" if case.dtype == "float32" and "ieee" not in case.kind else "ieee"
