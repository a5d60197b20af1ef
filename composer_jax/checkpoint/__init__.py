"""Checkpoints of training states, and weights as streams of blocks."""
