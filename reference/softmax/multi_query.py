"""Multi-query attention: every head has queries of its own, all heads share one head of keys and values.

    Q_h = x W_q[h],  K = c W_k,  V = c W_v
    P_hij = exp(s_hij) / sum_l exp(s_hil),  s_hij = scale <Q_hi, K_j>          l over the keys that query i may see
    y_i = sum_h W_o[h] (sum_j P_hij V_j)

where x (..., n, c) is what the queries are made of, the context (..., m, c) what keys and values are made of, W_q (h, c, d), W_k (c, d),
W_v (c, e), W_o (h, c, e), P (..., h, n, m), y (..., n, c); scale is 1/sqrt(d) unless given.

What is kept of each key for decoding is d + e numbers, one h-th of what multi-head attention keeps.

Source: Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", arXiv:1911.02150, section 3 (MultiqueryAttentionBatched); the
scale 1/sqrt(d): the grouped-head operators of PyTorch and ONNX.

Conventions. The paper's code has no scale: 1/sqrt(d) is left to W_q, so that scale=1.0 gives the paper. Its mask is additive and has a
head axis; ours is boolean, (..., h, n, m), of which leading axes may be absent, so that (n, m) is one mask for all. W_o has its axes as
in the paper, (h, c, e), and is applied as O_h W_o[h]^T. causal as in scaled dot-product attention, self-attention being context = x.

Identities. It is grouped-query attention with a single head of keys and values, and multi-head attention in which all heads have the same
W_k and W_v. The last row of causal self-attention is the decoding step of the last token over all keys.

Wrong versions met elsewhere: scale 1/sqrt(c) or 1/sqrt(h d) instead of 1/sqrt(d); W_o applied untransposed where c = e, which runs and is
wrong; keys and values with a head axis of size h cut out of one projection of size d, which makes heads of d/h features.
"""

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, visible_keys
from attnspec.reference.softmax.weights import attention_logits, softmax_weights, weighted_values


def draw(sizes, rng):
    """Standard normal inputs; weights that keep the entries of Q, K, V and y near 1 in size."""
    lead = (sizes["b"],) if "b" in sizes else ()
    n, m, c, d, e, h = (sizes[dim] for dim in ("n", "m", "c", "d", "e", "h"))
    into, out_of = max(c, 1) ** -0.5, max(h * e, 1) ** -0.5
    return {
        "x": rng.standard_normal((*lead, n, c)), "context": rng.standard_normal((*lead, m, c)),
        "w_q": into * rng.standard_normal((h, c, d)), "w_k": into * rng.standard_normal((c, d)),
        "w_v": into * rng.standard_normal((c, e)), "w_o": out_of * rng.standard_normal((h, c, e)),
    }


@formula(
    family="softmax",
    shapes={"x": "... n c", "context": "... m c", "w_q": "h c d", "w_k": "c d", "w_v": "c e", "w_o": "h c e",
            "mask": "bool ... #h #n #m", "out": "... n c"},
    equation="Q_h = x W_q[h],  K = context W_k,  V = context W_v,  out = sum_h softmax(scale Q_h K^T) V W_o[h]^T",
    latex=r"Q_h=xW^q_h,\quad K=cW^k,\quad V=cW^v,\quad y=\sum_h\operatorname{softmax}(\mathrm{scale}\,Q_hK^\top)\,V\,{W^o_h}^\top",
    source="arXiv:1911.02150, section 3",
    status="verified-paper",
    bound="multi query",
    sizes={"c": 16},
    workspace="... h n m",
    draw=draw,
)
def multi_query_attention(x, context, w_q, w_k, w_v, w_o, *, scale=None, mask=None, causal=False, return_weights=False):
    """Multi-query attention of x (..., n, c) over the context (..., m, c), with its projections; returns (..., n, c).

    w_q: (h, c, d) makes the queries of each head.  w_k: (c, d) and w_v: (c, e) make the keys and values of all.
    w_o: (h, c, e) takes each head's output, by its transpose, back to c features, where they are added.
    scale: multiplies the logits, default 1/sqrt(d).  mask: bool, broadcastable to (..., h, n, m), True = may attend.
    causal: False, "bottom-right" (or True) or "top-left".  return_weights: also return the weights (..., h, n, m), in an AttentionResult.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> x, one = np.array([[1.0, 0.0]]), np.eye(2)
    >>> two = np.stack([one, one])                                     # two heads, each of which gives the only value
    >>> multi_query_attention(x, [[3.0, 5.0]], two, one, one, two)
    array([[ 6., 10.]])
    """
    Q, K, V = x[..., None, :, :] @ w_q, (context @ w_k)[..., None, :, :], (context @ w_v)[..., None, :, :]
    s = attention_logits(Q, K, scale)
    visible = visible_keys(x.shape[-2], context.shape[-2], mask, causal)
    P, _ = softmax_weights(s, visible)
    O = weighted_values(P, V, visible)
    y = np.sum(O @ np.swapaxes(w_o, -1, -2), axis=-3)
    return AttentionResult(y, P) if return_weights else y
