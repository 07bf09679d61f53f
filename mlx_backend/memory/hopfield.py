"""Twin of reference/memory/hopfield.py as a graph: heads that have settled keep what they found while the others go on.

A graph has a known number of updates. Without one (n_iters None or -1) updates are added until all heads are seen to have settled, which
a transformation of MLX cannot see: there such a call is refused.
"""

import functools
import itertools

import mlx.core as mx

from attnspec.mlx_backend.graph import (
    INF,
    attention_logits,
    gradients_of,
    select,
    softmax_weights,
    total,
    turned,
    visible_keys,
    weighted_values,
)
from attnspec.mlx_backend.softmax import tiles
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import AttentionResult, default_scale, number, whole
from attnspec.reference.memory.hopfield import HopfieldGradients, HopfieldRetrieval


def inverse_temperature(beta, state):
    """β, or 1/sqrt(d) where it is None."""
    return float(default_scale(None, state) if beta is None else number("beta", beta, least=0, finite=True))


# --- energy and update ---------------------------------------------------------------------------------------------------------------


@twin
def hopfield_energy(state, stored, *, beta=1.0):
    """Energy E (..., n) of states (..., n, d) among stored patterns (..., m, d); the parameters are those of the reference."""
    beta = inverse_temperature(beta, state)
    s = state @ turned(stored)
    half = total(state * state) / 2 + mx.zeros(s.shape[:-1])
    if stored.shape[-2] == 0:
        return half
    M2 = mx.max(total(stored * stored), axis=-1)[..., None]
    return -log_mean_exp(s, beta) + half + M2 / 2


def log_mean_exp(s, beta):
    """(1/β) log((1/N) sum_i exp(β s_i)) over the last axis; the mean of s at β = 0."""
    N = s.shape[-1]
    if beta == 0:
        return total(s) / N
    top = mx.stop_gradient(mx.max(s, axis=-1, keepdims=True))
    x = beta * (s - top)
    # log(mean exp) divided by a small β would magnify its rounding; log1p(mean expm1) does not, but loses the small terms of a wide x.
    narrow = mx.min(x, axis=-1, keepdims=True) > -1.0
    near = mx.log1p(total(mx.expm1(mx.where(narrow, x, 0.0))) / N)
    return top[..., 0] + mx.where(narrow[..., 0], near, mx.log(total(mx.exp(x)) / N)) / beta


def weights(state, stored, beta, visible):
    return softmax_weights(attention_logits(state, stored, visible, beta), visible)[0]


@twin
def hopfield_update(state, stored, *, beta=None, mask=None):
    """One update of the states (..., n, d) among stored patterns (..., m, d); the parameters are those of the reference."""
    return recalled(state, stored, stored, inverse_temperature(beta, state), mask)


def recalled(state, stored, values, beta, mask):
    """softmax(beta state stored^T) values, by the kernel where it is taken."""
    if tiles.takes(state, stored, values):
        return tiles.attend(state, stored, values, scale=beta, mask=mask)[0]
    visible = visible_keys(state.shape[-2], stored.shape[-2], mask)
    return weighted_values(weights(state, stored, beta, visible), values, visible)


# --- retrieval -----------------------------------------------------------------------------------------------------------------------


@twin
def hopfield_retrieve(
    state, stored, projection=None, *, beta=None, n_iters=0, tol=1e-4, mask=None, return_weights=False, return_info=False,
):
    """Patterns retrieved from the stored ones (..., m, d) by states (..., n, d); the parameters are those of the reference."""
    beta = inverse_temperature(beta, state)
    endless = n_iters is None or n_iters == -1
    K = INF if endless else whole("n_iters", n_iters)
    if tol is not None:
        tol = float(number("tol", tol, above=0))
    elif endless:
        raise ValueError("tol: expected a number > 0 where n_iters is None, got None")
    if tol is None and not (return_weights or return_info):
        for _ in range(int(K)):
            state = recalled(state, stored, stored, beta, mask)
        return recalled(state, stored, stored if projection is None else projection, beta, mask)
    visible = visible_keys(state.shape[-2], stored.shape[-2], mask)

    xi, A = state, weights(state, stored, beta, visible)
    heads, batch = A.shape[-3:-2], list(range(A.ndim - 3))
    updates, change, going = mx.zeros(heads, mx.int32), mx.full(heads, INF), mx.full(heads, K > 0)
    for k in itertools.count():
        if k >= K or (endless and has_settled(going)):
            break
        head_goes = going[..., None, None]
        moved_to = weighted_values(A, stored, visible)
        xi = moved_to if tol is None else select(head_goes, moved_to, xi)
        found = weights(xi, stored, beta, visible)
        A, A_old = found if tol is None else select(head_goes, found, A), A
        if tol is not None:
            change = mx.where(going, largest_move(A, A_old, batch), change)
            updates, going = updates + going, mx.logical_and(going, change > tol) if k + 1 < K else mx.zeros(heads, mx.bool_)
        else:
            updates = updates + 1

    out = weighted_values(A, stored if projection is None else projection, visible)
    if return_info:
        valid = ~mx.any(mx.isnan(A), axis=[*batch, -2, -1])
        return HopfieldRetrieval(out, A, updates, mx.zeros(heads, mx.bool_) if tol is None else mx.logical_and(valid, change <= tol))
    return AttentionResult(out, A) if return_weights else out


def largest_move(A, A_old, batch):
    """The largest Frobenius norm (h,) of what the weights of a head moved by, over the batch; NaN stands still."""
    moved = mx.stop_gradient(A - A_old)
    moved = mx.where(mx.isnan(moved), 0.0, moved)
    norm = mx.sqrt(total(total(moved * moved)))
    if not norm.size:
        return mx.zeros(norm.shape[len(batch) :])
    return mx.max(norm, axis=batch) if batch else norm


def has_settled(going):
    """Whether no head goes on, which takes a look at the entries."""
    try:
        return not mx.any(going).item()
    except ValueError:
        raise ValueError("n_iters: expected a whole number under a transformation of MLX, which cannot see what has converged") from None


@twin
def hopfield_retrieve_backward(state, stored, do, projection=None, *, beta=None, n_iters=0, mask=None):
    """HopfieldGradients of exactly n_iters updates for the cotangent do (..., n, e); the parameters are those of the reference."""
    beta, width = inverse_temperature(beta, state), (stored if projection is None else projection).shape[-1]
    if do.shape[-1] != width:
        raise ValueError(f"do: expected shape (..., n, {width}) as the output has, got {do.shape}")
    visible = visible_keys(state.shape[-2], stored.shape[-2], mask)
    forward = functools.partial(output_of, beta, visible, whole("n_iters", n_iters))
    return HopfieldGradients(*gradients_of(forward, do, state=state, stored=stored, projection=projection).values())


def output_of(beta, visible, n_iters, state, stored, projection=None):
    """What exactly n_iters updates read out."""
    xi = state
    for _ in range(n_iters):
        xi = weighted_values(weights(xi, stored, beta, visible), stored, visible)
    return weighted_values(weights(xi, stored, beta, visible), stored if projection is None else projection, visible)
