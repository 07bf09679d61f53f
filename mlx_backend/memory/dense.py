"""Twin of the recall in reference/memory/dense.py as a graph, exact: the energy differences are whole numbers, of any size, by overlap.

exp(z) stands there as a whole number of 2^-64 of the smallest one, closer than float64 has it.
"""

from decimal import Decimal, localcontext

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import total
from attnspec.mlx_backend.memory.spins import settle, visits
from attnspec.mlx_backend.memory.whole_numbers import limbs, sign_of_sum
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import one_of, whole

INTERACTIONS = ("polynomial", "exponential")


@twin(lacks={"return_info": "energies beyond float32 need the reference's whole numbers"})
def dense_associative_memory(
    state, patterns, *, degree=3, rectified=False, interaction="polynomial", mode="asynchronous", order=None, max_sweeps=1,
    return_info=False,
):
    """Update of states (..., d) in the memory of patterns (..., m, d); the parameters are those of the reference."""
    degree = whole("degree", degree, least=1)
    one_of("rectified", rectified, (True, False))
    if one_of("interaction", interaction, INTERACTIONS) == "exponential" and rectified:
        raise ValueError("rectified: expected False where interaction is 'exponential', got True")
    if return_info:
        raise ValueError("return_info: expected False, got True; the reference has the energies")
    d = state.shape[-1]
    order = visits(order, d, mode)
    lead = np.broadcast_shapes(state.shape[:-1], patterns.shape[:-2])
    s, x = mx.broadcast_to(state, (*lead, d)).astype(mx.int32), patterns.astype(mx.int32)
    table = mx.array(limbs(exponentials(d) if interaction == "exponential" else differences(d, degree, rectified)))

    def aligned(s, i):
        h = total(x * s[..., None, :]) - x[..., i] * s[..., i, None]                 # (..., m)
        sums = total(mx.take(table, h + d, axis=0) * x[..., i, None].astype(mx.int64), -2)
        sign = sign_of_sum(sums)
        return mx.where(sign == 0, s[..., i], sign)

    return settle(s, aligned, mode, order, max_sweeps)[0][-1].astype(mx.int64)


def differences(d, degree, rectified):
    """F(1 + h) - F(-1 + h) for h = -d .. d."""

    def F(z):
        return 0 if rectified and z <= 0 else z**degree

    return [F(h + 1) - F(h - 1) for h in range(-d, d + 1)]


def exponentials(d):
    """exp(h) for h = -d .. d, all times 2^64 exp(d) and rounded: F(1 + h) - F(-1 + h) up to a factor."""
    with localcontext(prec=30 + d) as context:
        step, term, found = Decimal(1).exp(context), Decimal(2**64), []
        for _ in range(2 * d + 1):
            found.append(int(term.to_integral_value()))
            term *= step
    return found
