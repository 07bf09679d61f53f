"""Bounds of attention over pairs of keys, exact and with a polynomial for exp, and of its gradients."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import Logits, NoBound, Precision, chain, exponent_error, spread, tail, weight_error
from attnspec.conformance.bounds.softmax import gradients_bound
from attnspec.reference.formula import Formula
from attnspec.reference.higher_order.tensor import khatri_rao, tensor_attention, visible_tuples
from attnspec.reference.higher_order.tensor_poly import MOST_FEATURES
from attnspec.reference.higher_order.two_simplicial import two_simplicial_attention
from attnspec.reference.inputs import grouped_heads, sum_to_shape
from attnspec.reference.softmax.weights import softmax_weights


def products(q: np.ndarray, k1: np.ndarray, k2: np.ndarray) -> np.ndarray:
    """sum_l q_il k1_j1,l k2_j2,l as (..., n, m1 m2)."""
    s = np.einsum("...il,...jl,...kl->...ijk", q, k1, k2)
    return s.reshape(*s.shape[:-2], -1)


def logits_error(scale: float, q: np.ndarray, k1: np.ndarray, k2: np.ndarray, precision: Precision) -> np.ndarray:
    """As of two factors (pieces.py), with one product and one rounded input more."""
    a, u, _ = precision
    return ((np.sqrt(q.shape[-1]) + 3) * a + 3 * u) * abs(scale) * products(np.abs(q), np.abs(k1), np.abs(k2))


def tensor_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Softmax over the pairs (j1, j2) of two sets of keys."""
    if call.get("k3") is not None:
        raise NoBound("no bound is derived for more than two sets of keys")
    q, k1, k2, v1, v2 = (np.asarray(call[name], dtype=np.float64) for name in ("q", "k1", "k2", "v1", "v2"))
    if call.get("enable_gqa"):
        k1, k2, v1, v2 = grouped_heads(q, k1, k2, v1, v2)
    k2, v2 = k2 + (call.get("k2_bias") or 0.0), v2 + (call.get("v2_bias") or 0.0)
    d = q.shape[-1]
    scale = call.get("scale")
    if scale is None:
        scale = 1 / np.sqrt(d) if record.name == "two_simplicial_attention" else 1 / d
    dense = two_simplicial_attention if record.name == "two_simplicial_attention" else tensor_attention
    options = {name: value for name, value in call.items() if name not in ("block", "return_lse")}
    weights = dense(**{**options, "return_weights": True}).weights

    p = weights.reshape(*weights.shape[:-2], -1)
    s = np.broadcast_to(scale * products(q, k1, k2), p.shape)
    error = logits_error(scale, q, k1, k2, precision)
    pairs = khatri_rao(v1, v2)
    o = p @ pairs
    visible = p > 0
    pE = weight_error(p, exponent_error(s, np.broadcast_to(error, p.shape), visible, precision.a))
    chains = chain(k1.shape[-2]) + chain(k2.shape[-2])
    return {"out": spread(pE, pairs, o) + tail(p, pairs, o, precision, chains, roundings=2.0)}


