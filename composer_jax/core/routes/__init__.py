"""Routes as bytes: which experts every token passed."""
