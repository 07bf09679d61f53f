"""Twin of reference/memory/sdm_attention.py over tiles of patterns: memory of order n + m unless the weights are asked for.

"exponential" is softmax attention of unit vectors in the arrays' dtype. Circles and caps are weighed in float64 whatever the arrays are,
since one rounding of a cosine would otherwise move a distance by one bit, and so is a beta that float32 does not hold.
"""

import functools
import math

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.exponential import LOG2_E
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, add_columns_product, packed_columns, packed_rows, rows_product
from attnspec.numba_kernels.memory.sdm import fitted_beta, required
from attnspec.numba_kernels.memory.sdm_circle import bits_and_radius, log_intersections
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.softmax.tiles import KEYS, QUERIES, chunks_finite, copy_rows, tiled_attention, weigh_row, whole_registers
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, one_of, whole

WEIGHTINGS = ("circle", "cap", "exponential")
CIRCLE, CACHE, CAP, EXPONENTIAL = range(4)      # how a cosine becomes a weight
COLD = 2.0**64                                  # a beta up to here goes into float32 logits


@twin
def sdm_attention(
    queries, addresses, pointers, *, radius=None, weighting="circle", beta=None, resolution=None, n_iters=1, unit_norm=False,
    return_weights=False,
):
    """Averages (..., n, d) of the pointers (..., m, d) that queries read by their cosines to the addresses; the reference's parameters."""
    one_of("weighting", weighting, WEIGHTINGS)
    d, dtype = queries.shape[-1], queries.dtype
    if d < 1 and (weighting != "exponential" or beta is None):
        raise ValueError(f"queries: expected at least 1 in the last axis, got {d}")
    if weighting == "cap" and d == 1:
        raise ValueError("weighting: expected 'circle' or 'exponential' where vectors have one dimension, got 'cap'")
    if weighting == "exponential":
        beta = float(fitted_beta(beta, d, radius))
    else:
        radius = required(radius)
    steps = whole("n_iters", n_iters, least=1)
    soft = weighting == "exponential" and abs(beta) <= COLD
    if not soft:
        kind, constants, table = weights_of(weighting, d, radius, beta, resolution)

    xi, p, of_weights = queries.astype(np.float64), unit(addresses.astype(np.float64)), ()
    for step in range(steps):
        of_weights, ask = np.broadcast_shapes(xi.shape[:-2], p.shape[:-2]), return_weights and step == steps - 1
        if soft:
            o, P, _ = tiled_attention(unit(xi).astype(dtype), p.astype(dtype), pointers, scale=beta, return_weights=ask)
            reached = np.full((*o.shape[:-1], 1), p.shape[-2] > 0)
        else:
            o, P, reached = weighed(unit(xi), p, pointers.astype(np.float64), kind, constants, table, ask)
        o = o.astype(np.float64)
        xi = np.where(reached, unit(o) if unit_norm else o, xi)
    out = xi.astype(dtype)
    if not return_weights:
        return out
    P = P[(0,) * (P.ndim - 2 - len(of_weights))]                            # without the copies for leading axes of pointers
    return AttentionResult(out, P[tuple(slice(size) for size in of_weights)].astype(dtype))


def unit(x):
    """Vectors of length 1; zeros stay, infinite ones are NaN."""
    top = np.max(np.abs(x), axis=-1, keepdims=True, initial=0.0)
    scaled = x / np.where(top == 0, 1.0, top)
    length = np.sqrt(np.sum(scaled * scaled, axis=-1, keepdims=True))
    return scaled / np.where(length == 0, 1.0, length)


def weights_of(weighting, d, radius, beta, resolution):
    """(kind, constants, table) for `log_weights`."""
    if weighting == "exponential":
        return EXPONENTIAL, np.array([beta]), np.zeros((0, 0))
    n, radius = bits_and_radius(d, radius)
    if weighting == "circle":
        return CIRCLE, np.array([d], np.float64), log_intersections(n, radius)[:, None]
    constants, table = cap_pieces(n, radius)
    if resolution is None:
        return CAP, constants, table
    K = whole("resolution", resolution, least=2)
    cache = np.linspace(-1, 1, K)
    log_weights(cache, K, CAP, constants, table, 0.0)
    return CACHE, np.array([K], np.float64), cache[:, None]


# --- caps ----------------------------------------------------------------------------------------------------------------------------

# tanh-sinh rule for int_0^1
T = 0.025 * np.arange(-136, 137)
NODES = 1 / (1 + np.exp(-np.pi * np.sinh(T)))
SHARES = 0.025 * np.pi * np.cosh(T) * NODES / (1 + np.exp(np.pi * np.sinh(T)))
DEGREE = 15


