"""Bounds of affine-scaled and gated attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import NoBound, Precision, chain, logits_of, summed_like
from attnspec.conformance.bounds.softmax import gradients_bound, of_inexact_arrays, product_error, softmax_bound
from attnspec.reference.affine.affine_scaled import affine_alpha
from attnspec.reference.affine.energy_gated import energy_gate, linear_energy
from attnspec.reference.affine.gated import ACTIVATIONS
from attnspec.reference.formula import Formula
from attnspec.reference.inputs import default_scale
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


def affine_gradients_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Softmax gradients for the cotangent alpha do, whose alpha errs; in dv the shifts beta too; dalpha = <do, P v - sum v / N>.

    dx and dw_a take an error of dalpha and one of the slope of phi, off by 1/10 where <w_a, x> is within its error of a kink.
    """
    a, u, eta = precision
    phi = call.get("phi", "linear_clipping")
    x, w_a, alpha_ma, do = (np.asarray(call[name], dtype=np.float64) for name in ("x", "w_a", "alpha_ma", "do"))
    logits = logits_of(call, precision)
    P, _ = softmax_weights(logits.s, logits.visible)
    z = w_a @ np.swapaxes(x, -1, -2)
    alpha = affine_alpha(x, w_a, phi=phi)[..., None]                                     # (..., h, n, 1)
    d_alpha = np.swapaxes(gate_error(x, w_a, np.swapaxes(alpha[..., 0], -1, -2), 0.25 if phi == "sigmoid" else 0.1, precision), -1, -2)
    d_alpha = d_alpha[..., None]
    found = gradients_bound(logits, P, False, {**call, "do": alpha * do}, precision)

    G, v, vT = np.abs(do), np.abs(logits.v), np.swapaxes(logits.v, -1, -2)
    scale = abs(default_scale(call.get("scale"), logits.q))
    product = do @ vT
    out = P @ logits.v
    moved = P * np.abs(product - np.sum(do * out, axis=-1, keepdims=True)) * (d_alpha + u * np.abs(alpha))
    found["dq"] = found["dq"] + scale * (moved @ np.abs(logits.k))
    found["dk"] = found["dk"] + scale * (np.swapaxes(moved, -1, -2) @ np.abs(logits.q))
    sees = np.broadcast_to(logits.visible, P.shape).astype(np.float64)
    N = np.maximum(np.sum(sees, axis=-1, keepdims=True), 1) if call.get("n_keys") == "allowed" else P.shape[-1]
    beta = (alpha_ma[:, None, None] - alpha) / N
    d_beta = (d_alpha + (u + 4 * a) * (np.abs(alpha) + np.abs(alpha_ma)[:, None, None])) / N
    back, n = np.swapaxes(sees, -1, -2), P.shape[-2]
    found["dv"] = (found["dv"] + np.swapaxes(P, -1, -2) @ ((d_alpha + u * np.abs(alpha)) * G) + back @ (d_beta * G)
                   + (chain(n) * a + 4 * u) * (back @ np.abs(beta * do)) + 2 * u * (np.swapaxes(P, -1, -2) @ (np.abs(alpha) * G)))

    sums, sizes = sees @ logits.v, sees @ v
    d_out = softmax_bound(record, {name: value for name, value in call.items() if name != "do"}, precision)["out"]
    dalpha = np.sum(do * (out - sums / N), axis=-1)
    d_dalpha = np.sum(G * (d_out + (chain(P.shape[-1]) + 4) * a * sizes / N + 2 * u * (np.abs(out) + sizes / N)), axis=-1)
    d_dalpha = d_dalpha + chain(do.shape[-1]) * a * np.sum(G * np.abs(out - sums / N), axis=-1)
    d_z = (np.sqrt(x.shape[-1]) + 3) * a * (np.abs(w_a) @ np.swapaxes(np.abs(x), -1, -2))
    value = alpha[..., 0]
    if phi == "sigmoid":
        slope = value * (1 - value)
        d_slope = 0.1 * d_z + (4 * a + 2 * u) * (slope + a)
    else:
        slope = np.where((z > -5) & (z < 5), 0.1, 0.0)
        d_slope = np.where(np.abs(np.abs(z) - 5) <= d_z + d_alpha[..., 0] * 10, 0.1, 0.0) + a * slope
    dz, d_dz = dalpha * slope, slope * d_dalpha + d_slope * (np.abs(dalpha) + d_dalpha)
    turned = np.swapaxes(dz, -1, -2), np.swapaxes(d_dz, -1, -2)
    found["dx"] = turned[1] @ np.abs(w_a) + (len(w_a) + 4) * a * (np.abs(turned[0]) @ np.abs(w_a)) + 2 * u * np.abs(turned[0] @ w_a) + eta
    found["dw_a"] = d_dz @ np.abs(x) + (chain(n) * a) * (np.abs(dz) @ np.abs(x)) + 2 * u * np.abs(dz @ x) + eta
    return summed_like(found, call)


