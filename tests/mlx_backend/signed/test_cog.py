"""The graph of cog attention, whose weights have signs."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, assert_gradients, mapped, traced

from attnspec import mlx_backend

RNG = np.random.default_rng(0)
WEIGHTS, NAME, BACKWARD = "cog_weights", "cog_attention", "cog_attention_backward"


def drawn(n, m, d, e, lead=()):
    shapes = {"q": (4, n, d), "k": (2, m, d), "v": (2, m, e), "do": (4, n, e)}
    return {name: RNG.standard_normal(lead + shape) for name, shape in shapes.items()}


def without_do(arrays):
    return {key: x for key, x in arrays.items() if key != "do"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(7, 5, 4, 3), (65, 130, 16, 9)], ids=str)
def test_options(sizes, dtype):
    n, m, *_ = sizes
    arrays = drawn(*sizes)
    masks = ({}, {"mask": RNG.random((n, m)) < 0.5}, {"mask": RNG.random((4, 1, m)) < 0.5}, {"mask": np.zeros((n, 1), bool)})
    for options in ({}, {"scale": -0.4}, {"causal": True}, {"causal": "top-left"}):
        for mask in masks:
            assert_agrees(NAME, {**without_do(arrays), **mask}, {**options, "enable_gqa": True}, dtype)
            assert_agrees(BACKWARD, {**arrays, **mask}, {**options, "enable_gqa": True}, dtype)
    assert_gradients(NAME, {**arrays, **masks[1]}, {"enable_gqa": True, "causal": True}, dtype=dtype)
    assert_agrees(NAME, without_do(arrays), {"normaliser": "nonzero", "enable_gqa": True}, dtype)


@pytest.mark.parametrize("normaliser", ["visible", "nonzero"])
def test_weights(normaliser):
    p = RNG.standard_normal((2, 7, 5))
    p[0, 1], p[0, 2, 3], p[1, 0, 0], p[1, 1, 1], p[1, 2, 2] = 0.0, 0.0, np.nan, np.inf, -np.inf
    for arrays in ({"p": p[:1]}, {"p": 10 * p[:1]}, {"p": p, "mask": np.isfinite(p)}, {"p": p[:1], "mask": np.zeros((7, 5), bool)}):
        assert_agrees(WEIGHTS, arrays, {"normaliser": normaliser})
    got = np.array(mlx_backend.cog_weights(p, normaliser=normaliser))
    assert np.isnan(got[1, :2]).any(axis=-1).all()
    assert np.isfinite(got[1, 3:]).all()


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    arrays = drawn(7, 5, 4, 3, (3,))
    assert_agrees(NAME, without_do(arrays), {"enable_gqa": True, "causal": True}, through=through)
    assert_gradients(NAME, arrays, {"enable_gqa": True, "causal": True}, through=through)
    assert_agrees(BACKWARD, {**arrays, "mask": RNG.random((3, 4, 7, 5)) < 0.7}, {"enable_gqa": True}, through=through)
    assert_agrees(WEIGHTS, {"p": RNG.standard_normal((3, 7, 5)), "mask": RNG.random((3, 7, 5)) < 0.7}, through=through)


@pytest.mark.parametrize("place", ["value", "key", "query", "cotangent", "value seen by some"])
def test_what_is_not_finite_stays_behind_its_mask(place):
    arrays, mask = {key: x[0] for key, x in drawn(7, 5, 4, 3).items()}, RNG.random((7, 5)) < 0.7
    if place == "value seen by some":
        arrays["v"][2, 0], arrays["v"][3] = np.nan, -np.inf
        mask[:3, 2:4] = False
    elif place in ("value", "key"):
        arrays[place[0]][1] = np.inf
        arrays[place[0]][1, 0] = np.nan
        mask[:, 1] = False
    else:
        arrays["q" if place == "query" else "do"][3] = np.nan
        mask[3] = False
    assert_agrees(NAME, {**without_do(arrays), "mask": mask})
    if place != "value seen by some":                                  # there the reference's rows are NaN in other ways too
        assert_agrees(BACKWARD, {**arrays, "mask": mask})
        assert_gradients(NAME, {**arrays, "mask": mask})


def test_nothing_there():
    for n, m in ((0, 3), (3, 0), (0, 0)):
        arrays = drawn(n, m, 2, 2)
        assert_agrees(NAME, without_do(arrays), {"enable_gqa": True})
        assert_agrees(BACKWARD, arrays, {"enable_gqa": True})
    assert mlx_backend.cog_weights(mx.zeros((2, 0))).shape == (2, 0)
