import math

import mpmath
import numpy as np
import pytest

import attnspec

from derivatives import assert_gradients, central_difference, complex_step, jacobian_product

RNG = np.random.default_rng(0)
q, k, v, do = (RNG.standard_normal((2, 3, size, width)) for size, width in ((4, 5), (6, 5), (6, 2), (4, 2)))
scores, dplan = RNG.standard_normal((2, 4, 6)), RNG.standard_normal((2, 4, 6))
KEYS = np.array([True, False, True, True, False, True])


def normalised_in_turn(S, steps, eps=1.0):
    """The paper's definition in plain Python: K = exp(S / eps), rows normalised to 1, then columns, and so on."""
    K = [[math.exp(s / eps) for s in row] for row in S]
    n, m = len(K), len(K[0])
    for t in range(steps):
        if t % 2 == 0:
            K = [[x / math.fsum(row) for x in row] for row in K]
        else:
            sums = [math.fsum(K[i][j] for i in range(n)) for j in range(m)]
            K = [[K[i][j] / sums[j] for j in range(m)] for i in range(n)]
    return np.array(K)


class TestAgainstTheDefinition:
    @pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 20])
    @pytest.mark.parametrize("n, m", [(5, 5), (3, 6), (6, 3), (1, 4), (4, 1)])
    def test_rows_and_columns_normalised_in_turn(self, n, m, steps):
        S = np.random.default_rng(n + m).standard_normal((n, m))
        mass = n if steps % 2 else m                                   # rows, or columns, sum to 1 there and to 1/n, 1/m here
        np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=steps, eps=0.6), normalised_in_turn(S, steps, 0.6) / mass, rtol=1e-13)

    @pytest.mark.parametrize("eps", [0.02, 0.001])
    def test_small_eps_against_80_digits(self, eps):
        S = np.random.default_rng(1).standard_normal((3, 4))
        with mpmath.workdps(80):
            K = [[mpmath.exp(mpmath.mpf(float(s)) / mpmath.mpf(eps)) for s in row] for row in S]
            for t in range(5):
                if t % 2 == 0:
                    K = [[x / sum(row) / 3 for x in row] for row in K]
                else:
                    sums = [sum(K[i][j] for i in range(3)) for j in range(4)]
                    K = [[K[i][j] / sums[j] / 4 for j in range(4)] for i in range(3)]
            want = np.array([[float(x) for x in row] for row in K])
        np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=5, eps=eps), want, rtol=1e-11, atol=1e-13)

    def test_limit_of_two_by_two_by_hand(self):
        # With a b / (c d) = exp(S00 + S11 - S01 - S10) = 4, a = b and c = d: A = [[2, 1], [1, 2]] / 3.
        A = 2 * attnspec.sinkhorn_plan([[np.log(4.0), 5.0], [7.0, 12.0]], n_iters=201)
        np.testing.assert_allclose(A, [[2 / 3, 1 / 3], [1 / 3, 2 / 3]], rtol=1e-14)

    def test_first_steps_by_hand(self):
        S = np.log([[1.0, 3.0], [1.0, 1.0]])
        info = attnspec.sinkhorn_plan(S, n_iters=2, return_info=True)
        # Rows: [1/8, 3/8], [1/4, 1/4], u = -log 8, -log 4. Columns sum to 3/8 and 5/8, so v = log 4/3, log 4/5.
        np.testing.assert_allclose(info.plan, [[1 / 6, 3 / 10], [1 / 3, 1 / 5]], rtol=1e-15)
        np.testing.assert_allclose(info.u, -np.log([8.0, 4.0]), rtol=1e-15)
        np.testing.assert_allclose(info.v, np.log([4 / 3, 4 / 5]), rtol=1e-14)
        assert info.n_iters == 2
        np.testing.assert_allclose(info.error, np.log(32.0), rtol=1e-15)       # |u_0| + |u_1| in the one row step so far

    def test_scores_of_attention(self):
        S = np.array([[0.9 * sum(q[0, 0, i, c] * k[0, 0, j, c] for c in range(5)) for j in range(6)] for i in range(4)])
        D = np.array([[-0.9 * sum((q[0, 0, i, c] - k[0, 0, j, c]) ** 2 for c in range(5)) for j in range(6)] for i in range(4)])
        for cost, wanted in (("dot", S), ("squared_distance", D)):
            got = attnspec.sinkhorn_attention(q, k, v, scale=0.9, cost=cost, n_iters=3)[0, 0]
            np.testing.assert_allclose(got, normalised_in_turn(wanted, 3) @ v[0, 0], rtol=1e-12, err_msg=cost)

    @pytest.mark.parametrize("cost", ["dot", "squared_distance"])
    def test_default_scale_is_one_over_root_d(self, cost):
        np.testing.assert_array_equal(attnspec.sinkhorn_attention(q, k, v, cost=cost),
                                      attnspec.sinkhorn_attention(q, k, v, cost=cost, scale=1 / np.sqrt(5)))

    @pytest.mark.parametrize("scaling, factor", [("rows", 4), ("cols", 6), ("none", 1)])
    def test_output_scaling_multiplies_the_plan(self, scaling, factor):
        result = attnspec.sinkhorn_attention(q, k, v, n_iters=4, eps=0.7, output_scaling=scaling, return_weights=True)
        P = attnspec.sinkhorn_plan(q @ np.swapaxes(k, -1, -2) / np.sqrt(5), n_iters=4, eps=0.7)
        np.testing.assert_allclose(result.weights, factor * P, rtol=1e-13)
        np.testing.assert_allclose(result.out, factor * P @ v, rtol=1e-12, atol=1e-14)


