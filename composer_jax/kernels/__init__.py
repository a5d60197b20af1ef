"""Numerical kernels, one function each with an implementation per backend."""
