"""Attention with softmax-one: a 1 in the normaliser lets a head attend to nothing.

    P_ij = exp(s_ij) / (1 + sum_l exp(s_il)),  s_ij = bias_ij + cap(scale <q_i, k_j>)          l over the keys that query i may see
    o_i  = sum_j P_ij v_j

where q (..., n, d), k (..., m, d), v (..., m, e), o (..., n, e); scale is 1/sqrt(d) unless given; cap(x) = c tanh(x / c), where a softcap
c is given.

Source: Miller, "Attention Is Off By One", https://www.evanmiller.org/attention-is-off-by-one.html (2023); the same as an all-zero sink of
MLX (mx.fast.scaled_dot_product_attention) and as add_zero_attn of PyTorch's MultiheadAttention.

Conventions. It is attention with a sink at logit 0, see there. The 1 is neither scaled nor capped, biased or masked. A query that sees
nothing gets zeros, and its log-sum-exp is 0.

Identities. It is softmax attention with one more key and value, both zero. With L the log-sum-exp of softmax attention, rows of P sum to
sigma(L), and the output is sigma(L) times softmax attention. A constant added to a row of logits does change the result.

Wrong versions met elsewhere: 1 added after the maximum was subtracted, where it has to be exp(-max); a maximum that leaves the 0 out, so
that exp(-max) overflows for rows of very negative logits; the 1 counted once a block of keys instead of once.
"""

from attnspec.reference.formula import formula
from attnspec.reference.softmax.scaled_dot_product import scaled_dot_product_attention


@formula(
    family="softmax",
    shapes={"q": "... n d", "k": "... m d", "v": "... m e", "bias": "... #n #m", "mask": "bool ... #n #m", "out": "... n e"},
    equation="P_ij = exp(s_ij) / (1 + sum_l exp(s_il)),  s = scale q k^T + bias,  out = P v",
    latex=r"o_i=\sum_j\frac{e^{s_{ij}}}{1+\sum_l e^{s_{il}}}\,v_j,\quad s_{ij}=\mathrm{scale}\,\langle q_i,k_j\rangle+\mathrm{bias}_{ij}",
    source="Miller, Attention Is Off By One (2023)",
    bound="softmax",
    grouped=("k", "v"),
    workspace="... n m",
)
def softmax_one_attention(
    q, k, v, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, enable_gqa=False,
    return_weights=False, return_lse=False,
):
    """Softmax-one attention of q (..., n, d) over k (..., m, d), v (..., m, e); returns (..., n, e).

    scale: multiplies the logits, default 1/sqrt(d).  softcap: c > 0 bounds them by c tanh(x/c); None or 0 leaves them.
    bias: added to the logits, broadcastable to (..., n, m).  mask: bool, broadcastable likewise, True = may attend.
    causal: False, "bottom-right" (or True) or "top-left".  window: (left, right) keys around the query's own position, None or -1 for
    no limit.  enable_gqa: key heads may be fewer than query heads and are shared by neighbouring ones.
    return_weights, return_lse: return an AttentionResult with weights (..., n, m), lse (..., n) = log(1 + sum_l exp(s_il)).
    Raises ValueError where shapes do not match, heads differ without enable_gqa, or an option is out of range, naming the argument.

    >>> softmax_one_attention([[1.0]], [[0.0], [0.0]], [[3.0], [9.0]])                         # each key weighs 1/3
    array([[4.]])
    """
    return scaled_dot_product_attention(
        q, k, v, scale=scale, softcap=softcap, bias=bias, mask=mask, causal=causal, window=window, sink=0.0, enable_gqa=enable_gqa,
        return_weights=return_weights, return_lse=return_lse,
    )