STEEPEST = {"sigmoid": 0.25, "silu": 1.1, "identity": 1.0, "ns_sigmoid": 0.125}


def gate_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Softmax attention with a gate, whose error is the steepest slope of the activation times that of the logits.

    At G2, G3 and G4 the gated arrays carry the errors |Y| dg + u |Y'|, or dg + u |Y'| where gates are added; at G1 and G5 the result does.
    W_O is one sum over heads and features. As for sigmoid gates, dg is (u + 4 a) |g| + 2 a more for what exp, sum and quotient round.
    """
    a, u, eta = precision
    position, activation = call.get("position", "G1"), call.get("activation", "sigmoid")
    x, w = (np.asarray(call[name], dtype=np.float64) for name in ("x", "w_gate"))
    if position in ("G2", "G3") and call.get("x_keys") is not None:
        x = np.asarray(call["x_keys"], dtype=np.float64)
    z, slope = x[..., None, :, :] @ np.swapaxes(w, -1, -2), STEEPEST[activation]
    of_bias = np.zeros(())
    if call.get("b_gate") is not None:
        bias = np.asarray(call["b_gate"], dtype=np.float64)[:, None, :]
        z, of_bias = z + bias, slope * a * (np.abs(z + bias) + np.abs(bias))
    gate = ACTIVATIONS[activation](z)
    error = gate_error(x[..., None, :, :], w, gate, slope, precision) + of_bias

    def gated(Y: np.ndarray, dY: Any, g: np.ndarray, dg: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is gated, and its error."""
        if call.get("mode", "multiplicative") == "additive":
            return Y + g, dY + dg + 2 * u * np.abs(Y + g)
        return Y * g, np.abs(g) * dY + dg * np.abs(Y) + 2 * u * np.abs(Y * g)

    arrays = {name: np.asarray(call[name], dtype=np.float64) for name in ("q", "k", "v")}
    size = np.sum(np.abs(arrays["v"]), axis=-2, keepdims=True)
    errors: dict[str, np.ndarray] = {}
    name = {"G2": "v", "G3": "k", "G4": "q"}.get(position)
    options = {option: call.get(option) for option in ("scale", "mask", "causal", "enable_gqa") if call.get(option) is not None}
    if name is None:
        logits = logits_of(call, precision)
        p, _ = softmax_weights(logits.s, logits.visible)
        o, inner = weighted_values(p, logits.v, logits.visible), softmax_bound(record, call, precision)["out"]
        size = np.sum(np.abs(logits.v), axis=-2, keepdims=True)
    else:
        arrays[name], errors[name] = gated(arrays[name], 0.0, gate, error)
        o, inner = of_inexact_arrays(arrays, errors, options, precision)
        size = 0.0                                                     # counted there
    if position == "G1":
        sees = np.any(logits.visible, axis=-1, keepdims=True)
        o, inner = (np.where(sees, y, 0.0) for y in gated(o, inner, gate, error))
    inner = inner + eta * (1 + size)
    if call.get("w_o") is not None:
        w_o = np.asarray(call["w_o"], dtype=np.float64)
        b_o = np.zeros(len(w_o)) if call.get("b_o") is None else np.asarray(call["b_o"], dtype=np.float64)
        total, inner = (np.einsum("...hne,ohe->...no", np.abs(y), np.abs(w_o)) for y in (o, inner))
        o = np.einsum("...hne,ohe->...no", o, w_o) + b_o
        inner = inner + (np.sqrt(w_o[0].size) + 4) * a * total + (a + u) * (np.abs(o) + np.abs(b_o)) + eta
    if position == "G5":
        inner = gated(o, inner, gate[..., 0, :, :], error[..., 0, :, :])[1] + eta
    return {"out": inner}


