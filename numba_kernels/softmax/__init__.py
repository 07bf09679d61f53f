"""Numba twins of the softmax formulas."""
