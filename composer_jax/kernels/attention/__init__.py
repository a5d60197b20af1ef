"""Attention: one function, one implementation per backend."""
