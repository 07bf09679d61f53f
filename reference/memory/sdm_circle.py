"""Circle intersection of Sparse Distributed Memory: how many binary addresses lie within Hamming distance d of two given ones.

    I(d_v) = |{x in {0,1}^n : Ham(x, p) <= d and Ham(x, xi) <= d}|,  d_v = Ham(p, xi)

    I(d_v) = sum_a sum_c C(n - d_v, a) C(d_v, c)        max(0, n - d - floor(d_v/2)) <= a <= n - d_v,
                                                        max(0, n - d - a) <= c <= min(d_v, d_v - (n - d - a))

    I(d_v) = sum_{i=0..d} C(n, i)  -  sum_{j odd, 1 <= j <= d_v} C(j - 1, (j-1)/2) C(n - j, d - (j-1)/2)

    expected neurons in both circles = I(d_v) r / 2^n

where n is the number of bits of an address (`n_bits`), d the Hamming radius of the circles of reading and writing (`radius`), r the number
of neurons, or hard locations, spread evenly over the 2^n addresses (`n_locations`), and d_v (...) the distance between pattern and query.

In the first sum a counts the neuron's agreements with both among the n - d_v places where pattern and query agree, and c its agreements
with the query among the d_v places where they differ. The second sum starts from the volume of one circle and takes off, for each
step of d_v from even to odd, the lune of addresses that leave the second circle; it is the one computed here, in whole numbers.

This number is the weight that a stored pattern gets in reading. Its logarithm is nearly linear in d_v, hence Attention's exponential.

Source: Bricken & Pehlevan, "Attention Approximates Sparse Distributed Memory", arXiv:2111.05498, section 1 and its
appendix; the lune: Kanerva, "Sparse Distributed Memory", MIT Press 1988, appendix B; the authors' code (expected_intersection_lune).

Conventions. n_locations=None stands for a neuron at every address, r = 2^n: the plain count. The count is exact and then rounded
once to float64; a count beyond the range of float64 is inf, its logarithm is not. log(0) = -inf. Neurons are expected numbers; the
paper's text rounds them down to whole ones, its code to floor(x) plus a coin that falls with probability x - floor(x).

Identities. I(0) is the volume of a circle; I(2k-1) = I(2k), a staircase; I never grows with d_v and is 0 for d_v > 2d; for d = n it is
2^n. sum_{d_v} C(n, d_v) I(d_v) is the square of a circle's volume. The three sums (these two and plain counting) are equal.

Approximations. The largest term of the first sum is C(n - d_v, n - d - floor(d_v/2)) C(d_v, floor(d_v/2)), by a normal law about
2^(n+1) / (pi sqrt(d_v (n - d_v))) exp(-(n-2d)^2/(2n) - (n-2d)^2 d_v/(2 n^2)), from which the paper predicts that I decays about like
exp(-c d_v) with c = (n-2d)^2/(2 n^2).

Wrong versions met elsewhere: the lune sum in floating point, which cancels (5e-9 at n = 100, d = 35 for distant pairs); 2^n as a float,
which overflows from n = 1024; the values 1000, 894, 743, 445, ... of Kanerva's book for n = 1000, d = 451, r = 10^6, which come from a
continuous approximation (exact: 1071.9, 958.4 at d_v = 0, 1).
"""

import math
from fractions import Fraction

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import number, whole


def bits_and_radius(n_bits, radius):
    """(n, d) as ints, after checking that 1 <= n and 0 <= d <= n."""
    n, d = whole("n_bits", int(n_bits), least=1), whole("radius", int(radius))
    if d > n:
        raise ValueError(f"radius: expected a whole number from 0 to the {n} bits of an address, got {d}")
    return n, d


def location_count(n_locations, n):
    """r as an exact fraction: 2^n where n_locations is None."""
    if n_locations is None:
        return Fraction(2) ** n
    if isinstance(n_locations, int) and not isinstance(n_locations, bool) and n_locations > 0:
        return Fraction(n_locations)                                   # 2**64 and beyond, which no array holds
    value = float(np.real(number("n_locations", n_locations, above=0)))
    if math.isinf(value):
        raise ValueError(f"n_locations: expected a finite number, got {n_locations!r}")
    return Fraction(value)


def circle_volume(n, d):
    """Number of addresses within Hamming distance d of one address."""
    volume = term = 1
    for i in range(d):
        term = term * (n - i) // (i + 1)                               # C(n, i + 1)
        volume += term
    return volume


def circle_intersections(n, d):
    """I(0), ..., I(n), one after the other, as Python integers."""
    I = circle_volume(n, d)
    yield I
    for d_v in range(1, n + 1):
        if d_v % 2 == 1 and d >= (d_v - 1) // 2:
            I -= math.comb(d_v - 1, (d_v - 1) // 2) * math.comb(n - d_v, d - (d_v - 1) // 2)
        yield I


def to_float(x):
    """A fraction as float64, inf beyond its range."""
    try:
        return float(x)
    except OverflowError:
        return math.inf


def log_of(x):
    """Logarithm of an int or fraction x >= 0 of any size."""
    if x == 0:
        return -math.inf
    if isinstance(x, int):
        return math.log(x)
    shift = x.numerator.bit_length() - x.denominator.bit_length()
    return math.log(x / Fraction(2) ** shift) + shift * math.log(2)


def draw_distances(sizes, rng):
    return {"distance": rng.integers(0, 17, [sizes[axis] for axis in ("b", "h") if axis in sizes] or [25]),
            "n_bits": np.array(16), "radius": np.array(5)}


@formula(
    family="memory",
    shapes={"distance": "int ...", "n_bits": "int", "radius": "int", "out": "..."},
    equation="I(d_v) = sum_{i<=d} C(n, i) - sum_{odd j<=d_v} C(j-1, (j-1)/2) C(n-j, d-(j-1)/2),  out = I r / 2^n",
    latex=r"I(d_v)=\sum_{i=0}^{d}\binom{n}{i}-\sum_{\substack{j\ \mathrm{odd}\\ 1\le j\le d_v}}\binom{j-1}{\frac{j-1}{2}}"
          r"\binom{n-j}{d-\frac{j-1}{2}},\quad\mathrm{out}=\frac{r}{2^n}\,I(d_v)",
    source="arXiv:2111.05498, section 1; Kanerva 1988, appendix B",
    discrete=True,
    bound="exact",
    draw=draw_distances,
)
def sdm_circle_intersection(distance, *, n_bits, radius, n_locations=None, log=False):
    """Expected number (...) of neurons within `radius` of both of two addresses that are `distance` (...) apart.

    distance: whole numbers from 0 to n_bits.  n_bits: length n of an address.  radius: Hamming radius d of both circles, 0 to n_bits.
    n_locations: number r of neurons, a whole number of any size or a float; None for one at every address, which counts addresses.
    log: return the logarithm, which exists where the number itself overflows.
    Raises ValueError where a distance, radius or number is out of range, naming the argument.

    >>> sdm_circle_intersection([0, 1, 2, 3], n_bits=4, radius=1)      # 1 + 4 addresses; two in common at distances 1 and 2
    array([5., 2., 2., 0.])
    """
    n, d = bits_and_radius(n_bits, radius)
    if np.any((distance < 0) | (distance > n)):
        odd = distance[(distance < 0) | (distance > n)].flat[0]
        raise ValueError(f"distance: expected whole numbers from 0 to the {n} bits of an address, got {odd}")
    r = location_count(n_locations, n)
    value = log_of if log else to_float
    return np.array([value(I * r / 2**n) for I in circle_intersections(n, d)])[distance]
