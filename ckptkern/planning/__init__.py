"""Chooses a recompute mode for each region of a model: measures their costs, and picks the cheapest choice within a budget."""

from .certify import Certificate, certify
from .plan import Frontier, Plan, frontier, plan
from .report import Report, report
