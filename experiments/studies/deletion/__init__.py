"""Which deletions make tasks, at what cost."""
