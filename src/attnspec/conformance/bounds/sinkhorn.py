"""Bounds of transport by Sinkhorn's half-steps: attention, plans, and the gradients of both.

Logits X = S / eps and potentials u, w in units of eps are kept in the accumulation's precision. A row step, and likewise a column step:

    Y = X + w,  L = log sum_j exp(Y),  R = exp(Y - L),  u = log mu - L
    du_i = sum_j R_ij (ds_ij + dw_j + rho_ij) + h(m) a + 2 a (|L_i| + log n + |u_i|),    rho = a (|Y| + 2 |Y - max_j Y| + 4)

and an entry of the plan is exp(X + u + w) with the relative error expm1(r), r = ds + du + dw + a (4 + |X| + |u| + |w| + log n).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from attnspec.conformance.bounds.pieces import NoBound, Precision, chain, spread, summed_like, tail, weight_error
from attnspec.reference.formula import Formula
from attnspec.reference.inputs import default_scale
from attnspec.reference.softmax.weights import weighted_values


class Problem(NamedTuple):
    """Logits X (..., n, m) with their errors, and what the half-steps need beside them."""

    X: np.ndarray              # 0 where hidden
    ds: np.ndarray
    visible: np.ndarray
    rows: int                  # among which, and among how many columns (..., 1, 1), the mass is shared
    columns: np.ndarray
    of_rows: np.ndarray        # (..., n, 1) and (..., 1, m): what a kernel may have moved from the logits into the potentials
    of_columns: np.ndarray

    def at(self, x: np.ndarray) -> np.ndarray:
        """x where it is visible, else 0."""
        return np.where(self.visible, x, 0.0)


class Step(NamedTuple):
    """The potentials after a half-step, u (..., n, 1) and w (..., 1, m), their errors, and the plan with that of its logarithm."""

    u: np.ndarray
    w: np.ndarray
    du: np.ndarray
    dw: np.ndarray
    P: np.ndarray
    r: np.ndarray


def half_steps(problem: Problem, T: int, a: float, relaxation: float = 1.0) -> list[Step]:
    """T half-steps, rows first; the columns' are relaxed in an unbalanced problem."""
    X, ds, visible = problem.X, problem.ds, problem.visible
    u, w = np.zeros((*X.shape[:-1], 1)), np.zeros((*X.shape[:-2], 1, X.shape[-1]))
    du, dw = np.zeros_like(u), np.zeros_like(w)
    steps = []
    for t in range(T):
        by_rows = t % 2 == 0
        axis, count = (-1, np.asarray(problem.rows)) if by_rows else (-2, problem.columns)
        other, moved, beside = (w, dw, problem.of_rows) if by_rows else (u, du, problem.of_columns)
        Y = np.where(visible, X + other, -np.inf)
        top = np.max(Y, axis=axis, keepdims=True, initial=-np.inf)
        reached = top > -np.inf
        top = np.where(reached, top, 0.0)
        total = np.sum(np.exp(Y - top), axis=axis, keepdims=True)
        L = top + np.log(np.where(reached, total, 1.0))
        R = np.exp(Y - top) / np.where(reached, total, 1.0)
        rho = problem.at(a * (np.abs(problem.at(Y)) + beside + 2 * np.abs(problem.at(Y) - top) + 4))
        potential = np.where(reached, -np.log(count) - L, 0.0)
        error = np.sum(R * (ds + moved + rho), axis=axis, keepdims=True)
        error += chain(X.shape[axis]) * a + 2 * a * (np.abs(L) + np.log(count) + np.abs(potential) + 2 * beside)
        error = np.where(reached, error, 0.0)
        if by_rows:
            u, du = potential, error
        else:
            w, dw = relaxation * potential, relaxation * error + (relaxation != 1) * 2 * a * np.abs(relaxation * potential)
        size = np.abs(X) + np.abs(u) + np.abs(w) + problem.of_rows + problem.of_columns
        r = ds + du + dw + a * (4 + size + np.log(problem.rows))
        steps.append(Step(u, w, du, dw, np.where(visible, np.exp(X + u + w), 0.0), problem.at(r)))
    return steps


