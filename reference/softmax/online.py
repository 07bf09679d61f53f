"""Online softmax: attention computed one block of keys after the other, with a running maximum, normaliser and sum of values.

    s_ij = bias_ij + cap(scale <q_i, k_j>)      j in the next block of keys B; cap(x) = c tanh(x / c), where a softcap c is given
    m'_i = max(m_i, max_{j in B} s_ij)
    l'_i = l_i exp(m_i - m'_i) + sum_{j in B} exp(s_ij - m'_i)
    o'_i = o_i exp(m_i - m'_i) + sum_{j in B} exp(s_ij - m'_i) v_j
    out_i = o_i / l_i,  L_i = m_i + log l_i                  after the last block

where q (..., n, d), k (..., m, d), v (..., m, e), out (..., n, e); the running (m, l, o) have shapes (..., n), (..., n), (..., n, e) and
start at (-inf, 0, 0), or at (z, 1, 0) where there is a sink z. (The papers' letter m for the maximum is also our number of keys; shapes
tell them apart.)

What a set of keys contributes is its partial (m, l, o), the recurrence run from the start over these keys alone. Partials of disjoint
sets merge:

    m = max(m1, m2),  l = l1 exp(m1 - m) + l2 exp(m2 - m),  o = o1 exp(m1 - m) + o2 exp(m2 - m)

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867, algorithm 3 (the recurrence) and section
3.1 (the merge); Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", arXiv:2112.05682, and the authors' notebook
(google-research, memory_efficient_attention): queries by 1024, keys by 4096.

Conventions. The last chunk may be shorter. Chunk sizes change nothing but rounding, which is why they are options and not part of the
formula. A set of keys that query i may not see has the partial (-inf, 0, 0), which merges with any other to that other. A sink is the
partial (z, 1, 0). A partial takes a mask and neither causal nor window: a block does not know its place among all keys. Rabe and Staats
compute the partial of every chunk on its own and merge all of them by the global maximum; the result is the same. Weights are not
returned, they are never all there.

Identities. The result is that of scaled dot-product attention for any chunk sizes. Merging is associative and commutative. Merging a
partial with itself doubles l and o and leaves out alone. With L = log-sum-exp: L = log(e^L1 + e^L2), out = out2 - sigma(L1 - L2) (out2 -
out1).

Wrong versions met elsewhere: not rescaling o when the maximum moves; exp(m - m') with both at -inf, which is NaN for a query that has
seen nothing yet; averaging the outputs of blocks without their normalisers; a last chunk slid back to full size when the chunk does not
divide the number of keys, which counts keys twice (jax.lax.dynamic_slice in the authors' notebook does).
"""

from typing import NamedTuple

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, grouped_heads, visible_keys, whole
from attnspec.reference.softmax.scaled_dot_product import SHAPES
from attnspec.reference.softmax.weights import attention_logits, largest, weighted_values


class AttentionPartial(NamedTuple):
    """What a set of keys contributes to the softmax attention of each query; merge_attention_partials joins two of them."""

    m: np.ndarray                    # (..., n) largest logit among the keys, -inf where the query sees none of them
    l: np.ndarray                    # (..., n) sum of exp(logit - m)
    o: np.ndarray                    # (..., n, e) sum of exp(logit - m) times value, not normalised


# --- blocks of queries and keys ------------------------------------------------------------------------------------------------------


def chunks(size, length):
    """Slices of `length`, the last one maybe shorter, that cover `size`; one empty slice of nothing, so that shapes come out right."""
    return [slice(start, min(start + length, size)) for start in range(0, max(size, 1), length)]


def block_of(x, i, j, n, m):
    """The block [i, j] of an x that broadcasts to (..., n, m), without making the rest."""
    return None if x is None else np.broadcast_to(x, (*x.shape[:-2], n, m))[..., i, j]


def visible_block(i, j, n, m, mask=None, causal=False, window=None):
    """visible_keys(n, m, mask, causal, window)[..., i, j] for slices i, j, without making the rest."""
    visible = visible_keys(n, m, None, causal, window, queries=i, keys=j)
    return visible if mask is None else visible & block_of(mask, i, j, n, m)


# --- the recurrence ------------------------------------------------------------------------------------------------------------------


def larger(a, b):
    """The one of a, b with the larger real part: their maximum with its derivative, NaN where b is NaN."""
    return np.where(a.real >= b.real, a, b)


def finite_shift(m):
    """m where something was seen and 0 where nothing was, so that exp(-inf - shift) is 0 instead of NaN."""
    return np.where(m.real == -np.inf, 0.0, m)


