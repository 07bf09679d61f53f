import numpy as np
import pytest

import attnspec

RNG = np.random.default_rng(0)
q, k, v = (RNG.standard_normal((2, 3, size, width)) for size, width in ((4, 5), (6, 5), (6, 2)))
OPTIONS = [{}, {"scale": 0.7}, {"softcap": 0.8}, {"bias": RNG.standard_normal((3, 4, 6))}, {"mask": RNG.random((4, 6)) < 0.6},
           {"causal": True}, {"causal": "top-left"}, {"window": (1, 0)}]


class TestSpecialValues:
    def test_by_hand(self):
        result = attnspec.softmax_one_attention([[1.0]], np.log([[1.0], [2.0]]), [[4.0], [6.0]], return_weights=True, return_lse=True)
        np.testing.assert_allclose(result.weights, [[1 / 4, 2 / 4]], rtol=1e-15)
        np.testing.assert_allclose(result.out, [[4.0]], rtol=1e-15)
        np.testing.assert_allclose(result.lse, [np.log(4)], rtol=1e-15)

    def test_query_that_sees_nothing_gets_zeros(self):
        got = attnspec.softmax_one_attention([[0.0]], [[0.0]], [[4.0]], mask=[[False]], return_weights=True, return_lse=True)
        np.testing.assert_array_equal(got.out, [[0.0]])
        np.testing.assert_array_equal(got.weights, [[0.0]])
        np.testing.assert_array_equal(got.lse, [0.0])

    def test_logits_far_below_and_far_above_zero(self):
        got = attnspec.softmax_one_attention([[1.0], [-1.0], [0.0]], [[-1e4], [-1e4]], [[2.0], [8.0]])
        np.testing.assert_allclose(got, [[0.0], [5.0], [10 / 3]], rtol=1e-15)

    def test_bias_of_minus_infinity(self):
        np.testing.assert_array_equal(attnspec.softmax_one_attention([[0.0]], [[0.0], [0.0]], [[4.0], [6.0]], bias=[-np.inf, 0.0]), [[3.0]])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_stands_behind_a_mask_stays_there(self, bad):
        got = attnspec.softmax_one_attention(np.zeros((2, 1)), [[0.0], [bad]], [[2.0], [bad]], mask=np.array([[True, False], [True, True]]))
        assert got[0, 0] == 1.0
        assert not np.isfinite(got[1, 0])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, n, m):
        got = attnspec.softmax_one_attention(np.ones((n, 4)), np.ones((m, 4)), np.ones((m, 5)))
        np.testing.assert_array_equal(got, np.zeros((n, 5)))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_the_weights_have_one_more_in_their_normaliser(options):
    plain = attnspec.scaled_dot_product_attention(q, k, v, **options, return_weights=True, return_lse=True)
    terms = plain.weights * np.exp(plain.lse)[..., None]               # exp(s), 0 where masked
    P = terms / (1 + terms.sum(-1, keepdims=True))
    got = attnspec.softmax_one_attention(q, k, v, **options, return_weights=True, return_lse=True)
    np.testing.assert_allclose(got.weights, P, rtol=1e-13)
    np.testing.assert_allclose(got.out, P @ v, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(got.lse, np.log1p(terms.sum(-1)), rtol=1e-13, atol=1e-15)


def test_grouped_heads():
    got = attnspec.softmax_one_attention(np.zeros((4, 1, 1)), np.zeros((2, 1, 1)), [[[2.0]], [[4.0]]], enable_gqa=True)
    np.testing.assert_array_equal(got.ravel(), [1.0, 1.0, 2.0, 2.0])


def test_last_row_is_the_decoding_step():
    full = attnspec.softmax_one_attention(q, k, v, causal=True)
    np.testing.assert_allclose(attnspec.softmax_one_attention(q[..., -1:, :], k, v, causal=True), full[..., -1:, :], rtol=1e-13)


def test_a_sink_is_no_option_of_it():
    with pytest.raises(TypeError, match=r"^sink: softmax_one_attention has no such parameter"):
        attnspec.softmax_one_attention(q, k, v, sink=1.0)
