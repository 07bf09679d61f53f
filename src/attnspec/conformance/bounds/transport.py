"""Bounds of GOAT and of flow attention."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import NoBound, Precision, chain, exponent_error, weight_error
from attnspec.conformance.bounds.softmax import of_inexact_arrays, product_error
from attnspec.reference.activations import sigmoid, silu
from attnspec.reference.formula import Formula
from attnspec.reference.numerics import norm
from attnspec.reference.softmax.weights import softmax_weights
from attnspec.reference.transport.flow import clipped, features, flow, per
from attnspec.reference.transport.goat import (
    at_positions,
    frequencies,
    goat_augmented_qk,
    goat_key_prior,
    phases,
    sequence_positions,
    softplus,
)


def goat_features_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Content is divided and rounded, waves are sums of two rounded products; phases, which depend on no array, are those of float64.

    A gate sigma(x), x = bias - rate |q|, has the relative error (1 - g) dx with dx that of the two terms and of a norm.
    """
    a, u, eta = precision
    features = record.function(**call)
    q, A, B = (np.asarray(call[name], dtype=np.float64) for name in ("q", "a", "b"))
    R = A.shape[-1]
    content = q.shape[-1] - 2 * R - (call.get("u") is not None)
    amplitude = np.repeat(np.abs(A) + np.abs(B), q.shape[-3] // max(call["k"].shape[-3], 1), axis=0)[:, None, :]        # (h, 1, R)
    most = max(features.q_augmented.shape[-2], features.k_augmented.shape[-2]) + abs(call.get("key_offset", 0))
    phase = 8 * (most + abs(call.get("query_offset") or 0) + 4) * Precision.of("float64").a
    size_q, size_k = np.abs(features.q_augmented), np.abs(features.k_augmented)

    def per_feature(of_content: np.ndarray, of_waves: np.ndarray, of_u: np.ndarray) -> np.ndarray:
        waves = np.broadcast_to(of_waves, (*of_content.shape[:-1], R))
        return np.concatenate([of_content, waves, waves, of_u], axis=-1)

    dq = per_feature(2 * a * size_q[..., :content], (6 * a + phase) * amplitude, np.zeros(size_q[..., content + 2 * R :].shape))
    dk = per_feature(np.zeros(size_k[..., :content].shape), np.asarray(2 * a + phase), np.zeros(size_k[..., content + 2 * R :].shape))
    if call.get("gate_scale") is not None:
        rate, bias = (np.asarray(call[name], dtype=np.float64)[:, None, None] for name in ("gate_scale", "gate_bias"))
        x = softplus(rate) * norm(q[..., :content])
        relative = (1 - sigmoid(bias - x)) * ((chain(content) + 10) * a * x + 2 * a * (np.abs(bias) + x)) + 4 * a
        dq = dq + np.where(np.arange(q.shape[-1]) < content, 0.0, relative * size_q)
    return {"q_augmented": dq + u * size_q + eta, "k_augmented": dk + u * size_k + eta}


def key_prior_error(positions: np.ndarray, network: Mapping[str, np.ndarray], options: Mapping[str, Any], a: float) -> np.ndarray:
    """Error of goat_key_prior: the network's two products and its SiLU, of slope at most 1.1, then a sum of three terms."""
    w1, b1, w2, b2, gain, bump = (network[name] for name in ("w1", "b1", "w2", "b2", "gain", "bump"))
    M, N, j = w1.shape[-1] // 2 - 1, options.get("training_length") or max(len(positions) - 1, 1), positions
    phase, placed = phases(j, frequencies(M, options.get("absolute_base", 1e4)), options.get("grid"), options.get("cls", False))
    f = np.concatenate([placed * np.cos(phase), placed * np.sin(phase), np.stack([j / N, np.log1p(j) / np.log1p(N)], axis=-1)], axis=-1)
    x = f @ w1.T + b1
    dx = product_error(f, w1, a) + 3 * a * (np.abs(f) @ np.abs(w1).T) + a * (np.abs(b1) + np.abs(x))
    y = silu(x) @ w2 + b2
    dy = (1.1 * dx + (chain(len(w2)) + 6) * a * np.abs(silu(x))) @ np.abs(w2) + a * (np.abs(b2) + np.abs(y))
    slope = softplus(network["recency"])[:, None] if "recency" in network else np.zeros((len(gain), 1))
    terms = [np.abs(gain)[:, None] * np.abs(y), np.abs(bump)[:, None] * (j == 0), slope * j]
    return abs(options.get("prior_scale", 1.0)) * (np.abs(gain)[:, None] * dy + 9 * a * sum(terms))


FEATURES = ("a", "b", "u", "gate_scale", "gate_bias", "causal", "query_offset", "key_offset", "position_base", "grid", "cls", "enable_gqa")
PRIOR = ("prior_scale", "absolute_base", "training_length", "grid", "cls")


def goat_visible(n: int, m: int, mask: Any, call: Mapping[str, Any]) -> Any:
    """Which keys the queries see at the positions that the offsets give."""
    causal = call.get("causal", False)
    i, j = sequence_positions(n, m, causal, call.get("query_offset"), call.get("key_offset", 0))
    return at_positions(i, j, mask, causal)


def goat_heads_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Softmax attention of the augmented queries and keys, whose features carry an error, with no scale."""
    if call.get("u") is not None and not np.all(np.isfinite(call["u"])):
        raise NoBound("the bound of GOAT is derived for finite priors u")
    given = {name: call[name] for name in FEATURES if call.get(name) is not None}
    q, k = goat_augmented_qk(call["q"], call["k"], **given)
    accumulated = Precision(precision.a, precision.a, precision.eta)
    errors = goat_features_bound(goat_augmented_qk.record, {"q": call["q"], "k": call["k"], **given}, accumulated)
    options = {"scale": 1.0, "mask": goat_visible(q.shape[-2], k.shape[-2], call.get("mask"), call), "enable_gqa": True}
    return {"out": of_inexact_arrays({"q": q, "k": k, "v": np.asarray(call["v"], dtype=np.float64)},
                                     {"q": errors["q_augmented"], "k": errors["k_augmented"]}, options, precision)[1]}


def goat_layer_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Projections, the attention of the heads between them, and the keys' own prior.

    A gate moves by the relative error (1 - g) softplus(rate) |dq| at most where the query that it is of is off by dq.
    """
    a, u, eta = precision
    x = {name: np.asarray(value, dtype=np.float64) for name, value in call.items() if isinstance(value, np.ndarray)}
    causal = call.get("causal", False)
    heads, errors = {}, {}
    for name, of in (("q", "q_input"), ("k", "k_input"), ("v", "v_input")):
        w, bias = x[f"w_{name}"], x[f"b_{name}"][:, None, :]
        product = np.einsum("...nc,hdc->...hnd", x[of], w)
        heads[name] = product + bias
        errors[name] = product_error(x[of][..., None, :, :], w, a) + a * (np.abs(product) + np.abs(bias) + np.abs(heads[name]))
    network: dict[str, np.ndarray] = {name: x[name] for name in ("w1", "b1", "w2", "b2", "gain", "bump") if name in x}
    prior: dict[str, np.ndarray] = {}
    if network:
        network |= {} if x.get("recency") is None or causal is False else {"recency": x["recency"]}
        positions = call.get("key_offset", 0) + np.arange(x["k_input"].shape[-2])
        given = {name: call[name] for name in PRIOR if call.get(name) is not None}
        prior = {"u": goat_key_prior(positions, **network, **given)}
        d_prior = key_prior_error(positions, network, given, a)
    waves = {name: call[name] for name in FEATURES if call.get(name) is not None} | {"enable_gqa": True, **prior}
    features = goat_augmented_qk(heads["q"], heads["k"], **waves)
    accumulated = Precision(a, a, eta)
    of_features = goat_features_bound(goat_augmented_qk.record, {"q": heads["q"], "k": heads["k"], **waves}, accumulated)
    width = features.q_augmented.shape[-1] - 2 * x["a"].shape[-1] - ("u" in prior)
    dq, dk = (np.where(np.arange(features.q_augmented.shape[-1]) < width, errors[name], 0.0) for name in ("q", "k"))
    of_size = np.zeros(())
    if call.get("gate_scale") is not None:
        rate, bias = (x[name][:, None, None] for name in ("gate_scale", "gate_bias"))
        closed = 1 - sigmoid(bias - softplus(rate) * norm(heads["q"][..., :width]))
        of_size = np.where(np.arange(dq.shape[-1]) < width, 0.0, np.abs(features.q_augmented) * closed * softplus(rate) * norm(dq))
    dq = dq / np.sqrt(max(width, 1)) + of_size + of_features["q_augmented"]
    dk = dk + of_features["k_augmented"]
    if network:
        dk[..., -1] += d_prior
    mask = call.get("mask")
    if call.get("key_mask") is not None:
        keys = np.asarray(call["key_mask"])
        keys = keys[..., None, None, :] if keys.ndim else keys
        mask = keys if mask is None else mask & keys
    mask = goat_visible(heads["q"].shape[-2], heads["k"].shape[-2], mask, call)
    out, error = of_inexact_arrays({"q": features.q_augmented, "k": features.k_augmented, "v": heads["v"]},
                                   {"q": dq, "k": dk, "v": errors["v"]}, {"scale": 1.0, "mask": mask, "enable_gqa": True}, accumulated)
    w_o = np.abs(x["w_o"])
    h, d = w_o.shape[1:]
    total = np.einsum("...hnd,chd->...nc", np.abs(out), w_o)
    result = np.einsum("...hnd,chd->...nc", out, x["w_o"]) + x["b_o"]
    rounding = (np.sqrt(h * d) + 4) * a * total + (a + u) * (np.abs(result) + np.abs(x["b_o"])) + eta
    return {"out": np.einsum("...hnd,chd->...nc", error, w_o) + rounding}


def flow_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Every sum is one of positive terms, so that flows and with them the weights A_ij = g_i <q_i, k_j> C_j have small relative errors:

        r_I, r_O   one flow: two features of 4 a each, a sum over the other side, one over the features
        r_I + r_O  a conserved flow, whose terms are divided by flows of the other kind
        g_i        x (1 - sigma(x)) (r_I + r_O) of the sigmoid of x = I^ n/m, and r_I
        C_j        a softmax whose exponents are off by (r_I + r_O) O^ below the clip, not at all above it
    """
    a, u, eta = precision
    q, k, v = (np.asarray(call[name], dtype=np.float64) for name in ("q", "k", "v"))
    causal = record.name == "flow_attention_causal"
    options = {name: value for name, value in call.items() if name not in ("q", "k", "v", "return_weights")}
    o, A, _ = record.function(q, k, v, **options, return_weights=True)
    (n, d), m = q.shape[-2:], k.shape[-2]
    eps, flow_eps, clip = call.get("eps", 1e-6), call.get("flow_eps", 0.0), call.get("clip", 1.0)
    q, k = (features(x, call.get("feature", "sigmoid")) for x in (q, k))
    summed = functools.partial(np.cumsum, axis=-2) if causal else functools.partial(np.sum, axis=-2, keepdims=True)
    t = np.arange(1, n + 1) if causal else 1.0

    I, O = t * per(flow(q, summed(k), eps) + flow_eps), t * per(flow(k, summed(q), eps) + flow_eps)
    x = (flow(q, summed(k * O[..., None]), eps) + flow_eps) / t * (1.0 if causal else n / max(m, 1))
    out_hat = (flow(k, summed(q * I[..., None]), eps) + flow_eps) / t
    r_I, r_O = ((chain(size) + chain(d) + 16) * a for size in (m, n))
    r = r_I + r_O
    X = clipped(out_hat, clip)
    dX = np.where(out_hat * (1 - 2 * r) > X, 0.0, r * X)
    heads = call.get("competition", "sources") == "heads"
    if heads:
        X, dX = (np.swapaxes(np.broadcast_to(y, (*np.broadcast_shapes(y.shape[:-1], v.shape[:-2]), m)), -1, -2) for y in (X, dX))
    X, dX = X[..., None, :], dX[..., None, :]
    visible = np.ones(X.shape, bool)
    if causal:                                               # its sum runs along, and is multiplied where the largest changes
        visible = np.tril(np.ones((n, n), bool))
        X, dX = (np.broadcast_to(y, (*y.shape[:-2], n, n)) for y in (X, dX + 2 * chain(n) * a))
    p, _ = softmax_weights(X, visible)
    relative = weight_error(p, exponent_error(X, dX, visible, a)) / np.where(p > 0, p, 1.0)
    of_C = np.diagonal(relative, axis1=-2, axis2=-1) if causal else relative[..., 0, :]
    of_C = np.swapaxes(of_C, -1, -2) if heads else of_C
    of_g = x * (1 - sigmoid(x)) * r + r_I + 8 * a
    dA = A * np.expm1(of_g[..., None] + of_C[..., None, :] + (chain(m) + 2 * chain(d) + 16) * a)
    return {"out": dA @ np.abs(v) + chain(m) * a * (A @ np.abs(v)) + u * np.abs(o) + eta}


BOUNDS = {
    "goat features": goat_features_bound,
    "goat heads": goat_heads_bound,
    "goat layer": goat_layer_bound,
    "flow": flow_bound,
}