def energy_gated_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Projections round in the arrays' dtype; gates, a bias log g of the keys, are taken in float64 and rounded once.

    With an error de of an energy, its normalised value z moves by (de + mean de) / std and by |z| times the relative error of std.
    Prefixes have means and deviations of their own, over which the errors are averaged and the largest is taken in the same way.
    """
    a = precision.a
    names = ("x", "w_q", "w_k", "w_v", "w_energy", "b_energy", "alpha", "tau", "mixing")
    x, w_q, w_k, w_v, w_e, b_e, alpha, tau, mixing = (np.asarray(call[name], dtype=np.float64) for name in names)
    u64 = Precision.of("float64").a
    energy = linear_energy(x, w_e, b_e)
    prefix = call.get("znorm", "sequence") == "prefix"
    gate = energy_gate(energy, alpha, tau, mixing, znorm=call.get("znorm", "sequence"), std_floor=call.get("std_floor", "clamp"))
    if gate.size and gate.min() < 1e-6:
        raise NoBound("the bound of energy gates is derived where no gate is near the floor of the normaliser")
    n = energy.shape[-1]
    de = product_error(x, w_e, u64)
    de = np.swapaxes(de, -1, -2) + 4 * u64 * np.abs(energy)
    count = np.arange(1, n + 1) if prefix else n

    def mean(y: np.ndarray) -> np.ndarray:
        return np.cumsum(y, axis=-1) / count if prefix else np.mean(y, axis=-1, keepdims=True)

    of_mean = mean(de) + (n + 4) * u64 * mean(np.abs(energy))
    largest = np.maximum.accumulate(de, axis=-1) if prefix else np.max(de, axis=-1, keepdims=True)
    deviations = [energy[..., : j + 1] - np.mean(energy[..., : j + 1], axis=-1, keepdims=True) for j in range(n)] if prefix else []
    variance = np.stack([np.mean(y**2, axis=-1) for y in deviations], axis=-1) if prefix else np.var(energy, axis=-1, keepdims=True)
    std = np.maximum(np.sqrt(variance), 1e-8)
    z = (energy - mean(energy)) / std
    dz = (de + of_mean + np.abs(z) * (largest + of_mean)) / std + (n + 8) * u64 * np.abs(z)
    d_gate = np.max(np.abs(alpha)[..., None] * (0.25 * dz), axis=-2) + 16 * u64
    values, errors = {}, {}
    for name, w in (("q", w_q), ("k", w_k), ("v", w_v)):
        values[name], errors[name] = x @ np.swapaxes(w, -1, -2), product_error(x, w, a)
    log_gate = np.log(gate)[..., None, :]
    errors["bias"] = (d_gate / gate)[..., None, :] + a * np.abs(log_gate)
    options = {"bias": log_gate, "causal": call.get("causal", True), "scale": call.get("scale")}
    return {"out": of_inexact_arrays(values, errors, options, precision)[1]}


def broadcasting_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """A mean, one chain of additions and a division, is scaled, added to the token and rounded."""
    a, u, eta = precision
    x, lam = np.asarray(call["x"], dtype=np.float64), call.get("lam")
    n = max(x.shape[-2], 1)
    mean, size = (np.sum(y, axis=-2, keepdims=True) / n for y in (x, np.abs(x)))
    error = (chain(n) + 1) * a * size
    out, error = ((x + mean) / 2, error / 2) if lam is None else (x + lam * mean, np.abs(lam) * (error + a * np.abs(mean)))
    return {"out": error + a * np.abs(out) + u * np.abs(out) + eta}


BOUNDS = {
    "broadcasting": broadcasting_bound,
    "affine gradients": affine_gradients_bound,
    "energy gated": energy_gated_bound,
    "affine": affine_bound,
    "gate": gate_bound,
}
