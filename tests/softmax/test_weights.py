import numpy as np
import pytest

import attnspec
from attnspec.reference.softmax.weights import attention_logits, softmax_weights, weighted_values

RNG = np.random.default_rng(0)
q, k = RNG.standard_normal((3, 4, 5)), RNG.standard_normal((3, 6, 5))


class TestLogits:
    def test_by_hand(self):
        s = attention_logits(np.array([[3.0, 4.0]]), np.array([[1.0, 2.0], [-1.0, 0.0]]), scale=0.5, softcap=2.0, bias=np.array([1.0, 0.0]))
        np.testing.assert_allclose(s, [[2 * np.tanh(5.5 / 2) + 1, 2 * np.tanh(-1.5 / 2)]], rtol=1e-15)

    def test_default_scale_is_of_the_features(self):
        np.testing.assert_allclose(attention_logits(np.ones((1, 9)), np.ones((1, 9))), [[3.0]], rtol=1e-15)

    @pytest.mark.parametrize("softcap", [None, 0, 0.0, np.inf])
    def test_no_softcap(self, softcap):
        np.testing.assert_array_equal(attention_logits(q, k, softcap=softcap), attention_logits(q, k))


class TestSoftmax:
    def test_by_hand(self):
        P, L = softmax_weights(np.log([[1.0, 2.0, 5.0]]))
        np.testing.assert_allclose(P, [[1 / 8, 2 / 8, 5 / 8]], rtol=1e-15)
        np.testing.assert_allclose(L, [np.log(8)], rtol=1e-15)

    def test_masked_entries_leave_the_normaliser(self):
        P, L = softmax_weights(np.log([[1.0, 2.0, 5.0]]), np.array([True, True, False]))
        np.testing.assert_allclose(P, [[1 / 3, 2 / 3, 0.0]], rtol=1e-15)
        np.testing.assert_allclose(L, [np.log(3)], rtol=1e-15)

    def test_a_masked_entry_is_not_in_the_maximum(self):
        P, L = softmax_weights(np.array([[0.0, 0.0, 1e4]]), np.array([True, True, False]))
        np.testing.assert_array_equal(P, [[0.5, 0.5, 0.0]])
        np.testing.assert_allclose(L, [np.log(2)], rtol=1e-15)

    def test_sink_takes_its_share(self):
        P, L = softmax_weights(np.log([[[1.0, 2.0]], [[1.0, 2.0]]]), sink=np.log([1.0, 5.0]))
        np.testing.assert_allclose(P, [[[1 / 4, 2 / 4]], [[1 / 8, 2 / 8]]], rtol=1e-15)
        np.testing.assert_allclose(L, np.log([[4.0], [8.0]]), rtol=1e-15)

    def test_sink_far_above_and_far_below(self):
        P, L = softmax_weights(np.array([[[0.0, 0.0]], [[0.0, 0.0]]]), sink=np.array([1e4, -1e4]))
        np.testing.assert_array_equal(P, [[[0.0, 0.0]], [[0.5, 0.5]]])
        np.testing.assert_allclose(L, [[1e4], [np.log(2)]], rtol=1e-15)

    @pytest.mark.parametrize("sink, L", [(None, -np.inf), (np.array(2.0), 2.0), (np.array(-np.inf), -np.inf)])
    def test_rows_that_see_nothing(self, sink, L):
        s = np.array([[1.0, 2.0], [-np.inf, -np.inf]])
        got_P, got_L = softmax_weights(s, np.array([[False, False], [True, True]]), sink)
        np.testing.assert_array_equal(got_P, np.zeros((2, 2)))
        np.testing.assert_array_equal(got_L, [L, L])

    def test_not_a_number_spoils_its_row_and_leaves_masked_entries_at_zero(self):
        P, L = softmax_weights(np.array([[np.nan, 1.0, 2.0], [np.nan, 1.0, 1.0], [np.inf, 0.0, 0.0]]),
                               np.array([[True, True, False], [False, True, True], [True, True, False]]))
        np.testing.assert_array_equal(P, [[np.nan, np.nan, 0.0], [0.0, 0.5, 0.5], [np.nan, np.nan, 0.0]])
        np.testing.assert_array_equal(L, [np.nan, 1 + np.log(2), np.nan])

    def test_huge_and_tiny_logits(self):
        P, L = softmax_weights(np.array([[1e4, 1e4, -1e4], [-1e300, -1e300, -1e300], [5e-324, 0.0, 0.0]]))
        np.testing.assert_array_equal(P[:2], [[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]])
        np.testing.assert_allclose(P[2], np.full(3, 1 / 3), rtol=1e-15)
        np.testing.assert_allclose(L, [1e4 + np.log(2), -1e300, np.log(3)], rtol=1e-15)

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 0)])
    def test_nothing(self, shape):
        P, L = softmax_weights(np.zeros(shape))
        assert P.shape == shape
        np.testing.assert_array_equal(L, np.full(shape[:-1], np.log(3) if shape == (0, 3) else -np.inf))


