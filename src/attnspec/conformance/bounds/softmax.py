"""Bounds of softmax attention and of its gradients."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import (
    Logits,
    NoBound,
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
from attnspec.reference.inputs import default_scale
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
        both, d_both = np.concatenate([p, 1 - np.sum(p, axis=-1, keepdims=True)], axis=-1), np.concatenate([ds, dz], axis=-1)
        padded = np.concatenate([x.v, np.zeros((*x.v.shape[:-2], 1, x.v.shape[-1]))], axis=-2)
        core = spread(weight_error(both, d_both), padded, o)
    return {"out": core + tail(p, x.v, o, precision, chain(p.shape[-1]))}


def gradients_bound(x: Logits, P: np.ndarray, signed: bool, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Bounds of dq, dk and dv for a kernel that saves the output and the log-sum-exp, and computes the weights P again from these.

    signed: whether the weights keep the signs of the logits, which may then come out wrong near 0.
    """
    g = np.sign(x.s) if signed else np.ones(P.shape)
    a, u, eta = precision
    G = np.asarray(call["do"], dtype=np.float64)
    aG, vT = np.abs(G), np.swapaxes(x.v, -1, -2)
    n, m, e = P.shape[-2], P.shape[-1], G.shape[-1]
    size = g * x.s
    ds = exponent_error(size, x.error, x.visible, a)
    top = np.max(np.where(x.visible, size, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(top == -np.inf, 0.0, np.abs(top))
    of_lse = np.sum(P * ds, axis=-1, keepdims=True) + chain(m) * a + a * (top + np.abs(size))      # saved rounded
    rel = np.where(x.visible, np.expm1(ds + of_lse) + u, 0.0)
    flip = np.where(signed & x.visible & (size <= x.error), 2 * P * (1 + rel), 0.0)

    O = (g * P) @ x.v
    dP, D = g * (G @ vT), np.sum(G * O, axis=-1, keepdims=True)
    dS = g * P * (dP - D)
    eO = spread(P * np.expm1(ds), x.v, O, g) + chain(m) * a * (P @ np.abs(x.v)) + u * (np.abs(O) + P @ np.abs(x.v)) + flip @ np.abs(x.v)
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

    dv = turned(g * P) @ G
    e_dv = turned(P * rel + flip) @ aG + chain(n) * a * (turned(P) @ aG) + 2 * u * np.abs(dv)
    return {
        "dq": product(dS, edS, x.k, m),
        "dk": product(turned(dS), turned(edS), x.q, n),
        "dv": e_dv + 4 * eta * (1 + np.sum(aG, axis=-2, keepdims=True)),
    }


def softmax_gradients_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Gradients of softmax attention by q, k and v."""
    if any(call.get(name) is not None for name in ("sink", "bias", "softcap")):
        raise NoBound("the bound of softmax gradients is derived without sink, bias and softcap")
    x = logits_of(call, precision)
    P, _ = softmax_weights(x.s, x.visible)
    return summed_like(gradients_bound(x, P, False, call, precision), call)


BOUNDS = {
    "softmax": softmax_bound,
    "softmax gradients": softmax_gradients_bound,
}
