"""Twin of the recall in reference/memory/binary.py: whole-number fields, a visit at a time, states of the batch in parallel."""

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import one_of, whole
from attnspec.reference.memory.binary import BinaryRetrieval

MODES = ("asynchronous", "synchronous")
TIES = ("keep", "plus")


def visits(order, d, mode):
    """The bits in the order of their visits."""
    one_of("mode", mode, MODES)
    if order is None:
        return np.arange(d)
    if mode == "synchronous":
        raise ValueError("order: expected None where mode is 'synchronous', which has no order")
    if np.any((order < 0) | (order >= d)):
        raise ValueError(f"order: expected numbers of bits from 0 to {d - 1}, got {order[(order < 0) | (order >= d)][0]}")
    return np.ascontiguousarray(order)


@twin
def hopfield_binary(
    patterns, state, *, threshold=None, mode="asynchronous", ties="keep", order=None, max_sweeps=100, normalise=True, return_info=False,
):
    """Recall of stored patterns (..., m, d) from states (..., d); the parameters are those of the reference."""
    d = state.shape[-1]
    order = visits(order, d, mode)
    scale = max(d, 1) if one_of("normalise", normalise, (True, False)) else 1
    one_of("ties", ties, TIES)
    if threshold is not None and np.any(np.isnan(threshold)):
        raise ValueError("threshold: expected numbers, got nan")
    b = np.zeros(d) if threshold is None else np.broadcast_to(threshold, (*np.shape(threshold)[:-1], d)).astype(np.float64)
    H = np.swapaxes(patterns, -1, -2) @ patterns * (1 - np.eye(d, dtype=np.int64))
    lead = np.broadcast_shapes(state.shape[:-1], patterns.shape[:-2], b.shape[:-1])
    s = np.broadcast_to(state, (*lead, d)).reshape(-1, d).copy()
    weights, weight_of = heads_of(H, lead)
    thresholds, threshold_of = heads_of(b, lead, 1)
    most = whole("max_sweeps", max_sweeps)
    synchronous = mode == "synchronous"
    sweeps, settled, steps = np.zeros(len(s), np.int64), np.zeros(len(s), np.bool_), np.zeros((len(s), 0, d), np.int64)
    if return_info:
        steps = np.zeros((len(s), most * (1 if synchronous else len(order)), d), np.int64)
    in_parallel(recall, len(s), s, weights, weight_of, thresholds, threshold_of, float(scale), order, synchronous, ties == "plus", most,
                sweeps, settled, steps, work=2 * d * d * len(s))
    out = s.reshape(*lead, d)
    if not return_info:
        return out
    made = sweeps.max(initial=0) * (1 if synchronous else len(order))
    states = [np.broadcast_to(state, (*lead, d))] + [steps[:, t].reshape(*lead, d) for t in range(made)]
    energies = [-np.sum((H / scale @ x[..., None])[..., 0] * x, axis=-1) / 2 + np.sum(b * x, axis=-1) for x in states]
    return BinaryRetrieval(out, np.stack(energies, axis=-1), sweeps.reshape(lead), settled.reshape(lead))


@kernel
def recall(s, H, H_of, b, b_of, scale, order, synchronous, plus, most, sweeps, settled, steps, first, step):
    """Sweeps over the bits of s (states, d) in place until one flips nothing; `steps` keeps the state after every visit, or sweep."""
    d = s.shape[1]
    old = np.empty(d, np.int64)
    for one in range(first, s.shape[0], step):
        now, W, shift = s[one], H[H_of[one]], b[b_of[one]]
        at = 0
        while sweeps[one] < most and not settled[one]:
            old[:] = now
            source = old if synchronous else now
            for i in order:
                total = 0
                for j in range(d):
                    total += W[i, j] * source[j]
                field = total / scale - shift[i]
                now[i] = 1 if field > 0 else (-1 if field < 0 else (1 if plus else source[i]))
                if steps.shape[1] and not synchronous:
                    steps[one, at] = now
                    at += 1
            if steps.shape[1] and synchronous:
                steps[one, at] = now
                at += 1
            sweeps[one] += 1
            settled[one] = True
            for j in range(d):
                if now[j] != old[j]:
                    settled[one] = False
        for rest in range(at, steps.shape[1]):
            steps[one, rest] = now
