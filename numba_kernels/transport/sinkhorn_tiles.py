"""Half-steps on a matrix of logits X (heads, n, whole panels of m), in base 2; hidden entries and those beyond m are -inf.

A row step and the column step after it are one pass over X, and one exponential an entry:

    top, total of X_i + v           W_ij = 2^(X_ij + v_j - top) / total      u_i = log2 mu - top - log2 total
    columns_j = sum_i W_ij          v_j <- v_j + log2 nu - log2 mu - log2 columns_j

A column whose sum is too small to be exact is summed again on its own, its largest term taken out. What is NaN stays away from entries of
-inf: 0 * NaN is not what a hidden entry adds.
"""

import numpy as np

from attnspec.numba_kernels.exponential import LOG2_E, exp2_any, exp2_row, range_of_row
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, rows_product
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import lane_max, lane_min, lanes, load, maximum, minimum, splat, store
from attnspec.numba_kernels.softmax.tiles import QUERIES, copy_rows

ROWS = COLUMNS = CHUNK       # of a task: no longer chains in the sums of columns
EXACT = 2.0**-60             # sums of columns from here on have lost nothing to underflow


class Potentials:
    """The potentials u (heads, n) and v (heads, whole panels of m) of logits X in base 2, and what a row step leaves of v."""

    def __init__(self, X, v):
        heads, self.m = v.shape
        self.u = np.zeros((heads, X.shape[1]), X.dtype)
        self.v = np.zeros((heads, X.shape[2]), X.dtype)
        self.v[:, : self.m] = v
        self.v_before = self.v.copy()

    def step(self, X, log_mu, log_nu, relaxation=1.0, columns=True):
        """A row step, and unless told otherwise the column step after it; returns the change of u. log_nu: (heads,)."""
        heads, n = self.u.shape
        kind, before, tasks = X.dtype.type, self.u.copy(), -(-n // ROWS)
        sums = np.empty((heads, tasks, X.shape[2]), X.dtype)
        in_parallel(row_step, heads * tasks, X, self.v, kind(log_mu), self.u, sums, work=20 * heads * X[0].size if heads else 0)
        self.v_before[:] = self.v
        if columns:
            in_parallel(column_step, heads * -(-self.m // COLUMNS), X, self.u, sums, kind(log_mu), log_nu, kind(relaxation), self.m, self.v,
                        work=10 * sums.size)
        return self.u - before


# --- rows ----------------------------------------------------------------------------------------------------------------------------


@helper
def any_nan(x):
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i] - x[i]
    return total != total


@helper
def add_potential(row, stop, potential, broken, out):
    """out = row + potential; returns the smallest and the largest sum, NaN passed over. broken: the potential may be NaN."""
    if broken:
        for j in range(stop):
            out[j] = row[j] if row[j] == -np.inf else row[j] + potential[j]
        return range_of_row(out, 0, stop)
    width = lanes(row)
    low, high = splat(row.dtype.type(np.inf), row), splat(row.dtype.type(-np.inf), row)
    low_1, high_1 = low, high
    for j in range(0, stop, 2 * width):
        x, y = load(row, j) + load(potential, j), load(row, j + width) + load(potential, j + width)
        store(out, j, x)
        store(out, j + width, y)
        low, low_1, high, high_1 = minimum(x, low), minimum(y, low_1), maximum(x, high), maximum(y, high_1)
    return lane_min(minimum(low, low_1)), lane_max(maximum(high, high_1))


@helper
def exp2_line(row, stop, shift, lowest):
    """`exp2_row` of a whole row, its sum in chains of at most CHUNK terms."""
    total = row.dtype.type(0)
    for start in range(0, stop, CHUNK * lanes(row)):
        total += exp2_row(row, start, min(stop, start + CHUNK * lanes(row)), shift, lowest)
    return total


@kernel
def row_step(X, v, log_mu, u, sums, first, step):
    """u (h, n), and for each task of ROWS rows the sums (h, tasks, m) over its normalised rows. A row without mass keeps its u."""
    heads, tasks, stop = sums.shape
    n, kind = u.shape[1], u.dtype.type
    row = np.empty(stop, u.dtype)
    for task in range(first, heads * tasks, step):
        h, part = task // tasks, task % tasks
        columns, broken = sums[h, part], any_nan(v[h])
        columns[:] = kind(0)
        for i in range(part * ROWS, min(n, (part + 1) * ROWS)):
            smallest, top = add_potential(X[h, i], stop, v[h], broken, row)
            shift = top if top > -np.inf else kind(0)
            total = exp2_line(row, stop, shift, smallest)
            if total == 0:
                continue
            u[h, i] = log_mu - (shift + np.log2(total))
            if total == total:
                share = splat(kind(1) / total, row)
                for j in range(0, stop, lanes(row)):
                    store(columns, j, load(columns, j) + load(row, j) * share)
            else:
                for j in range(stop):
                    columns[j] = columns[j] if X[h, i, j] == -np.inf else total


# --- columns -------------------------------------------------------------------------------------------------------------------------


@kernel
def column_step(X, u, sums, log_mu, log_nu, relaxation, m, v, first, step):
    """v (h, m) <- relaxation (v + log2 nu - log2 sum_i 2^(X_ij + u_i + v_j)); 0 where no row reaches the column."""
    heads, tasks, stop = sums.shape
    kind, blocks = u.dtype.type, (m + COLUMNS - 1) // COLUMNS
    total, top, again = np.empty(COLUMNS, u.dtype), np.empty(COLUMNS, u.dtype), np.empty(COLUMNS, u.dtype)
    for task in range(first, heads * blocks, step):
        h, j0 = task // blocks, task % blocks * COLUMNS
        count = min(COLUMNS, stop - j0)
        total[:] = kind(0)
        for part in range(tasks):
            for c in range(count):
                total[c] += sums[h, part, j0 + c]
        small = False
        for c in range(min(count, m - j0)):
            small = small or total[c] < kind(EXACT)
        if small:
            sum_columns_again(X[h], u[h], j0, count, top, again)
        for c in range(min(count, m - j0)):
            j = j0 + c
            if not total[c] < kind(EXACT):
                v[h, j] = relaxation * (v[h, j] + (log_nu[h] - log_mu) - np.log2(total[c]))
            elif top[c] > -np.inf:
                v[h, j] = relaxation * (log_nu[h] - (top[c] + np.log2(again[c])))
            else:
                v[h, j] = kind(0)


@helper
def sum_columns_again(X, u, j0, count, top, total):
    """The largest X_ij + u_i of some columns, and the sum of 2^(X_ij + u_i - top_j); rows whose u is NaN do not reach them."""
    n, stop = X.shape
    kind, limits = X.dtype.type, np.finfo(X.dtype)
    one, least = splat(kind(1), top), splat(kind(limits.minexp - limits.nmant - 1), top)
    top[:], total[:] = kind(-np.inf), kind(0)
    for i in range(n):
        if u[i] == u[i]:
            for c in range(0, count, lanes(top)):
                store(top, c, maximum(load(X, i * stop + j0 + c) + splat(u[i], top), load(top, c)))
    for c in range(0, count, lanes(top)):
        shift = maximum(load(top, c), splat(kind(limits.min), top))          # -inf - -inf is NaN
        for i0 in range(0, n, CHUNK):
            chunk = one - one
            for i in range(i0, min(n, i0 + CHUNK)):
                if u[i] == u[i]:
                    chunk = chunk + exp2_any(load(X, i * stop + j0 + c) + splat(u[i], top) - shift, one, least)
            store(total, c, load(total, c) + chunk)


# --- between logits, scores and plans ------------------------------------------------------------------------------------------------


@kernel
def logits(q, q_of, keys, k_of, m, mask, mask_of, alpha, X, first, step):
    """X (h, n, whole panels) = alpha q k^T, -inf at keys that are masked."""
    _, n, d = q.shape
    stop, width = X.shape[2], keys.shape[3]
    heads, blocks = q_of.size, (n + QUERIES - 1) // QUERIES
    block, S = np.zeros((QUERIES, d), q.dtype), np.empty((QUERIES, stop), q.dtype)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        rows = min(QUERIES, n - i0)
        copy_rows(q, q_of[h], i0, rows, block)
        out = X[h, i0:i0 + QUERIES] if rows == QUERIES else S
        rows_product(block, rows, keys, k_of[h] * keys.shape[1] * d * width, d * width, 0, keys.shape[1], d, out, stop, alpha)
        if rows < QUERIES:
            copy_block(S, rows, X[h], i0)
        for i in range(i0, i0 + rows):
            hide_keys(X[h, i], m, stop, mask, mask_of[h])


@helper
def copy_block(block, rows, out, i0):
    for r in range(rows):
        for j in range(out.shape[1]):
            out[i0 + r, j] = block[r, j]


@helper
def hide_keys(row, m, stop, mask, one):
    """Put -inf at masked keys and beyond the last."""
    none = row.dtype.type(-np.inf)
    if mask.size:
        seen = mask[one, 0]
        for j in range(m):
            row[j] = row[j] if seen[j] else none
    for j in range(m, stop):
        row[j] = none


@kernel
def scaled_scores(S, S_of, mask, mask_of, m, eps, X, top, first, step):
    """X (h, n, whole panels) = (S - top) log2(e) / eps with the largest visible score top (h, n) of each row, -inf where invisible.

    A row with a score that is NaN or +inf is NaN wherever it is visible.
    """
    heads, n, stop = X.shape
    kind, none = X.dtype.type, X.dtype.type(-np.inf)
    tasks = (n + ROWS - 1) // ROWS
    for task in range(first, heads * tasks, step):
        h, part = task // tasks, task % tasks
        for i in range(part * ROWS, min(n, (part + 1) * ROWS)):
            row, out = S[S_of[h], i], X[h, i]
            for j in range(m):
                out[j] = row[j]
            hide_keys(out, m, stop, mask, mask_of[h])
            _, largest = range_of_row(out, 0, stop)
            for j in range(m):
                largest = out[j] if out[j] != out[j] else largest
            top[h, i] = largest if largest != -np.inf else kind(0)
            if top[h, i] - top[h, i] == 0:
                for j in range(m):
                    out[j] = (out[j] - top[h, i]) / eps * kind(LOG2_E)
            else:
                for j in range(m):
                    out[j] = none if out[j] == none else kind(np.nan)


@kernel
def plan_rows(X, u, v, log_mu, after_rows, P, first, step):
    """P (h, n, m): rows of 2^(X + v), normalised to 1/n after a row step, times 2^u after a column step."""
    heads, n, m = P.shape
    kind, stop = P.dtype.type, X.shape[2]
    row = np.empty(stop, P.dtype)
    tasks = (n + ROWS - 1) // ROWS
    for task in range(first, heads * tasks, step):
        h, part = task // tasks, task % tasks
        broken = any_nan(v[h])
        for i in range(part * ROWS, min(n, (part + 1) * ROWS)):
            smallest, top = add_potential(X[h, i], stop, v[h], broken, row)
            shift = top if top > -np.inf else kind(0)
            total = exp2_line(row, stop, shift, smallest)
            share = np.exp2(log_mu) / total if after_rows else np.exp2(u[h, i] + shift)
            for j in range(m):
                hidden = X[h, i, j] == -np.inf
                P[h, i, j] = (kind(0) if after_rows else v[h, j] - v[h, j]) if hidden else row[j] * share      # a NaN column is all NaN
