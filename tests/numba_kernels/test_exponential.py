"""The kernels' 2^x and tanh against mpmath, in units in the last place."""

import mpmath
import numpy as np
import pytest

from attnspec.numba_kernels.exponential import LOG2_E, exp2_row, range_of_row, tanh
from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.simd import lanes, load, splat, store

DTYPES = (np.float32, np.float64)


@kernel
def exp2_of(row, shift, lowest):
    return exp2_row(row, 0, row.size, shift, lowest)


@kernel
def tanh_of(row):
    kind = row.dtype.type
    for j in range(0, row.size, lanes(row)):
        store(row, j, tanh(load(row, j), splat(kind(1), row), splat(kind(-2 * LOG2_E), row), splat(kind(-64), row)))


@kernel
def range_of(row):
    return range_of_row(row, 0, row.size)


def ulps(got, exact):
    """Errors in units in the last place of the exact values, mpmath numbers."""
    with mpmath.workdps(60):
        return np.array([float(abs(mpmath.mpf(float(x)) - y) / mpmath.mpf(float(np.spacing(got.dtype.type(abs(float(y)))))))
                         for x, y in zip(got, exact, strict=True)])


def powers(x):
    with mpmath.workdps(40):
        return [mpmath.power(2, mpmath.mpf(float(value))) for value in x]


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp2_to_the_last_place(dtype):
    lowest = np.finfo(dtype).minexp
    x = np.concatenate([np.linspace(lowest, 0, 2000), np.random.default_rng(0).uniform(-2, 0, 2000)]).astype(dtype)
    row = x.copy()
    total = exp2_of(row, dtype(0), x.min())
    assert ulps(row, powers(x)).max() < 1.0
    np.testing.assert_allclose(total, np.sum(row, dtype=np.float64), rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp2_underflows_gradually(dtype):
    facts = np.finfo(dtype)
    x = np.linspace(facts.minexp - facts.nmant - 3, facts.minexp + 3, 256).astype(dtype)
    row = x.copy()
    exp2_of(row, dtype(0), x.min())
    smallest = float(facts.smallest_subnormal)
    exact = np.array([float(y) for y in powers(x)])
    # The result is rounded to 24 or 53 bits first, then to a multiple of the smallest number: an ulp and half of that.
    assert np.all(np.abs(row.astype(np.float64) - exact) <= 0.51 * smallest + facts.eps * exact)
    assert row[0] == 0
    assert np.all(row[exact > smallest] > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp2_special_values(dtype):
    """The largest is exactly 1, -inf exactly 0, NaN and +inf minus +inf are NaN; the same through either branch."""
    whole = np.array([0, -1, -2, -10, -20, 0, -1, -3] * 4, dtype)
    row = whole.copy()
    exp2_of(row, dtype(0), dtype(-20))
    np.testing.assert_array_equal(row, 2.0 ** whole.astype(np.float64))
    mixed = np.array([0, -np.inf, np.nan, -1, 0, -np.inf, -np.inf, -3] * 4, dtype)
    exp2_of(mixed, dtype(0), dtype(-np.inf))
    np.testing.assert_array_equal(mixed, np.array([1, 0, np.nan, 0.5, 1, 0, 0, 0.125] * 4, dtype))
    for lowest in (dtype(0), dtype(-np.inf)):
        other = np.array([np.nan, 0, -1, -2] * 8, dtype)
        exp2_of(other, dtype(0), lowest)
        assert np.array_equal(np.isnan(other), [True, False, False, False] * 8)
    infinite = np.full(32, np.inf, dtype)
    exp2_of(infinite, dtype(np.inf), dtype(np.inf))
    assert np.all(np.isnan(infinite))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tanh_to_the_last_places(dtype):
    rng = np.random.default_rng(1)
    x = np.concatenate([10.0 ** rng.uniform(-20, 1.5, 1000) * rng.choice([-1, 1], 1000), rng.uniform(-3, 3, 1000)]).astype(dtype)
    row = x.copy()
    tanh_of(row)
    with mpmath.workdps(60):
        exact = [mpmath.tanh(mpmath.mpf(float(value))) for value in x]
    assert ulps(row, exact).max() < 3
    special = np.array([0, np.inf, -np.inf, np.nan] * 8, dtype)
    tanh_of(special)
    np.testing.assert_array_equal(special, [0, 1, -1, np.nan] * 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_range_of_a_row(dtype):
    rng = np.random.default_rng(2)
    for registers in (1, 2, 3, 4, 5, 9):
        row = rng.standard_normal(registers * 32 // np.dtype(dtype).itemsize).astype(dtype)
        assert range_of(row) == (row.min(), row.max())
        row[rng.integers(row.size)] = np.nan
        assert range_of(row) == (np.nanmin(row), np.nanmax(row))
    assert range_of(np.full(8, -np.inf, dtype)) == (-np.inf, -np.inf)
