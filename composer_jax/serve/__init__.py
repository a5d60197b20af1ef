"""Serves a model over HTTP: OpenAI-compatible, and token-in/token-out."""
