"""Optimizers, their registry, their fused update, and learning-rate schedules."""
