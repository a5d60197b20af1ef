"""Maps tensors of Hugging Face checkpoints to blocks of arrays and back."""
