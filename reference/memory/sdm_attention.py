"""Attention as Sparse Distributed Memory: real queries weigh patterns by the neurons that are near both.

    cos_im = <xi_i, p_m> / (|xi_i| |p_m|),   d_v = floor(d (1 - cos)/2)

    w_im = I(d_v)                 circle: the intersection of two Hamming circles at the distance that the cosine stands for
    w_im = 2J(cos)/A_d            cap: the intersection of two caps of the sphere
    w_im = exp(beta cos_im)       exponential: Attention, with beta fitted to either

    o_i  = sum_m w_im q_m / sum_l w_il

where xi (..., n, d) are queries, p and q (..., m, d) the patterns' addresses and pointers, o (..., n, d); the vectors' width d is the
number of bits of `sdm_circle_intersection` and the dimension of `sdm_cap_intersection`, which define I and J.

Source: Bricken & Pehlevan, "Attention Approximates Sparse Distributed Memory", arXiv:2111.05498, sections 2 and 3 and the appendix
on continuous vectors, and the authors' code (Cont_Binary_SDM, Cont_SDM, Cont_SDM_BFit_Attention, Cont_SDM_CFit_Attention).

Conventions. Queries and addresses are divided by their Euclidean norms before every step, so that further steps always start from
unit vectors; a vector of zeros has cosine 0 with all, an infinite one NaN. The output is the plain average unless unit_norm=True, the
authors' loop.
beta is fitted to the circle intersection by the authors' arithmetic unless given; `sdm_fit_beta(continuous=True)` is the other fit.
A query that reaches no pattern stays as it is, and pointers out of reach have no influence whatever they are. resolution=K looks the
cap intersection up at K points from -1 to 1, at index trunc(K (cos + 1)/2 - 1), as the authors' cache does (its index of -1 at
cos = -1, which wraps around to the nearest patterns, is taken as 0); None computes it at every cosine. A distance within 1e-9 below a
whole number counts as that number, so that vectors of +-1 get their Hamming distances.

Ordinary attention has in effect beta = |q| |k| scale. Transformers with normalised queries and keys learn betas between
about 10 and 25 at d = 64, the fits for radii 15 and 7.

Identities. Weights do not change when a query or an address is stretched. "exponential" is softmax attention of the unit vectors with
scale beta. On vectors of +-1, "circle" has the weights of the binary memory.

Wrong versions met elsewhere: rounding d_v instead of flooring it; fitting beta to one radius and weighing circles of another; beta
divided by sqrt(d) once more.
"""

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, one_of, whole
from attnspec.reference.memory.sdm import fitted_beta, require_radius, require_width
from attnspec.reference.memory.sdm_cap import sdm_cap_intersection
from attnspec.reference.memory.sdm_circle import sdm_circle_intersection
from attnspec.reference.numerics import unit
from attnspec.reference.softmax.weights import largest, softmax_weights, weighted_values

WEIGHTINGS = ("circle", "cap", "exponential")


def log_circle(cos, d, radius):
    """log I (..., n, m) at the Hamming distances that cosines stand for; it has no derivative but zero."""
    d_v = np.clip(np.floor(d * (1 - cos.real) / 2 + 1e-9), 0, d)
    unknown = np.isnan(d_v)
    log_I = sdm_circle_intersection(np.where(unknown, 0, d_v), n_bits=d, radius=radius, log=True)
    return np.where(unknown, np.nan, log_I)


def log_cap(cos, d, radius, resolution):
    """log of the cap intersection (..., n, m) at these cosines, or at the nearest points of a cache."""
    if resolution is None:
        return sdm_cap_intersection(cos, n_bits=d, radius=radius, log=True)
    K = whole("resolution", resolution, least=2)
    unknown = np.isnan(cos.real)
    index = np.clip(np.trunc(K * (np.where(unknown, 0.0, cos.real) + 1) / 2 - 1), 0, K - 1).astype(int)
    cache = sdm_cap_intersection(np.linspace(-1, 1, K), n_bits=d, radius=radius, log=True)
    return np.where(unknown, np.nan, cache[index])


