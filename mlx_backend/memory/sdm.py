"""Twins of reference/memory/sdm.py as graphs, exact: sums of whole numbers in the CPU's float64, long ones in limbs of 31 bits."""

from decimal import MAX_EMAX, Decimal, localcontext

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.graph import total, turned
from attnspec.mlx_backend.memory.sdm_circle import bits_and_radius, intersections, table_of
from attnspec.mlx_backend.memory.whole_numbers import exact_product, limbs, sign_of_sum
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import number, one_of, whole
from attnspec.reference.memory.sdm import SDMStorage

WEIGHTINGS = ("circle", "exponential")


def hamming_distances(a, b):
    """Number of differing bits (..., n, m), int32, of a (..., n, d) and b (..., m, d): |a| + |b| - 2 <a, b>, exact for d < 2^22."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    apart = total(a, keepdims=True) + turned(total(b, keepdims=True)) - 2 * (a @ turned(b))
    return apart.astype(mx.int32)


def within(a, b, radius):
    """Whether rows of a and b are within the radius of each other, (..., n, m)."""
    return hamming_distances(a, b) <= whole("radius", int(radius))


@twin
def sdm_write(locations, addresses, pointers, *, radius):
    """SDMStorage (storage, counts) of the neurons at `locations` after all patterns were written; the parameters are the reference's."""
    W = turned(within(addresses, locations, radius))                   # (..., r, m)
    return SDMStorage(exact_product(W, pointers), total(W.astype(mx.int64)))


@twin
def sdm_read(queries, locations, storage, counts, *, radius, n_iters=1):
    """Bits (..., n, d) that the neurons answer to the queries (..., n, d); the parameters are those of the reference."""
    xi = queries.astype(mx.int64)
    for _ in range(whole("n_iters", n_iters, least=1)):
        a = within(xi, locations, radius)
        sums = exact_product(a, counts[..., None])
        xi = mx.where(sums == 0, xi, (2 * exact_product(a, storage) > sums).astype(mx.int64))
    return xi


@twin
def sdm_update(queries, addresses, pointers, *, radius=None, weighting="circle", beta=None, n_iters=1):
    """Bits (..., n, d) that the patterns answer to the queries (..., n, d); the parameters are those of the reference."""
    one_of("weighting", weighting, WEIGHTINGS)
    d = queries.shape[-1]
    if beta is None and d < 1:
        raise ValueError(f"queries: expected at least 1 in the last axis, got {d}")
    if weighting == "circle":
        weights = intersections(*bits_and_radius(d, required(radius)))
    else:
        weights = whole_exponentials(float(fitted_beta(beta, d, radius)), d, addresses.shape[-2])
    table, reaches = limbs(weights), mx.array(np.array([w != 0 for w in weights]))
    votes = 2 * pointers.astype(mx.int32) - 1
    xi = queries.astype(mx.int64)
    for _ in range(whole("n_iters", n_iters, least=1)):
        apart = hamming_distances(xi, addresses)
        sums = mx.stack([exact_product(mx.take(mx.array(limb), apart), votes) for limb in table.T], axis=-1)
        reached = mx.any(mx.take(reaches, apart), axis=-1, keepdims=True)
        xi = mx.where(reached, (sign_of_sum(sums) > 0).astype(mx.int64), xi)
    return xi


# --- weights of patterns -------------------------------------------------------------------------------------------------------------


def required(radius):
    """The radius, which is an option only where another option replaces it."""
    if radius is None:
        raise ValueError("radius: expected a whole number, got None")
    return radius


def fitted_beta(beta, n_bits, radius):
    """beta, or the slope of log I over cosines by the authors' arithmetic."""
    if beta is not None:
        return float(number("beta", beta, finite=True))
    n, d = bits_and_radius(n_bits, required(radius))
    d = whole("radius", d, least=2)
    x, y = 1 - 2 * np.arange(d) / n, np.array(table_of(n, d, None, True)[:d])
    return float(np.sum((x - x.mean()) * (y - y.mean())) / (d - 1) / np.mean((x - x.mean()) ** 2))


def whole_exponentials(beta, d, m):
    """exp(-2 beta k/d), k = 0 .. d, to 40 digits, all times the same number, as whole numbers.

    m: how many patterns are weighed with them. A step beyond log(4 m) counts as log(4 m): one pattern then outweighs all that are farther.
    """
    with localcontext(prec=40, Emax=MAX_EMAX):
        most = Decimal(4 * max(m, 1)).ln()
        step = max(-most, min(most, 2 * Decimal(beta) / max(d, 1)))
        logits = [-step * k for k in range(d + 1)]
        return [int((x - min(logits[0], logits[-1])).exp().scaleb(40)) for x in logits]
