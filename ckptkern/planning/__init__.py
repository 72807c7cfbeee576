"""Which recompute mode where: what each region of a model costs, and the cheapest choice under a budget."""

from .plan import Plan, plan
from .report import Report, report

__all__ = ["Plan", "Report", "plan", "report"]
