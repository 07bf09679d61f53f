"""The graph of attention with a prior."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
from mlx_agreement import DTYPES, assert_agrees, assert_derivatives, mapped, traced

RNG = np.random.default_rng(0)
NAME = "prior_attention"


def drawn(n, m, d, e, lead=()):
    shapes = {"q": (4, n, d), "k": (2, m, d), "v": (2, m, e), "log_prior": (4, n, m)}
    return {name: RNG.standard_normal(lead + shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(7, 5, 4, 3), (65, 70, 16, 9)], ids=str)
def test_options(sizes, dtype):
    n, m, *_ = sizes
    arrays = drawn(*sizes)
    for options in ({}, {"tau": 3.0}, {"scale": -0.4}, {"causal": True}, {"causal": "top-left", "tau": 0.5}):
        assert_agrees(NAME, arrays, {**options, "enable_gqa": True}, dtype)
    for extra in ({"mask": RNG.random((n, m)) < 0.5}, {"mask": np.zeros((n, m), bool)}, {"log_prior": RNG.standard_normal(m)},
                  {"log_prior": np.where(RNG.random((n, m)) < 0.5, -np.inf, 0.0)}):
        assert_agrees(NAME, {**arrays, **extra}, {"enable_gqa": True}, dtype)


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    assert_agrees(NAME, drawn(7, 5, 4, 3, (3,)), {"enable_gqa": True, "causal": True, "tau": 2.0}, through=through)


def test_gradients_and_what_is_not_finite():
    arrays = drawn(7, 5, 4, 3)
    assert_derivatives(NAME, arrays, {"enable_gqa": True, "causal": True, "tau": 2.0})
    arrays["log_prior"][:, :, 3] = -np.inf
    arrays["k"][:, 3], arrays["v"][:, 3] = np.nan, np.inf              # a prior of 0 hides what stands there
    assert_agrees(NAME, arrays, {"enable_gqa": True})
    assert_derivatives(NAME, arrays, {"enable_gqa": True}, wrt=("q",))
    for n, m in ((0, 3), (3, 0)):
        assert_agrees(NAME, drawn(n, m, 2, 2), {"enable_gqa": True})
