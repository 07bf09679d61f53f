import functools
import itertools

import numpy as np
import pytest

import attnspec
from attnspec.golden import golden_cases
from attnspec.reference.inputs import visible_keys
from attnspec.reference.softmax.online import block_of, chunks, visible_block

from derivatives import central_difference, complex_step

RNG = np.random.default_rng(0)
q, k, v = (RNG.standard_normal((2, 3, size, width)) for size, width in ((5, 4), (7, 4), (7, 2)))
MASK = RNG.random((5, 7)) < 0.5
MASK[1], MASK[2, :4] = False, False
OPTIONS = [
    {}, {"scale": 0.7}, {"softcap": 0.8}, {"bias": RNG.standard_normal((3, 5, 7))}, {"bias": RNG.standard_normal(7)},
    {"bias": RNG.standard_normal((5, 1))}, {"bias": np.where(MASK, 0.0, -np.inf)}, {"mask": MASK}, {"mask": MASK[:1]}, {"causal": True},
    {"causal": "top-left"}, {"window": (1, 0)}, {"causal": True, "window": (2, 1)}, {"sink": RNG.standard_normal(3)},
    {"sink": np.full(3, -np.inf), "mask": MASK}, {"sink": 0.5},
    {"scale": 1.5, "softcap": 2.0, "bias": RNG.standard_normal((2, 1, 5, 1)), "mask": RNG.random((2, 3, 5, 7)) < 0.7, "causal": True,
     "window": (3, 1), "sink": RNG.standard_normal(3)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("query_chunk, key_chunk", [(1, 1), (2, 3), (5, 7), (1024, 4096), (3, 1)])
def test_it_is_scaled_dot_product_attention(options, query_chunk, key_chunk):
    got = attnspec.online_softmax_attention(q, k, v, query_chunk=query_chunk, key_chunk=key_chunk, **options, return_lse=True)
    want = attnspec.scaled_dot_product_attention(q, k, v, **options, return_lse=True)
    np.testing.assert_allclose(got.out, want.out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-13, atol=1e-14)
    assert got.weights is None
    assert got.out.shape == want.out.shape
    assert got.lse.shape == want.lse.shape


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "attention_with_sink"])
def test_it_reproduces_the_golden_vectors_of_other_formulas(name):
    cases = golden_cases(name)
    assert cases
    for case in cases:
        error, tol = case.outcome(functools.partial(attnspec.online_softmax_attention, query_chunk=3, key_chunk=2))
        assert error <= tol, case.name


@pytest.mark.parametrize("lead", [{"q": (2,)}, {"k": (2,)}, {"v": (2,)}, {"q": (2, 1), "k": (3,)}, {"v": (2,), "mask": (3, 1)}], ids=str)
def test_leading_axes_broadcast(lead):
    shapes = {"q": (5, 3), "k": (7, 3), "v": (7, 2)}
    arrays = {name: RNG.standard_normal(lead.get(name, ()) + shape) for name, shape in shapes.items()}
    mask = RNG.random(lead.get("mask", ()) + (5, 7)) < 0.5
    want = attnspec.scaled_dot_product_attention(**arrays, mask=mask, return_lse=True)
    got = attnspec.online_softmax_attention(**arrays, mask=mask, query_chunk=2, key_chunk=2, return_lse=True)
    assert got.out.shape == want.out.shape
    assert got.lse.shape == want.lse.shape
    np.testing.assert_allclose(got.out, want.out, rtol=1e-13, atol=1e-14)


def test_grouped_heads():
    arrays = RNG.standard_normal((4, 5, 2)), RNG.standard_normal((2, 7, 2)), RNG.standard_normal((1, 7, 3))
    np.testing.assert_allclose(attnspec.online_softmax_attention(*arrays, key_chunk=2, enable_gqa=True),
                               attnspec.scaled_dot_product_attention(*arrays, enable_gqa=True), rtol=1e-13, atol=1e-14)