class TestWeightedValues:
    A = np.array([[0.0, 1.0], [0.25, 0.75]])

    def test_by_hand(self):
        np.testing.assert_array_equal(weighted_values(self.A, np.array([[4.0], [8.0]])), [[8.0], [7.0]])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_an_unseen_value_never_arrives(self, bad):
        got = weighted_values(self.A, np.array([[bad, 1.0], [8.0, 2.0]]), np.array([[False, True], [True, True]]))
        np.testing.assert_array_equal(got, [[8.0, 2.0], [bad, 1.75]])


class TestAttentionWeights:
    def test_by_hand(self):
        got = attnspec.attention_weights([[1.0], [0.0]], np.log([[1.0], [2.0], [5.0]]), scale=1.0, causal="top-left", sink=0.0)
        np.testing.assert_allclose(got, [[1 / 2, 0, 0], [1 / 3, 1 / 3, 0]], rtol=1e-15)

    @pytest.mark.parametrize("options", [
        {}, {"scale": 0.3}, {"softcap": 0.7}, {"bias": RNG.standard_normal((4, 6))}, {"mask": RNG.random((4, 6)) < 0.6}, {"causal": True},
        {"causal": "top-left", "window": (1, 0)}, {"sink": RNG.standard_normal(3)},
    ], ids=lambda options: " ".join(options) or "plain")
    def test_they_are_those_of_the_attention_function(self, options):
        want = attnspec.scaled_dot_product_attention(q, k, np.zeros((3, 6, 1)), **options, return_weights=True).weights
        np.testing.assert_array_equal(attnspec.attention_weights(q, k, **options), want)

    def test_grouped_heads(self):
        got = attnspec.attention_weights(np.ones((4, 1, 1)), [[[0.0], [1.0]], [[1.0], [0.0]]], enable_gqa=True)
        p = 1 / (1 + np.e)
        np.testing.assert_allclose(got[:, 0], [[p, 1 - p], [p, 1 - p], [1 - p, p], [1 - p, p]], rtol=1e-15)

    def test_wrong_options_are_refused(self):
        with pytest.raises(ValueError, match=r"^softcap: expected a number >= 0, got -1$"):
            attnspec.attention_weights(q, k, softcap=-1)
        with pytest.raises(ValueError, match=r"^k: expected shape \(..., m, d\) with d = 5 as in q, got \(3, 6, 4\)$"):
            attnspec.attention_weights(q, k[..., :4])


class TestHugeAndInfinite:
    def test_a_product_that_overflows_behind_the_mask_says_nothing(self):
        got = attnspec.attention_weights([[1e200]], [[1e200], [0.0]], mask=[[False, True]])
        np.testing.assert_array_equal(got, [[0.0, 1.0]])

    def test_a_tiny_softcap(self):
        got = attention_logits(np.array([[1e20]]), np.array([[1.0], [-1.0]]), softcap=1e-300)
        np.testing.assert_array_equal(got, [[1e-300, -1e-300]])

    def test_the_scale_multiplies_the_product(self):
        np.testing.assert_array_equal(attention_logits(np.array([[1e200]]), np.array([[1e200]]), scale=1e-300), [[np.inf]])

    def test_weights_that_are_not_finite(self):
        np.testing.assert_array_equal(weighted_values(np.array([[np.inf, 1.0]]), np.array([[0.0], [1.0]])), [[np.nan]])
