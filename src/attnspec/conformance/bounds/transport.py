"""Bounds of attention by transport plans."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import NoBound, Precision, chain, spread, tail, weight_error
from attnspec.conformance.bounds.softmax import of_inexact_arrays, product_error
from attnspec.reference.formula import Formula
from attnspec.reference.inputs import default_scale
from attnspec.reference.softmax.weights import attention_logits
from attnspec.reference.transport.goat import goat_augmented_qk, goat_key_prior


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


def plan_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """A plan of given scores, balanced or with relaxed columns; logits less their row's largest, and potentials, kept as attention's are.

    A row step gives u and a column step v the errors of what they sum, averaged by shares, and those of the log of the sum; each entry of
    the plan is the exponential of its logit and two potentials, after a row step of a normalised row.
    """
    a, uo, eta = precision
    if call.get("tol") is not None or call.get("key_mask") is not None or call.get("rho") == np.inf:
        raise NoBound("the bound of plans is derived for all keys and a fixed number of half-steps")
    S = np.asarray(call["scores"], dtype=np.float64)
    if not np.all(np.isfinite(S)):
        raise NoBound("the bound of plans is derived for finite scores")
    eps, T, rho = call.get("eps", 1.0), call.get("n_iters", 3), call.get("rho", np.inf if record.name == "sinkhorn_plan" else 10.0)
    relaxation = 1.0 if np.isinf(rho) else rho / (rho + eps)
    n, m = S.shape[-2:]
    X = (S - np.max(S, axis=-1, keepdims=True)) / eps
    ds = 4 * a * np.abs(X)                                           # difference, division and change of base
    u, w = np.zeros((*S.shape[:-1], 1)), np.zeros((*S.shape[:-2], 1, m))
    du, dw = np.zeros_like(u), np.zeros_like(w)
    for t in range(T):
        axis, count, moved = (-1, n, dw) if t % 2 == 0 else (-2, m, du)
        Y = X + (w if t % 2 == 0 else u)
        top = np.max(Y, axis=axis, keepdims=True)
        L = top + np.log(np.sum(np.exp(Y - top), axis=axis, keepdims=True))
        R = np.exp(Y - L)
        rounding = a * (np.abs(Y) + np.abs(u) + np.abs(w) + 2 * np.abs(Y - top) + 6)
        potential = -np.log(count) - L
        error = np.sum(R * (ds + moved + rounding), axis=axis, keepdims=True)
        error += (chain(X.shape[axis]) + 4) * a + 2 * a * (np.abs(L) + np.log(count) + np.abs(potential))
        if t % 2 == 0:
            u, du = potential, error
        else:
            w, dw = relaxation * potential, relaxation * error + 2 * a * np.abs(relaxation * potential)
    P = np.exp(X + u + w)
    r = ds + dw + du + a * (8 + 2 * np.abs(X) + 2 * np.abs(u) + 2 * np.abs(w) + chain(m))
    return {"plan": P * np.expm1(r) + uo * P + eta}


def goat_features_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Every feature is computed in float64, its phase at most the position, and rounded once."""
    q, k = record.function(**call)
    most = max(q.shape[-2], k.shape[-2]) + abs(call.get("key_offset", 0)) + abs(call.get("query_offset") or 0)
    u64 = Precision.of("float64").a
    size = 1 + np.sum(np.abs(np.asarray(call["a"])) + np.abs(np.asarray(call["b"])), initial=0.0)
    inside = 8 * (most + 4) * u64
    return {"q_augmented": (precision.u + 4 * precision.a) * np.abs(q) + inside * (size + np.abs(q)) + precision.eta,
            "k_augmented": precision.u * np.abs(k) + inside * (1 + np.abs(k)) + precision.eta}


FEATURES = ("a", "b", "u", "gate_scale", "gate_bias", "causal", "query_offset", "key_offset", "position_base", "grid", "cls", "enable_gqa")


