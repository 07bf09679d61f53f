"""How well a modern Hopfield network stores its patterns: separation, retrieval error, contraction, capacity, metastable states.

    Δ_i = min_{j != i} <x_i, x_i - x_j>                                         separation of pattern i
    M   = max_i |x_i|,  f(ξ) = X^T softmax(β X ξ)

    |f(ξ) - x_i|   <= 2 (N-1) M exp(-β min_{j != i} <x_i - x_j, ξ>)             "margin"
                   <= 2 (N-1) M exp(-β (Δ_i - 2 M max(|ξ - x_i|, |x_i* - x_i|)))      "distance"
    |x_i* - x_i|   <= 2 e (N-1) M exp(-β Δ_i)                                   "separation", where |ξ - x_i|, |x_i* - x_i| <= 1/(2 β M)

    |f(ξ) - x_i*|  <= |J_m|_2 |ξ - x_i*|,   J_m = int_0^1 J(λ ξ + (1 - λ) x_i*) dλ          convergence

    S_i = {ξ : |ξ - x_i| <= 1/(β N M)};  if Δ_i >= 2/(β N) + (1/β) log(2 (N-1) N β M^2),
    f maps S_i into itself and has exactly one fixed point x_i* there           storage radius

    N >= sqrt(p) c^{(d-1)/4},  c = b / W(exp(a + log b)),  a = 2/(d-1) (1 + log(2 β K^2 p (d-1))),  b = 2 K^2 β / 5      capacity

where the stored patterns x_i are the rows of X (..., m, d), N = m of them, the state ξ_i of row i (..., m, d) is one that ought to
retrieve pattern i, x_i* is the fixed point of f near x_i, J = β X^T (diag(p) - p p^T) X the Jacobian of f at a state
(`hopfield_jacobian`), |.|_2 the spectral norm, and W the principal branch of Lambert's function. The capacity is that of random patterns
on a sphere of radius K sqrt(d-1): with probability 1 - p so many of them are stored, provided c >= (2/sqrt(p))^{4/(d-1)}.

Metastable size of softmax weights p: the smallest k such that the k largest of them sum to 0.9 (or another mass).

Source: Ramsauer et al., "Hopfield Networks is All You Need", arXiv:2008.02217, theorems 3 to 5, the definition of separation and storage
before them, and the analysis of metastable states. The statements were not read in the paper: Δ and the distance and separation forms are
as independent notes on the paper give them, the storage condition and the capacity are from memory; all were tried numerically, and the
capacity reproduces the paper's two examples (c = 3.1546 for β = 1, K = 3, d = 20, p = 0.001; c = 1.3718 for K = 1, d = 75). The margin form
is derived: f(ξ) - x_i = sum_{j != i} p_j (x_j - x_i), |x_j - x_i| <= 2 M, p_j <= exp(β <x_j - x_i, ξ>). The bound of
convergence, theorem 4 from memory, is the mean value theorem: f(ξ) - f(η) = J_m (ξ - η) between any two states.

Conventions. With one pattern Δ = infinity and every bound is 0. The distance form with |ξ - x_i| alone bounds the error of one update too
(|<x_i - x_j, ξ - x_i>| <= 2 M |ξ - x_i|), so the fixed point may be left out. Where the premise of the separation form fails, or a bound
exceeds float64, it is infinite: it says nothing. States default to the patterns themselves. Differences of patterns are formed before
their products, which may be far larger.
The metastable size is a share of the row's total, so that a row of zeros has size 0; a mass that falls short by rounding only, m 2^-52 of
the total, counts.

The capacity is taken in logarithms, log c = W - a, so that neither a tiny p nor a huge β overflows on the way.

Identities. Δ does not change under rotations and grows as c^2 with c X. margin <= distance, with equality at ξ = x_i.
b/c - log c = a. The metastable size of m equal weights is ceil(0.9 m), of a single one 1.

Wrong versions met elsewhere: Δ_i with the maximum over j = i included, which is never positive; the largest cosine in place of the largest
product; storage radius without N; log b missing from the argument of W; ln replaced by log10; top-k sums of unsorted weights.
"""

