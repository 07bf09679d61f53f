"""Twin of the recall in reference/memory/binary.py as a graph: fields in whole numbers, thresholds and energies in the CPU's float64."""

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import total
from attnspec.mlx_backend.known import known_true
from attnspec.mlx_backend.memory.spins import settle, visits
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import one_of
from attnspec.reference.memory.binary import BinaryRetrieval

TIES = ("keep", "plus")


@twin
def hopfield_binary(
    patterns, state, *, threshold=None, mode="asynchronous", ties="keep", order=None, max_sweeps=100, normalise=True, return_info=False,
):
    """Recall of stored patterns (..., m, d) from states (..., d); the parameters are those of the reference."""
    d = state.shape[-1]
    order = visits(order, d, mode)
    one_of("ties", ties, TIES)
    scale = max(d, 1) if one_of("normalise", normalise, (True, False)) else 1
    if threshold is not None and known_true(mx.any(mx.isnan(threshold))):
        raise ValueError("threshold: expected numbers, got nan")
    H = hebbian(patterns)
    lead = np.broadcast_shapes(state.shape[:-1], patterns.shape[:-2], () if threshold is None else threshold.shape[:-1])
    s = mx.broadcast_to(state, (*lead, d)).astype(mx.int32)
    b = None if threshold is None else mx.broadcast_to(threshold, s.shape).astype(mx.float64, stream=mx.cpu)

    def aligned(s, i):
        sums = total(H[..., i, :] * s)
        if b is not None:                                              # one division: exactly b_i where it should be
            sums = mx.subtract(mx.divide(sums.astype(mx.float64, stream=mx.cpu), float(scale), stream=mx.cpu), b[..., i], stream=mx.cpu)
            sums = mx.sign(sums, stream=mx.cpu).astype(mx.int32, stream=mx.cpu)
        return mx.where(sums == 0, 1 if ties == "plus" else s[..., i], mx.where(sums > 0, 1, -1))

    trace, n_sweeps, converged = settle(s, aligned, mode, order, max_sweeps)
    out = trace[-1].astype(mx.int64)
    if not return_info:
        return out
    energies = mx.stack([spin_energy(s, H, scale, b) for s in trace], axis=-1)
    return BinaryRetrieval(out, energies.astype(mx.float32), n_sweeps, converged)


def hebbian(patterns):
    """d W in whole numbers: sum_mu x_mu x_mu^T without its diagonal; a product in float32 is exact below 2^24 patterns."""
    x = patterns.astype(mx.float32)
    d = x.shape[-1]
    return (mx.matmul(x.swapaxes(-1, -2), x) * (1 - mx.eye(d))).astype(mx.int32)


def spin_energy(s, H, scale, b):
    """E (...) of states s, in float64: the quadratic part is one of whole numbers, divided once."""
    pairs = total(total(H * s[..., None, :]).astype(mx.int64) * s).astype(mx.float64, stream=mx.cpu)
    energy = mx.divide(pairs, -2.0 * scale, stream=mx.cpu)
    if b is None:
        return energy
    return mx.add(energy, mx.sum(mx.multiply(b, s.astype(mx.float64, stream=mx.cpu), stream=mx.cpu), axis=-1, stream=mx.cpu), stream=mx.cpu)
