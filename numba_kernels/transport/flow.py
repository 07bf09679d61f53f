"""Twins of reference/transport/flow.py, linear in n and m, in float64 inside; the causal form keeps one (d, e) state a head."""

import math

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, number, one_of

FEATURES = ("sigmoid", "relu")
COMPETITIONS = ("sources", "heads")


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1 + e)


def limit(clip):
    """The bound of the conserved flow, infinite where there is none."""
    return np.inf if clip is None else float(number("clip", clip, above=0))


def inverse(x):
    """1 / x, and 0 where nothing flows."""
    return np.where(x < 1e-300, 0.0, 1 / np.where(x < 1e-300, 1.0, x))


@twin
def flow_attention(q, k, v, *, eps=1e-6, flow_eps=0.0, clip=1.0, feature="sigmoid", competition="sources", return_weights=False):
    """Flow attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    kind, n, m = q.dtype, q.shape[-2], k.shape[-2]
    eps, flow_eps = float(number("eps", eps, least=0)), float(number("flow_eps", flow_eps, least=0))
    one_of("feature", feature, FEATURES)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    q, k = (sigmoid(x) if feature == "sigmoid" else np.where(x < 0, 0.0, x) + 1e-6 for x in (q, k))

    def flow(x, others, weight=1.0):
        """What flows between each node and all on the other side."""
        return np.sum((x + eps) * (np.sum(others * weight, axis=-2, keepdims=True) + eps), axis=-1) + flow_eps

    I, O = inverse(flow(q, k)), inverse(flow(k, q))
    incoming, outgoing = flow(q, k, O[..., None]), flow(k, q, I[..., None])
    bound = limit(clip)
    outgoing = np.where(outgoing > bound, bound, np.where(outgoing < -bound, -bound, outgoing))
    if one_of("competition", competition, COMPETITIONS) == "heads":
        outgoing = np.broadcast_to(outgoing, (*np.broadcast_shapes(outgoing.shape[:-1], v.shape[:-2]), m))
        if outgoing.ndim < 2:
            raise ValueError(f"competition: 'heads' expects a head axis, q (..., h, n, d), k (..., h, m, d), got {q.shape} and {k.shape}")
    axis = -1 if competition == "sources" else -2
    e = np.exp(outgoing - np.max(outgoing, axis=axis, keepdims=True, initial=-np.inf))
    C = m * e / np.sum(e, axis=axis, keepdims=True)
    allocated = (sigmoid(incoming * (n / max(m, 1))) * I)[..., None]
    out = allocated * (q @ (np.swapaxes(k, -1, -2) @ (v * C[..., None])))
    if not return_weights:
        return out.astype(kind)
    return AttentionResult(out.astype(kind), (allocated * (q @ np.swapaxes(k, -1, -2)) * C[..., None, :]).astype(kind))


@twin
def flow_attention_causal(q, k, v, *, eps=1e-6, clip=1.0, return_weights=False):
    """Causal flow attention of q (..., n, d) over k (..., n, d), v (..., n, e); the parameters are those of the reference."""
    eps, bound = float(number("eps", eps, least=0)), limit(clip)
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    heads, (n, e) = math.prod(lead), v.shape[-2:]
    out = np.empty((heads, n, e), q.dtype)
    weights = np.zeros((heads, n, n) if return_weights else (0, 0, 0), q.dtype)
    in_parallel(prefix_flows, heads, *heads_of(q, lead), *heads_of(k, lead), *heads_of(v, lead), eps, bound, out, weights,
                work=20 * heads * n * q.shape[-1] * e)
    out = out.reshape(*lead, n, e)
    return AttentionResult(out, weights.reshape(*lead, n, n)) if return_weights else out


@helper
def gate(x):
    """The logistic sigmoid."""
    e = math.exp(-abs(x))
    return (e if x < 0 else 1.0) / (1.0 + e)


@kernel
def prefix_flows(q, q_of, k, k_of, v, v_of, eps, bound, out, weights, first, step):
    """out (h, n, e): all sums run along with the tokens. The state is divided by the sum of the competition's exponentials so far."""
    heads, n, e = out.shape
    d = q.shape[2]
    fq, fk = np.empty((n, d), np.float64), np.empty((n, d), np.float64)
    C = np.empty(n, np.float64)
    for h in range(first, heads, step):
        sum_q, sum_k = np.zeros(d, np.float64), np.zeros(d, np.float64)
        given, taken = np.zeros(d, np.float64), np.zeros(d, np.float64)
        state = np.zeros((d, e), np.float64)
        top, total = -np.inf, 0.0
        for i in range(n):
            into, out_of, t = 0.0, 0.0, i + 1.0
            for c in range(d):
                fq[i, c], fk[i, c] = gate(np.float64(q[q_of[h], i, c])), gate(np.float64(k[k_of[h], i, c]))
                sum_q[c] += fq[i, c]
                sum_k[c] += fk[i, c]
                into += (fq[i, c] + eps) * (sum_k[c] + eps)
                out_of += (fk[i, c] + eps) * (sum_q[c] + eps)
            I = 0.0 if into < 1e-300 else t / into
            O = 0.0 if out_of < 1e-300 else t / out_of
            incoming, outgoing = 0.0, 0.0
            for c in range(d):
                given[c] += fk[i, c] * O
                taken[c] += fq[i, c] * I
                incoming += (fq[i, c] + eps) * (given[c] + eps)
                outgoing += (fk[i, c] + eps) * (taken[c] + eps)
            incoming, outgoing = incoming / t, outgoing / t
            outgoing = bound if outgoing > bound else (-bound if outgoing < -bound else outgoing)
            if outgoing > top or outgoing != outgoing:
                total = total * math.exp(top - outgoing) if top > -np.inf else 0.0
                top = outgoing
            total += math.exp(outgoing - top)
            C[i] = t * math.exp(outgoing - top) / total
            share = gate(incoming) * I / t
            for x in range(e):
                value = C[i] * v[v_of[h], i, x]
                for c in range(d):
                    state[c, x] += fk[i, c] * value
            for x in range(e):
                summed = 0.0
                for c in range(d):
                    summed += fq[i, c] * state[c, x]
                out[h, i, x] = share * summed
            if weights.size:
                for j in range(i + 1):
                    product = 0.0
                    for c in range(d):
                        product += fq[i, c] * fk[j, c]
                    weights[h, i, j] = share * product * C[j]
