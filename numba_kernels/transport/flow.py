"""Twins of reference/transport/flow.py, linear in n and m: features, flows and sums are float64 whatever the arrays are, rounded once.

Both forms go over the tokens with whole registers of features; features that fill up a register are 0, and so is their eps. The
bidirectional form makes one pass a side for each kind of flow, in CHUNKs of tokens, each with sums of its own, which are added at the end.
The causal one keeps the sums over all tokens before the chunk at hand and over those of the chunk so far.
"""

import math
from typing import NamedTuple

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.exponential import LOG2_E, exp2_any
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, add_columns_product, packed_columns
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import (
    BYTES,
    ROWS,
    absolute,
    lane_sum,
    lanes,
    load,
    maximum,
    splat,
    store,
    turned_block_product,
    zero_below,
)
from attnspec.numba_kernels.softmax.tiles import QUERIES, copy_rows
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, number, one_of

FEATURES = ("sigmoid", "relu")
COMPETITIONS = ("sources", "heads")
LANES = BYTES // 8
SOURCES = 8 * CHUNK      # tokens whose values one task gathers: one (d, e) sum each


@twin
def flow_attention(q, k, v, *, eps=1e-6, flow_eps=0.0, clip=1.0, feature="sigmoid", competition="sources", return_weights=False):
    """Flow attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    n, m, d = q.shape[-2], k.shape[-2], q.shape[-1]
    eps, flow_eps, bound = eps_row(eps, d), float(number("flow_eps", flow_eps, least=0)), limit(clip)
    one_of("feature", feature, FEATURES)
    front = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    lead = np.broadcast_shapes(front, v.shape[:-2])
    if one_of("competition", competition, COMPETITIONS) == "heads" and not lead:
        raise ValueError(f"competition: 'heads' expects a head axis, q (..., h, n, d), k (..., h, m, d), got {q.shape} and {k.shape}")
    queries, keys = (features(x, feature == "relu") for x in (q, k))
    each = np.arange(math.prod(front))

    into, given = flows(queries, front, keys.total, keys.used_by(front), eps, flow_eps)            # 1 / I and sum_i I_i q_i
    _, taken = flows(keys, front, queries.total, queries.used_by(front), eps, flow_eps)       # 1 / O and sum_j O_j k_j
    incoming, _ = flows(queries, front, taken, each, eps, flow_eps)
    outgoing, _ = flows(keys, front, given, each, eps, flow_eps)

    outgoing = np.where(outgoing > bound, bound, outgoing).reshape(*front, m)
    if competition == "heads":
        outgoing = np.broadcast_to(outgoing, (*lead, m))                                           # heads of the values compete too
    axis = -1 if competition == "sources" else -2
    force = np.exp(outgoing - np.max(outgoing, axis=axis, keepdims=True, initial=-np.inf))
    C = m * force / np.sum(force, axis=axis, keepdims=True)
    share = (sigmoid(incoming * (n / max(m, 1))) * inverse(into)).reshape(*front, n)
    out = delivered(queries, share, gathered(keys, C, v, lead, d), lead, v)
    return AttentionResult(out, weights_of(queries, share, keys, C, front, q.dtype)) if return_weights else out


@twin
def flow_attention_causal(q, k, v, *, eps=1e-6, clip=1.0, return_weights=False):
    """Causal flow attention of q (..., n, d) over k (..., n, d), v (..., n, e); the parameters are those of the reference."""
    (n, d), e = q.shape[-2:], v.shape[-1]
    eps, bound = eps_row(eps, d), limit(clip)
    front = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    lead = np.broadcast_shapes(front, v.shape[:-2])
    queries, keys = features(q, False), features(k, False)
    share, C = np.empty((2, math.prod(front), n))
    out = np.empty((math.prod(lead), n, e), v.dtype)
    in_parallel(run_flows, math.prod(front), queries.phi, queries.used_by(front), keys.phi, keys.used_by(front), eps, bound,
                share, C, work=10 * share.size * d)
    share, C = share.reshape(*front, n), C.reshape(*front, n)
    in_parallel(run_values, math.prod(lead), queries.phi, queries.used_by(lead), keys.phi, keys.used_by(lead), d, *heads_of(v, lead),
                *heads_of(share, lead, 1), *heads_of(C, lead, 1), out, work=2 * out.size * d)
    out = out.reshape(*lead, n, e)
    return AttentionResult(out, np.tril(weights_of(queries, share, keys, C, front, q.dtype))) if return_weights else out


def eps_row(eps, d):
    """eps for each of d features, 0 for those that fill up a register."""
    row = np.zeros(-(-d // LANES) * LANES)
    row[:d] = float(number("eps", eps, least=0))
    return row


def limit(clip):
    """The bound of the conserved flow, infinite where there is none."""
    return np.inf if clip is None else float(number("clip", clip, above=0))


def inverse(x):
    """1 / x, and 0 where nothing flows."""
    return np.where(x < 1e-300, 0.0, 1 / np.where(x < 1e-300, 1.0, x))


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1 + e)


class Side(NamedTuple):
    """Queries or keys: phi (b, n, d filled up to whole registers), its sums over n (b, d), and which of the b each head uses (...)."""

    phi: np.ndarray
    total: np.ndarray
    of: np.ndarray

    def used_by(self, lead):
        """Which of the b each of the flattened heads of `lead` uses."""
        return np.ascontiguousarray(np.broadcast_to(self.of, lead)).reshape(-1)

    def heads(self, lead):
        """phi (..., n, d) of all heads of `lead`."""
        return self.phi[self.used_by(lead)].reshape(*lead, *self.phi.shape[1:])


def weights_of(queries, share, keys, C, front, dtype):
    """share_i <q_i, k_j> C_j (..., n, m)."""
    return (share[..., None] * (queries.heads(front) @ np.swapaxes(keys.heads(front), -1, -2)) * C[..., None, :]).astype(dtype)


# --- features and flows --------------------------------------------------------------------------------------------------------------


@helper
def sigmoid_row(row):
    """Replace a row by its logistic sigmoid: with w = exp(-|x|), w / (1 + w) below 0, else 1 / (1 + w). Whole registers."""
    zero, one, to_base_two, least = splat(0.0, row), splat(1.0, row), splat(-LOG2_E, row), splat(-1075.0, row)
    for c in range(0, len(row), lanes(row)):
        x = load(row, c)
        w = exp2_any(absolute(x) * to_base_two, one, least)
        store(row, c, (w + zero_below(one - w, x, zero)) / (one + w))


@helper
def relu_row(row):
    """Replace a row by max(x, 0) + 1e-6; whole registers."""
    for c in range(0, len(row), lanes(row)):
        store(row, c, maximum(splat(0.0, row), load(row, c)) + splat(1e-6, row))


@helper
def add_row(total, row, rate):
    """total += rate row; whole registers."""
    for c in range(0, len(row), lanes(row)):
        store(total, c, load(total, c) + splat(rate, row) * load(row, c))


@helper
def flow(x, total, eps):
    """<x + eps, total + eps>; whole registers."""
    summed = splat(0.0, x)
    for c in range(0, len(x), lanes(x)):
        summed = summed + (load(x, c) + load(eps, c)) * (load(total, c) + load(eps, c))
    return lane_sum(summed)


@helper
def per(x):
    """1 / x, and 0 where nothing flows."""
    return 0.0 if x < 1e-300 else 1.0 / x


def features(x, relu):
    """phi(x) of x (..., n, d)."""
    front = x.shape[:-2]
    x, x_of = heads_of(x, front)
    b, n, d = x.shape
    phi = np.empty((b, n, -(-d // LANES) * LANES))
    sums = np.zeros((b, -(-n // CHUNK), phi.shape[2]))
    in_parallel(featured, b * sums.shape[1], x, relu, phi, sums, work=20 * x.size)
    return Side(phi, sums.sum(axis=1), x_of.reshape(front))


@kernel
def featured(x, relu, phi, sums, first, step):
    _, n, d = x.shape
    b, chunks, _ = sums.shape
    for task in range(first, b * chunks, step):
        one, start = task // chunks, task % chunks * CHUNK
        for i in range(start, min(start + CHUNK, n)):
            row = phi[one, i]
            for c in range(d):
                row[c] = x[one, i, c]
            row[d:] = 0.0
            if relu:
                relu_row(row)
            else:
                sigmoid_row(row)
            row[d:] = 0.0
            add_row(sums[one, task % chunks], row, 1.0)


def flows(side, lead, total, total_of, eps, flow_eps):
    """What flows (h, n) between each token and the other side, whose features sum to total (b, d), and the sums of phi / flow (h, d)."""
    heads, (_, n, width) = math.prod(lead), side.phi.shape
    flow, sums = np.empty((heads, n)), np.zeros((heads, -(-n // CHUNK), width))
    in_parallel(exchange, heads * sums.shape[1], side.phi, side.used_by(lead), total, total_of, eps, flow_eps, flow, sums,
                work=5 * heads * n * width)
    return flow, sums.sum(axis=1)


@kernel
def exchange(phi, phi_of, total, total_of, eps, flow_eps, flows, sums, first, step):
    heads, chunks, _ = sums.shape
    for task in range(first, heads * chunks, step):
        h, start = task // chunks, task % chunks * CHUNK
        for i in range(start, min(start + CHUNK, flows.shape[1])):
            row = phi[phi_of[h], i]
            flows[h, i] = flow(row, total[total_of[h]], eps) + flow_eps
            add_row(sums[h, task % chunks], row, per(flows[h, i]))


# --- what sources give and sinks take ------------------------------------------------------------------------------------------------


def gathered(keys, C, v, lead, d):
    """sum_j k_j^T C_j v_j (h, d, e), packed."""
    heads, (_, m, _), e = math.prod(lead), keys.phi.shape, v.shape[-1]
    v, v_of = heads_of(v, lead)
    panels = packed_columns(v.astype(np.float64))
    state = np.zeros((heads, -(-m // SOURCES), -(-d // ROWS) * ROWS, panels.shape[1] * panels.shape[3]))
    in_parallel(gather, heads * state.shape[1], keys.phi, keys.used_by(lead), d, *heads_of(C, lead, 1), panels, v_of, state,
                work=2 * heads * m * d * e)
    return packed_columns(state.sum(axis=1)[:, :d, :e])


@kernel
def gather(phi, phi_of, d, C, C_of, panels, v_of, state, first, step):
    """state (h, parts of SOURCES tokens, d, e)."""
    heads, parts, rows, e_step = state.shape
    _, count, m, width = panels.shape
    sources = np.zeros((CHUNK, rows))
    for task in range(first, heads * parts, step):
        h, part = task // parts, task % parts
        for j in range(part * SOURCES, min((part + 1) * SOURCES, m), CHUNK):
            terms = min(CHUNK, m - j)
            for t in range(terms):
                for c in range(d):
                    sources[t, c] = phi[phi_of[h], j + t, c] * C[C_of[h], j + t]
            for p in range(count):
                for r in range(0, rows, ROWS):
                    turned_block_product(
                        sources, r, rows, panels, ((v_of[h] * count + p) * m + j) * width, state,
                        ((h * parts + part) * rows + r) * e_step + p * width, e_step, terms, 1.0, True,
                    )


def delivered(queries, share, state, lead, v):
    """share_i q_i state (..., n, e)."""
    heads, n, e = math.prod(lead), queries.phi.shape[1], v.shape[-1]
    out = np.empty((heads, n, e), v.dtype)
    in_parallel(deliver, heads * -(-n // QUERIES), queries.phi, queries.used_by(lead), *heads_of(share, lead, 1), state, out,
                work=2 * out.size * queries.phi.shape[2])
    return out.reshape(*lead, n, e)


@kernel
def deliver(phi, phi_of, share, share_of, state, out, first, step):
    heads, n, e = out.shape
    blocks = (n + QUERIES - 1) // QUERIES
    width, e_step = phi.shape[2], state.shape[1] * state.shape[3]
    block, acc = np.zeros((QUERIES, width)), np.empty((QUERIES, e_step))
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        rows = min(QUERIES, n - i0)
        copy_rows(phi, phi_of[h], i0, rows, block)
        acc[:] = 0.0
        for c in range(0, state.shape[2], CHUNK):
            add_columns_product(block, rows, width, c, min(CHUNK, state.shape[2] - c), state, h * state.shape[2] * e_step, c, acc, e_step)
        for r in range(rows):
            for x in range(e):
                out[h, i0 + r, x] = share[share_of[h], i0 + r] * acc[r, x]


# --- causal --------------------------------------------------------------------------------------------------------------------------


@helper
def gate(x):
    """The logistic sigmoid."""
    w = math.exp(-abs(x))
    return (w if x < 0 else 1.0) / (1.0 + w)


@helper
def advance(before, chunk, so_far, row, rate):
    """chunk += rate row, and so_far = before + chunk; whole registers."""
    for c in range(0, len(row), lanes(row)):
        summed = load(chunk, c) + splat(rate, row) * load(row, c)
        store(chunk, c, summed)
        store(so_far, c, load(before, c) + summed)


@helper
def take_and_give(before, chunk, value, k, q, taken):
    """chunk += k value, and taken += q (before + chunk); whole registers."""
    given, wanted = splat(k, value), splat(q, value)
    for x in range(0, len(value), lanes(value)):
        summed = load(chunk, x) + given * load(value, x)
        store(chunk, x, summed)
        store(taken, x, load(taken, x) + wanted * (load(before, x) + summed))


@kernel
def run_flows(fq, q_of, fk, k_of, eps, bound, share, C, first, step):
    """share and C (h, n): all sums run along with the tokens, that of exponentials over the largest so far."""
    heads, n = share.shape
    width = fq.shape[2]
    before, chunk, so_far = np.empty((4, width)), np.empty((4, width)), np.empty((4, width))      # of q, k, O k, I q
    for h in range(first, heads, step):
        before[:], chunk[:] = 0.0, 0.0
        top, total = -np.inf, 0.0
        for i in range(n):
            t, q, k = i + 1.0, fq[q_of[h], i], fk[k_of[h], i]
            if i % CHUNK == 0:
                for s in range(4):
                    add_row(before[s], chunk[s], 1.0)
                chunk[:] = 0.0
            advance(before[0], chunk[0], so_far[0], q, 1.0)
            advance(before[1], chunk[1], so_far[1], k, 1.0)
            I, O = t * per(flow(q, so_far[1], eps)), t * per(flow(k, so_far[0], eps))
            advance(before[2], chunk[2], so_far[2], k, O)
            advance(before[3], chunk[3], so_far[3], q, I)
            incoming, outgoing = flow(q, so_far[2], eps) / t, flow(k, so_far[3], eps) / t
            if outgoing > bound:
                outgoing = bound
            if not outgoing <= top:                          # a NaN too
                total = total * math.exp(top - outgoing) if i > 0 else 0.0
                top = outgoing
            force = math.exp(outgoing - top)
            total += force
            C[h, i], share[h, i] = t * force / total, gate(incoming) * I / t


@kernel
def run_values(fq, q_of, fk, k_of, d, v, v_of, share, share_of, C, C_of, out, first, step):
    """out (h, n, e): share_i q_i times the sum of k_j^T C_j v_j so far."""
    heads, n, e = out.shape
    e_step = (e + LANES - 1) // LANES * LANES
    before, chunk = np.empty((d, e_step)), np.empty((d, e_step))
    value, taken = np.zeros(e_step), np.empty(e_step)
    for h in range(first, heads, step):
        before[:], chunk[:] = 0.0, 0.0
        for i in range(n):
            if i % CHUNK == 0:
                for c in range(d):
                    add_row(before[c], chunk[c], 1.0)
                chunk[:] = 0.0
            q, k, force, rate = fq[q_of[h], i], fk[k_of[h], i], C[C_of[h], i], share[share_of[h], i]
            for x in range(e):
                value[x] = force * v[v_of[h], i, x]
            taken[:] = 0.0
            for c in range(d):
                take_and_give(before[c], chunk[c], value, k[c], q[c], taken)
            for x in range(e):
                out[h, i, x] = rate * taken[x]
