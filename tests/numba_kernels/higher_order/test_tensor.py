"""Twins of attention over pairs: tensor_attention, tensor_attention_blocked and two_simplicial_attention share one kernel."""

import numpy as np
import pytest

import attnspec
from attnspec import numba_kernels
from attnspec.conformance.bounds import bound
from attnspec.conformance.verify import judged
from attnspec.numba_kernels.parallel import threads

RNG = np.random.default_rng(0)
PAIRS = ("tensor_attention", "tensor_attention_blocked", "two_simplicial_attention")


def draw(n, m1, m2, d, e, lead=(), dtype=np.float64, key_lead=None):
    key_lead = lead if key_lead is None else key_lead
    shapes = (*lead, n, d), (*key_lead, m1, d), (*key_lead, m2, d), (*key_lead, m1, e), (*key_lead, m2, e)
    return dict(zip(("q", "k1", "k2", "v1", "v2"), (RNG.standard_normal(shape).astype(dtype) for shape in shapes), strict=True))


def assert_within_bound(name, arrays, **options):
    """err/bound <= 1 for float32 arrays."""
    record = attnspec.formulas()[name]
    exact = {key: x.astype(np.float64) for key, x in arrays.items()}
    want, limits = record.function(**exact, **options), bound(record, exact, options, "float32")
    error, limit = judged(lambda: getattr(numba_kernels, name)(**arrays, **options), want, limits)
    assert error <= limit


def assert_same(name, arrays, **options):
    """Up to a few roundings in float64, NaN, infinity and zero where the reference has them."""
    want = getattr(attnspec, name)(*arrays, **options)
    got = getattr(numba_kernels, name)(*arrays, **options)
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15)
    return got


SMALL, LARGE = (7, 5, 6, 3, 2), (130, 50, 200, 17, 9)


@pytest.mark.parametrize("sizes", [SMALL, LARGE])
@pytest.mark.parametrize("name, options", [
    ("tensor_attention", {}), ("tensor_attention", {"causal": True}), ("tensor_attention", {"causal": "top-left", "scale": -0.4}),
    ("tensor_attention_blocked", {"block": 3}), ("two_simplicial_attention", {"window1": 3, "window2": 70}),
    ("two_simplicial_attention", {"causal": True, "window2": 4, "k2_bias": 0.3, "v2_bias": -1.2}),
])
def test_float32_within_the_bound(sizes, name, options):
    assert_within_bound(name, draw(*sizes, dtype=np.float32), **options)


def test_more_first_keys_than_a_chunk_and_second_keys_than_a_tile():
    assert_within_bound("tensor_attention", draw(13, 150, 70, 5, 3, dtype=np.float32))
    assert_within_bound("tensor_attention", draw(5, 3, 1100, 5, 3, dtype=np.float32), causal=True)


@pytest.mark.parametrize("shape", [(7, 5, 6), (1, 5, 6), (7, 1, 6), (7, 5, 1), (5, 6), (6,), (3, 1, 7, 5, 6), (2, 1, 1, 1)])
def test_masks_of_any_shape(shape):
    mask = RNG.random(shape) < 0.6
    arrays = draw(*SMALL, lead=(2,)).values()
    for name in PAIRS:
        assert_same(name, arrays, mask=mask)
    want = attnspec.tensor_attention(*arrays, mask=mask, return_weights=True).weights
    got = numba_kernels.tensor_attention(*arrays, mask=mask, return_weights=True).weights
    np.testing.assert_allclose(got, want, rtol=1e-13)
    np.testing.assert_array_equal(got == 0, want == 0)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top-left"}])
def test_weights_and_lse(options):
    arrays = draw(60, 40, 80, 4, 3).values()
    want = attnspec.tensor_attention(*arrays, **options, return_weights=True)
    got = numba_kernels.tensor_attention(*arrays, **options, return_weights=True)
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-12, atol=0)
    lse = attnspec.tensor_attention_blocked(*arrays, **options, return_lse=True).lse
    np.testing.assert_allclose(numba_kernels.tensor_attention_blocked(*arrays, **options, return_lse=True).lse, lse, rtol=1e-13)
    assert numba_kernels.tensor_attention_blocked(*arrays, return_lse=True).weights is None