class TestStopping:
    def test_stops_after_the_first_row_step_that_changes_u_by_less_than_tol(self):
        change = []
        for T in (1, 3, 5, 7, 9, 11, 13, 15):
            full = attnspec.sinkhorn_plan(scores, n_iters=T, return_info=True)
            before = attnspec.sinkhorn_potentials(scores, n_iters=T - 2).u if T > 1 else 0.0
            change.append(np.abs(full.u - before).sum(-1).mean())              # the mean over the batch of two
            np.testing.assert_allclose(full.error, change[-1], rtol=1e-8)
        stopped = attnspec.sinkhorn_plan(scores, n_iters=100, tol=(change[3] + change[4]) / 2, return_info=True)
        assert stopped.n_iters == 9
        np.testing.assert_array_equal(stopped.plan, attnspec.sinkhorn_plan(scores, n_iters=9))

    def test_limit_on_half_steps_holds_where_tol_is_not_reached(self):
        info = attnspec.sinkhorn_plan(scores, n_iters=4, tol=1e-12, return_info=True)
        assert info.n_iters == 4
        np.testing.assert_array_equal(info.plan, attnspec.sinkhorn_plan(scores, n_iters=4))

    def test_leading_axes_stop_together(self):
        easy = np.zeros((4, 6))                                        # solved by one step: alone it stops at the second row step
        assert attnspec.sinkhorn_plan(easy, n_iters=99, tol=1e-9, return_info=True).n_iters == 3
        assert attnspec.sinkhorn_plan(np.stack([easy, scores[0]]), n_iters=99, tol=1e-9, return_info=True).n_iters > 3

    def test_tol_in_attention_and_potentials(self):
        S = q @ np.swapaxes(k, -1, -2) / np.sqrt(5)
        taken = attnspec.sinkhorn_plan(S, n_iters=99, tol=1e-2, return_info=True).n_iters
        assert 3 < taken < 99
        np.testing.assert_array_equal(attnspec.sinkhorn_attention(q, k, v, n_iters=99, tol=1e-2),
                                      attnspec.sinkhorn_attention(q, k, v, n_iters=taken))
        np.testing.assert_array_equal(attnspec.sinkhorn_potentials(S, n_iters=99, tol=1e-2).v,
                                      attnspec.sinkhorn_potentials(S, n_iters=taken).v)


