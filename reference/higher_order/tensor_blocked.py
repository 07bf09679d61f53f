"""Tensor attention without storing its n m1 m2 logits: an online softmax that streams over the first keys and tiles of the second.

    for each j1 and each tile T of the second keys:
        s  = scale (q ∘ k1_j1) k2_T^T             -inf where a query may not see the pair
        m' = max(m, max_T s),  c = exp(m - m'),  p = exp(s - m')
        l  = c l + sum_T p
        a  = c a + (p v2_T) ∘ v1_j1,  m = m'
    o = a / l,  L = m + log l

where q (..., n, d), k1 (..., m1, d), k2 (..., m2, d), v1 (..., m1, e), v2 (..., m2, e), o (..., n, e); the state is m, l (..., n) and
a (..., n, e), from m = -inf, l = 0, a = 0; scale is 1/d unless given. L is the log-sum-exp over all pairs, which a backward pass needs.

Source: Alman and Song, arXiv:2310.04064, for the operator; the loops are those of the Triton kernel of Roy et al.,
"Fast and Simplex: 2-Simplicial Attention in Triton", arXiv:2507.02754. The recurrence is derived here from the definition.

Conventions. Those of tensor.py. A tile in which a query has seen nothing so far leaves its state as it is. A query that sees no pair gets
zeros and L = -inf.

Identities. It equals `tensor_attention`, whatever the size of the tiles. L = log sum_j1,j2 exp(S_ij1j2).

Wrong versions met elsewhere: the old accumulator not rescaled by c when the maximum moves; exp(m - m') with both at -inf, which is NaN;
multiplying by v1_j1 after all tiles of all j1; one normaliser for each j1.
"""

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.higher_order.tensor import FACTS, SHAPES, tensor_scale
from attnspec.reference.inputs import AttentionResult, visible_keys, whole
from attnspec.reference.softmax.weights import attention_logits, weighted_values


@formula(
    shapes={**SHAPES, "out": "... n e"},
    equation="l <- c l + sum p,  a <- c a + (p v2_T) ∘ v1_j1,  p = exp(s - m'),  c = exp(m - m');  out = a / l",
    status="derived",
    bound="tensor",
    workspace="... n e",
    **FACTS,
)
def tensor_attention_blocked(q, k1, k2, v1, v2, *, block=32, scale=None, mask=None, causal=False, return_lse=False):
    """Tensor attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e), in tiles.

    block: how many of the second keys a tile holds; the result does not depend on it.  scale: multiplies the logits, default 1/d.
    mask: bool, broadcastable to (..., n, m1, m2), True = may attend.  causal: False, "bottom-right" (or True) or "top-left", for each
    member of a pair.  return_lse: return an AttentionResult with lse (..., n), the log of the sum over all pairs.
    Returns (..., n, e). Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> tensor_attention_blocked([[0.0]], [[1.0]], [[1.0], [2.0]], [[3.0]], [[4.0], [6.0]], block=1)
    array([[15.]])
    """
    whole("block", block, least=1)
    scale = tensor_scale(scale, q)
    n, m1, m2 = q.shape[-2], k1.shape[-2], k2.shape[-2]
    sees1, sees2 = visible_keys(n, m1, None, causal), visible_keys(n, m2, None, causal)
    arrays = [q, k1, k2, v1, v2]
    lead = np.broadcast_shapes(*(x.shape[:-2] for x in arrays))
    if mask is not None:
        mask = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, (n, m1, m2)))          # a view: nothing of that size is stored
        lead = np.broadcast_shapes(lead, mask.shape[:-3])

    m = np.full((*lead, n, 1), -np.inf)
    l = np.zeros((*lead, n, 1), np.result_type(*arrays))
    a = np.zeros((*lead, n, v1.shape[-1]), l.dtype)
    for j1 in range(m1):
        qk = q * k1[..., j1, None, :]
        for start in range(0, m2, block):
            T = slice(start, start + block)
            visible = sees1[:, j1, None] & sees2[:, T]
            if mask is not None:
                visible = visible & mask[..., j1, T]
            s = np.where(visible, attention_logits(qk, k2[..., T, :], scale), -np.inf)
            new = np.maximum(m, np.max(s.real, axis=-1, keepdims=True))
            top = np.where(new == -np.inf, 0.0, new)                   # nothing seen yet: c = 0 and p = 0
            v1_seen = np.where(np.any(visible, axis=-1, keepdims=True), v1[..., j1, None, :], 0.0)
            c, p = np.exp(m - top), np.exp(s - top)
            l = c * l + np.sum(p, axis=-1, keepdims=True)
            a = c * a + weighted_values(p, v2[..., T, :], visible) * v1_seen
            m = new
    empty = l == 0
    out = a / np.where(empty, 1.0, l)
    if not return_lse:
        return out
    return AttentionResult(out, lse=np.where(empty, -np.inf, m + np.log(np.where(empty, 1.0, l)))[..., 0])
