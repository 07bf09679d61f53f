"""Cog attention: a softmax over |logits| that keeps the logits' signs, so that weights may be negative.

    p_ij = scale * <q_i, k_j>
    A_ij = sign(p_ij) * exp|p_ij| / sum_l exp|p_il|          l over the keys that query i may see
    o_i  = sum_j A_ij v_j

where q (..., n, d), k (..., m, d), v (..., m, e), o (..., n, e); scale is 1/sqrt(d) unless given.

A head can copy a token (A near 1), delete it (near -1) or leave it alone (near 0); with softmax the last two are the same.

Backward, from the cotangent dO of o, with P = |A| and g = sign(p):

    dP = g * (dO v^T),  D_i = <dO_i, o_i>,  dp = g * P * (dP - D),  dq = scale dp k,  dk = scale dp^T q,  dv = A^T dO

Source: Lv et al., "More Expressive Attention with Negative Weights", arXiv:2411.07176, section 2, eqs. (1) and (3), and the authors' code.

Conventions. sign(0) = 0, yet a logit of zero still counts exp(0) = 1 in the normaliser (official code). A query that may see
no key gets zeros (the official code gives NaN). The derivative does not exist where p_ij = 0.
normaliser="nonzero" is the authors' analysis code (Easy-Transformer): keys are masked by p = 0, zeros do not count in the normaliser,
to which 1e-6 exp(max|p|) is added, so that sum_j |A_ij| falls short of 1 by about 1e-6.
In the authors' models only the middle layers are of this kind: the first and the last use ordinary softmax, chosen block by block.

Identities. sum_j |A_ij| = 1 where no logit is 0. Where all p > 0 it is softmax attention. -q_i in place of q_i flips the sign of row i.
scale = 0 gives A = 0. Adding a constant to all logits does change the weights, unlike with softmax.

Wrong versions met elsewhere: masking by p = 0, which leaves exp(0) of every masked key in the normaliser; sign(p) * softmax(p),
which weighs a strongly negative logit by almost nothing; subtracting max(p) instead of max|p|, which overflows for p << 0.
"""

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, default_scale, grouped_heads, one_of, sum_groups, sum_to_shape, visible_keys
from attnspec.reference.softmax.scaled_dot_product import AttentionGradients
from attnspec.reference.softmax.weights import attention_logits, weighted_values

NORMALISERS = ("visible", "nonzero")
FACTS = {
    "source": "arXiv:2411.07176, section 2, eq. (3)",
    "latex": r"A_{ij}=\operatorname{sign}(p_{ij})\,\frac{e^{|p_{ij}|}}{\sum_{l}e^{|p_{il}|}},\quad o_i=\sum_j A_{ij}v_j",
    "kinks": "p_ij = 0",
    "workspace": "... n m",
}


@formula(
    family="signed",
    shapes={"p": "... n m", "mask": "bool ... #n #m", "weights": "... n m"},
    equation="A_ij = sign(p_ij) exp|p_ij| / sum_l exp|p_il|",
    bound="signed weights",
    **FACTS,
)
def cog_weights(p, mask=None, *, normaliser="visible"):
    """Signed weights A (..., n, m) of logits p (..., n, m).

    mask: bool, broadcastable to p, True = may attend.
    normaliser: "visible" sums exp|p| over all visible keys (the paper and its main code); "nonzero" only over those with p != 0,
    plus 1e-6 of the largest (the authors' analysis code).
    Raises ValueError where shapes do not match, naming the argument.

    >>> cog_weights([[np.log(3.0), 0.0, -np.log(2.0)]]).round(3)
    array([[ 0.5  ,  0.   , -0.333]])
    """
    one_of("normaliser", normaliser, NORMALISERS)
    visible = True if mask is None else mask
    sign = np.sign(p.real)
    size = np.where(visible, p * sign, -np.inf)                        # |p|, complex-step safe
    top = np.max(size.real, axis=-1, keepdims=True, initial=0.0)       # |p| >= 0: also right for a query that sees nothing
    e = np.exp(size - top)
    if normaliser == "nonzero":
        total = np.sum(np.where(sign == 0, 0.0, e), axis=-1, keepdims=True) + 1e-6
    else:
        total = np.sum(e, axis=-1, keepdims=True)
    return np.where(visible, sign * e / np.where(total == 0, 1.0, total), 0.0)    # 0 behind the mask also where the row is NaN


