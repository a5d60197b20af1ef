"""Encodes text with the tokenizers and chat templates of checkpoints."""
