"""Twin of reference/higher_order/two_simplicial.py, over tiles of pairs: those outside the windows of a block of queries cost nothing."""

import numpy as np

from attnspec.numba_kernels.higher_order.pairs import attend_pairs, seen_by
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, default_scale, number, whole


def shifted(name, bias, x):
    """x + bias, rounded once."""
    bias = np.float64(number(name, bias))
    return x if bias == 0 else (x + bias).astype(x.dtype)


@twin
def two_simplicial_attention(
    q, k1, k2, v1, v2, *, scale=None, causal=False, window1=None, window2=None, k2_bias=0.0, v2_bias=0.0, enable_gqa=False, mask=None,
    return_weights=False,
):
    """2-simplicial attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    The parameters are those of the reference.
    """
    k2, v2 = shifted("k2_bias", k2_bias, k2), shifted("v2_bias", v2_bias, v2)
    windows = [None if w is None else (whole(name, w, least=1) - 1, 0) for name, w in (("window1", window1), ("window2", window2))]
    seen = seen_by(q.shape[-2], (k1.shape[-2], k2.shape[-2]), mask, causal, windows)
    sums = attend_pairs(q, k1, k2, v1, v2, seen, default_scale(scale, q), enable_gqa=enable_gqa, return_weights=return_weights)
    return AttentionResult(sums.out, sums.weights) if return_weights else sums.out
