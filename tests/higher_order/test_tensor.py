import itertools
import math

import numpy as np
import pytest

import attnspec
from attnspec.reference.higher_order.tensor import khatri_rao, visible_tuples

from derivatives import assert_gradients

RNG = np.random.default_rng(0)
q, k1, k2, v1, v2, do = (RNG.standard_normal((2, *shape)) for shape in ((4, 3), (5, 3), (6, 3), (5, 2), (6, 2), (4, 2)))
k3, v3 = RNG.standard_normal((2, 3, 3)), RNG.standard_normal((2, 3, 2))
MASK = RNG.random((4, 5, 6)) < 0.5


def by_loops(q, keys, values, scale, sees=lambda i, js: True):
    """The definition for arrays without leading axes, a tuple at a time."""
    out = np.zeros((len(q), values[0].shape[-1]))
    for i, query in enumerate(q):
        tuples = [js for js in itertools.product(*(range(len(k)) for k in keys)) if sees(i, js)]
        S = [scale * sum(math.prod([x, *(k[j][l] for k, j in zip(keys, js, strict=True))]) for l, x in enumerate(query)) for js in tuples]
        A = [math.exp(s) for s in S]
        for a, js in zip(A, tuples, strict=True):
            out[i] += a / math.fsum(A) * np.prod([v[j] for v, j in zip(values, js, strict=True)], axis=0)
    return out


class TestAgainstLoops:
    @pytest.mark.parametrize("scale", [None, 0.0, 0.7, -1.5])
    def test_pairs(self, scale):
        want = [by_loops(q[b], (k1[b], k2[b]), (v1[b], v2[b]), 1 / 3 if scale is None else scale) for b in range(2)]
        np.testing.assert_allclose(attnspec.tensor_attention(q, k1, k2, v1, v2, scale=scale), want, rtol=1e-13, atol=1e-14)

    def test_mask(self):
        want = by_loops(q[0], (k1[0], k2[0]), (v1[0], v2[0]), 1 / 3, lambda i, js: MASK[(i, *js)])
        np.testing.assert_allclose(attnspec.tensor_attention(q[0], k1[0], k2[0], v1[0], v2[0], mask=MASK), want, rtol=1e-13, atol=1e-14)

    @pytest.mark.parametrize("mask", [MASK[0], MASK[0, 0], MASK[:, :1, :1], MASK[:, :, :1]])
    def test_masks_broadcast(self, mask):
        arrays = q, k1, k2, v1, v2
        want = attnspec.tensor_attention(*arrays, mask=np.broadcast_to(mask, MASK.shape))
        np.testing.assert_array_equal(attnspec.tensor_attention(*arrays, mask=mask), want)

    @pytest.mark.parametrize("n", [2, 9])
    @pytest.mark.parametrize("causal, ends", [("bottom-right", True), (True, True), ("top-left", False)])
    def test_causal_aligns_each_set_by_its_own_length(self, n, causal, ends):
        queries = RNG.standard_normal((n, 3))
        want = by_loops(queries, (k1[0], k2[0]), (v1[0], v2[0]), 1 / 3,
                        lambda i, js: all(j <= i + (m - n if ends else 0) for j, m in zip(js, (5, 6), strict=True)))
        got = attnspec.tensor_attention(queries, k1[0], k2[0], v1[0], v2[0], causal=causal)
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)

    def test_triples(self):
        want = [by_loops(q[b], (k1[b], k2[b], k3[b]), (v1[b], v2[b], v3[b]), 1 / 3) for b in range(2)]
        np.testing.assert_allclose(attnspec.tensor_attention(q, k1, k2, v1, v2, k3=k3, v3=v3), want, rtol=1e-13, atol=1e-14)

    @pytest.mark.parametrize("t", [1, 2, 3, 4])
    def test_any_order_with_mask_and_causal(self, t):
        sizes = (3, 4, 2, 5)[:t]
        keys, values = [RNG.standard_normal((m, 3)) for m in sizes], [RNG.standard_normal((m, 2)) for m in sizes]
        mask = RNG.random((4, *sizes)) < 0.6
        want = by_loops(q[0], keys, values, 0.4, lambda i, js: mask[(i, *js)] and all(j <= i for j in js))
        got = attnspec.tensor_attention_general(q[0], keys, values, scale=0.4, mask=mask, causal="top-left", return_weights=True)
        np.testing.assert_allclose(got.out, want, rtol=1e-13, atol=1e-14)
        assert got.weights.shape == (4, *sizes)
        np.testing.assert_array_equal(got.weights[~mask], 0.0)

    def test_weights_are_those_of_the_pairs(self):
        result = attnspec.tensor_attention(q, k1, k2, v1, v2, return_weights=True)
        A = np.exp(np.einsum("bnd,bjd,bld->bnjl", q, k1, k2) / 3)
        np.testing.assert_allclose(result.weights, A / A.sum((-2, -1), keepdims=True), rtol=1e-13)
        np.testing.assert_allclose(result.out, np.einsum("bnjl,bje,ble->bne", result.weights, v1, v2), rtol=1e-12, atol=1e-14)

    def test_general_of_two_sets_is_tensor_attention(self):
        got = attnspec.tensor_attention_general(q, [k1, k2], [v1, v2], mask=MASK, causal=True)
        np.testing.assert_array_equal(got, attnspec.tensor_attention(q, k1, k2, v1, v2, mask=MASK, causal=True))


