"""Core attention, and the sublayers around it."""
