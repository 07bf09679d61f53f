"""Twin of reference/transport/flow.py as a graph, in float32: a flow below its smallest normal number counts as none."""

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import joint_lead, select, softmax_weights, total, turned, visible_keys, weighted_values
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, number, one_of

FEATURES = ("sigmoid", "relu")
COMPETITIONS = ("sources", "heads")
SMALLEST = 2.0**-126


def features(x, feature):
    """phi(x): positive features, entry by entry."""
    one_of("feature", feature, FEATURES)
    return mx.sigmoid(x) if feature == "sigmoid" else mx.where(x < 0, 0.0, x) + 1e-6


def flow(x, others, eps):
    """<x_i + eps, others + eps>: what flows between each node and all those on the other side, `others` being their sum."""
    return total((x + eps) * (others + eps))


def per(x):
    """1 / x, and 0 where nothing flows."""
    nothing = x < SMALLEST
    return mx.where(nothing, 0.0, 1 / mx.where(nothing, 1.0, x))


def clipped(x, clip):
    """x bounded to [-clip, clip], where its derivative is 0; None leaves it as it is."""
    if clip is None:
        return x
    clip = float(number("clip", clip, above=0))
    return x if clip == np.inf else mx.where(x > clip, clip, mx.where(x < -clip, -clip, x))


@twin
def flow_attention(q, k, v, *, eps=1e-6, flow_eps=0.0, clip=1.0, feature="sigmoid", competition="sources", return_weights=False):
    """Flow attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    eps, flow_eps = float(number("eps", eps, least=0)), float(number("flow_eps", flow_eps, least=0))
    n, m = q.shape[-2], k.shape[-2]
    if n * m == 0 and not return_weights:
        return mx.zeros((*joint_lead(q, k, v), n, v.shape[-1]))
    q, k = features(q, feature), features(k, feature)
    I = per(flow(q, total(k, -2, keepdims=True), eps) + flow_eps)
    O = per(flow(k, total(q, -2, keepdims=True), eps) + flow_eps)
    I_hat = flow(q, total(k * O[..., None], -2, keepdims=True), eps) + flow_eps
    O_hat = clipped(flow(k, total(q * I[..., None], -2, keepdims=True), eps) + flow_eps, clip)
    if one_of("competition", competition, COMPETITIONS) == "heads":
        O_hat = mx.broadcast_to(O_hat, (*np.broadcast_shapes(O_hat.shape[:-1], v.shape[:-2]), m))      # heads of the values compete too
        if O_hat.ndim < 2:
            raise ValueError(f"competition: 'heads' expects a head axis, q (..., h, n, d), k (..., h, m, d), got {q.shape} and {k.shape}")
    C = m * share(O_hat, axis=-1 if competition == "sources" else -2)
    allocation = mx.sigmoid(I_hat * (n / max(m, 1)))
    out = allocation[..., None] * ((q * I[..., None]) @ (turned(k) @ (v * C[..., None])))
    if not return_weights:
        return out
    return AttentionResult(out, (allocation * I)[..., None] * (q @ turned(k)) * C[..., None, :])


def share(x, axis):
    """Softmax of x along `axis`."""
    return mx.softmax(x, axis=axis, precise=True) if x.size else x


@twin
def flow_attention_causal(q, k, v, *, eps=1e-6, clip=1.0, return_weights=False):
    """Causal flow attention of q (..., n, d) over k (..., n, d), v (..., n, e); the parameters are those of the reference."""
    eps = float(number("eps", eps, least=0))
    n = q.shape[-2]
    if n == 0 and not return_weights:
        return mx.zeros((*joint_lead(q, k, v), n, v.shape[-1]))
    t = mx.arange(1, n + 1).astype(mx.float32)
    prefix = visible_keys(n, n, causal=True)
    q, k = mx.sigmoid(q), mx.sigmoid(k)
    I = t * per(flow(q, mx.cumsum(k, axis=-2), eps))
    O = t * per(flow(k, mx.cumsum(q, axis=-2), eps))
    I_hat = flow(q, mx.cumsum(k * O[..., None], axis=-2), eps) / t
    O_hat = clipped(flow(k, mx.cumsum(q * I[..., None], axis=-2), eps) / t, clip)
    P, _ = softmax_weights(mx.broadcast_to(O_hat[..., None, :], (*O_hat.shape[:-1], n, n)), prefix)      # how the sources up to i compete
    C = t * mx.diagonal(P, axis1=-2, axis2=-1)
    A = select(prefix, (mx.sigmoid(I_hat) * I / t)[..., None] * (q @ turned(k)) * C[..., None, :], 0.0)
    out = weighted_values(A, v, prefix)
    return AttentionResult(out, A) if return_weights else out
