import math

import mpmath
import numpy as np
import pytest

import attnspec

from derivatives import assert_gradients

RNG = np.random.default_rng(0)
state, stored, V, do, do_plain = (RNG.standard_normal((2, 3, *size)) for size in ((4, 5), (6, 5), (6, 2), (4, 2), (4, 5)))


def official(state, stored, beta, most, eps, mask=None):
    """The authors' loop in plain Python, for (b, h, n, d): (weights, softmaxes of each head)."""
    b, h = state.shape[:2]
    weights, count = np.zeros((*state.shape[:3], stored.shape[2])), np.zeros(h, int)

    def softmax(i, j, xi):
        A = np.zeros((len(xi), stored.shape[2]))
        for r, row in enumerate(xi):
            seen = [c for c in range(A.shape[1]) if mask is None or mask[i, j, r, c]]
            s = [beta * math.fsum(row * stored[i, j, c]) for c in seen]
            e = [math.exp(x - max(s)) for x in s]
            for c, x in zip(seen, e, strict=True):
                A[r, c] = x / math.fsum(e)
        return A

    for j in range(h):
        xi, old = [state[i, j] for i in range(b)], None
        while True:
            A = [softmax(i, j, xi[i]) for i in range(b)]
            goes_on = most < 0 or count[j] < most
            if old is not None:
                goes_on = goes_on and max(np.linalg.norm(new - before) for new, before in zip(A, old, strict=True)) > eps
            old = A
            count[j] += 1
            if not goes_on:
                break
            xi = [A[i] @ stored[i, j] for i in range(b)]
        weights[:, j] = A
    return weights, count


class TestEnergy:
    def test_by_hand(self):
        # patterns +1 and -1 at state x: -log(cosh(beta x))/beta + x^2/2 + 1/2
        E = attnspec.hopfield_energy([[0.0], [1.0]], [[1.0], [-1.0]], beta=2.0)
        np.testing.assert_allclose(E, [0.5, 1.0 - np.log(np.cosh(2.0)) / 2], rtol=1e-15)

    @pytest.mark.parametrize("beta", [1e-300, 1e-12, 1e-6, 0.01, 1.0, 30.0, 1e4])
    def test_any_temperature(self, beta):
        xi, Y = state[0, 0, :1], stored[0, 0]
        with mpmath.workdps(400):
            s = [mpmath.fdot(xi[0].tolist(), y.tolist()) for y in Y]
            lse = mpmath.log(mpmath.fsum(mpmath.exp(mpmath.mpf(beta) * x) for x in s)) / beta
            M2 = max(mpmath.fdot(y.tolist(), y.tolist()) for y in Y)
            want = -lse + mpmath.fdot(xi[0].tolist(), xi[0].tolist()) / 2 + mpmath.log(len(s)) / beta + M2 / 2
        np.testing.assert_allclose(attnspec.hopfield_energy(xi, Y, beta=beta), [float(want)], rtol=1e-14)

    def test_a_wide_spread_of_many_patterns(self):
        # one pattern at 1 and 9999 at -1000 (beta 1, state 1): lse = 1 exactly in float64
        Y = np.full((10000, 1), -1000.0)
        Y[0] = 1.0
        want = -1.0 + 0.5 + np.log(10000) + 1e6 / 2
        np.testing.assert_allclose(attnspec.hopfield_energy([[1.0]], Y), [want], rtol=1e-15)

    def test_no_temperature_is_the_limit(self):
        E = attnspec.hopfield_energy([[2.0]], [[1.0], [3.0]], beta=0.0)
        np.testing.assert_allclose(E, [-4.0 + 2.0 + 4.5], rtol=1e-15)

    def test_no_patterns_leave_the_quadratic(self):
        np.testing.assert_array_equal(attnspec.hopfield_energy([[3.0, 4.0]], np.ones((0, 2))), [12.5])
        assert attnspec.hopfield_energy(np.ones((0, 2)), np.ones((3, 2))).shape == (0,)

    def test_default_temperatures(self):
        given = attnspec.hopfield_energy(state, stored, beta=1 / np.sqrt(5))
        np.testing.assert_array_equal(attnspec.hopfield_energy(state, stored, beta=None), given)
        np.testing.assert_array_equal(attnspec.hopfield_energy(state, stored), attnspec.hopfield_energy(state, stored, beta=1.0))
        given = attnspec.hopfield_update(state, stored, beta=1 / np.sqrt(5))
        np.testing.assert_array_equal(attnspec.hopfield_update(state, stored), given)
        np.testing.assert_array_equal(attnspec.hopfield_retrieve(state, stored), given)

    def test_ties_of_the_largest_norm_keep_the_real_part(self):
        E = attnspec.hopfield_energy([[1.0]], [[2.0 + 1e-30j], [-2.0]])
        np.testing.assert_allclose(E.real, attnspec.hopfield_energy([[1.0]], [[2.0], [-2.0]]), rtol=1e-15)

    def test_descent_along_a_retrieval(self):
        xi, before = state, attnspec.hopfield_energy(state, stored, beta=2.0)
        for _ in range(6):
            xi = attnspec.hopfield_update(xi, stored, beta=2.0)
            after = attnspec.hopfield_energy(xi, stored, beta=2.0)
            assert np.all(after <= before + 1e-14)
            before = after


