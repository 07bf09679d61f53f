"""Twin of reference/affine/affine_scaled.py: tiles of softmax attention, then alpha out + beta sum v in one pass over the rows.

The sum of the values that a query sees is one sum a head where all are seen, a running sum where a causal mask cuts it, both in float64;
under a mask of its own it is a product of tiles of ones with the values. An infinite value times alpha P + beta is not the sum of its
products with both: where there are such values, one more pass adds them with the whole weight.
"""

import numpy as np

from attnspec.numba_kernels.affine.projections import project
from attnspec.numba_kernels.arrays import heads_of, summed_like, without_axes
from attnspec.numba_kernels.exponential import LOG2_E
from attnspec.numba_kernels.jit import helper, kernel
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
    sum_of_sizes,
    weights_axes,
    whole_registers,
)
from attnspec.numba_kernels.softmax.tiles_backward import gradients
from attnspec.numba_kernels.twin import twin
from attnspec.reference.affine.affine_scaled import AffineGradients
from attnspec.reference.inputs import AttentionResult, one_of, sum_to_shape

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
    alpha = activated(np.swapaxes(project(x, w_a), -1, -2), phi)                          # (..., h, n)
    call = flattened(q, k, v, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa, beside=(alpha[..., None],))
    heads, n, m, _, e = call.sizes
    out, weights, _, saved = forward(call, return_weights=return_weights, save=True)
    sums, counts = visible_sums(call.v, call.v_of, n, call.mask, call.mask_of, call.low, call.high)
    factors = (*heads_of(alpha, call.lead, 1), *heads_of(alpha_ma, call.lead, 0), counts, q.dtype.type(m if n_keys == "total" else 0))
    blocks = heads * -(-n // QUERIES)
    in_parallel(scale_and_shift, blocks, out, sums, *factors, call.mask, call.mask_of, call.low, call.high, weights, work=10 * out.size)
    finite = chunks_finite(call.v)
    if not finite.all():
        in_parallel(put_infinite_values, blocks, call.q, call.q_of, call.k, call.k_of, call.v, call.v_of, finite, call.scale, saved,
                    *factors, call.mask, call.mask_of, call.low, call.high, out, work=heads * n * m)
    out = out.reshape(*call.lead, n, e)
    if not return_weights:
        return out
    front = np.broadcast_shapes(weights_axes(q, k, mask=mask, enable_gqa=enable_gqa), alpha.shape[:-1], alpha_ma.shape)
    return AttentionResult(out, without_axes(weights.reshape(*call.lead, n, m), front))


@twin
def affine_scaled_attention_backward(
    q, k, v, x, w_a, alpha_ma, do, *, scale=None, phi="linear_clipping", n_keys="total", mask=None, causal=False, enable_gqa=False,
):
    """AffineGradients of `affine_scaled_attention` for the cotangent do (..., h, n, e); the parameters are those of the reference."""
    one_of("phi", phi, ACTIVATIONS)
    one_of("n_keys", n_keys, N_KEYS)
    z = np.swapaxes(project(x, w_a), -1, -2)[..., None]                                   # (..., h, n, 1)
    alpha = activated(z, phi)
    call = flattened(q, k, v, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa, beside=(alpha, do))
    lead, (heads, n, m, _, e) = call.lead, call.sizes
    out, _, _, saved = forward(call, save=True)
    of_softmax = gradients(call, alpha * do, out, saved)

    sums, counts = visible_sums(call.v, call.v_of, n, call.mask, call.mask_of, call.low, call.high)
    seen = np.broadcast_to(counts, (heads, n)).reshape(*lead, n, 1)
    N = np.maximum(q.dtype.type(m) if n_keys == "total" else seen, q.dtype.type(1))
    beta = np.where(seen > 0, (alpha_ma[:, None, None] - alpha) / N, q.dtype.type(0))
    shifted, shift_of = heads_of(beta * do, lead)
    dv = of_softmax.dv + turned_sums(shifted, shift_of, m, call.mask, call.mask_of, call.high)

    sums = np.broadcast_to(sums, (heads, n, e)).reshape(*lead, n, e)
    dalpha = np.sum(do * (out.reshape(*lead, n, e) - sums / N), axis=-1, dtype=np.float64)
    slope = alpha * (1 - alpha) if phi == "sigmoid" else np.where((z > -5) & (z < 5), 0.1, 0)
    dz = np.where(seen[..., 0] > 0, dalpha * slope[..., 0], 0).astype(q.dtype)            # (..., h, n)
    dx = project(np.swapaxes(dz, -1, -2), w_a.T)

    dq, dk, dv = (summed_like(x, lead, like, grouped=shared) for x, like, shared in (
        (of_softmax.dq, q, False), (of_softmax.dk, k, enable_gqa), (dv, v, enable_gqa)))
    return AffineGradients(dq, dk, dv, sum_to_shape(dx, x.shape), sum_to_shape(gradient_by_w_a(dz, x, seen[..., 0] > 0), w_a.shape))


def gradient_by_w_a(dz, x, seen):
    """sum_i dz_hi x_i, (..., h, c), of dz (..., h, n) and x (..., n, c); an x that is not finite only where a head's query sees a key."""
    turned = np.swapaxes(x, -1, -2)
    if np.isfinite(x).all():
        return project(dz, turned)
    rows = [project(dz[..., h : h + 1, :], np.where(seen[..., h, None, :], turned, 0)) for h in range(dz.shape[-2])]
    return np.concatenate(rows, axis=-2)


def activated(z, phi):
    """alpha = phi(z), in the dtype of z."""
    if phi == "sigmoid":
        e = np.exp(-np.abs(z))
        return np.where(z < 0, e, 1) / (1 + e)
    return np.where(z <= -5, 0, np.where(z >= 5, 1, z.dtype.type(0.1) * z + z.dtype.type(0.5)))


@helper
def factors_of_query(h, i, alpha, alpha_of, average, average_of, counts, N):
    """alpha and beta = (alpha_ma - alpha) / N of a query, and how many keys it sees; N = 0: as many as these."""
    seen = counts[h if counts.shape[0] > 1 else 0, i if counts.shape[1] > 1 else 0]
    a = alpha[alpha_of[h], i]
    return a, (average[average_of[h]] - a) / max(N if N > 0 else seen, alpha.dtype.type(1)), seen


@kernel
def scale_and_shift(
    out, sums, alpha, alpha_of, average, average_of, counts, N, mask, mask_of, low, high, weights, first, step,
):
    """out (h, n, e) and weights (h, n, m) in place: alpha out + beta sums, and alpha weights + beta."""
    heads, n, e = out.shape
    blocks = (n + QUERIES - 1) // QUERIES
    zero = out.dtype.type(0)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        for i in range(i0, min(n, i0 + QUERIES)):
            a, beta, seen = factors_of_query(h, i, alpha, alpha_of, average, average_of, counts, N)
            line = sums[h, i if sums.shape[1] > 1 else 0]
            for c in range(e):
                out[h, i, c] = a * out[h, i, c] + beta * line[c] if seen > 0 else zero
            for j in range(weights.shape[2]):
                if sees(i, j, low, high, mask, mask_of[h] if mask.size else 0):
                    weights[h, i, j] = a * weights[h, i, j] + beta


@kernel
def put_infinite_values(
    q, q_of, k, k_of, v, v_of, finite, scale, saved, alpha, alpha_of, average, average_of, counts, N, mask, mask_of, low, high, out,
    first, step,
):
    """out[h, i, c] = sum_j (alpha_i P_ij + beta_i) v_jc over the values that are not finite, where query i sees any in column c."""
    heads, n, e = out.shape
    m, d = k.shape[1:]
    blocks = (n + QUERIES - 1) // QUERIES
    kind = out.dtype.type
    total, met = np.empty(e, out.dtype), np.empty(e, np.bool_)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        mask_one = mask_of[h] if mask.size else 0
        for i in range(i0, min(n, i0 + QUERIES)):
            a, beta, _ = factors_of_query(h, i, alpha, alpha_of, average, average_of, counts, N)
            total[:] = kind(0)
            met[:] = False
            for j in range(m):
                if finite[v_of[h], j // CHUNK] or not sees(i, j, low, high, mask, mask_one):
                    continue
                s = kind(0)
                for c in range(d):
                    s += q[q_of[h], i, c] * k[k_of[h], j, c]
                share = saved[1, h, i]
                weight = kind(0) if share == 0 else np.exp2(s * scale * kind(LOG2_E) - saved[0, h, i]) / share
                for c in range(e):
                    if not np.isfinite(v[v_of[h], j, c]):
                        total[c] += (a * weight + beta) * v[v_of[h], j, c]
                        met[c] = True
            for c in range(e):
                if met[c]:
                    out[h, i, c] = total[c]


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


@helper
def ones_of_row(row, i, j0, keys, mask, one, low, high):
    """1 where query i sees a key, 0 where not and in the columns that fill up a register."""
    kind = row.dtype.type
    seen = mask[one, i if mask.shape[1] > 1 else 0]
    if mask.shape[2] > 1:
        for t in range(keys):
            row[t] = kind(1) if seen[j0 + t] else kind(0)
    else:
        row[:keys] = kind(1) if seen[0] else kind(0)
    for t in range(min(i + low - j0, keys)):
        row[t] = kind(0)
    for t in range(max(i + high + 1 - j0, 0), keys):
        row[t] = kind(0)
    for t in range(keys, whole_registers(keys, row)):
        row[t] = kind(0)


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
        for j in range(max(0, i0 + low) // KEYS * KEYS, min(m, i0 + rows + high), KEYS):
            keys = min(KEYS, m - j)
            for r in range(rows):
                ones_of_row(ones[r], i0 + r, j, keys, mask, mask_of[h], low, high)
                counts[h, i0 + r] += sum_of_sizes(ones[r], whole_registers(keys, ones))
            for start in range(0, keys, CHUNK):
                terms = min(CHUNK, keys - start)
                if finite[v_of[h], (j + start) // CHUNK]:
                    add_columns_product(ones, rows, KEYS, start, terms, values, v_of[h] * m * e_step, j + start, acc, e_step)
                else:
                    add_chosen_values(ones, i0, rows, start, terms, values, v_of[h], j + start, low, high, mask, mask_of[h], acc)
        for r in range(rows):
            for c in range(e):
                sums[h, i0 + r, c] = acc[r, c]
