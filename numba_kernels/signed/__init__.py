"""Numba twins of the signed formulas."""

__all__: list[str] = []