class TestSpecialValues:
    def test_by_hand(self):
        out = attnspec.hopfield_update([[np.log(3.0)]], [[1.0], [0.0]], beta=1.0)            # weights 3/4, 1/4
        np.testing.assert_allclose(out, [[0.75]], rtol=1e-15)

    @pytest.mark.parametrize("n_iters", [0, 1, 4, None])
    def test_state_that_sees_nothing_goes_to_zero(self, n_iters):
        mask = np.array([[True, False], [False, False]])
        result = attnspec.hopfield_retrieve(np.ones((2, 1)), [[3.0], [5.0]], mask=mask, n_iters=n_iters, return_weights=True)
        np.testing.assert_array_equal(result.out, [[3.0], [0.0]])
        np.testing.assert_array_equal(result.weights, [[1.0, 0.0], [0.0, 0.0]])

    @pytest.mark.parametrize("n_iters", [0, 3, None])
    def test_one_pattern(self, n_iters):
        np.testing.assert_array_equal(attnspec.hopfield_retrieve(np.ones((2, 2)), [[3.0, 4.0]], n_iters=n_iters), [[3.0, 4.0]] * 2)

    @pytest.mark.parametrize("n_iters", [0, 3, None])
    def test_equal_products_give_the_mean(self, n_iters):
        np.testing.assert_array_equal(attnspec.hopfield_retrieve([[0.0]], [[1.0], [-1.0], [3.0], [1.0]], n_iters=0), [[1.0]])
        np.testing.assert_array_equal(attnspec.hopfield_retrieve([[0.0, 5.0]], [[1.0, 0.0], [-1.0, 0.0]], n_iters=n_iters), [[0.0, 0.0]])

    def test_equal_patterns_share_the_weight(self):
        A = attnspec.hopfield_retrieve([[50.0, 0.0]], [[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], beta=10.0, return_weights=True).weights
        np.testing.assert_array_equal(A, [[0.5, 0.5, np.exp(-1000.0)]])

    def test_huge_products(self):
        np.testing.assert_array_equal(attnspec.hopfield_retrieve([[1e4], [-1e4]], [[1e3], [-1e3]], n_iters=2), [[1e3], [-1e3]])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_bad_numbers_behind_a_mask_stay_there(self, bad):
        patterns = np.array([[1.0], [bad]])
        mask = np.array([[True, False], [True, True]])
        for n_iters in (0, 2):
            out = attnspec.hopfield_retrieve(np.ones((2, 1)), patterns, mask=mask, n_iters=n_iters, tol=None)
            np.testing.assert_array_equal(out, [[1.0], [np.nan]])
        np.testing.assert_array_equal(attnspec.hopfield_update(np.ones((2, 1)), patterns, mask=mask), [[1.0], [np.nan]])

    def test_mask_is_as_if_the_patterns_were_not_there(self):
        mask = np.array([True, True, False, True, False, True])
        got = attnspec.hopfield_retrieve(state, stored, mask=mask, n_iters=3, beta=1.5)
        np.testing.assert_allclose(got, attnspec.hopfield_retrieve(state, stored[..., mask, :], n_iters=3, beta=1.5), rtol=1e-14)

    @pytest.mark.parametrize("n_iters", [0, 2, None])
    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_states_or_no_patterns(self, n, m, n_iters):
        out = attnspec.hopfield_retrieve(np.ones((n, 2)), np.ones((m, 2)), np.ones((m, 5)), n_iters=n_iters)
        np.testing.assert_array_equal(out, np.zeros((n, 5)))
        np.testing.assert_array_equal(attnspec.hopfield_update(np.ones((n, 2)), np.ones((m, 2))), np.zeros((n, 2)))

    def test_no_heads_and_no_batch(self):
        for lead in ((0, 3), (2, 0)):
            result = attnspec.hopfield_retrieve(np.ones((*lead, 4, 2)), np.ones((*lead, 5, 2)), n_iters=None, return_info=True)
            assert result.out.shape == (*lead, 4, 2)
            assert result.n_iters.shape == lead[1:]


class TestJacobian:
    def test_by_hand(self):
        # weights 1/2, 1/2 at state 0: covariance of (1, 2) and (-1, 0) is 1 in every entry
        got = attnspec.hopfield_jacobian([[0.0, 0.0]], [[1.0, 2.0], [-1.0, 0.0]], beta=3.0)
        np.testing.assert_allclose(got, [[[3.0, 3.0], [3.0, 3.0]]], rtol=1e-15)

    @pytest.mark.parametrize("options", [{}, {"beta": 0.0}, {"beta": 2.5}, {"mask": np.arange(24).reshape(4, 6) % 3 > 0}])
    def test_entry_by_entry(self, options):
        got = attnspec.hopfield_jacobian(state, stored, **options)
        for b in range(5):
            direction = np.zeros(5)
            direction[b] = 1.0
            column = attnspec.hopfield_update(state + 1e-30j * direction, stored, **options).imag / 1e-30
            np.testing.assert_allclose(got[..., b], column, rtol=1e-12, atol=1e-14)

    def test_far_from_the_origin_it_does_not_cancel(self):
        Y, xi = stored[0, 0] + 1e6, state[0, 0] * 1e-6
        want = attnspec.hopfield_jacobian(xi, Y - 1e6, beta=1.0)       # products with a constant move all logits of a state alike
        np.testing.assert_allclose(attnspec.hopfield_jacobian(xi, Y, beta=1.0), want, rtol=1e-8)

    def test_special_values(self):
        patterns, mask = np.array([[1.0], [2.0], [np.nan]]), np.array([[True, True, False], [False] * 3, [True] * 3])
        got = attnspec.hopfield_jacobian([[0.0]] * 3, patterns, beta=1.0, mask=mask)
        np.testing.assert_allclose(got, [[[0.25]], [[0.0]], [[np.nan]]], rtol=1e-15)
        np.testing.assert_array_equal(attnspec.hopfield_jacobian([[1.0, 2.0]], [[3.0, 4.0]]), np.zeros((1, 2, 2)))
        for n, m in [(0, 3), (3, 0), (0, 0)]:
            np.testing.assert_array_equal(attnspec.hopfield_jacobian(np.ones((n, 2)), np.ones((m, 2))), np.zeros((n, 2, 2)))

    def test_the_mean_value_theorem_and_the_bound_of_convergence(self):
        xi, eta, Y = state[0, 0], state[0, 1], stored[0, 0]
        nodes, weights = np.polynomial.legendre.leggauss(60)
        J_m = sum(w / 2 * attnspec.hopfield_jacobian(eta + (1 + t) / 2 * (xi - eta), Y, beta=0.5)
                  for t, w in zip(nodes, weights, strict=True))
        moved = attnspec.hopfield_update(xi, Y, beta=0.5) - attnspec.hopfield_update(eta, Y, beta=0.5)
        np.testing.assert_allclose(np.einsum("nab,nb->na", J_m, xi - eta), moved, rtol=1e-11, atol=1e-13)
        limit = np.linalg.norm(J_m, 2, axis=(-2, -1)) * np.linalg.norm(xi - eta, axis=-1)
        assert np.all(np.linalg.norm(moved, axis=-1) <= limit)


class TestNotANumber:
    """Rows of NaN neither end nor prolong the updates of others."""

    def test_in_a_pattern_that_only_one_state_sees(self):
        patterns = np.concatenate([stored[0, 0], np.full((1, 5), np.nan)])
        mask = np.ones((4, 7), bool)
        mask[1:, 6] = False
        got = attnspec.hopfield_retrieve(state[0, 0], patterns, beta=2.0, n_iters=None, mask=mask, return_info=True)
        want = attnspec.hopfield_retrieve(state[0, 0, 1:], stored[0, 0], beta=2.0, n_iters=None, return_info=True)
        assert want.n_iters > 2
        assert got.n_iters == want.n_iters
        assert not got.converged
        np.testing.assert_allclose(got.out, np.concatenate([np.full((1, 5), np.nan), want.out]), rtol=1e-13)

    def test_in_another_element_of_the_batch(self):
        bad = state[:, :2].copy()
        bad[1, 0, 2] = np.nan
        got = attnspec.hopfield_retrieve(bad, stored[:, :2], beta=2.0, n_iters=None, return_info=True)
        rows = [0, 1, 3]
        options = {"beta": 2.0, "n_iters": int(got.n_iters[0]), "tol": None}
        assert got.n_iters[0] > 2
        np.testing.assert_allclose(got.out[1, 0, rows], attnspec.hopfield_retrieve(state[1, 0, rows], stored[1, 0], **options), rtol=1e-13)
        np.testing.assert_allclose(got.out[0, 0], attnspec.hopfield_retrieve(state[0, 0], stored[0, 0], **options), rtol=1e-13)
        np.testing.assert_array_equal(got.converged, [False, True])

    @pytest.mark.parametrize("n_iters", [5, None])
    def test_everywhere(self, n_iters):
        got = attnspec.hopfield_retrieve(np.full((2, 1), np.nan), [[1.0], [2.0]], n_iters=n_iters, return_info=True)
        assert np.all(np.isnan(got.out))
        assert (got.n_iters, got.converged) == (1, False)


def test_the_energy_s_derivative_by_a_small_beta():
    # dE/dbeta = log(mean exp(beta s))/beta^2 - <s>/beta, which tends to -Var(s)/2; NumPy's complex log1p would leave 1e-16/beta^2
    s = state[0, 0] @ stored[0, 0].T
    slope = attnspec.hopfield_energy(state[0, 0], stored[0, 0], beta=1e-7 + 1e-30j).imag / 1e-30
    np.testing.assert_allclose(slope, -s.var(axis=-1) / 2, rtol=1e-5)


class TestIteration:
    @pytest.mark.parametrize("beta", [0.3, 1.0, 4.0])
    @pytest.mark.parametrize("n_iters, tol", [(0, 1e-4), (1, 1e-4), (3, 1e-4), (3, 0.5), (50, 1e-2), (-1, 1e-4), (None, 1e-7)])
    def test_it_is_the_authors_loop(self, beta, n_iters, tol):
        weights, softmaxes = official(state, stored, beta, -1 if n_iters is None else n_iters, tol)
        got = attnspec.hopfield_retrieve(state, stored, V, beta=beta, n_iters=n_iters, tol=tol, return_info=True)
        np.testing.assert_array_equal(got.n_iters, softmaxes - 1)
        np.testing.assert_allclose(got.weights, weights, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(got.out, weights @ V, rtol=1e-11, atol=1e-13)

    def test_with_a_mask_for_every_head(self):
        mask = RNG.random((2, 3, 4, 6)) < 0.6
        mask[..., 0] = True
        weights, softmaxes = official(state, stored, 1.3, -1, 1e-4, mask)
        got = attnspec.hopfield_retrieve(state, stored, beta=1.3, n_iters=None, mask=mask, return_info=True)
        np.testing.assert_array_equal(got.n_iters, softmaxes - 1)
        np.testing.assert_allclose(got.weights, weights, rtol=1e-11, atol=1e-13)

    def test_a_batch_stops_together_and_heads_do_not(self):
        alone = np.array([[attnspec.hopfield_retrieve(state[i, j], stored[i, j], beta=2.0, n_iters=None, return_info=True).n_iters
                           for j in range(3)] for i in range(2)])
        together = attnspec.hopfield_retrieve(state, stored, beta=2.0, n_iters=None, return_info=True)
        assert len(set(alone.ravel())) > 2
        np.testing.assert_array_equal(together.n_iters, alone.max(axis=0))
        assert together.converged.all()

    def test_what_it_did(self):
        none = attnspec.hopfield_retrieve(state[0, 0], stored[0, 0], return_info=True)
        assert (none.n_iters, none.converged) == (0, False)
        three = attnspec.hopfield_retrieve(state[0, 0], stored[0, 0], n_iters=3, tol=None, return_info=True)
        assert (three.n_iters, three.converged) == (3, False)
        equal = attnspec.hopfield_retrieve(state[0, 0], np.ones((6, 5)), n_iters=9, return_info=True)
        assert (equal.n_iters, equal.converged) == (1, True)

    def test_fixed_number_of_updates(self):
        want = state
        for _ in range(4):
            want = attnspec.hopfield_update(want, stored, beta=0.7)
        got = attnspec.hopfield_retrieve(state, stored, beta=0.7, n_iters=3, tol=None)
        np.testing.assert_allclose(got, want, rtol=1e-14)
        early = attnspec.hopfield_retrieve(state, stored, beta=0.7, n_iters=3, tol=10.0, return_info=True)
        np.testing.assert_array_equal(early.n_iters, [1, 1, 1])

    def test_separated_patterns_come_back_from_noise(self):
        patterns = np.sign(RNG.standard_normal((8, 64)))
        flipped = patterns * np.where(RNG.random((8, 64)) < 0.1, -1, 1)
        out = attnspec.hopfield_retrieve(flipped, patterns, beta=1.0, n_iters=None)
        np.testing.assert_allclose(out, patterns, atol=1e-9)

    def test_a_low_beta_gives_an_average_instead(self):
        patterns = np.sign(RNG.standard_normal((8, 64)))
        out = attnspec.hopfield_retrieve(patterns, patterns, beta=0.001, n_iters=None, tol=1e-10)
        np.testing.assert_allclose(out, np.tile(patterns.mean(0), (8, 1)), atol=0.05)

    def test_leading_axes_of_patterns_or_masks_alone(self):
        got = attnspec.hopfield_retrieve(state[0, 0], stored[0], n_iters=2, tol=None)
        want = [attnspec.hopfield_retrieve(state[0, 0], one, n_iters=2, tol=None) for one in stored[0]]
        np.testing.assert_allclose(got, np.stack(want), rtol=1e-14)
        masks = RNG.random((3, 4, 6)) < 0.7
        got = attnspec.hopfield_retrieve(state[0, 0], stored[0, 0], n_iters=2, tol=None, mask=masks)
        want = [attnspec.hopfield_retrieve(state[0, 0], stored[0, 0], n_iters=2, tol=None, mask=mask) for mask in masks]
        np.testing.assert_allclose(got, np.stack(want), rtol=1e-14)

    def test_return_types(self):
        weights = attnspec.hopfield_retrieve(state, stored, V, return_weights=True)
        assert type(weights).__name__ == "AttentionResult"
        info = attnspec.hopfield_retrieve(state, stored, V, return_info=True)
        np.testing.assert_array_equal(info.weights, weights.weights)
        np.testing.assert_array_equal(info.out, weights.out)


MASK = RNG.random((4, 6)) < 0.6
MASK[1] = False


class TestGradients:
    @pytest.mark.parametrize("options", [{}, {"n_iters": 1}, {"n_iters": 3, "beta": 1.2}, {"n_iters": 2, "mask": MASK}, {"beta": 0.0}])
    def test_of_the_patterns_themselves(self, options):
        arrays = {"state": state, "stored": stored}
        got = attnspec.hopfield_retrieve_backward(**arrays, do=do_plain, **options)
        assert got.dprojection is None
        assert_gradients(lambda **a: attnspec.hopfield_retrieve(**a, tol=None, **options),
                         {"state": got.dstate, "stored": got.dstored}, arrays, do_plain)

    @pytest.mark.parametrize("options", [{}, {"n_iters": 2}, {"n_iters": 1, "beta": 2.0, "mask": MASK}])
    def test_with_a_projection(self, options):
        arrays = {"state": state, "stored": stored, "projection": V}
        got = attnspec.hopfield_retrieve_backward(**arrays, do=do, **options)
        assert_gradients(lambda **a: attnspec.hopfield_retrieve(**a, tol=None, **options),
                         {"state": got.dstate, "stored": got.dstored, "projection": got.dprojection}, arrays, do)

    def test_of_arrays_that_broadcast(self):
        arrays = {"state": state[0, 0], "stored": stored[0]}
        got = attnspec.hopfield_retrieve_backward(**arrays, do=do_plain[0], n_iters=2)
        assert got.dstate.shape == (4, 5)
        assert_gradients(lambda **a: attnspec.hopfield_retrieve(**a, tol=None, n_iters=2),
                         {"state": got.dstate, "stored": got.dstored}, arrays, do_plain[0])

    def test_bad_numbers_behind_a_mask_stay_there(self):
        patterns = np.array([[1.0], [2.0], [np.nan]])
        mask = np.array([True, True, False])
        got = attnspec.hopfield_retrieve_backward([[0.5]], patterns, [[1.0]], n_iters=2, mask=mask)
        want = attnspec.hopfield_retrieve_backward([[0.5]], patterns[:2], [[1.0]], n_iters=2)
        np.testing.assert_allclose(got.dstate, want.dstate, rtol=1e-14)
        np.testing.assert_allclose(got.dstored, [*want.dstored, [0.0]], rtol=1e-14)

    def test_no_patterns(self):
        got = attnspec.hopfield_retrieve_backward(np.ones((2, 3)), np.ones((0, 3)), np.ones((2, 3)), n_iters=2)
        np.testing.assert_array_equal(got.dstate, np.zeros((2, 3)))
        assert got.dstored.shape == (0, 3)

    def test_a_cotangent_of_the_wrong_width_is_refused(self):
        with pytest.raises(ValueError, match=r"^do: expected shape \(..., n, 5\) as the output has, got \(2, 3, 4, 2\)$"):
            attnspec.hopfield_retrieve_backward(state, stored, do)


class TestRefusals:
    @pytest.mark.parametrize("function", [attnspec.hopfield_energy, attnspec.hopfield_update, attnspec.hopfield_retrieve])
    @pytest.mark.parametrize("beta", [-1.0, np.inf, np.nan, "1", [1.0, 2.0]])
    def test_beta(self, function, beta):
        with pytest.raises(ValueError, match=r"^beta: expected"):
            function(state, stored, beta=beta)

    @pytest.mark.parametrize("n_iters", [-2, 1.5, True, "all"])
    def test_n_iters(self, n_iters):
        with pytest.raises(ValueError, match=r"^n_iters: expected a whole number"):
            attnspec.hopfield_retrieve(state, stored, n_iters=n_iters)

    @pytest.mark.parametrize("n_iters", [None, -1])
    def test_no_end(self, n_iters):
        with pytest.raises(ValueError, match=r"^tol: expected a number > 0 where n_iters is None, got None"):
            attnspec.hopfield_retrieve(state, stored, n_iters=n_iters, tol=None)

    @pytest.mark.parametrize("tol", [0.0, -1e-4])
    def test_tol(self, tol):
        with pytest.raises(ValueError, match=r"^tol: expected a number > 0"):
            attnspec.hopfield_retrieve(state, stored, n_iters=2, tol=tol)

    def test_backward_needs_a_number_of_updates(self):
        with pytest.raises(ValueError, match=r"^n_iters: expected a whole number"):
            attnspec.hopfield_retrieve_backward(state, stored, do_plain, n_iters=None)
