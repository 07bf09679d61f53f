"""Pieces that the graph twins share, all of float32: products that let nothing through from behind a mask, and the masked softmax.

A transformation may not look at entries, so what is not finite is dealt with whether it is there or not. Where nothing is hidden (`visible`
is None) a plain product does. Else a NaN times a weight of 0 must not count, neither in the product nor in those that differentiate it:
the products below are custom functions whose gradients are again such products.
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from attnspec.reference.inputs import CAUSAL, default_scale, number, one_of, window_sides

INF = math.inf
TILE = 64


# --- shapes --------------------------------------------------------------------------------------------------------------------------


def turned(x: mx.array) -> mx.array:
    """The transpose of the last two axes."""
    return x.swapaxes(-1, -2)


def joint_lead(*arrays: mx.array | None, rank: int = 2) -> tuple[int, ...]:
    """The leading axes of arrays with `rank` axes of their own, broadcast."""
    return np.broadcast_shapes(*(x.shape[: max(x.ndim - rank, 0)] for x in arrays if x is not None))


def grouped_heads(q: mx.array, *keys_values: mx.array) -> tuple[mx.array, ...]:
    """Keys and values with one copy per query head: query head h uses key head h // (H / Hk)."""
    return tuple(mx.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in keys_values)


def repeated_axes(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The axes of `shape` that an array of shape `wanted` lacks, and those along which it was repeated."""
    extra = len(shape) - len(wanted)
    return list(range(extra)), [axis for axis in range(extra, len(shape)) if wanted[axis - extra] == 1 and shape[axis] != 1]


def sum_to_shape(gradient: mx.array, shape: tuple[int, ...]) -> mx.array:
    """The adjoint of broadcasting: `gradient` summed over the axes along which an array of `shape` was repeated."""
    absent, repeated = repeated_axes(gradient.shape, shape)
    for axis in repeated:
        gradient = total(gradient, axis, keepdims=True)
    for _ in absent:
        gradient = total(gradient, 0)
    return gradient


def any_to_shape(visible: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Whether anything is visible among what was summed into an array of `shape`."""
    absent, repeated = repeated_axes(visible.shape, shape)
    visible = mx.any(visible, axis=repeated, keepdims=True) if repeated else visible
    return mx.any(visible, axis=absent) if absent else visible


def total(x: mx.array, axis: int = -1, keepdims: bool = False) -> mx.array:
    """The sum along an axis, by parts of TILE terms: one chain over thousands of weights would lose the small ones.

    Over nothing it is 0, which mx.sum of MLX 0.32.4 may take minutes to find on a CPU.
    """
    axis %= x.ndim
    size = x.shape[axis]
    if x.size == 0:
        return mx.zeros((*x.shape[:axis], *[1] * keepdims, *x.shape[axis + 1 :]), x.dtype)
    if size <= TILE:
        return mx.sum(x, axis=axis, keepdims=keepdims)
    whole = size // TILE * TILE
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    head, rest = mx.split(x, [whole], axis=axis)
    found = total(mx.sum(head.reshape(*before, whole // TILE, TILE, *after), axis=axis + 1), axis, keepdims)
    return found + mx.sum(rest, axis=axis, keepdims=keepdims) if whole < size else found


# --- what a query may see ------------------------------------------------------------------------------------------------------------


def visible_keys(
    n: int, m: int, mask: mx.array | None = None, causal: bool | str = False, window: Any = None, first: tuple[int, int] = (0, 0),
    of: tuple[int, int] | None = None,
) -> mx.array | None:
    """Which keys each query may see, bool (..., n, m), as in reference/inputs.py; None where every query sees every key.

    first, of: the block is one of n queries and m keys from these on, among all of them; the mask is the block's own.
    """
    causal = one_of("causal", causal, CAUSAL)
    all_n, all_m = of or (n, m)
    left, right = (None, None) if window is None else window_sides(window)
    p = mx.arange(first[0], first[0] + n)[:, None] + (all_m - all_n if causal in (True, "bottom-right") else 0)
    j = mx.arange(first[1], first[1] + m)[None, :]
    conditions = [] if mask is None else [mask]
    conditions += [j <= p] if causal is not False else []
    conditions += [j >= p - left] if left is not None else []
    conditions += [j <= p + right] if right is not None else []
    if not conditions:
        return None
    visible = conditions[0]
    for condition in conditions[1:]:
        visible = mx.logical_and(visible, condition)               # & is wrong under mx.vmap where one side is not mapped
    return mx.broadcast_to(visible, (*visible.shape[:-2], n, m))


@mx.custom_function
def chosen(visible: mx.array, x: mx.array, other: mx.array) -> mx.array:
    return mx.where(visible, x, other)


@chosen.vjp
def chosen_gradients(primals, cotangent, _):
    visible, x, other = primals
    return mx.zeros_like(visible), sum_to_shape(mx.where(visible, cotangent, 0.0), x.shape), mx.zeros_like(other)


def select(visible: mx.array | None, x: mx.array, other: float | mx.array) -> mx.array:
    """x where visible, the constant `other` elsewhere, where no gradient passes: mx.where multiplies it by 0, and NaN stays NaN."""
    return x if visible is None else chosen(visible, x, mx.array(other))


# --- products ------------------------------------------------------------------------------------------------------------------------


def weighted_values(A: mx.array, v: mx.array, visible: mx.array | None = None) -> mx.array:
    """A @ v for weights A (..., n, m), 0 where not visible, and values v (..., m, e), of which nothing unseen arrives, be it NaN or inf.

    The gradient by A may hold anything where A is not visible: whoever hid A there hides that too.
    """
    if A.size == 0 or v.size == 0:
        return mx.zeros((*joint_lead(A, v, visible), A.shape[-2], v.shape[-1]))
    return A @ v if visible is None else seen_product(A, v, visible)


@mx.custom_function
def seen_product(A: mx.array, v: mx.array, visible: mx.array) -> mx.array:
    finite = mx.isfinite(v)
    out = A @ mx.where(finite, v, 0.0)
    # How many entries that are not finite does an output meet, and how many infinities of which sign remain once they are weighed?
    met = visible.astype(mx.float32) @ (~finite).astype(mx.float32)
    signs = mx.sign(A) @ mx.where(mx.isinf(v), mx.sign(v), 0.0)
    return mx.where(met == 0, out, mx.where(mx.abs(signs) == met, signs * INF, math.nan))


@seen_product.vjp
def seen_product_gradients(primals, cotangent, _):
    A, v, visible = primals
    dv = weighted_values(turned(A), cotangent, turned(visible))
    return sum_to_shape(cotangent @ turned(v), A.shape), sum_to_shape(dv, v.shape), mx.zeros_like(visible)


def scores(q: mx.array, k: mx.array, visible: mx.array | None = None) -> mx.array:
    """q k^T (..., n, m), and 0 where not visible."""
    return q @ turned(k) if visible is None else select(visible, seen_scores(q, k, visible), 0.0)


@mx.custom_function
def seen_scores(q: mx.array, k: mx.array, visible: mx.array) -> mx.array:
    return q @ turned(k)


@seen_scores.vjp
def seen_scores_gradients(primals, cotangent, _):
    q, k, visible = primals
    seen = any_to_shape(visible, cotangent.shape)
    dq = weighted_values(cotangent, k, seen)
    dk = weighted_values(turned(cotangent), q, turned(seen))
    return sum_to_shape(dq, q.shape), sum_to_shape(dk, k.shape), mx.zeros_like(visible)


# --- softmax -------------------------------------------------------------------------------------------------------------------------


def scale_of(scale: Any, q: mx.array) -> float:
    """`scale`, or 1/sqrt(d) where it is None."""
    return float(default_scale(scale, q))


def attention_logits(q, k, visible=None, scale=None, softcap=None, bias=None) -> mx.array:
    """Logits (..., n, m) of q (..., n, d) and k (..., m, d); what stands where not visible is of no meaning, and without a gradient."""
    s = scale_of(scale, q) * scores(q, k, visible)
    if s.size == 0:
        return mx.zeros(np.broadcast_shapes(s.shape, () if bias is None else bias.shape))
    if softcap is not None and 0 < (cap := float(number("softcap", softcap, least=0))) < INF:
        s = cap * mx.tanh(s / cap)
    return s if bias is None else s + bias


def row_maximum(s: mx.array, alive: mx.array) -> mx.array:
    """The largest entry of each row where alive, -inf where there is none; a constant for derivatives."""
    if s.shape[-1] == 0:
        return mx.full((*s.shape[:-1], 1), -INF)
    return mx.stop_gradient(mx.max(mx.where(alive, s, -INF), axis=-1, keepdims=True))


def softmax_weights(s: mx.array, visible: mx.array | None = None, sink: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Weights P (..., n, m) and log-sum-exp L (..., n) of logits s; sink: one more logit per head, (h,), whose value is 0."""
    if s.size == 0:
        return nothing_seen(s, visible, sink)
    alive = s != -INF if visible is None else mx.logical_and(visible, s != -INF)
    top = row_maximum(s, alive)
    z = None if sink is None else sink[..., None, None]
    if z is not None:
        top = mx.maximum(top, mx.stop_gradient(z))
    top = mx.where(top == -INF, 0.0, top)
    e = select(alive, mx.exp(select(alive, s, top) - top), 0.0)        # the inner one keeps exp, and its derivative, finite
    sums = total(e, keepdims=True)
    if z is not None:
        sums = sums + mx.exp(z - top)
    empty = sums == 0
    sums = mx.where(empty, 1.0, sums)
    L = mx.where(empty, -INF, top + mx.log(sums))
    return select(visible, e / sums, 0.0), L[..., 0]


def nothing_seen(s: mx.array, visible: mx.array | None, sink: mx.array | None) -> tuple[mx.array, mx.array]:
    """The weights and log-sum-exp where there are no keys, or no queries."""
    shape = np.broadcast_shapes(s.shape, (1, 1) if visible is None else visible.shape, (1, 1) if sink is None else (*sink.shape, 1, 1))
    L = mx.full(shape[:-1], -INF) if sink is None else mx.broadcast_to(sink[..., None], shape[:-1])
    return mx.zeros(shape), L


def softmax_attention(
    q, k, v, *, scale=None, softcap=None, bias=None, mask=None, causal=False, window=None, sink=None, enable_gqa=False,
) -> tuple[mx.array, mx.array, mx.array]:
    """Output (..., n, e), weights (..., n, m) and log-sum-exp (..., n); the parameters are those of scaled dot-product attention."""
    if enable_gqa:
        k, v = grouped_heads(q, k, v)
    visible = visible_keys(q.shape[-2], k.shape[-2], mask, causal, window)
    P, L = softmax_weights(attention_logits(q, k, visible, scale, softcap, bias), visible, sink)
    return weighted_values(P, v, visible), P, L


# --- gradients -----------------------------------------------------------------------------------------------------------------------


def gradients_of(function: Callable[..., mx.array], cotangent: mx.array, **arrays: mx.array | None) -> dict[str, Any]:
    """The cotangents of the arrays of `function`, by name; None for those that are None. The cotangent may have more leading axes."""
    given = {name: x for name, x in arrays.items() if x is not None}

    def forward(*primals):
        out = function(**dict(zip(given, primals, strict=True)))
        return mx.broadcast_to(out, np.broadcast_shapes(out.shape, cotangent.shape))

    shape = forward(*given.values()).shape
    _, found = mx.vjp(forward, list(given.values()), [mx.broadcast_to(cotangent, shape)])
    return dict.fromkeys(arrays) | dict(zip(given, found, strict=True))
