import math

import numpy as np
import pytest
from scipy.optimize import minimize

import attnspec

RNG = np.random.default_rng(0)
scores = RNG.standard_normal((2, 4, 6))
KEYS = np.array([True, False, True, True, False, True])


def in_loops(S, steps, eps, rho):
    n, m = S.shape
    u, v = [0.0] * n, [0.0] * m
    for t in range(steps):
        if t % 2 == 0:
            u = [eps * (-math.log(n) - math.log(sum(math.exp((S[i, j] + v[j]) / eps) for j in range(m)))) for i in range(n)]
        else:
            v = [rho / (rho + eps) * eps * (-math.log(m) - math.log(sum(math.exp((S[i, j] + u[i]) / eps) for i in range(n))))
                 for j in range(m)]
    return np.array([[math.exp((S[i, j] + u[i] + v[j]) / eps) for j in range(m)] for i in range(n)])


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize("eps, rho", [(1.0, 10.0), (0.5, 0.3)])
def test_against_loops(steps, eps, rho):
    got = attnspec.sinkhorn_unbalanced_plan(scores, n_iters=steps, eps=eps, rho=rho)
    np.testing.assert_allclose(got, [in_loops(S, steps, eps, rho) for S in scores], rtol=1e-13)


def test_by_hand():
    # Rows [1/8, 3/8], [1/4, 1/4]; columns sum to 3/8 and 5/8 and are moved half of the way (in logarithms) to 1/2.
    P = attnspec.sinkhorn_unbalanced_plan(np.log([[1.0, 3.0], [1.0, 1.0]]), n_iters=2, rho=1.0)
    factor = np.sqrt([4 / 3, 4 / 5])
    np.testing.assert_allclose(P, factor * [[1 / 8, 3 / 8], [1 / 4, 1 / 4]], rtol=1e-14)


def test_limit_minimises_the_relaxed_problem():
    # Rows fixed at 1/n, over P = softmax(x) / n: -<P, S> + eps sum P log P + rho KL(columns | 1/m).
    S, eps, rho = scores[0], 0.8, 1.3

    def value(x):
        P = np.exp(x.reshape(4, 6))
        P = P / P.sum(1, keepdims=True) / 4
        columns = P.sum(0)
        return np.sum(-P * S + eps * P * np.log(P)) + rho * np.sum(columns * np.log(columns * 6) - columns + 1 / 6)

    best = minimize(value, np.zeros(24), method="BFGS", options={"gtol": 1e-9})
    P = attnspec.sinkhorn_unbalanced_plan(S, n_iters=2001, eps=eps, rho=rho)
    np.testing.assert_allclose(value(np.log(P).ravel()), best.fun, rtol=1e-10)
    x = np.exp(best.x.reshape(4, 6))
    np.testing.assert_allclose(P, x / x.sum(1, keepdims=True) / 4, atol=1e-6)


def test_tends_to_the_balanced_plan():
    balanced = attnspec.sinkhorn_plan(scores, n_iters=4)
    distances = [np.abs(attnspec.sinkhorn_unbalanced_plan(scores, n_iters=4, rho=rho) - balanced).max() for rho in (1e2, 1e4, 1e6)]
    assert distances[0] > 50 * distances[1] > 2500 * distances[2] > 0


def test_default_rho_is_ten():
    np.testing.assert_array_equal(attnspec.sinkhorn_unbalanced_plan(scores), attnspec.sinkhorn_unbalanced_plan(scores, rho=10.0))


def test_masked_keys_are_removed_and_their_scores_do_not_matter():
    spoilt = np.where(KEYS, scores, np.nan)
    got = attnspec.sinkhorn_unbalanced_plan(spoilt, n_iters=4, rho=2.0, key_mask=KEYS)
    np.testing.assert_allclose(got[..., KEYS], attnspec.sinkhorn_unbalanced_plan(scores[..., KEYS], n_iters=4, rho=2.0), rtol=1e-13)
    np.testing.assert_array_equal(got[..., ~KEYS], np.zeros((2, 4, 2)))


def test_key_marginal_all_draws_columns_to_one_over_m():
    result = attnspec.sinkhorn_unbalanced_plan(scores, n_iters=2, rho=2.0, key_mask=KEYS, key_marginal="all", return_info=True)
    np.testing.assert_allclose(result.plan.sum(-2), np.where(KEYS, np.exp(-result.v / 2.0) / 6, 0.0), rtol=1e-13)


def test_tol_and_info():
    result = attnspec.sinkhorn_unbalanced_plan(scores, n_iters=500, tol=1e-6, return_info=True)
    assert 3 < result.n_iters < 500
    assert result.error < 1e-6
    np.testing.assert_array_equal(result.plan, attnspec.sinkhorn_unbalanced_plan(scores, n_iters=result.n_iters))
    np.testing.assert_allclose(result.plan, np.exp(scores + result.u[..., :, None] + result.v[..., None, :]), rtol=1e-13)


def test_one_key_and_huge_scores():
    np.testing.assert_allclose(attnspec.sinkhorn_unbalanced_plan(np.ones((3, 1)), n_iters=3), np.full((3, 1), 1 / 3), rtol=1e-15)
    P = attnspec.sinkhorn_unbalanced_plan([[1e4, -1e4], [-1e4, 1e4]], n_iters=3)
    np.testing.assert_array_equal(P, [[0.5, 0.0], [0.0, 0.5]])


@pytest.mark.parametrize("size", [1e4, 1e16, 1e300])
def test_scores_that_swallow_the_potentials(size):
    # Rows (1, 0), (1/2, 1/2), by 1/2; columns (3/4, 1/4) moved half of the way to (1/2, 1/2) where rho = eps; rows again.
    S = np.array([[size, 0.0], [0.0, 0.0]])
    r = np.sqrt([2 / 3, 2.0])
    np.testing.assert_allclose(attnspec.sinkhorn_unbalanced_plan(S, n_iters=2, rho=1.0), [[r[0] / 2, 0.0], r / 4], rtol=1e-14)
    np.testing.assert_allclose(attnspec.sinkhorn_unbalanced_plan(S, n_iters=3, rho=1.0), [[0.5, 0.0], r / r.sum() / 2], rtol=1e-14)


@pytest.mark.parametrize("rho", [0.0, 1e-310, 1.0, 1e308, np.inf])
def test_eps_and_scores_at_the_ends_of_the_range(rho):
    P = attnspec.sinkhorn_unbalanced_plan([[1e308, 0.0], [-1e308, 0.0]], n_iters=3, eps=1e-310, rho=rho)
    np.testing.assert_array_equal(P, [[0.5, 0.0], [0.0, 0.5]])


@pytest.mark.parametrize("n, m", [(0, 3), (3, 0)])
def test_no_queries_or_no_keys(n, m):
    np.testing.assert_array_equal(attnspec.sinkhorn_unbalanced_plan(np.ones((n, m)), n_iters=4), np.zeros((n, m)))


@pytest.mark.parametrize("option, value, message", [
    ("rho", -1.0, "^rho: expected a number >= 0, got -1.0$"),
    ("n_iters", 0, "^n_iters: expected a whole number >= 1, got 0$"),
    ("eps", 0, "^eps: expected a number > 0, got 0$"),
    ("key_marginal", "m", "^key_marginal: expected 'valid' or 'all', got 'm'$"),
])
def test_wrong_options_are_refused(option, value, message):
    with pytest.raises(ValueError, match=message):
        attnspec.sinkhorn_unbalanced_plan(scores, **{option: value})
