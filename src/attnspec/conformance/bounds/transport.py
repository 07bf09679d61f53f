"""Bounds of attention by transport plans."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import NoBound, Precision, chain, spread, tail, weight_error
from attnspec.reference.formula import Formula
from attnspec.reference.inputs import default_scale
from attnspec.reference.softmax.weights import attention_logits


def sinkhorn_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """T half-steps on logits and potentials kept in the accumulation's precision; du and dv are the errors of the potentials."""
    a, _, _ = precision
    q, k, v = (np.asarray(call[name], dtype=np.float64) for name in ("q", "k", "v"))
    other_form = call.get("output_scaling", "rows") != "rows" or call.get("cost", "dot") != "dot"
    if other_form or call.get("tol") is not None or call.get("key_mask") is not None:
        raise NoBound("the Sinkhorn bound is derived for dot products, row scaling, all keys and a fixed number of half-steps")
    eps, T = call.get("eps", 1.0), call.get("n_iters", 3)
    n, m = q.shape[-2], k.shape[-2]
    scale = default_scale(call.get("scale"), q)
    S = attention_logits(q, k, scale) / eps
    ds = (np.sqrt(q.shape[-1]) + 3) * a * abs(scale) / eps * (np.abs(q) @ np.abs(np.swapaxes(k, -1, -2))) + a * np.abs(S)
    u, w = np.zeros((*S.shape[:-1], 1)), np.zeros((*S.shape[:-2], 1, m))
    du, dw = np.zeros_like(u), np.zeros_like(w)
    for t in range(T):
        axis, count, moved = (-1, n, dw) if t % 2 == 0 else (-2, m, du)
        X = S + (w if t % 2 == 0 else u)
        top = np.max(X, axis=axis, keepdims=True)
        L = top + np.log(np.sum(np.exp(X - top), axis=axis, keepdims=True))
        R = np.exp(X - L)
        rho = a * (np.abs(X) + 2 * np.abs(X - top) + 4)
        potential = -np.log(count) - L
        error = np.sum(R * (ds + moved + rho), axis=axis, keepdims=True)
        error += chain(X.shape[axis]) * a + 2 * a * (np.abs(L) + np.log(count) + np.abs(potential))
        if t % 2 == 0:
            u, du = potential, error
        else:
            w, dw = potential, error
    A = n * np.exp(S + u + w)
    o = A @ v
    r = ds + dw + a * (4 + np.abs(S) + np.abs(u) + np.abs(w) + np.log(n))
    if T % 2:
        core = spread(weight_error(A, r), v, o)
        core = core + np.abs(o) * (chain(m) * a + 3 * a * (np.abs(u) + np.log(n) + np.abs(u + np.log(n))))
    else:
        core = (A * np.expm1(r + du)) @ np.abs(v)
    return {"out": core + tail(A, v, o, precision, chain(m))}


BOUNDS = {
    "sinkhorn": sinkhorn_bound,
}
