"""Affine-scaled attention: softmax weights scaled and shifted by the query, so that a row's sum is no longer fixed at 1.

    P_ij    = exp(s_ij) / sum_l exp(s_il),  s_ij = scale <q_i, k_j>        j, l over the keys that query i may see
    alpha_i = phi(<w_a, x_i>)                                              one number per head and query
    beta_i  = (alpha_ma - alpha_i) / N                                     N keys
    A_ij    = alpha_i P_ij + beta_i
    o_i     = sum_j A_ij v_j  =  alpha_i (P v)_i + beta_i sum_j v_j

    linear_clipping(x) = 0 for x <= -5,  0.1 x + 0.5 for -5 < x < 5,  1 for x >= 5
    alpha_ma <- rho alpha_ma + (1 - rho) E[alpha]                          after each training step, from alpha_ma = 0

where q (..., h, n, d), k (..., hk, m, d), v (..., hk, m, e), x (..., n, c) the layer's input, w_a (h, c), alpha_ma (h,),
o (..., h, n, e); scale is 1/sqrt(d) unless given; hk = h unless `enable_gqa`.

alpha_i scales how far the weights of query i are from uniform, while alpha_ma, alone, says how much they weigh together. Weights may
be negative: where alpha_i > alpha_ma, beta_i is.

Backward, from the cotangent dO of o, with G_ij = <dO_i, v_j> and D_i = sum_j P_ij G_ij, over visible keys:

    dS = alpha_i P * (G - D),  dq = scale dS k,  dk = scale dS^T q,  dv = A^T dO
    dalpha_i = sum_j G_ij (P_ij - 1/N),  dz = phi'(z) dalpha for z_i = <w_a, x_i>,  dx_i = sum_h dz_hi w_a[h],  dw_a[h] = sum_i dz_hi x_i

Source: Bae et al., "Affine-Scaled Attention: Towards Flexible and Stable Transformer Attention", arXiv:2602.23057, eqs. (6)-(11). No
official code is known.

Conventions. phi is linear_clipping, eq. (11), the better of the two in the paper; phi="sigmoid" is eq. (10). The paper prints no mask
in eq. (6): here beta is added on visible keys only, and N stays the number of all keys (the paper's "key sequence length") unless
n_keys="allowed", which counts those that the query may see. A query that sees nothing gets zeros. alpha_ma is a running state,
frozen at inference, not a learned parameter: no gradient flows into it, and none is returned for it. The paper takes the expectation
over the batch and names no other axis; here it runs over batch and queries, one average per head. The paper's rho is 0.9. phi =
linear_clipping has no derivative at +-5; the backward pass takes 0 there. The paper also gates the result (its section 5.4): multiply it
by the gate of `gated_attention` at G1.

Identities. Without a mask sum_j A_ij = alpha_ma whatever alpha is, as A = alpha (P - 1/N) + alpha_ma / N. Causal with N = m = n, row i
(from 0) sums to alpha_i + (alpha_ma - alpha_i)(i + 1)/m. alpha = alpha_ma gives alpha times softmax attention, alpha = alpha_ma = 1
softmax attention itself, alpha = 0 gives alpha_ma times the mean of the values.

Wrong versions met elsewhere: beta added to masked keys too, which lets every query see the future; alpha_ma updated before beta is
formed, or started at 0.5 instead of 0; rho = 0.95; alpha computed from q instead of the layer's input x.
"""

from typing import NamedTuple

import numpy as np

from attnspec.reference.activations import sigmoid
from attnspec.reference.formula import formula
from attnspec.reference.inputs import (
    AttentionResult,
    default_scale,
    grouped_heads,
    number,
    one_of,
    sum_groups,
    sum_to_shape,
    visible_keys,
)
from attnspec.reference.softmax.weights import attention_weights, weighted_values

ACTIVATIONS = ("linear_clipping", "sigmoid")
N_KEYS = ("total", "allowed")
SHAPES = {
    "q": "... h n d", "k": "... hk m d", "v": "... hk m e", "x": "... n c", "w_a": "h c", "alpha_ma": "h", "mask": "bool ... #h #n #m",
}
KINKS = "<w_a, x_i> = -5 or 5 with phi = linear_clipping"


