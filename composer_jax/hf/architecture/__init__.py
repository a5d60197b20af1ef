"""Maps `config.json` of Hugging Face to the model config and back."""
