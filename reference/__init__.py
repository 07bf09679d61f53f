"""The spec: every formula as plain float64 NumPy. Family = folder, formula = file."""

from attnspec.reference import affine, higher_order, memory, signed, softmax, transport
from attnspec.reference.affine import *  # noqa: F403
from attnspec.reference.formula import RECORDS, Formula
from attnspec.reference.higher_order import *  # noqa: F403
from attnspec.reference.memory import *  # noqa: F403
from attnspec.reference.signed import *  # noqa: F403
from attnspec.reference.softmax import *  # noqa: F403
from attnspec.reference.transport import *  # noqa: F403

FAMILIES = {
    "softmax": softmax, "transport": transport, "signed": signed, "affine": affine, "higher_order": higher_order, "memory": memory,
}

__all__ = ["FAMILIES", "RECORDS", "Formula"]
__all__ += [name for family in FAMILIES.values() for name in family.__all__]
