"""Tiles of softmax attention and of its gradients against the reference: every option, sizes that cross tiles, and what is not finite."""

import numpy as np
import pytest

from attnspec import numba_kernels, reference
from attnspec.conformance.bounds import bound

RNG = np.random.default_rng(0)
SIZES = ((7, 5, 4, 3), (130, 600, 17, 9), (61, 64, 16, 16))


def options_of(n, m):
    """Each option by itself, and those that meet in one tile."""
    yield {}
    yield from ({"causal": True}, {"causal": "top-left"}, {"causal": "top-left", "window": (3, 2)})
    yield from ({"window": (40, None)}, {"window": (0, 0)}, {"scale": -2.0}, {"scale": 0.0})
    yield from ({"softcap": 1.5}, {"softcap": 0}, {"softcap": np.inf})
    shapes = ((n, m), (2, 4, n, m), (4, 1, m), (n, 1), (m,), ())
    yield from ({"bias": RNG.standard_normal(shape)} for shape in shapes)
    yield {"bias": RNG.standard_normal((4, n, m)), "softcap": 2.0, "causal": True}
    yield {"bias": np.where(RNG.random((n, m)) < 0.5, -np.inf, RNG.standard_normal((n, m)))}
    yield from ({"mask": RNG.random(shape) < 0.6} for shape in shapes)
    yield {"mask": np.zeros((n, m), bool)}
    yield from ({"sink": sink} for sink in (RNG.standard_normal(4), np.float64(1.0), np.array([np.nan, 0, np.inf, -np.inf])))
    yield {"mask": np.zeros((n, m), bool), "sink": np.array([np.nan, 0, np.inf, -np.inf])}


def assert_same(name, *arrays, **options):
    """The twin's float64 results, all of them, are the reference's up to rounding; NaN and infinity stand in the same places."""
    got = getattr(numba_kernels, name)(*arrays, **options)
    want = getattr(reference, name)(*arrays, **options)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12, err_msg=f"{name}, {list(options)}")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_every_option(sizes, key_heads):
    n, m, d, e = sizes
    q, do = RNG.standard_normal((2, 4, n, d)), RNG.standard_normal((2, 4, n, e))
    k, v = RNG.standard_normal((2, key_heads, m, d)), RNG.standard_normal((2, key_heads, m, e))
    for options in options_of(n, m):
        gqa = {"enable_gqa": key_heads != 4}
        assert_same("scaled_dot_product_attention", q, k, v, **options, **gqa, return_weights=True, return_lse=True)
        assert_same("scaled_dot_product_attention_backward", q, k, v, do, **options, **gqa)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("place", ["value", "key", "query", "cotangent", "infinite value", "infinite key", "value seen by some"])
def test_what_is_not_finite_stays_behind_its_mask(sizes, place):
    n, m, d, e = sizes
    q, k, v, do = (RNG.standard_normal((2, *shape)) for shape in ((n, d), (m, d), (m, e), (n, e)))
    mask = RNG.random((n, m)) < 0.7
    if place == "value seen by some":
        v[0, 2, 0], v[1, 3] = np.nan, np.inf
        mask[: n // 2, 2:4] = False
    elif "value" in place or "key" in place:
        x = v if "value" in place else k
        x[:, 1] = np.inf if "infinite" in place else np.nan
        mask[:, 1] = False
    else:
        x = q if place == "query" else do
        x[:, 3] = np.nan
        mask[3] = False
    assert_same("scaled_dot_product_attention", q, k, v, mask=mask, return_weights=True, return_lse=True)
    assert_same("scaled_dot_product_attention_backward", q, k, v, do, mask=mask)
    assert_same("scaled_dot_product_attention", q, k, v, causal=True, return_weights=True, return_lse=True)
    assert_same("scaled_dot_product_attention_backward", q, k, v, do, causal=True)


@pytest.mark.parametrize("shapes", [((0, 4), (3, 4), (3, 2)), ((3, 4), (0, 4), (0, 2)), ((0, 4), (0, 4), (0, 2)), ((5, 0), (4, 0), (4, 2)),
                                    ((5, 3), (4, 3), (4, 0)), ((0, 2, 3), (0, 4, 3), (0, 4, 2))], ids=str)
def test_nothing_there(shapes):
    q, k, v = (RNG.standard_normal(shape) for shape in shapes)
    assert_same("scaled_dot_product_attention", q, k, v, return_weights=True, return_lse=True)
    assert_same("scaled_dot_product_attention_backward", q, k, v, RNG.standard_normal((*q.shape[:-1], v.shape[-1])))


def test_leading_axes_broadcast():
    q, k, v = RNG.standard_normal((3, 1, 5, 3)), RNG.standard_normal((2, 6, 3)), RNG.standard_normal((6, 2))
    bias = RNG.standard_normal((4, 1, 1, 5, 6))
    assert_same("scaled_dot_product_attention", q, k, v, bias=bias, return_weights=True)
    assert_same("scaled_dot_product_attention_backward", q, k, v, RNG.standard_normal((4, 3, 2, 5, 2)), bias=bias)
    assert_same("scaled_dot_product_attention_backward", q, k, v, RNG.standard_normal((5, 2)))


@pytest.mark.parametrize("kind", ["normal", "peaky", "offset", "huge"])
def test_float32_across_tiles_within_the_bound(kind):
    """Sizes of several tiles and chunks, judged by the bound of the formula: the sums are in chains no longer than it allows."""
    n, m, d, e = 200, 1500, 40, 24
    q, k, v, do = (RNG.standard_normal(shape).astype(np.float32) for shape in ((n, d), (m, d), (m, e), (n, e)))
    q *= np.float32({"peaky": 16, "huge": 300}.get(kind, 1))
    v += np.float32(30 if kind == "offset" else 0)
    for name, arrays in (("scaled_dot_product_attention", {"q": q, "k": k, "v": v}),
                         ("scaled_dot_product_attention_backward", {"q": q, "k": k, "v": v, "do": do})):
        for causal in (False, True):
            exact = {key: x.astype(np.float64) for key, x in arrays.items()}
            record = getattr(reference, name).record
            limits = bound(record, exact, {"causal": causal}, "float32")
            want, got = getattr(reference, name)(**exact, causal=causal), getattr(numba_kernels, name)(**arrays, causal=causal)
            for key, limit in limits.items():
                error = np.abs((got if key == "out" else getattr(got, key)) - (want if key == "out" else getattr(want, key)))
                assert np.all(error <= limit), f"{name} {key}: {np.max(error / limit):.2f} of its bound"


def test_small_weights_underflow_gradually():
    """A value that only a tiny weight carries arrives, down to the smallest subnormal number."""
    logits = np.array([[0.0], [-95.0], [-103.0], [-110.0]], np.float32)
    values = np.diag([0, 1, 1, 1]).astype(np.float32)
    out = numba_kernels.scaled_dot_product_attention(np.ones((1, 1), np.float32), logits, values, scale=1.0)
    smallest = 2.0**-149
    np.testing.assert_allclose(out[0], [0, np.exp(-95.0), np.exp(-103.0), 0], rtol=0, atol=smallest)
    assert out[0, 1] > 0
    assert out[0, 2] > 0
