"""Twin of reference/transport/prior.py: softmax attention at scale / tau, with the log prior as a bias and -inf as a mask."""

import numpy as np

from attnspec.numba_kernels.softmax.tiles import attention_result
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import default_scale, number


@twin
def prior_attention(
    q, k, v, log_prior, *, tau=1.0, scale=None, mask=None, causal=False, enable_gqa=False, return_weights=False,
):
    """Attention of q (..., n, d) over k (..., m, d), v (..., m, e) with a prior over the keys; parameters as in the reference."""
    tau = number("tau", tau, above=0)
    impossible = np.isneginf(log_prior)
    if impossible.any():                                               # a value of such a key never arrives, NaN included
        mask = ~impossible if mask is None else mask & ~impossible
    return attention_result(
        q, k, v, scale=finite_scale(default_scale(scale, q) / tau, q, k), bias=log_prior, mask=mask, causal=causal,
        enable_gqa=enable_gqa, return_weights=return_weights,
    )


def finite_scale(scale, q, k):
    """`scale`, but no larger than keeps every logit finite: there, keys that differ at all are infinitely far apart in any case."""
    if abs(scale) < 1e6:
        return scale
    limit = np.finfo(q.dtype).max / (16.0 * max(q.shape[-1], 1))
    for x in (q, k):
        limit /= max(1.0, float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x))))
    return min(max(scale, -limit), limit)
