"""Gradients of Sinkhorn plans: the half-steps in reverse, each pass a block of rows at a time, their weights computed again.

From the potentials u, v of all half-steps, with W the normalised rows or columns of a step, dP the cotangent of the plan P = mass W of
the last step and G = dP * P:

    FIRST   du_i = sum_j G_ij,  dv_j = sum_i G_ij, less sum_i du_i W_ij where the last step was one of rows
    PAIR    du_i -= sum_j dv_j W_ij (a column step),  then dv_j = -sum_i du_i W_ij (the row step before it)
    LAST    dS_ij = G_ij - sum over the row steps of du_i W_ij - sum over the column steps of dv_j W_ij

FIRST once, PAIR once for each column step, LAST once: dS is written, or meets keys and queries while it is in the cache. A task is a part
of the rows of one head; its sums over rows are its own, and added in order.
"""

from typing import NamedTuple

import numpy as np

from attnspec.numba_kernels.exponential import LOG2_E
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, add_columns_product, packed_columns, packed_rows, panel_width, rows_product
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import ROWS, lane_sum, lanes, load, splat, store, unless_zero
from attnspec.numba_kernels.softmax.tiles import copy_rows
from attnspec.numba_kernels.softmax.tiles_backward import add_turned_product
from attnspec.numba_kernels.transport.sinkhorn_tiles import add_potential, exp2_line, hide_keys

QUERIES = 60                 # rows of a block: ten of the matrix product's, and no chain of more than 64 terms
PARTS = 16                   # tasks there should be at least
FIRST, PAIR, LAST = 0, 1, 2


class Steps(NamedTuple):
    """The half-steps taken, and the potentials in base 2 after each row step and around each column step."""

    taken: int
    u: np.ndarray                  # (row steps, heads, n)
    v: np.ndarray                  # (1 + row steps, heads, whole panels of m)
    log_mu: np.floating
    log_nu: np.ndarray             # (heads,)
    detached: bool


# --- weights of a row ----------------------------------------------------------------------------------------------------------------


@helper
def row_weights(row, stop, v, broken, out):
    """out = 2^(row + v), normalised to 1; zeros for a row without mass."""
    kind = row.dtype.type
    smallest, top = add_potential(row, stop, v, broken, out)
    total = exp2_line(out, stop, top if top > -np.inf else kind(0), smallest)
    share = splat(kind(0) if total == 0 else kind(1) / total, row)
    for j in range(0, stop, lanes(row)):
        store(out, j, load(out, j) * share)
    if total != total:
        keep_hidden(row, stop, out)


@helper
def column_weights(row, stop, u, v, log_nu, broken, out):
    """out = 2^(row + u + v) / nu: a row of the matrix whose columns are normalised."""
    smallest, _ = add_potential(row, stop, v, broken, out)
    exp2_line(out, stop, log_nu - u, smallest)
    if broken:
        keep_hidden(row, stop, out)


@helper
def keep_hidden(row, stop, out):
    """Put 0 where a row of logits is -inf."""
    for j in range(stop):
        out[j] = out[j] if row[j] != -np.inf else out.dtype.type(0)


@helper
def sum_of_products(a, b, stop):
    """sum_j a_j b_j, in chains of at most CHUNK terms."""
    total = a.dtype.type(0)
    for start in range(0, stop, CHUNK * lanes(a)):
        chunk = splat(a.dtype.type(0), a)
        for j in range(start, min(stop, start + CHUNK * lanes(a)), lanes(a)):
            chunk = chunk + load(a, j) * load(b, j)
        total += lane_sum(chunk)
    return total


@helper
def subtract_multiple(line, factor, weights, stop):
    """line -= factor weights."""
    by = splat(factor, line)
    for j in range(0, stop, lanes(line)):
        store(line, j, load(line, j) - by * load(weights, j))


@helper
def subtract_products(line, factors, weights, stop):
    """line -= factors weights, entry by entry."""
    for j in range(0, stop, lanes(line)):
        store(line, j, load(line, j) - load(factors, j) * load(weights, j))


@helper
def times_plan(line, weights, mass, stop):
    """line = line * mass weights, 0 where the weight is, whatever stood there."""
    share = splat(mass, line)
    for j in range(0, stop, lanes(line)):
        w = load(weights, j) * share
        store(line, j, unless_zero(load(line, j) * w, w))


@helper
def add_line(line, out, stop):
    for j in range(0, stop, lanes(line)):
        store(out, j, load(out, j) + load(line, j))


# --- passes --------------------------------------------------------------------------------------------------------------------------


