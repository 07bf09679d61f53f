"""Twins of reference/transport/goat.py: the prior becomes features of queries and keys, which softmax tiles then multiply like any other.

Positions, waves, gates and the keys' own prior are computed in float64 and rounded once. A key whose prior is -inf is masked.
"""

import numpy as np

from attnspec.numba_kernels.arrays import without_axes
from attnspec.numba_kernels.softmax.tiles import FAR, flattened, forward, weights_axes
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import CAUSAL, MOST, AttentionResult, number, one_of, whole
from attnspec.reference.transport.goat import AugmentedHeads


def softplus(x):
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1 + e)


def positions(n, m, causal, query_offset, key_offset):
    """Where queries and keys begin."""
    one_of("causal", causal, CAUSAL)
    key_offset = whole("key_offset", key_offset, least=-MOST)
    if query_offset is None:
        return key_offset + (m - n if causal in (True, "bottom-right") else 0), key_offset
    return whole("query_offset", query_offset, least=-MOST), key_offset


def waves(start, count, w, grid, cls):
    """cos and sin (count, R) of the phases w_r j; zeros for a class token, which has no place on a grid."""
    j = start + np.arange(count)
    if grid is None:
        if cls:
            raise ValueError("cls: expected a grid with the class token, got grid=None")
        phase, placed = j[:, None] * w, np.ones((count, 1))
    else:
        try:
            height, width = grid
        except (TypeError, ValueError):
            raise ValueError(f"grid: expected a pair (height, width), got {grid!r}") from None
        height, width = whole("grid", height, least=1), whole("grid", width, least=1)
        patch = j - cls
        if np.any((j < 0) | (patch >= height * width)):
            raise ValueError(
                f"grid: expected positions 0..{height * width + cls - 1} on {height} x {width} patches, got {j.min()}..{j.max()}")
        y, x = np.divmod(patch, width)
        half = len(w) - len(w) // 2
        phase = np.concatenate([y[:, None] * w[:half], x[:, None] * w[half:]], axis=-1)
        placed = (patch >= 0)[:, None] * 1.0
    return placed * np.cos(phase), placed * np.sin(phase)


def frequencies(count, base):
    """w_r from 1 down to 1/base."""
    return base ** (-np.arange(count) / max(count - 1, 1))


def sizes_of(x):
    """|x| along the last axis in float64; no square overflows or vanishes."""
    x = x.astype(np.float64)
    top = np.max(np.abs(x), axis=-1, keepdims=True, initial=0.0)
    unit = np.where((top == 0) | (top == np.inf), 1.0, top)
    x /= unit
    return np.where(top == np.inf, np.inf, unit * np.sqrt(np.einsum("...c,...c->...", x, x))[..., None])


