"""Bounds of affine-scaled and gated attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import NoBound, Precision, chain, logits_of
from attnspec.conformance.bounds.softmax import of_inexact_arrays, product_error, softmax_bound
from attnspec.reference.activations import sigmoid
from attnspec.reference.affine.affine_scaled import affine_alpha
from attnspec.reference.affine.energy_gated import energy_gate, linear_energy
from attnspec.reference.formula import Formula
from attnspec.reference.softmax.weights import softmax_weights, weighted_values


def gate_error(x: np.ndarray, w: np.ndarray, value: np.ndarray, slope: float, precision: Precision) -> np.ndarray:
    """Error of an activation of <w, x> that is nowhere steeper than `slope`; x (..., n, c), w (..., g, c), value (..., n, g)."""
    a, u, _ = precision
    products = np.abs(x) @ np.swapaxes(np.abs(w), -1, -2)
    return slope * ((np.sqrt(x.shape[-1]) + 2) * a + u) * products + (u + 4 * a) * np.abs(value) + 2 * a


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


def energy_gated_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Projections round in the arrays' dtype; gates, a bias log g of the keys, are taken in float64 and rounded once.

    With an error de of an energy, its normalised value z moves by (de + mean de) / std and by |z| times the relative error of std.
    """
    a = precision.a
    names = ("x", "w_q", "w_k", "w_v", "w_energy", "b_energy", "alpha", "tau", "mixing")
    x, w_q, w_k, w_v, w_e, b_e, alpha, tau, mixing = (np.asarray(call[name], dtype=np.float64) for name in names)
    if call.get("znorm", "sequence") != "sequence":
        raise NoBound("the bound of energy gates is derived for statistics over the whole sequence")
    u64 = Precision.of("float64").a
    energy = linear_energy(x, w_e, b_e)
    gate = energy_gate(energy, alpha, tau, mixing, std_floor=call.get("std_floor", "clamp"))
    if gate.size and gate.min() < 1e-6:
        raise NoBound("the bound of energy gates is derived where no gate is near the floor of the normaliser")
    n = energy.shape[-1]
    de = product_error(x, w_e, u64)
    de = np.swapaxes(de, -1, -2) + 4 * u64 * np.abs(energy)
    de = de + np.mean(de, axis=-1, keepdims=True) + (n + 4) * u64 * np.mean(np.abs(energy), axis=-1, keepdims=True)
    std = np.maximum(np.std(energy, axis=-1, keepdims=True), 1e-8)
    z = (energy - np.mean(energy, axis=-1, keepdims=True)) / std
    dz = (de + np.abs(z) * np.max(de, axis=-1, keepdims=True)) / std + (n + 8) * u64 * np.abs(z)
    d_gate = np.max(np.abs(alpha)[..., None] * (0.25 * dz), axis=-2) + 16 * u64
    values, errors = {}, {}
    for name, w in (("q", w_q), ("k", w_k), ("v", w_v)):
        values[name], errors[name] = x @ np.swapaxes(w, -1, -2), product_error(x, w, a)
    log_gate = np.log(gate)[..., None, :]
    errors["bias"] = (d_gate / gate)[..., None, :] + a * np.abs(log_gate)
    options = {"bias": log_gate, "causal": call.get("causal", True), "scale": call.get("scale")}
    return {"out": of_inexact_arrays(values, errors, options, precision)[1]}


BOUNDS = {
    "energy gated": energy_gated_bound,
    "affine": affine_bound,
    "gate": gate_bound,
}
