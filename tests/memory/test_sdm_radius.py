import math

import mpmath as mp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

import attnspec


@pytest.mark.parametrize("criterion, d", [("snr", 11), ("memory", 5), ("critical_distance", 15)])
def test_the_paper_s_radii(criterion, d):
    for r in (None, 2**64, 2.0**64):
        assert attnspec.sdm_optimal_radius(n_bits=64, n_patterns=1024, n_locations=r, criterion=criterion) == d


def test_the_notebook_s_radii():
    assert attnspec.sdm_optimal_radius(n_bits=64, n_patterns=60000) == 10
    assert attnspec.sdm_optimal_radius(n_bits=64, criterion="memory") == 5


def test_kanerva_s_memory():
    assert [attnspec.sdm_optimal_radius(n_bits=1000, n_patterns=m, n_locations=10**6) for m in (10000, 1000)] == [447, 450]
    assert attnspec.sdm_critical_distance(n_bits=1000, radius=451, n_patterns=10000, n_locations=10**6) == 158


def test_critical_distances_near_the_best():
    got = [attnspec.sdm_critical_distance(n_bits=64, radius=d, n_patterns=1024) for d in (14, 15, 16, 17)]
    assert got[1:3] == [24, 24]
    assert max(got) == 24


@pytest.mark.parametrize("n, r, m", [(64, 2.0**64, 1024), (100, 1e5, 50), (256, 1e6, 700), (20, 100.0, 3)])
def test_signal_to_noise_by_search(n, r, m):
    p = np.exp(np.linspace(np.log(1e-12), 0, 400_001))
    best = p[np.argmax(p * r / (1 + p * m + p**3 * m * r))]
    assert attnspec.sdm_optimal_radius(n_bits=n, n_patterns=m, n_locations=r) == int(binom.ppf(best, n, 0.5))


@pytest.mark.parametrize("n, r, recall", [(64, 2.0**64, 0.5), (100, 1e5, 0.9), (256, 1e6, 0.5), (1000, 1e6, 0.5), (200, 30.0, 0.5)])
def test_memory_by_root_finding(n, r, recall):
    z = norm.ppf(recall ** (1 / n))
    p = math.exp(brentq(lambda u: -2 * r**2 * math.exp(3 * u) + 3 * r * math.exp(2 * u) * z**2 + z**2, -60, 0, xtol=1e-14))
    assert attnspec.sdm_optimal_radius(n_bits=n, n_locations=r, criterion="memory", recall=recall) == int(binom.ppf(p, n, 0.5))


def test_memory_s_closed_form_solves_the_cubic():
    z, r = mp.mpf("2.3"), mp.mpf(10) ** 6
    T = 2 * r**4 * z**2 + r**3 * z**6 + 2 * mp.sqrt(r**8 * z**4 + r**7 * z**8)
    p = (z**4 / mp.cbrt(T) + mp.cbrt(T) / r**2 + z**2 / r) / 2
    assert abs(-2 * r**2 * p**3 + 3 * r * p**2 * z**2 + z**2) < 1e-10
    d = attnspec.sdm_optimal_radius(n_bits=1000, n_locations=10**6, criterion="memory", recall=float(norm.cdf(2.3)) ** 1000)
    assert binom.cdf(d - 1, 1000, 0.5) < p <= binom.cdf(d, 1000, 0.5)


def test_the_memory_radius_holds_the_most():
    capacity = [attnspec.sdm_capacity(n_bits=1000, radius=d, n_locations=10**6) for d in range(430, 460)]
    assert abs(430 + int(np.argmax(capacity)) - attnspec.sdm_optimal_radius(n_bits=1000, n_locations=10**6, criterion="memory")) <= 1


@pytest.mark.parametrize("n, d, r, recall", [(64, 5, 2.0**64, 0.5), (1000, 451, 1e6, 0.9), (10, 3, 50.0, 0.3)])
def test_capacity_is_the_formula(n, d, r, recall):
    p, z = binom.cdf(d, n, 0.5), norm.ppf(recall ** (1 / n))
    want = ((p * r) ** 2 / z**2 - p * r) / (p**2 * r + (p**2 * r) ** 2) + 1
    np.testing.assert_allclose(attnspec.sdm_capacity(n_bits=n, radius=d, n_locations=r, recall=recall), want, rtol=1e-10)


def critical_distance(n, d, r, m):
    p = binom.cdf(d, n, 0.5)
    for d_v in range(1, n + 1):
        I = sum(math.comb(d_v, i) * math.comb(n - d_v, j)
                for i in range(d_v + 1) for j in range(n - d_v + 1) if i + j <= d and d_v - i + j <= d) * r / 2**n
        snr = I / math.sqrt(I + (m - 1) * p**2 * r * (1 + p**2 * r)) if I else 0.0
        if not n * norm.sf(snr) < d_v:
            return d_v - 1
    return n


