"""Numba twins of the memory formulas."""

__all__: list[str] = []