@kernel
def reverse_rows(
    stage, pair, X, q, q_of, keys, k_of, m, mask, mask_of, alpha, dP, dP_of, do, do_of, values, v_of, factor, eps,
    count, of, u, v, broken, mu, log_nu, detached, du, dv, sums, dS, q_panels, key_panels, do_panels, slope, dq, dk, d_values, first, step,
):
    """One pass. Logits are those of X (h, n, stop), or where it has no entries alpha q k^T; dP (b, n, m), or factor do values^T.

    du (row steps, h, n), dv (row steps, h, stop), sums (parts, h, stop); LAST: dS (h, n, m), or where it has no entries dq (h, n, d),
    dk (parts, h, m, d), d_values (parts, h, m, e).
    """
    parts, heads, stop = sums.shape
    rows_taken, _, n = u.shape
    kind, d, e, width = u.dtype.type, q.shape[2], do.shape[2], keys.shape[3]
    odd, last = count % 2 == 1, rows_taken - 1
    blocks = (n + QUERIES - 1) // QUERIES
    block, do_block = np.zeros((QUERIES, d), u.dtype), np.zeros((QUERIES, e), u.dtype)
    S, G, W = np.empty((3, QUERIES, stop + width), u.dtype)
    spare, chunk = np.empty(stop, u.dtype), np.empty(stop, u.dtype)
    ones = np.ones(stop, u.dtype)
    dq_block = np.empty((QUERIES, key_panels.shape[1] * width), u.dtype)

    for task in range(first, heads * parts, step):
        h, part = task // parts, task % parts
        p, columns = of[h], sums[part, h]
        columns[:] = kind(0)
        if stage == LAST and dS.size == 0:
            dk[part, h], d_values[part, h] = kind(0), kind(0)
        mass = mu if odd else np.exp2(log_nu[p])
        for i0 in range(blocks * part // parts * QUERIES, min(n, blocks * (part + 1) // parts * QUERIES), QUERIES):
            rows = min(QUERIES, n - i0)
            if X.size:
                copy_rows(X, h, i0, rows, S)
            else:
                copy_rows(q, q_of[h], i0, rows, block)
                rows_product(block, rows, keys, k_of[h] * keys.shape[1] * d * width, d * width, 0, keys.shape[1], d, S, S.shape[1], alpha)
                for r in range(rows):
                    hide_keys(S[r], m, stop, mask, mask_of[h])
            if stage != PAIR and dP.size:
                copy_rows(dP, dP_of[h], i0, rows, G)
                for r in range(rows):
                    for j in range(m, stop):
                        G[r, j] = kind(0)
            elif stage != PAIR:
                copy_rows(do, do_of[h], i0, rows, do_block)
                rows_product(do_block, rows, values, v_of[h] * values.shape[1] * e * width, e * width, 0, values.shape[1], e, G,
                             G.shape[1], factor[h])

            chunk[:] = kind(0)
            for r in range(rows):
                row, line, weights, i = S[r], G[r], W[r], i0 + r
                if stage != PAIR:                                      # G = dP * P
                    if odd:
                        row_weights(row, stop, v[last, p], broken[p], weights)
                    else:
                        column_weights(row, stop, u[last, p, i], v[last + 1, p], log_nu[p], broken[p], weights)
                    times_plan(line, weights, mass, stop)
                if stage == FIRST:
                    du[last, h, i] = sum_of_products(line, ones, stop)
                    if odd:
                        subtract_multiple(line, du[last, h, i], weights, stop)
                    add_line(line, chunk, stop)
                elif stage == PAIR:
                    column_weights(row, stop, u[pair, p, i], v[pair + 1, p], log_nu[p], broken[p], weights)
                    du[pair, h, i] -= sum_of_products(dv[pair, h], weights, stop)
                    row_weights(row, stop, v[pair, p], broken[p], weights)
                    subtract_multiple(chunk, du[pair, h, i], weights, stop)
                else:
                    for t in range(count - 1, -1, -1):
                        if t % 2 == 0:
                            row_weights(row, stop, v[t // 2, p], broken[p], spare)
                            subtract_multiple(line, du[t // 2, h, i], spare, stop)
                            if detached:
                                break
                        elif not detached:
                            column_weights(row, stop, u[t // 2, p, i], v[t // 2 + 1, p], log_nu[p], broken[p], spare)
                            subtract_products(line, dv[t // 2, h], spare, stop)
            add_line(chunk, columns, stop)

            if stage == LAST and dS.size:
                for r in range(rows):
                    for j in range(m):
                        dS[h, i0 + r, j] = G[r, j] / eps
            elif stage == LAST:
                d_step, e_step = key_panels.shape[1] * width, do_panels.shape[1] * width
                add_turned_product(W, m, rows, do_panels, do_of[h] * n * e_step, i0, d_values[part, h], mass * factor[h])
                add_turned_product(G, m, rows, q_panels, q_of[h] * n * d_step, i0, dk[part, h], slope)
                dq_block[:] = kind(0)
                for start in range(0, m, CHUNK):
                    add_columns_product(G, rows, G.shape[1], start, min(CHUNK, m - start), key_panels, k_of[h] * m * d_step, start,
                                        dq_block, d_step)
                for r in range(rows):
                    for c in range(d_step):
                        dq[h, i0 + r, c] = dq_block[r, c] * slope


class Pass(NamedTuple):
    """What all passes share: the arguments of `reverse_rows` from X to eps, and those of its products."""

    source: tuple
    products: tuple
    heads: int
    n: int
    m: int
    work: float


def reversed_steps(what: Pass, of, steps: Steps, dS):
    """All passes. of: which of the problems of `steps` a head is."""
    rows, _, n = steps.u.shape
    stop, kind = steps.v.shape[2], steps.u.dtype
    broken = np.isnan(steps.u).any(axis=(0, 2)) | np.isnan(steps.v).any(axis=(0, 2))
    parts = number_of_parts(what.heads, n)
    du, dv = np.zeros((rows, what.heads, n), kind), np.zeros((rows, what.heads, stop), kind)
    sums = np.empty((parts, what.heads, stop), kind)

    def go(stage, pair, work):
        in_parallel(reverse_rows, what.heads * parts, stage, pair, *what.source, steps.taken, of, steps.u, steps.v, broken,
                    np.exp2(steps.log_mu), steps.log_nu, steps.detached, du, dv, sums, dS, *what.products, work=work)

    go(FIRST, 0, what.work)
    if not steps.detached:
        for pair in range(steps.taken // 2 - 1, -1, -1):
            dv[pair] = sums.sum(axis=0)
            go(PAIR, pair, what.work)
    go(LAST, 0, what.work * steps.taken)


def number_of_parts(heads, n):
    return max(1, min(-(-n // QUERIES), PARTS // max(heads, 1)))


def plan_gradient(X, dP, dP_of, steps: Steps, eps) -> np.ndarray:
    """dS (heads, n, m) of the scores whose logits are X, for a cotangent dP (b, n, m) of the plan."""
    kind, (heads, n, _), m = X.dtype, X.shape, dP.shape[2]
    dS = np.zeros((heads, n, m), kind)
    if dS.size:
        none, nobody = np.empty((1, 1, 0), kind), np.zeros(heads, np.int64)
        panels = np.empty((1, 0, 1, panel_width(kind)), kind)
        source = (X, none, nobody, panels, nobody, m, np.empty((0, 1, 1), np.bool_), nobody, kind.type(0), dP, dP_of, none, nobody,
                  panels, nobody, np.empty(heads, kind), kind.type(eps))
        products = (panels, panels, panels, kind.type(0), none, np.empty((1, heads, 0, 0), kind), np.empty((1, heads, 0, 0), kind))
        reversed_steps(Pass(source, products, heads, n, m, 40.0 * X.size), np.arange(heads), steps, dS)
    return dS


def qkv_gradients(problem, of, v, v_of, do, do_of, factor, steps: Steps, slope, ones: bool):
    """dq (heads, n, d), dk (heads, m, d), d_values (heads, m, e): slope dS k, slope dS^T q and factor P^T do.

    problem: queries and keys as `sinkhorn.Problem` has them; of: which of its heads each head is. ones: queries and keys are followed by a
    feature of ones, so that dq and dk have one more, with the sums of dS.
    """
    kind, (q, q_of, _), (k, k_of, k_panels) = do.dtype, problem.q, problem.k
    heads, n, m, e = len(of), q.shape[1], k.shape[1], v.shape[2]
    d = q.shape[2] + ones
    if min(heads, n, m) == 0:
        return np.zeros((heads, n, d), kind), np.zeros((heads, m, d), kind), np.zeros((heads, m, e), kind)
    q_panels, key_panels, do_panels = (packed_columns(with_ones(x) if more else x) for x, more in ((q, ones), (k, ones), (do, False)))
    parts, width = number_of_parts(heads, n), panel_width(kind)
    dq = np.empty((heads, n, key_panels.shape[1] * width), kind)
    dk = np.empty((parts, heads, m + ROWS, q_panels.shape[1] * width), kind)
    d_values = np.empty((parts, heads, m + ROWS, do_panels.shape[1] * width), kind)
    none = np.empty((0, 1, 1), kind)
    source = (none, q, q_of[of], k_panels, k_of[of], m, problem.mask, problem.mask_of[of], kind.type(problem.scale * LOG2_E),
              none, of, do, do_of, packed_rows(v), v_of, factor, kind.type(1))
    products = (q_panels, key_panels, do_panels, slope, dq, dk, d_values)
    reversed_steps(Pass(source, products, heads, n, m, heads * n * m * (40.0 + d + e)), of, steps, none)
    return dq[..., :d], dk.sum(axis=0)[:, :m, :d], d_values.sum(axis=0)[:, :m, :e]


def with_ones(x):
    return np.concatenate([x, np.ones((*x.shape[:-1], 1), x.dtype)], axis=-1)
