"""Numba twins of the transport formulas."""

__all__: list[str] = []