class TestSpecialValues:
    def test_by_hand(self):
        """Weights 1, 3, 4 of 8 in chunks of 2: the maximum moves in the second."""
        arrays = [[1.0]], np.log([[1.0], [3.0], [4.0]]), [[8.0], [0.0], [16.0]]
        got = attnspec.online_softmax_attention(*arrays, key_chunk=2, return_lse=True)
        np.testing.assert_allclose(got.out, [[9.0]], rtol=1e-15)
        np.testing.assert_allclose(got.lse, [np.log(8)], rtol=1e-15)

    @pytest.mark.parametrize("key_chunk", [1, 2, 3])
    def test_huge_logits_in_rising_and_falling_order(self, key_chunk):
        got = attnspec.online_softmax_attention([[1.0], [-1.0]], [[-1e4], [0.0], [1e4]], [[2.0], [4.0], [8.0]], key_chunk=key_chunk)
        np.testing.assert_array_equal(got, [[8.0], [2.0]])

    @pytest.mark.parametrize("key_chunk", [1, 2, 3])
    def test_nothing_seen_at_first_or_at_all(self, key_chunk):
        mask = np.array([[False, False, True], [False, False, False], [True, False, False]])
        got = attnspec.online_softmax_attention(np.zeros((3, 1)), np.zeros((3, 1)), [[2.0], [4.0], [8.0]], mask=mask, key_chunk=key_chunk,
                                                return_lse=True)
        np.testing.assert_array_equal(got.out, [[8.0], [0.0], [2.0]])
        np.testing.assert_array_equal(got.lse, [0.0, -np.inf, 0.0])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("key_chunk", [1, 2, 3])
    def test_what_stands_behind_a_mask_stays_there(self, bad, key_chunk):
        spoilt = np.array([[1.0], [bad], [2.0]])
        mask = np.array([[True, False, True], [True, True, True], [False, False, True]])
        arrays = np.ones((3, 1)), spoilt, spoilt
        got = attnspec.online_softmax_attention(*arrays, mask=mask, key_chunk=key_chunk, query_chunk=2)
        np.testing.assert_allclose(got, attnspec.scaled_dot_product_attention(*arrays, mask=mask), rtol=1e-15)
        assert not np.isfinite(got[1, 0])
        assert np.isfinite(got[[0, 2], 0]).all()

    def test_more_queries_than_keys(self):
        got = attnspec.online_softmax_attention(np.zeros((3, 1)), np.zeros((2, 1)), [[2.0], [4.0]], causal=True, query_chunk=2, key_chunk=1)
        np.testing.assert_array_equal(got, [[0.0], [2.0], [3.0]])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    @pytest.mark.parametrize("sink", [None, [1.0, 2.0]])
    def test_no_queries_or_no_keys(self, n, m, sink):
        arrays = np.ones((2, n, 4)), np.ones((2, m, 4)), np.ones((2, m, 5))
        got = attnspec.online_softmax_attention(*arrays, sink=sink, return_lse=True)
        want = attnspec.scaled_dot_product_attention(*arrays, sink=sink, return_lse=True)
        np.testing.assert_array_equal(got.out, np.zeros((2, n, 5)))
        np.testing.assert_array_equal(got.lse, want.lse)
        assert got.lse.shape == (2, n)


def test_last_row_is_the_decoding_step():
    full = attnspec.online_softmax_attention(q, k, v, causal=True, query_chunk=2, key_chunk=3)
    step = attnspec.online_softmax_attention(q[..., -1:, :], k, v, causal=True, query_chunk=2, key_chunk=3)
    np.testing.assert_allclose(step, full[..., -1:, :], rtol=1e-13)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_complex_step_derivatives(options, name):
    arrays = {"q": q, "k": k, "v": v}
    direction = RNG.standard_normal(arrays[name].shape)
    got = complex_step(functools.partial(attnspec.online_softmax_attention, query_chunk=2, key_chunk=3, **options), arrays, name, direction)
    want = complex_step(functools.partial(attnspec.scaled_dot_product_attention, **options), arrays, name, direction)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options, message", [
    ({"query_chunk": 0}, "query_chunk: expected a whole number >= 1, got 0"),
    ({"key_chunk": 2.0}, "key_chunk: expected a whole number >= 1, got 2.0"),
    ({"causal": "left"}, "causal: expected False or True or 'bottom-right' or 'top-left', got 'left'"),
    ({"causal": 1}, "causal: expected False or True or 'bottom-right' or 'top-left', got 1"),
    ({"causal": None}, "causal: expected False or True or 'bottom-right' or 'top-left', got None"),
    ({"window": (1, 2, 3)}, r"window: expected a pair \(left, right\), got \(1, 2, 3\)"),
    ({"softcap": -1}, "softcap: expected a number >= 0, got -1"),
], ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        attnspec.online_softmax_attention(q, k, v, **options)


