"""Twin of reference/softmax/softmax_one.py: a row starts at largest logit 0 and sum 1."""

import numpy as np

from attnspec.numba_kernels.softmax.tiles import attention_result
from attnspec.numba_kernels.twin import twin


@twin
def softmax_one_attention(
    q, k, v, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, enable_gqa=False,
    return_weights=False, return_lse=False,
):
    """Softmax-one attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    return attention_result(
        q, k, v, scale=scale, softcap=softcap, bias=bias, mask=mask, causal=causal, window=window, sink=np.zeros((), q.dtype),
        enable_gqa=enable_gqa, return_weights=return_weights, return_lse=return_lse,
    )
