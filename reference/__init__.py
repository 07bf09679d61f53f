"""The spec: every formula as plain float64 NumPy. Family = folder, formula = file."""

from attnspec.reference import affine, higher_order, memory, signed, softmax, transport
from attnspec.reference.affine import *  # noqa: F403
from attnspec.reference.formula import RECORDS, Formula
from attnspec.reference.higher_order import *  # noqa: F403
from attnspec.reference.memory import *  # noqa: F403
from attnspec.reference.signed import *  # noqa: F403
from attnspec.reference.softmax import *  # noqa: F403
from attnspec.reference.transport import *  # noqa: F403

__all__ = ["RECORDS", "Formula"]
__all__ += [name for family in (softmax, transport, signed, affine, higher_order, memory) for name in family.__all__]
