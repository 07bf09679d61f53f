"""Softmax attention over tiles of keys, with the largest logit and the sum of each row kept as it goes.

A task is a block of queries of one head. For each tile of keys it visits:

    S = scale q k^T log2(e)          (rows, keys), packed keys; then softcap, bias, mask
    top' = max(top, max_j S)         (rows,)
    W = 2^(S - top')                 signed: 2^(|S| - top') with the sign of S
    total = total 2^(top - top') + sum_j |W|
    acc = acc 2^(top - top') + W v   (rows, e), packed values, CHUNK keys at a time

and at the end out = acc / total. Tiles that no query of the block sees are not visited; tiles that some see are split off, so that the
others need no test. Only a chunk of values with NaN or infinity in it is added element by element, the unseen left out: 0 * NaN is NaN.
"""

import math
from typing import NamedTuple

import numpy as np

from attnspec.numba_kernels.arrays import heads_of, leading_axes
from attnspec.numba_kernels.exponential import LN_2, LOG2_E, exp2_row, range_of_row, tanh
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, add_columns_product, packed_columns, packed_rows, rows_product
from attnspec.numba_kernels.simd import absolute, lanes, load, signed_like, splat, store
from attnspec.numba_kernels.threads import in_parallel
from attnspec.reference.inputs import CAUSAL, AttentionResult, default_scale, number, one_of, window_sides

QUERIES, KEYS = 96, 512      # of a tile: 0.2 MB of float32 logits beside 0.25 MB of keys and values of 64 features, in 0.5 MB of L2 cache
FAR = 2**60


class Band(NamedTuple):
    """Query i sees the keys i + low <= j <= i + high."""

    low: int
    high: int


def band(n: int, m: int, causal, window) -> Band:
    """The band of `causal` and `window` together, as in inputs.visible_keys."""
    causal = one_of("causal", causal, CAUSAL)
    corner = m - n if causal in (True, "bottom-right") else 0
    left, right = (None, None) if window is None else window_sides(window)
    high = FAR if causal is False else corner
    return Band(-FAR if left is None else corner - left, high if right is None else min(high, corner + right))


@helper
def sees(i, j, low, high, mask, one):
    """Whether query i of a head whose mask is mask[one] sees key j."""
    if j < i + low or j > i + high:
        return False
    return mask.size == 0 or mask[one, i if mask.shape[1] > 1 else 0, j if mask.shape[2] > 1 else 0]


@helper
def finish_logits(S, i0, rows, j0, keys, softcap, bias, bias_one, mask, mask_one, low, high):
    """Softcap, bias and mask of a tile of logits in base 2; what is not seen, and the columns that fill up a register, become -inf."""
    none, log2_e = S.dtype.type(-np.inf), S.dtype.type(LOG2_E)
    stop = (keys + lanes(S) - 1) // lanes(S) * lanes(S)
    for r in range(rows):
        i, row = i0 + r, S[r]
        if softcap > 0:
            cap, one = splat(softcap * log2_e, row), splat(S.dtype.type(1), row)
            to_base_two, farthest = splat(-2 * log2_e, row), splat(S.dtype.type(-64), row)
            for j in range(0, stop, lanes(S)):
                store(row, j, cap * tanh(load(row, j) / cap, one, to_base_two, farthest))
        if bias.size:
            line = bias[bias_one, i if bias.shape[1] > 1 else 0]
            if bias.shape[2] > 1:
                for j in range(keys):
                    row[j] += line[j0 + j] * log2_e
            else:
                for j in range(keys):
                    row[j] += line[0] * log2_e
        if mask.size:
            seen = mask[mask_one, i if mask.shape[1] > 1 else 0]
            if mask.shape[2] > 1:
                for j in range(keys):
                    row[j] = row[j] if seen[j0 + j] else none
            elif not seen[0]:
                row[:keys] = none
        for j in range(min(i + low - j0, keys)):
            row[j] = none
        for j in range(max(i + high + 1 - j0, 0), keys):
            row[j] = none
        for j in range(keys, stop):
            row[j] = none
    return stop


