"""Sweeps over bits of +1 and -1 as graphs: all sweeps, as those after the last flip change nothing, or fewer where that can be seen."""

import mlx.core as mx

from attnspec.mlx_backend.known import known_true
from attnspec.reference.inputs import one_of, whole

MODES = ("asynchronous", "synchronous")


def visits(order, d, mode):
    """The bits in the order of their visits; a given order has to be known."""
    one_of("mode", mode, MODES)
    if order is None:
        return list(range(d))
    if mode == "synchronous":
        raise ValueError("order: expected None where mode is 'synchronous', which has no order")
    order = order.tolist()
    for i in order:
        if not 0 <= i < d:
            raise ValueError(f"order: expected numbers of bits from 0 to {d - 1}, got {i}")
    return order


def settle(s, aligned, mode, order, max_sweeps):
    """(states visited, sweeps made (...), settled (...)) of sweeps until one flips nothing; aligned(s, i) is bit i as its field says.

    Sweeps of a state that has settled are made, and not counted.
    """
    bits = mx.arange(s.shape[-1])
    trace, n_sweeps, going = [s], mx.zeros(s.shape[:-1], mx.int32), mx.full(s.shape[:-1], True)
    for sweep in range(whole("max_sweeps", max_sweeps)):
        if sweep and known_true(~mx.any(going)):
            break
        before = trace[-1]
        if mode == "synchronous":
            trace.append(mx.stack([aligned(before, i) for i in order], axis=-1) if order else before)
        else:
            for i in order:
                trace.append(mx.where(bits == i, aligned(trace[-1], i)[..., None], trace[-1]))
        n_sweeps = n_sweeps + going
        going = mx.logical_and(going, mx.any(trace[-1] != before, axis=-1))
    return trace, n_sweeps, ~going