@functools.lru_cache(8)
def cap_pieces(n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """(delta, (n - 2)/2, band) and the pieces (start, end, coefficients) of mean(L), on which a Chebyshev sum gives it to rounding.

        share of two caps = L/pi rho(L)^((n-2)/2) mean(L),   mean(L) = int_0^1 (rho(s L) / rho(L))^((n-2)/2) ds,   L = theta - theta_v/2

    band: what complements of caps larger than a hemisphere leave between them.
    """
    h, power = 1 - 2 * d / n, (n - 2) / 2
    delta, band = math.asin(abs(h)), 0.0
    if h < 0:
        from scipy.special import betainc

        band = float(betainc(1 / 2, (n - 1) / 2, math.cos(math.acos(h)) ** 2))

    def rho(psi):
        return np.sin(psi) * np.sin(psi + 2 * delta) / np.sin(psi + delta) ** 2

    def mean(L):
        return (rho(NODES[:, None] * L) / rho(L)) ** power * SHARES[:, None]

    angles = np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1)
    to_coefficients = 2 / (DEGREE + 1) * np.cos(np.arange(DEGREE + 1)[:, None] * angles)
    to_coefficients[0] /= 2
    # Rounding grows with the power. A piece as short as the way to the singularity at -2 delta, or a peak's width, needs no halving.
    close, shortest = 4e-16 * (4 + power), max(min(delta, 1 / math.sqrt(power + 1)) / 8, 1e-5)
    pieces, waiting = [], [(0.0, np.pi / 2 - delta)]
    while waiting:
        start, end = waiting.pop()
        if end <= start:
            continue
        values = mean((start + end) / 2 + (end - start) / 2 * np.cos(angles)).sum(axis=0)
        coefficients = to_coefficients @ values
        if np.max(np.abs(coefficients[-3:])) > close * np.max(values) and end - start > shortest:
            middle = (start + end) / 2
            waiting += [(middle, end), (start, middle)]
        else:
            pieces.append([start, end, *coefficients])
    return np.array([delta, power, band]), np.array(pieces).reshape(-1, DEGREE + 3)


@helper
def log_cap(cosine, delta, power, band, pieces):
    """Logarithm of the share of the sphere in two caps."""
    L = np.pi / 2 - delta - np.arccos(min(max(cosine, -1.0), 1.0)) / 2
    log_share = -np.inf
    if L > 0:
        low, high = 0, len(pieces) - 1
        while low < high:
            middle = (low + high) // 2
            if pieces[middle, 1] >= L:
                high = middle
            else:
                low = middle + 1
        piece = pieces[low]
        x = (2 * L - piece[0] - piece[1]) / (piece[1] - piece[0])
        b, before = 0.0, 0.0
        for k in range(DEGREE, 0, -1):
            b, before = piece[2 + k] + 2 * x * b - before, b
        mean = piece[2] + x * b - before
        rho = np.sin(L) * np.sin(L + 2 * delta) / np.sin(L + delta) ** 2
        log_share = np.log(L / np.pi) + power * np.log(rho) + np.log(mean)
    return np.log(band + np.exp(log_share)) if band > 0 else log_share


# --- tiles ---------------------------------------------------------------------------------------------------------------------------


@kernel
def log_weights(row, count, kind, constants, table, nearest):
    """Replace cosines row[:count] by the logarithms of their weights; nearest: the cosine whose weight is 1, for EXPONENTIAL."""
    last = len(table) - 1.0
    for t in range(count):
        cosine = row[t]
        if cosine != cosine:
            continue
        if kind == CIRCLE:
            row[t] = table[int(min(max(np.floor(constants[0] * (1 - cosine) / 2 + 1e-9), 0.0), last)), 0]
        elif kind == CACHE:
            row[t] = table[int(min(max(np.trunc(constants[0] * (cosine + 1) / 2 - 1), 0.0), last)), 0]
        elif kind == CAP:
            row[t] = log_cap(cosine, constants[0], constants[1], constants[2], table)
        else:
            row[t] = constants[0] * (cosine - nearest)


