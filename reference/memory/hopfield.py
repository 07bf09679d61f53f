"""Modern Hopfield network with continuous states: a state moves to the average of the stored patterns, weighted by a softmax.

    lse(β, s) = (1/β) log sum_i exp(β s_i),   M = max_i |y_i|
    E(ξ)  = -lse(β, Y ξ) + <ξ, ξ>/2 + (1/β) log N + M^2/2            energy
    f(ξ)  = Y^T softmax(β Y ξ)                                       one update

    J(ξ)  = β Y^T (diag(p) - p p^T) Y,  p = softmax(β Y ξ)           its Jacobian, the covariance of the patterns under p, times β

    A_s = softmax(β ξ_s Y^T),  ξ_{s+1} = A_s Y,  ξ_0 = R             retrieval, s = 0 .. K - 1
    Z   = A_K V                                                      read-out, V = Y unless a projection is given

where state R (..., n, d), stored Y (..., m, d) with the N = m patterns y_i as rows, projection V (..., m, e), weights A (..., n, m).
K updates are followed by the read-out, so that K + 1 softmaxes are taken: K = 0 is scaled dot-product attention with keys Y.

Backward, from the cotangent dZ of Z, for a fixed number K of updates: every softmax is an attention with scale β, so

    dP = G V^T,  dS = A_s * (dP - <A_s, dP>),  dξ_s = β dS Y,  dY += β dS^T ξ_s,  dV = A_s^T G      from (G, V) = (dZ, V) at s = K,
    then from (G, V) = (dξ_{s+1}, Y) at s = K - 1 .. 0, where the values are Y too and dY += A_s^T G;   dR = dξ_0

Source: Ramsauer et al., "Hopfield Networks is All You Need", arXiv:2008.02217, eqs. (1) to (3); iteration and stopping rule from the
authors' code (ml-jku/hopfield-layers, hflayers/functional.py). The energy was checked against the authors' blog, eq. (18), not against
the paper, and by its gradient, its range and its descent.

Conventions. n_iters = K is the code's update_steps_max; None or -1 goes on until convergence. Convergence is judged by the weights, not by
the states: a head stops after the softmax at which |A_s - A_{s-1}| <= tol, the Frobenius norm over its (n, m) block, the largest over the
batch. The last leading axis counts as heads (..., h, n, d) and every head stops by itself, keeping its weights; the axes before it are the
batch. tol = None never stops early. A tol near rounding (about 1e-15) may never be met, as in the authors' code. Between two numbers of
updates the result jumps. A state whose weights are NaN counts as standing still, so that it does not end the updates of others; its head
has not converged.
β is applied at every softmax. It is 1/sqrt(d) by default in the update and the retrieval, as in attention, and 1 in the energy; the
authors' code takes 1 where nothing is projected. To bring back single patterns rather than averages, β must be large against 1/Δ_i, see
`hopfield_retrieval_bound`. β = 0 gives the mean pattern, and for the energy the limit -<ξ, mean y> + <ξ, ξ>/2 + M^2/2.
A query that may see no pattern moves to 0, and its Jacobian is 0. Without any pattern the energy is <ξ, ξ>/2, whose gradient is that of
the zero update.

Identities. 0 <= E; E <= 2 M^2 in the convex hull of the patterns; grad E = ξ - f(ξ); E(f(ξ)) <= E(ξ). f(ξ) lies in the convex hull.
J is symmetric and positive semidefinite, and its trace is at most β M^2. One pattern, or equal patterns, are returned at once.
Permuting the patterns permutes the columns of A. β = 0 gives the mean, β -> infinity the pattern of the largest product with the state.

Wrong versions met elsewhere: K softmaxes instead of K + 1; stopping by the change of the states; one stopping test for all heads
together; β on the first softmax only; a per-head β tiled over the flattened head axis, so that head h does not get β_h (the authors'
code); retrieving from raw images with β = 1 or 1/sqrt(d) and expecting a stored pattern, where the fixed point is an average of many.
"""

from typing import NamedTuple

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, number, visible_keys, whole
from attnspec.reference.numerics import log1p
from attnspec.reference.softmax.scaled_dot_product import scaled_dot_product_attention_backward
from attnspec.reference.softmax.weights import attention_logits, largest, softmax_weights, weighted_values