@helper
def weigh_row(row, stop, signed, magnitudes, top):
    """Replace the logits of a row by their weights 2^(row - top'); returns the new top' and the sum of the weights."""
    logits = row
    if signed:
        for j in range(0, stop, lanes(row)):
            store(magnitudes, j, absolute(load(row, j)))
        logits = magnitudes
    smallest, largest = range_of_row(logits, 0, stop)
    largest = max(top, largest)
    total = exp2_row(logits, 0, stop, largest if largest > -np.inf else row.dtype.type(0), smallest)
    if signed:
        for j in range(0, stop, lanes(row)):
            store(row, j, signed_like(load(magnitudes, j), load(row, j)))
    return largest, total


@helper
def add_chosen_values(S, i0, rows, start, terms, values, one, key, low, high, mask, mask_one, acc):
    """acc += S[:, start:start + terms] @ v[key:key + terms], each query leaving out the values of keys that it does not see."""
    _, count, _, width = values.shape
    for r in range(rows):
        for t in range(terms):
            if sees(i0 + r, key + t, low, high, mask, mask_one):
                for p in range(count):
                    for w in range(width):
                        acc[r, p * width + w] += S[r, start + t] * values[one, p, key + t, w]


@kernel
def attend_blocks(
    q, q_of, keys, k_of, m, values, v_of, finite, bias, bias_of, mask, mask_of, sink, scale, softcap, low, high, signed, out, lse, weights,
    first, step,
):
    """out (h, n, e), and where they have entries lse (h, n) and weights (h, n, m)."""
    heads, n, e = out.shape
    d, e_step = q.shape[2], values.shape[1] * values.shape[3]
    width = keys.shape[3]
    blocks = (n + QUERIES - 1) // QUERIES
    zero, none = q.dtype.type(0), q.dtype.type(-np.inf)
    alpha = q.dtype.type(scale * LOG2_E)

    block = np.zeros((QUERIES, d), q.dtype)
    S = np.empty((QUERIES, KEYS + width), q.dtype)          # rows that begin a panel apart do not meet in the same lines of the cache
    acc = np.empty((QUERIES, e_step), q.dtype)
    magnitudes = np.empty(KEYS + width, q.dtype)
    top, total = np.empty(QUERIES, q.dtype), np.empty(QUERIES, q.dtype)

    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        rows = min(QUERIES, n - i0)
        block[:rows] = q[q_of[h], i0 : i0 + rows]
        z = sink[h] * q.dtype.type(LOG2_E) if sink.size else none
        top[:] = z
        total[:] = zero if z == none else np.exp2(z - z)
        acc[:] = zero
        bias_one, mask_one = (bias_of[h] if bias.size else 0), (mask_of[h] if mask.size else 0)
        k_at = k_of[h] * keys.shape[1] * d * width
        v_at = v_of[h] * m * e_step

        j_end = min(m, i0 + rows + high)
        j_all = i0 + high + 1                                # keys before this one are not too late for any query of the block
        j = max(0, i0 + low) // CHUNK * CHUNK
        while j < j_end:
            count = min(KEYS, j_end - j)
            if j < j_all // CHUNK * CHUNK < j + count:
                count = j_all // CHUNK * CHUNK - j
            rows_product(block, rows, keys, k_at, d * width, j // width, (count + width - 1) // width, d, S, S.shape[1], alpha)
            partly = mask.size or bias.size or softcap > 0 or j < i0 + rows - 1 + low or j + count > j_all or count % width
            stop = count
            if partly:
                stop = finish_logits(S, i0, rows, j, count, softcap, bias, bias_one, mask, mask_one, low, high)
            for r in range(rows):
                largest, summed = weigh_row(S[r], stop, signed, magnitudes, top[r])
                if largest > top[r] and top[r] > none:
                    factor = np.exp2(top[r] - largest)
                    total[r] *= factor
                    for c in range(e_step):
                        acc[r, c] *= factor
                top[r] = largest
                total[r] += summed
            for start in range(0, count, CHUNK):
                terms = min(CHUNK, count - start)
                if finite[v_of[h], (j + start) // CHUNK]:
                    add_columns_product(S, rows, S.shape[1], start, terms, values, v_at, j + start, acc, e_step)
                else:
                    add_chosen_values(S, i0, rows, start, terms, values, v_of[h], j + start, low, high, mask, mask_one, acc)
            j += count

        for r in range(rows):
            empty = total[r] == 0
            if total[r] != total[r]:                         # a NaN of the sink alone does not count where nothing is seen
                empty = True
                for j in range(m):
                    empty = empty and not sees(i0 + r, j, low, high, mask, mask_one)
            for c in range(e):
                out[h, i0 + r, c] = zero if empty else acc[r, c] / total[r]
            if lse.size:
                lse[h, i0 + r] = none if total[r] == 0 else (top[r] + np.log2(total[r])) * q.dtype.type(LN_2)
        if weights.size:
            for j in range(0, m, KEYS):
                count = min(KEYS, m - j)
                rows_product(block, rows, keys, k_at, d * width, j // width, (count + width - 1) // width, d, S, S.shape[1], alpha)
                finish_logits(S, i0, rows, j, count, softcap, bias, bias_one, mask, mask_one, low, high)
                for r in range(rows):
                    for c in range(count):
                        s = S[r, c]
                        seen = sees(i0 + r, j + c, low, high, mask, mask_one) and total[r] != 0
                        w = np.exp2((abs(s) if signed else s) - top[r]) / total[r] if seen else zero
                        weights[h, i0 + r, j + c] = np.sign(s) * w if signed and seen else w


def chunks_finite(values: np.ndarray) -> np.ndarray:
    """Which CHUNKs of v (b, m, e) hold neither NaN nor infinity: bool (b, chunks)."""
    b, m, _ = values.shape
    finite = np.empty((b, -(-m // CHUNK)), np.bool_)
    in_parallel(_chunks_finite, finite.size, values, finite, work=values.size)
    return finite


@kernel
def _chunks_finite(values, finite, first, step):
    _, m, e = values.shape
    b, chunks = finite.shape
    for task in range(first, b * chunks, step):
        one, start = task // chunks, task % chunks * CHUNK
        all_finite = True
        for j in range(start, min(start + CHUNK, m)):
            for c in range(e):
                all_finite &= np.isfinite(values[one, j, c])
        finite[one, task % chunks] = all_finite


def tiled_attention(
    q, k, v, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False, signed=False,
    return_weights=False, return_lse=False,
):
    """(out, weights, lse) of softmax attention, or of signed softmax attention; the latter two None unless asked for.

    Arrays of one dtype, float32 or float64, checked already.
    """
    dtype = q.dtype
    n, m, d, e = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    lead = leading_axes(q, k, v, bias, mask, enable_gqa=enable_gqa)
    heads = math.prod(lead)
    queries, q_of = heads_of(q, lead)
    keys, k_of = heads_of(k, lead, grouped=enable_gqa)
    values, v_of = heads_of(v, lead, grouped=enable_gqa)
    biases, bias_of = heads_of(np.zeros((0, 1), dtype) if bias is None else bias, lead)
    masks, mask_of = heads_of(np.zeros((0, 1), np.bool_) if mask is None else mask, lead)
    sink = np.zeros(0, dtype) if sink is None else np.ascontiguousarray(np.broadcast_to(sink if lead else sink.reshape(()), lead)).ravel()
    cap = 0.0 if softcap is None or not 0 < number("softcap", softcap, least=0) < np.inf else softcap
    low, high = band(n, m, causal, window)
    out = np.empty((heads, n, e), dtype)
    lse = np.empty((heads, n) if return_lse else (0, 0), dtype)
    weights = np.empty((heads, n, m) if return_weights else (0, 0, 0), dtype)
    in_parallel(
        attend_blocks, heads * -(-n // QUERIES), queries, q_of, packed_rows(keys), k_of, m, packed_columns(values), v_of,
        chunks_finite(values), biases, bias_of, masks, mask_of, sink, dtype.type(default_scale(scale, q)), dtype.type(cap), low, high,
        signed, out, lse, weights, work=heads * n * m * (d + e),
    )
    return (
        out.reshape(*lead, n, e),
        weights.reshape(*lead, n, m) if return_weights else None,
        lse.reshape(*lead, n) if return_lse else None,
    )


def attention_result(q, k, v, *, return_weights=False, return_lse=False, **options):
    """The output of `tiled_attention`, or an AttentionResult where more is asked for."""
    out, weights, lse = tiled_attention(q, k, v, return_weights=return_weights, return_lse=return_lse, **options)
    return AttentionResult(out, weights, lse) if return_weights or return_lse else out