def weighed(queries, addresses, values, kind, constants, table, return_weights):
    """(out, weights or None, reached) of unit vectors; arrays of float64."""
    lead = np.broadcast_shapes(queries.shape[:-2], addresses.shape[:-2], values.shape[:-2])
    q, q_of = heads_of(queries, lead)
    k, k_of = heads_of(addresses, lead)
    v, v_of = heads_of(values, lead)
    heads, n, m, e = math.prod(lead), q.shape[1], k.shape[1], v.shape[2]
    out, reached = np.empty((heads, n, e)), np.empty((heads, n, 1), np.bool_)
    weights = np.empty((heads, n, m) if return_weights else (0, 0, 0))
    in_parallel(weigh_blocks, heads * -(-n // QUERIES), q, q_of, packed_rows(k), k_of, m, packed_columns(v), v_of, chunks_finite(v), kind,
                constants, table, out, reached, weights, work=heads * n * m * (q.shape[2] + e))
    return out.reshape(*lead, n, e), weights.reshape(*lead, n, m) if return_weights else None, reached.reshape(*lead, n, 1)


@helper
def tile(block, rows, keys, one, j, count, S):
    """S[:rows, :count]: cosines to the addresses from j on."""
    d, width = keys.shape[2:]
    rows_product(block, rows, keys, one * keys.shape[1] * d * width, d * width, j // width, (count + width - 1) // width, d, S, S.shape[1],
                 1.0)


@kernel
def weigh_blocks(q, q_of, keys, k_of, m, values, v_of, finite, kind, constants, table, out, reached, weights, first, step):
    """out (h, n, e), reached (h, n, 1) and, where it has entries, weights (h, n, m): softmax over tiles whose logits are log weights."""
    heads, n, e = out.shape
    d, width, e_step = q.shape[2], keys.shape[3], values.shape[1] * values.shape[3]
    blocks = (n + QUERIES - 1) // QUERIES
    block, S = np.zeros((QUERIES, d), np.float64), np.empty((QUERIES, KEYS + width), np.float64)
    seen, acc = np.empty((QUERIES, KEYS), np.bool_), np.empty((QUERIES, e_step), np.float64)
    top, total, nearest = np.empty(QUERIES, np.float64), np.empty(QUERIES, np.float64), np.zeros(QUERIES, np.float64)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        rows = min(QUERIES, n - i0)
        copy_rows(q, q_of[h], i0, rows, block)
        top[:], total[:], acc[:] = -np.inf, 0.0, 0.0
        for r in range(rows):
            reached[h, i0 + r, 0] = False
        if kind == EXPONENTIAL:                              # a beta near the end of float64 leaves no room for the logits themselves
            sign = np.sign(constants[0])
            nearest[:] = -np.inf
            for j in range(0, m, KEYS):
                count = min(KEYS, m - j)
                tile(block, rows, keys, k_of[h], j, count, S)
                for r in range(rows):
                    for t in range(count):
                        nearest[r] = max(nearest[r], sign * S[r, t])
            nearest *= sign
        for j in range(0, m, KEYS):
            count = min(KEYS, m - j)
            tile(block, rows, keys, k_of[h], j, count, S)
            stop = whole_registers(count, S)
            for r in range(rows):
                row = S[r]
                log_weights(row, count, kind, constants, table, nearest[r])
                for t in range(count):
                    seen[r, t] = kind == EXPONENTIAL or row[t] != -np.inf
                    reached[h, i0 + r, 0] |= seen[r, t]
                    row[t] *= LOG2_E
                row[count:stop] = -np.inf
                largest, summed = weigh_row(row, stop, top[r])
                if largest > top[r] and top[r] > -np.inf:
                    factor = np.exp2(top[r] - largest)
                    total[r] *= factor
                    for c in range(e_step):
                        acc[r, c] *= factor
                top[r] = largest
                total[r] += summed
            for start in range(0, count, CHUNK):
                terms = min(CHUNK, count - start)
                if finite[v_of[h], (j + start) // CHUNK]:
                    add_columns_product(S, rows, S.shape[1], start, terms, values, v_of[h] * m * e_step, j + start, acc, e_step)
                    continue
                for r in range(rows):
                    for t in range(start, start + terms):
                        if seen[r, t]:
                            for p in range(values.shape[1]):
                                for w in range(width):
                                    acc[r, p * width + w] += S[r, t] * values[v_of[h], p, j + t, w]
        for r in range(rows):
            for c in range(e):
                out[h, i0 + r, c] = acc[r, c] / total[r] if total[r] != 0 else 0.0
        if weights.size:
            for j in range(0, m, KEYS):
                count = min(KEYS, m - j)
                tile(block, rows, keys, k_of[h], j, count, S)
                for r in range(rows):
                    log_weights(S[r], count, kind, constants, table, nearest[r])
                    for t in range(count):
                        weights[h, i0 + r, j + t] = np.exp2(S[r, t] * LOG2_E - top[r]) / total[r] if total[r] != 0 else 0.0
