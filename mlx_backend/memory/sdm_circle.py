"""Twin of reference/memory/sdm_circle.py as a graph: exact whole numbers made beforehand, rounded once to float32, and looked up."""

import functools
import math
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend.known import known_true
from attnspec.mlx_backend.twin import twin
from attnspec.reference.inputs import number, whole


@twin
def sdm_circle_intersection(distance, *, n_bits, radius, n_locations=None, log=False):
    """Expected number (...) of neurons within `radius` of both of two addresses that are `distance` apart; the reference's parameters."""
    n, d = bits_and_radius(n_bits, radius)
    outside = mx.logical_or(distance < 0, distance > n)
    if known_true(mx.any(outside)):
        odd = np.array(distance)[np.array(outside)].flat[0]
        raise ValueError(f"distance: expected whole numbers from 0 to the {n} bits of an address, got {odd}")
    with np.errstate(over="ignore"):
        table = mx.array(np.array(table_of(n, d, location_count(n_locations), log)).astype(np.float32))
    return mx.take(table, distance)


def bits_and_radius(n_bits, radius) -> tuple[int, int]:
    """(n, d) as ints, 1 <= n and 0 <= d <= n."""
    n, d = whole("n_bits", int(n_bits), least=1), whole("radius", int(radius))
    if d > n:
        raise ValueError(f"radius: expected a whole number from 0 to the {n} bits of an address, got {d}")
    return n, d


def location_count(n_locations: Any) -> Fraction | None:
    """How many neurons there are, exactly; None for one at every address."""
    if n_locations is None:
        return None
    if isinstance(n_locations, int) and not isinstance(n_locations, bool) and n_locations > 0:
        return Fraction(n_locations)
    value = float(np.real(number("n_locations", n_locations, above=0)))
    if math.isinf(value):
        raise ValueError(f"n_locations: expected a finite number, got {n_locations!r}")
    return Fraction(value)


@functools.lru_cache(8)
def intersections(n: int, d: int) -> tuple[int, ...]:
    """I(0), ..., I(n): the volume of a circle less the lunes of the odd distances so far."""
    volume = sum(math.comb(n, i) for i in range(d + 1))
    found = [volume]
    for distance in range(1, n + 1):
        i, even = divmod(distance - 1, 2)
        if even == 0 and d >= i:
            volume -= math.comb(distance - 1, i) * math.comb(n - distance, d - i)
        found.append(volume)
    return tuple(found)


@functools.lru_cache(8)
def table_of(n: int, d: int, r: Fraction | None = None, log: bool = False) -> tuple[float, ...]:
    """I(0), ..., I(n), times r / 2^n unless r is None, or the logarithms; each rounded once."""
    value = logarithm if log else nearest
    return tuple(value(one if r is None else one * r / 2**n) for one in intersections(n, d))


def nearest(x) -> float:
    try:
        return float(x)
    except OverflowError:
        return math.inf


def logarithm(x) -> float:
    """Logarithm of an int or fraction x >= 0 of any size."""
    if x == 0:
        return -math.inf
    if isinstance(x, int):
        return math.log(x)
    shift = x.numerator.bit_length() - x.denominator.bit_length()
    return math.log(x / Fraction(2) ** shift) + shift * math.log(2)
