"""Twin of reference/softmax/sink.py: a row starts at largest logit z and sum 1."""

from attnspec.numba_kernels.softmax.tiles import attention_result
from attnspec.numba_kernels.twin import twin


@twin
def attention_with_sink(
    q, k, v, sink, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, enable_gqa=False,
    return_weights=False, return_lse=False,
):
    """Softmax attention of q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e) with a sink (h,); parameters as in the reference."""
    return attention_result(
        q, k, v, scale=scale, softcap=softcap, bias=bias, mask=mask, causal=causal, window=window, sink=sink,
        enable_gqa=enable_gqa, return_weights=return_weights, return_lse=return_lse,
    )