@formula(
    family="affine",
    shapes={"x": "...", "out": "..."},
    equation="out = 0 for x <= -5, 0.1 x + 0.5 for -5 < x < 5, 1 for x >= 5",
    latex=r"\phi(x)=\min(1,\max(0,\,0.1\,x+0.5))",
    source="arXiv:2602.23057, eq. (11)",
    status="verified-paper",
    kinks="x = -5 or 5",
    draw=lambda sizes, rng: {"x": rng.uniform(-8, 8, [sizes[dim] for dim in ("b", "h") if dim in sizes] + [32])},
)
def linear_clipping(x):
    """A straight line from 0 at -5 to 1 at 5, constant beyond; x of any shape.

    Raises TypeError where x is no array of numbers.

    >>> linear_clipping([-6.0, 0.0, 1.0, 5.0])
    array([0. , 0.5, 0.6, 1. ])
    """
    return np.where(x.real <= -5, 0.0, np.where(x.real >= 5, 1.0, 0.1 * x + 0.5))


@formula(
    family="affine",
    shapes={"x": "... n c", "w_a": "h c", "out": "... h n"},
    equation="alpha_hi = phi(<w_a[h], x_i>)",
    latex=r"\alpha_{hi}=\phi(\langle w_{a,h},x_i\rangle)",
    source="arXiv:2602.23057, eq. (7)",
    status="verified-paper",
    kinks=KINKS,
    sizes={"c": 6, "h": 4},
)
def affine_alpha(x, w_a, *, phi="linear_clipping"):
    """The factor alpha (..., h, n) of every head and query, from the layer's input x (..., n, c) and w_a (h, c).

    phi: "linear_clipping" or "sigmoid".
    Raises ValueError where shapes do not match or phi is neither, naming the argument.

    >>> affine_alpha([[1.0, 1.0], [3.0, 5.0]], [[1.0, -2.0], [0.0, 1.0]])
    array([[0.4, 0. ],
           [0.6, 1. ]])
    """
    one_of("phi", phi, ACTIVATIONS)
    z = alpha_logits(x, w_a)
    return sigmoid(z) if phi == "sigmoid" else linear_clipping(z)


def alpha_logits(x, w_a):
    """<w_a[h], x_i>, (..., h, n)."""
    return w_a @ np.swapaxes(x, -1, -2)


@formula(
    family="affine",
    shapes={"alpha_ma": "h", "alpha": "... h n", "out": "h"},
    equation="out = rho alpha_ma + (1 - rho) E[alpha]",
    latex=r"\alpha_{ma,t}=\rho\,\alpha_{ma,t-1}+(1-\rho)\,\mathbb E[\alpha_t(X)]",
    source="arXiv:2602.23057, eq. (9)",
    status="verified-paper",
    draw=lambda sizes, rng: {
        "alpha_ma": rng.random(sizes["h"]),
        "alpha": rng.random(((sizes["b"],) if "b" in sizes else ()) + (sizes["h"], sizes["n"])),
    },
)
def affine_moving_average(alpha_ma, alpha, *, rho=0.9):
    """The next alpha_ma (h,), from the present one and this step's alpha (..., h, n); training only.

    rho: share of the old value, between 0 and 1. The mean runs over all axes of alpha but the heads; over none it changes nothing.
    Raises ValueError where shapes do not match or rho is out of range, naming the argument.

    >>> affine_moving_average([0.0, 0.5], [[0.2, 0.4], [0.5, 0.5]])
    array([0.03, 0.5 ])
    """
    if number("rho", rho, least=0).real > 1:
        raise ValueError(f"rho: expected a number <= 1, got {rho!r}")
    if alpha.size == 0:
        return alpha_ma.copy()
    others = tuple(axis for axis in range(alpha.ndim) if axis != alpha.ndim - 2)
    return rho * alpha_ma + (1 - rho) * alpha.mean(axis=others)


