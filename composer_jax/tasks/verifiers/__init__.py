"""Environments of verifiers (v1), played by the harnesses that they name."""
