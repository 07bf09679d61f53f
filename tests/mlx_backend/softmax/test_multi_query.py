"""The graph of multi-query attention, projections and all."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, assert_derivatives, traced

from attnspec import mlx_backend, reference

RNG = np.random.default_rng(0)
NAME = "multi_query_attention"
RECORD = reference.RECORDS[NAME]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [{"n": 7, "m": 5, "d": 4, "e": 3, "h": 3}, {"n": 65, "m": 70, "d": 16, "e": 9, "h": 4, "b": 2}], ids=str)
def test_options(sizes, dtype):
    n, m, h = sizes["n"], sizes["m"], sizes["h"]
    arrays = RECORD.draw(sizes, RNG)
    for options in ({}, {"causal": True}, {"causal": "top-left"}, {"scale": 1.0}):
        assert_agrees(NAME, arrays, options, dtype)
    for shape in ((n, m), (h, n, m), (m,), (h, 1, m)):
        assert_agrees(NAME, {**arrays, "mask": RNG.random(shape) < 0.5}, {}, dtype)
    assert_agrees(NAME, {**arrays, "mask": np.zeros((n, m), bool)}, {"return_weights": True}, dtype, limits={"weights": 0.0})


def test_traced_and_special():
    arrays = {**RECORD.draw({"n": 7, "m": 5}, RNG), "mask": RNG.random((7, 5)) < 0.7}
    assert_agrees(NAME, arrays, through=traced)
    arrays["context"][2], arrays["mask"][:, 2] = np.nan, False
    assert_agrees(NAME, arrays)
    for n, m in ((0, 3), (3, 0)):
        assert_agrees(NAME, RECORD.draw({"n": n, "m": m}, RNG))


def test_gradients_and_a_mapped_batch():
    arrays = RECORD.draw({"n": 7, "m": 5, "b": 3}, RNG)
    assert_derivatives(NAME, arrays, {"causal": True})

    def one(x, context):
        return mlx_backend.multi_query_attention(x, context, *(mx.array(arrays[w], mx.float32) for w in ("w_q", "w_k", "w_v", "w_o")))

    got = mx.vmap(one)(mx.array(arrays["x"], mx.float32), mx.array(arrays["context"], mx.float32))
    np.testing.assert_allclose(np.array(got), RECORD.function(**arrays), rtol=1e-5, atol=2e-6)
