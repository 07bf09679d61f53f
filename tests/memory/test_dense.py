import itertools

import mpmath
import numpy as np
import pytest

import attnspec

RNG = np.random.default_rng(3)
EVERY = [{}, {"degree": 1}, {"degree": 2}, {"degree": 4}, {"degree": 7}, {"rectified": True}, {"degree": 2, "rectified": True},
         {"interaction": "exponential"}]


def spins(*shape):
    return RNG.choice([-1, 1], shape)


def F(z, degree=3, rectified=False, interaction="polynomial"):
    """In whole numbers, or with 60 digits."""
    if interaction == "exponential":
        return mpmath.exp(z)
    return 0 if rectified and z <= 0 else int(z) ** degree


def energy(s, X, **options):
    return -sum((F(sum(int(a) * int(b) for a, b in zip(x, s, strict=True)), **options) for x in X), start=0)


def one_sweep(s, X, order, **options):
    """Visit by visit, from the energies of both values of a bit."""
    s = [int(b) for b in s]
    with mpmath.workdps(60):
        for i in order:
            up, down = (energy([*s[:i], b, *s[i + 1:]], X, **options) for b in (1, -1))
            if abs(up - down) > mpmath.mpf(10) ** -40:
                s[i] = 1 if up < down else -1
    return s


class TestEnergy:
    def test_by_hand(self):
        X = [[1, 1, 1, 1], [1, 1, -1, -1], [-1, -1, -1, 1]]               # overlaps with (1, 1, 1, 1): 4, 0, -2
        E = attnspec.dense_associative_memory_energy
        assert E([1, 1, 1, 1], X) == -(64 - 8)
        assert E([1, 1, 1, 1], X, degree=2) == -(16 + 4)
        assert E([1, 1, 1, 1], X, rectified=True) == -64
        np.testing.assert_allclose(E([1, 1, 1, 1], X, interaction="exponential"), -(np.exp(4) + 1 + np.exp(-2)), rtol=1e-15)

    @pytest.mark.parametrize("options", EVERY)
    def test_of_random_states(self, options):
        X, s = spins(2, 3, 9), spins(4, 1, 9)
        got = attnspec.dense_associative_memory_energy(s, X, **options)
        want = [[float(energy(s[i, 0], X[j], **options)) for j in range(2)] for i in range(4)]
        np.testing.assert_allclose(got, want, rtol=1e-13)

    def test_beyond_float64(self):
        X, s = np.ones((1, 1000), int), np.ones(1000, int)
        E = attnspec.dense_associative_memory_energy
        assert E(s, X, degree=200) == -np.inf
        assert E(-s, X, degree=201) == np.inf
        assert E(-s, X, degree=201, rectified=True) == 0.0
        assert E(s, X, interaction="exponential") == -np.inf
        assert E(np.concatenate([s[1:], [-1]]), np.stack([X[0], -X[0]]), degree=201) == 0.0      # the infinities cancel exactly

    def test_large_powers_are_rounded_once(self):
        X, s = np.ones((1, 101), int), np.ones(101, int)
        assert attnspec.dense_associative_memory_energy(s, X, degree=11) == -float(101**11)

    def test_no_patterns(self):
        for options in EVERY:
            np.testing.assert_array_equal(attnspec.dense_associative_memory_energy(spins(3, 4), np.ones((0, 4)), **options), np.zeros(3))


