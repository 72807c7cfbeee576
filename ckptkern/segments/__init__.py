"""Activation checkpoints: regions that are recomputed in backward, of any function or of chosen layers of a model."""
