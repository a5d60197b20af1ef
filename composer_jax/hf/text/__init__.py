"""Tokenizers and chat templates that a checkpoint brings."""
