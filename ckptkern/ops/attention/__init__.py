"""Attention, and the attention sublayer."""
