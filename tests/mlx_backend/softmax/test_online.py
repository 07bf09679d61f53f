"""The graph of online softmax attention, and the merge of partials."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, mapped, traced

from attnspec import mlx_backend, reference

RNG = np.random.default_rng(0)
NAME, MERGE = "online_softmax_attention", "merge_attention_partials"
CHUNKS = {"query_chunk": 3, "key_chunk": 2}


def drawn(n, m, d, e, lead=()):
    shapes = {"q": (4, n, d), "k": (2, m, d), "v": (2, m, e)}
    return {name: RNG.standard_normal(lead + shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes, chunks", [((7, 5, 4, 3), CHUNKS), ((65, 70, 16, 9), {"query_chunk": 30, "key_chunk": 33})], ids=str)
def test_options(sizes, chunks, dtype):
    n, m, *_ = sizes
    arrays = drawn(*sizes)
    for options in ({}, {"causal": True}, {"causal": "top-left"}, {"window": (3, 2)}, {"softcap": 1.5}, {"scale": -0.4}):
        assert_agrees(NAME, arrays, {**options, **chunks, "enable_gqa": True}, dtype)
    extras = ({"bias": RNG.standard_normal((4, n, 1))}, {"mask": RNG.random((n, m)) < 0.3}, {"mask": RNG.random((2, 1, 1, m)) < 0.3},
              {"sink": RNG.standard_normal(4)}, {"bias": np.where(RNG.random((n, m)) < 0.5, -np.inf, 0.0)})
    for extra in extras:
        assert_agrees(NAME, {**arrays, **extra}, {**chunks, "enable_gqa": True}, dtype)


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    arrays = {**drawn(7, 5, 4, 3, lead=(3,)), "mask": RNG.random((3, 4, 7, 5)) < 0.7}
    assert_agrees(NAME, arrays, {**CHUNKS, "enable_gqa": True}, through=through)


def test_gradients():
    arrays, do = {**drawn(7, 5, 4, 3), "sink": np.array([0.3, -1, 2, -np.inf])}, RNG.standard_normal((4, 7, 3))
    arrays["k"][:, 4], arrays["v"][:, 4] = np.nan, np.inf              # the last query alone sees them, and none under the mask
    mask = np.arange(5) < 4

    def loss(q, k, v, sink):
        out = mlx_backend.online_softmax_attention(q, k, v, sink=sink, mask=mx.array(mask), causal=True, enable_gqa=True, **CHUNKS)
        return mx.sum(out * mx.array(do, mx.float32))

    got = mx.grad(loss, argnums=(0, 1, 2, 3))(*(mx.array(x, mx.float32) for x in arrays.values()))
    want = reference.scaled_dot_product_attention_backward(**arrays, do=do, mask=mask, causal=True, enable_gqa=True)
    for ours, theirs in zip(got, (want.dq, want.dk, want.dv, want.dsink), strict=True):
        np.testing.assert_allclose(np.array(ours), theirs, rtol=1e-5, atol=2e-6)


def test_what_is_not_finite():
    arrays = drawn(7, 5, 4, 3)
    arrays["v"][:, 3, 0], arrays["v"][:, 3, 1], arrays["k"][:, 4] = np.inf, np.nan, np.nan
    assert_agrees(NAME, arrays, {"causal": True, "enable_gqa": True, **CHUNKS})
    for n, m in ((0, 3), (3, 0), (0, 0)):
        assert_agrees(NAME, drawn(n, m, 2, 2), {"enable_gqa": True, "return_lse": True}, limits={"lse": 0.0})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("through", [None, traced, mapped])
def test_merging(through, dtype):
    arrays = reference.RECORDS[MERGE].draw({"n": 9, "e": 3, "b": 2})
    arrays["m1"][:, :3], arrays["m2"][:, 2:4] = -np.inf, -np.inf
    assert_agrees(MERGE, arrays, dtype=dtype, **({"through": through} if through else {}))


def test_merging_nothing_has_no_gradient():
    m1, m2 = mx.array([-np.inf, -np.inf, 1.0]), mx.array([-np.inf, 0.0, 2.0])

    def of_maxima(m1, m2):
        return mx.sum(mlx_backend.merge_attention_partials(m1, [1.0] * 3, [[2.0]] * 3, m2, [1.0] * 3, [[1.0]] * 3).o)

    gradient = mx.grad(of_maxima, argnums=(0, 1))(m1, m2)
    np.testing.assert_allclose(np.array(gradient[0]), [0, 0, 2 * np.exp(-1)], rtol=1e-6)
    np.testing.assert_allclose(np.array(gradient[1]), [0, 0, -2 * np.exp(-1)], rtol=1e-6)


def test_chunks_are_checked():
    with pytest.raises(ValueError, match="key_chunk: expected a whole number >= 1"):
        mlx_backend.online_softmax_attention(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)), key_chunk=0)