@pytest.mark.parametrize("causal", [False, True, "top-left"])
def test_a_third_set(causal):
    arrays = draw(9, 4, 5, 3, 2)
    k3, v3 = RNG.standard_normal((6, 3)), RNG.standard_normal((6, 2))
    want = attnspec.tensor_attention(**arrays, k3=k3, v3=v3, causal=causal, return_weights=True)
    got = numba_kernels.tensor_attention(**arrays, k3=k3, v3=v3, causal=causal, return_weights=True)
    np.testing.assert_allclose(got.out, want.out, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-12, atol=0)


def test_grouped_heads():
    arrays = draw(*SMALL, lead=(3, 4), key_lead=(3, 2)).values()
    assert_same("two_simplicial_attention", arrays, enable_gqa=True, causal=True)


def test_leading_axes_broadcast():
    q, k1, k2, v1, v2 = draw(*SMALL).values()
    stacked = np.stack([q, 2 * q, -q])[:, None]
    assert_same("tensor_attention", (stacked, k1, np.stack([k2, -k2]), v1[None, None], np.broadcast_to(v2, (2, *v2.shape))))


@pytest.mark.parametrize("layout", [
    np.asfortranarray, lambda x: np.repeat(x, 2, axis=-1)[:, ::2], lambda x: x[::-1].copy()[::-1], lambda x: x.astype(">f8"),
    lambda x: np.broadcast_to(x, (2, *x.shape)),
], ids=["Fortran", "strided", "negative", "big-endian", "broadcast"])
def test_layouts(layout):
    arrays = [layout(x) for x in draw(*SMALL).values()]
    kept = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    assert_same("tensor_attention", arrays)
    for x, before in zip(arrays, kept, strict=True):
        np.testing.assert_array_equal(x, before)


def test_results_do_not_depend_on_threads():
    arrays = draw(*LARGE, dtype=np.float32).values()
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(numba_kernels.tensor_attention(*arrays, causal=True))
    np.testing.assert_array_equal(*results)


