import itertools
from fractions import Fraction

import numpy as np
import pytest

import attnspec

RNG = np.random.default_rng(2)


def spins(*shape):
    return RNG.choice([-1, 1], shape)


def recall(X, s, threshold, ties, order, sweeps, scale):
    """Asynchronous recall in exact fractions: last state, energies after every visit, sweeps made."""
    X, s, d = X.tolist(), s.tolist(), len(s)
    H = [[sum(x[i] * x[j] for x in X) if i != j else 0 for j in range(d)] for i in range(d)]
    b = [Fraction(t) for t in threshold]

    def energy():
        return -Fraction(sum(H[i][j] * s[i] * s[j] for i in range(d) for j in range(d)), 2 * scale) + sum(b[i] * s[i] for i in range(d))

    energies, made = [energy()], 0
    while made < sweeps:
        made, before = made + 1, list(s)
        for i in order:
            h = Fraction(sum(H[i][j] * s[j] for j in range(d)), scale) - b[i]
            s[i] = 1 if h > 0 else -1 if h < 0 else 1 if ties == "plus" else s[i]
            energies.append(energy())
        if s == before:
            break
    return s, [float(E) for E in energies], made


class TestWeights:
    def test_by_hand(self):
        W = attnspec.hopfield_binary_weights([[1, 1, -1], [1, -1, -1]])
        np.testing.assert_allclose(W, np.array([[0, 0, -2], [0, 0, 0], [-2, 0, 0]]) / 3, rtol=1e-15)
        W = attnspec.hopfield_binary_weights([[1, 1, -1], [1, -1, -1]], normalise=False)
        np.testing.assert_array_equal(W, [[0, 0, -2], [0, 0, 0], [-2, 0, 0]])

    def test_no_patterns(self):
        np.testing.assert_array_equal(attnspec.hopfield_binary_weights(np.ones((0, 3))), np.zeros((3, 3)))
        assert attnspec.hopfield_binary_weights(np.ones((2, 0))).shape == (0, 0)


class TestEnergy:
    def test_by_hand(self):
        W = np.array([[0.0, 1.0, -2.0], [1.0, 0.0, 3.0], [-2.0, 3.0, 0.0]])
        assert attnspec.hopfield_binary_energy([1, 1, 1], W) == -2.0
        assert attnspec.hopfield_binary_energy([1, 1, -1], W) == -(1.0 + 2.0 - 3.0)
        assert attnspec.hopfield_binary_energy([1, 1, -1], W, [0.5, 0.0, 2.0]) == -1.5
        assert attnspec.hopfield_binary_energy([1, 1, -1], W, 0.5) == 0.5

    def test_batch(self):
        W, s, b = RNG.standard_normal((2, 1, 4, 4)), spins(3, 4), RNG.standard_normal((2, 1, 4))
        want = [[-0.5 * t @ W[i, 0] @ t + b[i, 0] @ t for t in s] for i in range(2)]
        np.testing.assert_allclose(attnspec.hopfield_binary_energy(s, W, b), want, rtol=1e-13)


class TestUpdate:
    def test_by_hand(self):
        W = np.array([[0.0, 1.0, -2.0], [1.0, 0.0, 3.0], [-2.0, 3.0, 0.0]])
        np.testing.assert_array_equal(attnspec.hopfield_binary_update([1, 1, 1], W), [-1, 1, 1])
        np.testing.assert_array_equal(attnspec.hopfield_binary_update([1, -1, 1], W), [-1, 1, 1])
        np.testing.assert_array_equal(attnspec.hopfield_binary_update([1, -1, 1], W, mode="synchronous"), [-1, 1, -1])
        np.testing.assert_array_equal(attnspec.hopfield_binary_update([1, -1, 1], W, order=[2, 1]), [1, -1, -1])
        np.testing.assert_array_equal(attnspec.hopfield_binary_update([1, 1, 1], W, threshold=[-2.0, 0.0, 2.0]), [1, 1, -1])

    def test_ties(self):
        np.testing.assert_array_equal(attnspec.hopfield_binary_update([-1, 1], np.zeros((2, 2))), [-1, 1])
        for mode in ("asynchronous", "synchronous"):
            np.testing.assert_array_equal(attnspec.hopfield_binary_update([-1, 1], np.zeros((2, 2)), ties="plus", mode=mode), [1, 1])
        np.testing.assert_array_equal(attnspec.hopfield_binary_update([-1, 1], [[0, 2], [2, 0]], threshold=2.0), [-1, -1])

    def test_the_state_given_is_left_alone(self):
        s = np.array([1, -1])
        attnspec.hopfield_binary_update(s, [[0.0, 1.0], [1.0, 0.0]])
        same = attnspec.hopfield_binary_update(s, [[0.0, 1.0], [1.0, 0.0]], order=np.zeros(0, int))
        same[0] = -1
        np.testing.assert_array_equal(s, [1, -1])

    def test_a_stable_state_is_a_local_minimum(self):
        """Enumerated: exactly the states that no sweep changes have no neighbour of lower energy."""
        W = RNG.standard_normal((6, 6))
        W = (W + W.T) * (1 - np.eye(6))
        all_states = np.array(list(itertools.product([-1, 1], repeat=6)))
        E = attnspec.hopfield_binary_energy(all_states, W)
        flipped = all_states[:, None, :] * (1 - 2 * np.eye(6, dtype=int))
        minimum = np.all(attnspec.hopfield_binary_energy(flipped, W) > E[:, None], axis=-1)
        stable = np.all(attnspec.hopfield_binary_update(all_states, W) == all_states, axis=-1)
        np.testing.assert_array_equal(stable, minimum)
        assert 0 < stable.sum() < 64


