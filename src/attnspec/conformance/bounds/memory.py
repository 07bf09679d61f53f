"""Bounds of associative memories."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import (
    NoBound,
    Precision,
    chain,
    exponent_error,
    logits_of,
    seen_values,
    spread,
    tail,
    weight_error,
)
from attnspec.conformance.bounds.softmax import gradients_bound
from attnspec.reference.formula import Formula
from attnspec.reference.inputs import sum_to_shape
from attnspec.reference.memory.sdm import fitted_beta
from attnspec.reference.memory.sdm_attention import log_cap, log_circle
from attnspec.reference.numerics import norm, unit
from attnspec.reference.softmax.weights import softmax_weights, weighted_values


def retrieved(x: np.ndarray, y: np.ndarray, values: np.ndarray, beta: float, visible: np.ndarray, updates: int, a: float) -> list[Any]:
    """The states before each softmax, and what is read out last, with their errors; J carries an update's error through the next."""
    error = np.zeros(np.broadcast_shapes(x.shape, (*visible.shape[:-1], x.shape[-1])))
    passed = [(x, error)]
    for step in range(updates + 1):
        target = values if step == updates else y
        s = beta * (x @ np.swapaxes(y, -1, -2))
        p, _ = softmax_weights(s, visible)
        o = p @ target
        logit_error = (np.sqrt(y.shape[-1]) + 2) * a * abs(beta) * (np.abs(x) @ np.abs(np.swapaxes(y, -1, -2)))
        pE = weight_error(p, exponent_error(s, logit_error, visible, a))
        pv = p @ np.abs(target)
        carried = np.einsum("...ick,...ik->...ic", np.abs(jacobian(p, target, o, y, beta)), error)
        error = spread(pE, target, o) + chain(y.shape[-2]) * a * pv + a * (np.abs(o) + pv) + carried
        x = o
        passed.append((x, error))
    return passed


def jacobian(p: np.ndarray, target: np.ndarray, o: np.ndarray, y: np.ndarray, beta: float) -> np.ndarray:
    """beta sum_j p_ij (v_j - o_i) (y_j - mean_i)^T, the derivative of o_i = sum_j p_ij v_j by the state."""
    centred = y[..., None, :, :] - (p @ y)[..., :, None, :]
    return beta * np.einsum("...ij,...ijc,...ijk->...ick", p, target[..., None, :, :] - o[..., :, None, :], centred)


def all_visible(call: Mapping[str, Any], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    shape = (*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2])
    return np.broadcast_to(True if call.get("mask") is None else call["mask"], shape)


def hopfield_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """A fixed number of updates whose state is kept in the accumulation's precision."""
    if record.name == "hopfield_retrieve" and call.get("n_iters", 0) != 0 and call.get("tol", 1e-4) is not None:
        raise NoBound("the bound of Hopfield retrieval is derived for a fixed number of updates, tol=None")
    a, u, eta = precision
    x, y = (np.asarray(call[name], dtype=np.float64) for name in ("state", "stored"))
    values = y if call.get("projection") is None else np.asarray(call["projection"], dtype=np.float64)
    beta = 1 / np.sqrt(y.shape[-1]) if call.get("beta") is None else call["beta"]
    updates = call.get("n_iters", 0) if record.name == "hopfield_retrieve" else 0
    out, error = retrieved(x, y, values, beta, all_visible(call, x, y), updates, a)[-1]
    return {"out": error + u * np.abs(out) + eta * (1 + np.sum(np.abs(values), axis=-2, keepdims=True))}


def energy_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """An error of a product moves the log of the mean by the share that its pattern has; squares and sums round, the result is rounded."""
    a, u, eta = precision
    x, y = (np.asarray(call[name], dtype=np.float64) for name in ("state", "stored"))
    m, d = y.shape[-2:]
    beta = 1 / np.sqrt(d) if call.get("beta", 1.0) is None else call.get("beta", 1.0)
    s = x @ np.swapaxes(y, -1, -2)
    p, _ = softmax_weights(beta * s)
    error = (np.sqrt(d) + 2) * a * (np.abs(x) @ np.abs(np.swapaxes(y, -1, -2)))
    moved = np.sum(p * (np.expm1(beta * error) / beta if beta > 0 else error), axis=-1)
    top = np.max(s, axis=-1)
    below = beta * (s - top[..., None])
    mean = np.mean(np.exp(below), axis=-1)
    if beta > 0:                                                     # the mean's error, through the logarithm
        rounding = (chain(m) + 4) * a * np.mean(np.where(below > -1, np.abs(np.expm1(below)), 1.0), axis=-1) / mean / beta
        rounding += a * np.mean((4 - 2 * below) * np.exp(below) * (below < 0), axis=-1) / mean / beta
        log_mean = top + np.log(mean) / beta
    else:
        log_mean = np.mean(s, axis=-1)
        rounding = (chain(m) + 4) * a * np.mean(np.abs(s - top[..., None]), axis=-1)
    half, most = np.sum(x**2, axis=-1) / 2, np.max(np.sum(y**2, axis=-1), axis=-1)[..., None] / 2
    size = np.abs(top) + np.abs(log_mean - top) + half + most
    return {"energy": moved + rounding + (chain(d) + 4) * a * size + u * np.abs(half + most - log_mean) + eta}


