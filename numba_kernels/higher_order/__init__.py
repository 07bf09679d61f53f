"""Numba twins of the higher_order formulas."""

__all__: list[str] = []