class TestRecall:
    @pytest.mark.parametrize("ties", ["keep", "plus"])
    @pytest.mark.parametrize("m, d", [(1, 5), (2, 7), (3, 12), (5, 11), (6, 30), (3, 25)])
    def test_in_exact_fractions(self, m, d, ties):
        for _ in range(6):
            X, s, order = spins(m, d), spins(d), RNG.permutation(d)
            out, energies, sweeps = recall(X, s, [0] * d, ties, order, 100, d)
            got = attnspec.hopfield_binary(X, s, ties=ties, order=order, return_info=True)
            np.testing.assert_array_equal(got.out, out)
            np.testing.assert_allclose(got.energies, energies, rtol=1e-13, atol=1e-13)
            assert (got.n_sweeps, got.converged) == (sweeps, True)
            np.testing.assert_array_equal(attnspec.hopfield_binary(X, s, ties=ties, order=order), out)

    @pytest.mark.parametrize("normalise", [True, False])
    def test_with_a_threshold(self, normalise):
        for _ in range(10):
            X, s, b = spins(3, 9), spins(9), RNG.standard_normal(9)
            out, energies, _ = recall(X, s, b, "keep", range(9), 100, 9 if normalise else 1)
            got = attnspec.hopfield_binary(X, s, threshold=b, normalise=normalise, return_info=True)
            np.testing.assert_array_equal(got.out, out)
            np.testing.assert_allclose(got.energies, energies, rtol=1e-13, atol=1e-13)

    @pytest.mark.parametrize("k", range(1, 50))
    def test_a_field_equal_to_its_threshold_is_a_tie(self, k):
        """k + 1 equal bits, the first -1: its field is k/(k+1), exactly the threshold."""
        ones, s = np.ones((1, k + 1), int), np.ones(k + 1, int)
        s[0] = -1
        options = {"threshold": np.full(k + 1, k / (k + 1)), "order": [0], "max_sweeps": 1}
        assert attnspec.hopfield_binary(ones, s, **options)[0] == -1
        assert attnspec.hopfield_binary(ones, s, ties="plus", **options)[0] == 1

    def test_rounding_of_the_weights_decides_no_tie(self):
        """Fields of 0 among 49ths: the sum of the rounded weights is not 0 for some of these states."""
        X, undecided = spins(3, 49), 0
        W = attnspec.hopfield_binary_weights(X)
        whole = np.rint(49 * W).astype(int)
        for s in spins(200, 49):
            tie = whole @ s == 0
            undecided += np.any(tie & (W @ s != 0))
            got = attnspec.hopfield_binary(X, s, mode="synchronous", max_sweeps=1)
            np.testing.assert_array_equal(got[tie], s[tie])
        assert undecided > 0

    def test_a_cycle_of_two(self):
        # two bits that want to be equal, both flipping at once
        got = attnspec.hopfield_binary([[1, 1]], [1, -1], mode="synchronous", max_sweeps=7, return_info=True)
        np.testing.assert_array_equal(got.out, [-1, 1])
        np.testing.assert_array_equal(got.energies, [0.5] * 8)
        assert (got.n_sweeps, got.converged) == (7, False)
        np.testing.assert_array_equal(attnspec.hopfield_binary([[1, 1]], [1, -1], mode="synchronous", max_sweeps=8), [1, -1])

    def test_synchronous_recall(self):
        X, s = spins(2, 20), spins(20)
        W = X.T @ X - 2 * np.eye(20)
        want = s
        for _ in range(30):
            h = W @ want
            want = np.where(h == 0, want, np.sign(h))
        np.testing.assert_array_equal(attnspec.hopfield_binary(X, s, mode="synchronous", max_sweeps=30), want)

    def test_a_noisy_pattern_comes_back(self):
        X = spins(3, 200)
        noisy = X * np.where(RNG.random((3, 200)) < 0.15, -1, 1)
        np.testing.assert_array_equal(attnspec.hopfield_binary(X, noisy), X)

    def test_batch_is_as_one_by_one(self):
        X, s = spins(2, 3, 10), spins(4, 1, 10)
        got = attnspec.hopfield_binary(X, s, return_info=True)
        assert got.out.shape == (4, 2, 10)
        for i, j in np.ndindex(4, 2):
            one = attnspec.hopfield_binary(X[j], s[i, 0], return_info=True)
            np.testing.assert_array_equal(got.out[i, j], one.out)
            assert got.n_sweeps[i, j] == one.n_sweeps
            assert got.converged[i, j]
            visits = one.energies.size
            np.testing.assert_allclose(got.energies[i, j, :visits], one.energies, rtol=1e-13, atol=1e-13)
            np.testing.assert_allclose(got.energies[i, j, visits:], one.energies[-1], rtol=1e-13, atol=1e-13)

    def test_nothing_to_do(self):
        np.testing.assert_array_equal(attnspec.hopfield_binary(np.ones((0, 3)), [1, -1, 1]), [1, -1, 1])
        np.testing.assert_array_equal(attnspec.hopfield_binary(np.ones((0, 3)), [1, -1, 1], ties="plus"), [1, 1, 1])
        none = attnspec.hopfield_binary(spins(2, 3), [1, -1, 1], max_sweeps=0, return_info=True)
        np.testing.assert_array_equal(none.out, [1, -1, 1])
        assert (none.n_sweeps, none.converged, none.energies.shape) == (0, False, (1,))
        assert attnspec.hopfield_binary(np.ones((2, 0)), np.ones(0)).shape == (0,)


