"""What the sublayers of a transformer layer share."""