def valid_keys(call: Mapping[str, Any], m: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys (..., 1, m) that take part, and how many share the columns' mass (..., 1, 1)."""
    given = call.get("key_mask")
    valid = np.ones((1, m), bool) if given is None else np.broadcast_to(given, np.broadcast_shapes(np.shape(given), (m,)))[..., None, :]
    count = np.sum(valid, axis=-1, keepdims=True) if call.get("key_marginal", "valid") == "valid" else np.full((1, 1), m)
    return valid, np.maximum(count, 1)


def number_of_steps(call: Mapping[str, Any]) -> int:
    if call.get("tol") is not None:
        raise NoBound("the bounds of transport are derived for a fixed number of half-steps, tol=None")
    if call.get("gradient") == "implicit":
        raise NoBound("the bounds of transport gradients are derived for half-steps that are gone through in reverse")
    return call.get("n_iters", 3)


def plan_problem(call: Mapping[str, Any], a: float) -> Problem:
    """Given scores, less the largest of their row: a difference, a division and the change of base round."""
    S = np.asarray(call["scores"], dtype=np.float64)
    if not np.all(np.isfinite(S)):
        raise NoBound("the bound of plans is derived for finite scores")
    n, m = S.shape[-2:]
    valid, columns = valid_keys(call, m)
    visible = np.broadcast_to(valid, np.broadcast_shapes(valid.shape, S.shape))
    top = np.max(np.where(visible, S, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
    X = np.where(visible, (S - np.where(top == -np.inf, 0.0, top)) / call.get("eps", 1.0), 0.0)
    none = np.zeros((1, 1))
    return Problem(X, 4 * a * np.abs(X), visible, max(n, 1), columns, none, none)


def attention_problem(call: Mapping[str, Any], a: float) -> tuple[Problem, dict[str, np.ndarray]]:
    """The scores of q and k, and the arrays q, k, v in float64; q and k around the mean of the keys where the cost is a distance.

    A squared distance sums either squared differences or, around any point, two squares and a product: none is larger than twice the sum
    of the squares.
    """
    x = {name: np.asarray(call[name], dtype=np.float64) for name in ("q", "k", "v")}
    n, d, m = *x["q"].shape[-2:], x["k"].shape[-2]
    valid, columns = valid_keys(call, m)
    x["k"], x["v"] = (np.where(np.swapaxes(valid, -1, -2), x[name], 0.0) for name in ("k", "v"))
    scale = default_scale(call.get("scale"), x["q"]) / call.get("eps", 1.0)
    if call.get("cost", "dot") == "dot":
        X = scale * (x["q"] @ np.swapaxes(x["k"], -1, -2))
        ds = (np.sqrt(d) + 3) * a * abs(scale) * (np.abs(x["q"]) @ np.abs(np.swapaxes(x["k"], -1, -2))) + a * np.abs(X)
        rows = columns_ = np.zeros((1, 1))
    else:
        seen = np.broadcast_to(np.swapaxes(valid, -1, -2), x["k"].shape)
        centre = np.sum(x["k"], axis=tuple(range(x["k"].ndim - 1))) / np.maximum(np.sum(seen, axis=tuple(range(seen.ndim - 1))), 1)
        x["q"], x["k"] = x["q"] - centre, np.where(np.swapaxes(valid, -1, -2), x["k"] - centre, 0.0)
        X = -scale * np.sum((x["q"][..., :, None, :] - x["k"][..., None, :, :]) ** 2, axis=-1)
        rows = abs(scale) * np.sum(x["q"] ** 2, axis=-1)[..., None]
        columns_ = abs(scale) * np.sum(x["k"] ** 2, axis=-1)[..., None, :]
        ds = 2 * (np.sqrt(d) + 5) * a * (rows + columns_)
    visible = np.broadcast_to(valid, np.broadcast_shapes(valid.shape, X.shape))
    return Problem(np.where(visible, X, 0.0), np.where(visible, ds, 0.0), visible, max(n, 1), columns, rows, columns_), x


def output_factor(call: Mapping[str, Any], problem: Problem) -> Any:
    """c of A = c P."""
    return {"rows": problem.rows, "cols": problem.columns, "none": 1}[call.get("output_scaling", "rows")]


def sinkhorn_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """After a row step the weights of a row are those of a softmax, and a common error of all cancels; after a column step none does."""
    a = precision.a
    T = number_of_steps(call)
    problem, x = attention_problem(call, a)
    u, _, du, _, P, r = half_steps(problem, T, a)[-1]
    c, m = output_factor(call, problem), P.shape[-1]
    A = c * P
    o = A @ x["v"]
    if T % 2:
        core = c / problem.rows * spread(weight_error(problem.rows * P, problem.at(r - du)), x["v"], o * problem.rows / c)
        log_n = np.log(problem.rows)
        core = core + np.abs(o) * (chain(m) * a + 3 * a * (np.abs(u) + problem.of_rows + log_n + np.abs(u + log_n)))
    else:
        core = (A * np.expm1(r)) @ np.abs(x["v"])
    return {"out": core + tail(A, x["v"], o, precision, chain(m))}


def plan_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """A plan of given scores, balanced or with relaxed columns; rounded once."""
    a, uo, eta = precision
    T, rho, eps = number_of_steps(call), call.get("rho", np.inf if record.name == "sinkhorn_plan" else 10.0), call.get("eps", 1.0)
    problem = plan_problem(call, a)
    P, r = half_steps(problem, T, a, 1.0 if np.isinf(rho) else rho / (rho + eps))[-1][-2:]
    return {"plan": P * np.expm1(r + chain(P.shape[-1]) * a) + uo * P + eta}


def scores_gradient(
    problem: Problem, steps: list[Step], dP: np.ndarray, edP: np.ndarray, call: Mapping[str, Any], a: float,
) -> tuple[np.ndarray, np.ndarray]:
    """dS (..., n, m) of a cotangent dP of the plan that carries an error, and its error: every weight and every sum passes on its own."""
    P, r = steps[-1][-2:]

    def product(factor: np.ndarray, error: np.ndarray, weights: np.ndarray, of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """factor * weights and its error, the weights having expm1(of)."""
        rel = np.expm1(of)
        return factor * weights, weights * (np.abs(factor) * rel + error * (1 + rel)) + 2 * a * np.abs(factor) * weights

    def summed(x: np.ndarray, error: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        rounding = chain(x.shape[axis]) * a * np.sum(np.abs(x), axis=axis, keepdims=True)
        return np.sum(x, axis=axis, keepdims=True), np.sum(error, axis=axis, keepdims=True) + rounding

    dX, error = product(np.where(P > 0, dP, 0.0), np.where(P > 0, edP, 0.0), P, r)
    (du, e_du), (dw, e_dw) = summed(dX, error, -1), summed(dX, error, -2)
    for t in reversed(range(len(steps))):
        W = steps[t].P * (problem.rows if t % 2 == 0 else problem.columns)
        moved, e_moved = product(*((du, e_du) if t % 2 == 0 else (dw, e_dw)), W, steps[t].r)
        passed, e_passed = summed(moved, e_moved, -2 if t % 2 == 0 else -1)
        if t % 2 == 0:
            dw, e_dw = dw - passed, e_dw + e_passed + a * np.abs(dw - passed)
            du, e_du = np.zeros_like(du), np.zeros_like(du)
        else:
            if call.get("gradient", "unrolled") == "detached":
                moved, e_moved, passed, e_passed = (np.zeros_like(x) for x in (moved, e_moved, passed, e_passed))
            du, e_du = du - passed, e_du + e_passed + a * np.abs(du - passed)
            dw, e_dw = np.zeros_like(dw), np.zeros_like(dw)
        dX, error = dX - moved, error + e_moved + a * np.abs(dX - moved)
    return dX, error + 2 * a * np.abs(dX)


def plan_gradient_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """The reversed half-steps, divided by eps and rounded."""
    a, u, eta = precision
    T, eps = number_of_steps(call), call.get("eps", 1.0)
    problem = plan_problem(call, a)
    dP = np.asarray(call["dplan"], dtype=np.float64)
    dX, error = scores_gradient(problem, half_steps(problem, T, a), dP, np.zeros(dP.shape), call, a)
    return summed_like({"dscores": (error + u * np.abs(dX)) / eps + eta}, call)


def gradients_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """The cotangent of the plan is a product, dq and dk are products with dS, and dv with the weights themselves."""
    a, u, eta = precision
    T = number_of_steps(call)
    problem, x = attention_problem(call, a)
    steps, c = half_steps(problem, T, a), output_factor(call, problem)
    G = np.asarray(call["do"], dtype=np.float64)
    n, e = problem.X.shape[-2], G.shape[-1]
    turned = np.swapaxes(x["v"], -1, -2)
    dX, error = scores_gradient(problem, steps, c * (G @ turned), c * (chain(e) * a + u) * (np.abs(G) @ np.abs(turned)), call, a)

    scale = default_scale(call.get("scale"), x["q"]) / call.get("eps", 1.0)
    squares = call.get("cost", "dot") != "dot"

    def gradient(A: np.ndarray, eA: np.ndarray, others: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Error of scale A others, or of 2 scale (A others - (A 1) own)."""
        if not squares:
            exact = scale * (A @ others)
            size = np.abs(others)
            inside = abs(scale) * (eA @ size + chain(A.shape[-1]) * a * (np.abs(A) @ size))
        else:
            exact = 2 * scale * (A @ others - np.sum(A, axis=-1, keepdims=True) * own)
            reach = np.sum(eA + (chain(A.shape[-1]) + 4) * a * np.abs(A), axis=-1, keepdims=True) * np.abs(own)
            inside = 2 * abs(scale) * (eA @ np.abs(others) + (chain(A.shape[-1]) + 4) * a * (np.abs(A) @ np.abs(others)) + reach)
        return inside + 2 * u * np.abs(exact) + 4 * eta * (1 + np.sum(np.abs(others), axis=-2, keepdims=True))

    A, rel = np.swapaxes(c * steps[-1].P, -1, -2), np.expm1(np.swapaxes(steps[-1].r, -1, -2))
    dv = weighted_values(A, G)
    return summed_like({
        "dq": gradient(dX, error, x["k"], x["q"]),
        "dk": gradient(np.swapaxes(dX, -1, -2), np.swapaxes(error, -1, -2), x["q"], x["k"]),
        "dv": (A * rel) @ np.abs(G) + (chain(n) + 2) * a * (A @ np.abs(G)) + 2 * u * np.abs(dv)
              + 4 * eta * (1 + np.sum(np.abs(G), axis=-2, keepdims=True)),
    }, call)


BOUNDS = {
    "sinkhorn": sinkhorn_bound,
    "sinkhorn gradients": gradients_bound,
    "transport plan": plan_bound,
    "transport plan gradient": plan_gradient_bound,
}
