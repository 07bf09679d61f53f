"""Numba twins of the higher order formulas."""
