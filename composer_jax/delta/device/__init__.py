"""The jax side of weight bundles: trees of device arrays in and out."""
