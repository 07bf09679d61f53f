"""Products of packed blocks against NumPy, at sizes that fill no panel."""

import numpy as np
import pytest

from attnspec.numba_kernels.jit import kernel
from attnspec.numba_kernels.matrix import add_columns_product, packed_columns, packed_rows, panel_width, rows_product


@kernel
def rows(a, panels, out, count):
    rows_product(a, a.shape[0], panels, 0, panels.shape[2] * panels.shape[3], 0, count, a.shape[1], out, out.shape[1], a.dtype.type(0.5))


@kernel
def columns(a, n, panels, out):
    for start in range(0, a.shape[1], 64):
        add_columns_product(a, n, a.shape[1], start, min(64, a.shape[1] - start), panels, 0, start, out, out.shape[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("m", [1, 15, 16, 17, 130])
def test_products_of_packed_blocks(dtype, m):
    rng = np.random.default_rng(0)
    n, d = 12, 7                                                    # rows in blocks of 6
    a, x = rng.standard_normal((n, d)).astype(dtype), rng.standard_normal((1, m, d)).astype(dtype)
    panels = packed_rows(x)
    out = np.full((n, panels.shape[1] * panels.shape[3]), np.nan, dtype)
    rows(a, panels, out, panels.shape[1])
    exact = 0.5 * a.astype(np.float64) @ x[0].astype(np.float64).T
    np.testing.assert_allclose(out[:, :m], exact, rtol=0, atol=20 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(out[:, m:], 0)

    weights = rng.standard_normal((n, m)).astype(dtype)
    values = packed_columns(x)
    total = np.ones((n, values.shape[1] * values.shape[3]), dtype)
    columns(weights, n, values, total)
    exact = 1 + weights.astype(np.float64) @ x[0].astype(np.float64)
    np.testing.assert_allclose(total[:, :d], exact, rtol=0, atol=200 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(total[:, d:], 1)


def test_panels():
    assert (panel_width(np.float32), panel_width(np.float64)) == (16, 8)
    x = np.arange(10, dtype=np.float64).reshape(1, 5, 2)
    np.testing.assert_array_equal(packed_rows(x)[0, 0, :, :6], [[0, 2, 4, 6, 8, 0], [1, 3, 5, 7, 9, 0]])
    np.testing.assert_array_equal(packed_columns(x)[0, 0, :, :3], [[0, 1, 0], [2, 3, 0], [4, 5, 0], [6, 7, 0], [8, 9, 0]])