def initial_state(sink=None):
    """(m, l, o) before any key: the identity of merging, or the partial of a sink, one more logit per head, (h,), whose value is 0."""
    if sink is None:
        return AttentionPartial(np.asarray(-np.inf), np.asarray(0.0), np.asarray(0.0))
    return AttentionPartial(sink[..., None], np.asarray(1.0), np.asarray(0.0))


def fold_block(state, s, v, visible):
    """The running (m, l, o) after one more block of keys with logits s (..., n, b) and values v (..., b, e)."""
    m, l, o = state
    s = np.where(visible, s, -np.inf)
    m_new = larger(m, largest(s))
    shift = finite_shift(m_new)
    a, e = np.exp(m - shift), np.exp(s - shift[..., None])
    return AttentionPartial(m_new, l * a + np.sum(e, axis=-1), o * a[..., None] + weighted_values(e, v, visible))


@formula(
    family="softmax",
    shapes={**SHAPES, "out": "... n e"},
    equation="m' = max(m, max_j s_ij),  l' = l e^{m-m'} + sum_j e^{s_ij-m'},  o' = o e^{m-m'} + sum_j e^{s_ij-m'} v_j,  out = o / l",
    latex=r"m'=\max(m,\max_{j\in B}s_{ij}),\quad l'=l\,e^{m-m'}+\sum_{j\in B}e^{s_{ij}-m'},\quad "
          r"o'=o\,e^{m-m'}+\sum_{j\in B}e^{s_{ij}-m'}v_j,\quad \mathrm{out}=o/l",
    source="arXiv:1805.02867, algorithm 3; arXiv:2112.05682",
    status="derived",
    bound="softmax",
    grouped=("k", "v"),
)
def online_softmax_attention(
    q, k, v, *, query_chunk=1024, key_chunk=4096, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None,
    enable_gqa=False, return_lse=False,
):
    """Softmax attention of q (..., n, d) over k (..., m, d), v (..., m, e), a chunk of keys at a time; returns (..., n, e).

    query_chunk, key_chunk: how many queries and keys are looked at together; they do not change the result.
    scale: multiplies the logits, default 1/sqrt(d).  softcap: c > 0 bounds them by c tanh(x/c); None or 0 leaves them.
    bias: added to the logits, broadcastable to (..., n, m).  mask: bool, broadcastable likewise, True = may attend.
    causal: False, "bottom-right" (or True) or "top-left".  window: (left, right) keys around the query's own position, None or -1 for
    no limit; both are of positions among all queries and keys.  sink: (h,) one more logit per head, neither scaled nor capped nor masked,
    without a value.
    enable_gqa: key heads may be fewer than query heads and are shared by neighbouring ones.
    return_lse: return an AttentionResult with lse (..., n) = m + log l.
    Raises ValueError where shapes do not match, heads differ without enable_gqa, or an option is out of range, naming the argument.

    >>> online_softmax_attention([[1.0]], np.log([[1.0], [3.0], [4.0]]), [[8.0], [0.0], [16.0]], key_chunk=2)
    array([[9.]])
    """
    whole("query_chunk", query_chunk, least=1)
    whole("key_chunk", key_chunk, least=1)
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    n, m = q.shape[-2], k.shape[-2]
    results = []
    for i in chunks(n, query_chunk):
        state = initial_state(sink)
        for j in chunks(m, key_chunk):
            s = attention_logits(q[..., i, :], k[..., j, :], scale, softcap, block_of(bias, i, j, n, m))
            state = fold_block(state, s, v[..., j, :], visible_block(i, j, n, m, mask, causal, window))
        results.append(finish_attention_partial(*state))
    return join_queries(results, return_lse)


def join_queries(results, return_lse):
    """The results of successive blocks of queries as one."""
    out = np.concatenate([one.out for one in results], axis=-2)
    return AttentionResult(out, lse=np.concatenate([one.lse for one in results], axis=-1)) if return_lse else out


# --- partials ------------------------------------------------------------------------------------------------------------------------


