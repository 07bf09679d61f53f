import itertools
import math

import numpy as np
import pytest

import attnspec


def enumerated(n, d, d_v):
    """The count by looking at every address."""
    query = (1,) * d_v + (0,) * (n - d_v)
    return sum(sum(x) <= d and sum(a != b for a, b in zip(x, query, strict=True)) <= d for x in itertools.product((0, 1), repeat=n))


def paper_sum(n, d, d_v):
    """Bricken and Pehlevan's sum over agreements."""
    total = 0
    for a in range(max(0, n - d - d_v // 2), n - d_v + 1):
        for c in range(max(0, n - d - a), min(d_v, d_v - (n - d - a)) + 1):
            total += math.comb(n - d_v, a) * math.comb(d_v, c)
    return total


def direct_sum(n, d, d_v):
    """i of the differing and j of the agreeing bits flipped."""
    return sum(math.comb(d_v, i) * math.comb(n - d_v, j)
               for i in range(d_v + 1) for j in range(n - d_v + 1) if i + j <= d and d_v - i + j <= d)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_enumeration(n):
    for d in range(n + 1):
        got = attnspec.sdm_circle_intersection(np.arange(n + 1), n_bits=n, radius=d)
        np.testing.assert_array_equal(got, [enumerated(n, d, d_v) for d_v in range(n + 1)])


@pytest.mark.parametrize("n, d", [(12, 0), (12, 5), (12, 9), (31, 11), (64, 15), (100, 35), (100, 70)])
def test_three_sums_agree(n, d):
    direct = [direct_sum(n, d, d_v) for d_v in range(n + 1)]
    assert [paper_sum(n, d, d_v) for d_v in range(n + 1)] == direct
    np.testing.assert_array_equal(attnspec.sdm_circle_intersection(np.arange(n + 1), n_bits=n, radius=d), np.array(direct, float))


def test_kanerva_s_memory():
    d_v = [0, 1, 10, 50, 100, 150, 200, 300, 400, 500]
    got = attnspec.sdm_circle_intersection(d_v, n_bits=1000, radius=451, n_locations=10**6)
    want = [1071.85, 958.437, 795.874, 476.874, 285.831, 173.627, 103.461, 32.324, 7.597, 1.101]
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-3)
    exact = [direct_sum(1000, 451, distance) * 10**6 / 2**1000 for distance in (0, 1, 10)]
    np.testing.assert_allclose(got[:3], exact, rtol=1e-15)


class TestRange:
    def test_counts_beyond_float64_are_infinite_and_have_a_logarithm(self):
        assert attnspec.sdm_circle_intersection(0, n_bits=1500, radius=750) == np.inf
        count = sum(math.comb(1500, i) for i in range(751))
        np.testing.assert_allclose(attnspec.sdm_circle_intersection(0, n_bits=1500, radius=750, log=True), math.log(count), rtol=1e-15)

    def test_expected_neurons_where_two_to_the_n_overflows(self):
        got = attnspec.sdm_circle_intersection([0, 3], n_bits=1100, radius=540, n_locations=10**4)
        want = [direct_sum(1100, 540, d_v) * 10**4 / 2**1100 for d_v in (0, 3)]
        np.testing.assert_allclose(got, want, rtol=1e-15)

    def test_tiny_shares_underflow_but_not_their_logarithm(self):
        options = {"n_bits": 3000, "radius": 3, "n_locations": 2}
        assert attnspec.sdm_circle_intersection(6, **options) == 0
        want = math.log(math.comb(6, 3)) - 2999 * math.log(2)
        np.testing.assert_allclose(attnspec.sdm_circle_intersection(6, log=True, **options), want, rtol=1e-14)

    def test_logarithm_near_one_neuron_does_not_cancel(self):
        got = attnspec.sdm_circle_intersection(0, n_bits=1000, radius=0, n_locations=2**1000 + 2**960, log=True)
        np.testing.assert_allclose(got, 2.0**-40, rtol=1e-3)           # log(1 + 2^-40), float64 knows 1 + 2^-40 to 2^-53

    def test_no_address_has_logarithm_minus_infinity(self):
        got = attnspec.sdm_circle_intersection([4, 5, 6], n_bits=6, radius=2, log=True)
        np.testing.assert_array_equal(got, [np.log(6), -np.inf, -np.inf])


def test_a_neuron_at_every_address_is_the_plain_count():
    d_v = np.arange(65)
    plain = attnspec.sdm_circle_intersection(d_v, n_bits=64, radius=11)
    for r in (2**64, 2.0**64, np.float64(2.0**64)):
        np.testing.assert_array_equal(attnspec.sdm_circle_intersection(d_v, n_bits=64, radius=11, n_locations=r), plain)


def test_any_shape():
    d_v = np.arange(12).reshape(2, 3, 2)
    got = attnspec.sdm_circle_intersection(d_v, n_bits=11, radius=4)
    np.testing.assert_array_equal(got.ravel(), attnspec.sdm_circle_intersection(d_v.ravel(), n_bits=11, radius=4))
    assert got.shape == (2, 3, 2)
    assert attnspec.sdm_circle_intersection(np.zeros((0, 3), int), n_bits=11, radius=4).shape == (0, 3)


def test_approximations():
    # the largest term of the paper's sum, its normal approximation, and the exponential decay that it predicts
    n, d, d_v = 1000, 451, np.array([100, 120, 140])
    largest = [math.log(math.comb(n - k, n - d - k // 2) * math.comb(k, k // 2)) for k in map(int, d_v)]
    normal = (n + 1) * np.log(2) - np.log(np.pi * np.sqrt(d_v * (n - d_v))) - (n - 2 * d) ** 2 / (2 * n) * (1 + d_v / n)
    np.testing.assert_allclose(normal, largest, rtol=0, atol=0.15)     # Taylor's terms in d_v/n are left out
    exact = attnspec.sdm_circle_intersection(d_v, n_bits=n, radius=d, log=True)
    assert np.all(exact > largest)


@pytest.mark.parametrize("wrong, message", [
    ({"distance": [7]}, r"^distance: expected whole numbers from 0 to the 6 bits of an address, got 7$"),
    ({"distance": [0, -1]}, r"^distance: expected whole numbers from 0 to the 6 bits of an address, got -1$"),
    ({"distance": [0.5]}, r"^distance: expected whole numbers"),
    ({"radius": 7}, r"^radius: expected a whole number from 0 to the 6 bits of an address, got 7$"),
    ({"radius": -1}, r"^radius: expected a whole number >= 0, got -1$"),
    ({"radius": 1.5}, r"^radius: expected whole numbers"),
    ({"n_bits": 0}, r"^n_bits: expected a whole number >= 1, got 0$"),
    ({"n_locations": 0}, r"^n_locations: expected a number > 0, got 0$"),
    ({"n_locations": -(2**70)}, r"^n_locations: expected a number, got -1180591620717411303424$"),
    ({"n_locations": np.inf}, r"^n_locations: expected a finite number, got inf$"),
    ({"n_locations": "many"}, r"^n_locations: expected a number, got 'many'$"),
])
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        attnspec.sdm_circle_intersection(**{"distance": [0], "n_bits": 6, "radius": 2, **wrong})