class TestUpdate:
    @pytest.mark.parametrize("options", EVERY)
    @pytest.mark.parametrize("m, d", [(1, 6), (3, 8), (8, 5)])
    def test_from_the_energies_of_both_values(self, options, m, d):
        for _ in range(6):
            X, s, order = spins(m, d), spins(d), RNG.permutation(d)
            want = one_sweep(s, X, order, **options)
            np.testing.assert_array_equal(attnspec.dense_associative_memory(s, X, order=order, **options), want)
            for _ in range(20):
                want = one_sweep(want, X, order, **options)
            np.testing.assert_array_equal(attnspec.dense_associative_memory(s, X, order=order, max_sweeps=21, **options), want)

    @pytest.mark.parametrize("options", EVERY)
    def test_all_bits_at_once(self, options):
        X, s = spins(3, 7), spins(7)
        want = [one_sweep(s, X, [i], **options)[i] for i in range(7)]
        np.testing.assert_array_equal(attnspec.dense_associative_memory(s, X, mode="synchronous", **options), want)

    @pytest.mark.parametrize("options", EVERY)
    def test_a_stable_state_is_a_local_minimum(self, options):
        X = spins(3, 6)
        states = np.array(list(itertools.product([-1, 1], repeat=6)))
        E = attnspec.dense_associative_memory_energy(states, X, **options)
        flipped = states[:, None, :] * (1 - 2 * np.eye(6, dtype=int))
        rise = attnspec.dense_associative_memory_energy(flipped, X, **options) - E[:, None]
        minimum = np.all(rise >= -1e-12, axis=-1)
        stable = np.all(attnspec.dense_associative_memory(states, X, **options) == states, axis=-1)
        np.testing.assert_array_equal(stable, minimum)

    def test_ties_stay(self):
        # two opposite patterns: exponentials and odd powers of their overlaps cancel
        X = np.array([[1, 1, -1, 1], [-1, -1, 1, -1]])
        for s in itertools.product([-1, 1], repeat=4):
            np.testing.assert_array_equal(attnspec.dense_associative_memory(s, X, mode="synchronous"), s)
        pairs = np.array([[1, 1, 1], [-1, 1, 1]])                        # the first bit has no field
        for s in itertools.product([-1, 1], repeat=3):
            for options in EVERY:
                assert attnspec.dense_associative_memory(s, pairs, order=[0], **options)[0] == s[0]

    def test_exponentials_do_not_overflow(self):
        X = spins(40, 3000)
        noisy = X * np.where(RNG.random(X.shape) < 0.2, -1, 1)
        out = attnspec.dense_associative_memory(noisy[:2], X, interaction="exponential", order=np.arange(50))
        np.testing.assert_array_equal(out[:, :50], X[:2, :50])

    def test_high_powers_do_not_overflow(self):
        X = spins(5, 1000)
        noisy = X * np.where(RNG.random(X.shape) < 0.2, -1, 1)
        out = attnspec.dense_associative_memory(noisy, X, degree=301, order=np.arange(20))
        np.testing.assert_array_equal(out[:, :20], X[:, :20])

    def test_more_patterns_than_bits(self):
        """30 patterns of 40 bits: far beyond the classical network, not beyond the exponential one."""
        X = spins(30, 40)
        assert np.any(attnspec.hopfield_binary(X, X) != X)
        np.testing.assert_array_equal(attnspec.dense_associative_memory(X, X, interaction="exponential"), X)

    def test_trace(self):
        X, s = spins(3, 8), spins(8)
        got = attnspec.dense_associative_memory(s, X, max_sweeps=50, return_info=True)
        assert got.converged
        assert got.energies.shape == (1 + 8 * got.n_sweeps,)
        assert got.energies[0] == attnspec.dense_associative_memory_energy(s, X)
        assert got.energies[-1] == attnspec.dense_associative_memory_energy(got.out, X)
        once = attnspec.dense_associative_memory(s, X, return_info=True)
        np.testing.assert_array_equal(once.out, attnspec.dense_associative_memory(s, X))
        assert once.n_sweeps == 1

    def test_batch_is_as_one_by_one(self):
        X, s = spins(2, 3, 6), spins(4, 1, 6)
        for options in EVERY:
            got = attnspec.dense_associative_memory(s, X, **options)
            want = [[attnspec.dense_associative_memory(s[i, 0], X[j], **options) for j in range(2)] for i in range(4)]
            np.testing.assert_array_equal(got, want)

    def test_no_patterns_or_no_bits(self):
        for options in EVERY:
            np.testing.assert_array_equal(attnspec.dense_associative_memory([1, -1], np.ones((0, 2)), **options), [1, -1])
            assert attnspec.dense_associative_memory(np.ones((3, 0)), np.ones((2, 0)), **options).shape == (3, 0)


@pytest.mark.parametrize("function", [attnspec.dense_associative_memory, attnspec.dense_associative_memory_energy])
@pytest.mark.parametrize("options, name", [
    ({"degree": 0}, "degree"), ({"degree": 2.5}, "degree"), ({"rectified": 1}, "rectified"), ({"interaction": "cubic"}, "interaction"),
    ({"interaction": "exponential", "rectified": True}, "rectified"),
])
def test_refusals(function, options, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        function([1, -1], [[1, 1]], **options)


@pytest.mark.parametrize("name, value", [("mode", "parallel"), ("order", [2]), ("max_sweeps", -1)])
def test_refusals_of_the_update(name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        attnspec.dense_associative_memory([1, -1], [[1, 1]], **{name: value})
