"""The graph of attention with a sink."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, traced

from attnspec import mlx_backend, reference

RNG = np.random.default_rng(0)
NAME = "attention_with_sink"


def drawn(n, m, d, e, lead=()):
    shapes = {"q": (4, n, d), "k": (2, m, d), "v": (2, m, e), "sink": (4,)}
    return {name: RNG.standard_normal(lead + shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(7, 5, 4, 3), (65, 70, 16, 9)], ids=str)
def test_options(sizes, dtype):
    n, m, *_ = sizes
    arrays = drawn(*sizes)
    for options in ({}, {"causal": True}, {"causal": "top-left"}, {"window": (3, 2)}, {"softcap": 1.5}, {"scale": -0.4}):
        assert_agrees(NAME, arrays, {**options, "enable_gqa": True}, dtype)
    extras = ({"bias": RNG.standard_normal((4, n, m))}, {"mask": RNG.random((n, m)) < 0.5}, {"sink": np.float64(0.7)},
              {"sink": np.full(4, 30.0)})
    for extra in extras:
        assert_agrees(NAME, {**arrays, **extra}, {"enable_gqa": True}, dtype)


def test_traced():
    assert_agrees(NAME, drawn(7, 5, 4, 3), {"enable_gqa": True, "causal": True}, through=traced)


def test_mapped_over_a_batch_that_shares_its_sinks():
    arrays = drawn(7, 5, 4, 3, lead=(3,))
    sink = arrays.pop("sink")[0]
    record = reference.RECORDS[NAME]

    def one(q, k, v):
        return mlx_backend.attention_with_sink(q, k, v, mx.array(sink, mx.float32), enable_gqa=True)

    got = mx.vmap(one)(*(mx.array(x, mx.float32) for x in arrays.values()))
    np.testing.assert_allclose(np.array(got), record.function(**arrays, sink=sink, enable_gqa=True), rtol=1e-5, atol=1e-6)


def test_gradients():
    arrays = drawn(7, 5, 4, 3)
    do = RNG.standard_normal((4, 7, 3))

    def loss(q, k, v, sink):
        return mx.sum(mlx_backend.attention_with_sink(q, k, v, sink, enable_gqa=True, causal=True) * mx.array(do, mx.float32))

    got = mx.grad(loss, argnums=(0, 1, 2, 3))(*(mx.array(x, mx.float32) for x in arrays.values()))
    want = reference.scaled_dot_product_attention_backward(**arrays, do=do, causal=True, enable_gqa=True)
    for ours, theirs in zip(got, (want.dq, want.dk, want.dv, want.dsink), strict=True):
        np.testing.assert_allclose(np.array(ours), theirs, rtol=1e-5, atol=2e-6)


def test_sinks_at_infinity():
    arrays = {**drawn(3, 4, 2, 2), "sink": np.array([-np.inf, np.inf, np.nan, 0.0])}
    want = reference.attention_with_sink(**arrays, enable_gqa=True, return_lse=True)
    got = mlx_backend.attention_with_sink(**arrays, enable_gqa=True, return_lse=True)
    np.testing.assert_allclose(np.array(got.out), want.out, rtol=1e-5)
    np.testing.assert_allclose(np.array(got.lse), want.lse, rtol=1e-5)
