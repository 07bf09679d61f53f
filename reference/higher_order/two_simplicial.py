"""2-simplicial attention: tensor attention over pairs of tokens at scale 1/sqrt(d), with a sliding window for each member of the pair.

    A_i,j1j2 = scale * sum_l q_il k1_j1,l k2_j2,l
    S = softmax over (j1, j2) of A                 over the pairs with p - w1 < j1 <= p and p - w2 < j2 <= p, p = i, under windows w1, w2
    o_i = sum_j1,j2 S_i,j1j2 (v1_j1 ∘ v2_j2)

where q (..., h, n, d), k1 (..., hk, m1, d), k2 (..., hk, m2, d), v1 (..., hk, m1, e), v2 (..., hk, m2, e), o (..., h, n, e); scale is
1/sqrt(d) unless given. The head axis may be absent; hk = h unless `enable_gqa`.

Source: Roy et al., "Fast and Simplex: 2-Simplicial Attention in Triton", arXiv:2507.02754, and its kernel as copied in public code
(lucidrains/simplicial-attention); the trilinear form of Clift et al., "Logic and the 2-Simplicial Transformer", arXiv:1909.00668.

Conventions. A window counts the query's own position: w1 = 1 leaves j1 = p alone. It bounds its set of keys on both sides, as in the
kernel, whether or not `causal` is set; without windows all keys are visible unless `causal` hides those after the query. p = i, or
i + m - n for each set of m keys where causal is "bottom-right" (or True). The kernel adds the constants k2_bias and v2_bias to k2 and v2
before anything else; they are 0 by default. The paper trains with w1 = 512 and w2 = 32; no window is the default here. Query head h shares
key head h // (h/hk). A query that sees no pair gets zeros.

Identities. It is `tensor_attention` at scale 1/sqrt(d). w1 = w2 = 1: o_i = v1_i ∘ v2_i. Windows of n or more: plain causal. The first token
under causal gets v1_0 ∘ v2_0.

Wrong versions met elsewhere: windows that start at max(0, i - w) inclusive, one key too many; 1e-8 added to the normaliser; a softmax over
each index in turn; scale 1/d; heads tiled (0, 1, 0, 1) instead of grouped (0, 0, 1, 1).
"""

from attnspec.reference.formula import formula
from attnspec.reference.higher_order.tensor import FACTS, SHAPES, attend_tuples, visible_tuples
from attnspec.reference.inputs import default_scale, grouped_heads, number, whole


@formula(
    shapes={**SHAPES, "out": "... n e"},
    equation="out = softmax over pairs of (q (k1 ⊘ k2)^T / sqrt(d)), times (v1 ⊘ v2)",
    bound="tensor",
    grouped=("k1", "k2", "v1", "v2"),
    workspace="... n m1 m2",
    **{**FACTS, "source": "arXiv:2507.02754",
       "latex": r"o_i=\sum_{j_1,j_2}\frac{e^{A_{ij_1j_2}}}{\sum_{l_1,l_2}e^{A_{il_1l_2}}}\,(v^{(1)}_{j_1}\circ v^{(2)}_{j_2}),\quad "
                r"A_{ij_1j_2}=\tfrac1{\sqrt d}\langle q_i,k^{(1)}_{j_1},k^{(2)}_{j_2}\rangle"},
)
def two_simplicial_attention(
    q, k1, k2, v1, v2, *, scale=None, causal=False, window1=None, window2=None, k2_bias=0.0, v2_bias=0.0, enable_gqa=False, mask=None,
    return_weights=False,
):
    """2-simplicial attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    scale: multiplies the logits, default 1/sqrt(d).  causal: False, "bottom-right" (or True) or "top-left", for each member of a pair.
    window1, window2: how many of the first and second keys a query sees, its own position and those just before it; None for no limit.
    k2_bias, v2_bias: constants added to k2 and v2.  enable_gqa: key heads may be fewer than query heads; neighbours share one.
    mask: bool, broadcastable to (..., n, m1, m2), True = may attend.
    return_weights: return an AttentionResult with weights (..., n, m1, m2).
    Returns (..., n, e). Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> x = [[1.0], [2.0], [3.0]]
    >>> two_simplicial_attention(x, x, x, x, x, window1=1, window2=1)
    array([[1.],
           [4.],
           [9.]])
    """
    if enable_gqa:
        k1, k2, v1, v2 = grouped_heads(q, k1, k2, v1, v2)
    k2, v2 = k2 + number("k2_bias", k2_bias), v2 + number("v2_bias", v2_bias)
    windows = [None if w is None else (whole(name, w, least=1) - 1, 0) for name, w in (("window1", window1), ("window2", window2))]
    visible = visible_tuples(q.shape[-2], (k1.shape[-2], k2.shape[-2]), mask, causal, windows)
    return attend_tuples(q, (k1, k2), (v1, v2), default_scale(scale, q), visible, return_weights)