from typing import NamedTuple

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import number, one_of
from attnspec.reference.memory.hopfield import inverse_temperature
from attnspec.reference.numerics import LARGEST_LOG, exp_or_inf, norm, reciprocal
from attnspec.reference.softmax.weights import largest

FORMS = ("margin", "distance", "separation")


def largest_norm(patterns):
    """M = max_i |x_i|; 0 where there is no pattern."""
    longest = largest(norm(patterns)[..., 0])
    return np.where(longest == -np.inf, 0.0, longest)


def margin(patterns, xi):
    """min_{j != i} <x_i - x_j, ξ_i> (..., m) of states ξ (..., m, d); infinite for a single pattern."""
    difference = patterns[..., :, None, :] - patterns[..., None, :, :]
    products = np.sum(difference * xi[..., :, None, :], axis=-1)
    return -largest(np.where(np.eye(patterns.shape[-2], dtype=bool), -np.inf, -products))


@formula(
    family="memory",
    shapes={"stored": "... m d", "separation": "... m"},
    equation="Delta_i = min_{j != i} <x_i, x_i - x_j> = <x_i, x_i> - max_{j != i} <x_i, x_j>",
    latex=r"\Delta_i=\min_{j\ne i}\langle x_i,x_i-x_j\rangle=\langle x_i,x_i\rangle-\max_{j\ne i}\langle x_i,x_j\rangle",
    source="arXiv:2008.02217, definition of pattern separation",
    status="secondary",
    kinks="two other patterns of the same product with x_i",
    workspace="... m m d",
)
def hopfield_separation(stored):
    """Separation Δ (..., m) of each of the stored patterns (..., m, d) from the others; infinite for a single pattern.

    Raises ValueError where the shape is not that of patterns, naming the argument.

    >>> hopfield_separation([[1.0, 0.0], [0.0, 2.0], [2.0, 1.0]])
    array([-1.,  2.,  3.])
    """
    return margin(stored, stored)


@formula(
    family="memory",
    shapes={"stored": "... m d", "state": "... m d", "fixed_point": "... m d", "limit": "... m"},
    equation="|f(xi) - x_i| <= 2 (N-1) M exp(-beta min_{j != i} <x_i - x_j, xi>)",
    latex=r"|f(\xi)-x_i|\le2(N-1)M\exp\bigl(-\beta\min_{j\ne i}\langle x_i-x_j,\xi\rangle\bigr)",
    source="arXiv:2008.02217, theorem 5, and derived from its proof",
    status="derived",
    kinks="ties of the nearest pattern or of the largest norm; a state that is its pattern, in the distance form",
    workspace="... m m d",
)
def hopfield_retrieval_bound(stored, state=None, fixed_point=None, *, beta=1.0, form="margin"):
    """Bound (..., m) on the errors |f(ξ_i) - x_i| after one update, ξ_i being the state that ought to retrieve the pattern x_i.

    stored: (..., m, d) the patterns.  state: (..., m, d) one state for each of them, default the patterns themselves.
    fixed_point: (..., m, d) the fixed points x_i*, used by the forms "distance" and "separation".
    beta: inverse temperature, >= 0, default 1; None stands for 1/sqrt(d).
    form: "margin", the tightest, assumes nothing; "distance" is theorem 5; "separation", which bounds |x_i* - x_i| too, is infinite where
    the state or the fixed point given is farther than 1/(2 beta M) from the pattern.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> hopfield_retrieval_bound(3 * np.eye(2), beta=1.0)               # 6 exp(-9)
    array([0.00074046, 0.00074046])
    """
    beta = inverse_temperature(beta, stored.shape[-1])
    one_of("form", form, FORMS)
    xi = stored if state is None else state
    star = stored if fixed_point is None else fixed_point
    N = stored.shape[-2]
    if N <= 1:
        return np.zeros(np.broadcast_shapes(stored.shape, xi.shape, star.shape)[:-1])
    M = largest_norm(stored)[..., None]

    if form == "margin":
        exponent = -beta * margin(stored, xi)
    else:
        farthest = largest(np.concatenate(np.broadcast_arrays(norm(xi - stored), norm(star - stored)), axis=-1))
        Delta = margin(stored, stored)
        if form == "distance":
            exponent = -beta * (Delta - 2 * M * farthest)
        else:
            exponent = np.where((2 * beta * M * farthest).real > 1.0, np.inf, 1.0 - beta * Delta)
            exponent = np.where(np.isnan(farthest), np.nan, exponent)
    with np.errstate(divide="ignore"):
        log_bound = exponent + np.log(2 * (N - 1) * M)
    plain = (exponent.real <= LARGEST_LOG) & (log_bound.real <= LARGEST_LOG)
    return np.where(plain, 2 * (N - 1) * M * np.exp(np.where(plain, exponent, 0.0)), exp_or_inf(log_bound))


