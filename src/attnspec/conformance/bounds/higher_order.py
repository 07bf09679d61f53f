"""Bounds of attention over pairs of keys."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnspec.conformance.bounds.pieces import NoBound, Precision, chain, exponent_error, spread, tail, weight_error
from attnspec.reference.formula import Formula
from attnspec.reference.higher_order.tensor import tensor_attention
from attnspec.reference.higher_order.two_simplicial import two_simplicial_attention
from attnspec.reference.inputs import grouped_heads


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


BOUNDS = {
    "tensor": tensor_bound,
}
