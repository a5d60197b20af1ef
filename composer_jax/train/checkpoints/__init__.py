"""Checkpoints of training: orbax underneath, our own hashes on top."""
