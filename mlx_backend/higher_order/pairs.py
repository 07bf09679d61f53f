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
from attnspec.mlx_backend.metal import Kernel
from attnspec.mlx_backend.softmax.tiles import LOG2_E, band, entries, fitting, padded
from attnspec.mlx_backend.twin import common_dtype
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


# --- by the kernel -------------------------------------------------------------------------------------------------------------------

PAIRS = Kernel("pairs", "attnspec.mlx_backend.higher_order", "pairs.metal", ("q", "k1", "k2", "v1", "v2", "mask", "of", "sizes", "factors"),
               ("out", "lse"))
WIDEST = 128
PAYS = 2**18                         # logits from which on the kernel is taken; a guess, not measured yet
SIMDGROUPS = 4


def attend_pairs(q, k1, k2, v1, v2, scale, mask, causal) -> mx.array:
    """Output (..., n, e) of a softmax over pairs, by the kernel in pairs.metal or by the graph, whose gradients both have."""
    def graph(q, k1, k2, v1, v2):
        visible = visible_tuples(q.shape[-2], (k1.shape[-2], k2.shape[-2]), mask, causal)
        return attend_tuples(q, (k1, k2), (v1, v2), scale, visible)[0]

    arrays = (q, k1, k2, v1, v2)
    pays = math.prod(q.shape[:-1]) * k1.shape[-2] * k2.shape[-2] >= PAYS
    if not PAIRS.chosen(refusal(*arrays), pays, (str(common_dtype()),), check):
        return graph(*arrays)

    @mx.custom_function
    def forward(*arrays):
        return launch(common_dtype(), arrays, scale, mask, causal)

    @forward.vjp
    def backward(primals, cotangent, _):
        return mx.vjp(graph, list(primals), [cotangent])[1]

    return forward(*arrays)


def refusal(q, k1, k2, v1, v2) -> str | None:
    """Why the kernel cannot do this call."""
    if max(q.shape[-1], v1.shape[-1]) > WIDEST:
        return f"heads are at most {WIDEST} wide, got {q.shape[-1]} and {v1.shape[-1]}"
    return None if all(x.size for x in (q, k1, k2, v1, v2)) else "there are no queries, no keys or no features"


def check() -> bool:
    """Whether kernel and graph agree on a small causal case."""
    rng, dtype = np.random.default_rng(0), common_dtype()
    drawn = (rng.standard_normal((n, 8)).astype(np.float32) for n in (11, 11, 13, 11, 13))
    q, k1, k2, v1, v2 = (mx.array(x).astype(dtype).astype(mx.float32) for x in drawn)
    want, _ = attend_tuples(q, (k1, k2), (v1, v2), 0.3, visible_tuples(11, (11, 13), None, True))
    return bool(mx.all(mx.abs(launch(dtype, (q, k1, k2, v1, v2), 0.3, None, True) - want) < {4: 1e-5, 2: 5e-2}[dtype.size]))


def launch(dtype, arrays, scale, mask, causal) -> mx.array:
    n, m1, m2 = (x.shape[-2] for x in arrays[:3])
    e, masked = arrays[3].shape[-1], mask is not None
    mask = mx.zeros((1, 1, 1), mx.bool_) if mask is None else mask.reshape((1,) * (3 - mask.ndim) + tuple(mask.shape))
    fronts = [*(tuple(x.shape[:-2]) for x in arrays), tuple(mask.shape[:-3])]
    lead = np.broadcast_shapes(*fronts)
    heads, of = math.prod(lead), np.stack([entries(shape, lead, 1) for shape in fronts])
    wide = [padded(x).astype(dtype) for x in arrays]
    mask = mask.reshape(-1, *mask.shape[-3:])
    D, E, rows = wide[0].shape[-1], wide[3].shape[-1], 8 * SIMDGROUPS
    sizes = [n, m1, m2, *band(n, m1, causal, None), *band(n, m2, causal, None), *mask.shape[1:]]
    out, _ = PAIRS.launch(
        [*wide, mask, mx.array(of, mx.int32), mx.array(sizes, mx.int32), mx.array([scale * LOG2_E])],
        {"T": dtype, "D": D, "E": E, "KEYS": fitting(D + E + 16 // dtype.size, dtype), "ROWS": rows, "SIMDS": SIMDGROUPS, "MASKED": masked},
        (32 * SIMDGROUPS * -(-n // rows), heads, 1), (32 * SIMDGROUPS, 1, 1), [((heads, n, E), dtype), ((heads, n), mx.float32)],
    )
    return out[..., :e].reshape(*lead, n, e).astype(mx.float32)
