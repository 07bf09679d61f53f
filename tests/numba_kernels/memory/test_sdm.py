"""Sparse distributed memory with packed bits, circle intersections, and the attention form."""

import numpy as np
import pytest
from agreement import assert_same

from attnspec import numba_kernels, reference

RNG = np.random.default_rng(0)


def bits(*shape):
    return RNG.integers(0, 2, shape)


@pytest.mark.parametrize("d", [7, 64, 70, 130])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, bool, np.int64])
def test_write_and_read(d, dtype):
    locations, addresses, pointers, queries = bits(2, 600, d), bits(9, d), bits(2, 9, d), bits(2, 6, d)
    for radius in (d // 3, d // 2, d):
        written = numba_kernels.sdm_write(locations.astype(dtype), addresses.astype(dtype), pointers.astype(dtype), radius=radius)
        want = reference.sdm_write(locations, addresses, pointers, radius=radius)
        assert written.storage.dtype == np.int16
        np.testing.assert_array_equal(written.storage, want.storage)
        np.testing.assert_array_equal(written.counts, want.counts)
        for n_iters in (1, 4):
            got = numba_kernels.sdm_read(queries.astype(dtype), locations.astype(dtype), *written, radius=radius, n_iters=n_iters)
            np.testing.assert_array_equal(got, reference.sdm_read(queries, locations, *want, radius=radius, n_iters=n_iters))


def test_what_is_no_bit_is_refused():
    for dtype in (np.uint8, np.int8, np.int64):
        with pytest.raises(ValueError, match=r"^locations: expected entries 0 or 1, got 2$"):
            numba_kernels.sdm_write(np.full((2, 3), 2, dtype), bits(1, 3), bits(1, 3), radius=1)


@pytest.mark.parametrize("n", [1, 2, 5, 16, 101, 1000])
def test_circles(n):
    for radius in {0, n // 3, n // 2, n}:
        for options in ({}, {"log": True}, {"n_locations": 10**6}):
            circle = {"n_bits": n, "radius": radius, **options}
            assert_same("sdm_circle_intersection", {"distance": np.arange(n + 1)}, circle, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(7, 5), (150, 600)], ids=str)
def test_attention(sizes):
    n, m = sizes
    arrays = reference.sdm_attention.record.draw({"n": n, "m": m, "d": 30})
    for options in ({}, {"n_iters": 3}, {"unit_norm": True}, {"weighting": "exponential", "beta": 4.0}, {"radius": 0}):
        assert_same("sdm_attention", {**arrays, **options}, {"return_weights": True})
    spins = {**arrays, **{name: 2.0 * bits(size, 30) - 1 for name, size in (("queries", n), ("addresses", m))}}      # whole distances
    assert_same("sdm_attention", spins, {"return_weights": True})
    with pytest.raises(ValueError, match=r"^weighting"):
        numba_kernels.sdm_attention(**arrays, weighting="cap")