class TestBlocks:
    def test_chunks_cover_everything_once(self):
        assert chunks(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
        assert chunks(6, 3) == [slice(0, 3), slice(3, 6)]
        assert chunks(2, 5) == [slice(0, 2)]
        assert chunks(0, 5) == [slice(0, 0)]

    @pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 1), (1, 5), (4, 5), (2, 4, 5), (2, 1, 1)], ids=str)
    def test_a_block_of_what_broadcasts(self, shape):
        x = RNG.standard_normal(shape)
        want = np.broadcast_to(x, (*shape[:-2], 4, 5))[..., 1:3, 2:5]
        np.testing.assert_array_equal(block_of(x, slice(1, 3), slice(2, 5), 4, 5), want)

    @pytest.mark.parametrize("n, m", [(4, 6), (6, 4), (5, 5), (1, 3), (3, 0)])
    def test_a_block_of_the_visible_keys(self, n, m):
        mask = RNG.random((2, n, m)) < 0.7
        sides = (None, -1, 0, 1, 3)
        for causal, window in itertools.product((False, True, "bottom-right", "top-left"), (None, *itertools.product(sides, sides))):
            whole = np.broadcast_to(visible_keys(n, m, mask, causal, window), (2, n, m))
            for i, j in itertools.product(chunks(n, 2), chunks(m, 3)):
                np.testing.assert_array_equal(visible_block(i, j, n, m, mask, causal, window), whole[..., i, j])


class TestPartials:
    def test_by_hand(self):
        m, l, o = attnspec.attention_partial([[1.0], [0.0]], np.log([[2.0], [4.0]]), [[3.0], [1.0]], scale=1.0)
        np.testing.assert_allclose(m, [np.log(4), 0.0], rtol=1e-15)
        np.testing.assert_allclose(l, [1.5, 2.0], rtol=1e-15)
        np.testing.assert_allclose(o, [[2.5], [4.0]], rtol=1e-15)

    @pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"softcap": 0.8}, {"bias": RNG.standard_normal((3, 5, 7))}, {"mask": MASK},
                                         {"mask": MASK[0]}, {"bias": np.where(MASK, 0.0, -np.inf)}],
                             ids=lambda options: " ".join(options) or "plain")
    def test_options(self, options):
        """Against exp(s) built from weights and log-sum-exp."""
        full = attnspec.scaled_dot_product_attention(q, k, v, **options, return_weights=True, return_lse=True)
        terms = full.weights * np.exp(full.lse)[..., None]
        m, l, o = attnspec.attention_partial(q, k, v, **options)
        np.testing.assert_allclose(np.exp(m), terms.max(-1), rtol=1e-13)
        np.testing.assert_allclose(l * np.exp(m), terms.sum(-1), rtol=1e-13)
        np.testing.assert_allclose(o * np.exp(m)[..., None], terms @ v, rtol=1e-12, atol=1e-13)

    def test_grouped_heads(self):
        got = attnspec.attention_partial(np.ones((4, 1, 1)), [[[1.0]], [[2.0]]], [[[3.0]], [[4.0]]], enable_gqa=True)
        np.testing.assert_array_equal(got.m[:, 0], [1.0, 1.0, 2.0, 2.0])
        np.testing.assert_array_equal(got.o[:, 0, 0], [3.0, 3.0, 4.0, 4.0])

    @pytest.mark.parametrize("m", [0, 2])
    def test_of_no_keys_and_of_unseen_ones(self, m):
        got = attnspec.attention_partial(np.ones((3, 1)), np.full((m, 1), np.nan), np.full((m, 2), np.nan), mask=np.zeros(m, bool))
        np.testing.assert_array_equal(got.m, np.full(3, -np.inf))
        np.testing.assert_array_equal(got.l, np.zeros(3))
        np.testing.assert_array_equal(got.o, np.zeros((3, 2)))

    def test_merge_by_hand(self):
        got = attnspec.merge_attention_partials([0.0, 5.0], [1.0, 1.0], [[6.0], [1.0]], [np.log(2.0), -np.inf], [1.0, 0.0], [[1.0], [0.0]])
        np.testing.assert_allclose(got.m, [np.log(2), 5.0], rtol=1e-15)
        np.testing.assert_allclose(got.l, [1.5, 1.0], rtol=1e-15)
        np.testing.assert_allclose(got.o, [[4.0], [1.0]], rtol=1e-15)

    def test_merge_of_maxima_far_apart(self):
        got = attnspec.merge_attention_partials([1e4, -1e4], [2.0, 2.0], [[1.0], [1.0]], [-1e4, 1e4], [3.0, 3.0], [[4.0], [4.0]])
        np.testing.assert_array_equal(got.m, [1e4, 1e4])
        np.testing.assert_array_equal(got.l, [2.0, 3.0])
        np.testing.assert_array_equal(got.o, [[1.0], [4.0]])

    def test_not_a_number_survives_merging_in_its_row_only(self):
        bad = attnspec.attention_partial(np.ones((2, 1)), [[np.nan]], [[1.0]], mask=[[True], [False]])
        good = attnspec.attention_partial(np.ones((2, 1)), [[0.0]], [[1.0]])
        for a, b in ((bad, good), (good, bad)):
            out, _, lse = attnspec.finish_attention_partial(*attnspec.merge_attention_partials(*a, *b))
            np.testing.assert_array_equal(out, [[np.nan], [1.0]])
            np.testing.assert_array_equal(lse, [np.nan, 0.0])

    def test_all_orders_of_merging_agree(self):
        parts = [attnspec.attention_partial(q, k[..., j, :], v[..., j, :], mask=MASK[:, j]) for j in chunks(7, 2)]
        want = attnspec.scaled_dot_product_attention(q, k, v, mask=MASK, return_lse=True)
        for order in itertools.permutations(parts):
            got = attnspec.finish_attention_partial(*functools.reduce(lambda a, b: attnspec.merge_attention_partials(*a, *b), order))
            np.testing.assert_allclose(got.out, want.out, rtol=1e-13, atol=1e-14)
            np.testing.assert_allclose(got.lse, want.lse, rtol=1e-13, atol=1e-14)

    def test_finish_by_hand(self):
        out, weights, lse = attnspec.finish_attention_partial([1.0, -np.inf], [4.0, 0.0], [[6.0, 2.0], [0.0, 0.0]])
        np.testing.assert_array_equal(out, [[1.5, 0.5], [0.0, 0.0]])
        np.testing.assert_allclose(lse, [1 + np.log(4), -np.inf], rtol=1e-15)
        assert weights is None

    def test_derivatives_of_the_log_sum_exp(self):
        arrays = {"m": np.array([0.3]), "l": np.array([1.7]), "o": np.ones((1, 2))}
        for name, want in (("m", 1.0), ("l", 1 / 1.7)):
            got = complex_step(lambda **a: attnspec.finish_attention_partial(**a).lse, arrays, name, np.ones(1))
            np.testing.assert_allclose(got, [want], rtol=1e-15)

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_derivatives_of_a_partial(self, name):
        arrays = {"q": q, "k": k, "v": v}
        direction = RNG.standard_normal(arrays[name].shape)
        seeing = [0, 2, 3, 4]                                          # m is -inf for query 1
        for index in ((0, ..., seeing), (1, ..., seeing), (2, ..., seeing, slice(None))):
            def function(index=index, **a):
                return attnspec.attention_partial(**a, mask=MASK, softcap=3.0)[index[0]][index[1:]]

            exact, rough = (derivative(function, arrays, name, direction) for derivative in (complex_step, central_difference))
            np.testing.assert_allclose(exact, rough, rtol=1e-5, atol=1e-7)

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match=r"^l2: expected shape \(..., n\) with n = 2 as in m1, got \(3,\)$"):
            attnspec.merge_attention_partials([0.0, 0.0], [1.0, 1.0], np.ones((2, 1)), [0.0, 0.0], np.ones(3), np.ones((2, 1)))
        with pytest.raises(TypeError, match=r"^causal: attention_partial has no such parameter"):
            attnspec.attention_partial(q, k, v, causal=True)


