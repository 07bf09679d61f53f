"""How far a correct twin may be from the float64 reference, element by element.

A bound is computed in float64 from the twin's own, already rounded inputs. It is composed of the errors that a careful implementation
makes: rounding of the logits and of the exponentials, the additions of one tiled chain, rounding of the result. Nothing in it is set by
hand per test; changing a piece needs a derivation.

    l_ij   = ((sqrt(d) + 2) a + 2 u_in) scale sum_c |q_ic k_jc|                error of a logit
    ds_ij  = l_ij + a (4 + 2 (max_j s_ij - s_ij))                              error of an exponent
    E_ij   = expm1(ds_ij) / sum_j p_ij exp(-ds_ij)                             relative error of a weight
    |err|_i <= sum_j p_ij |v_j - o_i| E_ij + h(m) a sum_j p_ij |v_j| + u_out (|o_i| + sum_j p_ij |v_j|) + eta (1 + sum_j |v_j|)

with a the unit roundoff of the accumulation, u_in and u_out those of inputs and outputs, eta half the smallest subnormal number of the
output, h(k) = min(k, 64 + k/64) + 4 the longest chain of additions of a tiled kernel.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from attnspec.reference.activations import sigmoid
from attnspec.reference.affine.affine_scaled import affine_alpha
from attnspec.reference.formula import Formula
from attnspec.reference.higher_order.tensor import tensor_attention
from attnspec.reference.higher_order.two_simplicial import two_simplicial_attention
from attnspec.reference.inputs import default_scale, grouped_heads, sum_groups, sum_to_shape, visible_keys
from attnspec.reference.signed.cog import cog_weights
from attnspec.reference.softmax.weights import attention_logits, softmax_weights, weighted_values

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
HALF_SUBNORMAL = {"float64": 2.0**-1075, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}


class NoBound(Exception):
    """No error bound is derived for this formula, or not for these options."""


class Precision(NamedTuple):
    """Unit roundoffs of the accumulation and of the input and output dtype, and half the output's smallest subnormal number."""

    a: float
    u: float
    eta: float

    @classmethod
    def of(cls, dtype: str) -> "Precision":
        return cls(ROUNDOFF["float64" if dtype == "float64" else "float32"], ROUNDOFF[dtype], HALF_SUBNORMAL[dtype])


def chain(k: int) -> float:
    """Additions in the longest chain of a kernel that tiles sums of more than 64 terms."""
    return min(k, 64 + k / 64) + 4


def spread(errors: np.ndarray, v: np.ndarray, o: np.ndarray, sign: Any = 1.0) -> np.ndarray:
    """sum_j errors_ij |sign_ij v_j - o_i|, a feature at a time; a term without an error counts nothing, whatever v_j is."""
    sign = np.broadcast_to(sign, errors.shape)
    columns = []
    for c in range(v.shape[-1]):
        distance = np.where(errors == 0, 0.0, np.abs(sign * v[..., None, :, c] - o[..., :, None, c]))
        columns.append(np.sum(errors * distance, axis=-1))
    return np.stack(columns, axis=-1) if columns else np.zeros(o.shape)


def weight_error(p: np.ndarray, ds: np.ndarray) -> np.ndarray:
    """p_ij E_ij for weights p with exponent errors ds; 0 where p is, infinite where nothing is known of the weights."""
    total = np.sum(p * np.exp(-ds), axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p == 0, 0.0, p * (np.expm1(ds) / total))


def tail(p: np.ndarray, v: np.ndarray, o: np.ndarray, precision: Precision, chains: float, roundings: float = 1.0) -> np.ndarray:
    a, u, eta = precision
    pv = p @ np.abs(v)
    return chains * a * pv + u * (np.abs(o) + roundings * pv) + eta * (1 + np.sum(np.abs(v), axis=-2, keepdims=True))


