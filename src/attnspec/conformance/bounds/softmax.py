"""Bounds of softmax attention and of its gradients."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import (
    Logits,
    Precision,
    chain,
    exponent_error,
    logits_of,
    spread,
    summed_like,
    tail,
    weight_error,
)
from attnspec.reference.formula import Formula
from attnspec.reference.inputs import default_scale, grouped_heads
from attnspec.reference.softmax.weights import softmax_weights, weighted_values


def softmax_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """The sink enters the errors and the weights like a key whose value is 0."""
    x = logits_of(call, precision)
    sink = np.zeros(()) if record.name == "softmax_one_attention" else call.get("sink")
    sink = None if sink is None or np.all(np.asarray(sink) == -np.inf) else np.maximum(np.asarray(sink, dtype=np.float64), -1e300)
    p, _ = softmax_weights(x.s, x.visible, sink)
    o = weighted_values(p, x.v, x.visible)
    ds = exponent_error(x.s, x.error, x.visible, precision.a, sink)
    if sink is None:
        core = spread(weight_error(p, ds), x.v, o)
    else:
        z = np.broadcast_to(sink[..., None, None], (*p.shape[:-1], 1))
        top = np.max(np.where(x.visible, x.s, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
        dz = 2 * precision.u * np.abs(z) + precision.a * (4 + 2 * (np.maximum(top, z) - z))
        p_sink = np.where(z > -1e300, 1 - np.sum(p, axis=-1, keepdims=True), 0.0)
        both, d_both = np.concatenate([p, p_sink], axis=-1), np.concatenate([ds, np.where(z > -1e300, dz, 0.0)], axis=-1)
        padded = np.concatenate([x.v, np.zeros((*x.v.shape[:-2], 1, x.v.shape[-1]))], axis=-2)
        core = spread(weight_error(both, d_both), padded, o)
    return {"out": core + tail(p, x.v, o, precision, chain(p.shape[-1]))}


def of_inexact_arrays(
    arrays: Mapping[str, Any], errors: Mapping[str, np.ndarray], options: Mapping[str, Any], precision: Precision,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of q, k and v that carry errors of their own: (out, bound). errors: of q, k, v and of the bias, where there are."""
    x = logits_of({**arrays, **options}, precision)
    q, k = np.abs(x.q), np.abs(x.k)
    dq, dk, dv = (np.broadcast_to(errors.get(name, 0.0), np.shape(arrays[name])) for name in ("q", "k", "v"))
    if options.get("enable_gqa"):
        dk, dv = grouped_heads(x.q, dk, dv)
    scale = abs(default_scale(options.get("scale"), x.q))
    moved = scale * (dq @ np.swapaxes(k + dk, -1, -2) + q @ np.swapaxes(dk, -1, -2)) + errors.get("bias", 0.0)
    error = np.where(x.visible, x.error + moved, 0.0)
    p, _ = softmax_weights(x.s, x.visible)
    o = weighted_values(p, x.v, x.visible)
    ds = exponent_error(x.s, error, x.visible, precision.a)
    pE = weight_error(p, ds)
    return o, spread(pE, x.v, o) + tail(p, x.v, o, precision, chain(p.shape[-1])) + (p + pE) @ dv


def product_error(x: np.ndarray, w: np.ndarray, a: float) -> np.ndarray:
    """Error of x w^T, a sum of one chain of products."""
    return (np.sqrt(x.shape[-1]) + 3) * a * (np.abs(x) @ np.swapaxes(np.abs(w), -1, -2))


def multi_query_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Queries, keys and values carry the errors of their projections, in the accumulation's precision; one sum over heads and features."""
    a, u, eta = precision
    x, context, w_q, w_k, w_v, w_o = (np.asarray(call[name], dtype=np.float64) for name in ("x", "context", "w_q", "w_k", "w_v", "w_o"))
    arrays, errors = {}, {}
    for name, tokens, w in (("q", x, w_q), ("k", context, w_k[None]), ("v", context, w_v[None])):
        tokens, w = tokens[..., None, :, :], np.swapaxes(w, -1, -2)
        arrays[name], errors[name] = tokens @ np.swapaxes(w, -1, -2), product_error(tokens, w, a)
    options = {name: call.get(name) for name in ("scale", "mask")} | {"causal": call.get("causal", False)}
    o, error = of_inexact_arrays(arrays, errors, options, Precision(a, a, 0.0))
    back, y = np.abs(np.swapaxes(w_o, -1, -2)), np.sum(o @ np.swapaxes(w_o, -1, -2), axis=-3)
    sizes = np.sum(np.abs(o) @ back, axis=-3)
    return {"out": np.sum(error @ back, axis=-3) + chain(w_o.shape[0] * w_o.shape[-1]) * a * sizes + u * np.abs(y) + eta}


