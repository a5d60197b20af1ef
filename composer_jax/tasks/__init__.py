"""Tasks that a policy is trained and judged on; host only."""
