"""Tuples of keys as graphs: what no query sees of a product reaches neither the result nor the gradients of its factors."""

import math

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import (
    any_to_shape,
    attention_logits,
    select,
    softmax_weights,
    sum_to_shape,
    total,
    visible_keys,
    weighted_values,
)
from attnspec.reference.inputs import number


def tensor_scale(scale, q):
    """`scale`, or 1/d where it is None."""
    return 1.0 / max(q.shape[-1], 1) if scale is None else float(number("scale", scale, finite=True))


def visible_tuples(n, sizes, mask=None, causal=False, windows=None):
    """Which tuples each query may see, (..., n, m_1, ..., m_t); None where it may see all."""
    visible = mask
    for a, m in enumerate(sizes):
        members = visible_keys(n, m, None, causal, windows[a] if windows else None)
        if members is not None:
            members = members.reshape(n, *(m if b == a else 1 for b in range(len(sizes))))
            visible = members if visible is None else mx.logical_and(visible, members)
    return None if visible is None else mx.broadcast_to(visible, np.broadcast_shapes(visible.shape, (n, *sizes)))


@mx.custom_function
def seen_pairs(x1, x2, seen):
    """x1_j1 ∘ x2_j2 (..., m1, m2, d); seen (..., m1, m2)."""
    return x1[..., :, None, :] * x2[..., None, :, :]


@seen_pairs.vjp
def seen_pairs_gradients(primals, cotangent, _):
    x1, x2, seen = primals
    met = any_to_shape(seen, cotangent.shape[:-1])[..., None]
    dx1 = total(cotangent * mx.where(met, x2[..., None, :, :], 0.0), -2)
    dx2 = total(cotangent * mx.where(met, x1[..., :, None, :], 0.0), -3)
    return sum_to_shape(dx1, x1.shape), sum_to_shape(dx2, x2.shape), mx.zeros_like(seen)


def khatri_rao(factors, visible=None):
    """Column-wise Kronecker product (..., m_1 ... m_t, d) of factors (..., m_a, d), the last factor's row running fastest.

    visible: (..., n, m_1, ..., m_t), or None.  Products of pairs that are in no visible tuple are 0.
    """
    t, product = len(factors), factors[0]
    met = None if visible is None else mx.any(visible, axis=-t - 1)    # (..., m_1, ..., m_t)
    for a in range(1, t):
        if met is None:
            pairs = product[..., :, None, :] * factors[a][..., None, :, :]
        else:
            seen = mx.any(met, axis=tuple(range(a + 1 - t, 0))) if a + 1 < t else met
            seen = seen.reshape(*seen.shape[: seen.ndim - a - 1], math.prod(seen.shape[seen.ndim - a - 1 : -1]), seen.shape[-1])
            pairs = seen_pairs(product, factors[a], seen)
            pairs = select(any_to_shape(seen, pairs.shape[:-1])[..., None], pairs, 0.0)
        product = pairs.reshape(*pairs.shape[:-3], pairs.shape[-3] * pairs.shape[-2], pairs.shape[-1])
    return product


def attend_tuples(q, keys, values, scale, visible):
    """Output (..., n, e) and weights (..., n, m_1, ..., m_t) of a softmax over all tuples."""
    sizes = tuple(k.shape[-2] for k in keys)
    K, V = khatri_rao(keys, visible), khatri_rao(values, visible)
    flat = None if visible is None else visible.reshape(*visible.shape[: -len(sizes)], math.prod(sizes))
    P, _ = softmax_weights(attention_logits(q, K, flat, scale), flat)
    return weighted_values(P, V, flat), P.reshape(*P.shape[:-1], *sizes)
