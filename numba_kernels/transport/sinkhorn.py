"""Twin of reference/transport/sinkhorn.py. Logits X = S log2(e) / eps and potentials are kept in base 2, in the arrays' dtype.

Streaming: each half-step is one pass of softmax tiles that keeps nothing but the log-sum-exp, with the other side's potential as a bias;
the last is fused with the values. Memory of order n + m.

With a scratch matrix X of one head (taken up to SCRATCH_BYTES), a row step and the column step after it are one pass over it, and one
exponential an entry:

    top, total of X_i + v           W_ij = 2^(X_ij + v_j - top) / total      u_i = -log2 n - top - log2 total
    columns_j = sum_i W_ij          v_j <- v_j + log2 nu_j - log2(columns_j / n)

A column whose sum is too small for float32 is summed again on its own, its largest term taken out.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.exponential import LN_2, LOG2_E, exp2_row, range_of_row
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import packed_columns, packed_rows, panel_width, rows_product
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import lanes, load, splat, store
from attnspec.numba_kernels.softmax.tiles import FAR, QUERIES, attend_blocks, chunks_finite, copy_rows
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import AttentionResult, default_scale, number, one_of, whole
from attnspec.reference.transport.sinkhorn import SinkhornPlan

COSTS = ("dot", "squared_distance")
SCALINGS = ("rows", "cols", "none")
MARGINALS = ("valid", "all")

SCRATCH_BYTES = 2**28        # the largest matrix of one head that is kept; a larger problem is streamed
GROUP_BYTES = 2**24          # heads are taken together up to so much, which stays in the last cache
ROWS = 64                    # of a task: no chain of more than 64 terms in the sums of columns


# --- attention -----------------------------------------------------------------------------------------------------------------------


@twin
def sinkhorn_attention(
    q, k, v, *, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid", tol=None,
    causal=False, return_weights=False,
):
    """Sinkhorn attention of q (..., n, d) over k (..., m, d), v (..., m, e); the parameters are those of the reference."""
    if causal is not False:
        raise ValueError(f"causal: expected False, got {causal!r}; the only doubly stochastic lower-triangular matrix is the identity")
    out, weights = attention(q, k, v, n_iters=n_iters, eps=eps, scale=scale, cost=cost, output_scaling=output_scaling, key_mask=key_mask,
                             key_marginal=key_marginal, tol=tol, return_weights=return_weights)
    return AttentionResult(out, weights) if return_weights else out


class Passes(NamedTuple):
    """Both sides of an attention, packed once, for passes of softmax tiles in either direction. Potentials are natural."""

    q: Any
    k: Any
    v: np.ndarray                  # (b, m, e)
    v_of: np.ndarray
    mask: np.ndarray               # (b, 1, m) of the keys, or without entries
    mask_of: np.ndarray
    scale: np.floating             # scale / eps
    heads: int

    def lse(self, towards_keys: bool, potential: np.ndarray) -> np.ndarray:
        """Log-sum-exp over the keys (heads, n), or over the queries (heads, m), with a potential added to what is summed over."""
        one, other = (self.q, self.k) if towards_keys else (self.k, self.q)
        rows, columns, kind = one.array.shape[1], other.array.shape[1], potential.dtype
        out, lse = np.empty((self.heads, rows, 0), kind), np.empty((self.heads, rows), kind)
        nothing = np.empty((1, 0, columns, panel_width(kind)), kind)
        mask = self.mask if towards_keys else np.swapaxes(self.mask, -1, -2)
        self.run(one, other, nothing, np.zeros(self.heads, np.int64), np.ones((1, columns), np.bool_), potential, mask, out, lse,
                 np.empty((0, 0, 0), kind))
        return lse

    def attend(self, potential: np.ndarray, return_weights: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Softmax attention with a potential of the keys: out (heads, n, e), lse (heads, n), weights."""
        n, m, kind = self.q.array.shape[1], self.k.array.shape[1], potential.dtype
        out, lse = np.empty((self.heads, n, self.v.shape[-1]), kind), np.empty((self.heads, n), kind)
        weights = np.empty((self.heads, n, m) if return_weights else (0, 0, 0), kind)
        self.run(self.q, self.k, packed_columns(self.v), self.v_of, chunks_finite(self.v), potential, self.mask, out, lse, weights)
        return out, lse, weights

    def run(self, one, other, values, v_of, finite, potential, mask, out, lse, weights):
        kind, everyone = potential.dtype, np.arange(self.heads)
        in_parallel(
            attend_blocks, self.heads * -(-one.array.shape[1] // QUERIES), one.array, one.of, other.panels, other.of, other.array.shape[1],
            values, v_of, finite, potential[:, None], everyone, mask, self.mask_of, np.zeros(0, kind), self.scale, kind.type(0), -FAR, FAR,
            0, out, lse, np.empty((0, 0, 0), kind), weights, work=self.heads * one.array.shape[1] * other.array.size,
        )


class Side(NamedTuple):
    """Queries or keys: (b, n, d), which of the b a head uses, and packed rows."""

    array: np.ndarray
    of: np.ndarray
    panels: np.ndarray


def attention(
    q, k, v, *, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid", tol=None,
    return_weights=False, scratch_bytes=SCRATCH_BYTES,
):
    """(out, weights or None) of Sinkhorn attention; a head's scratch matrix is kept up to scratch_bytes, 0 streams always."""
    steps = whole("n_iters", n_iters, least=1)
    eps = number("eps", eps, above=0, finite=True)
    tol = None if tol is None else number("tol", tol, least=0)
    one_of("cost", cost, COSTS)
    one_of("output_scaling", output_scaling, SCALINGS)
    one_of("key_marginal", key_marginal, MARGINALS)
    scale = float(default_scale(scale, q))
    kind, n, m = q.dtype, q.shape[-2], k.shape[-2]
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], () if key_mask is None else key_mask.shape[:-1])
    heads = math.prod(lead)
    queries, keys = (Side(array, of, packed_rows(array)) for array, of in (heads_of(q, lead), heads_of(k, lead)))
    valid = np.zeros((0, 1, 1), np.bool_) if key_mask is None else np.broadcast_to(key_mask, np.broadcast_shapes(key_mask.shape, (m,)))
    masks, mask_of = (valid, np.zeros(heads, np.int64)) if key_mask is None else heads_of(valid[..., None, :], lead)
    columns = np.full((1, 1), m) if key_mask is None or key_marginal == "all" else masks[mask_of, 0].sum(axis=-1, keepdims=True)
    log_mu, log_nu = -np.log(kind.type(max(n, 1))), -np.log(np.maximum(columns, 1).astype(kind))
    twice = 2 if cost == "squared_distance" else 1
    passes = Passes(queries, keys, *heads_of(v, lead), masks, mask_of, kind.type(twice * scale / eps), heads)

    # -|q - k|^2 = 2 <q, k> - |q|^2 - |k|^2: of the squares, the keys' are where their potential starts, the queries' go into u.
    start, of_u = np.zeros((heads, m), kind), np.zeros((heads, n), kind)
    if cost == "squared_distance":
        start = (-scale / eps * np.sum(keys.array.astype(np.float64) ** 2, axis=-1)).astype(kind)[keys.of]
        of_u = (scale * np.sum(queries.array.astype(np.float64) ** 2, axis=-1)).astype(kind)[queries.of]

    taken, u, potential = solve_by(passes, start, of_u, log_mu, log_nu, steps, tol, eps, scratch_bytes)
    out, lse, weights = passes.attend(potential, return_weights)
    factor = {"rows": n, "cols": np.maximum(columns, 1), "none": 1}[output_scaling]
    if taken % 2:                                                  # rows sum to 1/n
        share = np.full((1, 1), factor / max(n, 1), kind) if np.ndim(factor) == 0 else (factor / max(n, 1)).astype(kind)
    else:
        share = (np.exp(np.where(np.isneginf(lse), 0, lse + u)) * factor).astype(kind)
    if output_scaling != "rows" or taken % 2 == 0:
        out *= share[..., None]
        weights *= share[..., None] if return_weights else kind.type(1)
    return out.reshape(*lead, n, v.shape[-1]), weights.reshape(*lead, n, m) if return_weights else None


