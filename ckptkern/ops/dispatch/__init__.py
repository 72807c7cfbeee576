"""Checks and choices for a call of an op."""
