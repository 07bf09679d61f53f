"""Numba twins of the transport formulas."""
