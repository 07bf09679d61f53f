import itertools
import math

import mpmath
import numpy as np
import pytest

import attnspec

RNG = np.random.default_rng(1)


class TestSeparation:
    def test_by_hand(self):
        np.testing.assert_array_equal(attnspec.hopfield_separation([[3.0, 0.0], [1.0, 1.0], [0.0, 2.0]]), [6.0, -1.0, 2.0])

    def test_one_pattern_is_separated_from_nothing(self):
        np.testing.assert_array_equal(attnspec.hopfield_separation([[3.0, 4.0]]), [np.inf])
        assert attnspec.hopfield_separation(np.ones((2, 0, 3))).shape == (2, 0)

    def test_equal_patterns(self):
        np.testing.assert_array_equal(attnspec.hopfield_separation(np.ones((3, 2))), np.zeros(3))

    def test_a_tie_keeps_the_real_part(self):
        # both others have product 0 with the first; np.max would take the imaginary part into the choice
        patterns = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
        got = attnspec.hopfield_separation(patterns + 1e-30j * np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]))
        np.testing.assert_array_equal(got.real, attnspec.hopfield_separation(patterns))


    def test_differences_come_before_products(self):
        """Patterns 1e6 from the origin and 1e-3 or 1e-9 from each other: products of 1e12, separations of about 1e-3."""
        base, steps = np.array([1e6, 0.0]), np.array([[0.0, 0.0], [0.0, 2.0**-10], [2.0**-30, 0.0]])
        with mpmath.workdps(60):
            rows = [[mpmath.mpf(v) for v in row] for row in (base + steps).tolist()]
            exact = [min(mpmath.fdot(a, [x - y for x, y in zip(a, b, strict=True)]) for j, b in enumerate(rows) if j != i)
                     for i, a in enumerate(rows)]
        np.testing.assert_allclose(attnspec.hopfield_separation(base + steps), [float(x) for x in exact], rtol=1e-15)
        want = [float(4 * rows[2][0] * mpmath.exp(-100 * x)) for x in exact]
        np.testing.assert_allclose(attnspec.hopfield_retrieval_bound(base + steps, beta=100.0), want, rtol=1e-14)


