"""Twin of reference/affine/affine_scaled.py: tiles of softmax attention, then alpha out + beta sum v in one pass over the rows.

The sum of the values that a query sees is one sum a head where all are seen, a running sum where a causal mask cuts it, both in float64;
under a mask of its own it is a product of tiles of ones with the values.
"""

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.matrix import CHUNK, add_columns_product, packed_columns
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.softmax.tiles import (
    FAR,
    KEYS,
    QUERIES,
    add_chosen_values,
    chunks_finite,
    flattened,
    forward,
    sees,
)
from attnspec.numba_kernels.softmax.tiles_backward import tiled_backward
from attnspec.numba_kernels.twin import twin
from attnspec.reference.affine.affine_scaled import AffineGradients
from attnspec.reference.inputs import AttentionResult, one_of, sum_groups, sum_to_shape

ACTIVATIONS = ("linear_clipping", "sigmoid")
N_KEYS = ("total", "allowed")


@twin
def affine_scaled_attention(
    q, k, v, x, w_a, alpha_ma, *, scale=None, phi="linear_clipping", n_keys="total", mask=None, causal=False, enable_gqa=False,
    return_weights=False,
):
    """Affine-scaled attention of q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e); the parameters are those of the reference."""
    one_of("phi", phi, ACTIVATIONS)
    one_of("n_keys", n_keys, N_KEYS)
    alpha = alphas(x, w_a, phi)                                                           # (..., h, n)
    call = flattened(q, k, v, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa, beside=(alpha[..., None],))
    heads, n, m, _, _ = call.sizes
    out, weights, _, _ = forward(call, return_weights=return_weights)
    sums, counts = visible_sums(call.v, call.v_of, n, call.mask, call.mask_of, call.low, call.high)
    alpha, alpha_of = heads_of(alpha, call.lead, 1)
    average, average_of = heads_of(alpha_ma, call.lead, 0)
    in_parallel(scale_and_shift, heads * -(-n // QUERIES), out, sums, counts, q.dtype.type(m if n_keys == "total" else 0), alpha, alpha_of,
                average, average_of, call.mask, call.mask_of, call.low, call.high, weights, work=10 * out.size)
    out = out.reshape(*call.lead, n, out.shape[-1])
    return AttentionResult(out, weights.reshape(*call.lead, n, m)) if return_weights else out


@twin
def affine_scaled_attention_backward(
    q, k, v, x, w_a, alpha_ma, do, *, scale=None, phi="linear_clipping", n_keys="total", mask=None, causal=False, enable_gqa=False,
):
    """AffineGradients of `affine_scaled_attention` for the cotangent do (..., h, n, e); the parameters are those of the reference."""
    one_of("phi", phi, ACTIVATIONS)
    one_of("n_keys", n_keys, N_KEYS)
    alpha = alphas(x, w_a, phi)[..., None]                                                # (..., h, n, 1)
    call = flattened(q, k, v, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa, beside=(alpha, do))
    lead, (_, n, m, _, e) = call.lead, call.sizes
    do = np.broadcast_to(do, (*lead, n, e))
    dq, dk, dv, _, _ = tiled_backward(q, k, v, alpha * do, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa)

    out = forward(call)[0].reshape(*lead, n, e)
    sums, counts = visible_sums(call.v, call.v_of, n, call.mask, call.mask_of, call.low, call.high)
    seen = np.broadcast_to(counts, (len(call.q_of), n)).reshape(*lead, n, 1)
    N = np.maximum(m if n_keys == "total" else seen, 1)
    sums = np.broadcast_to(sums, (len(call.q_of), n, e)).reshape(*lead, n, e)
    beta = np.where(seen > 0, (alpha_ma[:, None, None] - alpha) / N, 0)
    shifted, shift_of = heads_of((beta * do).astype(q.dtype), lead)
    added = turned_sums(shifted, shift_of, m, call.mask, call.mask_of, call.high)
    added = np.broadcast_to(added, (len(call.q_of), m, e)).reshape(*lead, m, e)
    dv = dv + sum_to_shape(sum_groups(added, v.shape[-3]) if enable_gqa else added, v.shape)

    dalpha = np.sum(do.astype(np.float64) * (out - sums / N), axis=-1)
    slope = np.where(alpha * (1 - alpha) > 0, 0.1, 0.0)[..., 0] if phi != "sigmoid" else (alpha * (1 - alpha))[..., 0]
    dz = np.where(seen[..., 0] > 0, dalpha * slope, 0.0)                                  # (..., h, n)
    dx, dw_a = np.swapaxes(dz, -1, -2) @ w_a, dz @ np.where(np.any(seen > 0, axis=-3), x, 0)
    dx, dw_a = (sum_to_shape(y, like.shape) for y, like in ((dx, x), (dw_a, w_a)))
    return AffineGradients(dq, dk, *(y.astype(q.dtype) for y in (dv, dx, dw_a)))


def alphas(x, w_a, phi):
    """alpha (..., h, n) = phi(<w_a[h], x_i>)."""
    z = w_a @ np.swapaxes(x, -1, -2)
    if phi == "sigmoid":
        e = np.exp(-np.abs(z))
        return np.where(z < 0, e, 1) / (1 + e)
    return np.where(z <= -5, 0, np.where(z >= 5, 1, z.dtype.type(0.1) * z + z.dtype.type(0.5))).astype(z.dtype, copy=False)


@kernel
def scale_and_shift(
    out, sums, counts, N, alpha, alpha_of, average, average_of, mask, mask_of, low, high, weights, first, step,
):
    """out (h, n, e) and weights (h, n, m) in place: alpha out + (alpha_ma - alpha) / N sums. N = 0: as many as a query sees."""
    heads, n, e = out.shape
    blocks = (n + QUERIES - 1) // QUERIES
    zero, one = out.dtype.type(0), out.dtype.type(1)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        for i in range(i0, min(n, i0 + QUERIES)):
            seen = counts[h if counts.shape[0] > 1 else 0, i if counts.shape[1] > 1 else 0]
            a = alpha[alpha_of[h], i]
            beta = (average[average_of[h]] - a) / max(N if N > 0 else seen, one)
            line = sums[h, i if sums.shape[1] > 1 else 0]
            for c in range(e):
                out[h, i, c] = a * out[h, i, c] + beta * line[c] if seen > 0 else zero
            for j in range(weights.shape[2]):
                if sees(i, j, low, high, mask, mask_of[h] if mask.size else 0):
                    weights[h, i, j] = a * weights[h, i, j] + beta


def visible_sums(values, of, n, mask, mask_of, low, high) -> tuple[np.ndarray, np.ndarray]:
    """The sums (heads, n or 1, e) of the values (b, m, e) that each query sees, and how many these are, (heads or 1, n or 1)."""
    heads, (m, e), kind = len(of), values.shape[1:], values.dtype
    if mask.size:
        sums, counts = np.empty((heads, n, e), kind), np.empty((heads, n), kind)
        in_parallel(masked_sums, heads * -(-n // QUERIES), packed_columns(values), of, m, chunks_finite(values), mask, mask_of, low, high,
                    sums, counts, work=heads * n * m * e)
        return sums, counts
    cut = high < m - 1                                     # by a causal mask: a query sees the keys before a place of its own
    stops = np.clip(np.arange(n) + high + 1, 0, m) if cut else np.array([m])
    sums = np.empty((heads, len(stops), e), kind)
    in_parallel(running_sums, heads, values, of, stops, sums, work=heads * m * e)
    return sums, stops[None].astype(kind)


def turned_sums(values, of, m, mask, mask_of, high) -> np.ndarray:
    """The sums (heads, m or 1, e) of values (b, n, e) of queries over those that see each key."""
    n = values.shape[1]
    if mask.size:
        turned = np.ascontiguousarray(np.swapaxes(np.broadcast_to(mask, (len(mask), n, m)), -1, -2))
        return visible_sums(values, of, m, turned, mask_of, -high, FAR)[0]
    backwards = np.ascontiguousarray(values[:, ::-1])      # key j is seen by the queries from j - high on
    return visible_sums(backwards, of, m, mask, mask_of, -FAR, n - m + high)[0][:, ::-1]


@kernel
def running_sums(v, v_of, stops, sums, first, step):
    """sums (h, rows, e) of the first `stops` values, added in float64."""
    heads, rows, e = sums.shape
    for h in range(first, heads, step):
        total = np.zeros(e, np.float64)
        j = 0
        for i in range(rows):
            while j < stops[i]:
                for c in range(e):
                    total[c] += v[v_of[h], j, c]
                j += 1
            for c in range(e):
                sums[h, i, c] = total[c]


@kernel
def masked_sums(values, v_of, m, finite, mask, mask_of, low, high, sums, counts, first, step):
    """sums (h, n, e) and counts (h, n) under a mask: tiles of ones and zeros times packed values."""
    heads, n, e = sums.shape
    e_step = values.shape[1] * values.shape[3]
    blocks = (n + QUERIES - 1) // QUERIES
    kind = sums.dtype.type
    ones, acc = np.empty((QUERIES, KEYS), sums.dtype), np.empty((QUERIES, e_step), sums.dtype)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        rows = min(QUERIES, n - i0)
        acc[:] = kind(0)
        for r in range(rows):
            counts[h, i0 + r] = kind(0)
        for j in range(0, m, KEYS):
            keys = min(KEYS, m - j)
            for r in range(rows):
                for t in range(keys):
                    ones[r, t] = kind(1) if sees(i0 + r, j + t, low, high, mask, mask_of[h]) else kind(0)
                    counts[h, i0 + r] += ones[r, t]
            for start in range(0, keys, CHUNK):
                terms = min(CHUNK, keys - start)
                if finite[v_of[h], (j + start) // CHUNK]:
                    add_columns_product(ones, rows, KEYS, start, terms, values, v_of[h] * m * e_step, j + start, acc, e_step)
                else:
                    add_chosen_values(ones, i0, rows, start, terms, values, v_of[h], j + start, low, high, mask, mask_of[h], acc)
        for r in range(rows):
            for c in range(e):
                sums[h, i0 + r, c] = acc[r, c]
