"""Twin of reference/softmax/softmax_one.py: the graph of attention with a sink at 0."""

import mlx.core as mx

from attnspec.mlx_backend.softmax.tiles import attention
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult


@twin
def softmax_one_attention(
    q, k, v, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, enable_gqa=False,
    return_weights=False, return_lse=False,
):
    """Softmax-one attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    out, P, L = attention(
        q, k, v, return_weights=return_weights, own=True, scale=scale, softcap=softcap, bias=bias, mask=mask, causal=causal, window=window,
        sink=mx.array(0.0), enable_gqa=enable_gqa,
    )
    if not (return_weights or return_lse):
        return out
    return AttentionResult(out, P if return_weights else None, L if return_lse else None)
