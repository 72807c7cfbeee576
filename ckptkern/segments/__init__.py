"""Activation checkpoints: any function recomputed in backward, and which layers of a model become such regions."""
