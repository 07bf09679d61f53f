"""Twin of the merge in reference/softmax/online.py, one pass over the rows."""

import math

import numpy as np

from attnspec.numba_kernels.arrays import heads_of, without_axes
from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.twin import twin
from attnspec.reference.softmax.online import AttentionPartial

ROWS = 256      # of a task


@twin
def merge_attention_partials(m1, l1, o1, m2, l2, o2):
    """The AttentionPartial of two disjoint sets of keys together, from m1, m2 (..., n), l1, l2 (..., n), o1, o2 (..., n, e)."""
    of_m = np.broadcast_shapes(m1.shape, m2.shape)
    of_l = np.broadcast_shapes(of_m, l1.shape, l2.shape)
    lead = np.broadcast_shapes(of_l, o1.shape[:-1], o2.shape[:-1])
    e, rows = o1.shape[-1], math.prod(lead)
    m, l, o = np.empty(rows, m1.dtype), np.empty(rows, m1.dtype), np.empty((rows, e), m1.dtype)
    given = [x for one in (m1, l1, m2, l2) for x in heads_of(one, lead, 0)] + [x for one in (o1, o2) for x in heads_of(one, lead, 1)]
    in_parallel(merge_rows, -(-rows // ROWS), *given, m, l, o, work=rows * e)

    of_o = np.broadcast_shapes(of_m, o1.shape[:-1], o2.shape[:-1])
    return AttentionPartial(*(without_axes(x.reshape(*lead, *x.shape[1:]), of, x.ndim - 1) for x, of in ((m, of_m), (l, of_l), (o, of_o))))


@kernel
def merge_rows(m1, m1_of, l1, l1_of, m2, m2_of, l2, l2_of, o1, o1_of, o2, o2_of, m, l, o, first, step):
    """m, l (rows,) and o (rows, e) of the merged partials."""
    rows, e = o.shape
    for block in range(first, (rows + ROWS - 1) // ROWS, step):
        for i in range(block * ROWS, min(rows, (block + 1) * ROWS)):
            a, b = m1[m1_of[i]], m2[m2_of[i]]
            top = a if a >= b else b
            shift = top if top != -np.inf else m.dtype.type(0)
            one, other = np.exp(a - shift), np.exp(b - shift)
            m[i], l[i] = top, l1[l1_of[i]] * one + l2[l2_of[i]] * other
            for c in range(e):
                o[i, c] = o1[o1_of[i], c] * one + o2[o2_of[i], c] * other
