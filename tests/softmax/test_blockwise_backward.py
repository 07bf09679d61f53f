import functools
import tracemalloc

import numpy as np
import pytest

import attnspec
from attnspec.golden import golden_cases

from derivatives import assert_gradients

RNG = np.random.default_rng(0)
q, k, v, do = (RNG.standard_normal((2, 3, size, width)) for size, width in ((5, 4), (7, 4), (7, 2), (5, 2)))
MASK = RNG.random((5, 7)) < 0.5
MASK[1], MASK[2, :4] = False, False
OPTIONS = [
    {}, {"scale": 0.7}, {"softcap": 0.8}, {"bias": RNG.standard_normal((3, 5, 7))}, {"mask": MASK}, {"mask": MASK[:1]}, {"causal": True},
    {"causal": "top-left"}, {"window": (1, 0)}, {"sink": RNG.standard_normal(3)}, {"sink": RNG.standard_normal(3), "mask": MASK},
    {"bias": np.where(MASK, 0.0, -np.inf)}, {"sink": np.full(3, -np.inf), "mask": MASK},
    {"scale": 1.5, "softcap": 2.0, "bias": RNG.standard_normal((2, 1, 5, 1)), "mask": RNG.random((2, 3, 5, 7)) < 0.7, "causal": True,
     "window": (3, 1), "sink": RNG.standard_normal(3)},
]


def assert_same(got, want):
    for name in want._fields:
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None) == (other is None), name
        if other is not None:
            assert one.shape == other.shape, name
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("query_block, key_block", [(1, 1), (2, 3), (5, 7), (128, 128), (3, 2)])
def test_it_is_the_backward_pass_of_scaled_dot_product_attention(options, query_block, key_block):
    assert_same(attnspec.blockwise_attention_backward(q, k, v, do, query_block=query_block, key_block=key_block, **options),
                attnspec.scaled_dot_product_attention_backward(q, k, v, do, **options))


def test_it_reproduces_the_golden_vectors_of_the_other():
    cases = golden_cases("scaled_dot_product_attention_backward")
    assert cases
    for case in cases:
        error, tol = case.outcome(functools.partial(attnspec.blockwise_attention_backward, query_block=3, key_block=2))
        assert error <= tol, case.name


def test_by_complex_step():
    arrays = {"q": RNG.standard_normal((4, 3, 2)), "k": RNG.standard_normal((2, 5, 2)), "v": RNG.standard_normal((1, 5, 4)),
              "bias": RNG.standard_normal((4, 1, 5)), "sink": RNG.standard_normal(4)}
    options = {"enable_gqa": True, "softcap": 1.0, "causal": True}
    cotangent = RNG.standard_normal((4, 3, 4))
    gradients = attnspec.blockwise_attention_backward(**arrays, do=cotangent, query_block=2, key_block=2, **options)
    assert_gradients(lambda **a: attnspec.scaled_dot_product_attention(**a, **options),
                     {name: getattr(gradients, f"d{name}") for name in arrays}, arrays, cotangent)


@pytest.mark.parametrize("shape", [(), (7,), (1,), (5, 1), (1, 7), (5, 7), (3, 1, 1), (2, 1, 5, 7)], ids=str)
def test_of_a_broadcast_bias(shape):
    bias = RNG.standard_normal(shape)
    assert_same(attnspec.blockwise_attention_backward(q, k, v, do, bias=bias, query_block=2, key_block=3),
                attnspec.scaled_dot_product_attention_backward(q, k, v, do, bias=bias))


@pytest.mark.parametrize("lead", [{"q": (2,)}, {"k": (2,)}, {"v": (2,)}, {"do": (2,)}, {"bias": (2,)}, {"q": (2, 1), "k": (3,)},
                                  {"v": (2,), "do": (1,)}], ids=str)
def test_of_broadcast_axes(lead):
    shapes = {"q": (5, 3), "k": (7, 3), "v": (7, 2), "do": (5, 2), "bias": (5, 7)}
    arrays = {name: RNG.standard_normal(lead.get(name, ()) + shape) for name, shape in shapes.items()}
    assert_same(attnspec.blockwise_attention_backward(**arrays, query_block=2, key_block=3),
                attnspec.scaled_dot_product_attention_backward(**arrays))


@pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(n, m):
    arrays = np.ones((2, n, 4)), np.ones((2, m, 4)), np.ones((2, m, 5))
    got = attnspec.blockwise_attention_backward(*arrays, np.ones((2, n, 5)), bias=np.ones((n, m)), sink=[1.0, 2.0])
    for gradient, like in zip(got, (*arrays, np.ones((n, m)), np.ones(2)), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(like.shape))


