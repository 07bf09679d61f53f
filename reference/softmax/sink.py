"""Attention with a sink: each head has a learned logit that takes a share of the weight and has no value.

    P_ij = exp(s_ij) / (exp(z_h) + sum_l exp(s_il)),  s_ij = bias_ij + cap(scale <q_i, k_j>)   l over the keys that query i may see
    o_i  = sum_j P_ij v_j

where q (..., h, n, d), k (..., hk, m, d), v (..., hk, m, e), z (h,), o (..., h, n, e); scale is 1/sqrt(d) unless given; hk = h unless
`enable_gqa`; cap(x) = c tanh(x / c), where a softcap c is given.

Backward: as that of scaled dot-product attention, with D_i = <dO_i, o_i> of this o; dz_h = -sum_i p_i D_i, p_i = exp(z_h - L_i) being the
sink's weight. `scaled_dot_product_attention_backward` takes the sink as an option.

Source: OpenAI, gpt-oss (2025), whose attention appends the sink to the logits as one more column and drops it after the softmax; the
argument `sinks` of mlx.core.fast.scaled_dot_product_attention.

Conventions. The sink is neither scaled nor capped, biased or masked. There is one for each query head, not each key head; a number serves
all heads. A query that sees nothing gets zeros. The log-sum-exp returned includes the sink. A sink token (a learned first key with a
value, as in arXiv:2309.17453) is something else.

Identities. With L the log-sum-exp of softmax attention, rows of P sum to sigma(L - z), and the output is sigma(L - z) times softmax
attention: a sink is a gate on the output. z = -inf gives softmax attention, z = 0 softmax-one. A constant added to a row of logits and to
the sink changes nothing; added to the logits alone it does.

Wrong versions met elsewhere: weights normalised again after the sink's column was dropped, which undoes it; the sink scaled by 1/sqrt(d);
one sink for each key head; exp(z) added after the maximum was subtracted, where it has to be exp(z - max); the sink counted once a block
of keys instead of once.
"""

from attnspec.reference.formula import formula
from attnspec.reference.softmax.scaled_dot_product import SHAPES, scaled_dot_product_attention


@formula(
    family="softmax",
    shapes={**SHAPES, "out": "... n e"},
    equation="P_ij = exp(s_ij) / (exp(z_h) + sum_l exp(s_il)),  s = scale q k^T + bias,  out = P v",
    latex=r"o_i=\sum_j\frac{e^{s_{ij}}}{e^{z_h}+\sum_l e^{s_{il}}}\,v_j,\quad "
          r"s_{ij}=\mathrm{scale}\,\langle q_i,k_j\rangle+\mathrm{bias}_{ij}",
    source="gpt-oss (2025); mlx.core.fast.scaled_dot_product_attention, sinks",
    bound="softmax",
    grouped=("k", "v"),
    workspace="... n m",
)
def attention_with_sink(
    q, k, v, sink, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, enable_gqa=False,
    return_weights=False, return_lse=False,
):
    """Softmax attention of q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e) with a sink for each head; returns (..., h, n, e).

    sink: (h,) the logit z of each head, or one number for all.
    scale: multiplies the logits, default 1/sqrt(d).  softcap: c > 0 bounds them by c tanh(x/c); None or 0 leaves them.
    bias: added to the logits, broadcastable to (..., n, m).  mask: bool, broadcastable likewise, True = may attend.
    causal: False, "bottom-right" (or True) or "top-left".  window: (left, right) keys around the query's own position, None or -1 for
    no limit.  enable_gqa: key heads may be fewer than query heads and are shared by neighbouring ones.
    return_weights, return_lse: return an AttentionResult with weights (..., n, m), lse (..., n) = log(exp(z_h) + sum_l exp(s_il)).
    Raises ValueError where shapes do not match, heads differ without enable_gqa, or an option is out of range, naming the argument.

    >>> attention_with_sink([[[1.0]]], [[[0.0], [0.0]]], [[[3.0], [9.0]]], [0.0])              # each key and the sink weigh 1/3
    array([[[4.]]])
    """
    return scaled_dot_product_attention(
        q, k, v, scale=scale, softcap=softcap, bias=bias, mask=mask, causal=causal, window=window, sink=sink, enable_gqa=enable_gqa,
        return_weights=return_weights, return_lse=return_lse,
    )
