"""How far a correct twin may be from the float64 reference, element by element.

A bound is computed in float64 from the twin's own, already rounded inputs. It is composed of the errors that a careful implementation
makes: rounding of the logits and of the exponentials, the additions of one tiled chain, rounding of the result. Nothing in it is set by
hand per test; changing a piece needs a derivation.

    l_ij   = ((sqrt(d) + 2) a + 2 u_in) scale sum_c |q_ic k_jc|                error of a logit
    ds_ij  = l_ij + a (4 + 2 (max_j s_ij - s_ij))                              error of an exponent
    E_ij   = expm1(ds_ij) / sum_j p_ij exp(-ds_ij)                             relative error of a weight
    |err|_i <= sum_j p_ij |v_j - o_i| E_ij + h(m) a sum_j p_ij |v_j| + u_out (|o_i| + sum_j p_ij |v_j|) + eta (1 + sum_j |v_j|)

with a the unit roundoff of the accumulation, u_in and u_out those of inputs and outputs, eta half the smallest subnormal number of the
output, h(k) = min(k, 64 + k/64) + 4 the longest chain of additions of a tiled kernel.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from attnspec.reference.inputs import default_scale, grouped_heads, sum_groups, sum_to_shape, visible_keys
from attnspec.reference.softmax.weights import attention_logits

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
HALF_SUBNORMAL = {"float64": 2.0**-1075, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}


class NoBound(Exception):
    """No error bound is derived for this formula, or not for these options."""


class Precision(NamedTuple):
    """Unit roundoffs of the accumulation and of the input and output dtype, and half the output's smallest subnormal number."""

    a: float
    u: float
    eta: float

    @classmethod
    def of(cls, dtype: str) -> "Precision":
        return cls(ROUNDOFF["float64" if dtype == "float64" else "float32"], ROUNDOFF[dtype], HALF_SUBNORMAL[dtype])


def chain(k: int) -> float:
    """Additions in the longest chain of a kernel that tiles sums of more than 64 terms."""
    return min(k, 64 + k / 64) + 4


def spread(errors: np.ndarray, v: np.ndarray, o: np.ndarray, sign: Any = 1.0) -> np.ndarray:
    """sum_j errors_ij |sign_ij v_j - o_i|, a feature at a time; a term without an error counts nothing, whatever v_j is."""
    sign = np.broadcast_to(sign, errors.shape)
    columns = []
    for c in range(v.shape[-1]):
        distance = np.where(errors == 0, 0.0, np.abs(sign * v[..., None, :, c] - o[..., :, None, c]))
        columns.append(np.sum(errors * distance, axis=-1))
    return np.stack(columns, axis=-1) if columns else np.zeros(o.shape)


def weight_error(p: np.ndarray, ds: np.ndarray) -> np.ndarray:
    """p_ij E_ij for weights p with exponent errors ds; 0 where p is, infinite where nothing is known of the weights."""
    total = np.sum(p * np.exp(-ds), axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p == 0, 0.0, p * (np.expm1(ds) / total))


def tail(p: np.ndarray, v: np.ndarray, o: np.ndarray, precision: Precision, chains: float, roundings: float = 1.0) -> np.ndarray:
    a, u, eta = precision
    pv = p @ np.abs(v)
    return chains * a * pv + u * (np.abs(o) + roundings * pv) + eta * (1 + np.sum(np.abs(v), axis=-2, keepdims=True))


def seen_values(v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """v (..., m, e) with zeros for what no query sees: a masked NaN bounds nothing."""
    return np.where(np.any(visible, axis=-2)[..., None], v, 0.0)


class Logits(NamedTuple):
    """Logits, their errors and what is visible, of a function of q, k, v and the usual options."""

    s: np.ndarray
    error: np.ndarray
    visible: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def logits_of(call: Mapping[str, Any], precision: Precision) -> Logits:
    a, u, _ = precision
    q, k, v = (np.asarray(call[name], dtype=np.float64) for name in ("q", "k", "v"))
    if call.get("enable_gqa"):
        k, v = grouped_heads(q, k, v)
    bias, tau = call.get("bias"), call.get("tau") or 1.0
    if call.get("log_prior") is not None:
        bias = np.asarray(call["log_prior"], dtype=np.float64)
    scale = default_scale(call.get("scale"), q) / tau
    s = attention_logits(q, k, scale, call.get("softcap"))
    error = ((np.sqrt(q.shape[-1]) + 2) * a + 2 * u) * abs(scale) * (np.abs(q) @ np.abs(np.swapaxes(k, -1, -2)))
    if call.get("softcap"):
        error = error + 4 * a * np.abs(s)
    if bias is not None:
        finite = np.where(np.isfinite(bias), np.abs(bias), 0.0)
        error = error + (a + u) * (np.abs(s) + finite)
        s = s + bias
    visible = visible_keys(q.shape[-2], k.shape[-2], call.get("mask"), call.get("causal", False), call.get("window"))
    visible = np.broadcast_to(visible & (s != -np.inf), np.broadcast_shapes(s.shape, np.shape(visible)))
    return Logits(np.where(visible, s, 0.0), np.where(visible, error, 0.0), visible, q, k, seen_values(v, visible))


def exponent_error(size: np.ndarray, error: np.ndarray, visible: np.ndarray, a: float, sink: Any = None) -> np.ndarray:
    """ds for logits of which `size` goes into exp; the largest visible one is subtracted first."""
    top = np.max(np.where(visible, size, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        top = np.maximum(top, np.asarray(sink)[..., None, None])
    return np.where(visible, error + a * (4 + 2 * (np.where(visible, top, 0.0) - size)), 0.0)


def summed_like(gradients: dict[str, np.ndarray], call: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Bounds of gradients that are summed over the heads of a group and over broadcast axes."""
    for name, limit in gradients.items():
        shape = np.shape(call[name[1:]])
        if call.get("enable_gqa") and name in ("dk", "dv"):
            limit = sum_groups(limit, shape[-3])
        gradients[name] = sum_to_shape(limit, shape)
    return gradients
