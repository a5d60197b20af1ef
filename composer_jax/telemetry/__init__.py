"""Metrics, progress and wall times of runs; host only."""
