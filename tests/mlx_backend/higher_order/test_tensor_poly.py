"""The graph of polynomial tensor attention."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
from mlx_agreement import DTYPES, assert_agrees, assert_derivatives, mapped, traced

from attnspec import mlx_backend, reference

RNG = np.random.default_rng(0)
NAME = "tensor_attention_poly"


def drawn(n, m1, m2, d, e, lead=()):
    shapes = {"q": (n, d), "k1": (m1, d), "k2": (m2, d), "v1": (m1, e), "v2": (m2, e)}
    return {name: RNG.uniform(-1, 1, lead + shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(7, 5, 6, 3, 2), (30, 33, 70, 4, 5)], ids=str)
def test_options(sizes, dtype):
    arrays = drawn(*sizes)
    for options in ({}, {"degree": 0}, {"degree": 3}, {"centre": 0.5}, {"scale": 0.9}, {"causal": True},
                    {"causal": "top-left", "degree": 4}):
        assert_agrees(NAME, arrays, options, dtype)


def test_transformations_and_gradients():
    arrays = drawn(7, 5, 6, 3, 2, (3,))
    assert_agrees(NAME, arrays, {"degree": 4}, through=traced)
    assert_agrees(NAME, arrays, {"degree": 4, "causal": True}, through=mapped)
    one = drawn(7, 5, 6, 3, 2)
    for options in ({"degree": 4}, {"degree": 4, "causal": "top-left"}):
        assert_derivatives(NAME, one, options, tolerance=1e-4)


def test_nothing_there_and_refusals():
    for n, m1, m2 in ((0, 3, 2), (3, 0, 2)):
        arrays = drawn(n, m1, m2, 2, 2)
        got = np.array(mlx_backend.tensor_attention_poly(**arrays))
        assert got.shape == (n, 2)
        assert not got.any()
    wide = drawn(70, 70, 70, 16, 2)
    with pytest.raises(ValueError) as ours:
        mlx_backend.tensor_attention_poly(**wide)
    with pytest.raises(ValueError) as theirs:
        reference.tensor_attention_poly(**wide)
    assert str(ours.value) == str(theirs.value)