PATTERNS = {"state": "... n d", "stored": "... m d"}
MASK = {"mask": "bool ... #n #m"}


def inverse_temperature(beta, d):
    """β, or 1/sqrt(d) where it is None."""
    if beta is None:
        return 1.0 / np.sqrt(max(d, 1))
    return number("beta", beta, least=0, finite=True)


def log_mean_exp(s, beta):
    """(1/β) log((1/N) sum_i exp(β s_i)) over the last axis; the mean of s at β = 0."""
    if beta == 0:
        return np.mean(s, axis=-1)
    top = largest(s)
    x = beta * (s - top[..., None])
    # log(mean exp) divided by a small β would magnify its rounding; log1p(mean expm1) does not, but loses the small terms of a wide x.
    narrow = np.min(x.real, axis=-1) > -1.0
    log_mean = np.where(narrow, log1p(np.mean(np.expm1(np.where(narrow[..., None], x, 0.0)), axis=-1)), np.log(np.mean(np.exp(x), axis=-1)))
    return top + log_mean / beta


@formula(
    family="memory",
    shapes={**PATTERNS, "energy": "... n"},
    equation="E(xi) = -(1/beta) log sum_i exp(beta <y_i, xi>) + <xi, xi>/2 + (1/beta) log N + M^2/2,  M = max_i |y_i|",
    latex=r"E(\xi)=-\beta^{-1}\log\sum_{i}e^{\beta\langle y_i,\xi\rangle}+\tfrac12\langle\xi,\xi\rangle+\beta^{-1}\log N"
          r"+\tfrac12\max_i|y_i|^2",
    source="arXiv:2008.02217, eqs. (1) and (2)",
    status="secondary",
    bound="hopfield energy",
    kinks="two stored patterns of the same largest norm, in the derivative by stored",
    workspace="... n m",
)
def hopfield_energy(state, stored, *, beta=1.0):
    """Energy E (..., n) of states (..., n, d) in the network of the stored patterns (..., m, d).

    beta: inverse temperature, >= 0, default 1; None stands for 1/sqrt(d), the default of `hopfield_update`; 0 gives the limit.
    Raises ValueError where shapes do not match or beta is negative or infinite, naming the argument.

    >>> hopfield_energy([[1.0, 0.0]], [[1.0, 0.0], [-1.0, 0.0]]).round(4)           # 1 - log(cosh(1))
    array([0.5662])
    """
    beta = inverse_temperature(beta, state.shape[-1])
    s = state @ np.swapaxes(stored, -1, -2)
    half = np.sum(state * state, axis=-1) / 2 + np.zeros(s.shape[:-1])
    if stored.shape[-2] == 0:
        return half
    M2 = largest(np.sum(stored * stored, axis=-1))[..., None]
    return -log_mean_exp(s, beta) + half + M2 / 2


@formula(
    family="memory",
    shapes={**PATTERNS, **MASK, "out": "... n d"},
    equation="f(xi) = softmax(beta xi Y^T) Y",
    latex=r"f(\xi)=Y^\top\operatorname{softmax}(\beta\,Y\xi)",
    source="arXiv:2008.02217, eq. (3)",
    bound="hopfield",
    workspace="... n m",
)
def hopfield_update(state, stored, *, beta=None, mask=None):
    """One update of the states (..., n, d) in the network of the stored patterns (..., m, d); returns (..., n, d).

    beta: inverse temperature, >= 0, default 1/sqrt(d).  mask: bool (..., n, m), True = this state may see this pattern.
    Raises ValueError where shapes do not match or beta is negative or infinite, naming the argument.

    >>> hopfield_update([[0.5, 0.0]], [[1.0, 0.0], [-1.0, 0.0]], beta=2.0).round(4)      # tanh(1)
    array([[0.7616, 0.    ]])
    """
    beta = inverse_temperature(beta, state.shape[-1])
    visible = visible_keys(state.shape[-2], stored.shape[-2], mask)
    A, _ = softmax_weights(attention_logits(state, stored, beta), visible)
    return weighted_values(A, stored, visible)


