"""Twin of reference/higher_order/two_simplicial.py as a graph over all pairs; windows hide, they do not save work."""

from attnspec.mlx_backend.graph import grouped_heads, scale_of
from attnspec.mlx_backend.higher_order.pairs import attend_tuples, visible_tuples
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, number, whole


@twin
def two_simplicial_attention(
    q, k1, k2, v1, v2, *, scale=None, causal=False, window1=None, window2=None, k2_bias=0.0, v2_bias=0.0, enable_gqa=False, mask=None,
    return_weights=False,
):
    """2-simplicial attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    The parameters are those of the reference.
    """
    if enable_gqa:
        k1, k2, v1, v2 = grouped_heads(q, k1, k2, v1, v2)
    k2, v2 = k2 + float(number("k2_bias", k2_bias)), v2 + float(number("v2_bias", v2_bias))
    windows = [None if w is None else (whole(name, w, least=1) - 1, 0) for name, w in (("window1", window1), ("window2", window2))]
    visible = visible_tuples(q.shape[-2], (k1.shape[-2], k2.shape[-2]), mask, causal, windows)
    out, P = attend_tuples(q, (k1, k2), (v1, v2), scale_of(scale, q), visible)
    return AttentionResult(out, P) if return_weights else out
