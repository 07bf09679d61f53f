"""How far a correct twin may be from the float64 reference, element by element: the pieces in pieces.py, the bounds family by family."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds import affine, higher_order, memory, signed, sinkhorn, softmax, transport
from attnspec.conformance.bounds.pieces import NoBound, Precision
from attnspec.reference.formula import Formula

__all__ = ["BOUNDS", "NoBound", "bound"]

BOUNDS: dict[str, Callable[[Formula, Mapping[str, Any], Precision], dict[str, np.ndarray]]] = {
    name: one for family in (softmax, sinkhorn, transport, signed, affine, higher_order, memory) for name, one in family.BOUNDS.items()
}


def bound(record: Formula, arrays: Mapping[str, Any], options: Mapping[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Bounds on |twin - reference| for the outputs of one call, by name.

    Raises NoBound where no bound is derived for the formula or for these options.
    """
    if record.bound not in BOUNDS:
        raise NoBound(f"no error bound is derived for {record.name} yet")
    with np.errstate(over="ignore", invalid="ignore"):                 # exp of a hopeless error: the bound is then infinite
        return BOUNDS[record.bound](record, {**arrays, **options}, Precision.of(dtype))
