"""Twin of reference/higher_order/tensor_poly.py as a graph: a monomial of degree t is one of degree t - 1 times a variable."""

import math

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import joint_lead, total, turned
from attnspec.mlx_backend.higher_order.pairs import tensor_scale
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import CAUSAL, number, one_of, whole

MOST_FEATURES = 20_000_000


def monomial_levels(d, degree):
    """For each degree t >= 1 (parent, variable) of its monomials, parent among those of degree t - 1; and all exponents (r, d)."""
    alpha, levels = [np.zeros((1, d), np.int64)], []
    last = np.zeros(1, np.int64)                                       # the largest variable in each: only larger ones are added
    for _ in range(degree):
        children = d - last
        parent = np.repeat(np.arange(len(last)), children)
        variable = np.arange(len(parent)) - np.repeat(np.cumsum(children) - children, children) + last[parent]
        exponents = alpha[-1][parent]
        exponents[np.arange(len(parent)), variable] += 1
        alpha.append(exponents)
        levels.append((mx.array(parent), mx.array(variable)))
        last = variable
    return levels, np.concatenate(alpha)


def monomials(x, levels):
    """x^α (..., r) for each row x (..., d), by degree."""
    found = [mx.ones((*x.shape[:-1], 1))]
    for parent, variable in levels:
        found.append(mx.take(found[-1], parent, axis=-1) * mx.take(x, variable, axis=-1))
    return mx.concatenate(found, axis=-1)


def weights(alpha, degree, centre):
    """c_|α| |α|!/α! of the Taylor polynomial around the centre, in float64."""
    total, u = alpha.sum(axis=-1), np.arange(degree + 1)
    inverse = np.cumprod(1.0 / np.maximum(u, 1))
    tail = np.cumsum((-centre) ** u * inverse)
    return np.exp(centre) * tail[degree - total] * np.prod(inverse[alpha], axis=-1)


def factors(q, k1, k2, degree, centre, scale):
    """U1, U2, U3 with exp(S) ~ U1 (U2 ⊘ U3)^T."""
    d, g, c = q.shape[-1], whole("degree", degree), float(number("centre", centre))
    rank = math.comb(d + g, g)
    rows = max(1, d, *(math.prod(x.shape[:-1]) for x in (q, k1, k2)))
    if rows * rank > MOST_FEATURES:
        raise ValueError(f"degree: expected at most {MOST_FEATURES} features, got {rows} times the rank C({d} + {g}, {g}) = {rank}")
    levels, alpha = monomial_levels(d, g)
    weight = mx.array(weights(alpha, g, c).astype(np.float32))
    return weight * monomials(tensor_scale(scale, q) * q, levels), monomials(k1, levels), monomials(k2, levels)


@twin
def tensor_attention_poly(q, k1, k2, v1, v2, *, degree=8, centre=0.0, scale=None, causal=False):
    """Approximate tensor attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    The parameters are those of the reference.
    """
    one_of("causal", causal, CAUSAL)
    n, m1, m2 = q.shape[-2], k1.shape[-2], k2.shape[-2]
    i = np.arange(n)
    last1, last2 = (np.full(n, m - 1) if causal is False else i if causal == "top-left" else i + m - n for m in (m1, m2))
    if n * m1 * m2 == 0:
        return mx.zeros((*joint_lead(q, k1, k2, v1, v2), n, v1.shape[-1]))
    U1, U2, U3 = factors(q, k1, k2, degree, centre, scale)
    W1, W2 = (mx.concatenate([v, mx.ones((*v.shape[:-1], 1))], axis=-1) for v in (v1, v2))           # the last column gives D
    if causal is False:
        ND = U1 @ ((turned(U2) @ W1) * (turned(U3) @ W2))
    else:
        columns = []
        for c in range(W1.shape[-1]):
            sums = running_sums(U2 * W1[..., c, None], last1) * running_sums(U3 * W2[..., c, None], last2)
            columns.append(total(U1 * sums))
        ND = mx.stack(columns, axis=-1)
    N, D = ND[..., :-1], ND[..., -1:]
    nothing = (np.minimum(last1, m1 - 1) < 0) | (np.minimum(last2, m2 - 1) < 0)
    return mx.where(mx.array(nothing)[:, None], 0.0, N / D)


def running_sums(x, last):
    """sum_{j<=last_i} x_j for x (..., m, r): (..., n, r); last_i < 0 sums nothing."""
    sums = mx.concatenate([mx.zeros((*x.shape[:-2], 1, x.shape[-1])), mx.cumsum(x, axis=-2)], axis=-2)
    return mx.take(sums, mx.array(np.clip(last + 1, 0, x.shape[-2])), axis=-2)
