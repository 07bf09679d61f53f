import numpy as np
import pytest
from scipy.optimize import minimize

import attnspec

RNG = np.random.default_rng(0)
scores = RNG.standard_normal((3, 4, 6))
KEYS = np.array([True, False, True, True, False, True])


def mixture_of_assignments(rng, n):
    """A random plan with exact marginals 1/n: a mixture of permutation matrices."""
    weights = rng.dirichlet(np.ones(5))
    return sum(w * np.eye(n)[rng.permutation(n)] for w in weights) / n


class TestWeakDuality:
    @pytest.mark.parametrize("size", [0.1, 1.0, 10.0, 100.0])
    def test_any_potentials_bound_any_plan(self, size):
        rng = np.random.default_rng(int(size))
        for _ in range(200):
            S, eps = rng.standard_normal((5, 5)), rng.uniform(0.1, 3)
            primal = attnspec.sinkhorn_primal_value(mixture_of_assignments(rng, 5), S, eps=eps)
            assert attnspec.sinkhorn_dual_value(S, size * rng.standard_normal(5), size * rng.standard_normal(5), eps=eps) <= primal

    def test_gap_to_the_optimum_from_both_sides(self):
        S, eps = RNG.standard_normal((5, 5)), 0.5
        best = attnspec.sinkhorn_dual_value(S, *attnspec.sinkhorn_potentials(S, n_iters=2001, eps=eps), eps=eps)
        P = attnspec.sinkhorn_plan(S, n_iters=2001, eps=eps)
        np.testing.assert_allclose(attnspec.sinkhorn_primal_value(P, S, eps=eps), best, rtol=1e-13)
        for weight in (0.5, 0.1):
            other = (1 - weight) * P + weight * mixture_of_assignments(RNG, 5)
            assert attnspec.sinkhorn_primal_value(other, S, eps=eps) > best + 1e-6

    def test_maximum_over_potentials_by_a_general_optimiser(self):
        S, eps = scores[0], 0.7
        best = minimize(lambda x: -attnspec.sinkhorn_dual_value(S, x[:4], x[4:], eps=eps), np.zeros(10), method="BFGS")
        converged = attnspec.sinkhorn_dual_value(S, *attnspec.sinkhorn_potentials(S, n_iters=1001, eps=eps), eps=eps)
        np.testing.assert_allclose(-best.fun, converged, rtol=1e-9)

    def test_without_the_mass_term_there_is_no_bound(self):
        S, P = scores[0], np.full((4, 6), 1 / 24)
        u = np.full(4, 100.0)
        assert u.mean() > attnspec.sinkhorn_primal_value(P, S)         # <mu, u> alone, with v = 0
        assert attnspec.sinkhorn_dual_value(S, u, np.zeros(6)) < -1e40


class TestDualValue:
    def test_by_hand(self):
        # u = (1, 3), v = (2, 4), S = 0, eps = 2: means 2 and 3; exponents (3, 5, 5, 7) / 2.
        want = 2 + 3 + 2 * (1 - np.exp(1.5) - 2 * np.exp(2.5) - np.exp(3.5))
        np.testing.assert_allclose(attnspec.sinkhorn_dual_value(np.zeros((2, 2)), [1.0, 3.0], [2.0, 4.0], eps=2.0), want, rtol=1e-15)

    @pytest.mark.parametrize("n_iters", [1, 2, 5])
    def test_mass_term_is_zero_after_a_half_step(self, n_iters):
        u, v = attnspec.sinkhorn_potentials(scores, n_iters=n_iters, eps=0.5)
        np.testing.assert_allclose(attnspec.sinkhorn_dual_value(scores, u, v, eps=0.5), u.mean(-1) + v.mean(-1), rtol=1e-13)

    def test_overflow_is_minus_infinity(self):
        assert attnspec.sinkhorn_dual_value(scores[0], np.full(4, 1e4), np.zeros(6)) == -np.inf

    def test_masked_keys_count_for_nothing(self):
        S, u, v = scores.copy(), RNG.standard_normal((3, 4)), RNG.standard_normal((3, 6))
        S[..., ~KEYS], v[..., ~KEYS] = np.nan, np.nan
        got = attnspec.sinkhorn_dual_value(S, u, v, key_mask=KEYS)
        np.testing.assert_allclose(got, attnspec.sinkhorn_dual_value(S[..., KEYS], u, v[..., KEYS]), rtol=1e-14)

    def test_with_masked_keys_primal_and_dual_meet(self):
        S = scores[0]
        u, v = attnspec.sinkhorn_potentials(S, n_iters=1001, key_mask=KEYS)
        P = attnspec.sinkhorn_plan(S, n_iters=1001, key_mask=KEYS)
        np.testing.assert_array_equal(v[~KEYS], [0.0, 0.0])
        np.testing.assert_allclose(attnspec.sinkhorn_dual_value(S, u, v, key_mask=KEYS),
                                   attnspec.sinkhorn_primal_value(P, np.where(KEYS, S, -np.inf)), rtol=1e-13)

    def test_entropy_relative_to_the_product_of_the_marginals(self):
        S, eps = scores[0], 0.6
        P = attnspec.sinkhorn_plan(S, n_iters=1001, eps=eps)
        u, v = attnspec.sinkhorn_potentials(S, n_iters=1001, eps=eps)
        relative = np.sum(-P * S + eps * P * np.log(P * 24))           # eps KL(P | mu x nu)
        shifted = (u + eps * np.log(4)).mean() + (v + eps * np.log(6)).mean()
        np.testing.assert_allclose(relative, shifted, rtol=1e-13)
        np.testing.assert_allclose(attnspec.sinkhorn_primal_value(P, S, eps=eps) + eps * np.log(24), relative, rtol=1e-13)

    def test_potentials_shared_by_a_batch(self):
        u, v = RNG.standard_normal(4), RNG.standard_normal(6)
        want = [attnspec.sinkhorn_dual_value(S, u, v) for S in scores]
        np.testing.assert_allclose(attnspec.sinkhorn_dual_value(scores, u, v), want, rtol=1e-14)


