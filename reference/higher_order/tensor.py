"""Tensor attention: every query attends to pairs (or longer tuples) of keys at once, with one softmax over all tuples.

    S_i,j1j2 = scale * sum_l q_il k1_j1,l k2_j2,l
    A = exp(S),  D_i = sum_j1,j2 A_i,j1j2           (j1, j2) over the pairs that query i may see
    o_i = D_i^-1 sum_j1,j2 A_i,j1j2 (v1_j1 ∘ v2_j2)

In matrices o = D^-1 exp(scale Q (K1 ⊘ K2)^T) (V1 ⊘ V2), ⊘ being the column-wise Kronecker (Khatri-Rao) product, whose row (j1, j2) is
the elementwise product of row j1 of its first factor and row j2 of its second.

where q (..., n, d), k1 (..., m1, d), k2 (..., m2, d), v1 (..., m1, e), v2 (..., m2, e), S and A (..., n, m1, m2), o (..., n, e);
scale is 1/d unless given. Order t + 1 has t sets of keys and values: S and v1 ∘ ... ∘ vt take one factor from each.

Backward, from the cotangent dO of o, with P = D^-1 A, K = K1 ⊘ K2 and V = V1 ⊘ V2:

    dP = dO V^T,  Δ_i = <dO_i, o_i>,  dS = P * (dP - Δ),  dq = scale dS K,  dK = scale dS^T q,  dV = P^T dO
    dk1_j1 = sum_j2 dK_j1j2 ∘ k2_j2,  dk2_j2 = sum_j1 dK_j1j2 ∘ k1_j1,  and dv1, dv2 from dV in the same way

Source: Alman and Song, "How to Capture Higher-order Correlations? Generalizing Matrix Softmax Attention to Kronecker Computation",
arXiv:2310.04064 (ICLR 2024), abstract and reviews; the formal problem is its Definition 1.2, whose text was not read. Order 3 also in
Sanford, Hsu and Telgarsky, arXiv:2306.02896. Order 4 and causal tuples: lucidrains/simplicial-attention, naive_two_simplicial_attend and
nth_order_attend.

Conventions. The definition in the paper's abstract carries no scale. The default 1/d is implied by its theorem (derived, not read
in its text): entries up to B give logits up to B^3 only with 1/d, and the threshold B = (log n)^(1/3) is that of logits up to log n.
Pass scale=1/sqrt(d) for the 2-simplicial convention. Tuples are ordered with the last index running fastest, so that a reshape
recovers (j1, j2). causal: a tuple is visible iff every member is, each set of keys aligned by its own length. A query that sees no
tuple gets zeros.

Identities. One set of keys and scale 1/sqrt(d): softmax attention. k2 = 1 and v2 = 1: attention over k1, v1. Swapping (k1, v1) with
(k2, v2) changes nothing. v1 = v2 = 1 gives 1. q = 0 gives mean(v1) ∘ mean(v2). |o| is at most max|v1| max|v2|. For a fixed j1 it is
ordinary attention of the query q_i ∘ k1_j1 over k2, v2. <dv1, v1> = <dv2, v2> = <dO, o> and <dq, q> = <dk1, k1> = <dk2, k2>.

Wrong versions met elsewhere: a softmax over j2 for each j1 instead of one over all pairs; values added (v1 + v2) instead of multiplied;
the full Kronecker or the row-wise (face-splitting) product for ⊘; rows of K1 ⊘ K2 and V1 ⊘ V2 in different orders; 1/sqrt(d) under this
paper's name; 1e-8 added to the normaliser; a causal mask on one of the two indices only.
"""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from attnspec.reference.formula import formula, quietly
from attnspec.reference.inputs import AttentionResult, checked_arrays, number, sum_to_shape, visible_keys
from attnspec.reference.softmax.weights import attention_logits, softmax_weights, weighted_values

