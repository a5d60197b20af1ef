"""Task families as a run practises them, and evaluations: the jax side."""
