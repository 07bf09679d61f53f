"""Twin of reference/softmax/multi_query.py: the projections' gradients pass by the same graph."""

import mlx.core as mx

from attnspec.mlx_backend.graph import attention_logits, softmax_weights, turned, visible_keys, weighted_values
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult


@twin
def multi_query_attention(x, context, w_q, w_k, w_v, w_o, *, scale=None, mask=None, causal=False, return_weights=False):
    """Multi-query attention of x (..., n, c) over the context (..., m, c), with its projections; parameters as in the reference."""
    Q = x[..., None, :, :] @ w_q                                       # (..., h, n, d)
    K, V = (context @ w_k)[..., None, :, :], (context @ w_v)[..., None, :, :]
    visible = visible_keys(x.shape[-2], context.shape[-2], mask, causal)
    P, _ = softmax_weights(attention_logits(Q, K, visible, scale), visible)
    O = weighted_values(P, V, visible)
    y = mx.sum(O @ turned(w_o), axis=-3)
    return AttentionResult(y, P) if return_weights else y
