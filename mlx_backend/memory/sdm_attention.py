"""Twin of reference/memory/sdm_attention.py as a graph: "exponential" is softmax attention of unit vectors in float32.

Circles are weighed by cosines in the CPU's float64, since a rounding to float32 would move a distance by one bit; they are constants for
derivatives. Caps are an integral that the reference has.
"""

import math

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import INF, select, softmax_weights, total, turned, weighted_values
from attnspec.mlx_backend.memory.sdm import fitted_beta, required
from attnspec.mlx_backend.memory.sdm_circle import bits_and_radius, table_of
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, one_of, whole

WEIGHTINGS = ("circle", "cap", "exponential")
LACKS = {"weighting=cap": "caps are weighed by an integral that the reference has"}


@twin(lacks=LACKS)
def sdm_attention(
    queries, addresses, pointers, *, radius=None, weighting="circle", beta=None, resolution=None, n_iters=1, unit_norm=False,
    return_weights=False,
):
    """Averages (..., n, d) of the pointers (..., m, d) that queries read by their cosines to the addresses; the reference's parameters."""
    if one_of("weighting", weighting, WEIGHTINGS) == "cap":
        raise ValueError(f"weighting: the MLX twin lacks 'cap': {LACKS['weighting=cap']}")
    d = queries.shape[-1]
    if d < 1 and (weighting != "exponential" or beta is None):
        raise ValueError(f"queries: expected at least 1 in the last axis, got {d}")
    if weighting == "exponential":
        beta, p = fitted_beta(beta, d, radius), unit(addresses)
    else:
        table, p = table_of(*bits_and_radius(d, required(radius)), None, True), finely_unit(addresses)

    xi = queries
    for _ in range(whole("n_iters", n_iters, least=1)):
        if weighting == "exponential":
            log_w = exponential(unit(xi) @ turned(p), beta)
            reached = None
            sees = mx.array(p.shape[-2] > 0)
        else:
            log_w, reached = circles(mx.matmul(finely_unit(xi), turned(p), stream=mx.cpu), d, table)
            sees = mx.any(reached, axis=-1, keepdims=True)
        P, _ = softmax_weights(log_w)
        o = weighted_values(P, pointers, reached)
        xi = select(sees, unit(o) if unit_norm else o, xi)
    return AttentionResult(xi, P) if return_weights else xi


def exponential(cos, beta):
    """β cos less the largest of its row, so that a huge β overflows to -inf only."""
    if cos.shape[-1] == 0:
        return cos
    most = mx.finfo(mx.float32).max
    nearest = mx.stop_gradient((mx.max if beta >= 0 else mx.min)(cos, axis=-1, keepdims=True))
    return max(-most, min(most, beta)) * (cos - nearest)


def circles(cos, d, table):
    """log I (..., n, m), less the largest of its row, at the distances that cosines (float64) stand for, and whether that is above -inf."""
    with mx.stream(mx.cpu):
        d_v = mx.floor(d * (1 - cos) / 2 + 1e-9)
        unknown = mx.isnan(d_v)
        d_v = mx.where(unknown, 0, mx.clip(d_v, 0, d)).astype(mx.int32)
        log_I = mx.array(np.array(table), mx.float64)[d_v]
        log_I = mx.where(unknown, mx.array(math.nan, mx.float64), log_I)
        reached = log_I != -INF
        if log_I.shape[-1]:
            top = mx.max(log_I, axis=-1, keepdims=True)
            log_I = log_I - mx.where(top == -INF, mx.zeros_like(top), top)
        return log_I.astype(mx.float32), reached


def unit(x):
    """Vectors of length 1; zeros stay, without derivative, infinite ones are NaN."""
    if x.shape[-1] == 0:
        return x
    top = mx.stop_gradient(mx.max(mx.abs(x), axis=-1, keepdims=True))
    plain = mx.logical_or(top == 0, top == INF)
    x = mx.where(plain, 1.0, x / mx.where(plain, 1.0, top))
    return mx.where(plain, mx.where(top == 0, 0.0, math.nan), x / mx.sqrt(total(x * x, keepdims=True)))


def finely_unit(x):
    """The same in float64, a constant for derivatives."""
    with mx.stream(mx.cpu):
        x = mx.stop_gradient(x).astype(mx.float64)
        top = mx.max(mx.abs(x), axis=-1, keepdims=True)
        plain = mx.logical_or(top == 0, top == INF)
        one = mx.ones_like(top)
        x = mx.where(plain, one, x / mx.where(plain, one, top))
        special = mx.where(top == 0, mx.zeros_like(top), mx.array(math.nan, mx.float64))
        return mx.where(plain, special, x / mx.sqrt(total(x * x, keepdims=True)))
