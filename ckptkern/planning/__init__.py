"""Which recompute mode where: what each region of a model costs, and the cheapest choice under a budget."""

from .frontier import Frontier, frontier
from .plan import Plan, plan
from .report import Report, report

__all__ = ["Frontier", "Plan", "Report", "frontier", "plan", "report"]
