"""Numba twins of the affine formulas."""