def augmented(q, k, a, b, u, gate_scale, gate_bias, starts, position_base, grid, cls):
    """(q~, k~) whose plain products are the logits; what q and k give in their own dtype, the features in float64 and then rounded."""
    (n, d), m, R = q.shape[-2:], k.shape[-2], a.shape[-1]
    w = frequencies(R, float(number("position_base", position_base, above=0)))
    (cos_i, sin_i), (cos_j, sin_j) = (waves(start, count, w, grid, cls) for start, count in zip(starts, (n, m), strict=True))
    taken = 2 * R + (u is not None)
    if taken >= d:
        raise ValueError(f"a: expected fewer than {d} positional coordinates in heads of width {d}, got {taken} for {a.shape}")
    if (gate_scale is None) != (gate_bias is None):
        raise ValueError("gate_scale: expected together with gate_bias, got one of the two")
    content = d - taken
    A, B = (np.repeat(x.astype(np.float64), q.shape[-3] // max(k.shape[-3], 1), axis=0)[:, None, :] for x in (a, b))
    g = 1.0
    if gate_scale is not None:
        rate, bias = (x.astype(np.float64)[:, None, None] for x in (softplus(gate_scale.astype(np.float64)), gate_bias))
        g = sigmoid(bias - rate * sizes_of(q[..., :content]))
    even, odd = slice(content, content + R), slice(content + R, content + 2 * R)
    queries, keys = np.empty(q.shape, q.dtype), np.empty(k.shape, k.dtype)
    np.divide(q[..., :content], q.dtype.type(np.sqrt(content)), out=queries[..., :content])
    queries[..., even], queries[..., odd] = g * (A * cos_i + B * sin_i), g * (A * sin_i - B * cos_i)
    keys[..., :content], keys[..., even], keys[..., odd] = k[..., :content], cos_j, sin_j
    if u is not None:
        queries[..., -1:], keys[..., -1] = g, u
    return queries, keys


@twin
def goat_augmented_qk(
    q, k, a, b, u=None, *, gate_scale=None, gate_bias=None, causal=False, query_offset=None, key_offset=0, position_base=1e4, grid=None,
    cls=False, enable_gqa=False,
):
    """AugmentedHeads whose plain dot product is GOAT's logit; the parameters are those of the reference."""
    starts = positions(q.shape[-2], k.shape[-2], causal, query_offset, key_offset)
    return AugmentedHeads(*augmented(q, k, a, b, u, gate_scale, gate_bias, starts, position_base, grid, cls))


@twin
def goat_head_attention(
    q, k, v, a, b, u=None, *, gate_scale=None, gate_bias=None, mask=None, causal=False, query_offset=None, key_offset=0,
    position_base=1e4, grid=None, cls=False, enable_gqa=False, return_weights=False,
):
    """GOAT attention of projected heads q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e); parameters as in the reference."""
    starts = positions(q.shape[-2], k.shape[-2], causal, query_offset, key_offset)
    out, weights = heads_attention(q, k, v, a, b, u, gate_scale, gate_bias, mask, causal, starts, position_base, grid, cls, return_weights)
    return AttentionResult(out, weights) if return_weights else out


def heads_attention(q, k, v, a, b, u, gate_scale, gate_bias, mask, causal, starts, position_base, grid, cls, return_weights):
    """(out, weights) of the heads, the keys shared by groups of query heads; weights only where they are asked for."""
    if u is not None and np.isneginf(u).any():
        impossible = np.repeat(np.isneginf(u), q.shape[-3] // max(k.shape[-3], 1), axis=0)[:, None, :]
        mask = ~impossible if mask is None else mask & ~impossible
        u = np.where(np.isneginf(u), 0.0, u)
    queries, keys = augmented(q, k, a, b, u, gate_scale, gate_bias, starts, position_base, grid, cls)
    call = flattened(queries, keys, v, scale=1.0, mask=mask, enable_gqa=True)
    call = call._replace(high=FAR if causal is False else starts[0] - starts[1])
    out, weights, _, _ = forward(call, return_weights=return_weights)
    _, n, m, _, e = call.sizes
    if return_weights:
        weights = without_axes(weights.reshape(*call.lead, n, m), weights_axes(q, k, mask=mask, enable_gqa=True))
    return out.reshape(*call.lead, n, e), weights


def key_prior(m, start, w1, b1, w2, b2, gain, bump, recency, prior_scale, absolute_base, training_length, grid, cls):
    """The keys' own log prior u (hk, m) in float64."""
    j = start + np.arange(m)
    if np.any(j < 0):
        raise ValueError(f"key_positions: expected whole numbers >= 0, got {j.min()}")
    F = w1.shape[-1]
    if F < 2 or F % 2:
        raise ValueError(f"w1: expected shape (s, 2 M + 2), got {w1.shape}")
    c, base = float(number("prior_scale", prior_scale)), float(number("absolute_base", absolute_base, above=0))
    N = max(m - 1, 1) if training_length is None else whole("training_length", training_length, least=1)
    cos, sin = waves(start, m, frequencies(F // 2 - 1, base), grid, cls)
    f = np.concatenate([cos, sin, np.stack([j / N, np.log1p(j) / np.log1p(N)], axis=-1)], axis=-1)
    w1, b1, w2, b2, gain, bump = (x.astype(np.float64) for x in (w1, b1, w2, b2, gain, bump))
    hidden = f @ w1.T + b1
    u = gain[:, None] * ((hidden * sigmoid(hidden)) @ w2 + b2) + bump[:, None] * (j == 0)
    return c * (u if recency is None else u + softplus(recency.astype(np.float64))[:, None] * j)


@twin
def goat_attention(
    q_input, k_input, v_input, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, a, b, w1=None, b1=None, w2=None, b2=None, gain=None, bump=None,
    recency=None, *, gate_scale=None, gate_bias=None, mask=None, key_mask=None, causal=False, query_offset=None, key_offset=0,
    prior_scale=1.0, position_base=1e4, absolute_base=1e4, training_length=None, grid=None, cls=False, return_weights=False,
):
    """A layer of GOAT attention, q_input (..., n, c), k_input, v_input (..., m, c) to (..., n, c); parameters as in the reference."""
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
        mask = keys if mask is None else mask & keys
    if w1 is not None:
        whole("key_offset", key_offset)
    starts = positions(n, m, causal, query_offset, key_offset)
    u = None
    if w1 is not None:
        u = key_prior(m, starts[1], w1, b1, w2, b2, gain, bump, None if causal is False else recency, prior_scale, absolute_base,
                      training_length, grid, cls)
    q, k, v = (projected(x, w, bias) for x, w, bias in ((q_input, w_q, b_q), (k_input, w_k, b_k), (v_input, w_v, b_v)))
    out, weights = heads_attention(q, k, v, a, b, u, gate_scale, gate_bias, mask, causal, starts, position_base, grid, cls, return_weights)
    c, _, d = w_o.shape
    rows = np.ascontiguousarray(np.moveaxis(out, -3, -2)).reshape(*out.shape[:-3], n, h * d)
    out = rows @ w_o.reshape(c, h * d).T + b_o
    return AttentionResult(out, weights) if return_weights else out


def projected(x, w, bias):
    """Heads (..., h, n, d) of x (..., n, c)."""
    h, d, c = w.shape
    rows = (x @ w.reshape(h * d, c).T + bias.reshape(h * d)).reshape(*x.shape[:-1], h, d)
    return np.ascontiguousarray(np.moveaxis(rows, -2, -3))
