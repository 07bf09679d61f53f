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

from attnspec.numba_kernels.arrays import heads_of, leading_axes, without_axes
from attnspec.numba_kernels.exponential import LN_2, LOG2_E, exp2_row, range_of_row, tanh
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, add_columns_product, packed_columns, packed_rows, rows_product
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import absolute, lane_sum, lanes, load, signed_like, splat, store
from attnspec.reference.inputs import CAUSAL, AttentionResult, default_scale, number, one_of, window_sides

QUERIES, KEYS = 96, 512      # of a tile: 0.2 MB of float32 logits beside 0.25 MB of keys and values of 64 features, in 0.5 MB of L2 cache
FAR = 2**60
SIGNED, NONZERO = 1, 2       # kinds of signed softmax: normalised over all visible keys, or over those with a logit other than 0, plus 1e-6


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
def cap_row(row, stop, softcap):
    """c tanh(s / c) of a row of logits in base 2."""
    log2_e = row.dtype.type(LOG2_E)
    cap, one = splat(softcap * log2_e, row), splat(row.dtype.type(1), row)
    to_base_two, farthest = splat(-2 * log2_e, row), splat(row.dtype.type(-64), row)
    for j in range(0, stop, lanes(row)):
        store(row, j, cap * tanh(load(row, j) / cap, one, to_base_two, farthest))


@helper
def bias_row(row, i, j0, keys, bias, one):
    """Add the natural logits of a bias to a row of logits in base 2."""
    log2_e = row.dtype.type(LOG2_E)
    line = bias[one, i if bias.shape[1] > 1 else 0]
    if bias.shape[2] > 1:
        for j in range(keys):
            row[j] += line[j0 + j] * log2_e
    else:
        for j in range(keys):
            row[j] += line[0] * log2_e


@helper
def hide_row(row, i, j0, keys, mask, one, low, high):
    """Put -inf where query i does not see a key, and in the columns that fill up a register."""
    none = row.dtype.type(-np.inf)
    if mask.size:
        seen = mask[one, i if mask.shape[1] > 1 else 0]
        if mask.shape[2] > 1:
            for j in range(keys):
                row[j] = row[j] if seen[j0 + j] else none
        elif not seen[0]:
            row[:keys] = none
    for j in range(min(i + low - j0, keys)):
        row[j] = none
    for j in range(max(i + high + 1 - j0, 0), keys):
        row[j] = none
    for j in range(keys, whole_registers(keys, row)):
        row[j] = none


@helper
def whole_registers(keys, row):
    """`keys`, rounded up to fill registers like those of `row`."""
    return (keys + lanes(row) - 1) // lanes(row) * lanes(row)


@helper
def finish_logits(S, i0, rows, j0, keys, softcap, bias, bias_one, mask, mask_one, low, high):
    """Softcap, bias and mask of a tile of logits in base 2; returns how many columns fill whole registers."""
    stop = whole_registers(keys, S)
    for r in range(rows):
        if softcap > 0:
            cap_row(S[r], stop, softcap)
        if bias.size:
            bias_row(S[r], i0 + r, j0, keys, bias, bias_one)
        hide_row(S[r], i0 + r, j0, keys, mask, mask_one, low, high)
    return stop


@helper
def magnitude_row(row, stop, magnitudes):
    """The sizes of a row of logits; these take the mask, the row keeps the signs."""
    for j in range(0, stop, lanes(row)):
        store(magnitudes, j, absolute(load(row, j)))


@helper
def sign_row(row, stop, magnitudes):
    """Give weights the signs of the logits they belong to."""
    for j in range(0, stop, lanes(row)):
        store(row, j, signed_like(load(magnitudes, j), load(row, j)))


@helper
def sum_of_sizes(row, stop):
    """sum |row|."""
    total = splat(row.dtype.type(0), row)
    for j in range(0, stop, lanes(row)):
        total = total + absolute(load(row, j))
    return lane_sum(total)


@helper
def weigh_row(row, stop, top):
    """Replace the logits of a row by their weights 2^(row - top'); returns the new top' and the sum of the weights."""
    smallest, largest = range_of_row(row, 0, stop)
    largest = max(top, largest)
    return largest, exp2_row(row, 0, stop, largest if largest > -np.inf else row.dtype.type(0), smallest)


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


@helper
def copy_rows(x, one, i0, rows, block):
    """block[:rows] = x[one, i0:i0 + rows]; a loop compiles faster than slices, which bring the code of their errors along."""
    for r in range(rows):
        for c in range(x.shape[2]):
            block[r, c] = x[one, i0 + r, c]


