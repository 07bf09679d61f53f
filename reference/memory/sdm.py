"""Sparse Distributed Memory: bits written to all neurons near their address, and read from all neurons near the query.

    write:  W_mt = [Ham(p_m, x_t) <= radius],   v_t = sum_m W_mt q_m,   h_t = sum_m W_mt
    read:   a_it = [Ham(xi_i, x_t) <= radius],  xi_i <- [sum_t a_it v_t > 1/2 sum_t a_it h_t]        (every bit by itself)

    the same, seen from the patterns:           xi_i <- [sum_m w_im q_m > 1/2 sum_m w_im],  w_im = number of neurons near both p_m and xi_i
    with very many neurons, or expected:        w_im = I(Ham(p_m, xi_i))             the circle intersection (see `sdm_circle_intersection`)
    as Attention:                               w_im = exp(beta cos_im),             cos = 1 - 2 Ham/d

where x (..., r, d) are the neurons' addresses ("hard locations"), p and q (..., m, d) the patterns' addresses and pointers, xi (..., n, d)
queries, v (..., r, d) what the neurons store and h (..., r) how many patterns they hold; all but v and h are bits. The memory is
autoassociative where q = p. Here d counts bits; the paper calls that n, and the radius d.

Source: Kanerva, "Sparse Distributed Memory", MIT Press 1988; Bricken & Pehlevan, "Attention Approximates Sparse Distributed Memory",
arXiv:2111.05498, section 1, and the authors' code (update_Binary_Neuron_SDM, update_using_cache, update_Binary_Attention).

Conventions. A bit is 1 where more than half of the weight says so; at a tie it is 0. A query that reaches no neuron, or only neurons that
hold nothing, or no pattern, stays as it is (the authors' neurons give zeros there, their patterns leave the query). Reading repeats
up to n_iters times and stops when no bit changes. Weights are summed exactly, as whole numbers, since a tie decides a bit; exponentials
have 40 digits.

Identities. Kanerva's counters C_t = sum_m W_mt (2 q_m - 1) = 2 v_t - h_t, read by the sign of sum_t a_it C_t, give the same bits. Reading
neurons equals the pattern view with counted w; with a neuron at every address w is I itself. Writing two sets of patterns adds
their storages. A single pattern is recalled from every query whose circle holds a neuron of its own.

Wrong versions met elsewhere: >= 1/2; averaging the averages of the neurons instead of dividing the sums; distances through cosines of
float32 vectors, which are off by one near the radius; clearing queries that reach nothing.
"""

from decimal import MAX_EMAX, Decimal, localcontext
from typing import Any, NamedTuple

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import number, one_of, whole
from attnspec.reference.memory.sdm_beta import sdm_fit_beta
from attnspec.reference.memory.sdm_circle import bits_and_radius, circle_intersections

FACTS: dict[str, Any] = {
    "family": "memory",
    "source": "arXiv:2111.05498, section 1; Kanerva 1988",
    "discrete": True,
    "sizes": {"r": 40, "d": 12},
}


def hamming_distances(a, b):
    """Number of differing bits (..., n, m) of a (..., n, d) and b (..., m, d)."""
    b = np.swapaxes(b, -1, -2)
    return a @ (1 - b) + (1 - a) @ b


def iterated(update, queries, n_iters):
    """`update` applied n_iters times to the queries, or until no bit changes."""
    for _ in range(whole("n_iters", n_iters, least=1)):
        previous, queries = queries, update(queries)
        if np.array_equal(previous, queries):
            break
    return queries


