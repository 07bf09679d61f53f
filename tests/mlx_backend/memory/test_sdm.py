"""Graphs of sparse distributed memory: neurons, patterns, circles and attention."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, assert_derivatives, mapped, traced

from attnspec import mlx_backend, reference

RNG = np.random.default_rng(0)
WRITE, READ, UPDATE, CIRCLE, NAME = "sdm_write", "sdm_read", "sdm_update", "sdm_circle_intersection", "sdm_attention"


def bits(*shape):
    return RNG.integers(0, 2, shape)


@pytest.mark.parametrize("n, m, r, d", [(7, 5, 40, 12), (30, 65, 300, 70)])
def test_neurons(n, m, r, d):
    locations, patterns, queries = bits(2, r, d), bits(2, m, d), bits(2, n, d)
    for radius in (0, d // 3, (d + 1) // 2, d):
        arrays = {"locations": locations, "addresses": patterns, "pointers": bits(2, m, d)}
        assert_agrees(WRITE, arrays, {"radius": radius})
        held = reference.sdm_write(**arrays, radius=radius)
        for n_iters in (1, 4):
            reading = {"queries": queries, "locations": locations, "storage": held.storage, "counts": held.counts}
            assert_agrees(READ, reading, {"radius": radius, "n_iters": n_iters})
    large = {"queries": queries, "locations": locations, "storage": held.storage + 2**40, "counts": 2 * (held.counts + 2**40)}
    assert_agrees(READ, large, {"radius": d})                          # exact beyond float32


@pytest.mark.parametrize("n, m, d", [(7, 5, 12), (30, 65, 70)])
def test_patterns(n, m, d):
    arrays = {"queries": bits(2, n, d), "addresses": bits(2, m, d), "pointers": bits(2, m, d)}
    for options in ({"radius": d // 3}, {"radius": d // 2, "n_iters": 3}, {"radius": 0}, {"weighting": "exponential", "radius": d // 3},
                    {"weighting": "exponential", "beta": 2.5}, {"weighting": "exponential", "beta": -1e300}):
        assert_agrees(UPDATE, arrays, options)
    opposites = np.stack([np.zeros(d, int), np.ones(d, int)])
    twins = {"queries": bits(1, d), "addresses": np.repeat(bits(1, d), 2, axis=0), "pointers": opposites}
    assert_agrees(UPDATE, twins, {"radius": d // 2})                   # a tie gives 0


def test_circles():
    for n, d in ((8, 3), (16, 5), (23, 11)):
        assert_agrees(CIRCLE, {"distance": np.arange(n + 1).reshape(1, -1)}, {"n_bits": n, "radius": d})
    distance = np.arange(101)
    for options in ({"log": True}, {"n_locations": 1000}, {"n_locations": 1000, "log": True}, {"n_locations": 2**70}):
        got, want = (package.sdm_circle_intersection(distance, n_bits=100, radius=35, **options) for package in (mlx_backend, reference))
        np.testing.assert_allclose(np.array(got), want, rtol=2.0**-23, atol=2.0**-149)
    for bad in ([-1, 3], mx.array([3, 9])):
        with pytest.raises(ValueError, match="distance: expected whole numbers from 0 to the 8 bits of an address, got"):
            mlx_backend.sdm_circle_intersection(bad, n_bits=8, radius=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, m, d", [(7, 5, 12), (30, 65, 33)])
def test_attention(n, m, d, dtype):
    arrays = {name: RNG.standard_normal((2, size, d)) for name, size in (("queries", n), ("addresses", m), ("pointers", m))}
    soft = {"weighting": "exponential"}
    for options in ({"radius": d // 2}, {"radius": d // 2, "n_iters": 2, "unit_norm": True}, {"radius": d // 4}, {**soft, "radius": d // 3},
                    {**soft, "beta": 3.0}, {**soft, "beta": -3.0}, {**soft, "beta": 5.0, "n_iters": 3, "unit_norm": True}):
        assert_agrees(NAME, arrays, options, dtype)


def test_spins_have_their_hamming_distances():
    x = 2.0 * bits(2, 40, 64) - 1
    for radius in (25, 28, 30):
        got, want = (package.sdm_attention(x[0], x[1], x[1], radius=radius, return_weights=True) for package in (mlx_backend, reference))
        np.testing.assert_allclose(np.array(got.weights), want.weights, rtol=1e-5, atol=1e-38)
        np.testing.assert_allclose(np.array(got.out), want.out, rtol=1e-5, atol=1e-6)


def test_what_is_special():
    x = {name: RNG.standard_normal((size, 6)) for name, size in (("queries", 4), ("addresses", 3), ("pointers", 3))}
    x["queries"][0], x["queries"][1, 2], x["queries"][2, 1] = 0.0, np.inf, np.nan
    x["addresses"][1] = 0.0
    for options in ({"radius": 3}, {"weighting": "exponential", "beta": 2.0}):
        got, want = (package.sdm_attention(**x, **options) for package in (mlx_backend, reference))
        np.testing.assert_allclose(np.array(got), want, rtol=1e-5, atol=1e-6)
    for n, m in ((0, 3), (3, 0)):
        empty = {name: np.ones((size, 6)) for name, size in (("queries", n), ("addresses", m), ("pointers", m))}
        np.testing.assert_array_equal(np.array(mlx_backend.sdm_attention(**empty, radius=3)), reference.sdm_attention(**empty, radius=3))
    with pytest.raises(ValueError, match="weighting: the MLX twin lacks 'cap'"):
        mlx_backend.sdm_attention(**x, radius=3, weighting="cap")


def test_transformations_and_gradients():
    arrays = {name: RNG.standard_normal((3, size, 6)) for name, size in (("queries", 4), ("addresses", 5), ("pointers", 5))}
    for options in ({"radius": 3}, {"weighting": "exponential", "beta": 2.0}):
        for through in (traced, mapped):
            assert_agrees(NAME, arrays, options, through=through)
    assert_derivatives(NAME, arrays, {"weighting": "exponential", "beta": 2.0, "n_iters": 2, "unit_norm": True})
    assert_derivatives(NAME, arrays, {"radius": 3}, wrt=("pointers",))
    memory = {"locations": bits(3, 40, 12), "addresses": bits(3, 5, 12), "pointers": bits(3, 5, 12)}
    held = reference.sdm_write(**memory, radius=4)
    for through in (traced, mapped):
        assert_agrees(WRITE, memory, {"radius": 4}, through=through)
        reading = {"queries": bits(3, 7, 12), "locations": memory["locations"], "storage": held.storage, "counts": held.counts}
        assert_agrees(READ, reading, {"radius": 4, "n_iters": 2}, through=through)
        patterns = {"queries": bits(3, 7, 12), "addresses": memory["addresses"], "pointers": memory["pointers"]}
        assert_agrees(UPDATE, patterns, {"radius": 4}, through=through)
        assert_agrees(CIRCLE, {"distance": RNG.integers(0, 9, (3, 4))}, {"n_bits": 8, "radius": 3}, through=through)