def log_exponential(cos, beta):
    """β cos less the largest of its row, so that a huge β overflows to -inf only."""
    nearest = largest(cos) if np.real(beta) >= 0 else -largest(-cos)
    return beta * (cos - nearest[..., None])


@formula(
    family="memory",
    shapes={"queries": "... n d", "addresses": "... m d", "pointers": "... m d", "radius": "int", "out": "... n d"},
    equation="out_i = sum_m w_im q_m / sum_m w_im,  w_im = I(floor(d (1 - cos_im)/2)), 2J(cos_im)/A_d or exp(beta cos_im)",
    latex=r"o_i=\frac{\sum_m w_{im}\,q_m}{\sum_m w_{im}},\quad w_{im}=I\big(\lfloor\tfrac d2(1-\cos_{im})\rfloor\big),\ "
          r"2J(\cos_{im})/A_d\ \text{or}\ e^{\beta\cos_{im}}",
    source="arXiv:2111.05498, sections 2 and 3",
    bound="sdm attention",
    kinks='where d (1 - cos)/2 is a whole number ("circle", elsewhere without derivative by queries and addresses), at the cache\'s '
          'points, where caps only touch and for a query along an address, cosine 1 or -1 ("cap"); a vector of zeros',
    workspace="... n m",
    draw=lambda sizes, rng: {**{name: sdm_attention.record.draw_one(name, sizes, rng) for name in ("queries", "addresses", "pointers")},
                             "radius": np.array((3 * sizes["d"] + 4) // 8)},
)
def sdm_attention(
    queries, addresses, pointers, *, radius=None, weighting="circle", beta=None, resolution=None, n_iters=1, unit_norm=False,
    return_weights=False,
):
    """Averages (..., n, d) of the pointers (..., m, d) that queries (..., n, d) read by their cosines to the addresses (..., m, d).

    radius: Hamming radius of the circles, 0 to d, or of the caps; needed unless beta is given.
    weighting: "circle", "cap" (d >= 2) or "exponential".  beta: inverse temperature of "exponential", default `sdm_fit_beta` for d bits and
    this radius.  resolution: number of points of the authors' cache of caps, None to compute caps exactly.
    n_iters: number of steps, each average being the next query.  unit_norm: divide every average by its norm.
    return_weights: return an AttentionResult with the weights (..., n, m) of the last step.
    Raises ValueError where shapes do not match or an option is out of range or missing, naming the argument.

    >>> sdm_attention([[2.0, 0.0]], [[1.0, 0.0], [0.0, 5.0]], [[1.0, 0.0], [0.0, 1.0]], weighting="exponential", beta=np.log(3))
    array([[0.75, 0.25]])
    """
    one_of("weighting", weighting, WEIGHTINGS)
    d, p = queries.shape[-1], unit(addresses)
    if weighting != "exponential" or beta is None:
        require_width(d, 1)
    if weighting == "cap" and d == 1:
        raise ValueError("weighting: expected 'circle' or 'exponential' where vectors have one dimension, got 'cap'")
    if weighting == "exponential":
        beta = fitted_beta(beta, d, radius)
    else:
        radius = require_radius(radius)

    xi = queries
    for _ in range(whole("n_iters", n_iters, least=1)):
        cos = unit(xi) @ np.swapaxes(p, -1, -2)
        if weighting == "exponential":
            log_w, reached = log_exponential(cos, beta), np.ones(cos.shape, bool)
        else:
            log_w = log_circle(cos, d, radius) if weighting == "circle" else log_cap(cos, d, radius, resolution)
            reached = ~(log_w.real == -np.inf)
        P, _ = softmax_weights(log_w)
        o = weighted_values(P, pointers, reached)
        xi = np.where(np.any(reached, axis=-1, keepdims=True), unit(o) if unit_norm else o, xi)
    return AttentionResult(xi, P) if return_weights else xi
