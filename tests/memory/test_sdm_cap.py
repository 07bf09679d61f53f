import mpmath as mp
import numpy as np
import pytest

import attnspec

from derivatives import central_difference, complex_step


def lee_kim(c, n, d):
    """log of the share of the sphere by Lee and Kim's J, to 25 digits."""
    with mp.workdps(25):
        theta, theta_v, a = mp.acos(1 - mp.mpf(2 * d) / n), mp.acos(mp.mpf(float(c))), mp.mpf(n - 2) / 2

        def integrand(phi):
            x = max(1 - (mp.tan(theta_v / 2) / mp.tan(phi)) ** 2, mp.mpf(0))
            return mp.sin(phi) ** (n - 2) * mp.betainc(a, mp.mpf(1) / 2, 0, x, regularized=True)

        L = theta - theta_v / 2
        integral = mp.quad(integrand, [theta - L, theta - L / 2, theta])
        J = mp.pi ** (mp.mpf(n - 1) / 2) / mp.gamma(mp.mpf(n - 1) / 2) * integral
        return float(mp.log(2 * J * mp.gamma(mp.mpf(n) / 2) / (2 * mp.pi ** (mp.mpf(n) / 2))))


@pytest.mark.parametrize("n, d", [(3, 1), (4, 1), (7, 3), (20, 6), (64, 11), (65, 32), (200, 90)])
def test_lee_and_kim(n, d):
    theta = np.arccos(1 - 2 * d / n)
    c = np.cos(np.array([0.05, 0.4, 1.0, 1.6]) * theta)
    got = attnspec.sdm_cap_intersection(c, n_bits=n, radius=d, n_locations=1, log=True)
    np.testing.assert_allclose(got, [lee_kim(one, n, d) for one in c], rtol=1e-12)


def elementary(c, n, d):
    """log of the share by the elementary integral, in variables that put the digits where the integrand is."""
    with mp.workdps(40):
        theta = mp.acos(1 - mp.mpf(2 * d) / n)
        delta, L = mp.pi / 2 - theta, theta - mp.acos(mp.mpf(float(c))) / 2

        def rho(psi):
            return 1 - (mp.sin(delta) / mp.sin(psi + delta)) ** 2

        def integrand(x):                                              # psi = L exp(-x)
            return (rho(L * mp.exp(-x)) / rho(L)) ** (mp.mpf(n - 2) / 2) * mp.exp(-x)

        k = mp.mpf(1) / n
        cuts = [0, *(k * 4**i for i in range(7)), k * 4096 + 4, k * 4096 + 16, k * 4096 + 64, mp.inf]
        return float(mp.log(L / mp.pi) + mp.mpf(n - 2) / 2 * mp.log(rho(L)) + mp.log(mp.quad(integrand, cuts)))


@pytest.mark.parametrize("n, d", [(1000, 451), (1000, 5), (1001, 500), (20000, 9000)])
def test_high_dimensions(n, d):
    theta = np.arccos(1 - 2 * d / n)
    c = np.cos(np.array([0.0, 0.3, 1.2, 1.9]) * theta)
    got = attnspec.sdm_cap_intersection(c, n_bits=n, radius=d, n_locations=1, log=True)
    np.testing.assert_allclose(got, [elementary(one, n, d) for one in c], rtol=1e-12)


def test_counting_random_points():
    rng, n, d = np.random.default_rng(0), 5, 2
    points = rng.standard_normal((400_000, n))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    c, h = 0.6, 1 - 2 * d / n
    inside = np.mean((points[:, 0] >= h) & (c * points[:, 0] + np.sqrt(1 - c * c) * points[:, 1] >= h))
    want = attnspec.sdm_cap_intersection(c, n_bits=n, radius=d, n_locations=1)
    np.testing.assert_allclose(inside, want, atol=4 * np.sqrt(want / 400_000))