SHAPES = {"q": "... n d", "k1": "... m1 d", "k2": "... m2 d", "v1": "... m1 e", "v2": "... m2 e", "mask": "bool ... #n #m1 #m2"}
FACTS: dict[str, Any] = {
    "family": "higher_order",
    "latex": r"o=D^{-1}A\,(V_1\oslash V_2),\quad A=\exp\bigl(\mathrm{scale}\,Q(K_1\oslash K_2)^\top\bigr),\quad "
             r"D=\operatorname{diag}(A\mathbf 1)",
    "source": "arXiv:2310.04064, abstract",
    "sizes": {"m1": "n", "m2": "n"},
}


def tensor_scale(scale, q):
    """`scale`, or 1/d where it is None."""
    return 1.0 / max(q.shape[-1], 1) if scale is None else number("scale", scale, finite=True)


def khatri_rao(*factors):
    """Column-wise Kronecker product of factors (..., m_a, d): (..., m_1 ... m_t, d), the last factor's row running fastest.

    >>> khatri_rao(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0, 10.0], [0.0, 1.0]]))
    array([[ 1., 20.],
           [ 0.,  2.],
           [ 3., 40.],
           [ 0.,  4.]])
    """
    product = factors[0]
    for factor in factors[1:]:
        pairs = product[..., :, None, :] * factor[..., None, :, :]
        *lead, m1, m2, d = pairs.shape
        product = pairs.reshape(*lead, m1 * m2, d)
    return product


def visible_tuples(n, sizes, mask=None, causal=False, windows=None):
    """Which tuples of keys each query may see, all of whose members it must see: bool (..., n, m_1, ..., m_t).

    sizes: the numbers of keys (m_1, ..., m_t).  windows: one (left, right) or None for each of them; otherwise as `visible_keys`.
    """
    visible = np.ones((n,) + (1,) * len(sizes), bool)
    for a, m in enumerate(sizes):
        members = visible_keys(n, m, None, causal, windows[a] if windows else None)
        visible = visible & members.reshape((n,) + tuple(m if b == a else 1 for b in range(len(sizes))))
    return visible if mask is None else visible & mask


def flat_tuples(visible, t):
    """`visible` (..., n, m_1, ..., m_t) with the t axes of a tuple as one."""
    return visible.reshape(*visible.shape[:-t], math.prod(visible.shape[-t:]))


def attend_tuples(q, keys, values, scale, visible, return_weights):
    """D^-1 A (V1 ⊘ ... ⊘ Vt) for arrays that were checked; visible (..., n, m_1, ..., m_t)."""
    sizes = tuple(k.shape[-2] for k in keys)
    visible = flat_tuples(visible, len(sizes))
    P, _ = softmax_weights(attention_logits(q, khatri_rao(*keys), scale), visible)
    out = weighted_values(P, khatri_rao(*values), visible)
    return AttentionResult(out, P.reshape(*P.shape[:-1], *sizes)) if return_weights else out


def checked_like(shapes, arrays):
    """`arrays` {name: array or None} checked and converted as a record of these shapes would: for functions with a free number of them."""
    required = tuple(name for name in arrays if name != "mask")
    return checked_arrays(SimpleNamespace(shapes=shapes, required=required, grouped=(), parameters={}), arrays)