class TestSpecialValues:
    def test_by_hand(self):
        k = np.log([[1.0], [3.0]])                                     # logits 0, 0, 0, log 3 at scale 1/log 3
        got = attnspec.tensor_attention([[1.0]], k, k, [[2.0], [4.0]], [[1.0], [5.0]], scale=1 / np.log(3.0), return_weights=True)
        np.testing.assert_allclose(got.weights, [[[1 / 6, 1 / 6], [1 / 6, 1 / 2]]], rtol=1e-15)
        np.testing.assert_allclose(got.out, [[(2 * 1 + 2 * 5 + 4 * 1) / 6 + 4 * 5 / 2]], rtol=1e-15)

    def test_default_scale_is_one_over_d(self):
        d = 4
        x = np.full((2, d), np.log(3.0))
        x[0] = 0                                                       # logits 0 but for the last pair: log(3)^2 at scale 1/d
        weights = attnspec.tensor_attention(np.ones((1, d)), x, x, x, x, return_weights=True).weights
        np.testing.assert_allclose(weights[0, 1, 1] / weights[0, 0, 0], np.exp(np.log(3.0) ** 2), rtol=1e-14)

    def test_khatri_rao_runs_through_the_last_factor_first(self):
        a, b, c = RNG.standard_normal((3, 2)), RNG.standard_normal((4, 2)), RNG.standard_normal((5, 2))
        np.testing.assert_array_equal(khatri_rao(a, b)[2 * 4 + 1], a[2] * b[1])
        np.testing.assert_array_equal(khatri_rao(a, b, c)[(1 * 4 + 3) * 5 + 2], a[1] * b[3] * c[2])

    def test_query_that_sees_no_pair_gets_zeros(self):
        mask = np.zeros((2, 1, 2), bool)
        mask[0, 0, 1] = True
        arrays = np.ones((2, 1)), [[1.0]], [[1.0], [1.0]], [[3.0]], [[5.0], [7.0]]
        result = attnspec.tensor_attention(*arrays, mask=mask, return_weights=True)
        np.testing.assert_array_equal(result.out, [[21.0], [0.0]])
        np.testing.assert_array_equal(result.weights, [[[0.0, 1.0]], [[0.0, 0.0]]])

    def test_one_pair_gives_the_product_of_its_values(self):
        np.testing.assert_array_equal(attnspec.tensor_attention([[9.0]], [[-3.0]], [[2.0]], [[2.0, -1.0]], [[5.0, 4.0]]), [[10.0, -4.0]])

    def test_more_queries_than_keys_under_causal(self):
        x = np.ones((1, 1))
        got = attnspec.tensor_attention(np.ones((3, 1)), x, x, 2 * x, 3 * x, causal=True)
        np.testing.assert_array_equal(got, [[0.0], [0.0], [6.0]])

    def test_huge_logits(self):
        k = np.array([[1e3], [-1e3]])                                  # logits of 1e10 and -1e10
        got = attnspec.tensor_attention([[1e4], [-1e4]], k, [[1e3]], [[2.0], [3.0]], [[5.0]])
        np.testing.assert_array_equal(got, [[10.0], [15.0]])

    def test_equal_logits_give_the_product_of_means(self):
        got = attnspec.tensor_attention([[0.0]], [[1.0], [5.0]], [[2.0], [7.0]], [[1.0], [2.0]], [[3.0], [7.0]])
        np.testing.assert_allclose(got, [[7.5]], rtol=1e-15)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_not_a_number_behind_a_mask_stays_there(self, bad):
        k, v = np.ones((2, 2, 1))
        k[1] = v[1] = bad
        mask = np.ones((2, 2, 1), bool)
        mask[0, 1] = False                                             # the first query does not see it, the second does
        got = attnspec.tensor_attention(np.zeros((2, 1)), k, np.zeros((1, 1)), v, 3 * np.ones((1, 1)), mask=mask)
        np.testing.assert_array_equal(got, [[3.0], [np.nan]])

    @pytest.mark.parametrize("n, m1, m2", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
    def test_no_queries_or_no_keys(self, n, m1, m2):
        arrays = np.ones((n, 2)), np.ones((m1, 2)), np.ones((m2, 2)), np.ones((m1, 5)), np.ones((m2, 5))
        result = attnspec.tensor_attention(*arrays, return_weights=True)
        np.testing.assert_array_equal(result.out, np.zeros((n, 5)))
        assert result.weights.shape == (n, m1, m2)
        gradients = attnspec.tensor_attention_backward(*arrays, np.ones((n, 5)))
        for gradient, array in zip(gradients, arrays, strict=True):
            np.testing.assert_array_equal(gradient, np.zeros(array.shape))

    def test_visible_tuples(self):
        got = visible_tuples(2, (2, 3), causal="top-left")
        np.testing.assert_array_equal(got.astype(int), [[[1, 0, 0], [0, 0, 0]], [[1, 1, 0], [1, 1, 0]]])


@pytest.mark.parametrize("order", [3, 4])
def test_last_row_is_the_decoding_step(order):
    third = {"k3": k3, "v3": v3} if order == 4 else {}
    full = attnspec.tensor_attention(q, k1, k2, v1, v2, causal=True, **third)
    step = attnspec.tensor_attention(q[:, -1:], k1, k2, v1, v2, causal=True, **third)
    np.testing.assert_allclose(step, full[:, -1:], rtol=1e-13)


GRADIENTS = ("q", "k1", "k2", "v1", "v2")


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "top-left", "scale": 0.7}, {"mask": MASK}, {"mask": MASK[0], "scale": -1.0},
])
def test_gradients(options):
    arrays = {"q": q, "k1": k1, "k2": k2, "v1": v1, "v2": v2}
    gradients = attnspec.tensor_attention_backward(**arrays, do=do, **options)
    assert_gradients(lambda **a: attnspec.tensor_attention(**a, **options), dict(zip(GRADIENTS, gradients, strict=True)), arrays, do)