def test_by_hand():
    """Three keys of weight 1/3 and values 3, 0, -3: o = 0, dS = 1, 0, -1."""
    got = attnspec.blockwise_attention_backward([[2.0]], [[1.0], [1.0], [1.0]], [[3.0], [0.0], [-3.0]], [[1.0]], key_block=2, bias=0.0)
    np.testing.assert_allclose(got.dq, [[0.0]], atol=1e-15)
    np.testing.assert_allclose(got.dk, [[2.0], [0.0], [-2.0]], rtol=1e-15)
    np.testing.assert_allclose(got.dv, np.full((3, 1), 1 / 3), rtol=1e-15)
    np.testing.assert_allclose(got.dbias, 0.0, atol=1e-15)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"softcap": 0.8}, {"sink": np.zeros(3)}], ids=lambda options: " ".join(options) or "plain")
def test_what_stands_behind_a_mask_stays_there(bad, options):
    mask = np.ones((5, 7), bool)
    mask[1], mask[:, 2] = False, False
    spoilt_q, spoilt_k, spoilt_v = q.copy(), k.copy(), v.copy()
    spoilt_q[..., 1, :], spoilt_k[..., 2, :], spoilt_v[..., 2, :] = bad, bad, bad
    assert_same(attnspec.blockwise_attention_backward(spoilt_q, spoilt_k, spoilt_v, do, mask=mask, query_block=2, key_block=2, **options),
                attnspec.scaled_dot_product_attention_backward(q, k, v, do, mask=mask, **options))


def test_huge_logits():
    got = attnspec.blockwise_attention_backward([[1.0]], [[-1e4], [1e4], [1e4]], [[2.0], [4.0], [8.0]], [[1.0]], key_block=1)
    np.testing.assert_allclose(got.dv, [[0.0], [0.5], [0.5]], rtol=1e-11)
    np.testing.assert_allclose(got.dk, [[0.0], [-1.0], [1.0]], rtol=1e-11)


def test_nothing_larger_than_a_block_is_held():
    n = 1500
    arrays = RNG.standard_normal((n, 2)), RNG.standard_normal((n, 2)), RNG.standard_normal((n, 2)), RNG.standard_normal((n, 2))
    tracemalloc.start()
    try:
        attnspec.blockwise_attention_backward(*arrays, query_block=50, key_block=50, causal=True, window=(700, 0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < n * n / 2                                            # bytes: even one boolean for each pair would be twice as much


@pytest.mark.parametrize("options, message", [
    ({"query_block": 0}, "query_block: expected a whole number >= 1, got 0"),
    ({"key_block": 1.5}, "key_block: expected a whole number >= 1, got 1.5"),
    ({"causal": "left"}, "causal: expected False or True or 'bottom-right' or 'top-left', got 'left'"),
    ({"softcap": -1.0}, "softcap: expected a number >= 0, got -1.0"),
], ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        attnspec.blockwise_attention_backward(q, k, v, do, **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_cotangent_of_a_query_that_sees_nothing_never_arrives(bad):
    arrays = np.ones((1, 2, 1)), np.zeros((1, 3, 1)), np.array([[[1.0], [2.0], [6.0]]])
    got = attnspec.blockwise_attention_backward(*arrays, np.array([[[bad], [1.0]]]), mask=[[False], [True]], sink=[0.0])
    np.testing.assert_allclose(got.dsink, [-9 / 16], rtol=1e-15)       # three keys and the sink at 1/4: out = 9/4
    np.testing.assert_allclose(got.dv, np.full((1, 3, 1), 1 / 4), rtol=1e-15)
    np.testing.assert_array_equal(got.dq, np.zeros((1, 2, 1)))


@pytest.mark.parametrize("do, dv", [(0.0, 0.0), (1.0, 0.5)])
def test_a_visible_infinite_value_spoils_the_gradients_quietly(do, dv):
    got = attnspec.blockwise_attention_backward([[1.0]], [[0.0], [0.0]], [[np.inf], [1.0]], [[do]])
    np.testing.assert_array_equal(got.dq, [[np.nan]])
    np.testing.assert_array_equal(got.dv, [[dv], [dv]])
    got = attnspec.blockwise_attention_backward([[1.0]], [[0.0], [0.0]], [[np.inf, -np.inf], [1.0, 1.0]], [[1.0, 1.0]])
    np.testing.assert_array_equal(got.dk, [[np.nan], [np.nan]])


@pytest.mark.parametrize("options", [{}, {"bias": np.array([[-np.inf, 0.0]])}], ids=lambda options: " ".join(options) or "plain")
def test_huge_and_infinite_entries_behind_the_mask(options):
    for huge in (1e200, np.inf):
        arrays = [[1e200]], [[huge], [0.0]], [[1e200], [3.0]], [[1e200]]
        got = attnspec.blockwise_attention_backward(*arrays, mask=[[False, True]], **options)
        np.testing.assert_array_equal(got.dv, [[0.0], [1e200]])
        np.testing.assert_array_equal(got.dq, [[0.0]])
