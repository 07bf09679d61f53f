"""Sinkhorn's half-steps on a matrix of logits, as the reference takes them: rows and columns of exp(X) normalised in turn.

A stop by `tol` may not be a branch of Python, which would look at entries: once the rows have settled, what later half-steps find is
left unused.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from attnspec.mlx_backend.graph import INF, row_maximum, select, softmax_weights, total, turned
from attnspec.reference.inputs import number, one_of, whole
from attnspec.reference.transport.sinkhorn import SinkhornPlan

MARGINALS = ("valid", "all")


class Problem(NamedTuple):
    """Scores and marginals: mu_i = 1/rows and nu_j = 1/columns at all that is visible."""

    S: mx.array              # (..., n, m), 0 where invisible
    visible: mx.array        # (..., n, m): a valid key and a score above -inf
    rows: int
    columns: mx.array        # (..., 1)
    eps: float


class HalfStep(NamedTuple):
    """What a row or a column step leaves."""

    P: mx.array              # the plan (..., n, m)
    W: mx.array              # its rows, or columns, normalised to 1
    u: mx.array              # (..., n)
    v: mx.array              # (..., m)


def valid_keys(m: int, key_mask: mx.array | None) -> mx.array:
    """Which keys are there, (..., m)."""
    if key_mask is None:
        return mx.ones((m,), mx.bool_)
    return mx.broadcast_to(key_mask, (*key_mask.shape[:-1], m))


def transport_problem(S: mx.array, eps, key_mask=None, key_marginal="valid") -> Problem:
    """The transport problem of scores S (..., n, m) under key_mask, broadcastable to (..., m)."""
    eps = float(number("eps", eps, above=0, finite=True))
    one_of("key_marginal", key_marginal, MARGINALS)
    n, m = S.shape[-2:]
    valid = valid_keys(m, key_mask)
    visible = mx.logical_and(S != -INF, valid[..., None, :])
    columns = total(valid.astype(mx.float32), keepdims=True) if key_marginal == "valid" else mx.array([float(m)])
    return Problem(select(visible, S, 0.0), visible, max(n, 1), mx.where(columns == 0, 1.0, columns), eps)


def normalised(X: mx.array, visible: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Rows of exp(X) normalised to 1, their logarithms, and the logarithms of the sums (..., n), -inf for a row without mass."""
    top = row_maximum(X, visible)
    top = mx.where(top == -INF, 0.0, top)
    X = select(visible, X - top, 0.0)                              # before log sum exp, whose digits a large X would swallow
    W, L = softmax_weights(X, visible)
    return W, X - mx.where(L == -INF, 0.0, L)[..., None], top[..., 0] + L


def half_steps(problem: Problem, count: int, rho: float = INF):
    """The HalfStep after each of `count` row and column steps; a finite rho relaxes the column steps of an unbalanced problem."""
    S, visible, rows, columns, eps = problem
    log_mu, log_nu = -mx.log(mx.array(float(rows))), -mx.log(columns)
    relaxation = 1.0 if rho == INF else rho / (rho + eps)
    top = row_maximum(S, visible)
    top = mx.where(top == -INF, 0.0, top)
    X = select(visible, (S - top) / eps, 0.0)                      # adding a_i to a row changes no step: u takes it up at once
    u, v = 0.0 - top[..., 0], mx.zeros((*visible.shape[:-2], visible.shape[-1]))
    for t in range(count):
        if t % 2 == 0:
            W, log_W, L = normalised(X, visible)
            u = u + eps * mx.where(L == -INF, 0.0, log_mu - L)
            X, P = log_W + log_mu, W / rows
        else:
            W, log_W, L = (turned(x) if x.ndim == visible.ndim else x for x in normalised(turned(X), turned(visible)))
            v = v + eps * mx.where(L == -INF, 0.0, log_nu - L)
            excess = v / (rho + eps)                               # v / rho: how far a relaxed column stays below log nu
            v, X, P = relaxation * v, log_W + (log_nu - excess)[..., None, :], W * (mx.exp(-excess) / columns)[..., None, :]
        yield HalfStep(P, W, u, v)


def solve(problem: Problem, n_iters, tol=None, rho: float = INF) -> SinkhornPlan:
    """The plan after n_iters half-steps, or fewer where a row step changes u by less than tol; then their number is an array."""
    n_iters = whole("n_iters", n_iters, least=1)
    tol = None if tol is None else float(number("tol", tol, least=0))
    before, error, taken, done = mx.array(0.0), mx.array(0.0), n_iters, None
    kept: Any = None
    for t, step in enumerate(half_steps(problem, n_iters, rho)):
        found = (step.P, step.u, step.v)
        kept = found if done is None else tuple(select(~done, new, old) for new, old in zip(found, kept, strict=True))
        if t % 2 == 0:
            change = total(mx.abs(mx.stop_gradient(step.u - before)))
            change = mx.mean(change) if change.size else mx.array(0.0)
            error = change if done is None else mx.where(done, error, change)
            before = step.u
            if tol is not None and t + 1 < n_iters:
                settled = change < tol if done is None else mx.logical_or(done, change < tol)
                taken = mx.where(settled, t + 1, n_iters) if done is None else mx.where(mx.logical_and(settled, ~done), t + 1, taken)
                done = settled
    P, u, v = kept
    return SinkhornPlan(P, u, v, taken, error)
