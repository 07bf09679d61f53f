"""The graph of softmax-one attention, whose normaliser holds a 1 more."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, mapped, traced

from attnspec import mlx_backend, reference

RNG = np.random.default_rng(0)
NAME = "softmax_one_attention"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(7, 5, 4, 3), (65, 70, 16, 9)], ids=str)
def test_options(sizes, dtype):
    n, m, d, e = sizes
    arrays = {"q": RNG.standard_normal((4, n, d)), "k": RNG.standard_normal((2, m, d)), "v": RNG.standard_normal((2, m, e))}
    for options in ({}, {"causal": True}, {"causal": "top-left"}, {"window": (3, 2)}, {"softcap": 1.5}, {"scale": -0.4}):
        assert_agrees(NAME, arrays, {**options, "enable_gqa": True}, dtype)
    for extra in ({"bias": RNG.standard_normal((4, n, m)) - 30}, {"mask": RNG.random((n, m)) < 0.5}, {"mask": np.zeros((n, 1), bool)}):
        assert_agrees(NAME, {**arrays, **extra}, {"enable_gqa": True}, dtype)


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    arrays = {"q": RNG.standard_normal((3, 7, 4)), "k": RNG.standard_normal((3, 5, 4)), "v": RNG.standard_normal((3, 5, 3))}
    assert_agrees(NAME, {**arrays, "mask": RNG.random((3, 7, 5)) < 0.7}, {"softcap": 2.0}, through=through)


def test_gradients_are_those_of_a_sink_at_0():
    arrays = {name: RNG.standard_normal(shape) for name, shape in (("q", (7, 4)), ("k", (5, 4)), ("v", (5, 3)), ("do", (7, 3)))}
    q, k, v, do = (mx.array(x, mx.float32) for x in arrays.values())
    got = mx.grad(lambda q, k, v: mx.sum(mlx_backend.softmax_one_attention(q, k, v, causal=True) * do), argnums=(0, 1, 2))(q, k, v)
    want = reference.scaled_dot_product_attention_backward(**arrays, causal=True, sink=0.0)
    for ours, theirs in zip(got, want, strict=False):
        np.testing.assert_allclose(np.array(ours), theirs, rtol=1e-5, atol=1e-6)


def test_a_row_that_sees_nothing_has_lse_0():
    arrays = {"q": np.full((3, 2), np.nan), "k": np.ones((4, 2)), "v": np.full((4, 2), np.inf), "mask": np.zeros((3, 4), bool)}
    result = mlx_backend.softmax_one_attention(**arrays, return_weights=True, return_lse=True)
    for x in result:
        assert not np.array(x).any()
    empty = {"q": np.ones((3, 2)), "k": np.ones((0, 2)), "v": np.ones((0, 2))}
    assert_agrees(NAME, empty)