class HopfieldStorage(NamedTuple):
    """The spheres around the patterns in which they are stored, where they are separated enough."""

    radius: np.ndarray               # (...) radius 1/(β N M) of the spheres
    needed: np.ndarray               # (...) separation that suffices
    contracts: np.ndarray            # bool (..., m): the pattern's separation suffices


@formula(
    family="memory",
    shapes={"stored": "... m d", "radius": "...", "needed": "...", "contracts": "bool ... m"},
    equation="S_i = {|xi - x_i| <= 1/(beta N M)} is mapped into itself if Delta_i >= 2/(beta N) + (1/beta) log(2 (N-1) N beta M^2)",
    latex=r"\Delta_i\ge\frac{2}{\beta N}+\frac1\beta\log\bigl(2(N-1)N\beta M^2\bigr)\implies f(S_i)\subseteq S_i,\quad"
          r"S_i=\{\xi:|\xi-x_i|\le\tfrac{1}{\beta NM}\}",
    source="arXiv:2008.02217, theorem 3 and its proof",
    status="memory-only",
    kinks="two stored patterns of the same largest norm",
    workspace="... m m d",
)
def hopfield_storage_radius(stored, *, beta=1.0):
    """Radius of the spheres around the stored patterns (..., m, d) that one update maps into themselves, and which patterns have one.

    beta: inverse temperature, > 0, default 1.
    Returns HopfieldStorage (radius, needed, contracts): the radius 1/(beta N M), the separation needed, and whether each pattern has it.
    A single pattern needs none (-infinity); without patterns, or with zeros only, the radius is infinite.
    Raises ValueError where the shape is not that of patterns or beta is not positive, naming the argument.

    >>> hopfield_storage_radius(4 * np.eye(2)).contracts
    array([ True,  True])
    """
    beta = inverse_temperature(number("beta", beta, above=0), stored.shape[-1])
    N, M = stored.shape[-2], largest_norm(stored)
    radius = reciprocal(beta * N * M)
    if N <= 1:
        return HopfieldStorage(radius, np.full(M.shape, -np.inf), np.ones(stored.shape[:-1], bool))
    log = np.log(2 * (N - 1) * N * beta) + 2 * np.log(np.where(M == 0, 1.0, M))
    needed = np.where(M == 0, -np.inf, 2 / (beta * N) + log / beta)
    return HopfieldStorage(radius, needed, margin(stored, stored).real >= needed.real[..., None])


class HopfieldCapacity(NamedTuple):
    """How many random patterns a network stores, with the constant c of the theorem and whether its premise holds."""

    capacity: np.ndarray
    c: np.ndarray
    applies: np.ndarray


def draw_capacity(sizes, rng):
    lead = tuple(sizes[axis] for axis in ("b", "h") if axis in sizes)
    return {
        "beta": np.asarray(rng.uniform(0.5, 2.0, lead)), "K": np.asarray(rng.uniform(1.0, 3.0, lead)),
        "d": np.asarray(rng.integers(10, 80, lead)), "p": np.asarray(rng.uniform(0.001, 0.1, lead)),
    }


