"""Graphs of attention over pairs and triples: dense, blocked and 2-simplicial."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
from mlx_agreement import DTYPES, assert_agrees, assert_close, assert_derivatives, assert_gradients, mapped, traced

from attnspec import mlx_backend, reference
from attnspec.conformance.verify import as_float64

RNG = np.random.default_rng(0)
NAME, BACKWARD = "tensor_attention", "tensor_attention_backward"
BLOCKED, SIMPLICIAL = "tensor_attention_blocked", "two_simplicial_attention"
SIZES = ((7, 5, 6, 4, 3), (20, 33, 37, 8, 5))
WRT = ("q", "k1", "k2", "v1", "v2")


def drawn(n, m1, m2, d, e, lead=()):
    shapes = {"q": (n, d), "k1": (m1, d), "k2": (m2, d), "v1": (m1, e), "v2": (m2, e), "do": (n, e)}
    return {name: RNG.standard_normal(lead + shape) for name, shape in shapes.items()}


def without_do(arrays):
    return {key: x for key, x in arrays.items() if key != "do"}


def masks(n, m1, m2):
    return ({}, {"mask": RNG.random((n, m1, m2)) < 0.3}, {"mask": RNG.random((n, 1, m2)) < 0.5}, {"mask": np.zeros((n, m1, m2), bool)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_options(sizes, dtype):
    n, m1, m2, *_ = sizes
    arrays = drawn(*sizes)
    for options in ({}, {"scale": 0.4}, {"causal": True}, {"causal": "top-left"}):
        for mask in masks(n, m1, m2):
            assert_agrees(NAME, {**without_do(arrays), **mask}, options, dtype)
            assert_agrees(BLOCKED, {**without_do(arrays), **mask}, {**options, "block": 4}, dtype)
    for mask in masks(n, m1, m2):
        assert_agrees(BACKWARD, {**arrays, **mask}, {"causal": True}, dtype)
    assert_gradients(NAME, {**arrays, **masks(n, m1, m2)[1]}, {"causal": True}, WRT, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_simplicial(sizes, dtype):
    n, m1, m2, *_ = sizes
    arrays = {key: np.stack([x] * (4 if key == "q" else 2)) for key, x in without_do(drawn(*sizes)).items()}
    for options in ({}, {"causal": True}, {"window1": 3, "window2": 2}, {"window1": 1, "causal": "top-left"},
                    {"k2_bias": 0.3, "v2_bias": -2.0}):
        for mask in masks(n, m1, m2)[:2]:
            assert_agrees(SIMPLICIAL, {**arrays, **mask}, {**options, "enable_gqa": True}, dtype)


def test_log_sums_weights_and_triples():
    arrays = without_do(drawn(*SIZES[0]))
    triple = {**arrays, "k3": RNG.standard_normal((4, 4)), "v3": RNG.standard_normal((4, 3))}
    for call, options in ((triple, {}), (triple, {"causal": True}), (arrays, {}), (arrays, {"causal": True})):
        got, want = (getattr(package, NAME)(**call, **options, return_weights=True) for package in (mlx_backend, reference))
        assert_close("out", as_float64(got.out), want.out, 2e-6 * (1 + np.abs(want.out)))
        assert_close("weights", as_float64(got.weights), want.weights, 1e-5 * want.weights)
    for options in ({}, {"causal": True}):
        got, want = (getattr(package, BLOCKED)(**arrays, **options, return_lse=True) for package in (mlx_backend, reference))
        assert_close("lse", as_float64(got.lse), want.lse, 2e-6 * (1 + np.abs(np.where(np.isfinite(want.lse), want.lse, 0))))
    with pytest.raises(ValueError, match="mask: expected None with a third set"):
        mlx_backend.tensor_attention(**triple, mask=np.ones((7, 5, 6), bool))
    with pytest.raises(ValueError, match="v3: expected an array"):
        mlx_backend.tensor_attention(**arrays, k3=np.ones((4, 4)))


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    arrays = drawn(*SIZES[0], (3,))
    assert_agrees(NAME, without_do(arrays), {"causal": True}, through=through)
    assert_agrees(BACKWARD, {**arrays, "mask": RNG.random((3, 7, 5, 6)) < 0.6}, through=through)
    assert_agrees(BLOCKED, without_do(arrays), {"causal": True, "block": 4}, through=through)
    assert_agrees(SIMPLICIAL, without_do(arrays), {"window1": 3}, through=through)
    assert_gradients(NAME, arrays, {"causal": True}, WRT, through=through)


def test_gradients_of_the_others():
    arrays = {**without_do(drawn(*SIZES[0])), "mask": RNG.random((7, 5, 6)) < 0.4}
    assert_derivatives(BLOCKED, arrays, {"block": 4}, WRT)
    assert_derivatives(SIMPLICIAL, arrays, {"window2": 4, "k2_bias": 0.5}, WRT)
    del arrays["mask"]
    assert_derivatives(NAME, {**arrays, "k3": RNG.standard_normal((4, 4)), "v3": RNG.standard_normal((4, 3))}, {"causal": True})


@pytest.mark.parametrize("place", ["k1", "v1", "k2", "v2", "q"])
@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_what_is_not_finite_stays_behind_its_mask(place, what):
    arrays, mask = drawn(*SIZES[0]), RNG.random((7, 5, 6)) < 0.8
    arrays[place][2] = what
    mask[{"1": np.s_[:, 2], "2": np.s_[:, :, 2], "q": np.s_[2]}[place[-1]]] = False
    for name in (NAME, BLOCKED, SIMPLICIAL):
        assert_agrees(name, {**without_do(arrays), "mask": mask})
    assert_agrees(BACKWARD, {**arrays, "mask": mask})
    assert_gradients(NAME, {**arrays, "mask": mask}, {}, WRT)


def test_nothing_there():
    for n, m1, m2 in ((0, 3, 2), (3, 0, 2), (3, 2, 0)):
        arrays = without_do(drawn(n, m1, m2, 2, 2))
        for name in (NAME, BLOCKED, SIMPLICIAL):
            for options in ({}, {"causal": True}):
                got, want = getattr(mlx_backend, name)(**arrays, **options), getattr(reference, name)(**arrays, **options)
                assert got.shape == want.shape
                assert not np.array(got).any()