def gradients_bound(
    x: Logits, P: np.ndarray, signed: bool, call: Mapping[str, Any], precision: Precision, sink: Any = None,
) -> dict[str, np.ndarray]:
    """Bounds of the gradients for a kernel that saves the output and the log-sum-exp, and computes the weights P again from these.

    signed: whether the weights keep the signs of the logits, which may then come out wrong near 0.  sink: enters the errors and the
    weights like a key whose value is 0, as forward.  Under a softcap c the gradient by the product takes the factor 1 - t^2, t = cap / c,
    whose error is 2 |t| times that of t.
    """
    g = np.sign(x.s) if signed else np.ones(P.shape)
    a, u, eta = precision
    G = np.asarray(call["do"], dtype=np.float64)
    aG, vT = np.abs(G), np.swapaxes(x.v, -1, -2)
    n, m, e = P.shape[-2], P.shape[-1], G.shape[-1]
    size = g * x.s
    ds = exponent_error(size, x.error, x.visible, a, sink)
    z = np.broadcast_to(np.asarray(-np.inf if sink is None else sink)[..., None, None], (*P.shape[:-1], 1))
    top = np.maximum(np.max(np.where(x.visible, size, -np.inf), axis=-1, keepdims=True, initial=-np.inf), z)
    has_sink = z > -np.inf
    dz = np.where(has_sink, 2 * u * np.abs(z) + a * (4 + 2 * (top - np.where(has_sink, z, top))), 0.0)
    P_sink = np.where(has_sink, 1 - np.sum(P, axis=-1, keepdims=True), 0.0)
    top = np.where(top == -np.inf, 0.0, np.abs(top))
    of_lse = np.sum(P * ds, axis=-1, keepdims=True) + P_sink * dz + chain(m) * a + a * (top + np.abs(size))      # saved rounded
    rel = np.where(x.visible, np.expm1(ds + of_lse) + u, 0.0)
    flip = np.where(signed & x.visible & (size <= x.error), 2 * P * (1 + rel), 0.0)

    O = (g * P) @ x.v
    dP, D = g * (G @ vT), np.sum(G * O, axis=-1, keepdims=True)
    dS = g * P * (dP - D)
    Pv = P @ np.abs(x.v)
    eO = spread(P * np.expm1(ds), x.v, O, g) + P_sink * np.expm1(dz) * np.abs(O) + chain(m) * a * Pv + u * (np.abs(O) + Pv)
    eO = eO + flip @ np.abs(x.v)
    edP = (chain(e) * a + u) * (aG @ np.abs(vT))
    eD = chain(e) * a * np.sum(aG * np.abs(O), axis=-1, keepdims=True) + np.sum(aG * eO, axis=-1, keepdims=True)
    edS = P * (rel * np.abs(dP - D) + (1 + rel) * (edP + eD)) + u * np.abs(dS) + flip * (np.abs(dP) + np.abs(D))

    def product(A: np.ndarray, eA: np.ndarray, B: np.ndarray, terms: int) -> np.ndarray:
        """Error of scale A B, of which A has the errors eA, rounded to the output."""
        scale = default_scale(call.get("scale"), x.q)
        rounding = chain(terms) * a * (np.abs(A) @ np.abs(B)) + 2 * u * np.abs(A @ B)
        return abs(scale) * (eA @ np.abs(B) + rounding) + 4 * eta * (1 + np.sum(np.abs(B), axis=-2, keepdims=True))

    def turned(A: np.ndarray) -> np.ndarray:
        return np.swapaxes(A, -1, -2)

    found = {}
    if call.get("bias") is not None:
        found["dbias"] = edS + chain(n * m) * a * np.abs(dS) + 2 * u * np.abs(dS) + eta
    if sink is not None:
        found["dsink"] = np.sum(P_sink * (np.expm1(dz + np.max(of_lse, axis=-1, keepdims=True)) * np.abs(D) + (1 + chain(n) * a) * eD)
                                + (chain(n) * a + 2 * u) * P_sink * np.abs(D), axis=-2)[..., 0] + eta
    if call.get("softcap"):
        c = call["softcap"]
        t = np.where(x.visible, x.s - (0.0 if call.get("bias") is None else np.where(x.visible, call["bias"], 0.0)), 0.0) / c
        slope = 1 - t**2
        edS = edS * slope + np.abs(dS) * (2 * np.abs(t) * (x.error * slope / c + 4 * a * np.abs(t)) + 3 * a) + a * np.abs(dS)
        dS = dS * slope

    dv = turned(g * P) @ G
    e_dv = turned(P * rel + flip) @ aG + chain(n) * a * (turned(P) @ aG) + 2 * u * np.abs(dv)
    return {
        "dq": product(dS, edS, x.k, m),
        "dk": product(turned(dS), turned(edS), x.q, n),
        "dv": e_dv + 4 * eta * (1 + np.sum(aG, axis=-2, keepdims=True)),
        **found,
    }


def softmax_gradients_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Gradients of softmax attention by all its arrays."""
    x = logits_of(call, precision)
    sink = None if call.get("sink") is None else np.asarray(call["sink"], dtype=np.float64)
    P, _ = softmax_weights(x.s, x.visible, sink)
    return summed_like(gradients_bound(x, P, False, call, precision, sink), call)


def merged_partials_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """The maximum is exact; each of the two terms of l and o carries the error of its exponential, and the sum rounds."""
    a, u, eta = precision
    m1, l1, o1, m2, l2, o2 = (np.asarray(call[name], dtype=np.float64) for name in ("m1", "l1", "o1", "m2", "l2", "o2"))
    top = np.maximum(m1, m2)

    def term(top: np.ndarray, m: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Error of exp(m - top) x: the difference of the maxima rounds, then the exponential, the product and the sum."""
        below = np.where(m == -np.inf, 0.0, top - m)
        size = np.exp(np.where(m == -np.inf, -np.inf, -below))
        error = size * np.expm1(a * (4 + 2 * below))
        return (error * np.abs(x) + (2 * a + 2 * u) * size * np.abs(x)) + eta * (1 + np.abs(x))

    return {
        "m": np.zeros(top.shape),
        "l": term(top, m1, l1) + term(top, m2, l2),
        "o": term(top[..., None], m1[..., None], o1) + term(top[..., None], m2[..., None], o2),
    }


BOUNDS = {
    "multi query": multi_query_bound,
    "merged partials": merged_partials_bound,
    "softmax": softmax_bound,
    "softmax gradients": softmax_gradients_bound,
}
