"""Numba twins of the signed formulas."""
