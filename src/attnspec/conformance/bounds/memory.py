"""Bounds of associative memories."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import NoBound, Precision, chain, exponent_error, logits_of, spread, summed_like, tail, weight_error
from attnspec.conformance.bounds.softmax import gradients_bound
from attnspec.reference.formula import Formula
from attnspec.reference.softmax.weights import softmax_weights


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
    """The read-out alone: the gradients of softmax attention whose keys, and values unless projected, are the stored patterns."""
    if call.get("n_iters", 0) != 0:
        raise NoBound("the bound of Hopfield gradients is derived for the read-out, n_iters=0")
    projected = call.get("projection") is not None
    stored = call["stored"]
    beta = 1 / np.sqrt(np.shape(stored)[-1]) if call.get("beta") is None else call["beta"]
    attention = {"q": call["state"], "k": stored, "v": call["projection"] if projected else stored, "do": call["do"], "scale": beta,
                 "mask": call.get("mask")}
    x = logits_of(attention, precision)
    P, _ = softmax_weights(x.s, x.visible)
    of = summed_like(gradients_bound(x, P, False, attention, precision), attention)
    if projected:
        return {"dstate": of["dq"], "dstored": of["dk"], "dprojection": of["dv"]}
    sum_rounds = precision.a * np.abs(record.function(**{name: call[name] for name in ("state", "stored", "do")}, beta=beta,
                                                      mask=call.get("mask")).dstored)
    return {"dstate": of["dq"], "dstored": of["dk"] + of["dv"] + sum_rounds}


def sdm_attention_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """One step. Circles: distances are whole, and their logarithms exact to float64; exponential: a cosine's two norms and product round.

    Cosines and exponentials are taken in float64 whatever the arrays are: a distance must not move by a bit.
    """
    if call.get("n_iters", 1) != 1 or call.get("weighting", "circle") == "cap" or call.get("unit_norm"):
        raise NoBound("the bound of SDM attention is derived for one step of circles or exponentials without unit_norm")
    exact64 = Precision.of("float64")
    arrays = {name: np.asarray(call[name], dtype=np.float64) for name in ("queries", "addresses", "pointers")}
    result = record.function(**{**call, **arrays, "return_weights": True})
    p, v, d, m = result.weights, arrays["pointers"], arrays["queries"].shape[-1], arrays["addresses"].shape[-2]
    log_p = np.where(p > 0, np.log(np.where(p > 0, p, 1.0)), 0.0)
    ds = exact64.a * (8 + 2 * (np.max(log_p, axis=-1, keepdims=True, initial=-np.inf) - log_p) + 4 * d)
    if call.get("weighting", "circle") == "exponential":
        ds = ds + abs(call.get("beta") or 0.0) * (3 * np.sqrt(d) + 8) * exact64.a
    core = spread(weight_error(p, np.where(p > 0, ds, 0.0)), v, result.out)
    return {"out": core + tail(p, v, result.out, Precision(exact64.a, precision.u, precision.eta), chain(m))}


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