@kernel
def attend_blocks(
    q, q_of, keys, k_of, m, values, v_of, finite, bias, bias_of, mask, mask_of, sink, scale, softcap, low, high, signed, out, lse, saved,
    weights, first, step,
):
    """out (h, n, e), and where they have entries lse (h, n), weights (h, n, m) and for the backward saved (2, h, n): top and total."""
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
        copy_rows(q, q_of[h], i0, rows, block)
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
            partly = mask.size or j < i0 + rows - 1 + low or j + count > j_all or count % width
            stop = whole_registers(count, S)
            for r in range(rows):
                row = S[r]
                if softcap > 0:
                    cap_row(row, stop, softcap)
                if bias.size:
                    bias_row(row, i0 + r, j, count, bias, bias_one)
                logits = row
                if signed:
                    magnitude_row(row, stop, magnitudes)
                    logits = magnitudes
                if partly:
                    hide_row(logits, i0 + r, j, count, mask, mask_one, low, high)
                largest, summed = weigh_row(logits, stop, top[r])
                if signed:
                    sign_row(row, stop, magnitudes)
                if signed == NONZERO:
                    summed = sum_of_sizes(row, stop)
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
            total[r] += q.dtype.type(1e-6) if signed == NONZERO else zero
            empty = total[r] == 0
            if total[r] != total[r]:                         # a NaN of the sink alone does not count where nothing is seen
                empty = True
                for j in range(m):
                    empty = empty and not sees(i0 + r, j, low, high, mask, mask_one)
            for c in range(e):
                out[h, i0 + r, c] = zero if empty else acc[r, c] / total[r]
            if saved.size:
                saved[0, h, i0 + r], saved[1, h, i0 + r] = top[r], total[r]
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


class Call(NamedTuple):
    """An attention as the tiled kernels take it: heads flattened, and for each array which of its entries a head uses (arrays.py)."""

    lead: tuple[int, ...]
    q: np.ndarray                   # (b, n, d)
    q_of: np.ndarray                # (heads,)
    k: np.ndarray                   # (b, m, d)
    k_of: np.ndarray
    v: np.ndarray                   # (b, m, e)
    v_of: np.ndarray
    bias: np.ndarray                # (b, n or 1, m or 1), no entries where there is none
    bias_of: np.ndarray
    mask: np.ndarray
    mask_of: np.ndarray
    sink: np.ndarray                # (heads,) or no entries
    scale: np.floating
    softcap: np.floating            # 0 where there is none
    low: int
    high: int

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """heads, n, m, d, e"""
        return math.prod(self.lead), self.q.shape[1], self.k.shape[1], self.q.shape[2], self.v.shape[2]


def flattened(
    q, k, v, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False, beside=(),
) -> Call:
    """The arguments of an attention function, arrays of one dtype and checked already, as a Call.

    beside: further arrays (..., n, e) whose leading axes count.
    """
    lead = leading_axes(q, k, v, bias, mask, *beside, enable_gqa=enable_gqa)
    none = np.zeros((0, 1), q.dtype)
    sink = none[:, 0] if sink is None else np.ascontiguousarray(np.broadcast_to(sink if lead else sink.reshape(()), lead)).ravel()
    cap = 0.0 if softcap is None or not 0 < number("softcap", softcap, least=0) < np.inf else softcap
    return Call(
        lead, *heads_of(q, lead), *heads_of(k, lead, grouped=enable_gqa), *heads_of(v, lead, grouped=enable_gqa),
        *heads_of(none if bias is None else bias, lead), *heads_of(none.astype(np.bool_) if mask is None else mask, lead), sink,
        q.dtype.type(default_scale(scale, q)), q.dtype.type(cap), *band(q.shape[-2], k.shape[-2], causal, window),
    )


def forward(call: Call, *, signed=0, return_weights=False, return_lse=False, save=False):
    """out (heads, n, e), weights (heads, n, m), lse (heads, n), saved (2, heads, n); without entries where not asked for."""
    heads, n, m, d, e = call.sizes
    dtype = call.q.dtype
    out = np.empty((heads, n, e), dtype)
    weights = np.empty((heads, n, m) if return_weights else (0, 0, 0), dtype)
    lse = np.empty((heads, n) if return_lse else (0, 0), dtype)
    saved = np.empty((2, heads, n) if save else (0, 0, 0), dtype)
    in_parallel(
        attend_blocks, heads * -(-n // QUERIES), call.q, call.q_of, packed_rows(call.k), call.k_of, m, packed_columns(call.v), call.v_of,
        chunks_finite(call.v), call.bias, call.bias_of, call.mask, call.mask_of, call.sink, call.scale, call.softcap, call.low, call.high,
        signed, out, lse, saved, weights, work=heads * n * m * (d + e),
    )
    return out, weights, lse, saved


def tiled_attention(q, k, v, *, signed=0, return_weights=False, return_lse=False, **options):
    """(out, weights, lse) of softmax attention, or where `signed` is SIGNED or NONZERO of that; the latter two None unless asked for.

    Arrays of one dtype, float32 or float64, checked already; options: those of `flattened`.
    """
    call = flattened(q, k, v, **options)
    out, weights, lse, _ = forward(call, signed=signed, return_weights=return_weights, return_lse=return_lse)
    _, n, m, _, e = call.sizes
    front = weights_axes(q, k, **options)
    return (
        out.reshape(*call.lead, n, e),
        without_axes(weights.reshape(*call.lead, n, m), front) if return_weights else None,
        without_axes(lse.reshape(*call.lead, n), front, 1) if return_lse else None,
    )


def weights_axes(q, k, *, bias=None, mask=None, sink=None, enable_gqa=False, beside=(), **_):
    """The leading axes of what does not depend on the values."""
    front = leading_axes(q, k, k, bias, mask, *beside, enable_gqa=enable_gqa)
    return front if sink is None else np.broadcast_shapes(front, sink.shape)


def attention_result(q, k, v, *, return_weights=False, return_lse=False, **options):
    """The output of `tiled_attention`, or an AttentionResult where more is asked for."""
    out, weights, lse = tiled_attention(q, k, v, return_weights=return_weights, return_lse=return_lse, **options)
    return AttentionResult(out, weights, lse) if return_weights or return_lse else out