@formula(
    shapes={**SHAPES, "k3": "... m3 d", "v3": "... m3 e", "out": "... n e"},
    equation="out = D^-1 A (V1 ⊘ V2),  A = exp(scale Q (K1 ⊘ K2)^T),  D = row sums of A",
    status="verified-paper",
    bound="tensor",
    workspace="... n m1 m2",
    **FACTS,
)
def tensor_attention(q, k1, k2, v1, v2, *, k3=None, v3=None, scale=None, mask=None, causal=False, return_weights=False):
    """Tensor attention of q (..., n, d) over the pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    k3 (..., m3, d), v3 (..., m3, e): a third set, for attention of order 4 over triples; any order: `tensor_attention_general`.
    scale: multiplies the logits, default 1/d.  mask: bool, broadcastable to (..., n, m1, m2), True = may attend; with a third set
    give it to `tensor_attention_general`.  causal: False, "bottom-right" (or True) or "top-left", for each member of a tuple.
    return_weights: return an AttentionResult with weights (..., n, m1, m2), or (..., n, m1, m2, m3).
    Returns (..., n, e). Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> k = np.log([[1.0], [3.0]])
    >>> tensor_attention([[1.0]], k, [[1.0]], [[2.0], [4.0]], [[10.0]])           # weights 1/4 and 3/4
    array([[35.]])
    """
    for given, missing, name, shape in ((k3, v3, "v3", "(..., m3, e)"), (v3, k3, "k3", "(..., m3, d)")):
        if given is not None and missing is None:
            raise ValueError(f"{name}: expected an array of shape {shape} to go with the third set, got None")
    if k3 is None:
        keys, values = [k1, k2], [v1, v2]
    else:
        keys, values = [k1, k2, k3], [v1, v2, v3]
        if mask is not None:
            raise ValueError("mask: expected None with a third set, got an array; tensor_attention_general takes masks of any order")
    visible = visible_tuples(q.shape[-2], [k.shape[-2] for k in keys], mask, causal)
    return attend_tuples(q, keys, values, tensor_scale(scale, q), visible, return_weights)


@quietly
def tensor_attention_general(q, keys, values, *, scale=None, mask=None, causal=False, return_weights=False):
    """Tensor attention of any order: q (..., n, d) over tuples with one member from each set of keys and values.

    keys: t >= 1 arrays (..., m_a, d).  values: as many arrays (..., m_a, e).  One set is ordinary attention, two the paper's.
    scale: multiplies the logits, default 1/d.  mask: bool, broadcastable to (..., n, m_1, ..., m_t), True = may attend.
    causal: False, "bottom-right" (or True) or "top-left", for each member of a tuple.
    return_weights: return an AttentionResult with weights (..., n, m_1, ..., m_t).
    Returns (..., n, e). Raises ValueError where shapes or the numbers of sets do not match, naming the argument, as in "keys[1]".

    >>> k, v = np.log([[1.0], [3.0]]), np.array([[2.0], [4.0]])
    >>> tensor_attention_general([[1.0]], [k], [v])
    array([[3.5]])
    """
    for name, sets in (("keys", keys), ("values", values)):
        if not isinstance(sets, list | tuple) or not sets:
            got = "an empty one" if isinstance(sets, list | tuple) else type(sets).__name__
            raise ValueError(f"{name}: expected a list of arrays, one per set, got {got}")
    if len(keys) != len(values):
        raise ValueError(f"values: expected {len(keys)} arrays, as many as keys, got {len(values)}")
    t = len(keys)
    shapes = {"q": "... n d"}
    shapes |= {f"keys[{a}]": f"... m{a + 1} d" for a in range(t)} | {f"values[{a}]": f"... m{a + 1} e" for a in range(t)}
    shapes |= {"mask": "bool ... #n " + " ".join(f"#m{a + 1}" for a in range(t))}
    arrays = {"q": q} | {f"keys[{a}]": keys[a] for a in range(t)} | {f"values[{a}]": values[a] for a in range(t)} | {"mask": mask}
    arrays = checked_like(shapes, arrays)
    q, keys, values = arrays["q"], [arrays[f"keys[{a}]"] for a in range(t)], [arrays[f"values[{a}]"] for a in range(t)]
    visible = visible_tuples(q.shape[-2], [k.shape[-2] for k in keys], arrays.get("mask"), causal)
    return attend_tuples(q, keys, values, tensor_scale(scale, q), visible, return_weights)


