"""Twin of the recall in reference/memory/dense.py, exact: powers in 64-bit whole numbers, exponentials counted by level.

Powers that could leave 64 bits are refused; the reference has whole numbers of any size.
"""

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.memory.binary import visits
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import one_of, whole

INTERACTIONS = ("polynomial", "exponential")


@twin(lacks={"return_info": "energies beyond 64 bits need the reference's whole numbers"})
def dense_associative_memory(
    state, patterns, *, degree=3, rectified=False, interaction="polynomial", mode="asynchronous", order=None, max_sweeps=1,
    return_info=False,
):
    """Update of states (..., d) in the memory of patterns (..., m, d); the parameters are those of the reference.

    Raises ValueError too where m sums of powers (d + 1)^degree could leave 64 bits, and where return_info is set.
    """
    whole("degree", degree, least=1)
    one_of("rectified", rectified, (True, False))
    if one_of("interaction", interaction, INTERACTIONS) == "exponential" and rectified:
        raise ValueError("rectified: expected False where interaction is 'exponential', got True")
    if return_info:
        raise ValueError("return_info: expected False, got True; the reference has the energies")
    m, d = patterns.shape[-2:]
    if interaction == "polynomial" and 2 * m * (d + 1) ** degree >= 2**63:
        raise ValueError(f"degree: expected 2 m (d + 1)^degree below 2^63, got degree {degree} for {m} patterns of {d} bits")
    order = visits(order, d, mode)
    lead = np.broadcast_shapes(state.shape[:-1], patterns.shape[:-2])
    s = np.broadcast_to(state, (*lead, d)).reshape(-1, d).copy()
    stored, stored_of = heads_of(patterns, lead)
    in_parallel(update, len(s), s, stored, stored_of, order, mode == "synchronous", degree, rectified, interaction == "exponential",
                whole("max_sweeps", max_sweeps), work=10 * len(s) * m * d * d)
    return s.reshape(*lead, d)


@helper
def power(z, degree, rectified):
    """F(z) = z^degree, 0 for negative z where rectified."""
    if rectified and z <= 0:
        return 0
    result = 1
    for _ in range(degree):
        result *= z
    return result


@kernel
def update(s, patterns, patterns_of, order, synchronous, degree, rectified, exponential, most, first, step):
    """Sweeps over the bits of s (states, d) in place until one flips nothing."""
    d = s.shape[1]
    m = patterns.shape[1]
    overlaps, old = np.empty(m, np.int64), np.empty(d, np.int64)
    counts = np.zeros(2 * d + 1, np.int64)
    for one in range(first, s.shape[0], step):
        x, now = patterns[patterns_of[one]], s[one]
        for _ in range(most):
            old[:] = now
            source = old if synchronous else now
            for mu in range(m):
                total = 0
                for j in range(d):
                    total += x[mu, j] * now[j]
                overlaps[mu] = total
            for i in order:
                field = 0.0
                if exponential:
                    counts[:] = 0
                    highest = -d
                    for mu in range(m):
                        counts[overlaps[mu] - x[mu, i] * source[i] + d] += x[mu, i]
                    for level in range(2 * d + 1):
                        if counts[level] != 0:
                            highest = level - d
                    for level in range(2 * d + 1):
                        field += counts[level] * np.exp(min(level - d - highest, 0))
                else:
                    total = 0
                    for mu in range(m):
                        h = overlaps[mu] - x[mu, i] * source[i]
                        total += power(x[mu, i] + h, degree, rectified) - power(h - x[mu, i], degree, rectified)
                    field = float(total)
                bit = 1 if field > 0 else (-1 if field < 0 else source[i])
                if bit != now[i]:
                    if not synchronous:
                        for mu in range(m):
                            overlaps[mu] += x[mu, i] * (bit - now[i])
                    now[i] = bit
            same = True
            for j in range(d):
                same = same and now[j] == old[j]
            if same:
                break
