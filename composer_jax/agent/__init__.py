"""Multi-turn episodes of a policy with tools; host only."""
