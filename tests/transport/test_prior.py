import math

import numpy as np
import pytest
from scipy.optimize import minimize

import attnspec

RNG = np.random.default_rng(0)
q, k, v = (RNG.standard_normal((2, 3, size, width)) for size, width in ((4, 5), (6, 5), (6, 2)))
prior = RNG.standard_normal((4, 6))


def test_by_hand():
    # Scores (0, log 9) at tau = 2 weigh 1 : 3, the prior 2 : 1, together 2 : 3.
    result = attnspec.prior_attention([[1.0]], [[0.0], [np.log(9.0)]], [[0.0], [10.0]], np.log([2.0, 1.0]), tau=2.0, return_weights=True)
    np.testing.assert_allclose(result.weights, [[0.4, 0.6]], rtol=1e-14)
    np.testing.assert_allclose(result.out, [[6.0]], rtol=1e-14)


@pytest.mark.parametrize("tau, scale", [(1.0, None), (0.4, None), (3.0, 0.7)])
def test_against_loops(tau, scale):
    out = attnspec.prior_attention(q, k, v, prior, tau=tau, scale=scale)
    for i in range(4):
        e = [math.exp((scale or 5 ** -0.5) * float(q[1, 2, i] @ k[1, 2, j]) / tau + prior[i, j]) for j in range(6)]
        want = [sum(e[j] * v[1, 2, j, c] for j in range(6)) / sum(e) for c in range(2)]
        np.testing.assert_allclose(out[1, 2, i], want, rtol=1e-13)


def test_weights_minimise_the_objective():
    s, tau = RNG.standard_normal(5), 0.6
    pi = RNG.dirichlet(np.ones(5))

    def value(x):
        p = np.exp(x) / np.exp(x).sum()
        return np.sum(-p * s + tau * p * np.log(p / pi))

    best = minimize(value, np.zeros(5), method="BFGS", options={"gtol": 1e-9})
    p = attnspec.prior_attention([[1.0]], s[:, None], np.ones((5, 1)), np.log(pi), tau=tau, scale=1.0, return_weights=True).weights[0]
    np.testing.assert_allclose(p, np.exp(best.x) / np.exp(best.x).sum(), atol=1e-7)


def test_prior_is_not_divided_by_tau():
    weights = attnspec.prior_attention(np.zeros((1, 5)), k, v, np.log([1.0, 2, 3, 4, 5, 5]), tau=7.0, return_weights=True).weights
    np.testing.assert_allclose(weights[0, 0, 0], np.array([1, 2, 3, 4, 5, 5]) / 20, rtol=1e-14)


def test_small_tau_takes_the_largest_score():
    p = attnspec.prior_attention(q, k, v, prior, tau=1e-4, return_weights=True).weights
    np.testing.assert_array_equal(p.argmax(-1), (q @ np.swapaxes(k, -1, -2)).argmax(-1))
    np.testing.assert_allclose(p.max(-1), np.ones((2, 3, 4)), rtol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (6,), (4, 1), (3, 1, 6), (2, 3, 4, 6)])
def test_prior_broadcasts(shape):
    log_prior = RNG.standard_normal(shape)
    want = attnspec.scaled_dot_product_attention(q, k, v, bias=np.broadcast_to(log_prior, (2, 3, 4, 6)))
    np.testing.assert_allclose(attnspec.prior_attention(q, k, v, log_prior), want, rtol=1e-13)