class TestSpecialValues:
    @pytest.mark.parametrize("n, m1, m2", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
    def test_no_queries_or_no_keys(self, n, m1, m2):
        arrays = draw(n, m1, m2, 2, 5).values()
        for name in PAIRS:
            np.testing.assert_array_equal(getattr(numba_kernels, name)(*arrays), np.zeros((n, 5)))
        result = numba_kernels.tensor_attention_blocked(*arrays, return_lse=True)
        np.testing.assert_array_equal(result.lse, np.full(n, -np.inf))
        assert numba_kernels.tensor_attention(*arrays, return_weights=True).weights.shape == (n, m1, m2)

    def test_query_that_sees_no_pair_gets_zeros(self):
        mask = np.ones((7, 5, 6), bool)
        mask[2] = False
        arrays = draw(*SMALL).values()
        result = numba_kernels.tensor_attention_blocked(*arrays, mask=mask, return_lse=True)
        np.testing.assert_array_equal(result.out[2], 0.0)
        assert result.lse[2] == -np.inf
        assert np.all(result.out[3] != 0)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("where", range(1, 5))
    @pytest.mark.parametrize("j", [0, 4])
    def test_what_is_hidden_from_some_queries_does_not_reach_them(self, bad, where, j):
        arrays = list(draw(*SMALL).values())
        mask = np.ones((7, 5, 6), bool)
        (mask if where in (1, 3) else np.swapaxes(mask, 1, 2))[:4, j] = False
        mask[5] = False
        clean = assert_same("tensor_attention", arrays, mask=mask)
        arrays[where][j, 1] = bad
        for name in ("tensor_attention", "two_simplicial_attention"):
            got = assert_same(name, arrays, mask=mask)
        got = assert_same("tensor_attention", arrays, mask=mask)
        np.testing.assert_allclose(got[:4], clean[:4], rtol=1e-13)
        np.testing.assert_array_equal(got[5], 0.0)
        assert not np.isfinite(got[6]).all()
        assert np.isnan(numba_kernels.tensor_attention(*arrays, mask=mask, return_weights=True).weights[:4]).sum() == 0

    def test_not_a_number_in_later_tokens(self):
        arrays = list(draw(100, 100, 100, 3, 2).values())
        clean = numba_kernels.tensor_attention(*arrays, causal=True)
        for x in arrays[1:]:
            x[70:] = np.nan
        got = numba_kernels.tensor_attention(*arrays, causal=True)
        np.testing.assert_allclose(got[:70], clean[:70], rtol=1e-12)
        assert np.isnan(got[70:]).all()

    @pytest.mark.parametrize("k1, v1, v2", [
        ([np.inf, 0.0], [1.0, 2.0], [1.0]), ([0.0, 1000.0], [np.inf, 2.0], [1.0]), ([1000.0, 0.0], [1.0, np.inf], [0.0]),
        ([0.0, 0.0], [1.0, 2.0], [np.inf]), ([0.0, 0.0], [np.inf, 2.0], [1.0, -1.0, -1.0]), ([0.0, 0.0], [-np.inf, 2.0], [1.0, 2.0]),
    ])
    def test_visible_infinities(self, k1, v1, v2):
        columns = [np.reshape(x, (-1, 1)) for x in ([1.0], k1, np.ones(len(v2)), v1, v2)]
        assert not np.isfinite(assert_same("tensor_attention", columns)).any()

    def test_huge_logits(self):
        k = np.array([[1e3], [-1e3]])
        got = numba_kernels.tensor_attention([[1e4], [-1e4]], k, [[1e3]], [[2.0], [3.0]], [[5.0]])
        np.testing.assert_array_equal(got, [[10.0], [15.0]])

    def test_logits_that_grow_from_key_to_key(self):
        k = np.linspace(-2000, 2000, 150)[:, None]
        arrays = [[1.0], [-1.0]], k, [[1.0], [1.5]], RNG.standard_normal((150, 1)), [[1.0], [2.0]]
        assert_same("tensor_attention", [np.asarray(x) for x in arrays])

    def test_small_weights_fade_gradually(self):
        arrays = [np.asarray(x, np.float32) for x in ([[1.0]], [[0.0], [-100.0]], [[1.0]], [[0.0], [1.0]], [[1.0]])]
        got = numba_kernels.tensor_attention(*arrays)
        np.testing.assert_allclose(got, [[np.exp(-100.0)]], rtol=0.05)               # 27 units of the smallest float32

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_halves_come_back(self, dtype):
        import ml_dtypes

        half = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
        arrays = [x.astype(half) for x in draw(*SMALL).values()]
        assert numba_kernels.two_simplicial_attention(*arrays, k2_bias=0.1).dtype == half


@pytest.mark.parametrize("name, options", [
    ("tensor_attention", {"scale": "d"}), ("tensor_attention", {"causal": "left"}), ("tensor_attention", {"k3": np.ones((2, 3))}),
    ("tensor_attention", {"v3": np.ones((2, 2))}), ("tensor_attention", {"k3": np.ones((2, 3)), "v3": np.ones((2, 2)), "mask": True}),
    ("tensor_attention", {"mask": np.ones((7, 5, 5), bool)}), ("tensor_attention_blocked", {"block": 0}),
    ("two_simplicial_attention", {"window1": 0}), ("two_simplicial_attention", {"k2_bias": "a"}), ("tensor_attention", {"scale": np.inf}),
])
def test_refused_in_the_words_of_the_reference(name, options):
    arrays = draw(*SMALL)
    with pytest.raises(ValueError) as want:
        getattr(attnspec, name)(**arrays, **options)
    with pytest.raises(ValueError) as got:
        getattr(numba_kernels, name)(**arrays, **options)
    assert str(got.value) == str(want.value)
