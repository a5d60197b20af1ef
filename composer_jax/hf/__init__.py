"""Hugging Face checkpoints, tokenizers and chat templates, in and out."""
