"""How many weights a step of training changes, and what bundles make of it."""