class TestSpecialValues:
    @pytest.mark.parametrize("n_iters", [1, 2, 5])
    def test_one_key_gives_its_value(self, n_iters):
        out = attnspec.sinkhorn_attention(q, k[..., :1, :], v[..., :1, :], n_iters=n_iters)
        np.testing.assert_allclose(out, np.broadcast_to(v[..., :1, :], out.shape), rtol=1e-14)

    @pytest.mark.parametrize("n_iters", [2, 3, 6])
    def test_one_query_takes_the_mean_of_all_values(self, n_iters):
        out = attnspec.sinkhorn_attention(q[..., :1, :], k, v, n_iters=n_iters)
        np.testing.assert_allclose(out, v.mean(axis=-2, keepdims=True), rtol=1e-13)

    def test_equal_scores(self):
        np.testing.assert_allclose(attnspec.sinkhorn_plan(np.full((3, 5), 7.0)), np.full((3, 5), 1 / 15), rtol=1e-14)

    def test_huge_scores(self):
        P = attnspec.sinkhorn_plan([[1e4, -1e4], [-1e4, 1e4]], n_iters=3)
        np.testing.assert_array_equal(P, [[0.5, 0.0], [0.0, 0.5]])
        P = attnspec.sinkhorn_plan([[1e4, -1e4], [1e4, -1e4]], n_iters=3)          # equal rows: all weights equal, nothing overflows
        np.testing.assert_allclose(P, np.full((2, 2), 0.25), rtol=1e-15)

    @pytest.mark.parametrize("size", [1.0, 1e4, 1e16, 1e300])
    def test_scores_that_swallow_the_potentials(self, size):
        # Rows (1, 0), (1/2, 1/2); columns (2/3, 0), (1/3, 1); rows (1, 0), (1/4, 3/4); each in the limit of a large first score.
        S = np.array([[size, 0.0], [0.0, 0.0]])
        e = np.exp(-size)
        want = np.array([[1.0, e], [0.5, 0.5]]) / [[1 + e], [1.0]]
        np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=1), want / 2, rtol=1e-14)
        want = want / want.sum(0)
        np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=2), want / 2, rtol=1e-14)
        want = want / want.sum(1, keepdims=True)
        np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=3), want / 2, rtol=1e-14)

    def test_columns_far_apart_share_alike_all_the_same(self):
        S = np.array([[0.0, 1e16], [0.0, 1e16]])
        for n_iters, want in ((1, [0.0, 0.5]), (2, [0.25, 0.25]), (3, [0.25, 0.25])):
            np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=n_iters), [want, want], rtol=1e-15)

    @pytest.mark.parametrize("size", [1.0, 1e3, 1e8, 1e16, 1e150])
    @pytest.mark.parametrize("n_iters", [1, 3, 7])
    def test_rows_sum_to_one_whatever_the_size_of_the_scores(self, size, n_iters):
        queries = size * q
        result = attnspec.sinkhorn_attention(queries, k, v, n_iters=n_iters, return_weights=True)
        np.testing.assert_allclose(result.weights.sum(-1), np.ones((2, 3, 4)), rtol=1e-15)
        if n_iters == 1:
            want = attnspec.scaled_dot_product_attention(queries, k, v, return_weights=True)
            np.testing.assert_allclose(result.weights, want.weights, rtol=1e-15, atol=1e-300)
            np.testing.assert_allclose(result.out, want.out, rtol=1e-15, atol=1e-15)

    def test_scores_and_eps_at_the_ends_of_the_range(self):
        S = np.array([[1e308, 0.0], [0.0, -1e308]])
        for eps in (1e-310, 0.1, 1e300):
            P = attnspec.sinkhorn_plan(S, n_iters=1, eps=eps)
            np.testing.assert_array_equal(P, [[0.5, 0.0], [0.5, 0.0]])
            dS = attnspec.sinkhorn_plan_backward(S, [[1.0, 2.0], [3.0, 4.0]], n_iters=3, eps=eps)
            np.testing.assert_array_equal(dS, np.zeros((2, 2)))

    def test_ten_thousand_steps_do_not_drift(self):
        S = np.random.default_rng(3).standard_normal((4, 6))
        with mpmath.workdps(40):
            K = [[mpmath.exp(mpmath.mpf(float(s))) for s in row] for row in S]
            for _ in range(200):                                       # converged far below rounding
                sums = [sum(K[i][j] for i in range(4)) for j in range(6)]
                K = [[K[i][j] / sums[j] for j in range(6)] for i in range(4)]
                K = [[x / sum(row) for x in row] for row in K]
            want = np.array([[float(x / 4) for x in row] for row in K])
        np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=10001), want, rtol=2e-14)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_visible_score_that_is_not_finite_spoils_its_row(self, bad):
        S = scores[0].copy()
        S[1, 0] = bad
        mask = np.arange(6) != 5
        P = attnspec.sinkhorn_plan(S, n_iters=1, key_mask=mask)
        assert np.all(np.isnan(P[1, :5]))
        np.testing.assert_array_equal(P[:, 5], np.zeros(4))
        np.testing.assert_array_equal(P[[0, 2, 3]], attnspec.sinkhorn_plan(scores[0], n_iters=1, key_mask=mask)[[0, 2, 3]])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, n, m):
        for n_iters in (1, 2):
            out = attnspec.sinkhorn_attention(np.ones((2, n, 2)), np.ones((2, m, 2)), np.ones((2, m, 5)), n_iters=n_iters)
            np.testing.assert_array_equal(out, np.zeros((2, n, 5)))
            info = attnspec.sinkhorn_plan(np.ones((2, n, m)), n_iters=n_iters, return_info=True)
            np.testing.assert_array_equal(info.plan, np.zeros((2, n, m)))
            np.testing.assert_array_equal(info.u, np.zeros((2, n)))
            np.testing.assert_array_equal(info.v, np.zeros((2, m)))
            dq, dk, dv, *_ = attnspec.sinkhorn_attention_backward(
                np.ones((2, n, 2)), np.ones((2, m, 2)), np.ones((2, m, 5)), np.ones((2, n, 5)), n_iters=n_iters)
            np.testing.assert_array_equal(dq, np.zeros((2, n, 2)))
            np.testing.assert_array_equal(dk, np.zeros((2, m, 2)))
            np.testing.assert_array_equal(dv, np.zeros((2, m, 5)))

    def test_no_batch(self):
        info = attnspec.sinkhorn_plan(np.ones((0, 2, 3)), return_info=True)
        assert info.plan.shape == (0, 2, 3)
        assert info.error == 0.0

    def test_score_of_minus_infinity(self):
        # The support [[x, x], [0, x]] of total mass 1 with rows and columns of 1/2 holds only the identity: approached, never reached.
        S = np.array([[0.0, 0.0], [-np.inf, 0.0]])
        np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=1), [[0.25, 0.25], [0.0, 0.5]], rtol=1e-15)
        np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=2), [[0.5, 1 / 6], [0.0, 1 / 3]], rtol=1e-15)
        np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=3), [[3 / 8, 1 / 8], [0.0, 1 / 2]], rtol=1e-15)

    @pytest.mark.parametrize("n_iters", [1, 3, 11, 101, 1001])
    def test_why_there_is_no_causal_form(self, n_iters):
        # Two causal positions, equal scores: after an odd number T of half-steps 1 / (2 (T + 1)) is left beside the diagonal.
        S = np.array([[0.3, -np.inf], [0.6, 0.6]])
        np.testing.assert_allclose(attnspec.sinkhorn_plan(S, n_iters=n_iters)[1, 0], 1 / (2 * (n_iters + 1)), rtol=1e-11)

    def test_row_and_column_of_minus_infinity_have_no_mass(self):
        S = np.log([[1.0, 3.0, 0.5], [1.0, 1.0, 0.5], [1.0, 1.0, 1.0]])
        S[2, :] = S[:, 2] = -np.inf
        info = attnspec.sinkhorn_plan(S, n_iters=1, return_info=True)
        np.testing.assert_allclose(info.plan, np.array([[0.25, 0.75, 0], [0.5, 0.5, 0], [0, 0, 0]]) / 3, rtol=1e-15)
        assert info.u[2] == 0.0
        info = attnspec.sinkhorn_plan(S, n_iters=2, return_info=True)
        np.testing.assert_allclose(info.plan.sum(0), [1 / 3, 1 / 3, 0.0], rtol=1e-14)
        assert info.v[2] == 0.0

    def test_derivative_beside_scores_of_minus_infinity(self):
        S = np.array([[0.3, -np.inf, 0.1], [-0.4, 0.2, -np.inf]])
        got = attnspec.sinkhorn_plan_backward(S, np.ones((2, 3)) * [1.0, 2.0, 4.0], n_iters=3)
        want = jacobian_product(lambda scores: attnspec.sinkhorn_plan(scores, n_iters=3), {"scores": S}, "scores", [1.0, 2.0, 4.0])
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-16)
        assert got[0, 1] == got[1, 2] == 0.0


