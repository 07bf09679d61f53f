"""Gradients of attention over pairs, the weights computed again from the logits, for one of the two sets of keys at a time.

A task is a part of the blocks of queries of one head. For each block and each first key j1 that some of its queries see:

    S = scale (q ∘ k1_j1) k2^T log2(e),  W = 2^(S - top)                   (rows, keys), tile by tile as forward
    G = (do ∘ v1_j1) v2^T,  dS = W G - W D,  D_i = <do_i, out_i>
    Y += dS k2,  T += W v2                                                (rows, d), (rows, e)
    dq_i += scale Y_i ∘ k1_j1 / total_i
    dk1_j1 += scale sum_i q_i ∘ Y_i / total_i,  dv1_j1 += sum_i do_i ∘ T_i / total_i

so that nothing is turned: the gradients of k2 and v2 are those of the first set with the two sets exchanged. Each part of the blocks has
a dk1 and a dv1 of its own, added in order at the end. Where a number is not finite, a second kernel goes pair by pair, in float64.
"""

import math

import numpy as np

from attnspec.numba_kernels.arrays import heads_of, summed_like
from attnspec.numba_kernels.exponential import LOG2_E, exp2_row, range_of_row
from attnspec.numba_kernels.higher_order.pairs import (
    CHUNK,
    KEYS,
    QUERIES,
    TASKS,
    attend_pairs,
    block_rows,
    pair_heads,
    seen_by,
    tile_end,
    tile_logits,
)
from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.matrix import add_columns_product, packed_columns, packed_rows, rows_product
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.softmax.tiles import sees
from attnspec.numba_kernels.softmax.tiles_backward import gradient_of_row


