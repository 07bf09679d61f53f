"""The graph of affine-scaled attention."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, assert_gradients, mapped, traced

from attnspec import mlx_backend, reference

RNG = np.random.default_rng(0)
NAME, BACKWARD = "affine_scaled_attention", "affine_scaled_attention_backward"
WRT = ("q", "k", "v", "x", "w_a")


def drawn(n=7, m=5, d=4, e=3, b=None):
    sizes = {"n": n, "m": m, "d": d, "e": e, "h": 4, "hk": 2, **({"b": b} if b else {})}
    return reference.RECORDS[BACKWARD].draw(sizes, RNG)


def without_do(arrays):
    return {key: x for key, x in arrays.items() if key != "do"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(7, 5, 4, 3), (33, 70, 16, 9)], ids=str)
def test_options(sizes, dtype):
    n, m, *_ = sizes
    arrays = drawn(*sizes)
    masks = ({}, {"mask": RNG.random((n, m)) < 0.5}, {"mask": RNG.random((4, 1, m)) < 0.5}, {"mask": np.zeros((n, 1), bool)})
    for options in ({}, {"scale": -0.4}, {"causal": True}, {"causal": "top-left"}, {"phi": "sigmoid"},
                    {"n_keys": "allowed", "causal": True}):
        for mask in masks:
            assert_agrees(NAME, {**without_do(arrays), **mask}, {**options, "enable_gqa": True}, dtype)
            assert_agrees(BACKWARD, {**arrays, **mask}, {**options, "enable_gqa": True}, dtype)
    assert_gradients(NAME, {**arrays, **masks[1]}, {"enable_gqa": True, "causal": True, "phi": "sigmoid"}, WRT, dtype)


@pytest.mark.parametrize("phi", ["linear_clipping", "sigmoid"])
@pytest.mark.parametrize("place", ["query", "input", "key", "value", "cotangent"])
def test_what_is_not_finite_stays_behind_its_mask(place, phi):
    arrays, mask = drawn(), RNG.random((7, 5)) < 0.7
    if place in ("key", "value"):
        arrays[place[0]][:, 1] = np.nan
        mask[:, 1] = False
    else:
        mask[3] = False
        if place == "input":
            arrays["x"][3] = np.nan
        else:
            arrays["q" if place == "query" else "do"][:, 3] = np.nan
    assert_agrees(NAME, {**without_do(arrays), "mask": mask}, {"enable_gqa": True, "phi": phi})
    wrt = tuple(key for key in WRT if not (place == "input" and key == "x"))      # the reference multiplies it by 0
    assert_gradients(NAME, {**arrays, "mask": mask}, {"enable_gqa": True, "phi": phi}, wrt)


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    arrays = drawn(b=3)
    if through is mapped:
        arrays |= {key: np.stack([arrays[key]] * 3) for key in ("w_a", "alpha_ma")}
        given = {key: mx.array(x, mx.float32) for key, x in without_do(arrays).items()}
        got = mapped(lambda **x: mlx_backend.affine_scaled_attention(**x, enable_gqa=True, causal=True), given)
        shared = {**without_do(arrays), "w_a": arrays["w_a"][0], "alpha_ma": arrays["alpha_ma"][0]}
        np.testing.assert_allclose(np.array(got), reference.affine_scaled_attention(**shared, enable_gqa=True, causal=True), atol=1e-5)
    else:
        assert_agrees(NAME, without_do(arrays), {"enable_gqa": True, "causal": True}, through=through)
        assert_agrees(BACKWARD, arrays, {"enable_gqa": True, "causal": True}, through=through)


def test_the_running_average_has_no_gradient_and_nothing_is_empty():
    arrays = {key: mx.array(x, mx.float32) for key, x in without_do(drawn()).items()}
    alpha_ma = arrays.pop("alpha_ma")
    gradient = mx.grad(lambda x: mx.sum(mlx_backend.affine_scaled_attention(**arrays, alpha_ma=x, enable_gqa=True)))(alpha_ma)
    assert not np.array(gradient).any()
    assert_agrees(NAME, without_do(drawn(0, 3)), {"enable_gqa": True})
    nothing = np.array(mlx_backend.affine_scaled_attention(**without_do(drawn(3, 0)), enable_gqa=True))
    assert nothing.shape == (4, 3, 3)
    assert not nothing.any()