@formula(
    family="memory",
    shapes={**PATTERNS, **MASK, "jacobian": "... n d d"},
    equation="J = beta Y^T (diag(p) - p p^T) Y,  p = softmax(beta Y xi)",
    latex=r"J(\xi)=\beta\,Y^\top\bigl(\operatorname{diag}(p)-pp^\top\bigr)Y,\quad p=\operatorname{softmax}(\beta\,Y\xi)",
    source="arXiv:2008.02217, eq. (3), differentiated",
    status="derived",
    workspace="... n m d",
)
def hopfield_jacobian(state, stored, *, beta=None, mask=None):
    """Jacobians J (..., n, d, d) of an update at the states (..., n, d): J[..., i, a, b] is the derivative of f(ξ_i)_a by ξ_ib.

    stored: (..., m, d) the patterns.  beta: inverse temperature, >= 0, default 1/sqrt(d).
    mask: bool (..., n, m), True = this state may see this pattern.
    Raises ValueError where shapes do not match or beta is negative or infinite, naming the argument.

    >>> hopfield_jacobian([[0.0]], [[1.0], [-1.0]])                    # β times the variance of the patterns
    array([[[1.]]])
    """
    beta = inverse_temperature(beta, state.shape[-1])
    visible = visible_keys(state.shape[-2], stored.shape[-2], mask)
    p, _ = softmax_weights(attention_logits(state, stored, beta), visible)
    mean = weighted_values(p, stored, visible)
    # sum_j p_j (y_j - mean)(y_j - mean)^T, which does not cancel as the second moment less the square of the mean does
    Y = np.where(visible[..., None], stored[..., None, :, :] - mean[..., :, None, :], 0.0)
    return beta * np.swapaxes(Y, -1, -2) @ (p[..., None] * Y)


class HopfieldRetrieval(NamedTuple):
    """What a retrieval found and how it got there."""

    out: np.ndarray                  # (..., n, e) the patterns read out
    weights: np.ndarray              # (..., n, m) the last softmax
    n_iters: np.ndarray              # (h,), or () without leading axes: state updates that each head made, one less than its softmaxes
    converged: np.ndarray            # the same shape: whether the last change of the head's weights was within tol, and none is NaN


@formula(
    family="memory",
    shapes={**PATTERNS, "projection": "... m e", **MASK, "out": "... n e"},
    equation="A_s = softmax(beta xi_s Y^T),  xi_{s+1} = A_s Y,  out = A_K V",
    latex=r"A_s=\operatorname{softmax}(\beta\,\xi_s Y^\top),\quad\xi_{s+1}=A_sY,\quad Z=A_KV",
    source="arXiv:2008.02217, eq. (3); ml-jku/hopfield-layers, hflayers/functional.py",
    bound="hopfield",
    kinks="where the number of updates changes",
    workspace="... n m",
)
def hopfield_retrieve(
    state, stored, projection=None, *, beta=None, n_iters=0, tol=1e-4, mask=None, return_weights=False, return_info=False,
):
    """Patterns retrieved from the stored ones (..., m, d) by the states (..., n, d); returns (..., n, e).

    projection: (..., m, e) what is read out in place of the stored patterns.  beta: inverse temperature, >= 0, default 1/sqrt(d).
    n_iters: at most so many updates of the state before the read-out; None or -1 goes on until convergence.
    tol: a head stops where its weights changed by at most tol (Frobenius norm); None makes exactly n_iters updates.
    mask: bool (..., n, m), True = this state may see this pattern.
    return_weights: return an AttentionResult with the last weights (..., n, m).
    return_info: return a HopfieldRetrieval with the weights, the number of updates made and whether they converged, per head.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> stored = 3 * np.eye(2)
    >>> hopfield_retrieve([[1.0, 0.0]], stored, beta=1.0).round(3)
    array([[2.858, 0.142]])
    >>> hopfield_retrieve([[1.0, 0.0]], stored, beta=1.0, n_iters=None).round(3)
    array([[3., 0.]])
    """
    beta = inverse_temperature(beta, state.shape[-1])
    endless = n_iters is None or n_iters == -1
    K = np.inf if endless else whole("n_iters", n_iters)
    if tol is not None:
        tol = number("tol", tol, above=0)
    elif endless:
        raise ValueError("tol: expected a number > 0 where n_iters is None, got None")
    visible = visible_keys(state.shape[-2], stored.shape[-2], mask)

    xi = state
    A, _ = softmax_weights(attention_logits(xi, stored, beta), visible)
    heads, batch = A.shape[-3:-2], tuple(range(A.ndim - 3))
    updates, change, going = np.zeros(heads, int), np.full(heads, np.inf), np.full(heads, K > 0)
    while np.any(going):
        head_goes = going[..., None, None]
        xi = np.where(head_goes, weighted_values(A, stored, visible), xi)
        A_old, A = A, np.where(head_goes, softmax_weights(attention_logits(xi, stored, beta), visible)[0], A)
        moved = (A - A_old).real
        norm = np.sqrt(np.sum(np.where(np.isnan(moved), 0.0, moved) ** 2, axis=(-2, -1)))
        change = np.where(going, np.max(norm, axis=batch, initial=0.0), change)
        updates = updates + going
        going = going & (updates < K) & (True if tol is None else change > tol)

    out = weighted_values(A, stored if projection is None else projection, visible)
    if return_info:
        valid = ~np.any(np.isnan(A), axis=(*batch, -2, -1))
        return HopfieldRetrieval(out, A, updates, np.zeros(heads, bool) if tol is None else valid & (change <= tol))
    return AttentionResult(out, A) if return_weights else out


