"""Twin of reference/higher_order/tensor_poly.py: a panel of columns of the values at a time, monomials made when they are needed.

A monomial of degree t is one of degree t - 1 times a variable, so that each costs one product. A task is one panel of columns of
[v1, 1] and [v2, 1] of one head, the last column being that of the normaliser:

    for each CHUNK of first keys, and of second keys:  sums += U^T v               (monomials, width)
    M = weight ∘ sums1 ∘ sums2
    for each panel of queries:  out^T = M^T U1^T                                   (width, queries), CHUNK monomials at a time

Under causal the sums grow from query to query, out_i = sum_α U1_iα M_α, in registers.
"""

import math

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.higher_order.pairs import tensor_scale
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, packed_columns
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import ROWS, block_product, lanes, load, splat, store
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import CAUSAL, number, one_of, whole

MOST_FEATURES = 20_000_000


def monomial_table(d: int, degree: int, centre: float):
    """parent, variable and weight of each monomial x^α, |α| <= degree, by degree: x^α = x^parent x_variable.

    The weight is c_|α| |α|!/α! = e^c sum_{u<=degree-|α|} (-c)^u / u! / α!.
    """
    parents, variables, inverse, totals = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], [np.ones(1)], [np.zeros(1, np.int64)]
    repeated = np.zeros(1)                                   # how often the last variable stands in each monomial
    first = 0
    for t in range(1, degree + 1):
        last, count = variables[-1], len(variables[-1])
        children = d - last if t > 1 else np.full(1, d)
        parent = np.repeat(np.arange(count), children)
        start = np.repeat(np.cumsum(children) - children, children)
        variable = np.arange(len(parent)) - start + last[parent]
        repeated = np.where((variable == last[parent]) & (t > 1), repeated[parent], 0) + 1
        inverse.append(inverse[-1][parent] / repeated)
        parents.append(parent + first)
        variables.append(variable)
        totals.append(np.full(len(parent), t))
        first += count
    u = np.arange(degree + 1)
    tails = np.cumsum((-centre) ** u / np.cumprod(np.maximum(u, 1.0)))
    weight = np.exp(centre) * tails[degree - np.concatenate(totals)] * np.concatenate(inverse)
    return np.concatenate(parents), np.concatenate(variables), weight


@helper
def monomials_of(x, start, count, width, parent, variable, U):
    """U[α, :width] = the monomials of the rows start ... start + count of x (rows, d), one row a column; the rest is 0."""
    for w in range(width):
        U[0, w] = 1 if w < count else 0
    for a in range(1, parent.size):
        below, c = parent[a], variable[a]
        for w in range(count):
            U[a, w] = U[below, w] * x[start + w, c]
        for w in range(count, width):
            U[a, w] = 0


@helper
def sum_features(x, values, at, width, parent, variable, U, sums):
    """sums = sum_j U_jα v_j (monomials, width) for the panel of packed values from flat position `at`."""
    one = U.dtype.type(1)
    sums[:] = 0
    for start in range(0, x.shape[0], CHUNK):
        terms = min(CHUNK, x.shape[0] - start)
        monomials_of(x, start, terms, terms, parent, variable, U)
        for a in range(0, parent.size, ROWS):
            block_product(U, a * CHUNK, CHUNK, values, at + start * width, sums, a * width, width, terms, one, True)


@kernel
def poly_panels(q, q_of, k1, k1_of, k2, k2_of, v1, v1_of, v2, v2_of, parent, variable, weight, out, first, step):
    """out (h, panels, n, width) = U1 [(U2^T v1) ∘ (U3^T v2)] for packed columns v1 (b, panels, m1, width) and v2."""
    heads, panels, n, width = out.shape
    rank, m1, m2 = parent.size, v1.shape[2], v2.shape[2]
    whole_rank, whole_width = (rank + ROWS - 1) // ROWS * ROWS, (width + ROWS - 1) // ROWS * ROWS
    zero, one = q.dtype.type(0), q.dtype.type(1)
    U = np.zeros((whole_rank, CHUNK), q.dtype)
    sums1, sums2 = np.empty((whole_rank, width), q.dtype), np.empty((whole_rank, width), q.dtype)
    M, features = np.zeros((whole_width, rank), q.dtype), np.empty((rank, width), q.dtype)
    turned = np.empty((whole_width, width), q.dtype)
    for task in range(first, heads * panels, step):
        h, p = task // panels, task % panels
        sum_features(k1[k1_of[h]], v1, (v1_of[h] * panels + p) * m1 * width, width, parent, variable, U, sums1)
        sum_features(k2[k2_of[h]], v2, (v2_of[h] * panels + p) * m2 * width, width, parent, variable, U, sums2)
        for a in range(rank):
            for w in range(width):
                M[w, a] = weight[a] * (sums1[a, w] * sums2[a, w])
        for i in range(0, n, width):
            count = min(width, n - i)
            monomials_of(q[q_of[h]], i, count, width, parent, variable, features)
            turned[:] = zero
            for start in range(0, rank, CHUNK):
                terms = min(CHUNK, rank - start)
                for w in range(0, whole_width, ROWS):
                    block_product(M, w * rank + start, rank, features, start * width, turned, w * width, width, terms, one, True)
            for r in range(count):
                for w in range(width):
                    out[h, p, i + r, w] = turned[w, r]


