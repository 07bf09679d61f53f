"""Numba twins of the memory formulas."""
