"""Graphs of bits that settle: the classical network and dense associative memories. Everything is exact."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import assert_agrees, mapped, traced

from attnspec import mlx_backend, reference

RNG = np.random.default_rng(0)
BINARY, DENSE = "hopfield_binary", "dense_associative_memory"


def spins(*shape):
    return 2 * RNG.integers(0, 2, shape) - 1


@pytest.mark.parametrize("m, d", [(5, 7), (9, 66)])
def test_recall(m, d):
    arrays = {"patterns": spins(2, m, d), "state": spins(2, d)}
    thresholds = ({}, {"threshold": RNG.standard_normal(d)}, {"threshold": np.full(1, 1 / 3)},
                  {"threshold": RNG.choice([-np.inf, 0, np.inf], d)})
    for options in ({}, {"mode": "synchronous", "max_sweeps": 5}, {"ties": "plus"}, {"max_sweeps": 0}, {"normalise": False}):
        for threshold in thresholds:
            assert_agrees(BINARY, {**arrays, **threshold}, options)
    assert_agrees(BINARY, {**arrays, "order": RNG.permutation(d)[: d // 2]})


def test_what_happened_on_the_way():
    patterns, state, threshold = spins(4, 6), spins(3, 6), RNG.standard_normal(6).astype(np.float32)
    for options in ({}, {"mode": "synchronous", "max_sweeps": 4}):
        got, want = (package.hopfield_binary(patterns, state, threshold=threshold, return_info=True, **options)
                     for package in (mlx_backend, reference))
        np.testing.assert_allclose(np.array(got.energies), want.energies, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(np.array(got.n_sweeps), want.n_sweeps)
        np.testing.assert_array_equal(np.array(got.converged), want.converged)


@pytest.mark.parametrize("m, d", [(5, 7), (9, 66)])
def test_dense(m, d):
    arrays = {"state": spins(2, d), "patterns": spins(2, m, d)}
    for options in ({}, {"degree": 1}, {"degree": 2}, {"degree": 4, "rectified": True}, {"degree": 40}, {"interaction": "exponential"},
                    {"degree": 7, "mode": "synchronous"}, {"max_sweeps": 4}, {"max_sweeps": 0}):
        assert_agrees(DENSE, arrays, options)
    assert_agrees(DENSE, {**arrays, "order": RNG.permutation(d)[: d // 2]})


def test_ties_are_ties():
    """Even powers of opposite patterns cancel exactly, whatever their size: the bits stay."""
    pattern = spins(20)
    arrays = {"state": spins(20), "patterns": np.stack([pattern, -pattern])}
    for options in ({"degree": 3}, {"degree": 41}, {"interaction": "exponential"}):
        assert_agrees(DENSE, arrays, options)


def test_transformations():
    arrays = {"patterns": spins(3, 4, 6), "state": spins(3, 6)}
    for name, options in ((BINARY, {"max_sweeps": 2}), (DENSE, {"degree": 40})):
        for through in (traced, mapped):
            assert_agrees(name, arrays, options, through=through)


def test_refusals():
    calls = ((BINARY, [[1, 0]], [1, 1], {}), (BINARY, [[1, 1]], [1, 1], {"threshold": [np.nan, 0.0]}),
             (BINARY, [[1, 1]], [1, 1], {"order": [2]}), (BINARY, [[1, 1]], [1, 1], {"ties": "minus"}),
             (DENSE, [1, 1], [[1, 3]], {}), (DENSE, [1, 1], [[1, 1]], {"degree": 0}))
    for name, first, second, options in calls:
        for convert in (lambda x: x, mx.array):
            with pytest.raises(ValueError) as ours:
                getattr(mlx_backend, name)(convert(first), convert(second), **options)
            with pytest.raises(ValueError) as theirs:
                getattr(reference, name)(first, second, **options)
            assert str(ours.value) == str(theirs.value)
