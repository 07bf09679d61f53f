"""Twin of reference/signed/cog.py: the tiles of softmax attention on |p|, each weight with the sign of its logit."""

import math

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.exponential import LOG2_E, exp2_row, range_of_row
from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import lanes, load, splat, store
from attnspec.numba_kernels.softmax.tiles import (
    FAR,
    NONZERO,
    SIGNED,
    hide_row,
    magnitude_row,
    sign_row,
    sum_of_sizes,
    tiled_attention,
    whole_registers,
)
from attnspec.numba_kernels.softmax.tiles_backward import tiled_backward
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, one_of
from attnspec.reference.softmax.scaled_dot_product import AttentionGradients

KINDS = {"visible": SIGNED, "nonzero": NONZERO}


@twin
def cog_weights(p, mask=None, *, normaliser="visible"):
    """Signed weights A (..., n, m) of logits p (..., n, m); the parameters are those of the reference."""
    one_of("normaliser", normaliser, tuple(KINDS))
    lead = np.broadcast_shapes(p.shape[:-2], () if mask is None else mask.shape[:-2])
    n, m = p.shape[-2:]
    logits, p_of = heads_of(p, lead)
    masks, mask_of = heads_of(np.zeros((0, 1), np.bool_) if mask is None else mask, lead)
    weights = np.empty((math.prod(lead), n, m), p.dtype)
    in_parallel(weigh_logits, len(weights) * n, logits, p_of, masks, mask_of, KINDS[normaliser], weights, work=8 * weights.size)
    return weights.reshape(*lead, n, m)


@kernel
def weigh_logits(logits, p_of, mask, mask_of, signed, weights, first, step):
    """weights (h, n, m), a row a task: the largest size is subtracted before the logits are taken to base 2."""
    heads, n, m = weights.shape
    zero, stop = weights.dtype.type(0), whole_registers(m, weights)
    row, sizes = np.zeros(stop, weights.dtype), np.zeros(stop, weights.dtype)
    for task in range(first, heads * n, step):
        h, i = task // n, task % n
        row[:m] = logits[p_of[h], i]
        magnitude_row(row, stop, sizes)
        hide_row(sizes, i, 0, m, mask, mask_of[h] if mask.size else 0, -FAR, FAR)
        smallest, largest = range_of_row(sizes, 0, stop)
        top = max(largest, zero)
        shift, log2_e = splat(top, row), splat(row.dtype.type(LOG2_E), row)
        for j in range(0, stop, lanes(row)):
            store(sizes, j, (load(sizes, j) - shift) * log2_e)
        total = exp2_row(sizes, 0, stop, zero, (smallest - top) * row.dtype.type(LOG2_E))
        sign_row(row, stop, sizes)
        if signed == NONZERO:
            total = sum_of_sizes(row, stop) + row.dtype.type(1e-6)
        for j in range(m):
            seen = mask.size == 0 or mask[mask_of[h], i if mask.shape[1] > 1 else 0, j if mask.shape[2] > 1 else 0]
            weights[h, i, j] = row[j] / total if seen and total != 0 else zero


@twin
def cog_attention(
    q, k, v, *, scale=None, mask=None, causal=False, normaliser="visible", enable_gqa=False, return_weights=False,
):
    """Cog attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    one_of("normaliser", normaliser, tuple(KINDS))
    out, weights, _ = tiled_attention(
        q, k, v, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa, signed=KINDS[normaliser], return_weights=return_weights,
    )
    return AttentionResult(out, weights) if return_weights else out


@twin
def cog_attention_backward(q, k, v, do, *, scale=None, mask=None, causal=False, enable_gqa=False):
    """Gradients (dq, dk, dv) of `cog_attention` for the cotangent do (..., n, e); the parameters are those of the reference."""
    gradients = tiled_backward(q, k, v, do, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa, signed=SIGNED)
    return AttentionGradients(*gradients[:3])
