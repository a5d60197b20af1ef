"""Generated tasks: one function of a list is missing."""
