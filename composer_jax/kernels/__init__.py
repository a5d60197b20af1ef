"""Numerical kernels: one function each, with one implementation per backend."""
