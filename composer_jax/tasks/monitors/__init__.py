"""Watches episodes for ways to be paid that are not the task."""
