import math

import numpy as np
import pytest

import attnspec


@pytest.mark.parametrize("n, d, beta", [
    (64, 5, 35.48476), (64, 11, 15.85277), (64, 15, 10.11042), (1000, 451, 5.96644), (100, 35, 5.45633),
])
def test_the_paper_s_numbers(n, d, beta):
    np.testing.assert_allclose(attnspec.sdm_fit_beta(n_bits=n, radius=d).beta, beta, rtol=0, atol=5e-6)


@pytest.mark.parametrize("d, beta", [(11, 21.53974), (15, 12.22981)])
def test_the_paper_s_continuous_numbers(d, beta):
    np.testing.assert_allclose(attnspec.sdm_fit_beta(n_bits=64, radius=d, continuous=True).beta, beta, rtol=0, atol=6e-6)


@pytest.mark.parametrize("n, d", [(16, 2), (64, 11), (1200, 500)])
@pytest.mark.parametrize("continuous", [False, True])
def test_least_squares_by_lapack(n, d, continuous):
    d_v = np.arange(d)
    x = 1 - 2 * d_v / n
    y = (attnspec.sdm_cap_intersection(x, n_bits=n, radius=d, log=True) if continuous
         else attnspec.sdm_circle_intersection(d_v, n_bits=n, radius=d, log=True))
    slope, bias = np.linalg.lstsq(np.stack([x, np.ones(d)], axis=1), y, rcond=None)[0]
    fit = attnspec.sdm_fit_beta(n_bits=n, radius=d, continuous=continuous, official=False)
    np.testing.assert_allclose([fit.beta, fit.bias], [slope, bias], rtol=1e-9)


def test_two_points_by_hand():
    # n = 4, d = 2: I(0) = 11, I(1) = 8 at x = 1, 1/2; divisors 1 and 2 double the slope
    y = np.log([11.0, 8.0])
    fit = attnspec.sdm_fit_beta(n_bits=4, radius=2, official=False)
    np.testing.assert_allclose(fit, [2 * (y[0] - y[1]), 2 * y[1] - y[0]], rtol=1e-13)
    fit = attnspec.sdm_fit_beta(n_bits=4, radius=2)
    np.testing.assert_allclose(fit, [4 * (y[0] - y[1]), y.mean() - 3 * (y[0] - y[1])], rtol=1e-13)


def test_official_bias_of_caps_carries_the_constant():
    biases = [attnspec.sdm_fit_beta(n_bits=64, radius=15, continuous=True, official=o) for o in (True, False)]
    slope = biases[1].beta * 15 / 14
    np.testing.assert_allclose(biases[0].beta, slope, rtol=1e-7)       # the first cosine is 1 - 1e-15
    mean = 1 - 14 / 64
    np.testing.assert_allclose(biases[0].bias - biases[1].bias, 2 - math.log(2) - (slope - biases[1].beta) * mean, rtol=1e-6)


def test_constant_weights_have_slope_zero():
    np.testing.assert_array_equal(attnspec.sdm_fit_beta(n_bits=8, radius=8).beta, 0.0)


@pytest.mark.parametrize("wrong, message", [
    ({"radius": 1}, r"^radius: expected a whole number >= 2, got 1$"),
    ({"radius": 9}, r"^radius: expected a whole number from 0 to the 8 bits of an address, got 9$"),
    ({"n_bits": 0}, r"^n_bits: expected a whole number >= 1, got 0$"),
    ({"n_locations": -1.0}, r"^n_locations: expected a number > 0, got -1.0$"),
])
def test_wrong_arguments_are_refused(wrong, message):
    for continuous in (False, True):
        with pytest.raises(ValueError, match=message):
            attnspec.sdm_fit_beta(**{"n_bits": 8, "radius": 4, "continuous": continuous, **wrong})