class TestRetrievalBound:
    def test_by_hand(self):
        # M = 3, N = 2, states at the patterns: margin = separation = 9 and 1
        patterns = np.array([[3.0, 0.0], [0.0, 1.0]])
        np.testing.assert_allclose(attnspec.hopfield_retrieval_bound(patterns), 6 * np.exp([-9.0, -1.0]), rtol=1e-15)
        moved = patterns + np.array([[-1.0, 0.0], [0.0, 0.0]])
        np.testing.assert_allclose(attnspec.hopfield_retrieval_bound(patterns, moved, beta=2.0), 6 * np.exp([-12.0, -2.0]), rtol=1e-15)
        distance = attnspec.hopfield_retrieval_bound(patterns, moved, beta=2.0, form="distance")
        np.testing.assert_allclose(distance, 6 * np.exp([-2 * (9.0 - 6.0), -2.0]), rtol=1e-15)

    def test_the_farther_of_state_and_fixed_point_counts(self):
        patterns = np.array([[3.0, 0.0], [0.0, 1.0]])
        near, far = patterns + 0.5, patterns + 1.0
        for state, star in ((near, far), (far, near)):
            got = attnspec.hopfield_retrieval_bound(patterns, state, star, form="distance")
            np.testing.assert_allclose(got, 6 * np.exp(-(np.array([9.0, 1.0]) - 6 * np.sqrt(2.0))), rtol=1e-14)

    def test_separation_form_has_a_premise(self):
        patterns = np.array([[3.0, 0.0], [0.0, 1.0]])
        state = patterns + np.array([[1 / 6, 0.0], [0.2, 0.0]])       # 1/(2 beta M) = 1/6
        got = attnspec.hopfield_retrieval_bound(patterns, state, form="separation")
        np.testing.assert_allclose(got, [6 * np.exp(1 - 9.0), np.inf], rtol=1e-15)
        got = attnspec.hopfield_retrieval_bound(patterns, None, state, form="separation")
        np.testing.assert_allclose(got, [6 * np.exp(1 - 9.0), np.inf], rtol=1e-15)

    def test_it_bounds_the_distance_of_the_fixed_point(self):
        for _ in range(50):
            patterns = 3 * RNG.standard_normal((5, 6))
            beta = RNG.uniform(0.5, 2.0)
            star = attnspec.hopfield_retrieve(patterns[:, None], patterns, beta=beta, n_iters=None, tol=1e-13)[:, 0]
            limit = attnspec.hopfield_retrieval_bound(patterns, None, star, beta=beta, form="separation")
            assert np.all(np.linalg.norm(star - patterns, axis=-1) <= limit * (1 + 1e-9) + 1e-12)

    @pytest.mark.parametrize("form", ["margin", "distance", "separation"])
    def test_one_or_no_pattern_has_no_error(self, form):
        for beta in (0.0, 1.0):
            np.testing.assert_array_equal(attnspec.hopfield_retrieval_bound([[1.0, 2.0]], [[5.0, 5.0]], beta=beta, form=form), [0.0])
        assert attnspec.hopfield_retrieval_bound(np.ones((3, 0, 2)), form=form).shape == (3, 0)

    @pytest.mark.parametrize("form", ["margin", "distance", "separation"])
    def test_complex_input_where_bounds_are_infinite(self, form):
        patterns = np.array([[1.0], [1e3]]) + 1e-30j
        got = attnspec.hopfield_retrieval_bound(patterns, np.array([[2.0], [1e3]]), form=form)
        want = attnspec.hopfield_retrieval_bound(patterns.real, np.array([[2.0], [1e3]]), form=form)
        assert want[0] == np.inf
        np.testing.assert_array_equal(got.real, want)
        assert np.all(np.isfinite(got.imag))

    @pytest.mark.parametrize("form", ["distance", "separation"])
    def test_not_a_number_is_not_hidden(self, form):
        patterns = np.array([[3.0, 0.0], [0.0, 1.0]])
        bad = np.array([[np.nan, 0.0], [0.0, 1.0]])
        for arrays in ((bad, None), (None, bad), (bad, patterns + 1), (patterns + 1, bad)):
            np.testing.assert_array_equal(np.isnan(attnspec.hopfield_retrieval_bound(patterns, *arrays, form=form)), [True, False])

    @pytest.mark.parametrize("size", [1e-200, 1e160])
    def test_lengths_whose_squares_leave_float64(self, size):
        patterns = size * np.array([[3.0, 0.0], [0.0, 1.0]])
        got = attnspec.hopfield_retrieval_bound(patterns, beta=1e-300, form="separation") if size < 1 else [
            attnspec.hopfield_storage_radius(patterns, beta=1e-200).radius]
        np.testing.assert_allclose(got, [6e-200 * math.e] * 2 if size < 1 else [1 / 6e-40], rtol=1e-14)

    def test_a_bound_beyond_float64_is_infinite(self):
        np.testing.assert_array_equal(attnspec.hopfield_retrieval_bound([[1.0], [1e3]], beta=1.0), [np.inf, 0.0])

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"^form: expected 'margin' or 'distance' or 'separation', got 'exact'$"):
            attnspec.hopfield_retrieval_bound(np.eye(2), form="exact")
        with pytest.raises(ValueError, match=r"^beta: expected a number >= 0"):
            attnspec.hopfield_retrieval_bound(np.eye(2), beta=-1.0)
        with pytest.raises(ValueError, match=r"^state: expected shape"):
            attnspec.hopfield_retrieval_bound(np.eye(2), np.ones((3, 2)))