def scaled_and_shifted(P, visible, alpha, alpha_ma, n_keys):
    """A (..., h, n, m) = alpha P + (alpha_ma - alpha)/N on visible keys, 0 elsewhere; and N, which broadcasts to (..., h, n, 1)."""
    one_of("n_keys", n_keys, N_KEYS)
    N = visible.sum(axis=-1, keepdims=True) if n_keys == "allowed" else P.shape[-1]
    N = np.maximum(N, 1)                                               # no keys: there is nothing to divide among them
    alpha, alpha_ma = alpha[..., None], alpha_ma[:, None, None]
    return np.where(visible, alpha * P + (alpha_ma - alpha) / N, 0.0), N


def draw_layer(sizes, rng, names=("q", "k", "v", "x", "w_a", "alpha_ma")):
    """Standard normal arrays, with an alpha_ma that a moving average of alphas can have."""
    lead = (sizes["b"],) if "b" in sizes else ()
    shapes = {name: SHAPES.get(name, "... h n e").split() for name in names}
    arrays = {
        name: rng.standard_normal(lead * (dims[0] == "...") + tuple(sizes[dim] for dim in dims if dim != "..."))
        for name, dims in shapes.items()
    }
    return {**arrays, "alpha_ma": rng.uniform(0.2, 0.8, sizes["h"])}


@formula(
    family="affine",
    shapes={**SHAPES, "out": "... h n e"},
    equation="out = (alpha P + (alpha_ma - alpha)/N) v,  P = softmax(scale q k^T),  alpha = phi(x w_a^T)",
    latex=r"o_i=\sum_j\Big(\alpha_i P_{ij}+\frac{\alpha_{ma}-\alpha_i}{N}\Big)v_j,\quad P=\operatorname{softmax}(\mathrm{scale}\,qk^\top)",
    source="arXiv:2602.23057, eqs. (6)-(8)",
    status="verified-paper",
    bound="affine",
    kinks=KINKS,
    sizes={"c": 6, "h": 4, "hk": "h"},
    workspace="... h n m",
    draw=draw_layer,
)
def affine_scaled_attention(
    q, k, v, x, w_a, alpha_ma, *, scale=None, phi="linear_clipping", n_keys="total", mask=None, causal=False, enable_gqa=False,
    return_weights=False,
):
    """Affine-scaled attention of q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e); returns (..., h, n, e).

    x: (..., n, c) the input of the layer, one row per query, shared by the heads.  w_a: (h, c) makes alpha of it.
    alpha_ma: (h,) the moving average of alpha (`affine_moving_average`).
    scale: multiplies the logits, default 1/sqrt(d).  phi: "linear_clipping" or "sigmoid".
    n_keys: N is "total", the number of keys, or "allowed", the number of keys that the query may see.
    mask: bool, broadcastable to (..., h, n, m), True = may attend.  causal: False, "bottom-right" (or True) or "top-left".
    enable_gqa: key heads may be fewer than query heads and are shared by neighbouring ones.  return_weights: also return A.
    Raises ValueError where shapes do not match, heads differ without enable_gqa, or an option is unknown, naming the argument.

    >>> affine_scaled_attention([[[0.0]]], [[[1.0], [2.0]]], [[[1.0], [3.0]]], [[2.0]], [[1.0]], [0.5])    # alpha 0.7, P uniform
    array([[[1.]]])
    """
    visible = visible_keys(q.shape[-2], k.shape[-2], mask, causal)
    P = attention_weights(q, k, scale=scale, mask=mask, causal=causal, enable_gqa=enable_gqa)
    alpha = affine_alpha(x, w_a, phi=phi)
    A, _ = scaled_and_shifted(P, visible, alpha, alpha_ma, n_keys)
    if enable_gqa:
        (v,) = grouped_heads(q, v)
    out = weighted_values(A, v, visible)
    return AttentionResult(out, A) if return_weights else out


