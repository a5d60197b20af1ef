"""Optimizers and schedules as optax transforms."""
