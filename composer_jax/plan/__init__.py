"""Memory, traffic and compiled steps of a model on machines not at hand."""
