"""Distillation of a language model: divergences of a teacher's and a student's probabilities, whose logits are not stored."""
