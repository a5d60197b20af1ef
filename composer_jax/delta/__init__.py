"""Lossless, hashed, chained bundles of weight changes; host only."""
