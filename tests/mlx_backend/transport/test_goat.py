"""Graphs of GOAT attention: features, heads and the whole layer."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, assert_close, assert_derivatives, in_mlx, in_numpy, mapped, traced

from attnspec import mlx_backend, reference
from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.verify import as_float64

RNG = np.random.default_rng(0)
FEATURES, HEADS, LAYER = "goat_augmented_qk", "goat_head_attention", "goat_attention"
SIZES = ({"n": 7, "m": 5, "d": 8, "e": 3, "h": 4, "hk": 2}, {"n": 66, "m": 70, "d": 16, "e": 9, "h": 2, "hk": 1})
OPTIONS = ({}, {"causal": True}, {"causal": "top-left"}, {"query_offset": 3, "key_offset": 2}, {"position_base": 100.0}, {"grid": (9, 9)},
           {"grid": (9, 9), "cls": True, "causal": "top-left"})


def close(name, arrays, options, dtype="float32"):
    """By the bound where there is one for these options, else a float32 computation's rounding: 64 units of the largest result."""
    record = reference.RECORDS[name]
    given = in_mlx(record, arrays, dtype)
    exact = in_numpy(record, given)
    want, got = record.function(**exact, **options), getattr(mlx_backend, name)(**given, **options)
    try:
        limit = bound(record, exact, options, dtype)["out"]
    except NoBound:
        limit = {"float32": 2.0**-18, "float16": 2.0**-9, "bfloat16": 2.0**-6}[dtype] * (np.abs(want) + np.max(np.abs(want)))
    assert_close(f"{name} {options} {dtype}", as_float64(got), want, limit)


def gates(h):
    return {"gate_scale": RNG.standard_normal(h), "gate_bias": RNG.standard_normal(h)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_heads(sizes, dtype):
    arrays = reference.RECORDS[HEADS].draw(sizes, RNG)
    n, m, h = sizes["n"], sizes["m"], sizes["h"]
    for options in OPTIONS:
        close(HEADS, arrays, {**options, "enable_gqa": True}, dtype)
    mask = RNG.random((n, m)) < 0.6
    for extra in ({"mask": mask}, {"mask": RNG.random((h, n, m)) < 0.6}, gates(h), {**gates(h), "mask": mask}):
        close(HEADS, {**arrays, **extra}, {"enable_gqa": True}, dtype)
    hidden = {**arrays, "u": np.where(np.arange(m) % 3 == 1, -np.inf, arrays["u"])}
    close(HEADS, hidden, {"enable_gqa": True}, dtype)
    del arrays["u"]
    close(HEADS, arrays, {"enable_gqa": True, "causal": True}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_features(sizes, dtype):
    record = reference.RECORDS[FEATURES]
    arrays = record.draw({key: size for key, size in sizes.items() if key != "e"}, RNG)
    for extra in ({}, gates(sizes["h"])):
        for options in OPTIONS:
            given = in_mlx(record, {**arrays, **extra}, dtype)
            exact = in_numpy(record, given)
            want = record.function(**exact, **options, enable_gqa=True)
            got = mlx_backend.goat_augmented_qk(**given, **options, enable_gqa=True)
            size = 1 + np.abs(exact["a"]).max() + np.abs(exact["b"]).max()
            for ours, theirs in zip(got, want, strict=True):
                roundoff = {"float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
                assert_close(f"{options} {dtype}", as_float64(ours), theirs, roundoff * np.abs(theirs) + 2.0**-20 * (size + np.abs(theirs)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer(dtype):
    sizes = {"n": 7, "m": 5, "d": 8, "h": 4, "hk": 2}
    arrays = reference.RECORDS[LAYER].draw(sizes, RNG)
    options = ({}, {"causal": True}, {"prior_scale": 0.3, "training_length": 20}, {"absolute_base": 50.0}, {"grid": (3, 3), "cls": True})
    for one in options:
        close(LAYER, arrays, one, dtype)
    for extra in ({"mask": RNG.random((7, 5)) < 0.6}, {"key_mask": np.arange(5) != 2}, gates(4)):
        close(LAYER, {**arrays, **extra}, {}, dtype)
    close(LAYER, {**arrays, "recency": RNG.standard_normal(2)}, {"causal": True}, dtype)
    network = ("w1", "b1", "w2", "b2", "gain", "bump", "recency")
    close(LAYER, {key: x for key, x in arrays.items() if key not in network}, {}, dtype)


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    arrays = reference.RECORDS[HEADS].draw({**SIZES[0], "b": 3}, RNG)
    arrays |= {key: np.stack([arrays[key]] * 3) for key in ("a", "b", "u")} if through is mapped else {}
    if through is mapped:
        given = {key: mx.array(x, mx.float32) for key, x in arrays.items()}
        got = mapped(lambda **x: mlx_backend.goat_head_attention(**x, enable_gqa=True, causal=True), given)
        shared = {key: arrays[key][0] for key in ("a", "b", "u")}
        want = reference.goat_head_attention(**{**arrays, **shared}, enable_gqa=True, causal=True)
        assert_close("mapped", as_float64(got), want, 1e-5)
    else:
        assert_agrees(HEADS, arrays, {"enable_gqa": True, "causal": True}, through=through)


def test_gradients_and_what_is_not_finite():
    arrays = reference.RECORDS[HEADS].draw(SIZES[0], RNG)
    assert_derivatives(HEADS, {**arrays, **gates(4)}, {"enable_gqa": True, "causal": True})
    mask = np.ones((7, 5), bool)
    mask[:, 3], mask[2] = False, False
    arrays["k"][:, 3], arrays["v"][:, 3], arrays["u"][:, 3], arrays["q"][:, 2] = np.nan, np.inf, np.nan, np.nan
    arrays = {**arrays, **gates(4), "mask": mask}
    close(HEADS, arrays, {"enable_gqa": True})
    assert_derivatives(HEADS, arrays, {"enable_gqa": True}, wrt=("a", "b", "gate_scale", "gate_bias"))
    layer = reference.RECORDS[LAYER].draw({"n": 4, "m": 5, "d": 8, "h": 2}, RNG)
    assert_derivatives(LAYER, layer, {"causal": True})
    for n, m in ((0, 3), (3, 0)):
        empty = reference.RECORDS[HEADS].draw({**SIZES[0], "n": n, "m": m}, RNG)
        got = np.array(mlx_backend.goat_head_attention(**empty, enable_gqa=True))
        assert got.shape == (4, n, 3)
        assert not got.any()


def test_refusals():
    arrays = reference.RECORDS[HEADS].draw(SIZES[0], RNG)
    for options in ({"grid": (1, 2)}, {"cls": True}, {"gate_scale": np.ones(4)}, {"position_base": -1.0}, {"key_offset": 0.5}):
        with pytest.raises(ValueError, match=next(iter(options))) as ours:
            mlx_backend.goat_head_attention(**arrays, **options, enable_gqa=True)
        with pytest.raises(ValueError) as theirs:
            reference.goat_head_attention(**arrays, **options, enable_gqa=True)
        assert str(ours.value) == str(theirs.value)
