"""Judges a solution of a repository task by its hidden tests."""
