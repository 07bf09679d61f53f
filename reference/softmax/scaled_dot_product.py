"""Scaled dot-product attention: every query takes the average of the values, weighted by a softmax over its products with the keys.

    s_ij = bias_ij + cap(scale <q_i, k_j>),  -inf where i may not see j          cap(x) = c tanh(x / c), where a softcap c is given
    P_ij = exp(s_ij) / (exp(z_h) + sum_l exp(s_il))                              exp(z_h) only where a sink z is given
    o_i  = sum_j P_ij v_j

where q (..., h, n, d), k (..., hk, m, d), v (..., hk, m, e), o (..., h, n, e); scale is 1/sqrt(d) unless given. The head axis may be
absent; hk = h unless `enable_gqa`.

Backward, from the cotangent dO of o:

    D_i = <dO_i, o_i>,  dP = dO v^T,  dS = P * (dP - D),  dv = P^T dO,  dq = scale dS k,  dk = scale dS^T q
    dbias = dS,  dz_h = -sum_i p_i D_i with p_i the weight of the sink;  under a softcap dq and dk take dS * (1 - (cap(x)/c)^2)

Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, eq. (1); grouped heads: Ainslie et al., arXiv:2305.13245; order
of softcap, bias and mask, and windows: ONNX operator Attention, opsets 24 and 25.

Conventions. Order: scale, softcap, bias, mask. causal "bottom-right" (or True) lets query i see keys j <= i + m - n, as MLX and
FlashAttention do; "top-left" j <= i, as PyTorch's is_causal, JAX and ONNX do; they agree where n = m. A window is inclusive on both sides
and lies around p = i + m - n where causal is bottom-right, else around p = i (ONNX, JAX). A query that sees nothing gets zeros.
Query head h shares key head h // (h/hk): neighbours share, heads are not tiled.

Identities. Rows of P sum to 1. Adding a constant to a row of logits changes nothing. Permuting keys and values together changes nothing.
scale = 0 gives the mean of the visible values; one key gives its value; a softcap that grows gives the uncapped result.

Wrong versions met elsewhere: scale 1/d, or 1/sqrt of the model's width instead of the head's; the two causal alignments mixed up for
n != m; True meaning masked; capping after the mask; heads tiled (0, 1, 0, 1) instead of grouped (0, 0, 1, 1); a fully masked row giving NaN
(PyTorch before 2.5) or the mean of all values (JAX, MLX).
"""

from typing import NamedTuple

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, default_scale, grouped_heads, sum_groups, sum_to_shape, visible_keys
from attnspec.reference.softmax.weights import attention_logits, softmax_weights, weighted_values

SHAPES = {"q": "... n d", "k": "... m d", "v": "... m e", "bias": "... #n #m", "mask": "bool ... #n #m", "sink": "#h"}


@formula(
    family="softmax",
    shapes={**SHAPES, "out": "... n e"},
    equation="out = softmax(scale q k^T + bias) v",
    latex=r"o_i=\sum_j\frac{e^{s_{ij}}}{\sum_l e^{s_{il}}}\,v_j,\quad s_{ij}=\mathrm{scale}\,\langle q_i,k_j\rangle+\mathrm{bias}_{ij}",
    source="arXiv:1706.03762, eq. (1)",
    bound="softmax",
    grouped=("k", "v"),
    workspace="... n m",
)
def scaled_dot_product_attention(
    q, k, v, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False,
    return_weights=False, return_lse=False,
):
    """Softmax attention of q (..., n, d) over k (..., m, d), v (..., m, e); returns (..., n, e).

    scale: multiplies the logits, default 1/sqrt(d).  softcap: c > 0 bounds them by c tanh(x/c); None or 0 leaves them.
    bias: added to the logits, broadcastable to (..., n, m).  mask: bool, broadcastable likewise, True = may attend.
    causal: False, "bottom-right" (or True) or "top-left".  window: (left, right) keys around the query's own position, None or -1 for
    no limit.  sink: (h,) one more logit per head, neither scaled nor capped nor masked, without a value.
    enable_gqa: key heads may be fewer than query heads and are shared by neighbouring ones.
    return_weights, return_lse: return an AttentionResult with weights (..., n, m), lse (..., n) = log of the normaliser.
    Raises ValueError where shapes do not match, heads differ without enable_gqa, or an option is out of range, naming the argument.

    >>> scaled_dot_product_attention([[1.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]], [[2.0], [4.0]])
    array([[3.]])
    """
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    s = attention_logits(q, k, scale, softcap, bias)
    visible = visible_keys(q.shape[-2], k.shape[-2], mask, causal, window)
    P, L = softmax_weights(s, visible, sink)
    out = weighted_values(P, v, visible)
    if not (return_weights or return_lse):
        return out
    return AttentionResult(out, P if return_weights else None, L if return_lse else None)


