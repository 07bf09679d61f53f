import math

import numpy as np
import pytest

import attnspec

from derivatives import central_difference, complex_step

RNG = np.random.default_rng(0)
n, m, d, radius = 4, 6, 10, 4
queries, addresses, pointers = (RNG.standard_normal((size, d)) for size in (n, m, m))
WEIGHTINGS = [{"weighting": "circle", "radius": radius}, {"weighting": "cap", "radius": radius}, {"weighting": "exponential", "beta": 2.5},
              {"weighting": "cap", "radius": radius, "resolution": 40}]


def loop_weights(query, addresses, weighting, radius=None, beta=None, resolution=None):
    """Normalised weights of one query, a pattern at a time."""
    width, weights = len(query), []
    for p in addresses:
        cos = sum(a * b for a, b in zip(query, p, strict=True)) / math.sqrt(sum(a * a for a in query) * sum(b * b for b in p))
        if weighting == "circle":
            d_v = math.floor(width * (1 - cos) / 2)
            weights.append(sum(math.comb(d_v, i) * math.comb(width - d_v, j) for i in range(d_v + 1) for j in range(width - d_v + 1)
                               if i + j <= radius and d_v - i + j <= radius))
        elif weighting == "exponential":
            weights.append(math.exp(beta * cos))
        else:
            if resolution is not None:
                cos = -1 + 2 * max(math.trunc(resolution * (cos + 1) / 2 - 1), 0) / (resolution - 1)
            weights.append(float(attnspec.sdm_cap_intersection(cos, n_bits=width, radius=radius)))
    return np.array(weights) / sum(weights)


@pytest.mark.parametrize("options", WEIGHTINGS)
def test_by_loops(options):
    want = np.array([loop_weights(query, addresses, **options) for query in queries])
    got = attnspec.sdm_attention(queries, addresses, pointers, **options, return_weights=True)
    np.testing.assert_allclose(got.weights, want, rtol=1e-12)
    np.testing.assert_allclose(got.out, want @ pointers, rtol=1e-11, atol=1e-13)
    np.testing.assert_array_equal(attnspec.sdm_attention(queries, addresses, pointers, **options), got.out)


def test_circle_is_the_default_and_beta_is_fitted():
    np.testing.assert_array_equal(attnspec.sdm_attention(queries, addresses, pointers, radius=radius),
                                  attnspec.sdm_attention(queries, addresses, pointers, **WEIGHTINGS[0]))
    beta = attnspec.sdm_fit_beta(n_bits=d, radius=radius).beta
    np.testing.assert_array_equal(attnspec.sdm_attention(queries, addresses, pointers, weighting="exponential", radius=radius),
                                  attnspec.sdm_attention(queries, addresses, pointers, weighting="exponential", beta=beta))


def test_by_hand():
    # width 4, radius 1: I = 5, 2, 2, 0, 0 at d_v = 0, ..., 4; cosines 1, 1/2 (d_v = 1) and -1/2 (d_v = 3)
    q = np.array([[1.0, 0.0, 0.0, 0.0]])
    p = np.array([[2.0, 0, 0, 0], [0.5, 0.5, 0.5, 0.5], [-3.0, 3, 3, 3]])
    got = attnspec.sdm_attention(q, p, p, radius=1, return_weights=True)
    np.testing.assert_allclose(got.weights, [[5 / 7, 2 / 7, 0.0]], rtol=1e-15)
    np.testing.assert_allclose(got.out, [[11 / 7, 1 / 7, 1 / 7, 1 / 7]], rtol=1e-15)


@pytest.mark.parametrize("options", WEIGHTINGS)
def test_steps(options):
    xi = queries
    for _ in range(3):
        xi = attnspec.sdm_attention(xi, addresses, addresses, **options)
    np.testing.assert_allclose(attnspec.sdm_attention(queries, addresses, addresses, n_iters=3, **options), xi, rtol=1e-12)
    normed = attnspec.sdm_attention(queries, addresses, addresses, n_iters=3, unit_norm=True, **options)
    np.testing.assert_allclose(normed, xi / np.linalg.norm(xi, axis=-1, keepdims=True), rtol=1e-10, atol=1e-12)