def draw_memory(record):
    """Random bits for the record's arrays, and a radius of a third of their number."""

    def draw(sizes, rng):
        arrays = {name: record().draw_one(name, sizes, rng) for name in record().required}
        return {**arrays, "radius": np.array((sizes["d"] + 1) // 3)}

    return draw


class SDMStorage(NamedTuple):
    """What the neurons of a Sparse Distributed Memory hold."""

    storage: np.ndarray        # (..., r, d) per bit, how many patterns with a 1 were written to each neuron
    counts: np.ndarray         # (..., r) how many patterns were written to each neuron


@formula(
    shapes={"locations": "bits ... r d", "addresses": "bits ... m d", "pointers": "bits ... m d", "radius": "int",
            "storage": "int ... r d", "counts": "int ... r"},
    equation="W_mt = [Ham(p_m, x_t) <= radius],  storage_t = sum_m W_mt q_m,  counts_t = sum_m W_mt",
    latex=r"W_{mt}=[\mathrm{Ham}(p_m,x_t)\le\mathrm{radius}],\quad v_t=\sum_m W_{mt}\,q_m,\quad h_t=\sum_m W_{mt}",
    bound="exact",
    workspace="... m r",
    draw=draw_memory(lambda: sdm_write.record),
    **FACTS,
)
def sdm_write(locations, addresses, pointers, *, radius):
    """SDMStorage (storage, counts) of the neurons at `locations` after all patterns were written.

    locations: addresses (..., r, d) of the neurons, bits.  addresses, pointers: (..., m, d) where and what each pattern writes, bits.
    radius: Hamming radius within which a neuron is written to.
    Raises ValueError where shapes do not match, an array is not of bits or the radius is out of range, naming the argument.

    >>> sdm_write([[0, 0], [1, 1]], [[0, 0], [0, 1]], [[1, 0], [1, 1]], radius=1)
    SDMStorage(storage=array([[2, 1],
           [1, 1]]), counts=array([2, 1]))
    """
    radius = whole("radius", int(radius))
    W = (hamming_distances(addresses, locations) <= radius).astype(np.int64)
    return SDMStorage(np.swapaxes(W, -1, -2) @ pointers, W.sum(axis=-2))


def draw_written(sizes, rng):
    arrays = draw_memory(lambda: sdm_read.record)(sizes, rng)
    patterns = rng.integers(0, 2, arrays["locations"].shape[:-2] + (5, sizes["d"]))
    return {**arrays, **sdm_write(arrays["locations"], patterns, patterns, radius=arrays["radius"])._asdict()}


@formula(
    shapes={"queries": "bits ... n d", "locations": "bits ... r d", "storage": "int ... r d", "counts": "int ... r", "radius": "int",
            "out": "bits ... n d"},
    equation="a_it = [Ham(xi_i, x_t) <= radius],  out_i = [sum_t a_it storage_t > 1/2 sum_t a_it counts_t]",
    latex=r"a_{it}=[\mathrm{Ham}(\xi_i,x_t)\le\mathrm{radius}],\quad\xi_i\leftarrow\Big[\sum_t a_{it}v_t>\tfrac12\sum_t a_{it}h_t\Big]",
    bound="exact",
    workspace="... n r",
    draw=draw_written,
    **FACTS,
)
def sdm_read(queries, locations, storage, counts, *, radius, n_iters=1):
    """Bits (..., n, d) that the neurons answer to the queries (..., n, d).

    locations: addresses (..., r, d) of the neurons, bits.  storage (..., r, d), counts (..., r): what they hold, as from `sdm_write`.
    radius: Hamming radius within which a neuron is read.  n_iters: how often to read at most; the answer is the next query.
    Raises ValueError where shapes do not match, an array is not of bits or an option is out of range, naming the argument.

    >>> x = [[0, 0, 0], [1, 1, 1]]
    >>> sdm_read([[0, 0, 1], [1, 0, 1]], x, *sdm_write(x, [[0, 0, 0]], [[0, 1, 0]], radius=1), radius=1)
    array([[0, 1, 0],
           [1, 0, 1]])
    """
    radius = whole("radius", int(radius))

    def update(xi):
        a = (hamming_distances(xi, locations) <= radius).astype(np.int64)
        total = a @ counts[..., None]
        return np.where(total == 0, xi, (2 * (a @ storage) > total).astype(np.int64))

    return iterated(update, queries, n_iters)


WEIGHTINGS = ("circle", "exponential")


def whole_exponentials(beta, d, m):
    """exp(-2 beta k/d), k = 0 .. d, to 40 digits, all times the same number, as whole numbers: none underflows or overflows.

    m: how many patterns are weighed with them. A step 2 beta/d beyond log(4 m) counts as log(4 m): one pattern then outweighs all others
    that are farther (or nearer, where beta is negative), so that a larger step decides no bit otherwise.
    """
    with localcontext(prec=40, Emax=MAX_EMAX):
        most = Decimal(4 * max(m, 1)).ln()
        step = max(-most, min(most, 2 * Decimal(beta) / max(d, 1)))
        logits = [-step * k for k in range(d + 1)]
        return [int((x - min(logits[0], logits[-1])).exp().scaleb(40)) for x in logits]


@formula(
    shapes={"queries": "bits ... n d", "addresses": "bits ... m d", "pointers": "bits ... m d", "radius": "int", "out": "bits ... n d"},
    equation="out_i = [sum_m w_im q_m > 1/2 sum_m w_im],  w_im = I(Ham(p_m, xi_i)) or exp(beta cos_im)",
    latex=r"\xi_i\leftarrow\Big[\sum_m w_{im}\,q_m>\tfrac12\sum_m w_{im}\Big],\quad w_{im}=I(\mathrm{Ham}(p_m,\xi_i))"
          r"\ \text{or}\ e^{\beta\,(1-2\,\mathrm{Ham}(p_m,\xi_i)/d)}",
    workspace="... n m",
    bound="exact",
    draw=draw_memory(lambda: sdm_update.record),
    **FACTS,
)
def sdm_update(queries, addresses, pointers, *, radius=None, weighting="circle", beta=None, n_iters=1):
    """Bits (..., n, d) read by queries (..., n, d) from a memory of the patterns with a neuron at every address.

    addresses, pointers: (..., m, d) where and what each pattern has written, bits.  radius: Hamming radius of the circles, 0 to d;
    needed unless beta is given.  weighting: "circle" weighs a pattern by the circle intersection, "exponential" by exp(beta cos).
    beta: inverse temperature of "exponential", default `sdm_fit_beta` for d bits and this radius.
    n_iters: how often to read at most; the answer is the next query.
    Raises ValueError where shapes do not match, an array is not of bits or an option is out of range or missing, naming the argument.

    >>> sdm_update([[0, 0, 0, 1]], [[0, 0, 0, 0], [1, 1, 1, 0]], [[1, 0, 1, 0], [0, 1, 1, 1]], radius=1)    # 1 and 4 bits away
    array([[1, 0, 1, 0]])
    """
    one_of("weighting", weighting, WEIGHTINGS)
    d = queries.shape[-1]
    if beta is None:
        require_width(d, 1)
    if weighting == "circle":
        exact = list(circle_intersections(*bits_and_radius(d, require_radius(radius))))
    else:
        beta = float(np.real(fitted_beta(beta, d, radius)))
        exact = whole_exponentials(beta, d, addresses.shape[-2])
    weight = np.array(exact, dtype=object)                             # Python's own integers: no rounding, no overflow

    def update(xi):
        w = weight[hamming_distances(xi, addresses)]
        total = w.sum(axis=-1, keepdims=True)
        return np.where(total == 0, xi, 2 * (w @ pointers.astype(object)) > total).astype(np.int64)

    return iterated(update, queries, n_iters)


def require_width(d, least):
    """Check that queries have bits or dimensions enough for circles and caps."""
    if d < least:
        raise ValueError(f"queries: expected at least {least} in the last axis, got {d}")


def require_radius(radius):
    """The radius, which is an option only where another option replaces it."""
    if radius is None:
        raise ValueError("radius: expected a whole number, got None")
    return radius


def fitted_beta(beta, n_bits, radius):
    """beta, or the one fitted to the circle intersection."""
    if beta is None:
        return sdm_fit_beta(n_bits=n_bits, radius=require_radius(radius)).beta
    return number("beta", beta, finite=True)
