"""Imports and exports Hugging Face checkpoints with their tokenizers."""
