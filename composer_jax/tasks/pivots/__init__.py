"""Single-step tasks, cut from recorded conversations; nothing is executed."""
