"""Bounds of softmax attention with negative weights, and of its gradients."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import (
    Precision,
    chain,
    exponent_error,
    logits_of,
    spread,
    summed_like,
    tail,
    weight_error,
)
from attnspec.conformance.bounds.softmax import gradients_bound
from attnspec.reference.formula import Formula
from attnspec.reference.signed.cog import cog_weights
from attnspec.reference.softmax.weights import weighted_values


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


def signed_weights_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Weights of given logits: their signs are exact, and only the exponentials and their sum round."""
    p = np.asarray(call["p"], dtype=np.float64)
    visible = np.broadcast_to(True if call.get("mask") is None else call["mask"], p.shape)
    P = np.abs(cog_weights(p, visible, normaliser=call.get("normaliser", "visible")))
    size = np.where(visible, np.abs(p), 0.0)
    PE = weight_error(P, exponent_error(size, np.zeros(p.shape), visible, precision.a))
    return {"weights": PE + (chain(p.shape[-1]) * precision.a + precision.u) * P + precision.eta}


def signed_softmax_gradients_bound(record: Formula, call: Mapping[str, Any], precision: Precision) -> dict[str, np.ndarray]:
    """Gradients of Cog attention by q, k and v, where no logit lies within its own error of 0 the same as softmax's."""
    x = logits_of(call, precision)
    return summed_like(gradients_bound(x, np.abs(cog_weights(x.s, x.visible)), True, call, precision), call)


BOUNDS = {
    "signed softmax": signed_softmax_bound,
    "signed weights": signed_weights_bound,
    "signed softmax gradients": signed_softmax_gradients_bound,
}