class HopfieldGradients(NamedTuple):
    """Cotangents of the arrays of `hopfield_retrieve`; dprojection is None where no projection was given."""

    dstate: np.ndarray
    dstored: np.ndarray
    dprojection: np.ndarray | None = None


def draw_backward(sizes, rng):
    """Without a projection, so that do is as wide as the stored patterns."""
    lead = tuple(sizes[axis] for axis in ("b", "h") if axis in sizes)
    n, m, d = (sizes[axis] for axis in "nmd")
    shapes = {"state": (n, d), "stored": (m, d), "do": (n, d)}
    return {name: rng.standard_normal(lead + shape) for name, shape in shapes.items()}


@formula(
    family="memory",
    shapes={**PATTERNS, "do": "... n e", "projection": "... m e", **MASK,
            "dstate": "... n d", "dstored": "... m d", "dprojection": "... m e"},
    equation="dS = A * (G V^T - <A, G V^T>),  dxi = beta dS Y,  dY += beta dS^T xi,  dV = A^T G, back through the updates",
    latex=r"dS=A_s\circ(GV^\top-\langle A_s,GV^\top\rangle),\quad d\xi_s=\beta\,dS\,Y,\quad dY\mathrel{+}=\beta\,dS^\top\xi_s,"
          r"\quad dV=A_s^\top G",
    source="arXiv:2008.02217, eq. (3), differentiated",
    status="derived",
    bound="hopfield gradients",
    workspace="... n m",
    draw=draw_backward,
)
def hopfield_retrieve_backward(state, stored, do, projection=None, *, beta=None, n_iters=0, mask=None):
    """Reverse-mode gradients of `hopfield_retrieve` with exactly n_iters updates (tol=None), for the cotangent do (..., n, e).

    The other parameters are those of the forward function; do has the width of the stored patterns where there is no projection.
    Returns HopfieldGradients (dstate, dstored, dprojection) with the shapes of the arrays they belong to.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> hopfield_retrieve_backward([[0.0]], [[1.0], [-1.0]], [[1.0]]).dstate       # the variance of the patterns
    array([[1.]])
    """
    beta = inverse_temperature(beta, state.shape[-1])
    values = stored if projection is None else projection
    if do.shape[-1] != values.shape[-1]:
        raise ValueError(f"do: expected shape (..., n, {values.shape[-1]}) as the output has, got {do.shape}")

    states = [state]
    for _ in range(whole("n_iters", n_iters)):
        states.append(hopfield_update(states[-1], stored, beta=beta, mask=mask))

    dxi, dstored, dvalues = scaled_dot_product_attention_backward(states.pop(), stored, values, do, scale=beta, mask=mask)[:3]
    if projection is None:
        dstored = dstored + dvalues
    for xi in reversed(states):
        dxi, dkeys, dpatterns = scaled_dot_product_attention_backward(xi, stored, stored, dxi, scale=beta, mask=mask)[:3]
        dstored = dstored + dkeys + dpatterns
    return HopfieldGradients(dxi, dstored, None if projection is None else dvalues)
