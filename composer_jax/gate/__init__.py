"""The health gate: judges the records of a step before they are trained on."""