@formula(
    family="memory",
    shapes={"beta": "...", "K": "...", "d": "int ...", "p": "...", "capacity": "...", "c": "...", "applies": "bool ..."},
    equation="N = sqrt(p) c^((d-1)/4),  c = b / W(exp(a + log b)),  a = 2/(d-1) (1 + log(2 beta K^2 p (d-1))),  b = 2 K^2 beta / 5",
    latex=r"N\ge\sqrt p\,c^{\frac{d-1}{4}},\quad c=\frac{b}{W_0(e^{a+\ln b})},\quad a=\frac{2}{d-1}\bigl(1+\ln(2\beta K^2p(d-1))\bigr),"
          r"\quad b=\frac{2K^2\beta}{5}",
    source="arXiv:2008.02217, theorem 3",
    status="memory-only",
    draw=draw_capacity,
)
def hopfield_capacity(beta, K, d, p):
    """Number of random patterns that are stored with probability 1 - p in d dimensions; the parameters broadcast.

    beta: inverse temperature, > 0.  K: radius of the sphere the patterns lie on, in units of sqrt(d-1), > 0.  d: dimension, whole, >= 2.
    p: probability of failure, 0 < p <= 1.
    Returns HopfieldCapacity (capacity, c, applies); the theorem applies where c >= (2/sqrt(p))^(4/(d-1)).
    Raises ValueError where a parameter is out of range, naming it.

    >>> hopfield_capacity(1.0, 3.0, 20, 0.001).c.round(5)
    np.float64(3.15461)
    """
    for name, value, good, limits in (
        ("beta", beta, beta.real > 0, "finite numbers > 0"), ("K", K, K.real > 0, "finite numbers > 0"),
        ("d", d, d >= 2, "whole numbers >= 2"), ("p", p, (p.real > 0) & (p.real <= 1), "numbers > 0 and <= 1"),
    ):
        if not np.all(good & np.isfinite(value)):
            raise ValueError(f"{name}: expected {limits}, got {value[~(good & np.isfinite(value))][0].real}")
    from scipy.special import wrightomega  # slow to import, and needed here only

    log_beta_K2, log_p = np.log(beta) + 2 * np.log(K), np.log(p)
    a = 2 / (d - 1) * (1 + np.log(2) + log_beta_K2 + log_p + np.log(d - 1))
    log_b = np.log(2 / 5) + log_beta_K2
    log_c = wrightomega(a + log_b) - a                                 # omega(x) = W(exp(x)), so that omega(x) + log omega(x) = x
    applies = log_c.real >= 4 / (d - 1) * (np.log(2) - log_p.real / 2)
    return HopfieldCapacity(exp_or_inf(log_p / 2 + (d - 1) / 4 * log_c), exp_or_inf(log_c), applies)


def draw_weights(sizes, rng):
    lead = tuple(sizes[axis] for axis in ("b", "h") if axis in sizes)
    return {"weights": rng.dirichlet(np.full(sizes["m"], 0.5), (*lead, sizes["n"]))}


@formula(
    family="memory",
    shapes={"weights": "... n m", "size": "int ... n"},
    equation="size_i = min {k : sum of the k largest p_ij >= mass sum_j p_ij}",
    latex=r"k_i=\min\{k:\sum_{j\le k}p_{i(j)}\ge0.9\,\sum_jp_{ij}\},\quad p_{i(1)}\ge p_{i(2)}\ge\dots",
    source="arXiv:2008.02217, analysis of metastable states in trained transformers",
    status="secondary",
    discrete=True,
    draw=draw_weights,
)
def hopfield_metastable_size(weights, *, mass=0.9):
    """Number (..., n) of patterns that share a state: the smallest k whose k largest weights (..., n, m) make up the mass of the row.

    weights: non-negative, as a softmax gives them; a row of zeros has size 0.  mass: share of the row's total, 0 < mass <= 1.
    Raises ValueError where a weight is negative or not a number, or mass is out of range, naming the argument.

    >>> hopfield_metastable_size([[0.5, 0.0, 0.3, 0.2], [1.0, 0.0, 0.0, 0.0]])
    array([3, 1])
    """
    mass = number("mass", mass, above=0)
    if mass > 1:
        raise ValueError(f"mass: expected a number <= 1, got {mass:g}")
    if not np.all(weights >= 0):
        raise ValueError(f"weights: expected numbers >= 0, got {weights[~(weights >= 0)][0]:g}")
    m = weights.shape[-1]
    sums = np.cumsum(-np.sort(-weights, axis=-1), axis=-1)
    total = np.sum(weights, axis=-1, keepdims=True)
    short = sums < (mass - m * 2.0**-52) * total
    return np.where(total[..., 0] > 0, 1 + np.sum(short, axis=-1), 0)