class TestNotANumber:
    """A field of NaN is neither positive nor negative: refused, not taken for -1."""

    @pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
    def test_in_weights_and_thresholds(self, mode):
        W = np.array([[0.0, np.nan], [1.0, 0.0]])
        with pytest.raises(ValueError, match=r"^weights: expected finite numbers, got nan$"):
            attnspec.hopfield_binary_update([1, 1], W, mode=mode)
        with pytest.raises(ValueError, match=r"^weights: expected finite numbers, got -inf$"):
            attnspec.hopfield_binary_update([1, 1], [[0.0, -np.inf], [1.0, 0.0]], mode=mode)
        with pytest.raises(ValueError, match=r"^threshold: expected numbers, got nan$"):
            attnspec.hopfield_binary_update([1, 1], np.zeros((2, 2)), threshold=[0.0, np.nan], mode=mode)
        with pytest.raises(ValueError, match=r"^threshold: expected numbers, got nan$"):
            attnspec.hopfield_binary([[1, 1]], [1, 1], threshold=np.nan, mode=mode)

    def test_an_infinite_threshold_pins_its_bit(self):
        b = [np.inf, -np.inf, 0.0]
        np.testing.assert_array_equal(attnspec.hopfield_binary([[1, -1, 1]], [1, 1, 1], threshold=b), [-1, 1, -1])
        W = attnspec.hopfield_binary_weights([[1, -1, 1]])
        np.testing.assert_array_equal(attnspec.hopfield_binary_update([1, 1, 1], W, threshold=b), [-1, 1, -1])

    def test_the_energy_shows_it(self):
        assert np.isnan(attnspec.hopfield_binary_energy([1, 1], [[0.0, np.nan], [1.0, 0.0]]))


class TestRefusals:
    @pytest.mark.parametrize("name, value, text", [
        ("mode", "parallel", "expected 'asynchronous' or 'synchronous', got 'parallel'"),
        ("ties", "minus", "expected 'keep' or 'plus', got 'minus'"),
        ("order", [0, 3], "expected numbers of bits from 0 to 2, got 3"),
        ("order", [-1], "expected numbers of bits from 0 to 2, got -1"),
        ("order", [0.5], "expected whole numbers"),
        ("threshold", np.ones(2), "expected a shape that broadcasts"),
    ])
    def test_options(self, name, value, text):
        with pytest.raises(ValueError, match=f"^{name}: {text}"):
            attnspec.hopfield_binary([[1, 1, -1]], [1, -1, 1], **{name: value})
        with pytest.raises(ValueError, match=f"^{name}: {text}"):
            attnspec.hopfield_binary_update([1, -1, 1], np.eye(3), **{name: value})

    @pytest.mark.parametrize("name, value", [("max_sweeps", -1), ("max_sweeps", 1.5), ("normalise", "yes")])
    def test_options_of_the_recall(self, name, value):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            attnspec.hopfield_binary([[1, 1, -1]], [1, -1, 1], **{name: value})

    def test_an_order_of_what_has_none(self):
        with pytest.raises(ValueError, match=r"^order: expected None where mode is 'synchronous'"):
            attnspec.hopfield_binary([[1, 1]], [1, -1], order=[1, 0], mode="synchronous")

    def test_bits_are_no_spins(self):
        with pytest.raises(ValueError, match=r"^state: expected entries -1 or 1, got 0$"):
            attnspec.hopfield_binary([[1, -1]], [1, 0])
        with pytest.raises(ValueError, match=r"^patterns: expected entries -1 or 1, got 0$"):
            attnspec.hopfield_binary([[1, 0]], [1, 1])
