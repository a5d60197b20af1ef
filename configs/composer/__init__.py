"""Configs of the whole loop."""
