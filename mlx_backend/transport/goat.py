"""Twin of reference/transport/goat.py as a graph: logits are the plain products of queries and keys that carry their position's waves."""

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.activations import silu, softplus
from attnspec.mlx_backend.graph import (
    INF,
    any_to_shape,
    grouped_heads,
    joint_lead,
    row_maximum,
    scores,
    select,
    softmax_weights,
    total,
    turned,
    weighted_values,
)
from attnspec.mlx_backend.softmax import tiles
from attnspec.mlx_backend.transport.goat_positions import at_positions, constant, sequence_positions, waves
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, number, whole
from attnspec.reference.transport.goat import AugmentedHeads

# --- features ------------------------------------------------------------------------------------------------------------------------


def content_width(d, a, u):
    """D_c, what the positional coordinates leave of a head of width d."""
    taken = 2 * a.shape[-1] + (u is not None)
    if taken >= d:
        raise ValueError(f"a: expected fewer than {d} positional coordinates in heads of width {d}, got {taken} for {a.shape}")
    return d - taken


def norm(x):
    """|x| along the last axis; no square overflows or vanishes. 0, and no derivative, for zeros."""
    if x.shape[-1] == 0:
        return mx.zeros(x.shape[:-1])
    top = mx.stop_gradient(mx.max(mx.abs(x), axis=-1, keepdims=True))
    plain = mx.logical_or(top == 0, top == INF)
    x = mx.where(plain, 1.0, x / mx.where(plain, 1.0, top))
    return mx.where(plain, top, top * mx.sqrt(total(x * x, keepdims=True)))[..., 0]


def prior_gate(q_content, gate_scale, gate_bias):
    """g (..., h, n, 1), how far a query trusts the prior; 1 where there is no gate."""
    if (gate_scale is None) != (gate_bias is None):
        raise ValueError("gate_scale: expected together with gate_bias, got one of the two")
    if gate_scale is None:
        return mx.ones((*q_content.shape[:-1], 1))
    return mx.sigmoid(gate_bias[:, None] - softplus(gate_scale)[:, None] * norm(q_content))[..., None]