def test_gradients_of_arrays_that_broadcast():
    arrays = {"q": RNG.standard_normal((2, 1, 3, 2)), "k1": RNG.standard_normal((4, 2)), "k2": RNG.standard_normal((3, 2, 2)),
              "v1": RNG.standard_normal((2, 1, 4, 3)), "v2": RNG.standard_normal((1, 2, 3))}
    cotangent = RNG.standard_normal((2, 3, 3, 3))
    mask = RNG.random((2, 3, 3, 4, 2)) < 0.7
    gradients = attnspec.tensor_attention_backward(**arrays, do=cotangent, mask=mask)
    assert_gradients(lambda **a: attnspec.tensor_attention(**a, mask=mask), dict(zip(GRADIENTS, gradients, strict=True)), arrays, cotangent)


def test_gradients_ignore_what_nobody_sees():
    mask = np.ones((3, 2), bool)
    mask[:, 1] = mask[2] = False
    x, y, values, others = (RNG.standard_normal((size, 2)) for size in (3, 2, 3, 2))
    want = attnspec.tensor_attention_backward(q[0, :, :2], x, y, values, others, do[0], mask=mask)
    x[2] = values[2] = y[1] = np.nan
    others[1] = np.inf
    got = attnspec.tensor_attention_backward(q[0, :, :2], x, y, values, others, do[0], mask=mask)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-15)
    np.testing.assert_array_equal(got.dk1[2], 0.0)
    np.testing.assert_array_equal(got.dv2[1], 0.0)


