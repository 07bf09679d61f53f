"""Sinkhorn attention, streamed and with a scratch matrix, and plans: every option of the reference, and problems that overflow naively."""

import numpy as np
import pytest
from agreement import assert_same

import attnspec
from attnspec import numba_kernels, reference
from attnspec.numba_kernels.transport import sinkhorn

RNG = np.random.default_rng(0)
SIZES = ((7, 5, 4, 3), (130, 210, 9, 6))


def drawn(n, m, d, e):
    return {"q": RNG.standard_normal((2, 3, n, d)), "k": RNG.standard_normal((3, m, d)), "v": RNG.standard_normal((3, m, e))}


def options_of(m):
    mask = RNG.random((2, 1, m)) < 0.7
    yield from ({"n_iters": t} for t in (1, 2, 3))
    yield from ({"n_iters": 5, "eps": 0.1}, {"n_iters": 6, "eps": 0.05}, {"n_iters": 7, "scale": 40.0})
    yield from ({"n_iters": 4, "key_mask": mask}, {"n_iters": 5, "key_mask": mask[0, 0], "key_marginal": "all", "output_scaling": "cols"})
    yield from ({"n_iters": t, "output_scaling": "cols", "key_mask": mask} for t in (3, 4))
    yield from ({"n_iters": t, "key_mask": np.zeros(m, bool)} for t in (3, 4))
    yield from ({"n_iters": 3, "cost": "squared_distance"}, {"n_iters": 4, "cost": "squared_distance", "output_scaling": "none"})
    yield from ({"n_iters": 50, "tol": 1e-3}, {"n_iters": 51, "tol": 1e-3, "cost": "squared_distance"})


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_streams_or_keeps_a_matrix(sizes):
    arrays = drawn(*sizes)
    for options in options_of(sizes[1]):
        assert_same("sinkhorn_attention", arrays, {**options, "return_weights": True})
        want = reference.sinkhorn_attention(**arrays, **options, return_weights=True)
        out, weights = sinkhorn.attention(**arrays, **options, return_weights=True, scratch_bytes=0)
        np.testing.assert_allclose(out, want.out, rtol=1e-9, atol=1e-11, err_msg=str(list(options)))
        np.testing.assert_allclose(weights, want.weights, rtol=1e-9, atol=1e-11, err_msg=str(list(options)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_attention(sizes):
    arrays = {**drawn(*sizes), "do": RNG.standard_normal((3, sizes[0], sizes[3]))}
    for options in options_of(sizes[1]):
        if "tol" not in options:
            for gradient in ("unrolled", "detached"):
                assert_same("sinkhorn_attention_backward", arrays, {**options, "gradient": gradient})


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_plans(sizes):
    n, m = sizes[:2]
    holes = RNG.random((2, n, m)) < 0.3
    for S in (RNG.standard_normal((2, n, m)), 40 * RNG.standard_normal((n, m)), np.where(holes, -np.inf, RNG.standard_normal((2, n, m)))):
        arrays = {"scores": S, "dplan": RNG.standard_normal((2, n, m))}
        for options in ({"n_iters": 1}, {"n_iters": 4, "eps": 0.5}, {"n_iters": 5, "gradient": "detached"},
                        {"n_iters": 4, "key_mask": RNG.random((2, m)) < 0.7}):
            assert_same("sinkhorn_plan_backward", arrays, options)


def test_gradients_at_masked_keys_are_zero_whatever_stands_there():
    arrays = {**drawn(7, 6, 4, 3), "do": RNG.standard_normal((3, 7, 3))}
    arrays["k"][:, 4:], arrays["v"][:, 4:] = np.nan, np.inf
    for cost in ("dot", "squared_distance"):
        assert_same("sinkhorn_attention_backward", arrays, {"key_mask": np.arange(6) < 4, "cost": cost})


def test_the_implicit_gradient_is_the_reference_s():
    arrays = {"scores": RNG.standard_normal((4, 3)), "dplan": RNG.standard_normal((4, 3))}
    with pytest.raises(ValueError, match=r"^gradient: 'implicit' has no twin"):
        numba_kernels.sinkhorn_plan_backward(**arrays, gradient="implicit")
    assert attnspec.select("sinkhorn_plan_backward", options={"gradient": "implicit"}).backend == "reference"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scores", ["normal", "peaky", "holes", "huge"])
def test_plans(sizes, scores):
    n, m = sizes[:2]
    S = {"normal": 1.0, "peaky": 40.0, "holes": 1.0, "huge": 1e6}[scores] * RNG.standard_normal((2, n, m))
    S = np.where(RNG.random(S.shape) < 0.3, -np.inf, S) if scores == "holes" else S
    mask = RNG.random((2, m)) < 0.7
    for options in ({"n_iters": 1}, {"n_iters": 4}, {"n_iters": 5}, {"n_iters": 40, "tol": 1e-2}, {"n_iters": 4, "key_mask": mask},
                    {"n_iters": 4, "key_mask": mask, "key_marginal": "all"}):
        atol = 1e-9 if scores == "huge" else 1e-10
        assert_same("sinkhorn_plan", {"scores": S}, {**options, "return_info": True}, atol=atol)
        assert_same("sinkhorn_unbalanced_plan", {"scores": S}, {**options, "rho": 2.0, "return_info": True}, atol=atol)


def test_distances_do_not_depend_on_masked_keys():
    """A float32 distance is exact around the middle of the keys; padding far away must not move that middle."""
    arrays = {name: x.astype(np.float32) for name, x in drawn(7, 6, 4, 3).items()}
    mask, options = np.arange(6) < 4, {"cost": "squared_distance", "n_iters": 3}
    want = numba_kernels.sinkhorn_attention(**arrays, **options, key_mask=mask)
    arrays["k"][:, 4:], arrays["v"][:, 4:] = 1e6, np.nan
    np.testing.assert_array_equal(numba_kernels.sinkhorn_attention(**arrays, **options, key_mask=mask), want)


def test_a_column_that_underflows_is_summed_again():
    """In float32 every weight of the last column is below 2^-149 at first; its potential is found all the same."""
    S = np.zeros((40, 17), np.float32)
    S[:, -1] = -200
    plan = numba_kernels.sinkhorn_plan(S, n_iters=2)
    np.testing.assert_allclose(plan.sum(axis=0), 1 / 17, rtol=1e-5)


def test_nothing_there():
    for n, m in ((0, 3), (3, 0), (0, 0)):
        assert_same("sinkhorn_plan", {"scores": np.zeros((2, n, m))}, {"return_info": True})
        assert_same("sinkhorn_attention", drawn(n, m, 4, 2))


def test_refusals():
    arrays = drawn(3, 4, 2, 2)
    wrong = {"causal": True, "eps": 0, "n_iters": 0, "cost": "l1", "output_scaling": "both", "key_marginal": "some", "tol": -1}
    for options in ({name: value} for name, value in wrong.items()):
        with pytest.raises(ValueError, match=next(iter(options))) as theirs:
            reference.sinkhorn_attention(**arrays, **options)
        with pytest.raises(ValueError, match=next(iter(options))) as ours:
            numba_kernels.sinkhorn_attention(**arrays, **options)
        assert str(ours.value) == str(theirs.value)