def solve_by(passes, start, of_u, log_mu, log_nu, steps, tol, eps, scratch_bytes):
    """Half-steps taken, and the potentials u (heads, n) and v (heads, m) with which the last of them is to be made or has been made.

    After an odd number of half-steps v is what the last row step needs, and u is not used.
    """
    n, m, kind = passes.q.array.shape[1], passes.k.array.shape[1], start.dtype
    matrix = n * m * kind.itemsize
    if steps > 1 and 0 < matrix <= scratch_bytes:
        return solve_with_scratch(passes, start, of_u, log_mu, log_nu, steps, tol, eps)
    u, v = np.zeros((passes.heads, n), kind), start.copy()
    for t in range(steps):
        if t % 2:
            lse = passes.lse(False, u)
            v = np.where(np.isneginf(lse), 0, log_nu - lse)
        elif t < steps - 1 or tol is not None:
            lse = passes.lse(True, v)
            new = np.where(np.isneginf(lse), 0, log_mu - lse)
            change = eps * np.abs(new + (of_u / kind.type(eps) if t == 0 else -u))
            u = new
            if tol is not None and change.size and np.mean(change.sum(axis=-1, dtype=np.float64)) < tol:
                return t + 1, u, v
    return steps, u, v


def solve_with_scratch(passes, start, of_u, log_mu, log_nu, steps, tol, eps):
    """`solve_by` with the logits of a few heads at a time in memory; all heads together where `tol` looks at all of them."""
    n, m, kind = passes.q.array.shape[1], passes.k.array.shape[1], start.dtype
    group = passes.heads if tol is not None else max(1, GROUP_BYTES // (n * m * kind.itemsize))
    u, v = np.zeros((passes.heads, n), kind), start.copy()
    log_nu = np.broadcast_to(log_nu, (passes.heads, 1))
    width = panel_width(kind)
    X = np.empty((min(group, passes.heads), n, -(-m // width) * width), kind)
    taken = steps
    for first in range(0, passes.heads, group):
        some = slice(first, min(first + group, passes.heads))
        heads = np.arange(passes.heads)[some]
        in_parallel(logits, len(heads) * -(-n // QUERIES), passes.q.array, passes.q.of[some], passes.k.panels, passes.k.of[some], m,
                    passes.mask, passes.mask_of[some], passes.scale, X, work=len(heads) * n * passes.k.array.size)
        potentials = Potentials.of(X, len(heads), m, v[some] * kind.type(LOG2_E))
        for t in range(0, steps - (steps % 2 and tol is None), 2):
            change = potentials.step(X, log_mu * kind.type(LOG2_E), log_nu[some] * kind.type(LOG2_E), 1.0, columns=t + 1 < steps)
            change = (potentials.u if t == 0 else change) * kind.type(LN_2 * eps) + (of_u[some] if t == 0 else kind.type(0))
            if tol is not None and change.size and np.mean(np.abs(change).sum(axis=-1, dtype=np.float64)) < tol:
                taken = t + 1
                potentials.v[:] = potentials.v_before
                break
        u[some], v[some] = potentials.u * kind.type(LN_2), potentials.v[:, :m] * kind.type(LN_2)
    return taken, u, v


@kernel
def logits(q, q_of, keys, k_of, m, mask, mask_of, scale, X, first, step):
    """X (heads, n, whole panels) = scale q k^T log2(e), -inf at keys that are masked and beyond the last."""
    _, n, d = q.shape
    stop, width = X.shape[2], keys.shape[3]
    heads, blocks = q_of.size, (n + QUERIES - 1) // QUERIES
    block, S = np.zeros((QUERIES, d), q.dtype), np.empty((QUERIES, stop), q.dtype)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        rows = min(QUERIES, n - i0)
        copy_rows(q, q_of[h], i0, rows, block)
        rows_product(block, rows, keys, k_of[h] * keys.shape[1] * d * width, d * width, 0, keys.shape[1], d, S, stop,
                     q.dtype.type(scale * LOG2_E))
        for r in range(rows):
            for j in range(m):
                hidden = mask.size > 0 and not mask[mask_of[h], 0, j]
                X[h, i0 + r, j] = q.dtype.type(-np.inf) if hidden else S[r, j]
            for j in range(m, stop):
                X[h, i0 + r, j] = -np.inf


# --- half-steps on a matrix ----------------------------------------------------------------------------------------------------------


class Potentials:
    """The potentials u (heads, n) and v (heads, whole registers of m) of logits X in base 2, and what a row step leaves of v."""

    def __init__(self, u, v, m):
        self.u, self.v, self.m = u, v, m
        self.v_before = v.copy()

    @classmethod
    def of(cls, X, heads, m, v):
        padded = np.zeros((heads, X.shape[2]), X.dtype)
        padded[:, :m] = v
        return cls(np.zeros((heads, X.shape[1]), X.dtype), padded, m)

    def step(self, X, log_mu, log_nu, relaxation, columns=True):
        """A row step, and unless told otherwise the column step after it; returns the change of u."""
        heads, n = self.u.shape
        tasks = -(-n // ROWS)
        before = self.u.copy()
        sums = np.empty((heads, tasks, X.shape[2]), X.dtype)
        in_parallel(row_step, heads * tasks, X, self.v, X.dtype.type(log_mu), self.u, sums, work=20 * heads * X[0].size)
        self.v_before[:] = self.v
        if columns:
            in_parallel(column_step, heads, X, self.u, sums, X.dtype.type(log_mu), log_nu[:, 0], X.dtype.type(relaxation), self.m, self.v,
                        work=10 * sums.size)
        return self.u - before


@helper
def shifted_row(row, stop, potential, out):
    """out = row + potential."""
    for j in range(0, stop, lanes(row)):
        store(out, j, load(row, j) + load(potential, j))


@kernel
def row_step(X, v, log_mu, u, sums, first, step):
    """u (h, n), and for each task of ROWS rows the sums (h, tasks, m) over its normalised rows. A row without mass keeps its u."""
    heads, tasks, stop = sums.shape
    n, kind = u.shape[1], u.dtype.type
    row = np.empty(stop, u.dtype)
    for task in range(first, heads * tasks, step):
        h, part = task // tasks, task % tasks
        columns = sums[h, part]
        columns[:] = kind(0)
        for i in range(part * ROWS, min(n, (part + 1) * ROWS)):
            shifted_row(X[h, i], stop, v[h], row)
            smallest, top = range_of_row(row, 0, stop)
            total = exp2_row(row, 0, stop, top if top > -np.inf else kind(0), smallest)
            if total == 0:
                continue
            u[h, i] = log_mu - (top + np.log2(total))
            share = splat(kind(1) / total, row)
            for j in range(0, stop, lanes(row)):
                store(columns, j, load(columns, j) + load(row, j) * share)


@kernel
def column_step(X, u, sums, log_mu, log_nu, relaxation, m, v, first, step):
    """v (h, m) <- relaxation (v + log2 nu - log2 sum_i 2^(X_ij + u_i + v_j)); 0 where no row reaches the column."""
    heads, tasks, _ = sums.shape
    n, kind = u.shape[1], u.dtype.type
    for h in range(first, heads, step):
        for j in range(m):
            total = kind(0)
            for part in range(tasks):
                total += sums[h, part, j]
            if total < kind(2.0**-60):                     # too small to be exact, or none at all
                top = kind(-np.inf)
                for i in range(n):
                    top = max(top, X[h, i, j] + u[h, i])
                if top == -np.inf:
                    v[h, j] = kind(0)
                    continue
                total = kind(0)
                for i in range(n):
                    total += np.exp2(X[h, i, j] + u[h, i] - top)
                v[h, j] = relaxation * (log_nu[h] - (top + np.log2(total)))
            else:
                v[h, j] = relaxation * (v[h, j] + (log_nu[h] - log_mu) - np.log2(total))


# --- plans ---------------------------------------------------------------------------------------------------------------------------


@twin
def sinkhorn_plan(scores, *, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", tol=None, return_info=False):
    """Transport plan P (..., n, m) of scores S (..., n, m); the parameters are those of the reference."""
    result = plan(scores, n_iters, eps, key_mask, key_marginal, tol, np.inf)
    return result if return_info else result.plan


def plan(scores, n_iters, eps, key_mask, key_marginal, tol, rho) -> SinkhornPlan:
    """The SinkhornPlan of a transport problem, its columns relaxed where rho is finite; all heads at a time."""
    eps = number("eps", eps, above=0, finite=True)
    one_of("key_marginal", key_marginal, MARGINALS)
    steps = whole("n_iters", n_iters, least=1)
    tol = None if tol is None else number("tol", tol, least=0)
    kind, (n, m) = scores.dtype, scores.shape[-2:]
    valid = np.ones(m, bool) if key_mask is None else np.broadcast_to(key_mask, np.broadcast_shapes(key_mask.shape, (m,)))
    lead = np.broadcast_shapes(scores.shape[:-2], valid.shape[:-1])
    heads, width = math.prod(lead), panel_width(kind)
    S, S_of = heads_of(scores, lead)
    masks, mask_of = heads_of(valid[..., None, :], lead)
    columns = masks[mask_of, 0].sum(axis=-1, keepdims=True) if key_marginal == "valid" else np.full((heads, 1), m)
    log_mu, log_nu = -np.log2(kind.type(max(n, 1))), -np.log2(np.maximum(columns, 1).astype(kind))
    relaxation = 1.0 if np.isinf(rho) else rho / (rho + eps)

    X, top = np.empty((heads, n, -(-m // width) * width), kind), np.empty((heads, n), kind)
    in_parallel(scaled_scores, heads * -(-n // ROWS), S, S_of, masks, mask_of, m, kind.type(eps), X, top, work=X.size)
    potentials = Potentials.of(X, heads, m, np.zeros((heads, m), kind))
    per_unit = kind.type(eps * LN_2)                        # a potential of base 2 in units of the scores
    error, taken = 0.0, steps
    for t in range(0, steps, 2):
        change = potentials.step(X, log_mu, log_nu, relaxation, columns=t + 1 < steps)
        change = potentials.u * per_unit - top if t == 0 else change * per_unit
        error = float(np.mean(np.abs(change.astype(np.float64)).sum(axis=-1))) if change.size else 0.0
        if tol is not None and error < tol:
            taken = t + 1
            potentials.v[:] = potentials.v_before
            break
    P = np.empty((heads, n, m), kind)
    in_parallel(plan_rows, heads * -(-n // ROWS), X, potentials.u, potentials.v, log_mu, taken % 2, P, work=20 * P.size)
    u, v = potentials.u * per_unit - top, potentials.v[:, :m] * per_unit
    return SinkhornPlan(P.reshape(*lead, n, m), u.reshape(*lead, n), v.reshape(*lead, m), taken, error)


@kernel
def scaled_scores(S, S_of, mask, mask_of, m, eps, X, top, first, step):
    """X (h, n, whole panels) = (S - top) log2(e) / eps with the largest visible score top (h, n) of each row, -inf where invisible."""
    heads, n, stop = X.shape
    kind = X.dtype.type
    tasks = (n + ROWS - 1) // ROWS
    for task in range(first, heads * tasks, step):
        h, part = task // tasks, task % tasks
        seen = mask[mask_of[h], 0]
        for i in range(part * ROWS, min(n, (part + 1) * ROWS)):
            row = S[S_of[h], i]
            largest = kind(-np.inf)
            for j in range(m):
                if seen[j] and row[j] > largest:
                    largest = row[j]
            top[h, i] = largest if largest > -np.inf else kind(0)
            for j in range(m):
                X[h, i, j] = (row[j] - top[h, i]) / eps * kind(LOG2_E) if seen[j] else kind(-np.inf)
            for j in range(m, stop):
                X[h, i, j] = -np.inf


@kernel
def plan_rows(X, u, v, log_mu, after_rows, P, first, step):
    """P (h, n, m): rows of 2^(X + v), normalised to 1/n after a row step, times 2^u after a column step."""
    heads, n, m = P.shape
    kind, stop = P.dtype.type, X.shape[2]
    row = np.empty(stop, P.dtype)
    tasks = (n + ROWS - 1) // ROWS
    for task in range(first, heads * tasks, step):
        h, part = task // tasks, task % tasks
        for i in range(part * ROWS, min(n, (part + 1) * ROWS)):
            shifted_row(X[h, i], stop, v[h], row)
            smallest, top = range_of_row(row, 0, stop)
            shift = top if top > -np.inf else kind(0)
            total = exp2_row(row, 0, stop, shift, smallest)
            share = np.exp2(log_mu) / total if after_rows else np.exp2(u[h, i] + shift)
            for j in range(m):
                P[h, i, j] = row[j] * share if X[h, i, j] > -np.inf or X[h, i, j] != X[h, i, j] else kind(0)
