import numpy as np
import pytest

import attnspec

from derivatives import central_difference, complex_step

RNG = np.random.default_rng(0)
SHAPES = {"x": (2, 4, 6), "context": (2, 5, 6), "w_q": (3, 6, 2), "w_k": (6, 2), "w_v": (6, 4), "w_o": (3, 6, 4)}
ARRAYS = {name: RNG.standard_normal(shape) for name, shape in SHAPES.items()}


def paper(x, context, w_q, w_k, w_v, w_o, logits_mask):
    """The einsums of arXiv:1911.02150, section 3, with its additive mask [b, h, n, m]."""
    Q, K, V = np.einsum("bnd,hdk->bhnk", x, w_q), np.einsum("bmd,dk->bmk", context, w_k), np.einsum("bmd,dv->bmv", context, w_v)
    logits = np.einsum("bhnk,bmk->bhnm", Q, K) + logits_mask
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhnv,hdv->bnd", np.einsum("bhnm,bmv->bhnv", weights, V), w_o), weights


@pytest.mark.parametrize("shape", [(4, 5), (5,), (3, 4, 5), (2, 1, 4, 5), (2, 3, 4, 5), (3, 1, 5)], ids=str)
def test_scale_one_is_the_paper(shape):
    mask = RNG.random(shape) < 0.7
    mask[..., 0] = True
    out, weights = paper(**ARRAYS, logits_mask=np.where(mask, 0.0, -np.inf))
    got = attnspec.multi_query_attention(**ARRAYS, scale=1.0, mask=mask, return_weights=True)
    np.testing.assert_allclose(got.out, out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(got.weights, weights, rtol=1e-12, atol=1e-15)
    assert got.lse is None


def test_default_scale_is_of_the_width_of_a_key():
    np.testing.assert_array_equal(attnspec.multi_query_attention(**ARRAYS), attnspec.multi_query_attention(**ARRAYS, scale=1 / np.sqrt(2)))


class TestSpecialValues:
    ONE = np.ones((1, 1))

    def by(self, x, context, **options):
        return attnspec.multi_query_attention(x, context, self.ONE[None], self.ONE, self.ONE, self.ONE[None], **options)

    def test_by_hand(self):
        # Two heads with queries 1 and -1, keys log 1, log 3 and values 1, 2, put out by 10 and 1.
        x, context = [[1.0]], [[0.0, 1.0], [np.log(3.0), 2.0]]
        got = attnspec.multi_query_attention(np.pad(x, ((0, 0), (0, 1))), context, [[[1.0], [0.0]], [[-1.0], [0.0]]], [[1.0], [0.0]],
                                             [[0.0], [1.0]], [[[10.0], [0.0]], [[1.0], [1.0]]], return_weights=True)
        np.testing.assert_allclose(got.weights, [[[1 / 4, 3 / 4]], [[3 / 4, 1 / 4]]], rtol=1e-15)
        np.testing.assert_allclose(got.out, [[17.5 + 1.25, 1.25]], rtol=1e-15)

    def test_query_that_sees_nothing_gets_zeros(self):
        np.testing.assert_array_equal(self.by([[1.0], [1.0]], [[3.0]], mask=[[True], [False]]), [[3.0], [0.0]])

    def test_one_key(self):
        np.testing.assert_array_equal(self.by([[1.0], [1e4]], [[3.0]]), [[3.0], [3.0]])

    def test_more_queries_than_keys(self):
        arrays = np.zeros((3, 1)), [[2.0], [4.0]]
        np.testing.assert_array_equal(self.by(*arrays, causal=True), [[0.0], [2.0], [3.0]])
        np.testing.assert_array_equal(self.by(*arrays, causal="top-left"), [[2.0], [3.0], [3.0]])

    def test_huge_logits(self):
        np.testing.assert_array_equal(self.by([[1e4]], [[1e4], [-1e4]]), [[1e4]])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_stands_behind_a_mask_stays_there(self, bad):
        got = attnspec.multi_query_attention(np.zeros((2, 2)), [[1.0, 3.0], [bad, bad]], np.ones((1, 2, 1)), [[1.0], [-1.0]],
                                             [[0.0], [1.0]], np.ones((1, 2, 1)), mask=np.array([[True, False], [True, True]]))
        np.testing.assert_array_equal(got[0], [3.0, 3.0])
        assert not np.isfinite(got[1]).any()

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, n, m):
        np.testing.assert_array_equal(self.by(np.ones((n, 1)), np.ones((m, 1))), np.zeros((n, 1)))


