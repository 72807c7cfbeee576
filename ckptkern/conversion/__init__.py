"""Implements ckptkern.convert, which puts fused layers into an existing model of any architecture.

trace the dataflow of one call of a module leaves what each leaf computes, recognised by its results reading, attention,
grammar the graph, read backwards as one fused op check the fused op and the original forward compute the same binding
what replaces the module's forward, and its guard report what was done experts the experts of an MoE layer, by their
layout and by transformers' interface heads, logits the LM head before a loss, and its lazy logits
"""

from .bound import revert
from .convert import convert
from .moe import register_experts
from .report import Conversion, Row
from .trl import patch_trl

__all__ = ["Conversion", "Row", "convert", "patch_trl", "register_experts", "revert"]
