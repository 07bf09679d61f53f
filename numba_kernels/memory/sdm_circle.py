"""Twin of reference/memory/sdm_circle.py: exact whole numbers, each binomial coefficient from the one before, looked up in parallel."""

import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np

from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import number, whole

BLOCK = 2**14      # distances of a task


@twin
def sdm_circle_intersection(distance, *, n_bits, radius, n_locations=None, log=False):
    """Expected number (...) of neurons within `radius` of both of two addresses that are `distance` apart; the reference's parameters."""
    n, d = bits_and_radius(n_bits, radius)
    flat = np.ascontiguousarray(distance).reshape(-1)
    if flat.size and not 0 <= flat.min() <= flat.max() <= n:
        raise ValueError(f"distance: expected whole numbers from 0 to the {n} bits of an address, got {flat[(flat < 0) | (flat > n)][0]}")
    table, out = table_of(n, d, location_count(n_locations), log), np.empty(flat.shape)
    in_parallel(look_up, -(-flat.size // BLOCK), flat, table, out, work=flat.size)
    return out.reshape(distance.shape)[()]


@kernel
def look_up(distance, table, out, first, step):
    """out = table[distance]"""
    for task in range(first, (distance.size + BLOCK - 1) // BLOCK, step):
        for i in range(task * BLOCK, min(distance.size, (task + 1) * BLOCK)):
            out[i] = table[distance[i]]


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
        i, even = divmod(distance - 1, 2)
        if even == 0:
            volume -= middle * side
            middle = middle * 2 * (2 * i + 1) // (i + 1)
            N, k = n - distance, d - i
            side = side * k * (N - k) // (N * (N - 1)) if k > 0 and N > 1 else 0
        found.append(volume)
    return tuple(found)


@functools.lru_cache(8)
def table_of(n: int, d: int, r: Fraction | None, log: bool) -> np.ndarray:
    """I(0), ..., I(n), times r / 2^n unless r is None, or the logarithms; each rounded once."""
    value = logarithm if log else nearest
    up, down = (1, 1) if r is None else r.as_integer_ratio()
    table = np.array([value(one * up, down << (0 if r is None else n)) for one in intersections(n, d)])
    table.setflags(write=False)
    return table


def log_intersections(n: int, d: int) -> np.ndarray:
    """log I(0), ..., log I(n)."""
    return table_of(n, d, None, True)


def nearest(up: int, down: int) -> float:
    """The float64 nearest to up / down, infinite beyond its range."""
    try:
        return up / down
    except OverflowError:
        return math.inf


def logarithm(up: int, down: int) -> float:
    """log(up / down) for whole numbers of any size, down a power of 2; -inf at 0."""
    if up == 0:
        return -math.inf
    twos = min((up & -up).bit_length(), (down & -down).bit_length()) - 1
    up, down = up >> twos, down >> twos
    shift = up.bit_length() - down.bit_length()
    return math.log(up / (down << shift) if shift > 0 else (up << -shift) / down) + shift * math.log(2)
