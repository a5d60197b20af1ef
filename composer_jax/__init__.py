"""Trains sparse mixture-of-experts models as coding agents, in JAX."""