class AffineGradients(NamedTuple):
    """Cotangents of the arrays of `affine_scaled_attention`; alpha_ma is a running state and has none."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dx: np.ndarray
    dw_a: np.ndarray


@formula(
    family="affine",
    shapes={**SHAPES, "do": "... h n e", "dq": "... h n d", "dk": "... hk m d", "dv": "... hk m e", "dx": "... n c", "dw_a": "h c"},
    equation="dS = alpha P * (dO v^T - <dO, P v>),  dalpha = <dO, P v - sum v / N>,  dz = phi' dalpha,  dx = dz^T w_a,  dw_a = dz x",
    latex=r"dS=\alpha\,P\circ(G-\textstyle\sum_j P G),\quad d\alpha_i=\sum_j G_{ij}(P_{ij}-\tfrac1N),\quad G=dO\,v^\top",
    source="arXiv:2602.23057, eqs. (6)-(8), differentiated",
    status="derived",
    bound="affine gradients",
    kinks=KINKS,
    sizes={"c": 6, "h": 4, "hk": "h"},
    workspace="... h n m",
    draw=lambda sizes, rng: draw_layer(sizes, rng, ("q", "k", "v", "x", "w_a", "alpha_ma", "do")),
)
def affine_scaled_attention_backward(
    q, k, v, x, w_a, alpha_ma, do, *, scale=None, phi="linear_clipping", n_keys="total", mask=None, causal=False, enable_gqa=False,
):
    """Reverse-mode gradients of `affine_scaled_attention` for the cotangent do (..., h, n, e) of its output.

    The other parameters are those of the forward function. Returns AffineGradients (dq, dk, dv, dx, dw_a) with the shapes of the arrays
    they belong to; alpha_ma is held fixed, as the method does.
    Raises ValueError as the forward function does.

    >>> arrays = [[[0.0]]], [[[1.0], [2.0]]], [[[1.0], [3.0]]], [[2.0]], [[1.0]], [0.5]
    >>> affine_scaled_attention_backward(*arrays, [[[1.0]]]).dv         # the weights 0.7/2 + (0.5 - 0.7)/2
    array([[[0.25],
            [0.25]]])
    """
    k_shared, v_shared = grouped_heads(q, k, v) if enable_gqa else (k, v)
    P = attention_weights(q, k_shared, scale=scale, mask=mask, causal=causal)
    visible = visible_keys(q.shape[-2], k.shape[-2], mask, causal)
    alpha = affine_alpha(x, w_a, phi=phi)
    A, N = scaled_and_shifted(P, visible, alpha, alpha_ma, n_keys)
    visible = np.broadcast_to(visible, A.shape)
    flipped = np.swapaxes(visible, -1, -2)

    do = np.broadcast_to(do, np.broadcast_shapes(do.shape, (*v_shared.shape[:-2], 1, 1)))        # one for each head of the output
    G = np.where(visible, do @ np.swapaxes(v_shared, -1, -2), 0.0)
    D = np.sum(P * G, axis=-1, keepdims=True)
    dS = np.where(visible, alpha[..., None] * P * (G - D), 0.0)
    dalpha = np.sum(G * (P - 1 / N), axis=-1)
    scale = default_scale(scale, q)
    dq = scale * weighted_values(dS, k_shared, visible)
    dk = scale * weighted_values(np.swapaxes(dS, -1, -2), q, flipped)
    dv = weighted_values(np.swapaxes(A, -1, -2), do, flipped)
    if enable_gqa:
        dk, dv = sum_groups(dk, k.shape[-3]), sum_groups(dv, v.shape[-3])

    z = alpha_logits(x, w_a)
    slope = alpha * (1 - alpha) if phi == "sigmoid" else np.where((z.real > -5) & (z.real < 5), 0.1, 0.0)
    sees = visible.any(axis=-1)                                        # a query that sees nothing: whatever its x is, it never arrives
    dz = np.where(sees, dalpha * slope, 0.0)
    dx = np.swapaxes(dz, -1, -2) @ w_a
    dw_a = weighted_values(dz, x, sees)
    return AffineGradients(sum_to_shape(dq, q.shape), sum_to_shape(dk, k.shape), sum_to_shape(dv, v.shape), sum_to_shape(dx, x.shape),
                           sum_to_shape(dw_a, w_a.shape))