class TestPrimalValue:
    def test_by_hand(self):
        # An assignment has entropy log n: -(3 + 5)/2 - 0.5 log 2, whatever stands where the plan is 0.
        value = attnspec.sinkhorn_primal_value([[0.5, 0.0], [0.0, 0.5]], [[3.0, np.nan], [-np.inf, 5.0]], eps=0.5)
        np.testing.assert_allclose(value, -4 - 0.5 * np.log(2), rtol=1e-15)

    def test_mass_at_a_score_of_minus_infinity_costs_infinitely(self):
        assert attnspec.sinkhorn_primal_value([[0.5, 0.5]], [[0.0, -np.inf]]) == np.inf

    def test_negative_plan_is_refused(self):
        with pytest.raises(ValueError, match=r"^plan: expected entries >= 0, got -0.5$"):
            attnspec.sinkhorn_primal_value([[1.5, -0.5]], [[0.0, 0.0]])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_rows_or_no_columns(self, n, m):
        assert attnspec.sinkhorn_primal_value(np.ones((n, m)), np.ones((n, m))) == 0.0


class TestInfinities:
    def test_infinite_eps_is_refused(self):
        for function, arrays in ((attnspec.sinkhorn_primal_value, (np.ones((4, 6)), scores[0])),
                                 (attnspec.sinkhorn_dual_value, (scores[0], np.zeros(4), np.zeros(6))),
                                 (attnspec.sinkhorn_potentials, (scores,))):
            with pytest.raises(ValueError, match=r"^eps: expected a finite number, got inf$"):
                function(*arrays, eps=np.inf)

    def test_infinite_potential_of_a_masked_key(self):
        v = np.where(KEYS, 0.5, np.inf)
        got = attnspec.sinkhorn_dual_value(scores[0], np.full(4, -1.0), v, key_mask=KEYS)
        np.testing.assert_allclose(got, attnspec.sinkhorn_dual_value(scores[0][:, KEYS], np.full(4, -1.0), np.full(4, 0.5)), rtol=1e-14)

    def test_tiny_eps(self):
        # exp(-1e310) = 0: the mean potentials are left.
        np.testing.assert_allclose(attnspec.sinkhorn_dual_value(np.zeros((2, 2)), [-1.0, -3.0], [0.5, 0.5], eps=1e-310), -1.5, rtol=1e-15)


class TestPotentials:
    def test_by_hand(self):
        u, v = attnspec.sinkhorn_potentials(np.log([[1.0, 3.0], [1.0, 1.0]]), n_iters=2)
        np.testing.assert_allclose(u, -np.log([8.0, 4.0]), rtol=1e-15)
        np.testing.assert_allclose(v, np.log([4 / 3, 4 / 5]), rtol=1e-14)

    def test_units_are_those_of_the_scores(self):
        u, v = attnspec.sinkhorn_potentials(scores, n_iters=4)
        u5, v5 = attnspec.sinkhorn_potentials(5 * scores, n_iters=4, eps=5.0)
        np.testing.assert_allclose(u5, 5 * u, rtol=1e-13)
        np.testing.assert_allclose(v5, 5 * v, rtol=1e-12, atol=1e-14)

    def test_one_score(self):
        u, v = attnspec.sinkhorn_potentials([[7.0]], n_iters=3)
        np.testing.assert_allclose(u, [-7.0], rtol=1e-15)
        np.testing.assert_allclose(v, [0.0], atol=1e-15)

    def test_key_marginal_moves_the_last_column_step_only(self):
        valid, every = (attnspec.sinkhorn_potentials(scores, n_iters=2, key_mask=KEYS, key_marginal=name) for name in ("valid", "all"))
        np.testing.assert_array_equal(valid.u, every.u)
        np.testing.assert_allclose((valid.v - every.v)[..., KEYS], np.full((3, 4), np.log(6 / 4)), rtol=1e-13)


@pytest.mark.parametrize("function, arrays", [
    (attnspec.sinkhorn_dual_value, (scores, np.zeros(4), np.zeros(6))), (attnspec.sinkhorn_primal_value, (np.ones((4, 6)), scores[0])),
    (attnspec.sinkhorn_potentials, (scores,)),
])
@pytest.mark.parametrize("eps", [0.0, -1.0])
def test_eps_must_be_positive(function, arrays, eps):
    with pytest.raises(ValueError, match=f"^eps: expected a number > 0, got {eps}$"):
        function(*arrays, eps=eps)
