"""Which recompute mode where: what each region of a model costs, and the cheapest choice under a budget."""

from .certify import Certificate, certify
from .plan import Frontier, Plan, frontier, plan
from .report import Report, report

__all__ = ["Certificate", "Frontier", "Plan", "Report", "certify", "frontier", "plan", "report"]
