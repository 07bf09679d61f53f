"""The graph of energy-gated attention."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
from mlx_agreement import DTYPES, assert_agrees, assert_close, assert_derivatives, in_mlx, in_numpy, mapped, traced

from attnspec import mlx_backend, reference
from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.verify import as_float64

RNG = np.random.default_rng(0)
NAME = "energy_gated_attention"
RECORD = reference.RECORDS[NAME]


def close(arrays, options, dtype="float32"):
    """By the bound where there is one for these options, else a float32 computation's rounding: 256 units of the largest result."""
    given = in_mlx(RECORD, arrays, dtype)
    exact = in_numpy(RECORD, given)
    want = RECORD.function(**exact, **options)
    try:
        limit = bound(RECORD, {key: np.where(np.isfinite(x), x, 1.0) for key, x in exact.items()}, options, dtype)["out"]
    except NoBound:
        size = np.abs(want) + np.nanmax(np.abs(want), initial=0.0)
        limit = {"float32": 2.0**-16, "float16": 2.0**-9, "bfloat16": 2.0**-6}[dtype] * size
    assert_close(f"{options} {dtype}", as_float64(mlx_backend.energy_gated_attention(**given, **options)), want, limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [{"n": 7, "d": 4, "e": 3}, {"n": 70, "d": 16, "e": 9, "s": 3, "b": 2}], ids=str)
def test_options(sizes, dtype):
    arrays = RECORD.draw(sizes, RNG)
    for options in ({}, {"causal": False}, {"scale": -0.4}, {"std_floor": "add"}, {"znorm": "prefix"},
                    {"znorm": "prefix", "std_floor": "add"}):
        close(arrays, options, dtype)


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    assert_agrees(NAME, RECORD.draw({"n": 7, "b": 3}, RNG), through=through)


def test_gradients_and_what_is_not_finite():
    arrays = RECORD.draw({"n": 7}, RNG)
    for options in ({}, {"causal": False}):
        assert_derivatives(NAME, arrays, options, tolerance=1e-4)
    for std_floor in ("clamp", "add"):
        assert_derivatives(NAME, arrays, {"znorm": "prefix", "std_floor": std_floor}, tolerance=1e-4)
    arrays["x"][5] = np.nan                                            # earlier tokens do not see it, nor their statistics
    close(arrays, {"znorm": "prefix"})
    assert mlx_backend.energy_gated_attention(**RECORD.draw({"n": 0}, RNG)).shape == (0, 8)
    close(RECORD.draw({"n": 1}, RNG), {})
    close({**RECORD.draw({"n": 5}, RNG), "w_energy": np.zeros((2, 6))}, {})
