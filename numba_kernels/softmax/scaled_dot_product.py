"""Twin of reference/softmax/scaled_dot_product.py, over tiles: memory of order n + m unless the weights are asked for."""

from attnspec.numba_kernels.softmax.tiles import attention_result
from attnspec.numba_kernels.softmax.tiles_backward import tiled_backward
from attnspec.numba_kernels.twin import twin
from attnspec.reference.softmax.scaled_dot_product import AttentionGradients


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


@twin
def scaled_dot_product_attention_backward(
    q, k, v, do, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False,
):
    """AttentionGradients of `scaled_dot_product_attention` for the cotangent do (..., n, e); the parameters are those of the reference."""
    return AttentionGradients(*tiled_backward(
        q, k, v, do, scale=scale, softcap=softcap, bias=bias, mask=mask, causal=causal, window=window, sink=sink, enable_gqa=enable_gqa,
    ))
