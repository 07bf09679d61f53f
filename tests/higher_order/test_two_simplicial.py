import numpy as np
import pytest

import attnspec

RNG = np.random.default_rng(2)
q, k1, k2 = RNG.standard_normal((3, 2, 6, 3))
v1, v2 = RNG.standard_normal((2, 2, 6, 4))
ARRAYS = q, k1, k2, v1, v2


def test_by_hand_at_scale_one_over_the_root_of_d():
    k = np.zeros((2, 4))
    k[1, 0] = np.log(3.0)                                              # logits 0 and 2 log(3) / 2
    ones = np.zeros((1, 4))
    ones[0, 0] = 2.0
    got = attnspec.two_simplicial_attention(ones, k, ones / 2, [[2.0], [4.0]], [[10.0]], return_weights=True)
    np.testing.assert_allclose(got.weights, [[[0.25], [0.75]]], rtol=1e-15)
    np.testing.assert_allclose(got.out, [[35.0]], rtol=1e-15)


@pytest.mark.parametrize("window1, window2", [(1, 3), (2, None), (None, 2), (4, 4), (10, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_count_the_own_position_and_end_there(window1, window2, causal):
    i, j1, j2 = np.ogrid[:6, :6, :6]
    mask = np.ones((6, 6, 6), bool)
    for j, w in ((j1, window1), (j2, window2)):
        if w is not None:
            mask = mask & (i - w < j) & (j <= i)
        elif causal:
            mask = mask & (j <= i)
    got = attnspec.two_simplicial_attention(*ARRAYS, window1=window1, window2=window2, causal=causal, return_weights=True)
    np.testing.assert_array_equal(got.weights != 0, np.broadcast_to(mask, got.weights.shape))
    np.testing.assert_allclose(got.out, attnspec.tensor_attention(*ARRAYS, scale=3**-0.5, mask=mask), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal, ends", [(True, True), ("bottom-right", True), ("top-left", False), (False, False)])
def test_windows_lie_where_causal_aligns_each_set(causal, ends):
    n, m1, m2 = 4, 6, 3
    arrays = q[:, :n], k1[:, :m1], k2[:, :m2], v1[:, :m1], v2[:, :m2]
    i, j1, j2 = np.ogrid[:n, :m1, :m2]
    p1, p2 = (i + (m - n if ends else 0) for m in (m1, m2))
    mask = (p1 - 2 < j1) & (j1 <= p1) & (p2 - 3 < j2) & (j2 <= p2)
    got = attnspec.two_simplicial_attention(*arrays, window1=2, window2=3, causal=causal)
    np.testing.assert_allclose(got, attnspec.tensor_attention(*arrays, scale=3**-0.5, mask=mask), rtol=1e-12, atol=1e-14)


def test_window_and_mask_both_hold():
    mask = RNG.random((2, 6, 6, 6)) < 0.5
    i, j = np.ogrid[:6, :6]
    window = ((i - 2 < j) & (j <= i))[:, None, :]
    got = attnspec.two_simplicial_attention(*ARRAYS, window2=2, mask=mask)
    np.testing.assert_allclose(got, attnspec.two_simplicial_attention(*ARRAYS, mask=mask & window), rtol=1e-13, atol=1e-14)


def test_biases_shift_the_second_keys_and_values():
    got = attnspec.two_simplicial_attention(*ARRAYS, k2_bias=0.3, v2_bias=-1.2)
    np.testing.assert_array_equal(got, attnspec.two_simplicial_attention(q, k1, k2 + 0.3, v1, v2 - 1.2))


def test_neighbouring_query_heads_share_key_heads():
    queries = RNG.standard_normal((4, 6, 3))
    got = attnspec.two_simplicial_attention(queries, k1, k2, v1, v2, enable_gqa=True, causal=True)
    for head in range(4):
        shared = (x[head // 2] for x in (k1, k2, v1, v2))
        want = attnspec.two_simplicial_attention(queries[head], *shared, causal=True)
        np.testing.assert_allclose(got[head], want, rtol=1e-13, atol=1e-14)


def test_last_row_is_the_decoding_step():
    full = attnspec.two_simplicial_attention(*ARRAYS, causal=True, window1=4, window2=2)
    step = attnspec.two_simplicial_attention(q[:, -1:], *ARRAYS[1:], causal=True, window1=4, window2=2)
    np.testing.assert_allclose(step, full[:, -1:], rtol=1e-13)


class TestSpecialValues:
    def test_query_that_sees_no_pair_gets_zeros(self):
        mask = np.ones((6, 6, 6), bool)
        mask[2] = False
        got = attnspec.two_simplicial_attention(*ARRAYS, mask=mask)
        np.testing.assert_array_equal(got[:, 2], 0.0)
        np.testing.assert_array_equal(got[:, 3], attnspec.two_simplicial_attention(*ARRAYS)[:, 3])

    def test_more_queries_than_keys_under_causal(self):
        x = np.ones((1, 1))
        got = attnspec.two_simplicial_attention(np.ones((3, 1)), x, x, 2 * x, 3 * x, causal=True)
        np.testing.assert_array_equal(got, [[0.0], [0.0], [6.0]])

    def test_not_a_number_outside_the_window_stays_there(self):
        keys, values = k2.copy(), v2.copy()
        keys[:, 0] = values[:, 0] = np.nan
        got = attnspec.two_simplicial_attention(q, k1, keys, v1, values, window2=2)
        assert np.isnan(got[:, :2]).all()
        np.testing.assert_allclose(got[:, 2:], attnspec.two_simplicial_attention(*ARRAYS, window2=2)[:, 2:], rtol=1e-12, atol=1e-14)

    def test_huge_logits(self):
        got = attnspec.two_simplicial_attention([[1e4]], [[1e3], [-1e3]], [[1e3]], [[2.0], [3.0]], [[5.0]])
        np.testing.assert_array_equal(got, [[10.0]])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, n, m):
        arrays = np.ones((n, 2)), np.ones((m, 2)), np.ones((m, 2)), np.ones((m, 5)), np.ones((m, 5))
        np.testing.assert_array_equal(attnspec.two_simplicial_attention(*arrays, window1=2), np.zeros((n, 5)))


@pytest.mark.parametrize("options, message", [
    ({"window1": 0}, "window1: expected a whole number >= 1, got 0"),
    ({"window2": (1, 2)}, r"window2: expected a whole number >= 1, got \(1, 2\)"),
    ({"k2_bias": "a"}, "k2_bias: expected a number, got 'a'"),
    ({"v2_bias": np.ones(4)}, "v2_bias: expected a number, got"),
    ({"causal": 1}, "causal: expected False or True or"),
])
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        attnspec.two_simplicial_attention(*ARRAYS, **options)


def test_fewer_key_heads_need_enable_gqa():
    message = r"^k1: leading axes \(2,\) do not broadcast against \(4,\) of q; for grouped heads set enable_gqa=True$"
    with pytest.raises(ValueError, match=message):
        attnspec.two_simplicial_attention(np.ones((4, 6, 3)), k1, k2, v1, v2)
