"""Language-model training: state, loss, step, loop, held-out loss."""