@formula(
    family="softmax",
    shapes={"q": "... n d", "k": "... m d", "v": "... m e", "bias": "... #n #m", "mask": "bool ... #n #m",
            "m": "... n", "l": "... n", "o": "... n e"},
    equation="m_i = max_j s_ij,  l_i = sum_j exp(s_ij - m_i),  o_i = sum_j exp(s_ij - m_i) v_j",
    latex=r"m_i=\max_j s_{ij},\quad l_i=\sum_j e^{s_{ij}-m_i},\quad o_i=\sum_j e^{s_{ij}-m_i}v_j",
    source="arXiv:2112.05682, section 2 and the authors' notebook (summarize_chunk)",
    status="derived",
    kinks="the two largest logits of a row are equal",
    grouped=("k", "v"),
    workspace="... n m",
)
def attention_partial(q, k, v, *, scale=None, softcap=None, bias=None, mask=None, enable_gqa=False):
    """What the keys k (..., m, d) with values v (..., m, e) contribute to the softmax attention of q (..., n, d), as an AttentionPartial.

    scale: multiplies the logits, default 1/sqrt(d).  softcap: c > 0 bounds them by c tanh(x/c); None or 0 leaves them.
    bias: added to the logits, broadcastable to (..., n, m).  mask: bool, broadcastable likewise, True = may attend; a causal mask or a
    window comes this way.  enable_gqa: key heads may be fewer than query heads and are shared by neighbouring ones.
    Returns m (..., n), l (..., n), o (..., n, e); (-inf, 0, 0) for a query that sees none of these keys.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> attention_partial([[1.0]], np.log([[2.0], [4.0]]), [[3.0], [1.0]], scale=1.0)        # m = log 4
    AttentionPartial(m=array([1.38629436]), l=array([1.5]), o=array([[2.5]]))
    """
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    s = attention_logits(q, k, scale, softcap, bias)
    visible = np.ones(s.shape[-2:], bool) if mask is None else mask
    return fold_block(initial_state(), s, v, visible)


def draw_partials(*suffixes):
    """A drawing function for one partial per suffix of the names m, l, o; l lies between 1 and 4, as for 4 keys."""

    def draw(sizes, rng):
        rows = (*(sizes[axis] for axis in ("b", "h") if axis in sizes), sizes["n"])
        arrays: dict[str, np.ndarray] = {}
        for suffix in suffixes:
            arrays |= {"m" + suffix: rng.standard_normal(rows), "l" + suffix: rng.uniform(1.0, 4.0, rows),
                       "o" + suffix: rng.standard_normal((*rows, sizes["e"]))}
        return arrays

    return draw


@formula(
    family="softmax",
    shapes={"m1": "... n", "l1": "... n", "o1": "... n e", "m2": "... n", "l2": "... n", "o2": "... n e",
            "m": "... n", "l": "... n", "o": "... n e"},
    equation="m = max(m1, m2),  l = l1 exp(m1 - m) + l2 exp(m2 - m),  o = o1 exp(m1 - m) + o2 exp(m2 - m)",
    latex=r"m=\max(m_1,m_2),\quad l=l_1e^{m_1-m}+l_2e^{m_2-m},\quad o=o_1e^{m_1-m}+o_2e^{m_2-m}",
    source="arXiv:1805.02867, section 3.1",
    status="derived",
    bound="merged partials",
    kinks="m1 = m2",
    draw=draw_partials("1", "2"),
)
def merge_attention_partials(m1, l1, o1, m2, l2, o2):
    """The partial of two disjoint sets of keys together, from the partials (m1, l1, o1) and (m2, l2, o2) of each.

    m1, m2: (..., n) largest logits.  l1, l2: (..., n) sums of exp(logit - maximum).  o1, o2: (..., n, e) the same sums of values.
    Returns an AttentionPartial, so that merge_attention_partials(*a, *b) merges a and b.
    Raises ValueError where shapes do not match, naming the argument.

    >>> merge_attention_partials([0.0], [1.0], [[6.0]], [np.log(2.0)], [1.0], [[1.0]])        # two keys, of weights 1 and 2
    AttentionPartial(m=array([0.69314718]), l=array([1.5]), o=array([[4.]]))
    """
    m = larger(m1, m2)
    shift = finite_shift(m)
    a1, a2 = np.exp(m1 - shift), np.exp(m2 - shift)
    return AttentionPartial(m, l1 * a1 + l2 * a2, o1 * a1[..., None] + o2 * a2[..., None])


@formula(
    family="softmax",
    shapes={"m": "... n", "l": "... n", "o": "... n e", "out": "... n e", "lse": "... n"},
    equation="out = o / l,  lse = m + log l",
    latex=r"\mathrm{out}=o/l,\quad L=m+\log l",
    source="arXiv:2112.05682, section 2; lse is the log of the softmax's normaliser",
    status="derived",
    draw=draw_partials(""),
)
def finish_attention_partial(m, l, o):
    """Output and log-sum-exp of softmax attention over the keys whose partial is m (..., n), l (..., n), o (..., n, e).

    m: largest logits.  l: sums of exp(logit - m).  o: the same sums of values.
    Returns an AttentionResult with out (..., n, e) and lse (..., n): zeros and -inf for a query that saw nothing (l = 0).
    Raises ValueError where shapes do not match, naming the argument.

    >>> out, _, lse = finish_attention_partial([0.0], [4.0], [[6.0]])
    >>> out, np.exp(lse)
    (array([[1.5]]), array([4.]))
    """
    empty = l == 0
    out = o / np.where(empty, 1.0, l)[..., None]
    return AttentionResult(out, lse=np.where(empty, -np.inf, m + np.log(np.where(empty, 1.0, l))))
