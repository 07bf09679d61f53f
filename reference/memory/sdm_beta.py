"""The inverse temperature beta with which Attention's softmax comes closest to Sparse Distributed Memory's circle intersection.

A line is fitted to the logarithms of the pattern weights at the distances within the radius:

    d_v = 0, 1, ..., d - 1,   x = 1 - 2 d_v/n,   y = log(I(d_v) r / 2^n)
    beta = Cov(x, y) / Var(x),   bias = mean(y) - beta mean(x),        so that I r / 2^n is about exp(bias + beta cos)

where n is the number of bits (`n_bits`), d the Hamming radius (`radius`) and r the number of neurons (`n_locations`). With
continuous=True the weights are the cap intersections at the same cosines.

Source: Bricken & Pehlevan, "Attention Approximates Sparse Distributed Memory", arXiv:2111.05498, section 2 and appendix, and the
authors' code (fit_beta, fit_beta_regression).

Conventions. The d points stop at d - 1, although weights are positive up to 2d. official=True is the authors' code, from which the paper's
numbers come: its covariance divides by d - 1 and its variance by d, so that beta is the least-squares slope times d/(d - 1) (10 % more
at d = 11); its caps carry the constant e^2/2, which moves only the bias, and their first cosine is 1 - 1e-15. official=False is the
least-squares line through the exact weights. r shifts the bias only; None stands for 2^n.

Numbers. Official beta for n = 64: 35.485 at d = 5, 15.853 at d = 11 (continuous 21.540), 10.110 at d = 15 (continuous 12.230); 5.966 for
n = 1000, d = 451. With exp(-c d_v) in place of I, beta = n c/2, and the normal approximation of I gives the much smaller (n-2d)^2/(4n).

Identities. beta does not depend on r. official = least squares times d/(d - 1). A least-squares line leaves residuals that sum to zero
and are orthogonal to x.

Wrong versions met elsewhere: the mixed divisors of covariance and variance taken for least squares; a fit over all distances up to 2d;
sums of binomials in floating point, which cancel (1.2e-11 of the slope, 5.4e-11 of the bias at n = 1000, where 2^n still
fits).
"""

from typing import NamedTuple

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import whole
from attnspec.reference.memory.sdm_cap import sdm_cap_intersection
from attnspec.reference.memory.sdm_circle import bits_and_radius, sdm_circle_intersection


class SDMBetaFit(NamedTuple):
    """The fitted line bias + beta x of log weights over cosines x."""

    beta: float        # slope: the softmax's inverse temperature for unit vectors
    bias: float        # value at cosine 0


@formula(
    family="memory",
    shapes={"n_bits": "int", "radius": "int", "beta": "", "bias": ""},
    equation="beta = Cov(x, y) / Var(x),  x = 1 - 2 d_v/n,  y = log(I(d_v) r / 2^n),  d_v = 0, ..., d - 1",
    latex=r"\beta=\frac{\mathrm{Cov}(x,y)}{\mathrm{Var}(x)},\quad x=1-\frac{2d_v}{n},\quad y=\log\frac{r\,I(d_v)}{2^n},\quad d_v<d",
    source="arXiv:2111.05498, section 2",
    discrete=True,
    draw=lambda sizes, rng: {"n_bits": np.array(64), "radius": np.array(11)},
)
def sdm_fit_beta(*, n_bits, radius, n_locations=None, continuous=False, official=True):
    """SDMBetaFit (beta, bias) of the line closest to the log weights of patterns within `radius` of the query.

    n_bits: length n of an address.  radius: Hamming radius d of the circles, 2 to n_bits.
    n_locations: number r of neurons, None for 2^n.  continuous: fit the cap intersection of unit vectors instead of bits.
    official: the authors' arithmetic (see above); False for least squares.
    Raises ValueError where a number is out of range, naming the argument.

    >>> round(sdm_fit_beta(n_bits=64, radius=11).beta, 3), round(sdm_fit_beta(n_bits=64, radius=11, official=False).beta, 3)
    (15.853, 14.412)
    """
    bits_and_radius(n_bits, radius)
    d, options = whole("radius", int(radius), least=2), {"n_bits": n_bits, "radius": radius, "n_locations": n_locations, "log": True}
    d_v = np.arange(d)
    x = 1 - 2 * d_v / n_bits
    if continuous:
        x[0] -= 1e-15 if official else 0.0
        y = sdm_cap_intersection(x, official=official, **options)
    else:
        y = sdm_circle_intersection(d_v, **options)
    covariance = np.sum((x - x.mean()) * (y - y.mean())) / (d - 1 if official else d)
    beta = covariance / np.mean((x - x.mean()) ** 2)
    return SDMBetaFit(float(beta), float(y.mean() - beta * x.mean()))
