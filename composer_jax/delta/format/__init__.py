"""What is written down of weights: their identity, manifests and pointers."""