def goat_heads_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Softmax attention of the augmented queries and keys, whose features carry an error, with no scale."""
    if call.get("query_offset") is not None or call.get("key_offset", 0) or call.get("causal") in ("top-left",):
        raise NoBound("the bound of GOAT is derived where queries stand at the end of the keys")
    given = {name: call[name] for name in FEATURES if call.get(name) is not None}
    q, k = goat_augmented_qk(call["q"], call["k"], **given)
    accumulated = Precision(precision.a, precision.a, precision.eta)
    errors = goat_features_bound(goat_augmented_qk.record, {"q": call["q"], "k": call["k"], **given}, accumulated)
    options = {"scale": 1.0, "mask": call.get("mask"), "causal": call.get("causal", False), "enable_gqa": True}
    return {"out": of_inexact_arrays({"q": q, "k": k, "v": np.asarray(call["v"], dtype=np.float64)},
                                     {"q": errors["q_augmented"], "k": errors["k_augmented"]}, options, precision)[1]}


def goat_layer_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Projections, the attention of the heads between them, and the key prior in float64."""
    options = ("mask", "key_mask", "gate_scale", "query_offset", "grid", "training_length")
    if any(call.get(name) is not None for name in options) or call.get("key_offset", 0) or call.get("causal") == "top-left":
        raise NoBound("the bound of a GOAT layer is derived without masks, gates, offsets and grids")
    a, u, eta = precision
    x = {name: np.asarray(value, dtype=np.float64) for name, value in call.items() if isinstance(value, np.ndarray)}
    causal = call.get("causal", False)
    heads, errors = {}, {}
    for name, of in (("q", "q_input"), ("k", "k_input"), ("v", "v_input")):
        w, bias = x[f"w_{name}"], x[f"b_{name}"][:, None, :]
        product = np.einsum("...nc,hdc->...hnd", x[of], w)
        heads[name] = product + bias
        errors[name] = product_error(x[of][..., None, :, :], w, a) + a * (np.abs(product) + np.abs(bias) + np.abs(heads[name]))
    network = {name: x[name] for name in ("w1", "b1", "w2", "b2", "gain", "bump") if name in x}
    prior, d_prior = {}, 0.0
    if network:
        recency = x.get("recency") if causal is not False else None
        positions = np.arange(x["k_input"].shape[-2])
        prior = {"u": goat_key_prior(positions, **network, recency=recency)}
        d_prior = 1e3 * Precision.of("float64").a * (1 + np.abs(prior["u"]).max(initial=0.0)) * len(positions)
    features = goat_augmented_qk(heads["q"], heads["k"], x["a"], x["b"], **prior, causal=causal, enable_gqa=True)
    accumulated = Precision(a, a, eta)
    of_features = goat_features_bound(goat_augmented_qk.record, {
        "q": heads["q"], "k": heads["k"], "a": x["a"], "b": x["b"], **prior, "causal": causal, "enable_gqa": True}, accumulated)
    width = features.q_augmented.shape[-1] - 2 * x["a"].shape[-1] - ("u" in prior)
    dq, dk = (np.where(np.arange(features.q_augmented.shape[-1]) < width, errors[name], 0.0) for name in ("q", "k"))
    dq = dq / np.sqrt(max(width, 1)) + of_features["q_augmented"]
    dk = dk + of_features["k_augmented"] + d_prior
    out, error = of_inexact_arrays({"q": features.q_augmented, "k": features.k_augmented, "v": heads["v"]},
                                   {"q": dq, "k": dk, "v": errors["v"]}, {"scale": 1.0, "causal": causal, "enable_gqa": True}, accumulated)
    w_o = np.abs(x["w_o"])
    h, d = w_o.shape[1:]
    total = np.einsum("...hnd,chd->...nc", np.abs(out), w_o)
    result = np.einsum("...hnd,chd->...nc", out, x["w_o"]) + x["b_o"]
    rounding = (np.sqrt(h * d) + 4) * a * total + (a + u) * (np.abs(result) + np.abs(x["b_o"])) + eta
    return {"out": np.einsum("...hnd,chd->...nc", error, w_o) + rounding}


def flow_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """All flows are sums of positive terms in float64, so that weights have small relative errors; the result is rounded once."""
    arrays = {name: np.asarray(call[name], dtype=np.float64) for name in ("q", "k", "v")}
    options = {name: value for name, value in call.items() if name not in ("q", "k", "v", "return_weights")}
    out, A, _ = record.function(**arrays, **options, return_weights=True)
    n, d, m = *arrays["q"].shape[-2:], arrays["k"].shape[-2]
    clip = call.get("clip", 1.0)
    steep = 1 + 2 * (max(n, m) if clip is None else min(float(clip), max(n, m))) + max(n, 1)
    relative = 4 * (n + m + d + 16) * Precision.of("float64").a * steep
    return {"out": relative * (np.abs(A) @ np.abs(arrays["v"])) + precision.u * np.abs(out) + precision.eta}


BOUNDS = {
    "transport plan": plan_bound,
    "goat features": goat_features_bound,
    "goat heads": goat_heads_bound,
    "goat layer": goat_layer_bound,
    "flow": flow_bound,
    "sinkhorn": sinkhorn_bound,
}
