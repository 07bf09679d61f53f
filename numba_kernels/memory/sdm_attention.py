"""Twin of reference/memory/sdm_attention.py. Weights that depend on a rounded distance are computed in float64 whatever the arrays are,
since one rounding of a cosine would otherwise move a distance by one bit."""

import math
from fractions import Fraction

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.matrix import CHUNK, add_columns_product, packed_columns, packed_rows, rows_product
from attnspec.numba_kernels.memory.sdm_circle import intersections, logarithm
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.softmax.tiles import KEYS, QUERIES, chunks_finite, copy_rows, tiled_attention
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, number, one_of, whole

WEIGHTINGS = ("circle", "cap", "exponential")


@twin(lacks={"weighting=cap": "caps need incomplete beta functions", "resolution": "caps need incomplete beta functions"})
def sdm_attention(
    queries, addresses, pointers, *, radius=None, weighting="circle", beta=None, resolution=None, n_iters=1, unit_norm=False,
    return_weights=False,
):
    """Averages (..., n, d) of the pointers (..., m, d) that queries read by their cosines to the addresses; the reference's parameters.

    Raises ValueError for caps, and for "exponential" without a beta, which the reference fits.
    """
    one_of("weighting", weighting, WEIGHTINGS)
    d, kind = queries.shape[-1], queries.dtype
    if weighting == "cap" or resolution is not None:
        raise ValueError("weighting: expected 'circle' or 'exponential', got 'cap'; the reference has caps")
    if (weighting == "circle" or beta is None) and d < 1:
        raise ValueError(f"queries: expected at least 1 in the last axis, got {d}")
    if weighting == "exponential":
        if beta is None:
            raise ValueError("beta: expected a number, got None; the reference fits one")
        beta = float(number("beta", beta, finite=True))
        table = None
    else:
        if radius is None:
            raise ValueError("radius: expected a whole number, got None")
        reach = whole("radius", int(radius))
        if reach > d:
            raise ValueError(f"radius: expected a whole number from 0 to the {d} bits of an address, got {reach}")
        table = np.array([logarithm(Fraction(one)) for one in intersections(d, reach)])

    p, values, xi = unit(addresses.astype(np.float64)), pointers.astype(np.float64), queries.astype(np.float64)
    for _ in range(whole("n_iters", n_iters, least=1)):
        if table is None:
            o, P, _ = tiled_attention(unit(xi), p, values, scale=beta, return_weights=return_weights)
            reached = np.full((*o.shape[:-1], 1), p.shape[-2] > 0)
        else:
            o, P, reached = by_circles(unit(xi), p, values, table, return_weights)
        xi = np.where(reached, unit(o) if unit_norm else o, xi)
    out = xi.astype(kind)
    return AttentionResult(out, P.astype(kind)) if return_weights else out


def unit(x):
    """Vectors of length 1; zeros stay."""
    top = np.max(np.abs(x), axis=-1, keepdims=True, initial=0.0)
    scaled = x / np.where(top == 0, 1.0, top)
    length = np.sqrt(np.sum(scaled * scaled, axis=-1, keepdims=True))
    return scaled / np.where(length == 0, 1.0, length)


def by_circles(queries, addresses, values, table, return_weights):
    """(out, weights or None, reached) for the weights exp(table[distance])."""
    lead = np.broadcast_shapes(queries.shape[:-2], addresses.shape[:-2], values.shape[:-2])
    q, q_of = heads_of(queries, lead)
    k, k_of = heads_of(addresses, lead)
    v, v_of = heads_of(values, lead)
    heads, n, m = math.prod(lead), q.shape[1], k.shape[1]
    out, reached = np.empty((heads, n, v.shape[-1])), np.zeros((heads, n, 1), np.bool_)
    weights = np.zeros((heads, n, m) if return_weights else (0, 0, 0))
    in_parallel(circle_blocks, heads * -(-n // QUERIES), q, q_of, packed_rows(k), k_of, m, packed_columns(v), v_of, chunks_finite(v), table,
                out, reached, weights, work=heads * n * m * 100)
    return out.reshape(*lead, n, -1), weights.reshape(*lead, n, m) if return_weights else None, reached.reshape(*lead, n, 1)


@kernel
def circle_blocks(q, q_of, keys, k_of, m, values, v_of, finite, table, out, reached, weights, first, step):
    """out (h, n, e): a sweep for the largest weight of each row, one for the sums, and one more for weights that are asked for."""
    heads, n, e = out.shape
    d, width, e_step = q.shape[2], keys.shape[3], values.shape[1] * values.shape[3]
    blocks, top = (n + QUERIES - 1) // QUERIES, np.empty(QUERIES, np.float64)
    block, S = np.zeros((QUERIES, d), np.float64), np.empty((QUERIES, KEYS + width), np.float64)
    acc, total = np.empty((QUERIES, e_step), np.float64), np.empty(QUERIES, np.float64)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        rows = min(QUERIES, n - i0)
        copy_rows(q, q_of[h], i0, rows, block)
        acc[:], total[:], top[:] = 0.0, 0.0, -np.inf
        for sweep in range(3 if weights.size else 2):
            for j in range(0, m, KEYS):
                count = min(KEYS, m - j)
                rows_product(block, rows, keys, k_of[h] * keys.shape[1] * d * width, d * width, j // width, (count + width - 1) // width, d,
                             S, S.shape[1], 1.0)
                for r in range(rows):
                    for t in range(count):
                        cosine = S[r, t]
                        log_w = np.nan
                        if cosine == cosine:
                            log_w = table[int(min(max(np.floor(d * (1 - cosine) / 2 + 1e-9), 0.0), float(d)))]
                        if sweep == 0:
                            top[r] = log_w if log_w > top[r] or log_w != log_w else top[r]
                        else:
                            S[r, t] = np.exp(log_w - top[r]) if log_w > -np.inf or log_w != log_w else 0.0
                            if sweep == 2:
                                weights[h, i0 + r, j + t] = S[r, t] / total[r] if total[r] != 0 else 0.0
                    if sweep == 1:
                        for start in range(0, count, CHUNK):
                            part = 0.0
                            for t in range(start, min(count, start + CHUNK)):
                                part += S[r, t]
                            total[r] += part
                if sweep == 1:
                    for start in range(0, count, CHUNK):
                        terms = min(CHUNK, count - start)
                        if finite[v_of[h], (j + start) // CHUNK]:
                            add_columns_product(S, rows, S.shape[1], start, terms, values, v_of[h] * m * e_step, j + start, acc, e_step)
                        else:
                            for r in range(rows):
                                for t in range(terms):
                                    if S[r, start + t] != 0:
                                        for p in range(values.shape[1]):
                                            for w in range(width):
                                                acc[r, p * width + w] += S[r, start + t] * values[v_of[h], p, j + start + t, w]
        for r in range(rows):
            reached[h, i0 + r, 0] = top[r] > -np.inf or top[r] != top[r]
            for c in range(e):
                out[h, i0 + r, c] = acc[r, c] / total[r] if total[r] != 0 else 0.0
