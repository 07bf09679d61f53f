"""The graph of context broadcasting."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
from mlx_agreement import DTYPES, assert_agrees, assert_derivatives, compiled, mapped

RNG = np.random.default_rng(0)
NAME = "context_broadcasting"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (3, 1000, 9), (1, 4), (0, 4), (5, 0)], ids=str)
def test_both_forms(shape, dtype):
    x = RNG.standard_normal(shape) + 3
    assert_agrees(NAME, {"x": x}, dtype=dtype)
    assert_agrees(NAME, {"x": x, "lam": RNG.standard_normal(shape[-1])}, dtype=dtype)


def test_transformations():
    arrays = {"x": RNG.standard_normal((3, 7, 5)), "lam": RNG.standard_normal(5)}
    assert_agrees(NAME, arrays, through=compiled)
    assert_agrees(NAME, {"x": arrays["x"]}, through=mapped)
    assert_derivatives(NAME, arrays)