class TensorAttentionGradients(NamedTuple):
    """Cotangents of the arrays of `tensor_attention`, each with the shape of its array."""

    dq: np.ndarray
    dk1: np.ndarray
    dk2: np.ndarray
    dv1: np.ndarray
    dv2: np.ndarray


def factor_gradients(dX, x1, x2, seen):
    """Cotangents of x1 (..., m1, d) and x2 (..., m2, d) from dX (..., m1 m2, d) of their product x1 ⊘ x2.

    seen: bool (..., m1 m2), the pairs some query may see; of the others dX is 0 and their factors may be anything.
    """
    m1, m2 = x1.shape[-2], x2.shape[-2]
    dX = dX.reshape(*dX.shape[:-2], m1, m2, dX.shape[-1])
    seen = seen.reshape(*seen.shape[:-1], m1, m2)[..., None]
    dx1 = np.sum(dX * np.where(seen, x2[..., None, :, :], 0.0), axis=-2)
    dx2 = np.sum(dX * np.where(seen, x1[..., :, None, :], 0.0), axis=-3)
    return sum_to_shape(dx1, x1.shape), sum_to_shape(dx2, x2.shape)


@formula(
    shapes={**SHAPES, "do": "... n e", "dq": "... n d", "dk1": "... m1 d", "dk2": "... m2 d", "dv1": "... m1 e", "dv2": "... m2 e"},
    equation="dS = P * (dO V^T - <dO, o>),  dq = scale dS K,  dK = scale dS^T q,  dV = P^T dO,  dk1_j1 = sum_j2 dK_j1j2 ∘ k2_j2",
    status="derived",
    bound="tensor gradients",
    workspace="... n m1 m2",
    **{**FACTS, "source": "arXiv:2310.04064, abstract, differentiated",
       "latex": r"dS=P\circ(dO\,V^\top-\langle dO,o\rangle),\quad dq=\mathrm{scale}\,dS\,K,\quad dK=\mathrm{scale}\,dS^\top q,"
                r"\quad dV=P^\top dO"},
)
def tensor_attention_backward(q, k1, k2, v1, v2, do, *, scale=None, mask=None, causal=False):
    """Reverse-mode gradients of `tensor_attention` over pairs for the cotangent do (..., n, e) of its output.

    The other parameters are those of the forward function. Returns TensorAttentionGradients (dq, dk1, dk2, dv1, dv2).
    Raises ValueError as the forward function does.

    >>> k = np.zeros((2, 1))
    >>> tensor_attention_backward([[1.0]], k, k, [[1.0], [3.0]], [[1.0], [1.0]], [[1.0]]).dv2    # the mean of v1, over two
    array([[1.],
           [1.]])
    """
    scale = tensor_scale(scale, q)
    K, V = khatri_rao(k1, k2), khatri_rao(v1, v2)
    s = attention_logits(q, K, scale)
    visible = flat_tuples(visible_tuples(q.shape[-2], (k1.shape[-2], k2.shape[-2]), mask, causal), 2)
    visible = np.broadcast_to(visible, np.broadcast_shapes(visible.shape, s.shape))
    P, _ = softmax_weights(s, visible)
    out = weighted_values(P, V, visible)
    do = np.broadcast_to(do, np.broadcast_shapes(do.shape, out.shape))

    delta = np.sum(do * out, axis=-1, keepdims=True)
    dP = do @ np.swapaxes(V, -1, -2)
    dS = np.where(visible & (P != 0), P * (dP - delta), 0.0)
    dq = scale * weighted_values(dS, K, visible)
    visible_by = np.swapaxes(visible, -1, -2)
    dK = scale * weighted_values(np.swapaxes(dS, -1, -2), q, visible_by)
    dV = weighted_values(np.swapaxes(P, -1, -2), do, visible_by)
    seen = np.any(visible_by, axis=-1)
    return TensorAttentionGradients(sum_to_shape(dq, q.shape), *factor_gradients(dK, k1, k2, seen), *factor_gradients(dV, v1, v2, seen))
