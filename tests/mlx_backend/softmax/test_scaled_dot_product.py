"""The graph of softmax attention: every option, what is not finite, and the transformations of MLX."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, assert_gradients, compiled, in_mlx, in_numpy, mapped, traced

from attnspec import mlx_backend, reference
from attnspec.conformance.bounds.pieces import Precision, chain, exponent_error, logits_of
from attnspec.reference.softmax.weights import softmax_weights

RNG = np.random.default_rng(0)
FORWARD, BACKWARD = "scaled_dot_product_attention", "scaled_dot_product_attention_backward"
SMALLEST = 2.0**-126      # below it exp may be 0, as on a GPU
SIZES = ((7, 5, 4, 3), (33, 70, 17, 9))


def options_of(n, m):
    """Each option by itself, and those that meet: (arrays, options)."""
    yield from (({}, one) for one in ({}, {"causal": True}, {"causal": "top-left"}, {"causal": "top-left", "window": (3, 2)}))
    yield from (({}, one) for one in ({"window": (40, None)}, {"window": (0, 0)}, {"scale": -2.0}, {"scale": 0.0}))
    yield from (({}, one) for one in ({"softcap": 1.5}, {"softcap": 0}, {"softcap": np.inf}))
    shapes = ((n, m), (2, 4, n, m), (4, 1, m), (n, 1), (m,), ())
    yield from (({"bias": RNG.standard_normal(shape)}, {}) for shape in shapes)
    yield {"bias": RNG.standard_normal((4, n, m))}, {"softcap": 2.0, "causal": True}
    yield {"bias": np.where(RNG.random((n, m)) < 0.5, -np.inf, RNG.standard_normal((n, m)))}, {}
    yield from (({"mask": RNG.random(shape) < 0.6}, {}) for shape in shapes)
    yield {"mask": np.zeros((n, m), bool)}, {}
    yield from (({"sink": sink}, {}) for sink in (RNG.standard_normal(4), np.float64(1.0), np.array([0.5, 0, -3, 40.0])))
    yield {"mask": np.zeros((n, m), bool), "sink": np.array([2.0, 0, -1, 40.0])}, {}


def drawn(n, m, d, e, key_heads=4, lead=(2,)):
    q, do = RNG.standard_normal((*lead, 4, n, d)), RNG.standard_normal((*lead, 4, n, e))
    k, v = RNG.standard_normal((*lead, key_heads, m, d)), RNG.standard_normal((*lead, key_heads, m, e))
    return {"q": q, "k": k, "v": v, "do": do}


def limits_of(name, arrays, options, dtype):
    """Bounds of weights, as of an output for the values 1, and of the log-sum-exp, from the errors of the exponents."""
    record = reference.RECORDS[name]
    exact = in_numpy(record, in_mlx(record, arrays, dtype))
    precision = Precision.of(dtype)
    a, u, eta = precision
    finite = {key: np.where(np.isfinite(x), x, 1.0) if key in "qkv" else x for key, x in exact.items()}
    x, sink = logits_of({**finite, **options}, precision), np.zeros(()) if name == "softmax_one_attention" else exact.get("sink")
    p, L = softmax_weights(x.s, x.visible, sink)
    ds, length = exponent_error(x.s, x.error, x.visible, a, sink), chain(exact["k"].shape[-2])
    z = np.zeros(()) if sink is None else sink[..., None]
    dz = 2 * u * np.abs(z) + a * (4 + 2 * (np.maximum(L, z) - z)) if sink is not None else 0.0
    rest = np.sum(p * np.expm1(ds), axis=-1) + (0.0 if sink is None else np.exp(z - np.maximum(L, z)) * np.expm1(dz))
    size, top = np.where(np.isfinite(L), np.abs(L), 0.0), np.max(np.where(x.visible, np.abs(x.s), 0.0), axis=-1, initial=0.0)
    return {
        "weights": p * (np.expm1(ds) + 2 * rest[..., None] + length * a + 2 * u) + 2 * eta + SMALLEST,
        "lse": 2 * rest + length * a + 4 * a * (1 + top + size + np.abs(z)) + u * size,
    }


def assert_forward(name, arrays, options, dtype="float32", **how):
    options = {**options, "return_weights": True, "return_lse": True}
    plain = {key: x for key, x in options.items() if not key.startswith("return")}
    return assert_agrees(name, arrays, options, dtype, limits=limits_of(name, arrays, plain, dtype), **how)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_every_option(sizes, key_heads):
    n, m, *_ = sizes
    arrays, gqa = drawn(*sizes, key_heads), {"enable_gqa": key_heads != 4}
    qkv = {key: arrays[key] for key in "qkv"}
    for extra, options in options_of(n, m):
        assert_forward(FORWARD, {**qkv, **extra}, {**options, **gqa})
        assert_agrees(BACKWARD, {**arrays, **extra}, {**options, **gqa})
        wrt = ("q", "k", "v", *(key for key in extra if key in ("bias", "sink")))
        assert_gradients(FORWARD, {**arrays, **extra}, {**options, **gqa}, wrt)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "peaky", "offset"])
def test_dtypes(dtype, kind):
    arrays = drawn(17, 130, 16, 8)
    arrays["q"] *= 16 if kind == "peaky" else 1
    arrays["v"] += 30 if kind == "offset" else 0
    qkv = {key: arrays[key] for key in "qkv"}
    both = {"bias": RNG.standard_normal((17, 130)), "sink": RNG.standard_normal(4)}
    for extra, options in (({}, {"causal": True}), (both, {"softcap": 3.0})):
        assert_forward(FORWARD, {**qkv, **extra}, options, dtype)
        assert_agrees(BACKWARD, {**arrays, **extra}, options, dtype)
        assert_gradients(FORWARD, {**arrays, **extra}, options, dtype=dtype)


@pytest.mark.parametrize("through", [traced, mapped])
def test_transformations(through):
    arrays = drawn(7, 5, 4, 3, key_heads=2, lead=(3,))
    qkv = {key: arrays[key] for key in "qkv"}
    extra = {"mask": RNG.random((3, 4, 7, 5)) < 0.6, "bias": RNG.standard_normal((3, 4, 7, 5))}
    for options in ({"enable_gqa": True}, {"enable_gqa": True, "causal": True, "softcap": 2.0}):
        assert_forward(FORWARD, {**qkv, **extra}, options, through=through)
        assert_agrees(BACKWARD, {**arrays, **extra}, options, through=through)
        assert_gradients(FORWARD, {**arrays, **extra}, options, wrt=("q", "k", "v", "bias"), through=through)
        assert_gradients(FORWARD, {**arrays, **extra}, options, through=lambda f, x: through(lambda **y: traced(f, y), x))


def test_compiled():
    arrays = drawn(7, 5, 4, 3, key_heads=2, lead=())
    assert_agrees(FORWARD, {key: arrays[key] for key in "qkv"}, {"enable_gqa": True, "causal": True}, through=compiled)


PLACES = ("value", "key", "query", "cotangent", "infinite value", "infinite key", "value seen by some", "key seen by some",
          "both infinities")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_finite_stays_behind_its_mask(sizes, place):
    n, m, d, e = sizes
    q, k, v, do = (RNG.standard_normal((2, *shape)) for shape in ((n, d), (m, d), (m, e), (n, e)))
    mask = RNG.random((n, m)) < 0.7
    if place == "both infinities":
        v[:, 2, 0], v[:, 3, 0], v[:, 3, 1] = np.inf, -np.inf, -np.inf
        mask[: n // 2, 2] = False
        mask[n // 3 :, 3] = False
    elif place.endswith("seen by some"):
        x = v if place.startswith("value") else k
        x[0, 2, 0], x[1, 3] = np.nan, np.inf
        mask[: n // 2, 2:4] = False
    elif "value" in place or "key" in place:
        x = v if "value" in place else k
        x[:, 1] = np.inf if "infinite" in place else np.nan
        mask[:, 1] = False
    else:
        x = q if place == "query" else do
        x[:, 3] = np.nan
        mask[3] = False
    arrays, masked = {"q": q, "k": k, "v": v}, {"mask": mask}
    assert_forward(FORWARD, {**arrays, **masked}, {})
    assert_agrees(BACKWARD, {**arrays, "do": do, **masked})
    assert_gradients(FORWARD, {**arrays, "do": do, **masked})
    if place != "both infinities":
        assert_forward(FORWARD, arrays, {"causal": True})
        assert_gradients(FORWARD, {**arrays, "do": do}, {"causal": True})


def test_special_logits():
    """A NaN or +inf that a query sees makes its row NaN; -inf is as if masked; sinks may be anything."""
    arrays = {"q": np.ones((5, 1)), "k": np.ones((4, 1)), "v": RNG.standard_normal((4, 2))}
    bias = np.zeros((5, 4))
    bias[0, 1], bias[1, 1], bias[2, 1], bias[3] = np.nan, np.inf, -np.inf, -np.inf
    assert_agrees(FORWARD, {**arrays, "bias": bias})
    assert_agrees(FORWARD, {**arrays, "bias": bias, "mask": np.arange(4) != 1})
    heads = {key: np.stack([x] * 4) for key, x in arrays.items()}
    for mask in (np.ones((5, 4), bool), np.zeros((5, 4), bool)):
        record = reference.RECORDS[FORWARD]
        call = {**heads, "sink": np.array([np.nan, np.inf, -np.inf, 0.0]), "mask": mask}
        got = mlx_backend.scaled_dot_product_attention(**in_mlx(record, call), return_lse=True)
        want = record.function(**call, return_lse=True)
        np.testing.assert_allclose(np.array(got.out), want.out, rtol=1e-6)
        np.testing.assert_allclose(np.array(got.lse), want.lse, rtol=1e-6)


SHAPES = (((0, 4), (3, 4), (3, 2)), ((3, 4), (0, 4), (0, 2)), ((0, 4), (0, 4), (0, 2)), ((5, 0), (4, 0), (4, 2)), ((5, 3), (4, 3), (4, 0)),
          ((0, 2, 3), (0, 4, 3), (0, 4, 2)))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_there(shapes, causal):
    q, k, v = (RNG.standard_normal(shape) for shape in shapes)
    assert_forward(FORWARD, {"q": q, "k": k, "v": v}, {"causal": causal})
    arrays = {"q": q, "k": k, "v": v, "do": RNG.standard_normal((*q.shape[:-1], v.shape[-1]))}
    assert_agrees(BACKWARD, arrays, {"causal": causal})
    assert_gradients(FORWARD, arrays, {"causal": causal})


def test_leading_axes_broadcast():
    q, k, v = RNG.standard_normal((3, 1, 5, 3)), RNG.standard_normal((2, 6, 3)), RNG.standard_normal((6, 2))
    bias, mask = RNG.standard_normal((4, 1, 1, 5, 6)), RNG.random((4, 1, 2, 1, 6)) < 0.7
    for extra in ({"bias": bias}, {"mask": mask}):
        assert_agrees(FORWARD, {"q": q, "k": k, "v": v, **extra})
        assert_agrees(BACKWARD, {"q": q, "k": k, "v": v, "do": RNG.standard_normal((4, 3, 2, 5, 2)), **extra})
    assert_agrees(BACKWARD, {"q": q, "k": k, "v": v, "do": RNG.standard_normal((5, 2))})
    assert_agrees(BACKWARD, {"q": q[0, 0], "k": k[0], "v": v, "do": RNG.standard_normal((3, 5, 2))})


def test_small_weights_underflow_gradually_or_to_zero():
    """A weight below the smallest normal number may be 0, as on a GPU, and no more is lost."""
    out = mlx_backend.scaled_dot_product_attention([[1.0]], [[0.0], [-85.0], [-95.0]], np.eye(3), scale=1.0)
    np.testing.assert_allclose(np.array(out)[0], [1, np.exp(-85.0), 0], rtol=2e-5, atol=2.0**-126)


def test_second_derivatives():
    """The gradient of |dq|^2 along a direction, by central differences of the reference's backward."""
    arrays = {key: RNG.standard_normal(shape) for key, shape in (("q", (3, 2)), ("k", (4, 2)), ("v", (4, 2)), ("do", (3, 2)))}
    mask = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]], bool)

    def size(q):
        def forward(q):
            out = mlx_backend.scaled_dot_product_attention(q, *(mx.array(arrays[x], mx.float32) for x in "kv"), mask=mx.array(mask))
            return mx.sum(out * mx.array(arrays["do"], mx.float32))
        return mx.sum(mx.grad(forward)(q) ** 2)

    direction = RNG.standard_normal((3, 2))
    got = np.sum(np.array(mx.grad(size)(mx.array(arrays["q"], mx.float32))) * direction)
    backward = reference.scaled_dot_product_attention_backward
    ahead, behind = (np.sum(backward(**{**arrays, "q": arrays["q"] + step * direction}, mask=mask).dq ** 2) for step in (1e-6, -1e-6))
    np.testing.assert_allclose(got, (ahead - behind) / 2e-6, rtol=1e-4)
