"""Graphs of the continuous Hopfield network."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, assert_close, assert_derivatives, mapped, traced

from attnspec import mlx_backend, reference
from attnspec.conformance.verify import as_float64

RNG = np.random.default_rng(0)
ENERGY, UPDATE, RETRIEVE, BACKWARD = "hopfield_energy", "hopfield_update", "hopfield_retrieve", "hopfield_retrieve_backward"
SIZES = ((7, 5, 4, 3), (33, 70, 16, 9))


def drawn(n, m, d, e, lead=()):
    shapes = {"state": (n, d), "stored": (m, d), "projection": (m, e), "do": (n, e)}
    return {name: RNG.standard_normal(lead + shape) for name, shape in shapes.items()}


def only(arrays, *names):
    return {key: arrays[key] for key in names}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_options(sizes, dtype):
    arrays = drawn(*sizes, lead=(2, 3))
    for beta in (None, 1.0, 0.0, 3.0, 1e-3):
        assert_agrees(ENERGY, only(arrays, "state", "stored"), {"beta": beta}, dtype)
        assert_agrees(UPDATE, only(arrays, "state", "stored"), {"beta": beta}, dtype)
    mask = RNG.random(sizes[:2]) < 0.5
    assert_agrees(UPDATE, {**only(arrays, "state", "stored"), "mask": mask}, {}, dtype)
    for K in (0, 1, 4):
        for extra in ({}, {"projection": arrays["projection"]}, {"mask": mask}, {"mask": np.zeros(sizes[:2], bool)}):
            assert_agrees(RETRIEVE, {**only(arrays, "state", "stored"), **extra}, {"n_iters": K, "tol": None}, dtype)
    assert_agrees(BACKWARD, {**arrays, "mask": mask}, {}, dtype)


@pytest.mark.parametrize("K", [1, 3])
def test_gradients(K):
    arrays = drawn(*SIZES[0])
    mask = RNG.random((7, 5)) < 0.7
    mask[2] = False
    for extra in ({}, {"mask": mask}):
        assert_derivatives(RETRIEVE, {**only(arrays, "state", "stored", "projection"), **extra}, {"n_iters": K, "tol": None, "beta": 0.7})
        got, want = (getattr(package, BACKWARD)(**arrays, **extra, n_iters=K, beta=0.7) for package in (mlx_backend, reference))
        for ours, theirs in zip(got, want, strict=True):
            assert_close("backward", as_float64(ours), theirs, 2e-6 * (1 + np.abs(theirs)))
    assert_derivatives(ENERGY, only(arrays, "state", "stored"), {"beta": 2.0}, wrt=("state",))
    assert_derivatives(UPDATE, only(arrays, "state", "stored"))
    with pytest.raises(ValueError, match=r"do: expected shape \(..., n, 4\)"):
        mlx_backend.hopfield_retrieve_backward(**only(arrays, "state", "stored", "do"))


@pytest.mark.parametrize("n_iters", [0, 2, 30, None, -1])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_heads_stop_by_themselves(n_iters, lead):
    arrays = only(drawn(4, 6, 5, 3, lead), "state", "stored")
    arrays["state"] = arrays["state"] * (np.arange(1.0, 4)[:, None, None] if lead else 1.0)
    options = {"n_iters": n_iters, "beta": 2.0, "tol": 1e-3, "return_info": True}
    got, want = (getattr(package, RETRIEVE)(**arrays, **options) for package in (mlx_backend, reference))
    np.testing.assert_array_equal(np.array(got.n_iters), want.n_iters)
    np.testing.assert_array_equal(np.array(got.converged), want.converged)
    np.testing.assert_allclose(np.array(got.out), want.out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.array(got.weights), want.weights, rtol=1e-4, atol=1e-5)


def test_what_is_not_finite():
    arrays, mask = drawn(*SIZES[0]), np.ones((7, 5), bool)
    mask[:, 3], mask[2] = False, False
    arrays["stored"][3], arrays["projection"][3], arrays["state"][2] = np.nan, np.inf, np.nan
    for K in (0, 2):
        assert_agrees(RETRIEVE, {**only(arrays, "state", "stored", "projection"), "mask": mask}, {"n_iters": K, "tol": None})
        got, want = (getattr(package, BACKWARD)(**arrays, mask=mask, n_iters=K) for package in (mlx_backend, reference))
        for ours, theirs in zip(got, want, strict=True):
            assert_close(f"backward {K}", as_float64(ours), theirs, 2e-6 * (1 + np.abs(np.nan_to_num(theirs))))
    for n, m in ((0, 3), (3, 0)):
        empty = only(drawn(n, m, 2, 2), "state", "stored")
        for name in (ENERGY, UPDATE, RETRIEVE):
            np.testing.assert_allclose(np.array(getattr(mlx_backend, name)(**empty)), getattr(reference, name)(**empty), rtol=1e-6)


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    arrays = drawn(*SIZES[0], (3,))
    assert_agrees(RETRIEVE, only(arrays, "state", "stored", "projection"), {"n_iters": 2, "tol": None}, through=through)
    assert_agrees(UPDATE, only(arrays, "state", "stored"), through=through)
    assert_agrees(ENERGY, only(arrays, "state", "stored"), through=through)
    assert_agrees(BACKWARD, arrays, through=through)
    state, stored = (mx.array(arrays[key], mx.float32) for key in ("state", "stored"))
    endless = mx.compile(lambda x, y: mlx_backend.hopfield_retrieve(x, y, n_iters=None))
    with pytest.raises(ValueError, match="n_iters: expected a whole number under a transformation"):
        endless(state, stored)
