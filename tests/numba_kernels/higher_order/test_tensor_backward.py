"""The twin of tensor_attention_backward against the reference's gradients."""

import numpy as np
import pytest

import attnspec
from attnspec import numba_kernels
from attnspec.conformance.bounds import bound
from attnspec.conformance.verify import judged
from attnspec.numba_kernels.parallel import threads

RNG = np.random.default_rng(1)
NAMES = ("q", "k1", "k2", "v1", "v2", "do")


def draw(n, m1, m2, d, e, dtype=np.float64):
    shapes = (n, d), (m1, d), (m2, d), (m1, e), (m2, e), (n, e)
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


def assert_same(arrays, **options):
    want = attnspec.tensor_attention_backward(*arrays, **options)
    got = numba_kernels.tensor_attention_backward(*arrays, **options)
    for one, other, array in zip(got, want, arrays, strict=False):
        assert one.shape == np.shape(array)
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-14)
    return got


@pytest.mark.parametrize("sizes", [(7, 5, 6, 3, 2), (130, 70, 90, 17, 9)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top-left", "scale": -0.7}])
def test_float32_within_the_bound(sizes, options):
    record = attnspec.formulas()["tensor_attention_backward"]
    arrays = dict(zip(NAMES, draw(*sizes, dtype=np.float32), strict=True))
    exact = {key: x.astype(np.float64) for key, x in arrays.items()}
    error, limit = judged(
        lambda: numba_kernels.tensor_attention_backward(**arrays, **options), record.function(**exact, **options),
        bound(record, exact, options, "float32"),
    )
    assert error <= limit


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top-left", "scale": 0.7}])
def test_float64(options):
    assert_same(draw(60, 70, 80, 5, 4), **options)


@pytest.mark.parametrize("shape", [(7, 5, 6), (1, 5, 6), (7, 1, 6), (7, 5, 1), (5, 6), (6,)])
def test_masks_of_any_shape(shape):
    assert_same(draw(7, 5, 6, 3, 2), mask=RNG.random(shape) < 0.5)


def test_arrays_that_broadcast():
    shapes = (2, 1, 3, 2), (4, 2), (3, 2, 2), (2, 1, 4, 3), (1, 2, 3), (2, 3, 3, 3)
    arrays = [RNG.standard_normal(shape) for shape in shapes]
    assert_same(arrays, mask=RNG.random((2, 3, 3, 4, 2)) < 0.7)


def test_results_do_not_depend_on_threads():
    arrays = draw(130, 70, 90, 17, 9, np.float32)
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(numba_kernels.tensor_attention_backward(*arrays))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda x: np.repeat(x, 2, axis=-1)[:, ::2], lambda x: x.astype(">f8")])
def test_layouts(layout):
    arrays = [layout(x) for x in draw(7, 5, 6, 3, 2)]
    for x in arrays:
        x.flags.writeable = False
    assert_same(arrays)


@pytest.mark.parametrize("n, m1, m2", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
def test_no_queries_or_no_keys(n, m1, m2):
    for gradient in assert_same(draw(n, m1, m2, 2, 5)):
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_nobody_sees_has_no_gradient_and_no_influence(bad):
    arrays = draw(7, 5, 6, 3, 2)
    mask = np.ones((7, 5, 6), bool)
    mask[:, 1] = mask[:, :, 4] = mask[3] = False
    clean = assert_same(arrays, mask=mask)
    arrays[0][3] = arrays[1][1] = arrays[2][4] = arrays[3][1] = arrays[4][4] = arrays[5][3] = bad
    got = assert_same(arrays, mask=mask)
    for one, other in zip(got, clean, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-15)
    for gradient in (got.dq[3], got.dk1[1], got.dk2[4], got.dv1[1], got.dv2[4]):
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("where", range(6))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_only_some_see(where, bad):
    arrays = draw(7, 5, 6, 3, 2)
    arrays[where][2, 1] = bad
    assert_same(arrays, causal=True)
    assert_same(arrays, mask=RNG.random((7, 5, 6)) < 0.3)


def test_float32_with_infinities_is_computed_in_float64():
    arrays = [x.astype(np.float32) for x in draw(7, 5, 6, 3, 2)]
    arrays[3][2, 1] = np.inf
    want = attnspec.tensor_attention_backward(*arrays, causal=True)
    got = numba_kernels.tensor_attention_backward(*arrays, causal=True)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-30)
