"""The twin of tensor_attention_poly against the reference."""

import math

import numpy as np
import pytest

import attnspec
from attnspec import numba_kernels
from attnspec.conformance.bounds import bound
from attnspec.conformance.verify import judged
from attnspec.numba_kernels.higher_order.tensor_poly import monomial_table
from attnspec.numba_kernels.parallel import threads

RNG = np.random.default_rng(2)
NAMES = ("q", "k1", "k2", "v1", "v2")


def draw(n, m1, m2, d, e, dtype=np.float64):
    return [RNG.uniform(-0.9, 0.9, shape).astype(dtype) for shape in ((n, d), (m1, d), (m2, d), (m1, e), (m2, e))]


def assert_same(arrays, rtol=1e-11, **options):
    got = numba_kernels.tensor_attention_poly(*arrays, **options)
    np.testing.assert_allclose(got, attnspec.tensor_attention_poly(*arrays, **options), rtol=rtol, atol=1e-13)
    return got


@pytest.mark.parametrize("sizes", [(7, 5, 6, 3, 2), (130, 100, 200, 4, 17)])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "top-left", "degree": 3}, {"degree": 5, "centre": 0.4, "scale": -0.3}, {"degree": 0},
])
def test_float32_within_the_bound(sizes, options):
    record = attnspec.formulas()["tensor_attention_poly"]
    arrays = dict(zip(NAMES, draw(*sizes, np.float32), strict=True))
    exact = {key: x.astype(np.float64) for key, x in arrays.items()}
    error, limit = judged(
        lambda: numba_kernels.tensor_attention_poly(**arrays, **options), record.function(**exact, **options),
        bound(record, exact, options, "float32"),
    )
    assert error <= limit


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top-left"}, {"degree": 1, "centre": -1.0}, {"degree": 0}])
@pytest.mark.parametrize("n, m1, m2", [(9, 5, 7), (3, 80, 70), (6, 1, 9)])
def test_float64(n, m1, m2, options):
    assert_same(draw(n, m1, m2, 3, 4), **options)


@pytest.mark.parametrize("d, degree, centre", [(1, 4, 0.0), (3, 0, 0.3), (3, 5, -0.5), (4, 3, 1.0)])
def test_the_table_makes_the_monomials_in_the_order_of_the_reference(d, degree, centre):
    parent, variable, weight = monomial_table(d, degree, centre)
    x = RNG.standard_normal((1, d))
    values = [1.0]
    for a in range(1, len(parent)):
        assert parent[a] < a
        values.append(values[parent[a]] * x[0, variable[a]])
    factors = attnspec.tensor_poly_features(np.ones((1, d)), x, x, degree=degree, centre=centre, scale=1.0)
    assert len(values) == math.comb(d + degree, degree)
    np.testing.assert_allclose(values, factors.u2[0], rtol=1e-13)
    np.testing.assert_allclose(weight, factors.u1[0], rtol=1e-12)


def test_leading_axes_and_layouts():
    q, k1, k2, v1, v2 = draw(6, 5, 4, 3, 2)
    assert_same((np.stack([q, -q])[:, None], k1.astype(">f8"), np.asfortranarray(k2), np.broadcast_to(v1, (3, *v1.shape)), v2), causal=True)


def test_results_do_not_depend_on_threads():
    arrays = draw(130, 100, 200, 4, 40, np.float32)
    for causal in (False, True):
        results = []
        for count in (1, 2):
            with threads(count):
                results.append(numba_kernels.tensor_attention_poly(*arrays, causal=causal))
        np.testing.assert_array_equal(*results)


class TestSpecialValues:
    @pytest.mark.parametrize("causal", [False, True, "top-left"])
    @pytest.mark.parametrize("n, m1, m2", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
    def test_no_queries_or_no_keys(self, n, m1, m2, causal):
        np.testing.assert_array_equal(numba_kernels.tensor_attention_poly(*draw(n, m1, m2, 2, 5), causal=causal), np.zeros((n, 5)))

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_not_a_number_in_later_keys_stays_there(self, bad):
        arrays = draw(90, 90, 90, 3, 2)
        clean = assert_same(arrays, degree=3, causal=True)
        for array in arrays[1:]:
            array[70:] = bad
        arrays[1][80] = 0.0
        got = assert_same(arrays, degree=3, causal=True)
        np.testing.assert_array_equal(got[:70], clean[:70])
        assert np.isnan(got[70:]).all()

    @pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
    def test_queries_that_see_nothing_get_zeros_whatever_they_are(self, bad):
        q, k = np.array([[bad], [1.0], [1.0]]), np.ones((2, 1))
        got = numba_kernels.tensor_attention_poly(q, k, k, [[1.0], [2.0]], k, causal=True)
        np.testing.assert_allclose(got, [[0.0], [1.0], [1.5]], rtol=1e-14)

    def test_normaliser_of_zero_shows(self):
        one = [[1.0]]
        assert np.isnan(numba_kernels.tensor_attention_poly([[-1.0]], one, one, one, one, degree=1).item())
        got = numba_kernels.tensor_attention_poly([[-1.0]], [[1.5], [0.5]], one, [[1.0], [3.0]], one, degree=1)
        assert got.item() == np.inf


@pytest.mark.parametrize("options", [{"degree": -1}, {"centre": "c"}, {"scale": "1/d"}, {"causal": "left"}, {"degree": 400}])
def test_refused_in_the_words_of_the_reference(options):
    arrays = draw(12, 13, 70, 4, 2)
    with pytest.raises(ValueError) as want:
        attnspec.tensor_attention_poly(*arrays, **options)
    with pytest.raises(ValueError) as got:
        numba_kernels.tensor_attention_poly(*arrays, **options)
    assert str(got.value) == str(want.value)