@pytest.mark.parametrize("n, r, m", [(64, 2.0**64, 1024), (30, 1e4, 20), (16, 65536.0, 5), (20, 3000.0, 1), (24, 1e3, 2), (40, 200.0, 3)])
def test_critical_distance_by_plain_loops(n, r, m):
    for d in range(0, n + 1, 3):
        assert attnspec.sdm_critical_distance(n_bits=n, radius=d, n_patterns=m, n_locations=r) == critical_distance(n, d, r, m)


def test_two_to_the_n_beyond_float64():
    assert attnspec.sdm_optimal_radius(n_bits=4000, n_patterns=100) > 0
    d = attnspec.sdm_optimal_radius(n_bits=1500, n_patterns=100)
    volume = [sum(math.comb(1500, i) for i in range(k + 1)) for k in (d - 1, d)]
    # p >= (2 m r)^(-1/3) with r = 2^n, all multiplied out
    assert volume[0] ** 3 * 200 < 2 ** (2 * 1500) <= volume[1] ** 3 * 200
    assert attnspec.sdm_critical_distance(n_bits=1500, radius=5, n_patterns=2) == 10


@pytest.mark.parametrize("call, message", [
    (lambda: attnspec.sdm_optimal_radius(n_bits=8), r"^n_patterns: expected a whole number >= 1, got None$"),
    (lambda: attnspec.sdm_optimal_radius(n_bits=0, n_patterns=1), r"^n_bits: expected a whole number >= 1, got 0$"),
    (lambda: attnspec.sdm_optimal_radius(n_bits=8, n_patterns=1, criterion="best"), r"^criterion: expected 'snr' or 'memory' or 'critical"),
    (lambda: attnspec.sdm_optimal_radius(n_bits=8, criterion="memory", recall=1.0), r"^recall: expected a number between 0 and 1, got 1.0"),
    (lambda: attnspec.sdm_optimal_radius(n_bits=8, criterion="memory", recall=0), r"^recall: expected a number > 0, got 0$"),
    (lambda: attnspec.sdm_critical_distance(n_bits=8, radius=9, n_patterns=1), r"^radius: expected a whole number from 0 to the 8 bits"),
    (lambda: attnspec.sdm_critical_distance(n_bits=8, radius=2, n_patterns=0), r"^n_patterns: expected a whole number >= 1, got 0$"),
    (lambda: attnspec.sdm_capacity(n_bits=8, radius=2, n_locations=0), r"^n_locations: expected a number > 0, got 0$"),
])
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("n, recall", [(1, 0.5), (1, 0.3), (1, 1e-17), (2, 0.25), (2, 0.1), (8, 2.0**-8), (30, 1e-300)])
def test_no_better_than_chance(n, recall):
    for d in (0, n):
        assert attnspec.sdm_capacity(n_bits=n, radius=d, n_locations=100, recall=recall) == math.inf
    with pytest.raises(ValueError, match=rf"^recall: expected more than chance, 2\^-{n}, where criterion is 'memory', got {recall}$"):
        attnspec.sdm_optimal_radius(n_bits=n, n_locations=100, criterion="memory", recall=recall)
    assert attnspec.sdm_optimal_radius(n_bits=n, n_patterns=3, recall=recall) >= 0


@pytest.mark.parametrize("n, recall", [(1, 0.51), (8, 0.005), (2000, 1e-300)])
def test_just_better_than_chance(n, recall):
    z = mp.sqrt(2) * mp.erfinv(2 * mp.mpf(recall) ** (mp.mpf(1) / n) - 1)
    p = mp.mpf(sum(math.comb(n, i) for i in range(n // 2 + 1))) / 2**n
    want = ((100 * p) ** 2 / z**2 - 100 * p) / (100 * p**2 + (100 * p**2) ** 2) + 1
    np.testing.assert_allclose(attnspec.sdm_capacity(n_bits=n, radius=n // 2, n_locations=100, recall=recall), float(want), rtol=1e-12)
    assert 0 <= attnspec.sdm_optimal_radius(n_bits=n, n_locations=100, criterion="memory", recall=recall) <= n


def test_one_bit():
    assert attnspec.sdm_optimal_radius(n_bits=1, n_patterns=1) == 1    # p* = 4^(-1/3) = 0.63 > p(0) = 1/2
    assert attnspec.sdm_capacity(n_bits=1, radius=0) == math.inf       # P = 1/2 is chance
