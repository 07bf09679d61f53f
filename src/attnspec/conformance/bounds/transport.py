"""Bounds of GOAT and of flow attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import NoBound, Precision
from attnspec.conformance.bounds.softmax import of_inexact_arrays, product_error
from attnspec.reference.formula import Formula
from attnspec.reference.transport.goat import goat_augmented_qk, goat_key_prior


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
    "goat features": goat_features_bound,
    "goat heads": goat_heads_bound,
    "goat layer": goat_layer_bound,
    "flow": flow_bound,
}
