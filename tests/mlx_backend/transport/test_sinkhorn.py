"""Graphs of Sinkhorn plans and attention: half-steps, masks, stops, and their gradients three ways."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import mlx.core as mx
from mlx_agreement import DTYPES, assert_agrees, assert_close, assert_derivatives, assert_gradients, compiled, mapped, traced

from attnspec import mlx_backend, reference
from attnspec.conformance.verify import as_float64

RNG = np.random.default_rng(0)
PLAN, BACKWARD, UNBALANCED = "sinkhorn_plan", "sinkhorn_plan_backward", "sinkhorn_unbalanced_plan"
NAME, NAME_BACKWARD = "sinkhorn_attention", "sinkhorn_attention_backward"
SIZES = ((7, 5), (70, 130))


def drawn(n, m, d=4, e=3, lead=()):
    shapes = {"q": (n, d), "k": (m, d), "v": (m, e), "do": (n, e)}
    return {name: RNG.standard_normal(lead + shape) for name, shape in shapes.items()}


def masks(m, lead=()):
    mask = RNG.random((*lead, m)) < 0.6
    mask[..., 0] = True
    return ({}, {"key_mask": mask})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, m", SIZES)
def test_plans(n, m, dtype):
    scores = {"scores": 2 * RNG.standard_normal((2, n, m))}
    for options in ({}, {"n_iters": 1}, {"n_iters": 4}, {"eps": 0.3}, {"key_marginal": "all", "n_iters": 2}, {"n_iters": 20}):
        for mask in masks(m, (2,)):
            assert_agrees(PLAN, {**scores, **mask}, options, dtype)
            assert_agrees(UNBALANCED, {**scores, **mask}, {**options, "rho": 2.0}, dtype)
            if options.get("n_iters") != 20:
                backward = {**scores, **mask, "dplan": RNG.standard_normal((n, m))}
                assert_agrees(BACKWARD, backward, options, dtype)
                assert_agrees(BACKWARD, backward, {**options, "gradient": "detached"}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, m", SIZES)
def test_attention(n, m, dtype):
    arrays = drawn(n, m, lead=(2,))
    qkv = {key: arrays[key] for key in "qkv"}
    forms = ({}, {"cost": "squared_distance"}, {"output_scaling": "cols", "n_iters": 2}, {"output_scaling": "none"}, {"scale": -0.7})
    for options in forms:
        for mask in masks(m):
            assert_agrees(NAME, {**qkv, **mask}, options, dtype)
            assert_agrees(NAME_BACKWARD, {**arrays, **mask}, options, dtype)
    assert_agrees(NAME_BACKWARD, arrays, {"gradient": "detached"}, dtype)


def test_gradients_of_the_graph_are_those_in_reverse():
    for n, m in SIZES:
        arrays = drawn(n, m)
        for options in ({}, {"n_iters": 4, "eps": 0.5}, {"cost": "squared_distance"}):
            for mask in masks(m):
                assert_gradients(NAME, {**arrays, **mask}, options)
        scores = RNG.standard_normal((n, m))
        for mask in masks(m):
            assert_derivatives(PLAN, {"scores": scores, **mask}, {"n_iters": 4})
            assert_derivatives(UNBALANCED, {"scores": scores, **mask}, {"n_iters": 4, "rho": 1.0})


@pytest.mark.parametrize("through", [compiled, traced, mapped])
def test_transformations(through):
    arrays = {**drawn(7, 5, lead=(3,)), "key_mask": np.broadcast_to(np.arange(5) != 2, (3, 5))}
    assert_agrees(NAME, {key: x for key, x in arrays.items() if key != "do"}, {"n_iters": 1}, through=through)
    if through is not compiled:
        assert_agrees(NAME_BACKWARD, arrays, {"cost": "squared_distance"}, through=through)
        assert_gradients(NAME, arrays, {"cost": "squared_distance"}, through=through)


@pytest.mark.parametrize("tol", [1e-3, 1e-2, 1e9])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_stops(tol, lead):
    """As many half-steps as the reference makes, and what those leave."""
    scores = RNG.standard_normal((*lead, 6, 8)).astype(np.float32)
    options = {"tol": tol, "n_iters": 50, "return_info": True}
    want = reference.sinkhorn_plan(scores, **options)
    got = mlx_backend.sinkhorn_plan(mx.array(scores), **options)
    assert int(got.n_iters) == want.n_iters
    for key in ("plan", "u", "v"):
        np.testing.assert_allclose(np.array(getattr(got, key)), getattr(want, key), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(float(got.error), want.error, rtol=1e-2, atol=1e-6)


def test_stops_in_a_traced_graph():
    """Each example of a batch stops by itself under mx.vmap."""
    scores, options = RNG.standard_normal((4, 6, 8)).astype(np.float32), {"tol": 0.05, "n_iters": 12, "return_info": True}
    got = mx.vmap(lambda x: tuple(mlx_backend.sinkhorn_plan(x, **options)))(mx.array(scores))
    for i, one in enumerate(scores):
        want = reference.sinkhorn_plan(one, **options)
        assert int(got[3][i]) == want.n_iters
        np.testing.assert_allclose(np.array(got[0][i]), want.plan, rtol=2e-5)
    assert len(set(np.array(got[3]).tolist())) > 1


def test_potentials_and_marginals():
    scores = RNG.standard_normal((5, 4)).astype(np.float32)
    for T in (1, 2, 5):
        for name in (PLAN, UNBALANCED):
            want = getattr(reference, name)(scores, n_iters=T, return_info=True)
            got = getattr(mlx_backend, name)(scores, n_iters=T, return_info=True)
            assert got.n_iters == want.n_iters
            for key in ("plan", "u", "v", "error"):
                np.testing.assert_allclose(np.array(getattr(got, key)), getattr(want, key), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["masked key", "masked value", "infinite masked key", "infinite masked value"])
def test_what_is_not_finite_stays_behind_its_mask(place):
    arrays = drawn(7, 5)
    x = arrays["v" if "value" in place else "k"]
    x[2] = np.inf if "infinite" in place else np.nan
    masked = {**arrays, "key_mask": np.arange(5) != 2}
    for options in ({}, {"n_iters": 2, "cost": "squared_distance"}):
        assert_agrees(NAME, {key: x for key, x in masked.items() if key != "do"}, options)
        for key, ours in zip("qkv", gradients(masked, options), strict=True):
            theirs = getattr(reference.sinkhorn_attention_backward(**masked, **options), f"d{key}")
            assert_close(f"{place} d{key}", as_float64(ours), theirs, 1e-5 * (1 + np.abs(theirs)))
        got = mlx_backend.sinkhorn_attention_backward(**masked, **options)
        for ours, theirs in zip(got[:3], reference.sinkhorn_attention_backward(**masked, **options)[:3], strict=True):
            assert_close(place, as_float64(ours), theirs, 1e-5 * (1 + np.abs(theirs)))


def gradients(arrays, options):
    q, k, v, do = (mx.array(arrays[key], mx.float32) for key in ("q", "k", "v", "do"))
    mask = mx.array(arrays["key_mask"])
    return mx.grad(lambda *x: mx.sum(mlx_backend.sinkhorn_attention(*x, key_mask=mask, **options) * do), argnums=(0, 1, 2))(q, k, v)


def test_special_scores():
    """-inf removes an entry; a row or column of them has no mass; NaN makes what it meets NaN; nothing at all is empty."""
    scores = RNG.standard_normal((5, 4))
    for at in ((1, 2), 1, (slice(None), 2), slice(None)):
        special = scores.copy()
        special[at] = -np.inf
        for T in (1, 2, 3):
            want = reference.sinkhorn_plan(special, n_iters=T)
            got = mlx_backend.sinkhorn_plan(special, n_iters=T)
            assert_close(str(at), as_float64(got), want, 1e-6)
            gradient = mx.grad(lambda x: mx.sum(mlx_backend.sinkhorn_plan(x, n_iters=T) ** 2))(mx.array(special, mx.float32))  # noqa: B023
            theirs = reference.sinkhorn_plan_backward(special, 2 * want, n_iters=T)
            assert_close(f"gradient {at}", as_float64(gradient), theirs, 1e-6)
    scores[1, 1] = np.nan
    assert_close("nan", as_float64(mlx_backend.sinkhorn_plan(scores, n_iters=1)), reference.sinkhorn_plan(scores, n_iters=1), 1e-6)
    for n, m in ((0, 3), (3, 0), (0, 0)):
        empty = {key: x for key, x in drawn(n, m).items() if key != "do"}
        assert mlx_backend.sinkhorn_attention(**empty).shape == reference.sinkhorn_attention(**empty).shape
        assert not np.array(mlx_backend.sinkhorn_attention(**empty)).any()


def test_refusals():
    x = np.ones((2, 2))
    with pytest.raises(ValueError, match="causal: expected False"):
        mlx_backend.sinkhorn_attention(x, x, x, causal=True)
    with pytest.raises(ValueError, match="gradient: the MLX twin lacks 'implicit'"):
        mlx_backend.sinkhorn_plan_backward(x, x, gradient="implicit")
    for option in ({"eps": 0}, {"n_iters": 0}, {"tol": -1}, {"key_marginal": "some"}):
        with pytest.raises(ValueError, match=next(iter(option))):
            mlx_backend.sinkhorn_plan(x, **option)
