"""Softmax attention over pairs of keys: one block of queries, one first key and a tile of second keys at a time.

A task is a block of queries of one head. For each first key j1 that some of them see:

    Q = q ∘ k1_j1                                   (rows, d), the rows that see j1
    for each tile of second keys:
        S = scale Q k2^T log2(e)                    (rows, keys), packed k2; then the mask
        top' = max(top, max S),  W = 2^(S - top')
        T = T 2^(top - top') + W v2                 (rows, e), packed v2, CHUNK keys at a time
    acc = acc 2^(top - top') + T ∘ v1_j1            (rows, e)

and at the end out = acc / total. Beside the arrays it needs memory for a block of queries only. Sums over first keys are made CHUNK by
CHUNK too. Longer tuples are pairs of a tuple and its last member: their first keys are the products k1 ⊘ k2 ⊘ ..., and so the values.
"""

import math
from typing import NamedTuple

import numpy as np

from attnspec.numba_kernels.arrays import heads_of, without_axes
from attnspec.numba_kernels.exponential import LN_2, LOG2_E, exp2_row, range_of_row
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, add_columns_product, packed_columns, packed_rows, rows_product
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import ROWS, lanes
from attnspec.numba_kernels.softmax.tiles import Band, add_chosen_values, band, chunks_finite, hide_row, sees, weigh_row, whole_registers
from attnspec.reference.inputs import number

QUERIES, KEYS = 48, 512      # of a tile at most
TASKS = 16                   # there should be at least: a head alone has many more operations than queries to share among threads


class PairSums(NamedTuple):
    """Outputs (..., n, e), largest logits in base 2 and sums of weights (..., n), and weights (..., n, m1, m2) where asked for."""

    out: np.ndarray
    top: np.ndarray
    total: np.ndarray
    weights: np.ndarray | None

    @property
    def lse(self) -> np.ndarray:
        return np.where(self.total == 0, -np.inf, (self.top + np.log2(self.total)) * self.top.dtype.type(LN_2))


class Seen(NamedTuple):
    """First key j is seen by the queries starts[j] <= i < stops[j], second keys in a band; and both by `mask`, which may be None."""

    starts: np.ndarray
    stops: np.ndarray
    second: Band
    mask: np.ndarray | None


def tensor_scale(scale, d: int):
    """`scale`, or 1/d where it is None."""
    return 1.0 / max(d, 1) if scale is None else number("scale", scale, finite=True)


def seen_by(n: int, sizes, mask=None, causal=False, windows=None) -> Seen:
    """What the n queries see of sets of `sizes` keys, all but the last set taken together; windows: one for each set or None."""
    bands = [band(n, m, causal, windows[a] if windows else None) for a, m in enumerate(sizes)]
    starts, stops = np.zeros(1, np.int64), np.full(1, n)
    for m, one in zip(sizes[:-1], bands[:-1], strict=True):
        j = np.arange(m)
        starts = np.maximum(starts[:, None], j - one.high).reshape(-1)
        stops = np.minimum(stops[:, None], j - one.low + 1).reshape(-1)
    return Seen(starts, stops, bands[-1], mask)


