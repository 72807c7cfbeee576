"""Implements ckptkern.convert, which puts fused layers into an existing model of any architecture.

The dataflow of one call of a module is recorded (`trace`), what its leaves compute is recognised by their results (`reading`),
and the graph is read backwards as one fused op (`attention`, `grammar`), which is compared with the original forward (`fuse`,
`check`). `binding` is what replaces the module's forward, `guard` sees whether its inside is what was checked, `heads` finds
the LM head before a loss, whose logits are lazy (`logits`), and `report` says what was done.
"""

from .binding import revert
from .convert import convert
from .heads import patch_trl
from .moe import register_experts
from .report import Conversion, Row

__all__ = ["Conversion", "Row", "convert", "patch_trl", "register_experts", "revert"]