class TestStorageRadius:
    def test_by_hand(self):
        radius, needed, contracts = attnspec.hopfield_storage_radius([[4.0, 0.0], [0.0, 2.0]], beta=0.5)
        np.testing.assert_allclose(radius, 1 / (0.5 * 2 * 4.0), rtol=1e-15)
        np.testing.assert_allclose(needed, 2 / (0.5 * 2) + math.log(2 * 1 * 2 * 0.5 * 16) / 0.5, rtol=1e-15)      # 2 + 2 log 32 = 8.93
        np.testing.assert_array_equal(contracts, [True, False])                                                 # separations 16 and 4

    def test_one_pattern_needs_nothing(self):
        radius, needed, contracts = attnspec.hopfield_storage_radius([[3.0, 4.0]], beta=2.0)
        np.testing.assert_allclose(radius, 0.1, rtol=1e-15)
        assert needed == -np.inf
        np.testing.assert_array_equal(contracts, [True])

    def test_zeros_and_nothing(self):
        assert attnspec.hopfield_storage_radius(np.zeros((2, 3))).radius == np.inf
        empty = attnspec.hopfield_storage_radius(np.ones((0, 3)))
        assert empty.radius == np.inf
        assert empty.contracts.shape == (0,)

    def test_complex_zeros_and_tiny_patterns(self):
        got = attnspec.hopfield_storage_radius(np.zeros((2, 3)) + 0j)
        assert (got.radius.real, got.needed.real) == (np.inf, -np.inf)
        np.testing.assert_array_equal(got.contracts, [True, True])
        got = attnspec.hopfield_storage_radius(1e-200 * np.eye(2))
        np.testing.assert_allclose(got.radius, 5e199, rtol=1e-14)
        np.testing.assert_allclose(got.needed, 1 + math.log(4) - 400 * math.log(10), rtol=1e-14)

    def test_one_fixed_point_in_each_sphere(self):
        """From many starts in the sphere the iteration never leaves it and ends in one point."""
        seen = 0
        for _ in range(15):
            patterns = RNG.uniform(1.0, 4.0) * RNG.standard_normal((4, 8))
            beta = RNG.uniform(0.3, 2.0)
            radius, _, contracts = attnspec.hopfield_storage_radius(patterns, beta=beta)
            for i in np.flatnonzero(contracts):
                seen += 1
                away = RNG.standard_normal((20, 8))
                xi = patterns[i] + radius * RNG.uniform(0, 1, (20, 1)) * away / np.linalg.norm(away, axis=-1, keepdims=True)
                for _ in range(40):
                    xi = attnspec.hopfield_update(xi, patterns, beta=beta)
                    assert np.linalg.norm(xi - patterns[i], axis=-1).max() <= radius
                np.testing.assert_allclose(xi, np.tile(xi[:1], (20, 1)), atol=1e-12)
        assert seen > 20

    @pytest.mark.parametrize("beta", [0.0, -1.0, np.inf])
    def test_beta_is_refused(self, beta):
        with pytest.raises(ValueError, match=r"^beta: expected"):
            attnspec.hopfield_storage_radius(np.eye(2), beta=beta)


