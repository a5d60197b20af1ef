"""Configs of model sizes."""