@formula(
    family="signed",
    shapes={"q": "... n d", "k": "... m d", "v": "... m e", "mask": "bool ... #n #m", "out": "... n e"},
    equation="A_ij = sign(p_ij) exp|p_ij| / sum_l exp|p_il|,  p = scale q k^T,  out = A v",
    bound="signed softmax",
    grouped=("k", "v"),
    **FACTS,
)
def cog_attention(
    q, k, v, *, scale=None, mask=None, causal=False, normaliser="visible", enable_gqa=False, return_weights=False,
):
    """Cog attention of q (..., n, d) over k (..., m, d), v (..., m, e); returns (..., n, e).

    scale: multiplies the logits, default 1/sqrt(d).  mask: bool (..., n, m), True = may attend.
    causal: False, "bottom-right" (or True) or "top-left".  normaliser: as in `cog_weights`.
    enable_gqa: key heads may be fewer than query heads and are shared by neighbouring ones.  return_weights: also return A.
    Raises ValueError where shapes do not match, naming the argument.

    >>> cog_attention([[1.0]], [[2.0], [-2.0]], [[5.0], [3.0]])       # copies the first value, deletes the second
    array([[1.]])
    """
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    p = attention_logits(q, k, scale)
    visible = visible_keys(q.shape[-2], k.shape[-2], mask, causal)
    A = cog_weights(p, visible, normaliser=normaliser)
    out = weighted_values(A, v, visible)
    return AttentionResult(out, A) if return_weights else out


@formula(
    family="signed",
    shapes={"q": "... n d", "k": "... m d", "v": "... m e", "do": "... n e", "mask": "bool ... #n #m",
            "dq": "... n d", "dk": "... m d", "dv": "... m e"},
    equation="dp = sign(p) |A| * (sign(p) dO v^T - <dO, o>),  dq = scale dp k,  dk = scale dp^T q,  dv = A^T dO",
    status="derived",
    bound="signed softmax gradients",
    grouped=("k", "v"),
    **{**FACTS, "latex": r"dp=|A|\circ(dO\,v^\top-\operatorname{sign}(p)\langle dO,o\rangle),\quad dv=A^\top dO"},
)
def cog_attention_backward(q, k, v, do, *, scale=None, mask=None, causal=False, enable_gqa=False):
    """Reverse-mode gradients (dq, dk, dv) of `cog_attention` for the cotangent do (..., n, e); the normaliser is "visible".

    The parameters are those of the forward function. Signs are held fixed: where p_ij = 0 the function jumps and no derivative exists.
    Raises ValueError as the forward function does.

    >>> cog_attention_backward([[1.0]], [[2.0], [-2.0]], [[5.0], [3.0]], [[1.0]]).dv        # the weights: one copied, one deleted
    array([[ 0.5],
           [-0.5]])
    """
    k_shared, v_shared = grouped_heads(q, k, v) if enable_gqa else (k, v)
    p = attention_logits(q, k_shared, scale)
    visible = visible_keys(p.shape[-2], p.shape[-1], mask, causal)
    A = cog_weights(p, visible)
    out = weighted_values(A, v_shared, visible)
    do = np.broadcast_to(do, np.broadcast_shapes(do.shape, out.shape))

    g = np.sign(p.real)
    P = g * A
    visible = np.broadcast_to(visible, A.shape)
    D = np.sum(do * out, axis=-1, keepdims=True)
    dP = g * (do @ np.swapaxes(v_shared, -1, -2))
    # A logit of 0 has weight 0 but counts 1 in the normaliser; g = 0 drops it, as sign(p) has no derivative there.
    dp = np.where(visible & (P != 0), g * P * (dP - D), 0.0)
    scale = default_scale(scale, q)
    dq = scale * weighted_values(dp, k_shared, visible)
    dk = scale * weighted_values(np.swapaxes(dp, -1, -2), q, np.swapaxes(visible, -1, -2))
    dv = weighted_values(np.swapaxes(A, -1, -2), do, np.swapaxes(visible, -1, -2))
    if enable_gqa:
        dk, dv = sum_groups(dk, k.shape[-3]), sum_groups(dv, v.shape[-3])
    return AttentionGradients(sum_to_shape(dq, q.shape), sum_to_shape(dk, k.shape), sum_to_shape(dv, v.shape))
