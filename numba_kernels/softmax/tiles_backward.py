"""Gradients of softmax attention over tiles, the weights computed again from the logits.

A task is a part of the keys of one head. For each tile of its keys and each block of queries that sees some of them:

    S = scale q k^T log2(e), with softcap, bias and mask as forward        (rows, keys)
    W = 2^(S - top) / total                                                signed: with the signs of S, from 2^(|S| - top)
    G = do v^T
    S <- |W| G - W D,  D_i = <do_i, out_i>                                 the gradient by the logits
    dv += W^T do,  dk += scale S^T q,  dq += scale S k

dv and dk of the tile stay in the cache; each part of the keys has a dq of its own, and these are added in order at the end, so that the
result does not depend on the number of threads.
"""

from typing import NamedTuple

import numpy as np

from attnspec.numba_kernels.arrays import heads_of, summed_like
from attnspec.numba_kernels.exponential import LOG2_E, exp2_row, range_of_row
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, add_columns_product, packed_columns, packed_rows, rows_product
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import ROWS, absolute, lanes, load, splat, store, turned_block_product, unless_zero
from attnspec.numba_kernels.softmax.tiles import (
    Call,
    bias_row,
    cap_row,
    chunks_finite,
    copy_rows,
    flattened,
    forward,
    hide_row,
    magnitude_row,
    sees,
    sign_row,
    whole_registers,
)

QUERIES, KEYS = 60, 256      # of a tile: ten blocks of rows, and no chain of more than 64 terms in dk and dv
PARTS = 16                   # tasks there should be at least


@helper
def add_turned_product(a, keys, terms, panels, at, start, out, alpha):
    """out[:keys] += alpha a[:terms, :keys]^T @ x[start:start + terms], for packed columns of x from flat position `at`."""
    count, rows, width = panels.shape[1:]
    for p in range(count):
        for r in range(0, keys, ROWS):
            turned_block_product(
                a, r, a.shape[1], panels, at + (p * rows + start) * width, out, r * out.shape[1] + p * width, out.shape[1], terms, alpha,
                True,
            )


@helper
def add_chosen(a, i0, rows, start, j0, keys, x, one, turned, low, high, mask, mask_one, out, alpha):
    """The two products element by element, for an x that is not finite: only what a query sees is added.

    out[r] += alpha a[r, start + t] x[j0 + t], or turned out[t] += alpha a[r, start + t] x[i0 + r].
    """
    _, count, _, width = x.shape
    for r in range(rows):
        for t in range(keys):
            if sees(i0 + r, j0 + t, low, high, mask, mask_one):
                to, of = (t, i0 + r) if turned else (r, j0 + t)
                for p in range(count):
                    for w in range(width):
                        out[to, p * width + w] += alpha * a[r, start + t] * x[one, p, of, w]


@helper
def weigh_saved_row(row, stop, top, total):
    """Replace the logits of a row by their weights 2^(row - top) / total; 0 where total is."""
    smallest, _ = range_of_row(row, 0, stop)
    exp2_row(row, 0, stop, top if top > -np.inf else row.dtype.type(0), smallest)
    share = splat(row.dtype.type(0) if total == 0 else 1 / total, row)
    for j in range(0, stop, lanes(row)):
        store(row, j, load(row, j) * share)


@helper
def gradient_of_row(weights, G, stop, delta):
    """Replace a row of weights by the gradient of its logits, |w| g - w delta; 0 where the weight is, whatever g is."""
    D = splat(delta, weights)
    for j in range(0, stop, lanes(weights)):
        w = load(weights, j)
        store(weights, j, unless_zero(absolute(w) * load(G, j) - w * D, w))