class TestSpecialValues:
    def test_prior_of_zero_is_a_masked_key_and_hides_what_stands_there(self):
        log_prior = np.array([[0.0, -np.inf], [0.0, 0.0], [-np.inf, -np.inf]])
        keys, values = np.ones((2, 1)), np.array([[3.0], [np.nan]])
        keys[1] = np.inf
        out = attnspec.prior_attention(np.ones((1, 1)), keys, values, log_prior[:1], return_weights=True)
        np.testing.assert_array_equal(out.out, [[3.0]])
        np.testing.assert_array_equal(out.weights, [[1.0, 0.0]])
        out = attnspec.prior_attention(np.ones((3, 1)), np.ones((2, 1)), values, log_prior)
        np.testing.assert_array_equal(out, [[3.0], [np.nan], [0.0]])

    def test_prior_of_zero_and_mask_are_the_same(self):
        mask = RNG.random((4, 6)) < 0.6
        got = attnspec.prior_attention(q, k, v, np.where(mask, prior, -np.inf), return_weights=True)
        want = attnspec.prior_attention(q, k, v, prior, mask=mask, return_weights=True)
        np.testing.assert_array_equal(got.weights, want.weights)
        np.testing.assert_array_equal(got.out, want.out)

    def test_query_that_sees_nothing_gets_zeros(self):
        mask = np.array([[True, False], [False, False]])
        result = attnspec.prior_attention(np.ones((2, 1)), np.ones((2, 1)), [[3.0], [5.0]], 0.0, mask=mask, return_weights=True)
        np.testing.assert_array_equal(result.out, [[3.0], [0.0]])
        np.testing.assert_array_equal(result.weights, [[1.0, 0.0], [0.0, 0.0]])

    def test_more_queries_than_keys_under_causal(self):
        out = attnspec.prior_attention(np.ones((3, 1)), np.ones((2, 1)), [[2.0], [4.0]], 0.0, causal=True)
        np.testing.assert_array_equal(out, [[0.0], [2.0], [3.0]])
        out = attnspec.prior_attention(np.ones((3, 1)), np.ones((2, 1)), [[2.0], [4.0]], 0.0, causal="top-left")
        np.testing.assert_array_equal(out, [[2.0], [3.0], [3.0]])

    def test_one_key(self):
        np.testing.assert_array_equal(attnspec.prior_attention(np.ones((2, 1)), [[5.0]], [[7.0]], [[-3.0], [1e4]]), [[7.0], [7.0]])

    def test_huge_scores_and_priors(self):
        keys = np.array([[1e4], [0.0]])
        np.testing.assert_array_equal(attnspec.prior_attention([[1.0]], keys, [[1.0], [2.0]], [0.0, 0.0]), [[1.0]])
        np.testing.assert_array_equal(attnspec.prior_attention([[1.0]], keys, [[1.0], [2.0]], [-1e4, 0.0]), [[1.5]])

    def test_tau_at_the_ends_of_the_range(self):
        keys, log_prior = np.array([[2.0], [2.0], [1.0]]), np.log([1.0, 3.0, 4.0])
        for tau, want in ((1e-320, [1 / 4, 3 / 4, 0.0]), (1e300, [1 / 8, 3 / 8, 1 / 2]), (np.inf, [1 / 8, 3 / 8, 1 / 2])):
            p = attnspec.prior_attention([[1e140]], 1e140 * keys, np.ones((3, 1)), log_prior, tau=tau, return_weights=True).weights
            np.testing.assert_allclose(p, [want], rtol=1e-14)

    @pytest.mark.parametrize("tau", [1e-320, 1.0, np.inf])
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e308])
    def test_what_stands_at_a_masked_key_does_not_matter(self, bad, tau):
        keys, mask = k[0, 0].copy(), np.arange(6) != 2
        keys[2] = bad
        np.testing.assert_array_equal(attnspec.prior_attention(q[0, 0], keys, v[0, 0], prior, tau=tau, mask=mask),
                                      attnspec.prior_attention(q[0, 0], k[0, 0], v[0, 0], prior, tau=tau, mask=mask))

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, n, m):
        out = attnspec.prior_attention(np.ones((n, 2)), np.ones((m, 2)), np.ones((m, 5)), np.zeros((n, m)))
        np.testing.assert_array_equal(out, np.zeros((n, 5)))


def test_last_row_is_the_decoding_step():
    for tau in (1.0, 2.5):
        full = attnspec.prior_attention(q, k, v, prior, causal=True, tau=tau)
        step = attnspec.prior_attention(q[..., -1:, :], k, v, prior[-1:], causal=True, tau=tau)
        np.testing.assert_allclose(step, full[..., -1:, :], rtol=1e-13)


def test_grouped_heads_share_keys_with_their_neighbours():
    queries = RNG.standard_normal((4, 3, 5))
    keys, values, priors = RNG.standard_normal((2, 6, 5)), RNG.standard_normal((2, 6, 2)), RNG.standard_normal((4, 3, 6))
    got = attnspec.prior_attention(queries, keys, values, priors, enable_gqa=True)
    want = [attnspec.prior_attention(queries[h], keys[h // 2], values[h // 2], priors[h]) for h in range(4)]
    np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize("option, value, message", [
    ("tau", 0.0, "^tau: expected a number > 0, got 0.0$"),
    ("scale", "x", "^scale: expected a number, got 'x'$"),
    ("causal", "left", "^causal: expected "),
    ("mask", np.ones((4, 5), bool), "^mask: "),
    ("log_prior", np.ones((4, 5)), "^log_prior: expected a shape that broadcasts to "),
])
def test_wrong_options_are_refused(option, value, message):
    with pytest.raises(ValueError, match=message):
        attnspec.prior_attention(**{"q": q, "k": k, "v": v, "log_prior": prior, option: value})
