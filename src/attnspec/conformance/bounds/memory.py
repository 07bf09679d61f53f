"""Bounds of associative memories."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import NoBound, Precision, chain, exponent_error, spread, weight_error
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


BOUNDS = {
    "hopfield": hopfield_bound,
}