class TestInfiniteValues:
    """A visible inf of weight 0 makes its output NaN, as in scaled dot-product attention, and quietly."""

    @pytest.mark.parametrize("key_chunk", [1, 2, 3])
    @pytest.mark.parametrize("values", [[np.inf, 1.0, 1.0], [1.0, 1.0, -np.inf]])
    def test_of_weight_zero(self, key_chunk, values):
        arrays = [[1.0]], [[0.0], [1000.0], [0.0]], np.reshape(values, (3, 1))
        for got in (attnspec.online_softmax_attention(*arrays, key_chunk=key_chunk), attnspec.ring_attention(*arrays, hosts=key_chunk),
                    attnspec.scaled_dot_product_attention(*arrays)):
            np.testing.assert_array_equal(got, [[np.nan]])

    def test_of_both_signs(self):
        arrays = [[1.0]], [[0.0], [0.0]], [[np.inf], [-np.inf]]
        np.testing.assert_array_equal(attnspec.online_softmax_attention(*arrays, key_chunk=1), [[np.nan]])

    def test_in_partials(self):
        merged = attnspec.merge_attention_partials([0.0], [1.0], [[np.inf]], [1000.0], [1.0], [[1.0]])
        np.testing.assert_array_equal(merged.o, [[np.nan]])
        np.testing.assert_array_equal([merged.m, merged.l], [[1000.0], [1.0]])
        np.testing.assert_array_equal(attnspec.finish_attention_partial([0.0], [np.inf], [[np.inf]]).out, [[np.nan]])
