import numpy as np
import pytest

import attnspec

from derivatives import assert_gradients

RNG = np.random.default_rng(0)
q, k, v, do = (RNG.standard_normal((2, 3, size, width)) for size, width in ((4, 5), (6, 5), (6, 2), (4, 2)))


class TestSpecialValues:
    def test_by_hand(self):
        A = attnspec.cog_weights(np.log([[2.0, 1.0, 0.25]]))           # |p| = log 2, 0, log 4: normaliser 2 + 1 + 4
        np.testing.assert_allclose(A, [[2 / 7, 0.0, -4 / 7]], rtol=1e-15)

    def test_query_that_sees_nothing_gets_zeros(self):
        mask = np.array([[True, False], [False, False]])
        result = attnspec.cog_attention(np.ones((2, 1)), np.ones((2, 1)), [[3.0], [5.0]], mask=mask, return_weights=True)
        np.testing.assert_array_equal(result.out, [[3.0], [0.0]])
        np.testing.assert_array_equal(result.weights, [[1.0, 0.0], [0.0, 0.0]])

    def test_masked_keys_leave_the_normaliser(self):
        np.testing.assert_array_equal(attnspec.cog_weights([[1.0, 1.0]], mask=[[True, False]]), [[1.0, 0.0]])

    def test_huge_logits(self):
        np.testing.assert_array_equal(attnspec.cog_weights([[-1e4, 1.0], [1e4, -1e4]]), [[-1.0, 0.0], [0.5, -0.5]])

    def test_not_a_number_behind_a_mask_stays_there(self):
        keys, values = np.ones((2, 2, 1))
        keys[1] = values[1] = np.nan
        out = attnspec.cog_attention(np.ones((2, 1)), keys, values, mask=np.array([[True, False], [True, True]]))
        np.testing.assert_array_equal(out, [[1.0], [np.nan]])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("normaliser", ["visible", "nonzero"])
    def test_row_that_is_not_a_number_keeps_its_masked_weights_at_zero(self, bad, normaliser):
        mask = np.array([[True, True, False], [False, True, True]])
        A = attnspec.cog_weights([[bad, 1.0, 2.0], [bad, 1.0, 1.0]], mask, normaliser=normaliser)
        assert np.isnan(A[0, 0])
        assert A[0, 2] == A[1, 0] == 0.0
        np.testing.assert_allclose(A[1, 1:], [0.5, 0.5], rtol=1e-6)

    def test_infinite_logit_is_not_a_number_as_in_softmax_attention(self):
        keys = np.array([[np.inf], [1.0]])
        for form in (attnspec.cog_attention, attnspec.scaled_dot_product_attention):
            np.testing.assert_array_equal(form([[1.0]], keys, [[3.0], [5.0]]), [[np.nan]])

    def test_gradients_beside_an_infinite_value(self):
        dq, dk, dv, *_ = attnspec.cog_attention_backward(np.ones((2, 1)), np.ones((2, 1)), [[1.0], [np.inf]], [[0.0], [1.0]],
                                                         mask=[[True, False], [True, False]])
        np.testing.assert_array_equal(dq, np.zeros((2, 1)))
        np.testing.assert_array_equal(dk, np.zeros((2, 1)))
        np.testing.assert_array_equal(dv, [[1.0], [0.0]])
        attnspec.cog_attention_backward([[1.0]], [[1.0]], [[np.inf]], [[0.0]])     # 0 inf is NaN, without a warning

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, n, m):
        out = attnspec.cog_attention(np.ones((n, 2)), np.ones((m, 2)), np.ones((m, 5)))
        np.testing.assert_array_equal(out, np.zeros((n, 5)))

    def test_zero_counts_in_one_normaliser_only(self):
        np.testing.assert_allclose(attnspec.cog_weights([[0.0, 0.0, 1.0]]), [[0, 0, np.e / (2 + np.e)]], rtol=1e-15)
        np.testing.assert_allclose(attnspec.cog_weights([[0.0, 0.0, 1.0]], normaliser="nonzero"), [[0, 0, 1 / (1 + 1e-6)]], rtol=1e-15)


def test_last_row_is_the_decoding_step():
    full = attnspec.cog_attention(q[..., :, :], k, v, causal=True)
    step = attnspec.cog_attention(q[..., -1:, :], k, v, causal=True)
    np.testing.assert_allclose(step, full[..., -1:, :], rtol=1e-13)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top-left", "scale": 0.7}, {"mask": RNG.random((4, 6)) < 0.6}])
def test_gradients(options):
    arrays = {"q": q, "k": k, "v": v}
    gradients = attnspec.cog_attention_backward(**arrays, do=do, **options)
    assert_gradients(lambda **a: attnspec.cog_attention(**a, **options),
                     {"q": gradients.dq, "k": gradients.dk, "v": gradients.dv}, arrays, do)


def test_gradients_of_grouped_heads():
    arrays = {"q": RNG.standard_normal((4, 3, 2)), "k": RNG.standard_normal((2, 5, 2)), "v": RNG.standard_normal((2, 5, 3))}
    cotangent = RNG.standard_normal((4, 3, 3))
    gradients = attnspec.cog_attention_backward(**arrays, do=cotangent, enable_gqa=True)
    assert_gradients(lambda **a: attnspec.cog_attention(**a, enable_gqa=True),
                     {"q": gradients.dq, "k": gradients.dk, "v": gradients.dv}, arrays, cotangent)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradients_where_an_unseen_key_is_not_finite(bad):
    keys, values = k[0, 0].copy(), v[0, 0].copy()
    keys[-1] = values[-1] = bad
    mask = np.arange(6) < 5
    got = attnspec.cog_attention_backward(q[0, 0], keys, values, do[0, 0], mask=mask)
    want = attnspec.cog_attention_backward(q[0, 0], keys[:5], values[:5], do[0, 0])
    np.testing.assert_allclose(got.dq, want.dq, rtol=1e-13)
    for name in ("dk", "dv"):
        np.testing.assert_allclose(getattr(got, name), np.pad(getattr(want, name), ((0, 1), (0, 0))), rtol=1e-13)


def test_unknown_normaliser_is_refused():
    with pytest.raises(ValueError, match=r"^normaliser: expected 'visible' or 'nonzero', got 'sum'$"):
        attnspec.cog_attention(q, k, v, normaliser="sum")
