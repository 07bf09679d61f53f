"""Ring attention: P hosts hold a block of the queries and a block of the keys each; the key blocks travel around the ring.

    for t = 0 .. P-1, on every host h at the same time:
        (m, l, o)_h <- the recurrence of online softmax over the key block (h - t) mod P, which h holds now
        h sends its key block to host h + 1 and receives the one of host h - 1
    out = o / l on every host

where q (..., n, d), k (..., m, d), v (..., m, e), out (..., n, e). Host h owns queries floor(h n / P) .. floor((h+1) n / P) - 1 and keys
floor(h m / P) .. floor((h+1) m / P) - 1.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889, algorithm 1, and
the authors' code (haoliuhl/ringattention: block (h - t) mod P at step t, sent to h + 1); the text of the paper was not checked. The
recurrence: arXiv:1805.02867.

Conventions. This is a simulation in one process: what it shows is the order of the work, not its speed. n and m need not be multiples of
P: blocks then differ by one row, and with more hosts than rows some are empty (the authors' code asks for equal blocks). The causal
alignment is that of positions among all queries and keys. A block pair that the causal mask hides altogether is folded like any other and
contributes nothing; the authors' code skips its work, though not its turn. The feed-forward layer that the paper computes on each host is
no part of this.

Identities. The result is that of scaled dot-product attention for any P, whatever the order in which a host meets the blocks.

Wrong versions met elsewhere: rotating the keys and not the values; causal positions counted within a block; a host's own block folded
twice or the last one never, from P - 1 or P + 1 steps; a query that sees nothing in its first block giving exp(-inf + inf) = NaN.
"""

from attnspec.reference.formula import formula
from attnspec.reference.inputs import grouped_heads, whole
from attnspec.reference.softmax.online import block_of, finish_attention_partial, fold_block, initial_state, join_queries, visible_block
from attnspec.reference.softmax.scaled_dot_product import SHAPES
from attnspec.reference.softmax.weights import attention_logits


def owned(size, hosts):
    """The slice of `size` rows that each host owns."""
    return [slice(h * size // hosts, (h + 1) * size // hosts) for h in range(hosts)]


@formula(
    family="softmax",
    shapes={**SHAPES, "out": "... n e"},
    equation="host h folds key block (h - t) mod P at step t = 0 .. P-1;  out = o / l = softmax(scale q k^T + bias) v",
    latex=r"(m,l,o)_h\leftarrow(m,l,o)_h\oplus B_{(h-t)\bmod P},\quad t=0,\dots,P-1;\quad \mathrm{out}_h=o_h/l_h",
    source="arXiv:2310.01889, algorithm 1; haoliuhl/ringattention",
    status="derived",
    bound="softmax",
    grouped=("k", "v"),
)
def ring_attention(
    q, k, v, *, hosts=4, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False,
    return_lse=False,
):
    """Softmax attention of q (..., n, d) over k (..., m, d), v (..., m, e) as a ring of hosts computes it; returns (..., n, e).

    hosts: P, how many hosts share the queries and the keys; it does not change the result.
    scale: multiplies the logits, default 1/sqrt(d).  softcap: c > 0 bounds them by c tanh(x/c); None or 0 leaves them.
    bias: added to the logits, broadcastable to (..., n, m).  mask: bool, broadcastable likewise, True = may attend.
    causal: False, "bottom-right" (or True) or "top-left".  window: (left, right) keys around the query's own position, None or -1 for
    no limit; both are of positions among all queries and keys.  sink: (h,) one more logit per head, neither scaled nor capped nor masked,
    without a value.
    enable_gqa: key heads may be fewer than query heads and are shared by neighbouring ones.
    return_lse: return an AttentionResult with lse (..., n) = m + log l.
    Raises ValueError where shapes do not match, heads differ without enable_gqa, or an option is out of range, naming the argument.

    >>> ring_attention([[0.0], [0.0]], [[0.0], [0.0], [0.0]], [[1.0], [2.0], [6.0]], hosts=2)
    array([[3.],
           [3.]])
    """
    whole("hosts", hosts, least=1)
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    n, m = q.shape[-2], k.shape[-2]
    queries, keys = owned(n, hosts), owned(m, hosts)
    states = [initial_state(sink)] * hosts
    held = list(range(hosts))                                          # whose keys and values each host holds
    for _ in range(hosts):
        for h in range(hosts):
            i, j = queries[h], keys[held[h]]
            s = attention_logits(q[..., i, :], k[..., j, :], scale, softcap, block_of(bias, i, j, n, m))
            states[h] = fold_block(states[h], s, v[..., j, :], visible_block(i, j, n, m, mask, causal, window))
        held = held[-1:] + held[:-1]
    return join_queries([finish_attention_partial(*state) for state in states], return_lse)