class AttentionGradients(NamedTuple):
    """Cotangents of the arrays of an attention function; None for arrays that were not given."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None = None
    dsink: np.ndarray | None = None


@formula(
    family="softmax",
    shapes={**SHAPES, "do": "... n e", "dq": "... n d", "dk": "... m d", "dv": "... m e"},
    equation="dS = P * (dO v^T - <dO, o>),  dv = P^T dO,  dq = scale dS k,  dk = scale dS^T q",
    latex=r"dS=P\circ(dO\,v^\top-\langle dO,o\rangle),\quad dv=P^\top dO,\quad dq=\mathrm{scale}\,dS\,k,\quad dk=\mathrm{scale}\,dS^\top q",
    source="arXiv:1706.03762, eq. (1), differentiated",
    status="derived",
    bound="softmax gradients",
    grouped=("k", "v"),
    workspace="... n m",
)
def scaled_dot_product_attention_backward(
    q, k, v, do, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False,
):
    """Reverse-mode gradients of `scaled_dot_product_attention` for the cotangent do (..., n, e) of its output.

    The other parameters are those of the forward function. Returns AttentionGradients (dq, dk, dv, dbias, dsink) with the shapes of the
    arrays they belong to; dbias and dsink are None where no bias or sink was given.
    Raises ValueError as the forward function does.

    >>> scaled_dot_product_attention_backward([[1.0]], [[0.0], [0.0]], [[1.0], [3.0]], [[1.0]]).dk      # half of v less its mean
    array([[-0.5],
           [ 0.5]])
    """
    k_shared, v_shared = grouped_heads(q, k, v) if enable_gqa else (k, v)
    s = attention_logits(q, k_shared, scale, softcap)
    visible = np.broadcast_to(visible_keys(s.shape[-2], s.shape[-1], mask, causal, window), s.shape if mask is None else
                              np.broadcast_shapes(s.shape, mask.shape))
    P, L = softmax_weights(s if bias is None else s + bias, visible, sink)
    out = weighted_values(P, v_shared, visible)
    do = np.broadcast_to(do, np.broadcast_shapes(do.shape, out.shape))
    D = np.where(np.any(visible, axis=-1, keepdims=True), np.sum(do * out, axis=-1, keepdims=True), 0.0)
    dP = do @ np.swapaxes(v_shared, -1, -2)
    dS = np.where(visible & (P != 0), P * (dP - D), 0.0)
    dX = dS * np.where(visible, 1 - (s / softcap) ** 2, 0.0) if softcap else dS      # of the logits before the softcap
    scale = default_scale(scale, q)
    dq = scale * weighted_values(dX, k_shared, visible)
    dk = scale * weighted_values(np.swapaxes(dX, -1, -2), q, np.swapaxes(visible, -1, -2))
    dv = weighted_values(np.swapaxes(P, -1, -2), do, np.swapaxes(visible, -1, -2))
    if enable_gqa:
        dk, dv = sum_groups(dk, k.shape[-3]), sum_groups(dv, v.shape[-3])

    dbias = None if bias is None else sum_to_shape(dS, bias.shape)
    dsink = None
    if sink is not None:
        p_sink = np.exp(sink[..., None] - np.where(L.real == -np.inf, 0.0, L))    # L = -inf only where the sink is at -inf too
        dsink = sum_to_shape(-np.sum(p_sink * D[..., 0], axis=-1), sink.shape)
    return AttentionGradients(sum_to_shape(dq, q.shape), sum_to_shape(dk, k.shape), sum_to_shape(dv, v.shape), dbias, dsink)