@kernel
def pull_back_blocks(
    size, q, q_of, k1, k1_of, k2, k2_columns, k2_of, v1, v1_of, v2, v2_columns, v2_of, do, do_of, mask, mask_of, starts, stops, low, high,
    scale, tops, totals, delta, dq, dk1, dv1, first, step,
):
    """dq (h, n, d) if it has entries, dk1 (parts, h, m1, d) and dv1 (parts, h, m1, e)."""
    parts, heads, m1, e = dv1.shape
    n, d = q.shape[1:]
    m2, width = k2_columns.shape[2:]
    d_step, e_step = k2_columns.shape[1] * width, v2_columns.shape[1] * width
    blocks = (n + size - 1) // size
    zero, one = q.dtype.type(0), q.dtype.type(1)
    alpha = q.dtype.type(scale * LOG2_E)

    q_block, do_block = np.zeros((QUERIES, d), q.dtype), np.zeros((QUERIES, e), q.dtype)
    q_share, do_share = np.zeros((QUERIES, d), q.dtype), np.zeros((QUERIES, e), q.dtype)       # q scale / total and do / total
    products, cotangents = np.zeros((QUERIES, d), q.dtype), np.zeros((QUERIES, e), q.dtype)
    S, G = np.empty((QUERIES, KEYS + width), q.dtype), np.empty((QUERIES, KEYS + width), q.dtype)
    Y, T = np.empty((QUERIES, d_step), q.dtype), np.empty((QUERIES, e_step), q.dtype)
    dq_block = np.empty((2, QUERIES, d), q.dtype)                        # of all first keys, and of the present chunk of them
    dk, dv = np.empty(d, q.dtype), np.empty(e, q.dtype)

    for task in range(first, heads * parts, step):
        h, part = task // parts, task % parts
        mask_one = mask_of[h] if mask.size else 0
        k2_at, v2_at = k2_of[h] * k2.shape[1] * d * width, v2_of[h] * v2.shape[1] * e * width
        k2_columns_at, v2_columns_at = k2_of[h] * m2 * d_step, v2_of[h] * m2 * e_step
        dk1[part, h], dv1[part, h] = zero, zero
        for b in range(part, blocks, parts):
            i0 = b * size
            rows = min(size, n - i0)
            for r in range(rows):
                share = zero if totals[h, i0 + r] == 0 else one / totals[h, i0 + r]
                for c in range(d):
                    q_block[r, c] = q[q_of[h], i0 + r, c]
                    q_share[r, c] = q_block[r, c] * (share * scale)
                for c in range(e):
                    do_block[r, c] = do[do_of[h], i0 + r, c]
                    do_share[r, c] = do_block[r, c] * share
            dq_block[:] = zero
            for j1 in range(m1):
                r0, r1 = max(0, starts[j1] - i0), min(rows, stops[j1] - i0)
                count1, i = r1 - r0, i0 + r0
                if count1 > 0:
                    key, value = k1[k1_of[h], j1], v1[v1_of[h], j1]
                    mask1 = mask[:, :, j1 if mask.shape[2] > 1 else 0]
                    for r in range(count1):
                        for c in range(d):
                            products[r, c] = q_block[r0 + r, c] * key[c]
                        for c in range(e):
                            cotangents[r, c] = do_block[r0 + r, c] * value[c]
                    Y[:count1], T[:count1] = zero, zero
                    j, j_end = max(0, i + low) // CHUNK * CHUNK, min(m2, i + count1 + high)
                    while j < j_end:
                        count = tile_end(i, count1, j, j_end, high) - j
                        stop = tile_logits(products, i, count1, k2, k2_at, j, count, S, mask1, mask_one, low, high, alpha)
                        panels = (count + width - 1) // width
                        rows_product(cotangents, count1, v2, v2_at, e * width, j // width, panels, e, G, G.shape[1], one)
                        for r in range(count1):
                            smallest, _ = range_of_row(S[r], 0, stop)
                            exp2_row(S[r], 0, stop, tops[h, i + r] if totals[h, i + r] != 0 else zero, smallest)
                        for start in range(0, count, CHUNK):
                            terms = min(CHUNK, count - start)
                            add_columns_product(S, count1, S.shape[1], start, terms, v2_columns, v2_columns_at, j + start, T, e_step)
                        for r in range(count1):
                            gradient_of_row(S[r], G[r], stop, delta[h, i + r])
                        for start in range(0, count, CHUNK):
                            terms = min(CHUNK, count - start)
                            add_columns_product(S, count1, S.shape[1], start, terms, k2_columns, k2_columns_at, j + start, Y, d_step)
                        j += count
                    dk[:], dv[:] = zero, zero
                    for r in range(count1):
                        for c in range(d):
                            dk[c] += q_share[r0 + r, c] * Y[r, c]
                            dq_block[1, r0 + r, c] += Y[r, c] * key[c]
                        for c in range(e):
                            dv[c] += do_share[r0 + r, c] * T[r, c]
                    for c in range(d):
                        dk1[part, h, j1, c] += dk[c]
                    for c in range(e):
                        dv1[part, h, j1, c] += dv[c]
                if (j1 + 1) % CHUNK == 0 or j1 + 1 == m1:
                    for r in range(rows):
                        for c in range(d):
                            dq_block[0, r, c] += dq_block[1, r, c]
                            dq_block[1, r, c] = zero
            if dq.size:
                for r in range(rows):
                    share = zero if totals[h, i0 + r] == 0 else scale / totals[h, i0 + r]
                    for c in range(d):
                        dq[h, i0 + r, c] = dq_block[0, r, c] * share


@kernel
def pull_back_pairs(
    q, q_of, k1, k1_of, k2, k2_of, v1, v1_of, v2, v2_of, do, do_of, mask, mask_of, starts, stops, low, high, scale, tops, totals, delta,
    dq, dk1, dk2, dv1, dv2, first, step,
):
    """The gradients (h, ...) pair by pair: what a query does not see counts nothing, whatever it is."""
    heads, n, d = dq.shape
    m1, m2, e = k1.shape[1], k2.shape[1], v1.shape[2]
    alpha, zero = scale * LOG2_E, q.dtype.type(0)
    dK, dV = np.empty(d, q.dtype), np.empty(e, q.dtype)
    for h in range(first, heads, step):
        x, do_h, mask_one = q[q_of[h]], do[do_of[h]], mask_of[h] if mask.size else 0
        for j1 in range(m1):
            a, v = k1[k1_of[h], j1], v1[v1_of[h], j1]
            mask1 = mask[:, :, j1 if mask.shape[2] > 1 else 0]
            for j2 in range(m2):
                b, w = k2[k2_of[h], j2], v2[v2_of[h], j2]
                dK[:], dV[:] = zero, zero
                seen = False
                for i in range(max(0, starts[j1]), min(n, stops[j1])):
                    if sees(i, j2, low, high, mask1, mask_one):
                        seen = True
                        s, G = zero, zero
                        for c in range(d):
                            s += x[i, c] * a[c] * b[c]
                        for c in range(e):
                            G += do_h[i, c] * (v[c] * w[c])
                        P = zero if totals[h, i] == 0 else np.exp2(alpha * s - tops[h, i]) / totals[h, i]
                        dS = P * (G - delta[h, i]) if P != 0 else zero
                        for c in range(d):
                            dq[h, i, c] += dS * (a[c] * b[c])
                            dK[c] += dS * x[i, c]
                        for c in range(e):
                            dV[c] += P * do_h[i, c]
                if seen:
                    for c in range(d):
                        dk1[h, j1, c] += scale * dK[c] * b[c]
                        dk2[h, j2, c] += scale * dK[c] * a[c]
                    for c in range(e):
                        dv1[h, j1, c] += dV[c] * w[c]
                        dv2[h, j2, c] += dV[c] * v[c]
        for i in range(n):
            for c in range(d):
                dq[h, i, c] *= scale


def exchanged(mask: np.ndarray | None) -> np.ndarray | None:
    """A mask (..., #n, #m1, #m2) for exchanged sets of keys."""
    if mask is None:
        return None
    return np.swapaxes(mask.reshape((1,) * (3 - mask.ndim) + mask.shape), -1, -2)


def pairs_gradients(q, k1, k2, v1, v2, do, mask, causal, scale):
    """(dq, dk1, dk2, dv1, dv2), each of the shape of its array; arrays of one dtype, float32 or float64, checked already."""
    dtype, arrays = q.dtype, (q, k1, k2, v1, v2)
    n, m1, m2, d, e = q.shape[-2], k1.shape[-2], k2.shape[-2], q.shape[-1], v1.shape[-1]
    seen = seen_by(n, (m1, m2), mask, causal)
    lead = np.broadcast_shapes(do.shape[:-2], *(x.shape[:-2] for x in arrays), () if mask is None else mask.shape[:-3])
    heads = math.prod(lead)
    sums = attend_pairs(np.broadcast_to(q, (*lead, n, d)), k1, k2, v1, v2, seen, scale)
    delta = np.sum(do * sums.out, axis=-1).reshape(heads, n)
    tops, totals = sums.top.reshape(heads, n), sums.total.reshape(heads, n)
    (xq, q_of), (x1, k1_of), (x2, k2_of), (y1, v1_of), (y2, v2_of), (dO, do_of) = (heads_of(x, lead) for x in (*arrays, do))
    scale = dtype.type(scale)

    if all(np.all(np.isfinite(x)) for x in (*arrays, do, totals, delta)):
        size = block_rows(n, heads)
        parts = max(1, min(-(-n // size), TASKS // max(heads, 1)))
        dq = np.empty((heads, n, d), dtype)
        found = []
        for (x, x_of, z, z_of, y, y_of, w, w_of), one, out in (
            ((x1, k1_of, x2, k2_of, y1, v1_of, y2, v2_of), seen, dq),
            ((x2, k2_of, x1, k1_of, y2, v2_of, y1, v1_of), seen_by(n, (m2, m1), exchanged(mask), causal), dq[:0]),
        ):
            m = x.shape[1]
            dk, dv = np.empty((parts, heads, m, d), dtype), np.empty((parts, heads, m, e), dtype)
            in_parallel(
                pull_back_blocks, heads * parts, size, xq, q_of, x, x_of, packed_rows(z), packed_columns(z), z_of, y, y_of, packed_rows(w),
                packed_columns(w), w_of, dO, do_of, *pair_heads(one.mask, lead), one.starts, one.stops, *one.second, scale, tops, totals,
                delta, out, dk, dv, work=heads * n * m1 * m2 * (d + e),
            )
            found += [dk.sum(axis=0), dv.sum(axis=0)]
        gradients = (dq, found[0], found[2], found[1], found[3])
    elif dtype != np.float64:
        in_double = pairs_gradients(*(x.astype(np.float64) for x in (*arrays, do)), mask, causal, np.float64(scale))
        return tuple(x.astype(dtype) for x in in_double)
    else:
        gradients = tuple(np.zeros((heads, *x.shape[-2:])) for x in arrays)  # type: ignore[assignment]
        in_parallel(
            pull_back_pairs, heads, xq, q_of, x1, k1_of, x2, k2_of, y1, v1_of, y2, v2_of, dO, do_of, *pair_heads(mask, lead),
            seen.starts, seen.stops, *seen.second, scale, tops, totals, delta, *gradients,
        )
    return tuple(summed_like(gradient, lead, x) for gradient, x in zip(gradients, arrays, strict=True))