class TestMaskedKeys:
    def test_all_keys_masked_gives_zeros(self):
        mask = np.array([[[True] * 6], [[False] * 6]])                 # the second batch has no key
        result = attnspec.sinkhorn_attention(q, k, v, key_mask=mask, n_iters=3, return_weights=True)
        np.testing.assert_array_equal(result.out[1], np.zeros((3, 4, 2)))
        np.testing.assert_array_equal(result.weights[1], np.zeros((3, 4, 6)))
        np.testing.assert_allclose(result.out[0], attnspec.sinkhorn_attention(q, k, v, n_iters=3)[0], rtol=1e-14)

    @pytest.mark.parametrize("n_iters", [1, 2, 5])
    @pytest.mark.parametrize("scaling", ["rows", "cols", "none"])
    def test_masked_keys_are_removed(self, n_iters, scaling):
        got = attnspec.sinkhorn_attention(q, k, v, key_mask=KEYS, n_iters=n_iters, output_scaling=scaling)
        want = attnspec.sinkhorn_attention(q, k[..., KEYS, :], v[..., KEYS, :], n_iters=n_iters, output_scaling=scaling)
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15)

    def test_marginals(self):
        for marginal, each in (("valid", 1 / 4), ("all", 1 / 6)):
            P = attnspec.sinkhorn_plan(scores, key_mask=KEYS, key_marginal=marginal, n_iters=2)
            np.testing.assert_allclose(P.sum(-2), np.broadcast_to(np.where(KEYS, each, 0.0), (2, 6)), rtol=1e-14)
            result = attnspec.sinkhorn_attention(q, k, v, key_mask=KEYS, key_marginal=marginal, n_iters=2, output_scaling="cols",
                                                 return_weights=True)
            np.testing.assert_allclose(result.weights.sum(-2), np.broadcast_to(np.where(KEYS, 1.0, 0.0), (2, 3, 6)), rtol=1e-14)

    def test_columns_of_the_text_code_sum_to_n_over_valid_in_the_limit(self):
        S = np.random.default_rng(2).standard_normal((6, 6))
        A = 6 * attnspec.sinkhorn_plan(S, key_mask=KEYS, key_marginal="all", n_iters=1001)
        np.testing.assert_allclose(A.sum(-1), np.ones(6), rtol=1e-13)
        np.testing.assert_allclose(A.sum(-2), np.where(KEYS, 6 / 4, 0.0), rtol=1e-12)

    @pytest.mark.parametrize("cost", ["dot", "squared_distance"])
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_stands_at_a_masked_key_never_leaks(self, bad, cost):
        keys, values = k.copy(), v.copy()
        keys[..., ~KEYS, :], values[..., ~KEYS, :] = bad, bad
        options = {"key_mask": KEYS, "cost": cost, "n_iters": 4}
        np.testing.assert_allclose(attnspec.sinkhorn_attention(q, keys, values, **options),
                                   attnspec.sinkhorn_attention(q, k, v, **options), rtol=1e-13, atol=1e-15)
        got = attnspec.sinkhorn_attention_backward(q, keys, values, do, **options)
        want = attnspec.sinkhorn_attention_backward(q, k, v, do, **options)
        for name in ("dq", "dk", "dv"):
            np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-12, atol=1e-14, err_msg=name)

    def test_not_a_number_in_one_batch_stays_there(self):
        keys = k.copy()
        keys[1, 0, 2] = np.nan                                         # not masked: reaches all of head (1, 0) and nothing else
        out = attnspec.sinkhorn_attention(q, keys, v)
        assert np.isnan(out[1, 0]).all()
        np.testing.assert_array_equal(np.delete(out.reshape(6, 4, 2), 3, 0),
                                      np.delete(attnspec.sinkhorn_attention(q, k, v).reshape(6, 4, 2), 3, 0))

    def test_key_masked_for_one_batch_only(self):
        mask = np.stack([np.ones(6, bool), KEYS])[:, None]
        values = v.copy()
        values[1][:, ~KEYS] = np.nan
        out = attnspec.sinkhorn_attention(q, k, values, key_mask=mask)
        np.testing.assert_allclose(out[0], attnspec.sinkhorn_attention(q[0], k[0], v[0]), rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(out[1], attnspec.sinkhorn_attention(q[1], k[1], v[1], key_mask=KEYS), rtol=1e-13, atol=1e-15)

    @pytest.mark.parametrize("mask", [np.True_, np.array([True])])
    def test_mask_may_be_one_entry_for_all_keys(self, mask):
        np.testing.assert_array_equal(attnspec.sinkhorn_plan(scores, key_mask=mask), attnspec.sinkhorn_plan(scores))

    def test_mask_with_more_leading_axes_than_the_scores(self):
        masks = np.stack([np.ones(6, bool), KEYS])
        got = attnspec.sinkhorn_plan(scores[0], key_mask=masks)
        want = [attnspec.sinkhorn_plan(scores[0], key_mask=mask) for mask in masks]
        np.testing.assert_allclose(got, want, rtol=1e-15)


PLAN_OPTIONS = [
    {"n_iters": 1}, {"n_iters": 2}, {"n_iters": 3}, {"n_iters": 6, "eps": 0.4}, {"n_iters": 5, "key_mask": KEYS},
    {"n_iters": 4, "key_mask": np.stack([KEYS, ~KEYS]), "key_marginal": "all"},
]


@pytest.mark.parametrize("options", PLAN_OPTIONS)
def test_gradients_of_the_plan(options):
    got = attnspec.sinkhorn_plan_backward(scores, dplan, **options)
    assert_gradients(lambda scores: attnspec.sinkhorn_plan(scores, **options), {"scores": got}, {"scores": scores}, dplan)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 6])
