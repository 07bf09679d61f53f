import math

import numpy as np
import pytest

import attnspec
from attnspec.reference.higher_order.tensor_poly import MOST_FEATURES, exponents

RNG = np.random.default_rng(3)


def uniform(B, n=12, m1=12, m2=12, d=3, e=3, rng=RNG):
    return tuple(rng.uniform(-B, B, shape) for shape in ((n, d), (m1, d), (m2, d), (m1, e), (m2, e)))


def taylor(z, degree, centre=0.0):
    """The polynomial by its definition around the centre, not expanded in powers of z."""
    return math.exp(centre) * sum((z - centre) ** t / math.factorial(t) for t in range(degree + 1))


def by_pairs(q, k1, k2, v1, v2, degree, centre=0.0, scale=None, visible=True):
    """Attention with the polynomial's weights, all pairs at once."""
    s = np.einsum("id,jd,ld->ijl", q, k1, k2) * (1 / q.shape[-1] if scale is None else scale)
    A = np.where(visible, taylor(s, degree, centre), 0.0)
    return np.einsum("ijl,je,le->ie", A, v1, v2) / A.sum((1, 2))[:, None]


@pytest.mark.parametrize("degree", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("centre", [0.0, 0.6, -1.3])
@pytest.mark.parametrize("scale", [None, -0.4])
def test_it_is_attention_with_the_weights_of_the_polynomial(degree, centre, scale):
    arrays = uniform(0.9, 4, 5, 6, 3, 2)
    got = attnspec.tensor_attention_poly(*arrays, degree=degree, centre=centre, scale=scale)
    np.testing.assert_allclose(got, by_pairs(*arrays, degree, centre, scale), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("degree, centre", [(2, 0.0), (3, 0.5), (6, -1.0)])
def test_features_multiply_to_the_polynomial(degree, centre):
    q, k1, k2, *_ = uniform(1.0, 4, 5, 6, 3)
    U1, U2, U3 = attnspec.tensor_poly_features(q, k1, k2, degree=degree, centre=centre, scale=0.8)
    want = taylor(0.8 * np.einsum("id,jd,ld->ijl", q, k1, k2), degree, centre)
    np.testing.assert_allclose(np.einsum("ir,jr,lr->ijl", U1, U2, U3), want, rtol=1e-12, atol=1e-13)
    assert U1.shape == (4, math.comb(3 + degree, degree))
    assert (U2.shape[0], U3.shape[0]) == (5, 6)


def test_features_by_hand():
    q, k = [[2.0, 3.0]], [[5.0, 7.0]]
    U1, U2, U3 = attnspec.tensor_poly_features(q, k, k, degree=2, scale=1.0)
    np.testing.assert_allclose(U1, [[1, 2, 3, 2, 6, 4.5]], rtol=1e-15)             # 1, x, y, x^2/2, xy, y^2/2
    np.testing.assert_array_equal(U2, [[1, 5, 7, 25, 35, 49]])
    np.testing.assert_array_equal(U3, U2)


@pytest.mark.parametrize("d, degree", [(0, 3), (1, 4), (3, 0), (3, 5), (4, 3)])
def test_exponents_are_all_monomials_once(d, degree):
    alpha = exponents(d, degree)
    assert len(alpha) == math.comb(d + degree, degree)
    assert len({tuple(row) for row in alpha}) == len(alpha)
    assert alpha.sum(-1).max(initial=0) <= degree
    np.testing.assert_array_equal(alpha.sum(-1), np.sort(alpha.sum(-1)))


@pytest.mark.parametrize("n, m1, m2", [(5, 5, 5), (3, 5, 4), (6, 2, 9)])
@pytest.mark.parametrize("causal, ends", [("bottom-right", True), (True, True), ("top-left", False)])
def test_causal_running_sums(n, m1, m2, causal, ends):
    arrays = uniform(0.9, n, m1, m2)
    i, j1, j2 = np.ogrid[:n, :m1, :m2]
    visible = (j1 <= i + (m1 - n if ends else 0)) & (j2 <= i + (m2 - n if ends else 0))
    some = visible.any((1, 2))
    got = attnspec.tensor_attention_poly(*arrays, degree=4, causal=causal)
    np.testing.assert_allclose(got[some], by_pairs(arrays[0][some], *arrays[1:], 4, visible=visible[some]), rtol=1e-11, atol=1e-13)
    np.testing.assert_array_equal(got[~some], 0.0)


def test_causal_error_at_degree_8():
    for seed in range(20):
        arrays = uniform(1.0, 9, 9, 9, rng=np.random.default_rng(seed))
        error = np.abs(attnspec.tensor_attention_poly(*arrays, causal=True) - attnspec.tensor_attention(*arrays, causal=True)).max()
        assert error < 1e-8                                            # 2.4e-11 typically
        assert error <= attnspec.tensor_attention_poly_error(*arrays)


@pytest.mark.parametrize("B, degree, figure", [
    (0.5, 2, 2.2e-8), (0.5, 4, 2.2e-12), (1.0, 2, 1.9e-4), (1.0, 4, 9.5e-7), (1.0, 6, 2.8e-9), (1.0, 8, 7.3e-12),
    (1.5, 4, 1.3e-3), (1.5, 8, 9.1e-6), (1.5, 10, 4.5e-7),
])
def test_measured_errors(B, degree, figure):
    """Largest error over 40 draws of n = 12, d = 3, entries uniform in (-B, B), against the figure measured on another draw."""
    errors = []
    for seed in range(40):
        arrays = uniform(B, rng=np.random.default_rng(seed))
        errors.append(np.abs(attnspec.tensor_attention_poly(*arrays, degree=degree) - attnspec.tensor_attention(*arrays)).max())
    assert figure / 10 < max(errors) < figure * 10
    assert min(errors) < figure


class TestErrorBound:
    @pytest.mark.parametrize("seed", range(60))
    def test_is_never_exceeded(self, seed):
        rng = np.random.default_rng(seed)
        n, m1, m2, d = (int(size) for size in rng.integers(1, 6, 4))
        arrays = uniform(rng.uniform(0.3, 1.3), n, m1, m2, d, rng=rng)
        options = {"degree": int(rng.integers(0, 9)), "centre": float(rng.choice([0.0, rng.uniform(-1, 1)])),
                   "scale": float(rng.uniform(-1, 1)) / d}
        bound = attnspec.tensor_attention_poly_error(*arrays, **options)
        error = np.abs(attnspec.tensor_attention_poly(*arrays, **options) - attnspec.tensor_attention(*arrays, scale=options["scale"]))
        assert error.max() <= bound + 1e-13                            # rounding comes on top of the bound

    def test_is_nearly_reached(self):
        """Two equally distant logits at -R, +R and values of opposite signs: a bound that is not vacuous."""
        R = 0.5
        arrays = [[1.0]], [[-R], [R]], [[1.0]], [[-1.0], [1.0]], [[1.0]]
        error = np.abs(attnspec.tensor_attention_poly(*arrays, degree=2) - attnspec.tensor_attention(*arrays)).max()
        bound = attnspec.tensor_attention_poly_error(*arrays, degree=2)
        assert bound / 10 < error < bound

    def test_by_hand(self):
        # R = 2 * 2 * (0.5 * 0.25 * 2) = 1 for d = 2, scale = -2
        arrays = [[0.5, -0.1]], [[0.1, -0.25]], [[2.0, 1.0]], [[-3.0]], [[1.0]]
        eps = math.e / 24
        np.testing.assert_allclose(attnspec.tensor_attention_poly_error(*arrays, degree=3, scale=-2.0), 2 * eps / (1 - eps) * 3, rtol=1e-14)

    @pytest.mark.parametrize("centre, eps", [
        (0.5, math.exp(1.5) * 1.5**4 / 24), (-0.1, math.exp(0.9) * 0.9**4 / 24), (-0.5, 1.5**4 / 24), (-1.0, 2.0**4 / 24),
        (-1.1, 2.1**4 / 24),
    ])
    def test_centres(self, centre, eps):
        one = [[1.0]]
        got = attnspec.tensor_attention_poly_error(one, one, one, one, one, degree=3, centre=centre)
        np.testing.assert_allclose(got, 2 * eps / (1 - eps), rtol=1e-13)

    def test_relative_error_of_the_polynomial_is_at_most_eps(self):
        z = np.linspace(-1, 1, 2001)
        one = [[1.0]]
        for degree in range(1, 9):
            for centre in (0.0, 0.3, -0.8, -1.5):
                bound = attnspec.tensor_attention_poly_error(one, one, one, one, one, degree=degree, centre=centre)
                eps = 1.0 if bound == np.inf else bound / (2 + bound)
                if bound < np.inf:
                    assert np.max(np.abs(taylor(z, degree, centre) / np.exp(z) - 1)) <= eps * (1 + 1e-9) + 1e-15

    @pytest.mark.parametrize("size", [3.0, 1e3, 1e100])
    def test_is_infinite_where_nothing_is_known(self, size):
        arrays = [[size]], [[1.0]], [[1.0]], [[1.0]], [[1.0]]
        assert attnspec.tensor_attention_poly_error(*arrays, degree=2) == np.inf

    def test_per_leading_axis(self):
        arrays = [np.stack([x, 1.2 * x]) for x in uniform(0.8)]
        got = attnspec.tensor_attention_poly_error(*arrays)
        assert got.shape == (2,)
        for b in range(2):
            np.testing.assert_allclose(got[b], attnspec.tensor_attention_poly_error(*(x[b] for x in arrays)), rtol=1e-14)

    def test_no_queries_or_no_keys(self):
        arrays = np.ones((0, 2)), np.ones((3, 2)), np.ones((3, 2)), np.ones((3, 2)), np.ones((3, 2))
        assert attnspec.tensor_attention_poly_error(*arrays) == 0.0


class TestSpecialValues:
    def test_by_hand(self):
        # weights 1 + S = 1, 3/2, 1, 2 for the pairs at scale 1
        got = attnspec.tensor_attention_poly([[1.0]], [[0.0], [1.0]], [[0.5], [1.0]], [[1.0], [2.0]], [[3.0], [5.0]], degree=1)
        np.testing.assert_allclose(got, [[(1 * 3 + 1 * 5 + 1.5 * 6 + 2 * 10) / 5.5]], rtol=1e-14)

    def test_one_pair_gives_the_product_of_its_values(self):
        got = attnspec.tensor_attention_poly([[9.0]], [[-3.0]], [[2.0]], [[2.0, -1.0]], [[5.0, 4.0]])
        np.testing.assert_allclose(got, [[10.0, -4.0]], rtol=1e-13)

    def test_normaliser_of_zero_shows(self):
        one = [[1.0]]
        assert np.isnan(attnspec.tensor_attention_poly([[-1.0]], one, one, one, one, degree=1).item())
        got = attnspec.tensor_attention_poly([[-1.0]], [[1.5], [0.5]], one, [[1.0], [3.0]], one, degree=1)         # weights -1/2 and 1/2
        assert got.item() == np.inf

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_not_a_number_in_later_keys_stays_there(self, bad):
        arrays = uniform(0.9, 5, 5, 5)
        want = attnspec.tensor_attention_poly(*arrays, degree=3, causal=True)
        for array in arrays[1:]:
            array[3:] = bad
        arrays[1][4] = 0.0                                             # 0 times inf
        got = attnspec.tensor_attention_poly(*arrays, degree=3, causal=True)
        np.testing.assert_array_equal(got[:3], want[:3])
        assert np.isnan(got[3:]).all()

    @pytest.mark.parametrize("causal", [False, True, "top-left"])
    @pytest.mark.parametrize("n, m1, m2", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
    def test_no_queries_or_no_keys(self, n, m1, m2, causal):
        arrays = np.ones((n, 2)), np.ones((m1, 2)), np.ones((m2, 2)), np.ones((m1, 5)), np.ones((m2, 5))
        np.testing.assert_array_equal(attnspec.tensor_attention_poly(*arrays, degree=2, causal=causal), np.zeros((n, 5)))

    def test_last_row_is_the_decoding_step(self):
        q, *rest = uniform(0.9, 4, 5, 6)
        full = attnspec.tensor_attention_poly(q, *rest, causal=True)
        np.testing.assert_allclose(attnspec.tensor_attention_poly(q[-1:], *rest, causal=True), full[-1:], rtol=1e-13)


class TestRefusals:
    @pytest.mark.parametrize("options, message", [
        ({"degree": -1}, "degree: expected a whole number >= 0, got -1"),
        ({"degree": 2.5}, r"degree: expected a whole number >= 0, got 2\.5"),
        ({"centre": "c"}, "centre: expected a number, got 'c'"),
        ({"scale": "1/d"}, "scale: expected a number, got '1/d'"),
    ])
    def test_options(self, options, message):
        for function in (attnspec.tensor_attention_poly, attnspec.tensor_attention_poly_error):
            with pytest.raises(ValueError, match=f"^{message}"):
                function(*uniform(1.0), **options)

    def test_causal(self):
        with pytest.raises(ValueError, match=r"^causal: expected False or True or 'bottom-right' or 'top-left', got 'left'$"):
            attnspec.tensor_attention_poly(*uniform(1.0), causal="left")

    def test_ranks_that_nobody_can_store(self):
        arrays = uniform(1.0, 12, 13, 70, d=64)
        rank = math.comb(72, 8)
        message = rf"^degree: expected at most {MOST_FEATURES} features, got 70 times the rank C\(64 \+ 8, 8\) = {rank}$"
        with pytest.raises(ValueError, match=message):
            attnspec.tensor_attention_poly(*arrays)
        with pytest.raises(ValueError, match=message):
            attnspec.tensor_poly_features(*arrays[:3])
        assert attnspec.tensor_attention_poly(*arrays, degree=2).shape == (12, 3)

    def test_shapes_of_features(self):
        with pytest.raises(ValueError, match=r"^k2: expected shape \(..., m2, d\) with d = 3 as in q, got \(4, 2\)$"):
            attnspec.tensor_poly_features(np.ones((4, 3)), np.ones((4, 3)), np.ones((4, 2)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_queries_that_see_nothing_get_zeros_whatever_they_are(bad):
    q, k = np.array([[bad], [1.0], [1.0]]), np.ones((2, 1))
    got = attnspec.tensor_attention_poly(q, k, k, [[1.0], [2.0]], k, causal=True)
    np.testing.assert_allclose(got, [[0.0], [1.0], [1.5]], rtol=1e-15)
    none = np.ones((0, 1))
    np.testing.assert_array_equal(attnspec.tensor_attention_poly(q, none, k, none, k), np.zeros((3, 1)))


def test_a_huge_later_key_says_nothing():
    one = np.ones((2, 1))
    got = attnspec.tensor_attention_poly(one, [[1.0], [1e200]], one, [[3.0], [1e200]], one, causal=True)
    np.testing.assert_allclose(got[0], [3.0], rtol=1e-15)


@pytest.mark.parametrize("q", [1e200, np.inf])
def test_no_bound_where_logits_overflow(q):
    assert attnspec.tensor_attention_poly_error([[q]], [[1e200]], [[1e200]], [[1.0]], [[1.0]]) == np.inf
    for bad in (np.inf, np.nan):
        assert attnspec.tensor_attention_poly_error([[bad]], [[0.0]], [[1.0]], [[1.0]], [[1.0]]) == np.inf
