"""What is chosen and checked for a call."""