def per_query_head(x, q, k):
    """x (hk, ...) with one entry per query head."""
    return mx.repeat(x, q.shape[-3] // max(k.shape[-3], 1), axis=0)


def query_waves(g, a, b, waves_of_queries):
    """The queries' positional coordinates, g (a cos + b sin) and g (a sin - b cos); a, b (h, R)."""
    cos, sin = (constant(x) for x in waves_of_queries)
    A, B = a[:, None, :], b[:, None, :]
    return g * (A * cos + B * sin), g * (A * sin - B * cos)


@twin
def goat_augmented_qk(
    q, k, a, b, u=None, *, gate_scale=None, gate_bias=None, causal=False, query_offset=None, key_offset=0, position_base=1e4, grid=None,
    cls=False, enable_gqa=False,
):
    """Queries (..., h, n, d) and keys (..., hk, m, d) whose plain dot product is GOAT's logit; parameters as in the reference."""
    i, j = sequence_positions(q.shape[-2], k.shape[-2], causal, query_offset, key_offset)
    return augmented(q, k, a, b, u, gate_scale, gate_bias, i, j, position_base, grid, cls)


def augmented(q, k, a, b, u, gate_scale, gate_bias, i, j, position_base, grid, cls) -> AugmentedHeads:
    """Queries at positions i and keys at positions j with their positional coordinates."""
    R = a.shape[-1]
    of_queries, of_keys = waves(i, R, position_base, grid, cls), waves(j, R, position_base, grid, cls)
    D_c = content_width(q.shape[-1], a, u)
    a, b = (per_query_head(x, q, k) for x in (a, b))
    q, k = q[..., :D_c], k[..., :D_c]
    g = prior_gate(q, gate_scale, gate_bias)
    heads = [q / float(np.sqrt(D_c)), *query_waves(g, a, b, of_queries)]
    keys = [k] + [mx.broadcast_to(constant(x), (*k.shape[:-1], R)) for x in of_keys]
    if u is not None:
        heads.append(g)
        keys.append(mx.broadcast_to(u[..., None], (*k.shape[:-1], 1)))
    return AugmentedHeads(mx.concatenate(heads, axis=-1), mx.concatenate(keys, axis=-1))


# --- attention of heads --------------------------------------------------------------------------------------------------------------


@twin
def goat_head_attention(
    q, k, v, a, b, u=None, *, gate_scale=None, gate_bias=None, mask=None, causal=False, query_offset=None, key_offset=0,
    position_base=1e4, grid=None, cls=False, enable_gqa=False, return_weights=False,
):
    """GOAT attention of heads q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e); the parameters are those of the reference."""
    if kernel_taken(q, k, v, causal, query_offset, key_offset, return_weights):
        i, j = sequence_positions(q.shape[-2], k.shape[-2], causal, query_offset, key_offset)
        if u is not None:                                              # a key of prior 0 is hidden, and its u may not meet a gate
            hidden = per_query_head(u == -INF, q, k)[:, None, :]
            mask, u = ~hidden if mask is None else mx.logical_and(mask, ~hidden), mx.where(u == -INF, 0.0, u)
        heads = augmented(q, k, a, b, u, gate_scale, gate_bias, i, j, position_base, grid, cls)
        return tiles.attend(heads.q_augmented, heads.k_augmented, v, scale=1.0, mask=mask, causal=causal, enable_gqa=True)[0]
    out, P = attend_heads(
        q, k, v, a, b, u, gate_scale=gate_scale, gate_bias=gate_bias, mask=mask, causal=causal, query_offset=query_offset,
        key_offset=key_offset, position_base=position_base, grid=grid, cls=cls, enable_gqa=enable_gqa,
    )
    return AttentionResult(out, P) if return_weights else out


def kernel_taken(q, k, v, causal, query_offset, key_offset, return_weights) -> bool:
    """Whether the kernel of softmax attention is taken for the augmented heads; only queries that stand at the end of the keys are."""
    if query_offset is None and key_offset == 0:
        return tiles.takes(q, k, v, return_weights)
    return tiles.kernel_for(q).chosen("it knows no offsets of positions", False)


def attend_heads(q, k, v, a, b, u, *, gate_scale, gate_bias, mask, causal, query_offset, key_offset, position_base, grid, cls, enable_gqa):
    """Output and weights. A u_j of -inf hides the key; what nobody sees is put out before it can meet a gate."""
    i, j = sequence_positions(q.shape[-2], k.shape[-2], causal, query_offset, key_offset)
    R = a.shape[-1]
    of_queries, of_keys = waves(i, R, position_base, grid, cls), waves(j, R, position_base, grid, cls)
    D_c = content_width(q.shape[-1], a, u)
    a, b = (per_query_head(x, q, k) for x in (a, b))
    u = None if u is None else per_query_head(u, q, k)[:, None, :]     # (h, 1, m)
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    visible = at_positions(i, j, mask, causal)
    if len(i) * len(j) == 0:
        lead = joint_lead(q, k, v, mask, rank=3)
        return mx.zeros((*lead, *q.shape[-3:-1], v.shape[-1])), mx.zeros((*lead, *q.shape[-3:-1], len(j)))
    if u is not None:
        has_prior = mx.broadcast_to(u != -INF, (q.shape[-3], len(i), len(j)))
        visible = has_prior if visible is None else mx.logical_and(visible, has_prior)
        u = select(any_to_shape(visible, (*visible.shape[-3:-2], 1, len(j))), u, 0.0)
    q, k = q[..., :D_c], k[..., :D_c]
    if visible is not None:
        q = select(mx.any(visible, axis=-1, keepdims=True), q, 0.0)
    g = prior_gate(q, gate_scale, gate_bias)
    s = scores(q, k, visible) / float(np.sqrt(D_c))
    for at_query, at_key in zip(query_waves(g, a, b, of_queries), of_keys, strict=True):
        s = s + at_query @ turned(constant(at_key))
    if u is not None:
        s = s + g * u
    alive = mx.ones(s.shape[-2:], mx.bool_) if visible is None else visible
    top = row_maximum(s, alive)
    p, _ = softmax_weights(s - mx.where(top == -INF, 0.0, top), visible)
    return weighted_values(p, v, visible), p


# --- the whole layer -----------------------------------------------------------------------------------------------------------------


def key_prior(positions, w1, b1, w2, b2, gain, bump, recency, prior_scale, absolute_base, training_length, grid, cls):
    """u (hk, m), the part of the log prior that depends on the key alone."""
    F = w1.shape[-1]
    if F < 2 or F % 2:
        raise ValueError(f"w1: expected shape (s, 2 M + 2), got {w1.shape}")
    c = float(number("prior_scale", prior_scale))
    number("absolute_base", absolute_base, above=0)
    N = max(len(positions) - 1, 1) if training_length is None else whole("training_length", training_length, least=1)
    cos, sin = waves(positions, F // 2 - 1, absolute_base, grid, cls, "absolute_base")
    lengths = np.stack([positions / N, np.log1p(positions) / np.log1p(N)], axis=-1)
    f = constant(np.concatenate([cos, sin, lengths], axis=-1))
    u = gain[:, None] * (silu(f @ w1.T + b1) @ w2 + b2) + bump[:, None] * constant(positions == 0)
    if recency is not None:
        u = u + softplus(recency)[:, None] * constant(positions)
    return c * u


def projected(x, w, b):
    """Heads (..., h, n, d) of x (..., n, c)."""
    return x[..., None, :, :] @ turned(w) + b[:, None, :]


@twin
def goat_attention(
    q_input, k_input, v_input, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, a, b, w1=None, b1=None, w2=None, b2=None, gain=None, bump=None,
    recency=None, *, gate_scale=None, gate_bias=None, mask=None, key_mask=None, causal=False, query_offset=None, key_offset=0,
    prior_scale=1.0, position_base=1e4, absolute_base=1e4, training_length=None, grid=None, cls=False, return_weights=False,
):
    """A layer of GOAT attention, from q_input (..., n, c), k_input, v_input (..., m, c) to (..., n, c); parameters as in the reference."""
    h, hk, n, m = len(w_q), len(w_k), q_input.shape[-2], k_input.shape[-2]
    if hk == 0 or h % hk:
        raise ValueError(f"w_k: expected a number of heads that divides the {h} of w_q, got {hk}")
    network = {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "gain": gain, "bump": bump}
    given = [name for name, array in network.items() if array is not None]
    if (given or recency is not None) and len(given) < len(network):
        missing = [name for name in network if name not in given]
        raise ValueError(f"{missing[0]}: expected all of {', '.join(network)} or none, got {', '.join(given) or 'recency'}")
    if key_mask is not None:
        keys = key_mask[..., None, None, :] if key_mask.ndim else key_mask
        mask = keys if mask is None else mx.logical_and(mask, keys)
    if w1 is not None:
        whole("key_offset", key_offset)

    _, j = sequence_positions(n, m, causal, query_offset, key_offset)
    u = None
    if w1 is not None:
        recency = None if causal is False else recency
        u = key_prior(j, w1, b1, w2, b2, gain, bump, recency, prior_scale, absolute_base, training_length, grid, cls)
    q, k, v = projected(q_input, w_q, b_q), projected(k_input, w_k, b_k), projected(v_input, w_v, b_v)
    out, P = attend_heads(
        q, k, v, a, b, u, gate_scale=gate_scale, gate_bias=gate_bias, mask=mask, causal=causal, query_offset=query_offset,
        key_offset=key_offset, position_base=position_base, grid=grid, cls=cls, enable_gqa=True,
    )
    c, _, e = w_o.shape
    out = out.swapaxes(-2, -3)                                         # (..., n, h, d)
    out = out.reshape(*out.shape[:-2], h * e) @ turned(w_o.reshape(c, h * e)) + b_o
    return AttentionResult(out, P) if return_weights else out
