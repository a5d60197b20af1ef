"""Tensors of Hugging Face checkpoints as blocks of our arrays."""
