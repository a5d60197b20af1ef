"""Reinforcement learning: advantages, losses, batches, steps, evaluation."""
