"""Which Hamming radius suits a Sparse Distributed Memory, how many patterns it holds, and how noisy a query it still completes.

    p = P(Ham(x, xi) <= d) = 2^-n sum_{i=0..d} C(n, i)            the share of neurons that a circle of radius d activates

A pattern read at the distance d_v from its query has, against m - 1 other random patterns, per bit

    SNR(d_v) = I / sqrt(I + (m - 1) p^2 r (1 + p^2 r)),   I = I(d_v) r / 2^n

    snr                 SNR^2(p) = p r / (1 + p m + p^3 m r)      is largest at p* = (2 m r)^(-1/3)
    memory              m(p) = ((p r)^2/z^2 - p r) / (p^2 r + (p^2 r)^2) + 1,  z = Phi^-1(P^(1/n)),
                        is largest where -2 r^2 p^3 + 3 r z^2 p^2 + z^2 = 0
    critical distance   CD(d) = the largest d_v such that n (1 - Phi(SNR(d_v'))) < d_v' for all 1 <= d_v' <= d_v;  d* = argmax_d CD(d)

where n is the number of bits (`n_bits`), d the radius (`radius`), r the number of neurons (`n_locations`), m the number of stored patterns
(`n_patterns`), P the probability that a whole pattern is read without error (`recall`) and Phi the normal distribution function. The
radius for a wanted p* is the smallest d with p(d) >= p*. "snr" suits queries without noise, "memory" holds the most patterns, and
"critical_distance" completes the noisiest queries: n (1 - Phi) bits are expected to be wrong after reading, fewer than before.

Source: Bricken & Pehlevan, "Attention Approximates Sparse Distributed Memory", arXiv:2111.05498, appendix B.5, and the authors'
notebook Optimal_d. The criterion of the critical distance is a reconstruction that gives the paper's d* = 15; it was not seen in code.

Conventions. n_locations=None stands for r = 2^n. recall is 0.5 as in the notebook. m(p) is the formula's value, not rounded, and below 1
where not even one pattern is recalled so surely. Where P <= 2^-n even guessing does (z <= 0): m(p) is infinite, and there is no radius
that is best for "memory". Of radii with the same critical distance the smallest is returned; it is n where
the criterion never fails, as with so few patterns that circles still meet at n/2, beyond which even a guess is closer than the query.
Shares and intersections are exact fractions: neither 2^n nor p overflows or underflows.

Numbers. n = 64, r = 2^64, m = 1024: d* = 11 (snr), 5 (memory), 15 (critical distance, which is 24). n = 1000, r = 10^6: d* = 447 (snr) for
m = 10000, 450 for m = 1000; Kanerva's own choice was 451.

Identities. SNR^2(p) at m = m(p), counting m - 1 other patterns, is z^2. p(d* - 1) < p* <= p(d*).

Wrong versions met elsewhere: noise without the factor 1 + p^2 r, the variance of the neurons' number in two circles alone, which is how
Kanerva's "critical distance 209 for 10,000 patterns" comes about (158 with it, n = 1000, r = 10^6, d = 451).
"""

import math
from fractions import Fraction
from statistics import NormalDist

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import number, one_of, whole
from attnspec.reference.memory.sdm_circle import bits_and_radius, circle_intersections, circle_volume, location_count, log_of, to_float

CRITERIA = ("snr", "memory", "critical_distance")


def recall_score(recall, n):
    """z = Phi^-1(P^(1/n)): how many standard deviations above zero a bit must be for n bits to be right with probability P.

    0 also where P <= 2^-n, so that guessing the bits is enough and z would be negative.
    """
    P = float(np.real(number("recall", recall, above=0)))
    if not P < 1:
        raise ValueError(f"recall: expected a number between 0 and 1, got {recall!r}")
    chance = 0.5**n
    return 0.0 if chance >= P else max(-NormalDist().inv_cdf(-math.expm1(math.log(P) / n)), 0.0)


def critical_distance(n, d, r, m):
    """CD(d) for whole numbers n, d, m and a fraction r."""
    p = Fraction(circle_volume(n, d), 2**n)
    log_noise, log_share = log_of((m - 1) * p**2 * r * (1 + p**2 * r)), log_of(r / 2**n)
    for d_v, addresses in enumerate(circle_intersections(n, d)):
        log_I = log_of(addresses) + log_share
        log_snr = (2 * log_I - np.logaddexp(log_I, log_noise)) / 2 if addresses else -math.inf
        wrong = math.erfc(math.exp(min(log_snr, 5)) / math.sqrt(2)) / 2       # 1 - Phi(SNR); beyond e^5 no bit is wrong in any n
        if d_v > 0 and not n * wrong < d_v:
            return d_v - 1
    return n


