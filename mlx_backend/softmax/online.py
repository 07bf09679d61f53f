"""Twin of reference/softmax/online.py: running maxima are constants for derivatives, which cancel in the result."""

import mlx.core as mx

from attnspec.mlx_backend.blocks import chunks, finished, fold_block
from attnspec.mlx_backend.graph import INF, attention_logits, grouped_heads, visible_keys
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, whole
from attnspec.reference.softmax.online import AttentionPartial


@twin
def merge_attention_partials(m1, l1, o1, m2, l2, o2):
    """The AttentionPartial of two disjoint sets of keys together, from m1, m2 (..., n), l1, l2 (..., n), o1, o2 (..., n, e)."""
    m = mx.where(m1 >= m2, m1, m2)
    a1, a2 = share_of(m1, m), share_of(m2, m)
    return AttentionPartial(m, l1 * a1 + l2 * a2, o1 * a1[..., None] + o2 * a2[..., None])


def share_of(part, m):
    """exp(part - m), and 0 for a part at -inf, whose derivative is 0 too, even where m is -inf."""
    nothing = part == -INF
    return mx.where(nothing, 0.0, mx.exp(mx.where(nothing, 0.0, part) - mx.where(nothing, 0.0, m)))


@twin
def online_softmax_attention(
    q, k, v, *, query_chunk=1024, key_chunk=4096, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None,
    enable_gqa=False, return_lse=False,
):
    """Softmax attention of q (..., n, d) over k (..., m, d), v (..., m, e), chunk by chunk; the parameters are those of the reference."""
    whole("query_chunk", query_chunk, least=1)
    whole("key_chunk", key_chunk, least=1)
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    n, m = q.shape[-2], k.shape[-2]
    results = []
    for i in chunks(n, query_chunk):
        state = initial_state(sink)
        for j in chunks(m, key_chunk):
            queries, keys, first = i.stop - i.start, j.stop - j.start, (i.start, j.start)
            visible = visible_keys(queries, keys, block_of(mask, i, j, n, m), causal, window, first=first, of=(n, m))
            s = attention_logits(q[..., i, :], k[..., j, :], visible, scale, softcap, block_of(bias, i, j, n, m))
            state = fold_block(state, s, v[..., j, :], visible)
        results.append(finished(*state))
    out = mx.concatenate([out for out, _ in results], axis=-2)
    return AttentionResult(out, lse=mx.concatenate([lse for _, lse in results], axis=-1)) if return_lse else out


def block_of(x, i, j, n, m):
    """The block [i, j] of an x that broadcasts to (..., n, m)."""
    return None if x is None else mx.broadcast_to(x, (*x.shape[:-2], n, m))[..., i, j]


def initial_state(sink):
    """(m, l, o) before any key; a sink z counts exp(z - m) with m = z, which is 1 and has the derivative of exp(z)."""
    if sink is None:
        return mx.array(-INF), mx.array(0.0), mx.array(0.0)
    m = mx.stop_gradient(sink)[..., None]
    nothing = m == -INF
    return m, mx.where(nothing, 0.0, mx.exp(sink[..., None] - mx.where(nothing, 0.0, m))), mx.array(0.0)
