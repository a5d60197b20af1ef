"""Grouped matrix products: one function, one implementation per backend."""
