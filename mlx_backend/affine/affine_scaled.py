"""Twin of reference/affine/affine_scaled.py as a graph; alpha_ma, a running state, is a constant for derivatives."""

import functools

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.activations import linear_clipping
from attnspec.mlx_backend.graph import (
    attention_logits,
    gradients_of,
    grouped_heads,
    joint_lead,
    scores,
    select,
    softmax_weights,
    total,
    visible_keys,
    weighted_values,
)
from attnspec.mlx_backend.twin import twin
from attnspec.reference.affine.affine_scaled import AffineGradients
from attnspec.reference.inputs import AttentionResult, one_of

ACTIVATIONS = {"linear_clipping": linear_clipping, "sigmoid": mx.sigmoid}
N_KEYS = ("total", "allowed")


@twin
def affine_scaled_attention(
    q, k, v, x, w_a, alpha_ma, *, scale=None, phi="linear_clipping", n_keys="total", mask=None, causal=False, enable_gqa=False,
    return_weights=False,
):
    """Affine-scaled attention of q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e); parameters as in the reference."""
    out, A = scaled_attention(
        q, k, v, x, w_a, alpha_ma, scale=scale, phi=phi, n_keys=n_keys, mask=mask, causal=causal, enable_gqa=enable_gqa,
    )
    return AttentionResult(out, A) if return_weights else out


@twin
def affine_scaled_attention_backward(
    q, k, v, x, w_a, alpha_ma, do, *, scale=None, phi="linear_clipping", n_keys="total", mask=None, causal=False, enable_gqa=False,
):
    """AffineGradients of `affine_scaled_attention` for the cotangent do (..., h, n, e); the parameters are those of the reference."""
    options = {"alpha_ma": alpha_ma, "scale": scale, "phi": phi, "n_keys": n_keys, "mask": mask, "causal": causal, "enable_gqa": enable_gqa}
    return AffineGradients(*gradients_of(functools.partial(output_of, options), do, q=q, k=k, v=v, x=x, w_a=w_a).values())


def output_of(options, **arrays):
    return scaled_attention(**arrays, **options)[0]


def scaled_attention(q, k, v, x, w_a, alpha_ma, *, scale, phi, n_keys, mask, causal, enable_gqa):
    """Output and weights. The factor of a query that sees nothing is that of zeros: whatever its x is, it never arrives."""
    one_of("phi", phi, tuple(ACTIVATIONS))
    one_of("n_keys", n_keys, N_KEYS)
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    h, n, m = q.shape[-3], q.shape[-2], k.shape[-2]
    visible = visible_keys(n, m, mask, causal)
    if n * m == 0:
        lead = joint_lead(q, k, v, mask, rank=3)
        return mx.zeros((*lead, h, n, v.shape[-1])), mx.zeros((*lead, h, n, m))
    P, _ = softmax_weights(attention_logits(q, k, visible, scale), visible)
    sees = None if visible is None else mx.any(visible, axis=-1)
    sees = None if sees is None else mx.broadcast_to(sees, np.broadcast_shapes(sees.shape, (h, n)))
    alpha = ACTIVATIONS[phi](scores(w_a, x, sees))[..., None]          # (..., h, n, 1)
    alpha_ma = mx.stop_gradient(alpha_ma)[:, None, None]
    N = max(m, 1)
    if n_keys == "allowed" and visible is not None:
        N = mx.maximum(total(visible.astype(mx.float32), keepdims=True), 1.0)
    A = select(visible, alpha * P + (alpha_ma - alpha) / N, 0.0)
    return weighted_values(A, v, visible), A
