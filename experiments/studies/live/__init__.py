"""Learning from users of known taste."""