class TestByHand:
    def test_an_arc(self):
        c = np.cos([0.0, 0.5, 2.0, 3.0])                               # radius 1 of 2: theta = pi/2, the arcs of two half circles
        np.testing.assert_allclose(attnspec.sdm_cap_intersection(c, n_bits=2, radius=1, n_locations=1),
                                   (np.pi - np.array([0.0, 0.5, 2.0, 3.0])) / (2 * np.pi), rtol=1e-14)

    def test_the_cap_of_the_sheet(self):
        np.testing.assert_allclose(attnspec.sdm_cap_intersection(1.0, n_bits=20, radius=6, n_locations=1), 0.036195, atol=5e-7)

    def test_a_sphere_s_cap_is_flat(self):
        for d in range(5):                                             # Archimedes: share (1 - cos theta)/2 = d/n
            np.testing.assert_allclose(attnspec.sdm_cap_intersection(1.0, n_bits=3, radius=min(d, 3), n_locations=3), min(d, 3), rtol=1e-14)

    def test_caps_that_do_not_meet(self):
        c = np.cos(2 * np.arccos(1 - 2 * 3 / 16)) - np.array([1e-6, 0.1])
        np.testing.assert_array_equal(attnspec.sdm_cap_intersection(c, n_bits=16, radius=3), [0.0, 0.0])
        np.testing.assert_array_equal(attnspec.sdm_cap_intersection(c, n_bits=16, radius=3, log=True), [-np.inf, -np.inf])

    def test_points_and_the_whole_sphere(self):
        np.testing.assert_array_equal(attnspec.sdm_cap_intersection([1.0, 0.5], n_bits=6, radius=0), [0.0, 0.0])
        np.testing.assert_allclose(attnspec.sdm_cap_intersection([1.0, 0.5, -1.0], n_bits=6, radius=6), [64.0, 64.0, 64.0], rtol=1e-14)

    def test_official_constant(self):
        ratio = np.divide(*(attnspec.sdm_cap_intersection([1.0, 0.3], n_bits=20, radius=6, official=o) for o in (True, False)))
        np.testing.assert_allclose(ratio, 3.694528049465325, rtol=1e-14)

    def test_cosines_a_little_beyond_one(self):
        got = attnspec.sdm_cap_intersection([1 + 5e-5, -1 - 5e-5], n_bits=8, radius=4)
        np.testing.assert_array_equal(got, attnspec.sdm_cap_intersection([1.0, -1.0], n_bits=8, radius=4))

    def test_not_a_number_stays_one(self):
        np.testing.assert_array_equal(np.isnan(attnspec.sdm_cap_intersection([np.nan, 1.0], n_bits=8, radius=4)), [True, False])

    def test_overflow_is_infinite(self):
        assert attnspec.sdm_cap_intersection(1.0, n_bits=2000, radius=1000) == np.inf


@pytest.mark.parametrize("d", [6, 8, 11])
@pytest.mark.parametrize("log", [False, True])
def test_derivative_is_plackett_s(d, log):
    arrays, options = {"cosine": np.array([0.1, 0.5, 0.9])}, {"n_bits": 16, "radius": d, "n_locations": 1, "log": log}
    c, h = arrays["cosine"], 1 - 2 * d / 16
    want = (1 - 2 * h * h / (1 + c)) ** 7 / (2 * np.pi * np.sqrt(1 - c * c))
    if log:
        want = want / attnspec.sdm_cap_intersection(c, **{**options, "log": False})

    def function(cosine):
        return attnspec.sdm_cap_intersection(cosine, **options)

    np.testing.assert_allclose(complex_step(function, arrays, "cosine", np.ones(3)), want, rtol=1e-12)
    np.testing.assert_allclose(central_difference(function, arrays, "cosine", np.ones(3)), want, rtol=1e-6)


@pytest.mark.parametrize("wrong, message", [
    ({"cosine": [0.5, 1.01]}, r"^cosine: expected numbers from -1 to 1, got 1.01$"),
    ({"cosine": -2.0}, r"^cosine: expected numbers from -1 to 1, got -2.0$"),
    ({"n_bits": 1, "radius": 0}, r"^n_bits: expected a whole number >= 2, got 1$"),
    ({"radius": 17}, r"^radius: expected a whole number from 0 to the 16 bits of an address, got 17$"),
    ({"n_locations": 0}, r"^n_locations: expected a number > 0, got 0$"),
])
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        attnspec.sdm_cap_intersection(**{"cosine": [0.5], "n_bits": 16, "radius": 4, **wrong})