@kernel
def attend_blocks_backward(
    q, q_of, q_panels, q_finite, keys, key_panels, k_of, k_finite, m, values, v_of, do, do_of, do_panels, do_finite, delta, saved,
    bias, bias_of, mask, mask_of, scale, softcap, low, high, signed, dq, dk, dv, ds, first, step,
):
    """dq (parts, h, n, d), dk (h, m, d), dv (h, m, e), and where it has entries ds (h, n, m), the gradient by the logits."""
    parts, heads, n, d_step = dq.shape
    e, d = dv.shape[2], dk.shape[2]
    e_step, width = do_panels.shape[1] * do_panels.shape[3], keys.shape[3]
    zero, one = q.dtype.type(0), q.dtype.type(1)
    alpha = q.dtype.type(scale * LOG2_E)

    q_block, do_block = np.zeros((QUERIES, d), q.dtype), np.zeros((QUERIES, e), q.dtype)
    S, G = np.empty((QUERIES, KEYS + width), q.dtype), np.empty((QUERIES, KEYS + width), q.dtype)
    slope = np.empty((QUERIES if softcap > 0 else 0, KEYS + width), q.dtype)
    magnitudes = np.empty(KEYS + width, q.dtype)
    dk_tile, dv_tile = np.empty((KEYS + ROWS, d_step), q.dtype), np.empty((KEYS + ROWS, e_step), q.dtype)
    dq_block = np.empty((QUERIES, d_step), q.dtype)

    for task in range(first, heads * parts, step):
        h, part = task // parts, task % parts
        dq[part, h] = zero
        bias_one, mask_one = (bias_of[h] if bias.size else 0), (mask_of[h] if mask.size else 0)
        k_at, v_at = k_of[h] * keys.shape[1] * d * width, v_of[h] * values.shape[1] * e * width
        key_at, q_at, do_at = k_of[h] * m * d_step, q_of[h] * n * d_step, do_of[h] * n * e_step
        tiles = (m + KEYS - 1) // KEYS
        for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
            j = tile * KEYS
            count = min(KEYS, m - j)
            panels = (count + width - 1) // width
            dk_tile[:], dv_tile[:] = zero, zero
            for i0 in range(0, n, QUERIES):
                rows = min(QUERIES, n - i0)
                if j > i0 + rows - 1 + high or j + count - 1 < i0 + low:
                    continue
                copy_rows(q, q_of[h], i0, rows, q_block)
                copy_rows(do, do_of[h], i0, rows, do_block)
                rows_product(q_block, rows, keys, k_at, d * width, j // width, panels, d, S, S.shape[1], alpha)
                stop = whole_registers(count, S)
                rows_product(do_block, rows, values, v_at, e * width, j // width, panels, e, G, G.shape[1], one)
                partly = mask.size or j < i0 + rows - 1 + low or j + count - 1 > i0 + high or count % lanes(S)
                for r in range(rows):
                    row, top, total = S[r], saved[0, h, i0 + r], saved[1, h, i0 + r]
                    if softcap > 0:
                        cap_row(row, stop, softcap)
                        for c in range(stop):
                            slope[r, c] = one - (row[c] / (softcap * q.dtype.type(LOG2_E))) ** 2
                    if bias.size:
                        bias_row(row, i0 + r, j, count, bias, bias_one)
                    logits = row
                    if signed:
                        magnitude_row(row, stop, magnitudes)
                        logits = magnitudes
                    if partly:
                        hide_row(logits, i0 + r, j, count, mask, mask_one, low, high)
                    if total == total:
                        weigh_saved_row(logits, stop, top, total)
                    else:                                    # NaN wherever the query sees a key, and nowhere else
                        for c in range(stop):
                            seen = c < count and sees(i0 + r, j + c, low, high, mask, mask_one)
                            logits[c] = total if seen else zero
                    if signed:
                        sign_row(row, stop, magnitudes)

                if do_finite[do_of[h], i0 // CHUNK] and do_finite[do_of[h], (i0 + rows - 1) // CHUNK]:
                    add_turned_product(S, count, rows, do_panels, do_at, i0, dv_tile, one)
                else:
                    add_chosen(S, i0, rows, 0, j, count, do_panels, do_of[h], True, low, high, mask, mask_one, dv_tile, one)
                for r in range(rows):
                    gradient_of_row(S[r], G[r], stop, delta[h, i0 + r])
                    if ds.size:
                        for c in range(count):
                            ds[h, i0 + r, j + c] = S[r, c]
                    if softcap > 0:
                        for c in range(stop):
                            S[r, c] = S[r, c] * slope[r, c] if S[r, c] != 0 else zero
                if q_finite[q_of[h], i0 // CHUNK] and q_finite[q_of[h], (i0 + rows - 1) // CHUNK]:
                    add_turned_product(S, count, rows, q_panels, q_at, i0, dk_tile, scale)
                else:
                    add_chosen(S, i0, rows, 0, j, count, q_panels, q_of[h], True, low, high, mask, mask_one, dk_tile, scale)
                dq_block[:] = zero
                for start in range(0, count, CHUNK):
                    terms = min(CHUNK, count - start)
                    if k_finite[k_of[h], (j + start) // CHUNK]:
                        add_columns_product(S, rows, S.shape[1], start, terms, key_panels, key_at, j + start, dq_block, d_step)
                    else:
                        add_chosen(S, i0, rows, start, j + start, terms, key_panels, k_of[h], False, low, high, mask, mask_one,
                                   dq_block, one)
                for r in range(rows):
                    for c in range(d_step):
                        dq[part, h, i0 + r, c] += dq_block[r, c] * scale
            for r in range(count):
                for c in range(d):
                    dk[h, j + r, c] = dk_tile[r, c]
                for c in range(e):
                    dv[h, j + r, c] = dv_tile[r, c]




@kernel
def row_products(do, do_of, out, mask, mask_of, m, low, high, delta, first, step):
    """delta (h, n) = <do_i, out_i>, 0 for a query that sees nothing."""
    heads, n, e = out.shape
    for h in range(first, heads, step):
        mask_one = mask_of[h] if mask.size else 0
        for i in range(n):
            total = 0.0
            for c in range(e):
                total += np.float64(do[do_of[h], i, c]) * np.float64(out[h, i, c])
            if total != total:
                seen = False
                for j in range(m):
                    seen = seen or sees(i, j, low, high, mask, mask_one)
                total = total if seen else 0.0
            delta[h, i] = total


class Gradients(NamedTuple):
    """Gradients by all arrays of a Call, for each flattened head."""

    dq: np.ndarray                  # (heads, n, d)
    dk: np.ndarray                  # (heads, m, d)
    dv: np.ndarray                  # (heads, m, e)
    ds: np.ndarray                  # (heads, n, m) by the logits, or no entries without a bias
    dsink: np.ndarray               # (heads,), or no entries without a sink


def gradients(call: Call, do: np.ndarray, out: np.ndarray, saved: np.ndarray, *, signed=0) -> Gradients:
    """The backward pass from what `forward` saved; do (..., n, e)."""
    heads, n, m, d, e = call.sizes
    dtype = call.q.dtype
    cotangent, do_of = heads_of(do, call.lead)
    delta = np.empty((heads, n), dtype)
    in_parallel(row_products, heads, cotangent, do_of, out, call.mask, call.mask_of, m, call.low, call.high, delta, work=out.size)

    q_panels, key_panels, do_panels = packed_columns(call.q), packed_columns(call.k), packed_columns(cotangent)
    parts = max(1, min(-(-m // KEYS), PARTS // max(heads, 1)))
    dq = np.empty((parts, heads, n, q_panels.shape[1] * q_panels.shape[3]), dtype)
    dk, dv = np.empty((heads, m, d), dtype), np.empty((heads, m, e), dtype)
    ds = np.zeros((heads, n, m) if call.bias.size else (0, 0, 0), dtype)
    in_parallel(
        attend_blocks_backward, heads * parts, call.q, call.q_of, q_panels, chunks_finite(call.q), packed_rows(call.k), key_panels,
        call.k_of, chunks_finite(call.k), m, packed_rows(call.v), call.v_of, cotangent, do_of, do_panels, chunks_finite(cotangent), delta,
        saved, call.bias, call.bias_of, call.mask, call.mask_of, call.scale, call.softcap, call.low, call.high, signed, dq, dk, dv, ds,
        work=heads * n * m * (d + e),
    )
    top, total = saved
    z = call.sink[:, None] * dtype.type(LOG2_E)
    share = np.where(total == 0, 0, np.exp2(z - top) / total) if call.sink.size else np.zeros((0, n), dtype)
    dsink = -np.sum(share * delta[: len(share)], axis=-1)
    return Gradients(dq.sum(axis=0)[..., :d], dk, dv, ds, dsink)


def tiled_backward(q, k, v, do, *, signed=0, **options):
    """(dq, dk, dv, dbias, dsink) of softmax attention, or of signed softmax attention, for the cotangent do of its output.

    The gradients of a bias or a sink are None where there is none; that of a bias takes n * m numbers a head. options: of `flattened`.
    """
    call = flattened(q, k, v, beside=(do,), **options)
    out, _, _, saved = forward(call, signed=signed, save=True)
    all_heads = gradients(call, do, out, saved, signed=signed)

    def shaped(gradient, like, grouped=False):
        return None if like is None else summed_like(gradient, call.lead, like, grouped=grouped)

    gqa = options.get("enable_gqa", False)
    dq, dk, dv, ds, dsink = all_heads
    return (
        shaped(dq, q), shaped(dk, k, gqa), shaped(dv, v, gqa), shaped(ds, options.get("bias")), shaped(dsink, options.get("sink")),
    )
