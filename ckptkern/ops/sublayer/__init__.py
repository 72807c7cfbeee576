"""Shared parts of the sublayers of a transformer layer."""
