"""Twins of reference/memory/hopfield.py: softmax tiles whose keys and values are the stored patterns, the state kept in the arrays' dtype.

A fixed number of updates keeps nothing of n * m numbers; a tolerance is measured on the weights and keeps two such arrays a head.
"""

import math

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.matrix import CHUNK, packed_rows, rows_product
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.softmax.tiles import QUERIES, copy_rows, tiled_attention
from attnspec.numba_kernels.softmax.tiles_backward import tiled_backward
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, number, sum_to_shape, whole
from attnspec.reference.memory.hopfield import HopfieldGradients, HopfieldRetrieval


def inverse_temperature(beta, d):
    """beta, or 1/sqrt(d) where it is None."""
    return 1.0 / math.sqrt(max(d, 1)) if beta is None else float(number("beta", beta, least=0, finite=True))


@twin
def hopfield_energy(state, stored, *, beta=1.0):
    """Energy E (..., n) of states (..., n, d) in the network of the stored patterns (..., m, d); the parameters are the reference's."""
    beta = inverse_temperature(beta, state.shape[-1])
    lead = np.broadcast_shapes(state.shape[:-2], stored.shape[:-2])
    states, state_of = heads_of(state, lead)
    patterns, pattern_of = heads_of(stored, lead)
    heads, (n, m) = math.prod(lead), (state.shape[-2], stored.shape[-2])
    energy = np.empty((heads, n), state.dtype)
    in_parallel(energy_blocks, heads * -(-n // QUERIES), states, state_of, patterns, packed_rows(patterns), pattern_of, m, beta, energy,
                work=20 * heads * n * m)
    return energy.reshape(*lead, n)[()]


@kernel
def energy_blocks(state, state_of, stored, panels, stored_of, m, beta, energy, first, step):
    """energy (h, n): products in tiles, twice, for the largest and for the mean of exp(beta (s - largest)) - 1; sums in float64.

    The logarithm of the mean, divided by a small beta, would magnify its rounding: log1p of the mean less 1 does not.
    """
    heads, n = energy.shape
    d, width = state.shape[2], panels.shape[3]
    blocks, count = (n + QUERIES - 1) // QUERIES, (CHUNK + width - 1) // width
    block, S = np.zeros((QUERIES, d), state.dtype), np.empty((QUERIES, count * width), state.dtype)
    top, low = np.empty(QUERIES, np.float64), np.empty(QUERIES, np.float64)
    total = np.empty(QUERIES, np.float64)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        rows = min(QUERIES, n - i0)
        copy_rows(state, state_of[h], i0, rows, block)
        one = stored_of[h]
        top[:], low[:], total[:] = -np.inf, np.inf, 0.0
        for sweep in range(2):
            for j in range(0, m, CHUNK):
                keys = min(CHUNK, m - j)
                rows_product(block, rows, panels, one * panels.shape[1] * d * width, d * width, j // width, (keys + width - 1) // width, d,
                             S, S.shape[1], state.dtype.type(1))
                for r in range(rows):
                    part = 0.0
                    for t in range(keys):
                        s = np.float64(S[r, t])
                        if sweep == 0:
                            top[r] = s if s > top[r] or s != s else top[r]
                            low[r] = min(low[r], s)
                        elif beta == 0:
                            part += s - top[r]
                        elif beta * (low[r] - top[r]) > -1:
                            part += np.expm1(beta * (s - top[r]))
                        else:
                            part += np.exp(beta * (s - top[r]))
                    total[r] += part
        largest_norm = 0.0
        for j in range(m):
            norm = 0.0
            for c in range(d):
                norm += np.float64(stored[one, j, c]) ** 2
            largest_norm = norm if norm > largest_norm or norm != norm else largest_norm
        for r in range(rows):
            half = 0.0
            for c in range(d):
                half += np.float64(block[r, c]) ** 2
            if m == 0:
                energy[h, i0 + r] = half / 2
                continue
            mean = total[r] / m
            if beta == 0:
                log_mean = top[r] + mean
            elif beta * (low[r] - top[r]) > -1:
                log_mean = top[r] + np.log1p(mean) / beta
            else:
                log_mean = top[r] + np.log(mean) / beta
            energy[h, i0 + r] = half / 2 + largest_norm / 2 - log_mean


@twin
def hopfield_update(state, stored, *, beta=None, mask=None):
    """One update of the states (..., n, d) in the network of the stored patterns (..., m, d); the parameters are the reference's."""
    return tiled_attention(state, stored, stored, scale=inverse_temperature(beta, state.shape[-1]), mask=mask)[0]


@twin
def hopfield_retrieve(
    state, stored, projection=None, *, beta=None, n_iters=0, tol=1e-4, mask=None, return_weights=False, return_info=False,
):
    """Patterns retrieved from the stored ones (..., m, d) by the states (..., n, d); the parameters are those of the reference."""
    beta = inverse_temperature(beta, state.shape[-1])
    endless = n_iters is None or n_iters == -1
    most = math.inf if endless else whole("n_iters", n_iters)
    if tol is not None:
        tol = number("tol", tol, above=0)
    elif endless:
        raise ValueError("tol: expected a number > 0 where n_iters is None, got None")

    def softmax(xi, values, weights):
        return tiled_attention(xi, stored, values, scale=beta, mask=mask, return_weights=weights)[:2]

    values = stored if projection is None else projection
    of_weights = np.broadcast_shapes(state.shape[:-2], stored.shape[:-2], () if mask is None else mask.shape[:-2])
    heads = of_weights[-1:]
    updates, change, going = np.zeros(heads, int), np.full(heads, np.inf), np.full(heads, most > 0)
    xi = np.broadcast_to(state, (*of_weights, *state.shape[-2:]))
    if tol is None:
        for _ in range(int(most)):
            xi = softmax(xi, stored, False)[0]
        updates = updates + int(most)
    else:
        while np.any(going):
            head_goes = going[..., None, None]
            new, A_old = softmax(xi, stored, True)
            xi = np.where(head_goes, new, xi)
            A = softmax(xi, stored[..., :0], True)[1]
            moved = A.astype(np.float64) - A_old
            norm = np.sqrt(np.sum(np.where(np.isnan(moved), 0.0, moved) ** 2, axis=(-2, -1)))
            change = np.where(going, np.max(norm, axis=tuple(range(A.ndim - 3)), initial=0.0), change)
            updates = updates + going
            going = going & (updates < most) & (change > tol)
    out, weights = softmax(xi, values, return_weights or return_info)
    if return_info:
        valid = ~np.any(np.isnan(weights), axis=(*range(weights.ndim - 3), -2, -1))
        return HopfieldRetrieval(out, weights, updates, np.zeros(heads, bool) if tol is None else valid & (change <= tol))
    return AttentionResult(out, weights) if return_weights else out


@twin
def hopfield_retrieve_backward(state, stored, do, projection=None, *, beta=None, n_iters=0, mask=None):
    """HopfieldGradients of `hopfield_retrieve` with exactly n_iters updates (tol=None), for the cotangent do (..., n, e)."""
    beta = inverse_temperature(beta, state.shape[-1])
    values = stored if projection is None else projection
    if do.shape[-1] != values.shape[-1]:
        raise ValueError(f"do: expected shape (..., n, {values.shape[-1]}) as the output has, got {do.shape}")
    states = [state]
    for _ in range(whole("n_iters", n_iters)):
        states.append(tiled_attention(states[-1], stored, stored, scale=beta, mask=mask)[0])
    dxi, dstored, dvalues = tiled_backward(states.pop(), stored, values, do, scale=beta, mask=mask)[:3]
    if projection is None:
        dstored = dstored + dvalues
    for xi in reversed(states):
        dxi, dkeys, dpatterns = tiled_backward(xi, stored, stored, dxi, scale=beta, mask=mask)[:3]
        dstored = dstored + dkeys + dpatterns
    return HopfieldGradients(sum_to_shape(dxi, state.shape), dstored, None if projection is None else dvalues)