def test_detached_gradients_of_the_plan_hold_the_potentials_of_the_keys(n_iters):
    eps, last = 0.7, (n_iters - 1) // 2 * 2                            # half-steps before the last row step
    fixed = attnspec.sinkhorn_potentials(scores, n_iters=last, eps=eps).v if last else np.zeros((2, 6))
    final = attnspec.sinkhorn_potentials(scores, n_iters=n_iters, eps=eps).v

    def frozen(scores):
        sums = np.sum(np.exp((scores + fixed[:, None, :]) / eps), axis=-1, keepdims=True)
        return np.exp((scores + final[:, None, :]) / eps) / (4 * sums)

    np.testing.assert_allclose(frozen(scores), attnspec.sinkhorn_plan(scores, n_iters=n_iters, eps=eps), rtol=1e-13)
    got = attnspec.sinkhorn_plan_backward(scores, dplan, n_iters=n_iters, eps=eps, gradient="detached")
    assert_gradients(frozen, {"scores": got}, {"scores": scores}, dplan)


def test_detached_and_unrolled_gradients_agree_without_a_column_step_and_differ_with_one():
    one, detached = (attnspec.sinkhorn_plan_backward(scores, dplan, n_iters=1, gradient=g) for g in ("unrolled", "detached"))
    np.testing.assert_array_equal(one, detached)
    one, detached = (attnspec.sinkhorn_plan_backward(scores, dplan, n_iters=3, gradient=g) for g in ("unrolled", "detached"))
    assert np.abs(one - detached).max() > 1e-3


