"""Numba twins of the affine formulas."""

__all__: list[str] = []