def tensor_gradients_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Those of softmax attention with the pairs as keys k1 ⊘ k2 and values v1 ⊘ v2; then the sums over one member of a pair.

    A chain over all pairs is no shorter than one over first keys behind one over second keys: chain(m1 m2) >= chain(m1) + chain(m2) - 4,
    of which each has 4 to spare. The gradients of a pair have the errors e, and dk1_j1 = sum_j2 dK_j1j2 ∘ k2_j2 adds a chain, a product
    and a rounding:

        sum_j2 (e_j1j2 + (chain(m2) + 1) a |dS|^T|q|_j1j2) |k2_j2| + u |dk1_j1|, also where j2 is summed before i: then |dS|^T |q| stays
    """
    a, u, eta = precision
    q, k1, k2, v1, v2, do = (np.asarray(call[name], dtype=np.float64) for name in ("q", "k1", "k2", "v1", "v2", "do"))
    n, m1, m2 = q.shape[-2], k1.shape[-2], k2.shape[-2]
    scale = 1 / max(q.shape[-1], 1) if call.get("scale") is None else call["scale"]
    seen = visible_tuples(n, (m1, m2), call.get("mask"), call.get("causal", False))
    s = scale * products(q, k1, k2)
    visible = np.broadcast_to(np.broadcast_to(seen, (*seen.shape[:-2], m1, m2)).reshape(*seen.shape[:-2], m1 * m2), s.shape)
    K, V = khatri_rao(k1, k2), khatri_rao(v1, v2)
    error = np.where(visible, logits_error(scale, q, k1, k2, precision), 0.0)
    x = Logits(np.where(visible, s, 0.0), error, visible, q, K, V)
    P, _ = softmax_weights(x.s, visible)
    of_pairs = gradients_bound(x, P, False, {**call, "do": do, "scale": scale}, precision)

    dS = P * (do @ np.swapaxes(V, -1, -2) - np.sum(do * (P @ V), axis=-1, keepdims=True))
    sizes = {"dk": np.swapaxes(np.abs(scale * dS), -1, -2) @ np.abs(q), "dv": np.swapaxes(P, -1, -2) @ np.abs(do)}

    def of_factor(name: str, other: np.ndarray, axis: int) -> np.ndarray:
        """Bound of the gradient of one factor, whose partner in a pair is `other`, along `axis` of the pairs."""
        terms = other.shape[-2]
        limit = of_pairs[name] + (chain(terms) + 1) * a * sizes[name]
        pairs = limit.reshape(*limit.shape[:-2], m1, m2, -1) * np.abs(np.expand_dims(other, -2 - axis))
        value = sizes[name].reshape(pairs.shape) * np.abs(np.expand_dims(other, -2 - axis))
        return np.sum(pairs + u * value, axis=axis - 3) + eta

    limits = {
        "dq": of_pairs["dq"], "dk1": of_factor("dk", k2, 1), "dk2": of_factor("dk", k1, 0), "dv1": of_factor("dv", v2, 1),
        "dv2": of_factor("dv", v1, 0),
    }
    return {name: sum_to_shape(limit, np.shape(call[name[1:]])) for name, limit in limits.items()}


def taylor(z: np.ndarray, degree: int, centre: float, magnitudes: bool = False) -> np.ndarray:
    """sum_s c_s z^s, or sum_s |c_s| z^s, with c_s = e^c / s! sum_{u<=g-s} (-c)^u / u! (tensor_poly.py)."""
    inverse = [1 / math.factorial(s) for s in range(degree + 1)]
    tails = np.cumsum([(-centre) ** s * inverse[s] for s in range(degree + 1)])
    c = math.exp(centre) * np.array(inverse) * tails[::-1]
    return np.polynomial.polynomial.polyval(z, np.abs(c) if magnitudes else c)


def tensor_poly_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """N / D with errors of N and D; the weights A = U1 (U2 ⊘ U3)^T are sums of monomials of either sign, so sizes are those of
    Ã = sum_s |c_s| (|scale| sum |q k1 k2|)^s, in which no two terms cancel.

    A term U1 U2 U3 takes at most g products for each factor and g more for scale, two to join the factors, and its coefficient, whose
    partial sums of (-c)^u / u! cancel by sum |c|^u / u! over their value: in float64 always, so below one rounding; each factor may
    be rounded once more to the dtype, and scale q once: r = (4 g + 4) a + 4 u. The sums over j1, j2 and the monomials add their chains,
    v1 and v2 a product each: h = (chain(m1) + chain(m2) + chain(monomials) + 2) a. With w = v1 v2:

        |dN| <= (r + h) sum Ã |w|,  |dD| <= (r + h) sum Ã,  |err| <= (|dN| + |o| |dD|) / (|D| - |dD|) + u |o| + eta (1 + sum Ã |w| / |D|)
    """
    a, u, eta = precision
    q, k1, k2, v1, v2 = (np.asarray(call[name], dtype=np.float64) for name in ("q", "k1", "k2", "v1", "v2"))
    n, m1, m2, d = q.shape[-2], k1.shape[-2], k2.shape[-2], q.shape[-1]
    g, c = call.get("degree", 8), call.get("centre", 0.0)
    rank = math.comb(d + g, g)
    if max(1, d, *(math.prod(x.shape[:-1]) for x in (q, k1, k2))) * rank > MOST_FEATURES:
        raise NoBound(f"the formula refuses {rank} monomials, C({d} + {g}, {g}), at these sizes")
    scale = 1 / max(d, 1) if call.get("scale") is None else call["scale"]
    seen = visible_tuples(n, (m1, m2), None, call.get("causal", False))
    visible = np.broadcast_to(seen, (n, m1, m2)).reshape(n, m1 * m2)
    A = np.where(visible, taylor(scale * products(q, k1, k2), g, c), 0.0)
    size = np.where(visible, taylor(abs(scale) * products(np.abs(q), np.abs(k1), np.abs(k2)), g, c, True), 0.0)
    w = khatri_rao(v1, v2)
    D = np.sum(A, axis=-1, keepdims=True)
    empty = ~np.any(visible, axis=-1, keepdims=True)
    relative = (4 * g + 4) * a + 4 * u + (chain(m1) + chain(m2) + chain(rank) + 2) * a
    dN, dD = relative * (size @ np.abs(w)), relative * np.sum(size, axis=-1, keepdims=True)
    left = np.where(empty, 1.0, np.abs(D) - dD)
    with np.errstate(divide="ignore", invalid="ignore"):
        o = np.where(empty, 0.0, (A @ w) / D)
        limit = np.where(left > 0, (dN + np.abs(o) * dD) / left + u * np.abs(o) + eta * (1 + size @ np.abs(w) / left), np.inf)
    return {"out": np.where(empty, 0.0, limit)}


BOUNDS = {
    "tensor": tensor_bound,
    "tensor gradients": tensor_gradients_bound,
    "tensor polynomial": tensor_poly_bound,
}