def test_context_and_input_broadcast():
    arrays = {**ARRAYS, "x": ARRAYS["x"][0]}
    got = attnspec.multi_query_attention(**arrays)
    for b in range(2):
        want = attnspec.multi_query_attention(**{**arrays, "context": ARRAYS["context"][b]})
        np.testing.assert_allclose(got[b], want, rtol=1e-13, atol=1e-14)


def test_decoding_with_a_cache():
    """One step at a time with keys and values appended, as in the paper's incremental code."""
    x, weights = ARRAYS["x"][0], {name: ARRAYS[name] for name in ("w_q", "w_k", "w_v", "w_o")}
    full = attnspec.multi_query_attention(x, x, **weights, causal=True)
    K, V = np.zeros((0, 2)), np.zeros((0, 4))
    for t, x_t in enumerate(x):
        K, V = np.vstack([K, x_t @ weights["w_k"]]), np.vstack([V, x_t @ weights["w_v"]])
        y = np.zeros(6)
        for w_q, w_o in zip(weights["w_q"], weights["w_o"], strict=True):
            s = K @ (x_t @ w_q) / np.sqrt(2)
            p = np.exp(s - s.max())
            y += w_o @ (p / p.sum() @ V)
        np.testing.assert_allclose(full[t], y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ARRAYS)
def test_complex_step_with_a_mask(name):
    mask = RNG.random((3, 4, 5)) < 0.6
    direction = RNG.standard_normal(ARRAYS[name].shape)

    def function(**arrays):
        return attnspec.multi_query_attention(**arrays, mask=mask, causal=True)

    np.testing.assert_allclose(complex_step(function, ARRAYS, name, direction), central_difference(function, ARRAYS, name, direction),
                               rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("changed, message", [
    ({"w_k": np.ones((6, 3))}, r"w_k: expected shape \(c, d\) with d = 2 as in w_q, got \(6, 3\)"),
    ({"w_o": np.ones((2, 6, 4))}, r"w_o: expected shape \(h, c, e\) with h = 3 as in w_q, got \(2, 6, 4\)"),
    ({"context": np.ones((2, 5, 7))}, r"context: expected shape \(..., m, c\) with c = 6 as in x, got \(2, 5, 7\)"),
    ({"mask": np.ones((2, 4, 5), bool)},
     r"mask: expected a shape that broadcasts to \(..., h, n, m\) with h = 3 as in w_q, got \(2, 4, 5\)"),
    ({"causal": "left"}, r"causal: expected False or True or 'bottom-right' or 'top-left', got 'left'"),
    ({"scale": None, "causal": 2}, r"causal: expected .*, got 2"),
], ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_what_does_not_fit_is_refused(changed, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        attnspec.multi_query_attention(**{**ARRAYS, **changed})


def test_huge_and_infinite_entries_where_nobody_looks():
    one = np.ones((1, 2, 1))
    got = attnspec.multi_query_attention([[1.0, 1.0], [np.inf, -np.inf]], [[1e200, -1e200], [1.0, 2.0]], one, [[1e200], [0.0]],
                                         [[1e200], [1.0]], one, mask=[[False, True], [False, False]])
    np.testing.assert_array_equal(got, [[1e200, 1e200], [0.0, 0.0]])
