"""What a model needs of machines that are not there: sizes before arrays."""
