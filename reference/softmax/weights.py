"""The softmax over the keys that a query may see, and the average of the values that it weighs.

    s_ij = bias_ij + cap(scale <q_i, k_j>)          cap(x) = c tanh(x / c), where a softcap c is given
    P_ij = exp(s_ij) / (exp(z) + sum_l exp(s_il))   l over the keys that query i may see; exp(z) only where a sink z is given
    o_i  = sum_j P_ij v_j

where q (..., n, d), k (..., m, d), v (..., m, e), P (..., n, m), o (..., n, e); scale is 1/sqrt(d) unless given.

Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, eq. (1); order of softcap, bias and mask: ONNX operator
Attention, opset 24.

Conventions. The largest visible logit is subtracted before exp. A query that sees no key, or only keys at -inf, has weights 0 and a
log-sum-exp of -inf (z where there is a sink). What stands at a position that a query may not see never reaches its weights, NaN included.
NaN or +inf among the logits that it sees makes its row NaN. A softcap of None, 0 or inf is none. The scale multiplies the product, not q:
a product <q_i, k_j> beyond 1.8e308 is infinite, whatever the scale.

Identities. Rows of P sum to 1 without a sink, to sigmoid(L0 - z) with one, L0 being the log-sum-exp without it.

Wrong versions met elsewhere: a mask of -1e9 instead of -inf, which gives the mean of all values where nothing is visible; capping after
the mask, which turns -inf into -c and leaks; subtracting the maximum over masked entries too, which underflows the visible ones.
"""

import numpy as np

from attnspec.reference.formula import formula, quietly
from attnspec.reference.inputs import default_scale, grouped_heads, number, visible_keys


@quietly
def attention_logits(q, k, scale=None, softcap=None, bias=None):
    """Logits s (..., n, m) of q (..., n, d) and k (..., m, d), before any mask."""
    s = default_scale(scale, q) * (q @ np.swapaxes(k, -1, -2))
    if softcap is not None and 0 < number("softcap", softcap, least=0).real < np.inf:
        s = softcap * np.tanh(s / softcap)
    return s if bias is None else s + bias


def largest(x):
    """The largest entry along the last axis, -inf where there is none; by real part, since np.max would let imaginary parts decide ties."""
    x = np.concatenate([np.full((*x.shape[:-1], 1), -np.inf), x], axis=-1)
    return np.take_along_axis(x, np.argmax(x.real, axis=-1)[..., None], axis=-1)[..., 0]


def row_maximum(X, visible):
    """The largest visible entry of each row, 0 where there is none."""
    top = largest(np.where(visible, X, -np.inf))
    return np.where(top.real == -np.inf, 0.0, top)


@quietly
def softmax_weights(s, visible=True, sink=None):
    """Weights P (..., n, m) and log-sum-exp L (..., n) of logits s; sink: one more logit per head, (h,), whose value is 0.

    >>> P, L = softmax_weights(np.log([[1.0, 3.0]]))
    >>> P, np.exp(L)
    (array([[0.25, 0.75]]), array([4.]))
    """
    s = np.where(visible, s, -np.inf)
    z = np.asarray(-np.inf if sink is None else sink)[..., None, None]
    top = np.maximum(np.max(s.real, axis=-1, keepdims=True, initial=-np.inf), z.real)
    top = np.where(top == -np.inf, 0.0, top)
    e = np.exp(s - top)
    total = np.sum(e, axis=-1, keepdims=True) + np.exp(z - top)
    empty = total == 0
    L = np.where(empty, -np.inf, top + np.log(np.where(empty, 1.0, total)))
    return np.where(visible, e / np.where(empty, 1.0, total), 0.0), L[..., 0]     # 0 also where the rest of a row is NaN


@quietly
def weighted_values(A, v, visible=True):
    """A @ v for weights A (..., n, m) and values v (..., m, e), in which nothing of an unseen value arrives, NaN and inf included."""
    if np.all(np.isfinite(v)):
        return A @ v
    terms = A[..., :, :, None] * np.where(np.asarray(visible)[..., None], v[..., None, :, :], 0.0)
    return np.sum(terms, axis=-2)


@formula(
    family="softmax",
    shapes={
        "q": "... n d", "k": "... m d", "bias": "... #n #m", "mask": "bool ... #n #m", "sink": "#h", "weights": "... n m",
    },
    equation="P_ij = exp(s_ij) / sum_l exp(s_il),  s = scale q k^T + bias",
    latex=r"P_{ij}=\frac{e^{s_{ij}}}{\sum_{l}e^{s_{il}}},\quad s_{ij}=\mathrm{scale}\,\langle q_i,k_j\rangle+\mathrm{bias}_{ij}",
    source="arXiv:1706.03762, eq. (1)",
    grouped=("k",),
)
def attention_weights(
    q, k, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False,
):
    """Softmax attention weights P (..., n, m) of q (..., n, d) over k (..., m, d).

    The parameters are those of `scaled_dot_product_attention`, which averages values with these weights.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> attention_weights([[0.0], [2.0]], [[0.0], [1.0]], scale=1.0, causal=True).round(3)
    array([[1.   , 0.   ],
           [0.119, 0.881]])
    """
    if enable_gqa:
        (k,) = grouped_heads(q, k)
    s = attention_logits(q, k, scale, softcap, bias)
    visible = visible_keys(q.shape[-2], k.shape[-2], mask, causal, window)
    return softmax_weights(s, visible, sink)[0]
