"""Graphs of flow attention, both forms."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
from mlx_agreement import DTYPES, assert_close, assert_derivatives, in_mlx, in_numpy, mapped, plain, traced

from attnspec import mlx_backend, reference
from attnspec.conformance.verify import as_float64

RNG = np.random.default_rng(0)
NAME, CAUSAL = "flow_attention", "flow_attention_causal"


def drawn(n, m, d, e, lead=()):
    shapes = {"q": (n, d), "k": (m, d), "v": (m, e)}
    return {name: RNG.standard_normal(lead + shape) for name, shape in shapes.items()}


def close(name, arrays, options=None, dtype="float32", through=plain):
    """Every sum is of positive terms, so that weights have small relative errors: 16 roundings on the way and chains of additions."""
    record, options = reference.RECORDS[name], options or {}
    given = in_mlx(record, arrays, dtype)
    exact = in_numpy(record, given)
    want, A, _ = record.function(**exact, **options, return_weights=True)
    got = through(lambda **x: getattr(mlx_backend, name)(**x, **options), given)
    n, m = exact["q"].shape[-2], exact["k"].shape[-2]
    clip = options.get("clip", 1.0)
    exponent = 4 * (1 if clip is None or np.isinf(clip) else min(clip, 4)) + (4 * n / max(m, 1) if clip is None or np.isinf(clip) else 0)
    relative = 2.0**-24 * (64 + (n + m) / 2) * (1 + exponent)
    roundoff = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    limit = relative * (np.abs(A) @ np.abs(exact["v"])) + roundoff * np.abs(want) + 2.0**-26
    assert_close(f"{name} {options} {dtype}", as_float64(got), want, limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(7, 5, 4, 3), (66, 130, 16, 9)], ids=str)
def test_options(sizes, dtype):
    arrays = drawn(*sizes, lead=(2, 3))
    for options in ({}, {"eps": 1e-3}, {"flow_eps": 1e-6, "clip": 5.0}, {"clip": None}, {"feature": "relu"}, {"competition": "heads"}):
        close(NAME, arrays, options, dtype)
    arrays = drawn(sizes[0], sizes[0], *sizes[2:], lead=(2,))
    for options in ({}, {"eps": 1e-3}, {"clip": 10.0}, {"clip": None}):
        close(CAUSAL, arrays, options, dtype)


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    close(NAME, drawn(7, 5, 4, 3, (3,)), through=through)
    close(CAUSAL, drawn(6, 6, 4, 3, (3,)), through=through)


def test_gradients():
    for options in ({}, {"clip": None, "feature": "relu"}):
        assert_derivatives(NAME, drawn(7, 5, 4, 3), options, tolerance=1e-4)
    assert_derivatives(CAUSAL, drawn(6, 6, 4, 3), tolerance=1e-4)


def test_weights_and_special_values():
    arrays = drawn(6, 6, 4, 3)
    for name in (NAME, CAUSAL):
        got, want = (getattr(package, name)(**arrays, return_weights=True) for package in (mlx_backend, reference))
        np.testing.assert_allclose(np.array(got.weights), want.weights, rtol=1e-5, atol=1e-7)
    later = {**arrays, "v": arrays["v"].copy()}
    later["v"][4] = np.nan, np.inf, -np.inf                            # the first rows do not look ahead
    assert_close("later", as_float64(mlx_backend.flow_attention_causal(**later)), reference.flow_attention_causal(**later), 1e-5)
    for n, m in ((0, 3), (3, 0), (0, 0)):
        empty = drawn(n, m, 2, 2)
        got, want = mlx_backend.flow_attention(**empty), reference.flow_attention(**empty)
        assert got.shape == want.shape
        assert not np.array(got).any()
    assert mlx_backend.flow_attention_causal(**drawn(0, 0, 2, 2)).shape == (0, 2)
    far = {"q": np.full((2, 3), -200.0), "k": np.full((4, 3), -200.0), "v": np.ones((4, 1))}        # features that underflow
    assert not np.array(mlx_backend.flow_attention(**far, eps=0.0)).any()
    with pytest.raises(ValueError, match="competition: 'heads' expects a head axis"):
        mlx_backend.flow_attention(**drawn(3, 4, 2, 2), competition="heads")