def seen_values(v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """v (..., m, e) with zeros for what no query sees: a masked NaN bounds nothing."""
    return np.where(np.any(visible, axis=-2)[..., None], v, 0.0)


class Logits(NamedTuple):
    """Logits, their errors and what is visible, of a function of q, k, v and the usual options."""

    s: np.ndarray
    error: np.ndarray
    visible: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def logits_of(call: Mapping[str, Any], precision: Precision) -> Logits:
    a, u, _ = precision
    q, k, v = (np.asarray(call[name], dtype=np.float64) for name in ("q", "k", "v"))
    if call.get("enable_gqa"):
        k, v = grouped_heads(q, k, v)
    bias, tau = call.get("bias"), call.get("tau") or 1.0
    if call.get("log_prior") is not None:
        bias = np.asarray(call["log_prior"], dtype=np.float64)
    scale = default_scale(call.get("scale"), q) / tau
    s = attention_logits(q, k, scale, call.get("softcap"))
    error = ((np.sqrt(q.shape[-1]) + 2) * a + 2 * u) * abs(scale) * (np.abs(q) @ np.abs(np.swapaxes(k, -1, -2)))
    if call.get("softcap"):
        error = error + 4 * a * np.abs(s)
    if bias is not None:
        finite = np.where(np.isfinite(bias), np.abs(bias), 0.0)
        error = error + (a + u) * (np.abs(s) + finite)
        s = s + bias
    visible = visible_keys(q.shape[-2], k.shape[-2], call.get("mask"), call.get("causal", False), call.get("window"))
    visible = np.broadcast_to(visible & (s != -np.inf), np.broadcast_shapes(s.shape, np.shape(visible)))
    return Logits(np.where(visible, s, 0.0), np.where(visible, error, 0.0), visible, q, k, seen_values(v, visible))


def exponent_error(size: np.ndarray, error: np.ndarray, visible: np.ndarray, a: float, sink: Any = None) -> np.ndarray:
    """ds for logits of which `size` goes into exp; the largest visible one is subtracted first."""
    top = np.max(np.where(visible, size, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        top = np.maximum(top, np.asarray(sink)[..., None, None])
    return np.where(visible, error + a * (4 + 2 * (np.where(visible, top, 0.0) - size)), 0.0)


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


def signed_softmax_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """A weight whose logit is smaller than its own error may come out with either sign."""
    x = logits_of(call, precision)
    A = cog_weights(x.s, x.visible, normaliser=call.get("normaliser", "visible"))
    o = weighted_values(A, x.v, x.visible)
    g, P = np.sign(x.s), np.abs(A)
    size = np.abs(x.s)
    PE = weight_error(P, exponent_error(size, x.error, x.visible, precision.a))
    flips = np.where(size <= x.error, 2 * (P + PE), 0.0)
    return {"out": spread(PE, x.v, o, g) + flips @ np.abs(x.v) + tail(P, x.v, o, precision, chain(P.shape[-1]))}


def gate_error(x: np.ndarray, w: np.ndarray, value: np.ndarray, slope: float, precision: Precision) -> np.ndarray:
    """Error of an activation of <w, x> that is nowhere steeper than `slope`; x (..., n, c), w (..., g, c), value (..., n, g)."""
    a, u, _ = precision
    products = np.abs(x) @ np.swapaxes(np.abs(w), -1, -2)
    return slope * ((np.sqrt(x.shape[-1]) + 2) * a + u) * products + (u + 4 * a) * np.abs(value) + 2 * a


def signed_weights_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Weights of given logits: their signs are exact, and only the exponentials and their sum round."""
    p = np.asarray(call["p"], dtype=np.float64)
    visible = np.broadcast_to(True if call.get("mask") is None else call["mask"], p.shape)
    P = np.abs(cog_weights(p, visible, normaliser=call.get("normaliser", "visible")))
    size = np.where(visible, np.abs(p), 0.0)
    PE = weight_error(P, exponent_error(size, np.zeros(p.shape), visible, precision.a))
    return {"weights": PE + (chain(p.shape[-1]) * precision.a + precision.u) * P + precision.eta}


def affine_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """alpha times softmax attention, plus beta times the sum of the visible values."""
    a, u, eta = precision
    phi = call.get("phi", "linear_clipping")
    x, w_a, alpha_ma = (np.asarray(call[name], dtype=np.float64) for name in ("x", "w_a", "alpha_ma"))
    inner = softmax_bound(record, call, precision)["out"]
    logits = logits_of(call, precision)
    p, _ = softmax_weights(logits.s, logits.visible)
    o_sm = weighted_values(p, logits.v, logits.visible)
    alpha = affine_alpha(x, w_a, phi=phi)[..., None]                                     # (..., h, n, 1)
    d_alpha = np.swapaxes(gate_error(x, w_a, np.swapaxes(alpha[..., 0], -1, -2), 0.25 if phi == "sigmoid" else 0.1, precision), -1, -2)
    N = np.maximum(np.sum(logits.visible, axis=-1, keepdims=True), 1) if call.get("n_keys") == "allowed" else p.shape[-1]
    beta = (alpha_ma[:, None, None] - alpha) / N
    sees = logits.visible.astype(np.float64)
    total, total_size = sees @ logits.v, sees @ np.abs(logits.v)
    d_beta = (u + 3 * a) * np.abs(beta) + (u + a) * (np.abs(alpha_ma)[:, None, None] + np.abs(alpha)) / N
    o = alpha * o_sm + beta * total
    return {"out": np.abs(alpha) * inner + d_alpha[..., None] * np.abs(o_sm - total / N) + d_beta * np.abs(total)
            + np.abs(beta) * (chain(p.shape[-1]) * a * total_size + u * np.abs(total))
            + u * (np.abs(o) + np.abs(alpha * o_sm) + np.abs(beta * total)) + eta * (1 + total_size)}


def gate_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Softmax attention times the sigmoid of a linear gate."""
    derived = {"position": "G1", "activation": "sigmoid", "mode": "multiplicative"}
    other_kind = any(call.get(name, value) != value for name, value in derived.items())
    if other_kind or call.get("b_gate") is not None or call.get("w_o") is not None:
        raise NoBound("the bound of gates is derived for multiplicative sigmoid gates without bias at G1")
    _, u, eta = precision
    x, w = (np.asarray(call[name], dtype=np.float64) for name in ("x", "w_gate"))
    inner = softmax_bound(record, call, precision)["out"]
    logits = logits_of(call, precision)
    p, _ = softmax_weights(logits.s, logits.visible)
    o_sm = weighted_values(p, logits.v, logits.visible)
    gate = sigmoid(x[..., None, :, :] @ np.swapaxes(w, -1, -2))
    o = gate * o_sm
    error = gate_error(x[..., None, :, :], w, gate, 0.25, precision)
    return {"out": gate * inner + error * np.abs(o_sm) + 2 * u * np.abs(o) + eta * (1 + np.sum(np.abs(logits.v), axis=-2, keepdims=True))}


def tensor_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Softmax over the pairs (j1, j2) of two sets of keys."""
    if call.get("k3") is not None:
        raise NoBound("no bound is derived for more than two sets of keys")
    a, u, _ = precision
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

    def products(q, k1, k2):
        s = np.einsum("...il,...jl,...kl->...ijk", q, k1, k2)
        return s.reshape(*s.shape[:-2], -1)

    p = weights.reshape(*weights.shape[:-2], -1)
    s = np.broadcast_to(scale * products(q, k1, k2), p.shape)
    error = ((np.sqrt(d) + 3) * a + 3 * u) * abs(scale) * products(np.abs(q), np.abs(k1), np.abs(k2))
    pairs = (v1[..., :, None, :] * v2[..., None, :, :]).reshape(*np.broadcast_shapes(v1.shape[:-2], v2.shape[:-2]), -1, v1.shape[-1])
    o = p @ pairs
    visible = p > 0
    pE = weight_error(p, exponent_error(s, np.broadcast_to(error, p.shape), visible, a))
    chains = chain(k1.shape[-2]) + chain(k2.shape[-2])
    return {"out": spread(pE, pairs, o) + tail(p, pairs, o, precision, chains, roundings=2.0)}


def hopfield_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """A fixed number of updates whose state is kept in the accumulation's precision; J carries an update's error through the next."""
    if record.name == "hopfield_retrieve" and call.get("n_iters", 0) != 0 and call.get("tol", 1e-4) is not None:
        raise NoBound("the bound of Hopfield retrieval is derived for a fixed number of updates, tol=None")
    a, u, eta = precision
    x, y = (np.asarray(call[name], dtype=np.float64) for name in ("state", "stored"))
    values = y if call.get("projection") is None else np.asarray(call["projection"], dtype=np.float64)
    beta = 1 / np.sqrt(y.shape[-1]) if call.get("beta") is None else call["beta"]
    mask = call.get("mask")
    visible = np.broadcast_to(True if mask is None else mask, (*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2]))
    updates = call.get("n_iters", 0) if record.name == "hopfield_retrieve" else 0
    error = np.zeros(np.broadcast_shapes(x.shape, (*visible.shape[:-1], x.shape[-1])))
    for step in range(updates + 1):
        target = values if step == updates else y
        s = beta * (x @ np.swapaxes(y, -1, -2))
        p, _ = softmax_weights(s, visible)
        o = p @ target
        logit_error = (np.sqrt(y.shape[-1]) + 2) * a * abs(beta) * (np.abs(x) @ np.abs(np.swapaxes(y, -1, -2)))
        pE = weight_error(p, exponent_error(s, logit_error, visible, a))
        pv = p @ np.abs(target)
        deviation = target[..., None, :, :] - o[..., :, None, :]
        centred = y[..., None, :, :] - (p @ y)[..., :, None, :]
        J = beta * np.einsum("...ij,...ijc,...ijk->...ick", p, deviation, centred)
        carried = np.einsum("...ick,...ik->...ic", np.abs(J), error)
        error = spread(pE, target, o) + chain(y.shape[-2]) * a * pv + a * (np.abs(o) + pv) + carried
        x = o
    return {"out": error + u * np.abs(x) + eta * (1 + np.sum(np.abs(values), axis=-2, keepdims=True))}


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


def summed_like(gradients: dict[str, np.ndarray], call: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Bounds of gradients that are summed over the heads of a group and over broadcast axes."""
    for name, limit in gradients.items():
        shape = np.shape(call[name[1:]])
        if call.get("enable_gqa") and name != "dq":
            limit = sum_groups(limit, shape[-3])
        gradients[name] = sum_to_shape(limit, shape)
    return gradients


def softmax_gradients_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Gradients of softmax attention by q, k and v."""
    if any(call.get(name) is not None for name in ("sink", "bias", "softcap")):
        raise NoBound("the bound of softmax gradients is derived without sink, bias and softcap")
    x = logits_of(call, precision)
    P, _ = softmax_weights(x.s, x.visible)
    return summed_like(gradients_bound(x, P, False, call, precision), call)


def signed_softmax_gradients_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Gradients of Cog attention by q, k and v, where no logit lies within its own error of 0 the same as softmax's."""
    x = logits_of(call, precision)
    return summed_like(gradients_bound(x, np.abs(cog_weights(x.s, x.visible)), True, call, precision), call)


BOUNDS: dict[str, Callable[[Formula, Mapping[str, Any], Precision], dict[str, np.ndarray]]] = {
    "softmax": softmax_bound,
    "signed softmax": signed_softmax_bound,
    "signed weights": signed_weights_bound,
    "affine": affine_bound,
    "gate": gate_bound,
    "tensor": tensor_bound,
    "hopfield": hopfield_bound,
    "sinkhorn": sinkhorn_bound,
    "softmax gradients": softmax_gradients_bound,
    "signed softmax gradients": signed_softmax_gradients_bound,
}


def bound(record: Formula, arrays: Mapping[str, Any], options: Mapping[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Bounds on |twin - reference| for the outputs of one call, by name.

    Raises NoBound where no bound is derived for the formula or for these options.
    """
    if record.bound not in BOUNDS:
        raise NoBound(f"no error bound is derived for {record.name} yet")
    with np.errstate(over="ignore", invalid="ignore"):                 # exp of a hopeless error: the bound is then infinite
        return BOUNDS[record.bound](record, {**arrays, **options}, Precision.of(dtype))