class TestRefusals:
    @pytest.mark.parametrize("options, message", [
        ({"scale": "d"}, "scale: expected a number, got 'd'"),
        ({"causal": "left"}, "causal: expected False or True or 'bottom-right' or 'top-left', got 'left'"),
        ({"k3": k3}, r"v3: expected an array of shape \(..., m3, e\) to go with the third set, got None"),
        ({"v3": v3}, r"k3: expected an array of shape \(..., m3, d\) to go with the third set, got None"),
        ({"k3": k3, "v3": v3, "mask": MASK}, "mask: expected None with a third set"),
        ({"k3": k3[..., :2], "v3": v3}, r"k3: expected shape \(..., m3, d\) with d = 3 as in q, got \(2, 3, 2\)"),
        ({"mask": MASK[:, :, :5]}, r"mask: expected a shape that broadcasts to \(..., n, m1, m2\) with m2 = 6 as in k2, got \(4, 5, 5\)"),
    ])
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=f"^{message}"):
            attnspec.tensor_attention(q, k1, k2, v1, v2, **options)

    def test_keys_and_values_of_different_sizes(self):
        with pytest.raises(ValueError, match=r"^v2: expected shape \(..., m2, e\) with m2 = 6 as in k2, got \(2, 5, 2\)$"):
            attnspec.tensor_attention(q, k1, k2, v1, v1)

    @pytest.mark.parametrize("keys, values, error, message", [
        (k1, [v1], ValueError, "keys: expected a list of arrays, one per set, got ndarray"),
        ([], [], ValueError, "keys: expected a list of arrays, one per set, got an empty one"),
        ([k1], None, ValueError, "values: expected a list of arrays, one per set, got NoneType"),
        ([k1, k2], [v1], ValueError, "values: expected 2 arrays, as many as keys, got 1"),
        ([k1, k2[..., :2]], [v1, v2], ValueError, r"keys\[1\]: expected shape \(..., m2, d\) with d = 3 as in q, got \(2, 6, 2\)"),
        ([k1, k2], [v1, v1], ValueError, r"values\[1\]: expected shape \(..., m2, e\) with m2 = 6 as in keys\[1\], got \(2, 5, 2\)"),
        ([k1, None], [v1, v2], TypeError, r"keys\[1\]: expected an array of shape \(..., m2, d\), got None"),
        ([k1, "x"], [v1, v2], TypeError, r"keys\[1\]: expected real numbers"),
    ])
    def test_lists_of_sets(self, keys, values, error, message):
        with pytest.raises(error, match=f"^{message}"):
            attnspec.tensor_attention_general(q, keys, values)

    def test_general_mask(self):
        with pytest.raises(ValueError, match=r"^mask: expected a shape that broadcasts to \(..., n, m1, m2\) with m1 = 5 as in keys\[0\]"):
            attnspec.tensor_attention_general(q, [k1, k2], [v1, v2], mask=np.ones((4, 4, 6), bool))

    def test_general_takes_lists_of_numbers(self):
        assert attnspec.tensor_attention_general([[1]], ([[1]], [[2]]), ([[3]], [[4]])).item() == 12.0


class TestHugeAndInfinite:
    HIDDEN = np.array([[[False], [True]]])

    @pytest.mark.parametrize("huge", [1e200, np.inf])
    def test_behind_the_mask(self, huge):
        arrays = [[1e200]], [[huge], [0.0]], [[1e200]], [[huge], [3.0]], [[2.0]]
        for function in (attnspec.tensor_attention, attnspec.two_simplicial_attention, attnspec.tensor_attention_blocked):
            np.testing.assert_array_equal(function(*arrays, mask=self.HIDDEN), [[6.0]])
        got = attnspec.tensor_attention_backward(*arrays, [[1.0]], mask=self.HIDDEN)
        np.testing.assert_array_equal(got.dv1, [[0.0], [2.0]])
        np.testing.assert_array_equal(got.dv2, [[3.0]])
        np.testing.assert_array_equal(got.dk1, [[0.0], [0.0]])

    @pytest.mark.parametrize("do", [0.0, 1.0])
    def test_a_visible_infinite_value_spoils_the_gradients_quietly(self, do):
        got = attnspec.tensor_attention_backward([[1.0]], [[0.0], [0.0]], [[1.0]], [[np.inf], [1.0]], [[1.0]], [[do]])
        np.testing.assert_array_equal(got.dq, [[np.nan]])
        np.testing.assert_array_equal(got.dv1, [[do / 2], [do / 2]])
