"""Implements the commands of ``python -m ckptkern``, a module for each."""
