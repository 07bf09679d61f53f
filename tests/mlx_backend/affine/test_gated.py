"""The graph of gated attention at its five places."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
from mlx_agreement import DTYPES, assert_agrees, assert_close, assert_derivatives, in_mlx, in_numpy, mapped, plain, traced

from attnspec import mlx_backend, reference
from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.verify import as_float64

RNG = np.random.default_rng(0)
NAME = "gated_attention"
RECORD = reference.RECORDS[NAME]
PLACES = ("G1", "G2", "G3", "G4", "G5")


def drawn(position, n, m, d, e, shared=False, headwise=False, lead=()):
    """Four query heads, two of keys; gates as the position wants them."""
    heads = {"G2": 2, "G3": 2, "G5": 1}.get(position, 4)
    width = {"G1": e, "G2": e, "G5": 6}.get(position, d)
    shapes = {"q": (4, n, d), "k": (2, m, d), "v": (2, m, e), "x": (n, 5)}
    arrays = {name: RNG.standard_normal(lead + shape) for name, shape in shapes.items()}
    arrays["w_gate"] = RNG.standard_normal((1 if shared else heads, 1 if headwise else width, 5))
    if position in ("G2", "G3"):
        arrays["x_keys"] = RNG.standard_normal((*lead, m, 5))
    if position == "G5":
        arrays |= {"w_o": RNG.standard_normal((6, 4, e)), "b_o": RNG.standard_normal(6)}
    return arrays


def close(arrays, options, dtype="float32", through=plain):
    """By the bound where there is one for these options, else a float32 computation's rounding: 64 units of the largest result."""
    options = {**options, "enable_gqa": True}
    given = in_mlx(RECORD, arrays, dtype)
    exact = in_numpy(RECORD, given)
    want, got = RECORD.function(**exact, **options), through(lambda **x: mlx_backend.gated_attention(**x, **options), given)
    finite = {key: np.where(np.isfinite(x), x, 1.0) if x.dtype.kind == "f" else x for key, x in exact.items()}
    try:
        limit = bound(RECORD, finite, options, dtype)["out"]
    except NoBound:
        size = np.abs(want) + np.nanmax(np.abs(want), initial=0.0)
        limit = {"float32": 2.0**-18, "float16": 2.0**-9, "bfloat16": 2.0**-6}[dtype] * size
    assert_close(f"{options} {dtype}", as_float64(got), want, limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", PLACES)
@pytest.mark.parametrize("sizes", [(7, 5, 4, 3), (65, 70, 16, 9)], ids=str)
def test_places(sizes, position, dtype):
    n, m, *_ = sizes
    arrays = drawn(position, *sizes)
    options = {"position": position}
    for one in ({}, {"activation": "silu"}, {"activation": "ns_sigmoid"}, {"activation": "identity"}, {"mode": "additive"},
                {"causal": True}, {"causal": "top-left"}, {"scale": -0.4}):
        close(arrays, {**options, **one}, dtype)
    for extra in ({"mask": RNG.random((n, m)) < 0.5}, {"mask": RNG.random((4, n, m)) < 0.5}, {"mask": np.zeros((n, m), bool)},
                  {"b_gate": RNG.standard_normal(arrays["w_gate"].shape[:2])}):
        close({**arrays, **extra}, options, dtype)
    for shape in ({"shared": True}, {"headwise": True}, {"shared": True, "headwise": True}):
        close(drawn(position, *sizes, **shape), options, dtype)
    if position == "G1":
        close({**arrays, "w_o": RNG.standard_normal((6, 4, sizes[3]))}, options, dtype)


@pytest.mark.parametrize("position", PLACES)
def test_gradients_and_what_is_not_finite(position):
    arrays = drawn(position, 7, 5, 4, 3)
    options = {"position": position, "enable_gqa": True}
    assert_derivatives(NAME, arrays, {**options, "causal": True})
    mask = np.ones((7, 5), bool)
    mask[:, 3] = False
    arrays["k"][:, 3], arrays["v"][:, 3] = np.nan, np.inf
    if position in ("G2", "G3"):
        arrays["x_keys"][3] = np.nan
    if position != "G5":
        mask[2], arrays["q"][:, 2] = False, np.nan
        arrays["x"][2] = np.nan
    close({**arrays, "mask": mask}, {"position": position})
    assert_derivatives(NAME, {**arrays, "mask": mask}, options, wrt=("w_gate",))


@pytest.mark.parametrize("position", PLACES)
def test_transformations(position):
    arrays = drawn(position, 7, 5, 4, 3, lead=(3,))
    assert_agrees(NAME, arrays, {"position": "G1", "enable_gqa": True}, through=traced) if position == "G1" else None
    weights = {key: arrays.pop(key) for key in ("w_gate", "w_o", "b_o") if key in arrays}

    def mapped_tokens(function, given):
        of = {key: given[key] for key in arrays}
        return mapped(lambda **x: function(**x, **{key: given[key] for key in weights}), of)

    close({**arrays, **weights}, {"position": position, "causal": True}, through=mapped_tokens)


def test_refusals():
    arrays = drawn("G1", 7, 5, 4, 3)
    calls = ({"position": "G6"}, {"activation": "relu"}, {"mode": "none"}, {"position": "G5"}, {"x_keys": np.ones((5, 5))},
             {"b_o": np.ones(6)}, {"position": "G2"}, {"w_gate": np.ones((3, 3, 5))})
    for options in calls:
        with pytest.raises(ValueError) as ours:
            mlx_backend.gated_attention(**{**arrays, **options}, enable_gqa=True)
        with pytest.raises(ValueError) as theirs:
            reference.gated_attention(**{**arrays, **options}, enable_gqa=True)
        assert str(ours.value) == str(theirs.value)
