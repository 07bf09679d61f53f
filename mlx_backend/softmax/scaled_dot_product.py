"""Twin of reference/softmax/scaled_dot_product.py as a graph; its gradients are the graph's own."""

import functools

from attnspec.mlx_backend.graph import gradients_of
from attnspec.mlx_backend.softmax.tiles import attention
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult
from attnspec.reference.softmax.scaled_dot_product import AttentionGradients


@twin
def scaled_dot_product_attention(
    q, k, v, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False,
    return_weights=False, return_lse=False,
):
    """Softmax attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    out, P, L = attention(
        q, k, v, return_weights=return_weights, own=True, scale=scale, softcap=softcap, bias=bias, mask=mask, causal=causal, window=window,
        sink=sink, enable_gqa=enable_gqa,
    )
    if not (return_weights or return_lse):
        return out
    return AttentionResult(out, P if return_weights else None, L if return_lse else None)


@twin
def scaled_dot_product_attention_backward(
    q, k, v, do, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False,
):
    """AttentionGradients of `scaled_dot_product_attention` for the cotangent do (..., n, e); the parameters are those of the reference."""
    options = {"scale": scale, "softcap": softcap, "mask": mask, "causal": causal, "window": window, "enable_gqa": enable_gqa}
    forward = functools.partial(output_of, options)
    return AttentionGradients(*gradients_of(forward, do, q=q, k=k, v=v, bias=bias, sink=sink).values())


def output_of(options, **arrays):
    return attention(own=True, **arrays, **options)[0]
