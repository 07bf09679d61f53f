"""Twin of reference/softmax/sink.py: the sink is one more term of the normaliser, not a column that is dropped afterwards."""

from attnspec.mlx_backend.softmax.tiles import attention
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult


@twin
def attention_with_sink(
    q, k, v, sink, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, enable_gqa=False,
    return_weights=False, return_lse=False,
):
    """Softmax attention of q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e) with a sink (h,); parameters as in the reference."""
    out, P, L = attention(
        q, k, v, return_weights=return_weights, own=True, scale=scale, softcap=softcap, bias=bias, mask=mask, causal=causal, window=window,
        sink=sink, enable_gqa=enable_gqa,
    )
    if not (return_weights or return_lse):
        return out
    return AttentionResult(out, P if return_weights else None, L if return_lse else None)