@helper
def add_keys(x, values, j, stop, parent, variable, u, chunk, done):
    """done + chunk += sum_{j <= t < stop} U_tα v_t, for one panel of values (m, width); returns stop.

    `chunk` holds the sum over the keys since the last multiple of CHUNK, and joins `done` at the next one.
    """
    width = values.shape[1]
    while j < stop:
        u[0] = 1
        for a in range(1, parent.size):
            u[a] = u[parent[a]] * x[j, variable[a]]
        for a in range(parent.size):
            for w in range(width):
                chunk[a, w] += u[a] * values[j, w]
        j += 1
        if j % CHUNK == 0:
            for a in range(parent.size):
                for w in range(width):
                    done[a, w] += chunk[a, w]
                    chunk[a, w] = 0
    return j


@kernel
def poly_causal_panels(q, q_of, k1, k1_of, k2, k2_of, v1, v1_of, v2, v2_of, low1, low2, parent, variable, weight, out, first, step):
    """out (h, panels, n, width) as poly_panels, query i seeing the first keys j <= i + low1 and the second keys j <= i + low2."""
    heads, panels, n, width = out.shape
    rank, m1, m2 = parent.size, v1.shape[2], v2.shape[2]
    zero, count = q.dtype.type(0), lanes(q)
    u = np.empty(rank, q.dtype)
    chunk1, done1 = np.empty((rank, width), q.dtype), np.empty((rank, width), q.dtype)
    chunk2, done2 = np.empty((rank, width), q.dtype), np.empty((rank, width), q.dtype)
    for task in range(first, heads * panels, step):
        h, p = task // panels, task % panels
        chunk1[:], done1[:], chunk2[:], done2[:] = zero, zero, zero, zero
        j1, j2 = 0, 0
        for i in range(n):
            j1 = add_keys(k1[k1_of[h]], v1[v1_of[h], p], j1, min(m1, i + low1 + 1), parent, variable, u, chunk1, done1)
            j2 = add_keys(k2[k2_of[h]], v2[v2_of[h], p], j2, min(m2, i + low2 + 1), parent, variable, u, chunk2, done2)
            u[0] = 1
            for a in range(1, rank):
                u[a] = u[parent[a]] * q[q_of[h], i, variable[a]]
            for w in range(0, width, count):
                total = splat(zero, q)
                for start in range(0, rank, CHUNK):
                    part = splat(zero, q)
                    for a in range(start, min(start + CHUNK, rank)):
                        at = a * width + w
                        both = (load(done1, at) + load(chunk1, at)) * (load(done2, at) + load(chunk2, at))
                        part = part + splat(u[a] * weight[a], q) * both
                    total = total + part
                store(out, ((h * panels + p) * n + i) * width + w, total)


@twin
def tensor_attention_poly(q, k1, k2, v1, v2, *, degree=8, centre=0.0, scale=None, causal=False):
    """Approximate tensor attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    The parameters are those of the reference.
    """
    one_of("causal", causal, CAUSAL)
    dtype = q.dtype
    n, m1, m2, d, e = q.shape[-2], k1.shape[-2], k2.shape[-2], q.shape[-1], v1.shape[-1]
    g, c = whole("degree", degree), number("centre", centre)
    rank, rows = math.comb(d + g, g), max(1, d, *(math.prod(x.shape[:-1]) for x in (q, k1, k2)))
    if rows * rank > MOST_FEATURES:
        raise ValueError(f"degree: expected at most {MOST_FEATURES} features, got {rows} times the rank C({d} + {g}, {g}) = {rank}")
    parent, variable, weight = monomial_table(d, g, c)
    lead = np.broadcast_shapes(*(x.shape[:-2] for x in (q, k1, k2, v1, v2)))
    heads = math.prod(lead)

    def with_ones(v):
        values, index = heads_of(np.concatenate([v, np.ones((*v.shape[:-1], 1), dtype)], axis=-1), lead)
        return packed_columns(values), index

    arrays = (
        *heads_of(q * dtype.type(tensor_scale(scale, d)), lead), *heads_of(k1, lead), *heads_of(k2, lead), *with_ones(v1), *with_ones(v2),
    )
    panels, width = arrays[6].shape[1], arrays[6].shape[3]
    out = np.empty((heads, panels, n, width), dtype)
    table = parent, variable, weight.astype(dtype)
    work = heads * panels * width * rank * (n + m1 + m2)
    last = [(m - n if causal in (True, "bottom-right") else 0) for m in (m1, m2)]
    if causal is False:
        in_parallel(poly_panels, heads * panels, *arrays, *table, out, work=work)
    else:
        in_parallel(poly_causal_panels, heads * panels, *arrays, *last, *table, out, work=work)
    sums = np.moveaxis(out, 1, 2).reshape(*lead, n, panels * width)
    first_seen = 0 if causal is False else max(0, *(-corner for corner in last))
    nothing = (np.arange(n) < first_seen) | (min(m1, m2) == 0)
    return np.where(nothing[:, None], dtype.type(0), sums[..., :e] / sums[..., e : e + 1])
