"""Twin of reference/softmax/scaled_dot_product.py, over tiles: memory of order n + m unless the weights are asked for."""

from attnspec.numba_kernels.softmax.tiles import attention_result
from attnspec.numba_kernels.twin import twin


@twin
def scaled_dot_product_attention(
    q, k, v, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False,
    return_weights=False, return_lse=False,
):
    """Softmax attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    return attention_result(
        q, k, v, scale=scale, softcap=softcap, bias=bias, mask=mask, causal=causal, window=window, sink=sink,
        enable_gqa=enable_gqa, return_weights=return_weights, return_lse=return_lse,
    )
