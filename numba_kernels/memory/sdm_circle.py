"""Twin of reference/memory/sdm_circle.py: exact whole numbers, each binomial coefficient from the one before."""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import number, whole


def intersections(n: int, d: int) -> list[int]:
    """I(0), ..., I(n): addresses within distance d of both of two that are so far apart.

    I falls at odd distances 2 i + 1 only, by C(2 i, i) C(n - 2 i - 1, d - i); both factors are carried along.
    """
    volume = term = 1
    for i in range(d):
        term = term * (n - i) // (i + 1)
        volume += term
    found = [volume]
    middle, side = 1, math.comb(n - 1, d)
    for distance in range(1, n + 1):
        i, odd = divmod(distance - 1, 2)
        if odd == 0:
            volume -= middle * side
            middle = middle * 2 * (2 * i + 1) // (i + 1)
            N, k = n - distance, d - i
            side = side * k * (N - k) // (N * (N - 1)) if k > 0 and N > 1 else 0
        found.append(volume)
    return found


@twin
def sdm_circle_intersection(distance, *, n_bits, radius, n_locations=None, log=False):
    """Expected number (...) of neurons within `radius` of both of two addresses that are `distance` apart; the reference's parameters."""
    n, d = whole("n_bits", int(n_bits), least=1), whole("radius", int(radius))
    if d > n:
        raise ValueError(f"radius: expected a whole number from 0 to the {n} bits of an address, got {d}")
    if np.any((distance < 0) | (distance > n)):
        odd = distance[(distance < 0) | (distance > n)].flat[0]
        raise ValueError(f"distance: expected whole numbers from 0 to the {n} bits of an address, got {odd}")
    r = locations(n_locations, n)
    value = logarithm if log else nearest
    return np.array([value(r * one / 2**n) for one in intersections(n, d)])[distance]


def locations(n_locations: Any, n: int) -> Fraction:
    """How many neurons there are, exactly."""
    if n_locations is None:
        return Fraction(2) ** n
    if isinstance(n_locations, int) and not isinstance(n_locations, bool) and n_locations > 0:
        return Fraction(n_locations)
    value = float(number("n_locations", n_locations, above=0))
    if math.isinf(value):
        raise ValueError(f"n_locations: expected a finite number, got {n_locations!r}")
    return Fraction(value)


def nearest(x: Fraction) -> float:
    """The nearest float64, infinite beyond its range."""
    try:
        return float(x)
    except OverflowError:
        return math.inf


def logarithm(x: Fraction) -> float:
    """log x for any size of x, -inf at 0."""
    if x == 0:
        return -math.inf
    shift = x.numerator.bit_length() - x.denominator.bit_length()
    return math.log(x / Fraction(2) ** shift) + shift * math.log(2)