class TestCapacity:
    @pytest.mark.parametrize("beta, K, d, p, x, c", [(1, 3, 20, 0.001, 1.27326, 3.15461), (1, 1, 75, 0.001, -0.94090, 1.37188)])
    def test_the_papers_examples(self, beta, K, d, p, x, c):
        with mpmath.workdps(30):
            a = mpmath.mpf(2) / (d - 1) * (1 + mpmath.log(2 * beta * K**2 * mpmath.mpf(p) * (d - 1)))
            b = mpmath.mpf(2) * K**2 * beta / 5
            exact = b / mpmath.lambertw(mpmath.exp(a + mpmath.log(b)))
            capacity = mpmath.sqrt(mpmath.mpf(p)) * exact ** (mpmath.mpf(d - 1) / 4)
        assert round(float(a + mpmath.log(b)), 5) == x
        got = attnspec.hopfield_capacity(beta, K, d, p)
        assert round(float(got.c), 5) == c
        np.testing.assert_allclose(got.c, float(exact), rtol=1e-14)
        np.testing.assert_allclose(got.capacity, float(capacity), rtol=1e-13)
        assert got.applies

    def test_it_grows_exponentially_with_the_dimension(self):
        d = np.array([50, 100, 200])
        capacity = attnspec.hopfield_capacity(1.0, 3.0, d, 0.001).capacity
        assert np.all(capacity[1:] / capacity[:-1] > 3.0 ** (np.diff(d) / 4))

    def test_too_few_dimensions(self):
        assert not attnspec.hopfield_capacity(1.0, 1.0, 4, 0.001).applies

    def test_large_arguments_do_not_overflow_on_the_way(self):
        # W(exp(x)) = x - log x + ... for x = a + log b far beyond log of the largest float64
        got = attnspec.hopfield_capacity(1e300, 1.0, 2, 1.0).c
        with mpmath.workdps(50):
            a, b = 2 * (1 + mpmath.log(2 * mpmath.mpf(1e300))), mpmath.mpf(2) * mpmath.mpf(1e300) / 5
            w = mpmath.findroot(lambda w: w + mpmath.log(w) - a - mpmath.log(b), 2000)
        np.testing.assert_allclose(got, float(b / w), rtol=4e-13)      # log c = W - a, about 2068 - 1386, rounded to 4.5e-13

    @pytest.mark.parametrize("p", [1e-160, 1e-300])
    @pytest.mark.parametrize("dtype", [float, complex])
    def test_a_tiny_probability_in_two_dimensions(self, p, dtype):
        with mpmath.workdps(500):
            a, b = 2 * (1 + mpmath.log(18 * mpmath.mpf(p))), mpmath.mpf(18) / 5
            log_c = mpmath.log(b / mpmath.lambertw(mpmath.exp(a + mpmath.log(b)))).real
            capacity = mpmath.exp(mpmath.log(mpmath.mpf(p)) / 2 + log_c / 4)
        got = attnspec.hopfield_capacity(np.array(1.0, dtype), 3.0, 2, p)
        np.testing.assert_allclose(got.capacity.real, float(capacity), rtol=1e-12)
        assert got.c.real == np.inf
        assert got.applies == (log_c >= 4 * mpmath.log(2 / mpmath.sqrt(p)))

    @pytest.mark.parametrize("name, value, text", [
        ("beta", 0.0, "finite numbers > 0"), ("K", -1.0, "finite numbers > 0"), ("beta", np.inf, "finite numbers > 0"),
        ("d", 1, "whole numbers >= 2"), ("d", 2.5, "whole numbers"), ("p", 0.0, "numbers > 0 and <= 1"), ("p", 1.5, "numbers > 0 and <= 1"),
    ])
    def test_refusals(self, name, value, text):
        with pytest.raises(ValueError, match=f"^{name}: expected {text}"):
            attnspec.hopfield_capacity(**{"beta": 1.0, "K": 1.0, "d": 20, "p": 0.1, name: value})


class TestMetastableSize:
    def test_by_hand(self):
        weights = [[0.25, 0.25, 0.25, 0.25], [0.1, 0.6, 0.2, 0.1], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
        size = attnspec.hopfield_metastable_size(weights)
        np.testing.assert_array_equal(size, [4, 3, 1, 0])
        assert size.dtype == np.int64
        np.testing.assert_array_equal(attnspec.hopfield_metastable_size(weights, mass=0.5), [2, 1, 1, 0])

    def test_enumerated(self):
        """No set of fewer weights makes up the mass, and one of that size does."""
        for weights in RNG.dirichlet(np.full(6, 0.4), 30):
            size = attnspec.hopfield_metastable_size(weights[None], mass=0.8)[0]
            best = [max(math.fsum(some) for some in itertools.combinations(weights, k)) for k in range(7)]
            assert best[size] >= 0.8 > best[size - 1]

    @pytest.mark.parametrize("m", [1, 2, 9, 10, 20, 30, 100, 1000])
    def test_equal_weights_and_rounding(self, m):
        assert attnspec.hopfield_metastable_size(np.full((1, m), 1 / m))[0] == math.ceil(9 * m / 10)
        assert attnspec.hopfield_metastable_size(np.full((1, m), 1 / m), mass=1.0)[0] == m

    def test_no_patterns(self):
        np.testing.assert_array_equal(attnspec.hopfield_metastable_size(np.ones((2, 0))), [0, 0])

    @pytest.mark.parametrize("mass", [0.0, 1.1, np.nan])
    def test_mass_is_refused(self, mass):
        with pytest.raises(ValueError, match=r"^mass: expected a number"):
            attnspec.hopfield_metastable_size(np.ones((1, 2)), mass=mass)

    @pytest.mark.parametrize("bad", [-0.1, np.nan])
    def test_weights_are_refused(self, bad):
        with pytest.raises(ValueError, match=r"^weights: expected numbers >= 0, got"):
            attnspec.hopfield_metastable_size([[0.5, bad]])
