import numpy as np
import pytest

import attnspec

RNG = np.random.default_rng(1)
q, k1, k2, v1, v2 = (RNG.standard_normal((2, *shape)) for shape in ((4, 3), (5, 3), (7, 3), (5, 2), (7, 2)))
ARRAYS = q, k1, k2, v1, v2
MASK = RNG.random((4, 5, 7)) < 0.4
MASK[1] = False


@pytest.mark.parametrize("block", [1, 2, 3, 7, 8, 1000])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "top-left"}, {"mask": MASK}, {"mask": MASK[0, 0], "scale": -0.7},
    {"mask": RNG.random((3, 1, 4, 5, 1)) < 0.4},
])
def test_tiles_of_any_size_give_the_pairs_at_once(block, options):
    got = attnspec.tensor_attention_blocked(*ARRAYS, block=block, **options)
    np.testing.assert_allclose(got, attnspec.tensor_attention(*ARRAYS, **options), rtol=1e-12, atol=1e-14)


def test_lse_of_what_each_query_sees():
    lse = attnspec.tensor_attention_blocked(*ARRAYS, block=3, mask=MASK, return_lse=True).lse
    s = np.where(MASK, np.einsum("bnd,bjd,bld->bnjl", *ARRAYS[:3]) / 3, -np.inf)
    with np.errstate(divide="ignore"):
        want = np.log(np.exp(s).sum((-2, -1)))
    np.testing.assert_allclose(lse, want, rtol=1e-13)
    np.testing.assert_array_equal(lse[:, 1], -np.inf)


def test_by_hand():
    result = attnspec.tensor_attention_blocked([[1.0]], [[0.0], [1.0]], np.log([[1.0], [3.0]]), [[1.0], [2.0]], [[4.0], [8.0]],
                                               block=1, return_lse=True)
    np.testing.assert_allclose(result.out, [[(1 * 4 + 1 * 8 + 2 * 4 + 3 * 2 * 8) / 6]], rtol=1e-15)       # weights 1, 1, 1, 3
    np.testing.assert_allclose(result.lse, [np.log(6.0)], rtol=1e-15)
    assert result.weights is None


class TestSpecialValues:
    def test_query_that_sees_no_pair_gets_zeros(self):
        got = attnspec.tensor_attention_blocked(*ARRAYS, mask=MASK)
        np.testing.assert_array_equal(got[:, 1], 0.0)

    def test_first_tiles_all_hidden(self):
        mask = np.zeros((1, 2, 3), bool)
        mask[0, 1, 2] = True
        arrays = [[1.0]], [[1.0], [2.0]], np.ones((3, 1)), [[3.0], [5.0]], [[1.0], [2.0], [7.0]]
        got = attnspec.tensor_attention_blocked(*arrays, block=1, mask=mask)
        np.testing.assert_array_equal(got, [[35.0]])

    def test_logits_that_grow_by_thousands_from_tile_to_tile(self):
        k = np.array([[-1e4], [0.0], [1e4]])
        values = np.array([[1.0], [2.0], [4.0]])
        result = attnspec.tensor_attention_blocked([[1.0], [-1.0]], k, [[1.0]], values, [[1.0]], block=1, return_lse=True)
        np.testing.assert_array_equal(result.out, [[4.0], [1.0]])
        np.testing.assert_array_equal(result.lse, [1e4, 1e4])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_not_a_number_behind_a_mask_stays_there(self, bad):
        first, second, values, others = np.zeros((2, 1)), np.zeros((3, 1)), np.full((2, 1), 2.0), np.full((3, 1), 3.0)
        first[1] = values[1] = second[2] = others[2] = bad
        mask = np.zeros((2, 2, 3), bool)
        mask[:, 0, :2] = True
        mask[1, 1] = True                                              # the second query sees it, the first does not
        got = attnspec.tensor_attention_blocked(np.zeros((2, 1)), first, second, values, others, block=2, mask=mask)
        np.testing.assert_array_equal(got, [[6.0], [np.nan]])

    @pytest.mark.parametrize("n, m1, m2", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
    def test_no_queries_or_no_keys(self, n, m1, m2):
        arrays = np.ones((n, 2)), np.ones((m1, 2)), np.ones((6, m2, 2)), np.ones((m1, 5)), np.ones((m2, 5))
        result = attnspec.tensor_attention_blocked(*arrays, return_lse=True)
        np.testing.assert_array_equal(result.out, np.zeros((6, n, 5)))
        np.testing.assert_array_equal(result.lse, np.full((6, n), -np.inf))


@pytest.mark.parametrize("options, message", [
    ({"block": 0}, "block: expected a whole number >= 1, got 0"),
    ({"block": 2.0}, r"block: expected a whole number >= 1, got 2\.0"),
    ({"causal": "right"}, "causal: expected False or True or"),
    ({"scale": [1.0, 2.0]}, "scale: expected a number, got"),
])
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        attnspec.tensor_attention_blocked(*ARRAYS, **options)


@pytest.mark.parametrize("k1, v1, v2", [
    ([np.inf, 0.0], [1.0, 2.0], [1.0]), ([0.0, 1000.0], [np.inf, 2.0], [1.0]), ([1000.0, 0.0], [1.0, np.inf], [0.0]),
    ([0.0, 0.0], [1.0, 2.0], [np.inf]),
], ids=["key", "value of weight 0", "value times 0", "value"])
def test_a_visible_inf_gives_what_it_gives_in_tensor_attention(k1, v1, v2):
    arrays = [[1.0]], np.reshape(k1, (2, 1)), [[1.0]], np.reshape(v1, (2, 1)), np.reshape(v2, (1, 1))
    want = attnspec.tensor_attention(*arrays)
    assert not np.isfinite(want).any()
    np.testing.assert_array_equal(attnspec.tensor_attention_blocked(*arrays, block=1), want)