def block_rows(n: int, heads: int) -> int:
    """Queries of a task: fewer where there would be few tasks, but always whole blocks of a matrix product."""
    wanted = -(-n * heads // TASKS)
    return min(max(-(-wanted // ROWS) * ROWS, 2 * ROWS), QUERIES)


def pair_heads(mask: np.ndarray | None, lead: tuple[int, ...]):
    """A mask (..., #n, #m1, #m2) as `heads_of` gives it; an empty one for None."""
    return heads_of(np.zeros((0, 1, 1), np.bool_) if mask is None else mask, lead, 3)


def attend_pairs(q, k1, k2, v1, v2, seen: Seen, scale, *, enable_gqa=False, return_weights=False) -> PairSums:
    """Attention of q (..., n, d) over the pairs of k1, v1 and k2, v2; arrays of one dtype, float32 or float64, checked already."""
    dtype = q.dtype
    n, m1, m2, d, e = q.shape[-2], k1.shape[-2], k2.shape[-2], q.shape[-1], v1.shape[-1]
    fronts = [(*x.shape[:-3], q.shape[-3]) if enable_gqa else x.shape[:-2] for x in (k1, k2, v1, v2)]
    lead = np.broadcast_shapes(q.shape[:-2], *fronts, () if seen.mask is None else seen.mask.shape[:-3])
    heads = math.prod(lead)
    queries, q_of = heads_of(q, lead)
    keys1, k1_of = heads_of(k1, lead, grouped=enable_gqa)
    keys2, k2_of = heads_of(k2, lead, grouped=enable_gqa)
    values1, v1_of = heads_of(v1, lead, grouped=enable_gqa)
    values2, v2_of = heads_of(v2, lead, grouped=enable_gqa)
    masks, mask_of = pair_heads(seen.mask, lead)
    size, packed, scale = block_rows(n, heads), packed_rows(keys2), dtype.type(scale)
    out, top, total = np.empty((heads, n, e), dtype), np.empty((heads, n), dtype), np.empty((heads, n), dtype)
    seeing = masks, mask_of, seen.starts, seen.stops, *seen.second, scale
    work = heads * n * m1 * m2 * (d + e)
    in_parallel(
        attend_blocks, heads * -(-n // size), size, queries, q_of, keys1, k1_of, packed, k2_of, values1, v1_of, packed_columns(values2),
        v2_of, chunks_finite(values2), *seeing, out, top, total, work=work,
    )
    weights = None
    if return_weights:
        weights = np.zeros((heads, n, m1, m2), dtype)
        in_parallel(
            write_weights, heads * -(-n // size), size, queries, q_of, keys1, k1_of, packed, k2_of, *seeing, top, total, weights, work=work,
        )
        fronts = fronts[:2] + ([] if seen.mask is None else [seen.mask.shape[:-3]])
        weights = without_axes(weights.reshape(*lead, n, m1, m2), np.broadcast_shapes(q.shape[:-2], *fronts), 3)
    return PairSums(out.reshape(*lead, n, e), top.reshape(*lead, n), total.reshape(*lead, n), weights)


@helper
def tile_logits(products, i0, rows, k2, k2_at, j, count, S, mask, mask_one, low, high, alpha):
    """S = alpha products @ k2^T for `count` second keys from j, what is not seen at -inf; returns where the registers of a row end.

    products (rows, d): those of query i0 and the following ones with one first key, whose mask is `mask`.
    """
    d, width = k2.shape[2:]
    rows_product(products, rows, k2, k2_at, d * width, j // width, (count + width - 1) // width, d, S, S.shape[1], alpha)
    if mask.size or j < i0 + rows - 1 + low or j + count > i0 + high + 1 or count % lanes(S):
        for r in range(rows):
            hide_row(S[r], i0 + r, j, count, mask, mask_one, low, high)
    return whole_registers(count, S)


@helper
def tile_end(i0, rows, j, stop, high):
    """Where a tile that begins at second key j ends: at `stop` at most, and before the keys that only some of the queries see."""
    stop = min(stop, j + KEYS)
    seen_by_all = (i0 + high + 1) // CHUNK * CHUNK
    return seen_by_all if j < seen_by_all < stop else stop


@helper
def add_infinite_pairs(S, i0, rows, j, count, first_value, v2, one, low, high, mask, mask_one, acc, r0):
    """acc += W (v1_j1 ∘ v2) in the columns where v1_j1 is not finite, pair by pair: what a query does not see counts nothing."""
    width = v2.shape[3]
    for c in range(first_value.size):
        if not np.isfinite(first_value[c]):
            for r in range(rows):
                for t in range(count):
                    if sees(i0 + r, j + t, low, high, mask, mask_one):
                        acc[r0 + r, c] += S[r, t] * (first_value[c] * v2[one, c // width, j + t, c % width])


@kernel
def attend_blocks(
    size, q, q_of, k1, k1_of, k2, k2_of, v1, v1_of, v2, v2_of, finite, mask, mask_of, starts, stops, low, high, scale, out, tops,
    totals, first, step,
):
    """out (h, n, e), tops and totals (h, n)."""
    heads, n, e = out.shape
    m1, d = k1.shape[1:]
    _, panels, m2, width = v2.shape
    e_step = panels * width
    blocks = (n + size - 1) // size
    zero, none = q.dtype.type(0), q.dtype.type(-np.inf)
    alpha = q.dtype.type(scale * LOG2_E)

    block, products = np.zeros((QUERIES, d), q.dtype), np.zeros((QUERIES, d), q.dtype)
    S = np.empty((QUERIES, KEYS + width), q.dtype)          # rows that begin a panel apart do not meet in the same lines of the cache
    T, summed = np.empty((QUERIES, e_step), q.dtype), np.empty(QUERIES, q.dtype)              # of one first key
    acc, total = np.empty((2, QUERIES, e_step), q.dtype), np.empty((2, QUERIES), q.dtype)     # of all, and of the present chunk of them
    top = np.empty(QUERIES, q.dtype)

    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * size
        rows = min(size, n - i0)
        for r in range(rows):
            for c in range(d):
                block[r, c] = q[q_of[h], i0 + r, c]
        top[:], total[:], acc[:] = none, zero, zero
        mask_one = mask_of[h] if mask.size else 0
        k2_at, v2_at = k2_of[h] * k2.shape[1] * d * width, v2_of[h] * m2 * e_step
        for j1 in range(m1):
            r0, r1 = max(0, starts[j1] - i0), min(rows, stops[j1] - i0)
            count1, i = r1 - r0, i0 + r0
            if count1 > 0:
                key, value = k1[k1_of[h], j1], v1[v1_of[h], j1]
                mask1 = mask[:, :, j1 if mask.shape[2] > 1 else 0]
                for r in range(count1):
                    for c in range(d):
                        products[r, c] = block[r0 + r, c] * key[c]
                T[:count1], summed[:] = zero, zero
                all_finite = True
                for c in range(e):
                    all_finite &= np.isfinite(value[c])
                j, j_end = max(0, i + low) // CHUNK * CHUNK, min(m2, i + count1 + high)
                while j < j_end:
                    count = tile_end(i, count1, j, j_end, high) - j
                    stop = tile_logits(products, i, count1, k2, k2_at, j, count, S, mask1, mask_one, low, high, alpha)
                    for r in range(count1):
                        row = r0 + r
                        largest, added = weigh_row(S[r], stop, top[row])
                        if largest > top[row] > none:
                            factor = np.exp2(top[row] - largest)
                            summed[r] *= factor
                            for level in range(2):
                                total[level, row] *= factor
                            for c in range(e_step):
                                T[r, c] *= factor
                                acc[0, row, c] *= factor
                                acc[1, row, c] *= factor
                        top[row] = largest
                        summed[r] += added
                    for start in range(0, count, CHUNK):
                        terms = min(CHUNK, count - start)
                        if finite[v2_of[h], (j + start) // CHUNK]:
                            add_columns_product(S, count1, S.shape[1], start, terms, v2, v2_at, j + start, T, e_step)
                        else:
                            add_chosen_values(S, i, count1, start, terms, v2, v2_of[h], j + start, low, high, mask1, mask_one, T)
                    if not all_finite:
                        add_infinite_pairs(S, i, count1, j, count, value, v2, v2_of[h], low, high, mask1, mask_one, acc[1], r0)
                    j += count
                for r in range(count1):
                    total[1, r0 + r] += summed[r]
                    for c in range(e):
                        if all_finite or np.isfinite(value[c]):
                            acc[1, r0 + r, c] += T[r, c] * value[c]
            if (j1 + 1) % CHUNK == 0 or j1 + 1 == m1:
                for r in range(rows):
                    total[0, r] += total[1, r]
                    total[1, r] = zero
                    for c in range(e_step):
                        acc[0, r, c] += acc[1, r, c]
                        acc[1, r, c] = zero

        for r in range(rows):
            tops[h, i0 + r], totals[h, i0 + r] = top[r], total[0, r]
            for c in range(e):
                out[h, i0 + r, c] = zero if total[0, r] == 0 else acc[0, r, c] / total[0, r]


@kernel
def write_weights(
    size, q, q_of, k1, k1_of, k2, k2_of, mask, mask_of, starts, stops, low, high, scale, tops, totals, weights, first, step,
):
    """weights (h, n, m1, m2), which hold zeros, from the tops and totals (h, n) of attend_blocks."""
    heads, n, m1, m2 = weights.shape
    d, width = k2.shape[2:]
    blocks = (n + size - 1) // size
    alpha = q.dtype.type(scale * LOG2_E)
    products, S = np.zeros((QUERIES, d), q.dtype), np.empty((QUERIES, KEYS + width), q.dtype)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * size
        rows = min(size, n - i0)
        mask_one, k2_at = (mask_of[h] if mask.size else 0), k2_of[h] * k2.shape[1] * d * width
        for j1 in range(m1):
            r0, r1 = max(0, starts[j1] - i0), min(rows, stops[j1] - i0)
            i, mask1 = i0 + r0, mask[:, :, j1 if mask.shape[2] > 1 else 0]
            for r in range(r1 - r0):
                for c in range(d):
                    products[r, c] = q[q_of[h], i + r, c] * k1[k1_of[h], j1, c]
            for j in range(0, m2 if r1 > r0 else 0, KEYS):
                count = min(KEYS, m2 - j)
                stop = tile_logits(products, i, r1 - r0, k2, k2_at, j, count, S, mask1, mask_one, low, high, alpha)
                for r in range(r1 - r0):
                    total = totals[h, i + r]
                    if total != 0:
                        smallest, _ = range_of_row(S[r], 0, stop)
                        exp2_row(S[r], 0, stop, tops[h, i + r], smallest)
                        for c in range(count):
                            if total == total or sees(i + r, j + c, low, high, mask1, mask_one):        # NaN stays where it is seen
                                weights[h, i + r, j1, j + c] = S[r, c] / total
