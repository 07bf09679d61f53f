"""Twin of reference/affine/energy_gated.py for linear energies: the gate's logarithm is a bias of the keys in softmax tiles.

Energies, their statistics and gates are n numbers a scale and computed in float64. Only where a gate is below 1e-8 can the floor of the
normaliser matter; then one more pass finds how much of the softmax the gates leave.
"""

import math

import numpy as np

from attnspec.numba_kernels.affine.projections import project
from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.softmax.tiles import tiled_attention
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, one_of

FLOOR = 1e-8


@twin
def energy_gated_attention(
    x, w_q, w_k, w_v, w_energy, b_energy, alpha, tau, mixing, *, scale=None, causal=True, znorm="sequence", std_floor="clamp",
    return_weights=False,
):
    """Energy-gated self-attention of one head over the tokens x (..., n, c); the parameters are those of the reference."""
    one_of("znorm", znorm, ("sequence", "prefix"))
    one_of("std_floor", std_floor, ("clamp", "add"))
    gate = gates(x.astype(np.float64), *(y.astype(np.float64) for y in (w_energy, b_energy, alpha, tau, mixing)), znorm, std_floor)
    q, k, v = (project(x, w) for w in (w_q, w_k, w_v))
    with np.errstate(divide="ignore"):
        bias = np.log(gate).astype(q.dtype)[..., None, :]
    out, weights, lse = tiled_attention(q, k, v, scale=scale, bias=bias, causal=causal, return_weights=return_weights, return_lse=True)
    if gate.size and not gate.min() >= FLOOR:
        plain = tiled_attention(q, k, v[..., :0], scale=scale, causal=causal, return_lse=True)[2]
        left = np.exp(np.where(np.isneginf(plain), 0, lse - plain))
        share = np.where(left < FLOOR, left / np.asarray(FLOOR, q.dtype), 1).astype(q.dtype)[..., None]
        out = out * share
        weights = weights * share if return_weights else None
    return AttentionResult(out, weights) if return_weights else out


def gates(x, w_energy, b_energy, alpha, tau, mixing, znorm, std_floor):
    """g (..., n), between 0 and 1."""
    energy = np.swapaxes(project(x, w_energy), -1, -2) + b_energy[..., None]                  # (..., s, n)
    if znorm == "sequence":
        mean = energy.mean(axis=-1, keepdims=True) if energy.shape[-1] else energy
        deviation = energy - mean
        variance = np.mean(deviation**2, axis=-1, keepdims=True) if energy.shape[-1] else energy
    else:
        rows = np.ascontiguousarray(energy).reshape(math.prod(energy.shape[:-1]), energy.shape[-1])
        means, variances = np.empty_like(rows), np.empty_like(rows)
        prefix_statistics(rows, means, variances)
        deviation, variance = energy - means.reshape(energy.shape), variances.reshape(energy.shape)
    if std_floor == "clamp":                                           # as in the reference, a variance that is NaN counts as none
        std = np.sqrt(np.where(variance > FLOOR**2, variance, FLOOR**2))
    else:
        std = np.sqrt(np.where(variance > 0, variance, 0)) + FLOOR
    z = deviation / std
    exponent = alpha[..., None] * (z - tau[..., None])
    e = np.exp(-np.abs(exponent))
    g = np.where(exponent < 0, e, 1.0) / (1 + e)
    share = np.exp(mixing - np.max(mixing, axis=-1, keepdims=True, initial=-np.inf))
    share = share / np.sum(share, axis=-1, keepdims=True)
    return np.sum(share[..., None] * g, axis=-2)


@kernel
def prefix_statistics(rows, means, variances):
    """Mean and population variance of each row up to each place (Welford's recurrence)."""
    for r in range(rows.shape[0]):
        mean, total = 0.0, 0.0
        for j in range(rows.shape[1]):
            before = rows[r, j] - mean
            mean += before / (j + 1)
            total += before * (rows[r, j] - mean)
            means[r, j], variances[r, j] = mean, total / (j + 1)