def test_hamming_distances_of_signs_are_exact():
    for width in range(1, 80):
        flipped = 1 - 2 * np.tri(width + 1, width, -1)                 # row i has i signs flipped
        got = attnspec.sdm_attention(np.ones((1, width)), flipped, flipped, radius=width // 3, return_weights=True).weights
        I = attnspec.sdm_circle_intersection(np.arange(width + 1), n_bits=width, radius=width // 3)
        np.testing.assert_allclose(got[0], I / I.sum(), rtol=1e-12)


class TestSpecialValues:
    @pytest.mark.parametrize("options", [{"radius": 0}, {"weighting": "cap", "radius": 0}, {"weighting": "cap", "radius": 1}])
    def test_a_query_out_of_reach_stays_as_it_is(self, options):
        got = attnspec.sdm_attention([[2.0, 0.0, 0, 0]], [[-1.0, 0.1, 0, 0]], [[7.0, 7.0, 7, 7]], **options, unit_norm=True,
                                     return_weights=True)
        np.testing.assert_array_equal(got.out, [[2.0, 0.0, 0.0, 0.0]])
        np.testing.assert_array_equal(got.weights, [[0.0]])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    @pytest.mark.parametrize("options", WEIGHTINGS)
    def test_no_queries_or_no_patterns(self, n, m, options):
        got = attnspec.sdm_attention(np.ones((n, d)), np.ones((m, d)), np.ones((m, d)), **options)
        np.testing.assert_array_equal(got, np.ones((n, d)))

    @pytest.mark.parametrize("options", WEIGHTINGS)
    def test_one_pattern_and_equal_patterns(self, options):
        one = attnspec.sdm_attention(queries[:1], queries[:1], pointers[:1], **options)
        np.testing.assert_allclose(one, pointers[:1], rtol=1e-15)
        equal = attnspec.sdm_attention(queries[:1], np.repeat(queries[:1], m, axis=0), pointers, **options)
        np.testing.assert_allclose(equal, pointers.mean(0, keepdims=True), rtol=1e-13, atol=1e-15)

    def test_nothing_of_a_pattern_out_of_reach_arrives(self):
        p, values = np.array([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]), np.array([[1.0, 2, 3, 4], [np.nan, np.inf, 0, 0]])
        for weighting in ("circle", "cap"):
            np.testing.assert_array_equal(attnspec.sdm_attention(p, p, values, radius=1, weighting=weighting)[0], [1.0, 2.0, 3.0, 4.0])

    def test_not_a_number_in_a_query_stays_in_its_row(self):
        bad = queries.copy()
        bad[1, 0] = np.nan
        for options in WEIGHTINGS:
            got = attnspec.sdm_attention(bad, addresses, pointers, **options)
            assert np.all(np.isnan(got[1]))
            np.testing.assert_array_equal(got[[0, 2, 3]], attnspec.sdm_attention(queries, addresses, pointers, **options)[[0, 2, 3]])

    def test_huge_beta_and_huge_vectors(self):
        got = attnspec.sdm_attention(1e300 * queries, 1e-300 * queries, pointers[:n], weighting="exponential", beta=1e6)
        np.testing.assert_allclose(got, pointers[:n], rtol=1e-13)

    @pytest.mark.parametrize("beta", [1e308, 1.79e308, -1e308, -1.79e308])
    def test_a_beta_near_the_end_of_float64(self, beta):
        options = {"weighting": "exponential", "beta": beta, "return_weights": True}
        got = attnspec.sdm_attention(np.sign(beta) * addresses, addresses, pointers, **options)
        np.testing.assert_array_equal(got.weights, np.eye(m))
        np.testing.assert_array_equal(got.out, pointers)

    @pytest.mark.parametrize("options", WEIGHTINGS)
    def test_an_infinite_vector_has_no_direction(self, options):
        bad = queries.copy()
        bad[1, :2] = np.inf, -np.inf
        got = attnspec.sdm_attention(bad, addresses, pointers, **options)
        assert np.all(np.isnan(got[1]))
        np.testing.assert_array_equal(got[[0, 2, 3]], attnspec.sdm_attention(queries, addresses, pointers, **options)[[0, 2, 3]])
        bad = addresses.copy()
        bad[2, 0] = np.inf
        assert np.all(np.isnan(attnspec.sdm_attention(queries, bad, pointers, **options)))

    def test_zeros_with_an_imaginary_part_stay_zeros(self):
        got = attnspec.sdm_attention(np.zeros((1, d)) + 1e-30j, addresses, pointers, weighting="exponential", beta=5.0)
        np.testing.assert_allclose(got.real, pointers.mean(0, keepdims=True), rtol=1e-13, atol=1e-15)

    def test_a_vector_of_zeros_is_as_far_from_all(self):
        got = attnspec.sdm_attention(np.zeros((1, d)), addresses, pointers, weighting="exponential", beta=5.0)
        np.testing.assert_allclose(got, pointers.mean(0, keepdims=True), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("options", [{**WEIGHTINGS[1], "n_iters": 2}, {**WEIGHTINGS[2], "n_iters": 3, "unit_norm": True}])
@pytest.mark.parametrize("name", ["queries", "addresses", "pointers"])
def test_derivatives(options, name):
    arrays = {"queries": queries, "addresses": addresses, "pointers": pointers}
    direction = RNG.standard_normal(arrays[name].shape)

    def function(**a):
        return attnspec.sdm_attention(**a, **options)

    np.testing.assert_allclose(complex_step(function, arrays, name, direction), central_difference(function, arrays, name, direction),
                               rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weighting, width, message", [
    ("circle", 0, r"^queries: expected at least 1 in the last axis, got 0$"), ("cap", 0, r"^queries: expected at least 1 in the last axis"),
    ("exponential", 0, r"^queries: expected at least 1 in the last axis, got 0$"),
    ("cap", 1, r"^weighting: expected 'circle' or 'exponential' where vectors have one dimension, got 'cap'$"),
])
def test_vectors_that_are_too_short(weighting, width, message):
    with pytest.raises(ValueError, match=message):
        attnspec.sdm_attention(np.ones((2, width)), np.ones((3, width)), np.ones((3, width)), weighting=weighting, radius=width)


def test_one_dimension():
    got = attnspec.sdm_attention([[2.0]], [[3.0], [-1.0]], [[5.0], [7.0]], radius=0)
    np.testing.assert_array_equal(got, [[5.0]])


def test_beta_has_a_derivative():
    def out(beta):
        return attnspec.sdm_attention(queries, addresses, pointers, weighting="exponential", beta=beta)

    np.testing.assert_allclose(out(2.0 + 1e-30j).imag / 1e-30, (out(2.0 + 1e-6) - out(2.0 - 1e-6)) / 2e-6, rtol=1e-6, atol=1e-8)


def test_a_fine_cache_approaches_the_exact_caps():
    exact = attnspec.sdm_attention(queries, addresses, pointers, weighting="cap", radius=radius)
    errors = [np.abs(attnspec.sdm_attention(queries, addresses, pointers, weighting="cap", radius=radius, resolution=K) - exact).max()
              for K in (100, 10_000)]
    assert errors[1] < errors[0] / 20


@pytest.mark.parametrize("wrong, message", [
    ({"radius": None}, r"^radius: expected a whole number, got None$"),
    ({"radius": None, "weighting": "exponential"}, r"^radius: expected a whole number, got None$"),
    ({"radius": 11}, r"^radius: expected a whole number from 0 to the 10 bits of an address, got 11$"),
    ({"radius": 1, "weighting": "exponential"}, r"^radius: expected a whole number >= 2, got 1$"),
    ({"weighting": "softmax"}, r"^weighting: expected 'circle' or 'cap' or 'exponential', got 'softmax'$"),
    ({"weighting": "cap", "resolution": 1}, r"^resolution: expected a whole number >= 2, got 1$"),
    ({"n_iters": 0}, r"^n_iters: expected a whole number >= 1, got 0$"),
    ({"beta": "hot", "weighting": "exponential"}, r"^beta: expected a number, got 'hot'$"),
    ({"beta": np.inf, "weighting": "exponential"}, r"^beta: expected a finite number, got inf$"),
    ({"pointers": pointers[:, :-1]}, r"^pointers: expected shape \(..., m, d\) with d = 10"),
])
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        attnspec.sdm_attention(**{"queries": queries, "addresses": addresses, "pointers": pointers, "radius": radius, **wrong})