@pytest.mark.parametrize("options", [
    {}, {"n_iters": 1}, {"n_iters": 4, "eps": 0.5}, {"scale": 0.7, "output_scaling": "cols"}, {"output_scaling": "none", "n_iters": 2},
    {"cost": "squared_distance"}, {"cost": "squared_distance", "n_iters": 4, "scale": 0.3, "key_mask": KEYS},
    {"key_mask": KEYS, "key_marginal": "all", "n_iters": 2, "output_scaling": "cols"},
    {"key_mask": np.stack([KEYS, ~KEYS])[:, None], "output_scaling": "cols"},
])
def test_gradients(options):
    arrays = {"q": q, "k": k, "v": v}
    gradients = attnspec.sinkhorn_attention_backward(**arrays, do=do, **options)
    assert_gradients(lambda **a: attnspec.sinkhorn_attention(**a, **options),
                     {"q": gradients.dq, "k": gradients.dk, "v": gradients.dv}, arrays, do)


@pytest.mark.parametrize("cost", ["dot", "squared_distance"])
def test_gradients_of_keys_shared_by_heads(cost):
    arrays = {"q": q, "k": k[0, 0], "v": v[0, :1]}
    gradients = attnspec.sinkhorn_attention_backward(**arrays, do=do, cost=cost)
    assert_gradients(lambda **a: attnspec.sinkhorn_attention(**a, cost=cost),
                     {"q": gradients.dq, "k": gradients.dk, "v": gradients.dv}, arrays, do)


