"""Twin of reference/transport/prior.py: a prior of 0 hides a key as a mask does, so that nothing of it arrives."""

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import (
    INF,
    attention_logits,
    grouped_heads,
    row_maximum,
    scale_of,
    select,
    softmax_weights,
    visible_keys,
    weighted_values,
)
from attnspec.mlx_backend.softmax import tiles
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, number

STEEP = 1e6        # a scale from which on the largest logit is subtracted before it is multiplied


@twin
def prior_attention(
    q, k, v, log_prior, *, tau=1.0, scale=None, mask=None, causal=False, enable_gqa=False, return_weights=False,
):
    """Attention of q (..., n, d) over k (..., m, d), v (..., m, e) with a prior (..., n, m); the parameters are those of the reference."""
    tau = float(number("tau", tau, above=0))
    steep = scale_of(scale, q) / tau
    if abs(steep) < STEEP and tiles.takes(q, k, v, return_weights):
        hidden = mx.broadcast_to(log_prior == -INF, np.broadcast_shapes(log_prior.shape, (1, 1)))
        seen = ~hidden if mask is None else mx.logical_and(mask, ~hidden)
        return tiles.attend(q, k, v, scale=steep, bias=log_prior, mask=seen, causal=causal, enable_gqa=enable_gqa)[0]
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    n, m = q.shape[-2], k.shape[-2]
    visible = visible_keys(n, m, mask, causal)
    has_prior = log_prior != -INF
    visible = has_prior if visible is None else mx.logical_and(visible, has_prior)
    visible = mx.broadcast_to(visible, np.broadcast_shapes(visible.shape, (n, m)))
    p = prior_weights(attention_logits(q, k, visible, scale), log_prior, visible, tau)
    out = weighted_values(p, v, visible)
    return AttentionResult(out, p) if return_weights else out


def prior_weights(s, log_prior, visible, tau=1.0):
    """softmax(s / tau + log_prior) where visible; the largest of s is subtracted first, then it is 0 whatever tau is."""
    top = row_maximum(s, visible)
    s = (s - mx.where(top == -INF, 0.0, top)) / tau
    return softmax_weights(s + select(log_prior != -INF, log_prior, 0.0), visible)[0]