def hopfield_gradients_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Every softmax is an attention with keys Y, whose states and cotangents come with errors e and dG; these are carried to first order:

    logits   beta sum_c e_ic |y_jc - mean_ic|, as what all the logits of a row have in common moves no weight
    dS       P_ij sum_c dG_ic |v_jc - o_ic|, in beta dS^T x_i, which moves by beta |dS|^T e_i too
    dstate   sum_c |J_ick| dG_ic, with J as forward;   dv = P^T G by P^T dG
    """
    a, projected, updates = precision.a, call.get("projection") is not None, call.get("n_iters", 0)
    state, y, G = (np.asarray(call[name], dtype=np.float64) for name in ("state", "stored", "do"))
    values = np.asarray(call["projection"], dtype=np.float64) if projected else y
    beta = 1 / np.sqrt(y.shape[-1]) if call.get("beta") is None else call["beta"]
    passed = retrieved(state, y, values, beta, all_visible(call, state, y), updates, a)
    dG, found, sizes, parts = np.zeros(G.shape), {}, [], []
    for step in range(updates, -1, -1):
        x_i, e = passed[step]
        v = values if step == updates else y
        attention = {"q": x_i, "k": y, "v": v, "do": G, "scale": beta, "mask": call.get("mask")}
        x = logits_of(attention, precision)
        P, _ = softmax_weights(x.s, x.visible)
        o, mean = P @ x.v, P @ y
        moved = np.where(x.visible, abs(beta) * spread_columns(e, y, mean), 0.0)
        of = gradients_bound(x._replace(error=x.error + moved, q=np.copysign(np.abs(x_i) + e, x_i)), P, False, attention, precision)
        dS, e_dS = P * (G @ np.swapaxes(x.v, -1, -2) - np.sum(G * o, axis=-1, keepdims=True)), P * spread_columns(dG, x.v, o)
        dS, e_dS, PT = np.swapaxes(dS, -1, -2), np.swapaxes(e_dS, -1, -2), np.swapaxes(P, -1, -2)
        of["dk"] = of["dk"] + abs(beta) * ((1 + 2 * precision.u) * (np.abs(dS) @ e) + e_dS @ (np.abs(x_i) + e))
        of["dv"] = of["dv"] + PT @ dG
        dx, dk, dv = beta * (np.swapaxes(dS, -1, -2) @ y), beta * (dS @ x_i), PT @ G
        dG = of["dq"] + np.einsum("...ick,...ic->...ik", np.abs(jacobian(P, x.v, o, y, beta)), dG)
        if projected and step == updates:
            found["dprojection"] = sum_to_shape(of["dv"], np.shape(call["projection"]))
            of["dv"], dv = np.zeros(1), np.zeros(1)
        parts.append(sum_to_shape(of["dk"] + of["dv"], y.shape))
        sizes.append(sum_to_shape(dk + dv, y.shape))
        G = dx
    rounds = a * sum(np.abs(part) for part in np.cumsum(sizes, axis=0)[1 if projected else 0 :])       # as the terms are added one by one
    return {"dstate": sum_to_shape(dG, state.shape), "dstored": sum(parts) + rounds, **found}


def spread_columns(errors: np.ndarray, v: np.ndarray, o: np.ndarray) -> np.ndarray:
    """sum_c errors_ic |v_jc - o_ic|, (..., n, m)."""
    return np.einsum("...ic,...ijc->...ij", errors, np.abs(v[..., None, :, :] - o[..., :, None, :]))


def sdm_attention_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Weights never fall where cosines rise (or never rise, beta < 0), so those at cos - dcos and cos + dcos enclose a twin's.

    dcos_ij    = (2 sqrt(d) + 8) a_cos sum_c |x_ic p_jc| + the way that unit(xi) may have turned,    x, p unit vectors
    w+-_ij     = w(cos +- dcos) exp(+- ds_ij)
    |err|_i   <= sum_j max(w+ - w, w - w-)_ij |q_j - o_i| / sum_j w-_ij + tail

    dcos: the product's (sqrt(d) + 2) a and, for each of two norms, half of that for the sum, then root, quotient and rounding. ds: the
    logarithms are rounded, and of caps (d - 2)/2 log rho, rho having the errors of three sines, four times that power; then as everywhere.
    a_cos is that of float64 where weights are no smooth function of the cosine: a rounding to float32 would move Hamming distances by a
    bit. A vector turns by at most 2 |e| / (2 |xi| - |e|) under an error e. Where it is open whether a query reaches anything, no bound is.
    """
    a, u, eta = precision
    weighting, radius = call.get("weighting", "circle"), call.get("radius")
    fine = a if weighting == "exponential" else Precision.of("float64").a
    x, addresses, v = (np.asarray(call[name], dtype=np.float64) for name in ("queries", "addresses", "pointers"))
    d, m, p, steps = x.shape[-1], v.shape[-2], unit(addresses), call.get("n_iters", 1)
    beta = fitted_beta(call.get("beta"), d, radius) if weighting == "exponential" else 0.0

    def log_weights(cos: np.ndarray) -> np.ndarray:
        if weighting == "circle":
            return log_circle(cos, d, radius)
        return beta * cos if weighting == "exponential" else log_cap(np.clip(cos, -1, 1), d, radius, call.get("resolution"))

    def turned(size: np.ndarray, error: np.ndarray) -> np.ndarray:
        """How far unit vectors may be from those of vectors of this size without the error."""
        return np.where(error < size, 2 * error / np.where(error < size, 2 * size - error, 1.0), np.where(error > 0, 2.0, 0.0))

    error = np.zeros(x.shape)
    for step in range(steps):
        last = u if step == steps - 1 else a
        x_hat = unit(x)
        cos = x_hat @ np.swapaxes(p, -1, -2)
        turn = turned(norm(x), norm(error))
        dcos = (2 * np.sqrt(d) + 8) * fine * (np.abs(x_hat) @ np.abs(np.swapaxes(p, -1, -2))) + turn
        log_w, ends = log_weights(cos), (log_weights(cos - dcos), log_weights(cos + dcos))
        low, high = np.minimum(*ends), np.maximum(*ends)
        top = np.max(log_w, axis=-1, keepdims=True, initial=-np.inf)
        top = np.where(top == -np.inf, 0.0, top)
        finite = np.where(high == -np.inf, 0.0, np.where(log_w == -np.inf, high, log_w))
        ds = a * (4 + 2 * np.maximum(top - finite, 0.0))
        if weighting != "exponential":
            ds = ds + fine * (3 * np.abs(finite) + (4 * d if weighting == "cap" else 0))
        w, w_low, w_high = np.exp(log_w - top), np.exp(low - top - ds), np.exp(high - top + ds)
        P, _ = softmax_weights(log_w)
        seen = seen_values(v, high > -np.inf)
        o = weighted_values(P, seen)
        certain = np.sum(w_low, axis=-1, keepdims=True)
        reaches, may_reach = np.any(low > -np.inf, axis=-1, keepdims=True), np.any(high > -np.inf, axis=-1, keepdims=True)
        off = np.maximum(w_high - w, w - w_low) / np.where(certain > 0, certain, 1.0)
        unit_norm = call.get("unit_norm", False)
        new_error = spread(off, seen, o) + tail(P, seen, o, Precision(a, a if unit_norm else last, eta), chain(m))
        if unit_norm:
            size, o = norm(o), unit(o)
            new_error = turned(size, norm(new_error)) + ((np.sqrt(d) / 2 + 3) * a + last) * np.abs(o) + eta
        stays = error + last * np.abs(x)
        error = np.where(may_reach, np.where(reaches, new_error, np.inf), stays)
        x = np.where(may_reach, o, x)
    return {"out": error}


def exact(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Whole numbers and bits: nothing rounds."""
    return {record.outputs[0]: np.zeros(())} if len(record.outputs) == 1 else dict.fromkeys(record.outputs, np.zeros(()))


BOUNDS = {
    "sdm attention": sdm_attention_bound,
    "exact": exact,
    "hopfield energy": energy_bound,
    "hopfield gradients": hopfield_gradients_bound,
    "hopfield": hopfield_bound,
}
