"""Twin of reference/affine/energy_gated.py as a graph: prefix statistics come from cumulative masks, so that a later NaN stays later."""

import mlx.core as mx

from attnspec.mlx_backend.graph import (
    attention_logits,
    select,
    softmax_weights,
    total,
    turned,
    visible_keys,
    weighted_values,
)
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, one_of

FLOOR = 1e-8
SQUARED_FLOOR = 1e-16        # in range of float32
ZNORMS = ("sequence", "prefix")
STD_FLOORS = ("clamp", "add")


@twin
def energy_gated_attention(
    x, w_q, w_k, w_v, w_energy, b_energy, alpha, tau, mixing, *, scale=None, causal=True, znorm="sequence", std_floor="clamp",
    return_weights=False,
):
    """Energy-gated self-attention of one head over the tokens x (..., n, c); the parameters are those of the reference."""
    energy = w_energy @ turned(x) + b_energy[..., None]                # (..., s, n)
    g = mx.sigmoid(alpha[..., None] * (z_normalised(energy, znorm, std_floor) - tau[..., None]))
    gate = softmax_weights(mixing[..., None, :])[0] @ g                # (..., 1, n)
    q, k, v = (x @ turned(w) for w in (w_q, w_k, w_v))
    visible = visible_keys(q.shape[-2], k.shape[-2], None, causal)
    P, _ = softmax_weights(attention_logits(q, k, visible, scale), visible)
    weighed = select(visible, P * gate, 0.0)
    sums = total(weighed, keepdims=True)
    A = weighed / mx.where(sums < FLOOR, FLOOR, sums)
    out = weighted_values(A, v, visible)
    return AttentionResult(out, A) if return_weights else out


def z_normalised(e, znorm, std_floor):
    """e (..., n) minus its mean, over its standard deviation; both over all positions, or over those up to each one."""
    one_of("znorm", znorm, ZNORMS)
    one_of("std_floor", std_floor, STD_FLOORS)
    n = e.shape[-1]
    if znorm == "prefix":
        seen = visible_keys(n, n, None, True)
        count = mx.arange(1, n + 1)
        mean = total(select(seen, e[..., None, :], 0.0)) / count
        deviations = select(seen, e[..., None, :] - mean[..., None], 0.0)
    else:
        count = max(n, 1)
        mean = total(e, keepdims=True) / count
        deviations = (e - mean)[..., None, :]
    variance = total(deviations**2) / count
    # The root has no derivative at 0, so it is taken only of what the floor leaves.
    if std_floor == "clamp":
        std = mx.sqrt(mx.where(variance > SQUARED_FLOOR, variance, SQUARED_FLOOR))
    else:
        std = mx.where(variance > 0, mx.sqrt(mx.where(variance > 0, variance, 1.0)), 0.0) + FLOOR
    z = (e - mean) / std
    if znorm == "sequence":
        return z
    # The first token is its own mean. Its derivative, 0, would be a difference of two numbers of 1 / FLOOR.
    return select(mx.arange(n) > 0, z, mx.stop_gradient(e - mean))
