"""Tasks on whole repositories: their sets, environment and tools."""
