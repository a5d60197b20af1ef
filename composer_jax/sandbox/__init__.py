"""Isolated execution of code that a policy wrote; host only."""
