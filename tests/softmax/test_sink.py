import numpy as np
import pytest

import attnspec

from derivatives import assert_gradients

RNG = np.random.default_rng(0)
q, k, v = (RNG.standard_normal((2, 3, size, width)) for size, width in ((4, 5), (6, 5), (6, 2)))
z = RNG.standard_normal(3)
MASK = RNG.random((4, 6)) < 0.6
OPTIONS = [{}, {"scale": 0.7}, {"softcap": 0.8}, {"bias": RNG.standard_normal((3, 4, 6))}, {"mask": MASK}, {"causal": True},
           {"causal": "top-left"}, {"window": (1, 0)}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_it_is_one_more_column_of_logits_dropped_after_the_softmax(options):
    P = attnspec.attention_weights(q, k, **options)
    lse = attnspec.scaled_dot_product_attention(q, k, v, **options, return_lse=True).lse
    with np.errstate(divide="ignore"):
        s = np.log(P) + np.where(np.isfinite(lse), lse, 0.0)[..., None]
    s = np.concatenate([s, np.broadcast_to(z[:, None, None], (2, 3, 4, 1))], axis=-1)
    e = np.exp(s - s.max(-1, keepdims=True))
    column = e / e.sum(-1, keepdims=True)
    got = attnspec.attention_with_sink(q, k, v, z, **options, return_weights=True, return_lse=True)
    np.testing.assert_allclose(got.weights, column[..., :-1], rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(got.out, column[..., :-1] @ v, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(np.exp(z[:, None] - got.lse), column[..., -1], rtol=1e-13)


class TestSpecialValues:
    def test_by_hand(self):
        result = attnspec.attention_with_sink([[[1.0]], [[1.0]]], np.log([[[2.0], [4.0]]]), [[[7.0], [14.0]]], np.log([1.0, 8.0]),
                                              return_weights=True, return_lse=True)
        np.testing.assert_allclose(result.weights, [[[2 / 7, 4 / 7]], [[2 / 14, 4 / 14]]], rtol=1e-15)
        np.testing.assert_allclose(result.out, [[[10.0]], [[5.0]]], rtol=1e-15)
        np.testing.assert_allclose(result.lse, np.log([[7.0], [14.0]]), rtol=1e-15)

    def test_query_that_sees_nothing_gets_zeros(self):
        mask = np.array([[True, False], [False, False]])
        got = attnspec.attention_with_sink(np.zeros((1, 2, 1)), np.zeros((1, 2, 1)), [[[4.0], [5.0]]], [0.0], mask=mask, return_lse=True)
        np.testing.assert_array_equal(got.out, [[[2.0], [0.0]]])
        np.testing.assert_allclose(got.lse, [[np.log(2), 0.0]], rtol=1e-15)

    def test_one_key(self):
        got = attnspec.attention_with_sink([[[1.0]]], [[[np.log(3.0)]]], [[[4.0]]], [0.0])
        np.testing.assert_allclose(got, [[[3.0]]], rtol=1e-15)

    def test_logits_and_sinks_far_apart(self):
        arrays = np.ones((4, 1, 1)), [[[1e4]], [[-1e4]], [[1e4]], [[-1e4]]], np.full((4, 1, 1), 6.0)
        got = attnspec.attention_with_sink(*arrays, [0.0, 0.0, 1e4, -1e4])
        np.testing.assert_array_equal(got.ravel(), [6.0, 0.0, 3.0, 3.0])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_stands_behind_a_mask_stays_there(self, bad):
        spoilt = np.array([[[0.0], [bad]]])
        got = attnspec.attention_with_sink(np.ones((1, 2, 1)), spoilt, spoilt + 2, [0.0], mask=np.array([[True, False], [True, True]]))
        assert got[0, 0, 0] == 1.0
        assert not np.isfinite(got[0, 1, 0])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, n, m):
        got = attnspec.attention_with_sink(np.ones((2, n, 4)), np.ones((2, m, 4)), np.ones((2, m, 5)), [1.0, 2.0])
        np.testing.assert_array_equal(got, np.zeros((2, n, 5)))


def test_there_is_one_sink_for_each_query_head():
    arrays = np.ones((4, 1, 1)), np.zeros((2, 1, 1)), np.ones((2, 1, 1))
    got = attnspec.attention_with_sink(*arrays, np.log([1.0, 3.0, 7.0, 15.0]), enable_gqa=True)
    np.testing.assert_allclose(got.ravel(), [1 / 2, 1 / 4, 1 / 8, 1 / 16], rtol=1e-15)
    with pytest.raises(ValueError, match=r"^sink: expected a shape that broadcasts to \(h,\) with h = 4 as in q, got \(2,\)$"):
        attnspec.attention_with_sink(*arrays, np.zeros(2), enable_gqa=True)


def test_a_number_serves_all_heads():
    np.testing.assert_array_equal(attnspec.attention_with_sink(q, k, v, 0.5), attnspec.attention_with_sink(q, k, v, [0.5, 0.5, 0.5]))


def test_it_is_neither_scaled_nor_capped_nor_biased_nor_masked():
    got = attnspec.attention_with_sink(np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), [[[2.0], [7.0]]], [np.log(6.0)], scale=0.1, softcap=0.01,
                                       bias=[[np.log(2.0)]], mask=[True, False])
    np.testing.assert_allclose(got, [[[2 * 2 / 8]]], rtol=1e-15)


def test_last_row_is_the_decoding_step():
    full = attnspec.attention_with_sink(q, k, v, z, causal=True)
    np.testing.assert_allclose(attnspec.attention_with_sink(q[..., -1:, :], k, v, z, causal=True), full[..., -1:, :], rtol=1e-13)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_gradients_of_the_backward_function_are_its_own(options):
    cotangent = RNG.standard_normal((2, 3, 4, 2))
    arrays = {"q": q, "k": k, "v": v, "sink": z}
    gradients = attnspec.scaled_dot_product_attention_backward(**arrays, do=cotangent, **options)
    assert_gradients(lambda **a: attnspec.attention_with_sink(**a, **options), {name: getattr(gradients, f"d{name}") for name in arrays},
                     arrays, cotangent)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match=r"^causal: expected False or True"):
        attnspec.attention_with_sink(q, k, v, z, causal="right")
    with pytest.raises(TypeError, match=r"^sink: expected an array of shape \(h,\), got None$"):
        attnspec.attention_with_sink(q, k, v, None)