def test_gradient_of_a_plan_whose_scores_are_shared():
    masks = np.stack([KEYS, ~KEYS])
    got = attnspec.sinkhorn_plan_backward(scores[0], dplan, key_mask=masks)
    assert_gradients(lambda scores: attnspec.sinkhorn_plan(scores, key_mask=masks), {"scores": got}, {"scores": scores[0]}, dplan)


def test_eps_has_a_complex_step_derivative():
    arrays = {"eps": np.array(0.8)}
    exact = complex_step(lambda eps: attnspec.sinkhorn_plan(scores, eps=eps, n_iters=4), arrays, "eps", np.array(1.0))
    rough = central_difference(lambda eps: attnspec.sinkhorn_plan(scores, eps=eps, n_iters=4), arrays, "eps", np.array(1.0))
    np.testing.assert_allclose(exact, rough, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("options", [
    {}, {"eps": 0.6}, {"key_mask": KEYS}, {"key_mask": np.stack([KEYS, ~KEYS]), "eps": 2.0},
    {"key_mask": KEYS, "key_marginal": "all"}, {"key_mask": KEYS, "key_marginal": "all", "n_iters": 400},
])
def test_implicit_gradient_is_the_unrolled_one_at_the_limit(options):
    options = {"n_iters": 401, **options}
    got = attnspec.sinkhorn_plan_backward(scores, dplan, gradient="implicit", **options)
    np.testing.assert_allclose(got, attnspec.sinkhorn_plan_backward(scores, dplan, **options), rtol=1e-11, atol=1e-15)


def test_implicit_gradient_has_a_complex_step_derivative():
    direction = RNG.standard_normal(scores.shape)
    got, want = (complex_step(lambda scores, g=g: attnspec.sinkhorn_plan_backward(scores, dplan, n_iters=401, gradient=g),
                              {"scores": scores}, "scores", direction) for g in ("implicit", "unrolled"))
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-14)


def test_implicit_gradient_of_attention():
    options = {"n_iters": 401, "key_mask": KEYS, "cost": "squared_distance", "scale": 0.1, "output_scaling": "cols"}
    got, want = (attnspec.sinkhorn_attention_backward(q, k, v, do, gradient=g, **options) for g in ("implicit", "unrolled"))
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-10, atol=1e-13, err_msg=name)


