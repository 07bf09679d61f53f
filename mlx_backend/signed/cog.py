"""Twin of reference/signed/cog.py as a graph: the sign of a logit is a constant for derivatives, as in the reference."""

import functools

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import (
    attention_logits,
    gradients_of,
    grouped_heads,
    row_maximum,
    select,
    total,
    visible_keys,
    weighted_values,
)
from attnspec.mlx_backend.softmax import tiles
from attnspec.mlx_backend.twin import common_dtype, twin
from attnspec.reference.inputs import AttentionResult, one_of
from attnspec.reference.softmax.scaled_dot_product import AttentionGradients

NORMALISERS = ("visible", "nonzero")


@twin
def cog_weights(p, mask=None, *, normaliser="visible"):
    """Signed weights A (..., n, m) of logits p (..., n, m); the parameters are those of the reference."""
    visible = None if mask is None else mx.broadcast_to(mask, np.broadcast_shapes(mask.shape, p.shape[-2:]))
    return signed_weights(p, visible, normaliser)


def signed_weights(p, visible, normaliser="visible"):
    one_of("normaliser", normaliser, NORMALISERS)
    p = select(visible, p, 0.0)
    sign, size = mx.stop_gradient(mx.sign(p)), mx.abs(p)
    seen = mx.ones(p.shape[-2:], mx.bool_) if visible is None else visible
    top = mx.maximum(row_maximum(size, seen), 0.0)                     # |p| >= 0: also right for a query that sees nothing
    e = select(visible, mx.exp(select(visible, size, top) - top), 0.0)
    sums = total(mx.where(sign == 0, 0.0, e), keepdims=True) + 1e-6 if normaliser == "nonzero" else total(e, keepdims=True)
    return select(visible, sign * e / mx.where(sums == 0, 1.0, sums), 0.0)


def signed_attention(q, k, v, *, scale=None, mask=None, causal=False, normaliser="visible", enable_gqa=False):
    """Output and weights."""
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    visible = visible_keys(q.shape[-2], k.shape[-2], mask, causal)
    A = signed_weights(attention_logits(q, k, visible, scale), visible, normaliser)
    return weighted_values(A, v, visible), A


@twin
def cog_attention(
    q, k, v, *, scale=None, mask=None, causal=False, normaliser="visible", enable_gqa=False, return_weights=False,
):
    """Cog attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    options = {"scale": scale, "mask": mask, "causal": causal, "enable_gqa": enable_gqa}
    kind = 1 + NORMALISERS.index(one_of("normaliser", normaliser, NORMALISERS))
    if tiles.takes(q, k, v, return_weights):
        return tiles.attend(q, k, v, dtype=common_dtype(), signed=kind, graph=functools.partial(graph, normaliser), **options)[0]
    out, A = signed_attention(q, k, v, normaliser=normaliser, **options)
    return AttentionResult(out, A) if return_weights else out


def graph(normaliser, q, k, v, *, scale, mask, causal, enable_gqa, **_):
    return [signed_attention(q, k, v, scale=scale, mask=mask, causal=causal, normaliser=normaliser, enable_gqa=enable_gqa)[0]]


@twin
def cog_attention_backward(q, k, v, do, *, scale=None, mask=None, causal=False, enable_gqa=False):
    """Gradients (dq, dk, dv) of `cog_attention` for the cotangent do (..., n, e); the parameters are those of the reference."""
    forward = functools.partial(output_of, {"scale": scale, "mask": mask, "causal": causal, "enable_gqa": enable_gqa})
    return AttentionGradients(*gradients_of(forward, do, q=q, k=k, v=v).values())


def output_of(options, **arrays):
    if tiles.takes(arrays["q"], arrays["k"], arrays["v"]):
        return tiles.attend(**arrays, dtype=common_dtype(), signed=1, graph=functools.partial(graph, "visible"), **options)[0]
    return signed_attention(**arrays, **options)[0]