@formula(
    family="memory",
    shapes={"n_bits": "int", "n_patterns": "int", "out": "int"},
    equation="d* = min{d: p(d) >= p*},  p* = (2 m r)^(-1/3) (snr);  -2 r^2 p*^3 + 3 r z^2 p*^2 + z^2 = 0 (memory);  or argmax_d CD(d)",
    latex=r"d^*=\min\{d:p(d)\ge p^*\},\quad p^*_{\mathrm{SNR}}=(2mr)^{-1/3},\quad"
          r"-2r^2p^{*3}_{\mathrm{Mem}}+3rz^2p^{*2}_{\mathrm{Mem}}+z^2=0,\quad d^*_{\mathrm{CD}}=\operatorname{argmax}_d\mathrm{CD}(d)",
    source="arXiv:2111.05498, appendix B.5",
    discrete=True,
    draw=lambda sizes, rng: {"n_bits": np.array(64), "n_patterns": np.array(1024)},
)
def sdm_optimal_radius(*, n_bits, n_patterns=None, n_locations=None, criterion="snr", recall=0.5):
    """Hamming radius d*, an int, that is best by a criterion.

    n_bits: length n of an address.  n_patterns: number m >= 1 of stored patterns; "memory" does not need it.
    n_locations: number r of neurons, a whole number of any size or a float; None for 2^n.
    criterion: "snr", "memory" or "critical_distance", as defined above.
    recall: probability, between 0 and 1, that a whole pattern is read without error; "memory" only, and more than
    2^-n there.
    Raises ValueError where a number is out of range or missing, naming the argument.

    >>> [sdm_optimal_radius(n_bits=64, n_patterns=1024, criterion=c) for c in ("snr", "memory", "critical_distance")]
    [11, 5, 15]
    """
    one_of("criterion", criterion, CRITERIA)
    n, r = whole("n_bits", int(n_bits), least=1), location_count(n_locations, int(n_bits))
    z2 = Fraction(recall_score(recall, n)) ** 2
    if criterion == "memory" and z2 == 0:
        raise ValueError(f"recall: expected more than chance, 2^-{n}, where criterion is 'memory', got {recall!r}")
    if criterion != "memory":
        m = whole("n_patterns", n_patterns if n_patterns is None else int(n_patterns), least=1)
    if criterion == "critical_distance":
        return max(range(n + 1), key=lambda d: critical_distance(n, d, r, m))
    volume = 0
    for d in range(n + 1):
        volume += math.comb(n, d)
        p = Fraction(volume, 2**n)
        # p >= p* without a root to take, so that p* may be smaller than any float
        if (2 * m * r * p**3 >= 1) if criterion == "snr" else (2 * r**2 * p**3 - 3 * r * z2 * p**2 - z2 >= 0):
            return d
    return n


@formula(
    family="memory",
    shapes={"n_bits": "int", "radius": "int", "n_patterns": "int", "out": "int"},
    equation="CD = max{d_v: n (1 - Phi(SNR(d_v'))) < d_v' for 1 <= d_v' <= d_v},  SNR = I / sqrt(I + (m-1) p^2 r (1 + p^2 r))",
    latex=r"\mathrm{CD}=\max\{d_v: n\,(1-\Phi(\mathrm{SNR}(d_v')))<d_v'\ \forall\,1\le d_v'\le d_v\},\quad"
          r"\mathrm{SNR}=\frac{I}{\sqrt{I+(m-1)\,p^2r\,(1+p^2r)}}",
    source="arXiv:2111.05498, appendix B.5, reconstructed",
    status="derived",
    discrete=True,
    draw=lambda sizes, rng: {"n_bits": np.array(64), "radius": np.array(15), "n_patterns": np.array(1024)},
)
def sdm_critical_distance(*, n_bits, radius, n_patterns, n_locations=None):
    """Critical distance, an int: the furthest that a query may be from its pattern and still be expected to come closer by reading.

    n_bits: length n of an address.  radius: Hamming radius d, 0 to n_bits.  n_patterns: number m >= 1 of stored random patterns.
    n_locations: number r of neurons, a whole number of any size or a float; None for 2^n.
    Raises ValueError where a number is out of range, naming the argument.

    >>> sdm_critical_distance(n_bits=64, radius=15, n_patterns=1024)
    24
    """
    n, d = bits_and_radius(n_bits, radius)
    return critical_distance(n, d, location_count(n_locations, n), whole("n_patterns", int(n_patterns), least=1))


@formula(
    family="memory",
    shapes={"n_bits": "int", "radius": "int", "out": ""},
    equation="m(p) = ((p r)^2/z^2 - p r) / (p^2 r + (p^2 r)^2) + 1,  z = Phi^-1(P^(1/n)),  p = 2^-n sum_{i<=d} C(n, i)",
    latex=r"m(p)=\frac{(pr)^2/z^2-pr}{p^2r+(p^2r)^2}+1,\quad z=\Phi^{-1}(P^{1/n}),\quad p=2^{-n}\sum_{i=0}^{d}\binom{n}{i}",
    source="arXiv:2111.05498, appendix B.5",
    discrete=True,
    draw=lambda sizes, rng: {"n_bits": np.array(64), "radius": np.array(5)},
)
def sdm_capacity(*, n_bits, radius, n_locations=None, recall=0.5):
    """Number m(p) of random patterns, a float, of which each is recalled as a whole with probability `recall` from a query without noise.

    n_bits: length n of an address.  radius: Hamming radius d, 0 to n_bits.
    n_locations: number r of neurons, a whole number of any size or a float; None for 2^n.  recall: probability P between 0 and 1;
    where it is at most 2^-n, which guessing reaches, the number is infinite.
    Raises ValueError where a number is out of range, naming the argument.

    >>> round(sdm_capacity(n_bits=1000, radius=451, n_locations=10**6))
    45081
    """
    n, d = bits_and_radius(n_bits, radius)
    r, z = location_count(n_locations, n), recall_score(recall, n)
    p = Fraction(circle_volume(n, d), 2**n)
    if z == 0:
        return math.inf                                                # a bit that need not be better than chance
    return to_float(((p * r) ** 2 / Fraction(z) ** 2 - p * r) / (p**2 * r + (p**2 * r) ** 2) + 1)