def test_implicit_gradient_where_the_plan_falls_apart():
    # Two blocks that share nothing, each 2 x 2 with its own kernel of the linear system.
    S, G = np.full((4, 4), -np.inf), dplan[0, :, :4]
    S[:2, :2], S[2:, 2:] = scores[0, :2, :2], scores[0, 2:, 2:4]
    got = attnspec.sinkhorn_plan_backward(S, G, n_iters=401, gradient="implicit")
    np.testing.assert_allclose(got, attnspec.sinkhorn_plan_backward(S, G, n_iters=401), rtol=1e-11, atol=1e-15)


def test_implicit_gradient_far_from_the_limit_is_another():
    got, want = (attnspec.sinkhorn_plan_backward(scores, dplan, n_iters=1, gradient=g) for g in ("implicit", "unrolled"))
    assert np.abs(got - want).max() > 1e-3


def test_implicit_gradient_where_one_batch_is_not_a_number():
    S = scores.copy()
    S[1, 0, 0] = np.nan
    got = attnspec.sinkhorn_plan_backward(S, dplan, n_iters=401, gradient="implicit")
    assert np.all(np.isnan(got[1]))
    np.testing.assert_array_equal(got[0], attnspec.sinkhorn_plan_backward(scores, dplan, n_iters=401, gradient="implicit")[0])


def test_squared_distances_of_a_masked_key_may_overflow():
    keys = k.copy()
    keys[..., ~KEYS, :] = 1e300
    options = {"key_mask": KEYS, "cost": "squared_distance"}
    np.testing.assert_array_equal(attnspec.sinkhorn_attention(q, keys, v, **options), attnspec.sinkhorn_attention(q, k, v, **options))
    got, want = (attnspec.sinkhorn_attention_backward(q, x, v, do, **options) for x in (keys, k))
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


class TestRefusals:
    @pytest.mark.parametrize("causal", [True, "bottom-right", "top-left"])
    def test_causal(self, causal):
        for function, arrays in ((attnspec.sinkhorn_attention, (q, k, v)), (attnspec.sinkhorn_attention_backward, (q, k, v, do))):
            with pytest.raises(ValueError, match=r"^causal: expected False, got .*lower-triangular matrix is the identity$"):
                function(*arrays, causal=causal)

    @pytest.mark.parametrize("option, value, message", [
        ("n_iters", 0, "^n_iters: expected a whole number >= 1, got 0$"),
        ("n_iters", 2.5, "^n_iters: expected a whole number >= 1, got 2.5$"),
        ("eps", 0.0, "^eps: expected a number > 0, got 0.0$"),
        ("eps", np.inf, "^eps: expected a finite number, got inf$"),
        ("scale", "x", "^scale: expected a number, got 'x'$"),
        ("tol", -1.0, "^tol: expected a number >= 0, got -1.0$"),
        ("cost", "euclidean", "^cost: expected 'dot' or 'squared_distance', got 'euclidean'$"),
        ("output_scaling", "n", "^output_scaling: expected 'rows' or 'cols' or 'none', got 'n'$"),
        ("key_marginal", "m", "^key_marginal: expected 'valid' or 'all', got 'm'$"),
        ("key_mask", np.ones(5, bool), "^key_mask: "),
    ])
    def test_options(self, option, value, message):
        with pytest.raises(ValueError, match=message):
            attnspec.sinkhorn_attention(q, k, v, **{option: value})

    def test_gradient(self):
        with pytest.raises(ValueError, match=r"^gradient: expected 'unrolled' or 'detached' or 'implicit', got 'limit'$"):
            attnspec.sinkhorn_plan_backward(scores, dplan, gradient="limit")

    def test_mask_of_numbers(self):
        with pytest.raises(TypeError, match=r"^key_mask: expected booleans"):
            attnspec.sinkhorn_plan(scores, key_mask=np.ones(6))
