"""Sampling from a policy with recorded log-probabilities and routes."""
