import numpy as np
import pytest

import attnspec

from derivatives import complex_step

RNG = np.random.default_rng(0)


def test_by_hand():
    x = np.array([[1.0, 0.0], [2.0, 6.0], [6.0, 0.0]])                 # means 3 and 2
    np.testing.assert_array_equal(attnspec.context_broadcasting(x), [[2.0, 1.0], [2.5, 4.0], [4.5, 1.0]])
    np.testing.assert_array_equal(attnspec.context_broadcasting(x, lam=[1.0, -0.5]), [[4.0, -1.0], [5.0, 5.0], [9.0, -1.0]])


def test_it_is_a_matrix_with_eigenvalues_1_and_one_half():
    matrix = attnspec.context_broadcasting(np.eye(5))
    np.testing.assert_allclose(np.linalg.eigvalsh(matrix), [0.5, 0.5, 0.5, 0.5, 1.0], rtol=1e-14)
    np.testing.assert_allclose(matrix, 0.5 * np.eye(5) + 0.1, rtol=1e-15)


def test_sequences_of_a_batch_are_apart():
    x = RNG.standard_normal((2, 3, 4))
    np.testing.assert_array_equal(attnspec.context_broadcasting(x)[1], attnspec.context_broadcasting(x[1]))


def test_no_tokens():
    np.testing.assert_array_equal(attnspec.context_broadcasting(np.ones((2, 0, 4))), np.ones((2, 0, 4)))


def test_derivative_by_the_weights():
    x, direction = RNG.standard_normal((5, 3)), RNG.standard_normal(3)
    got = complex_step(lambda lam: attnspec.context_broadcasting(x, lam=lam), {"lam": RNG.standard_normal(3)}, "lam", direction)
    np.testing.assert_allclose(got, np.tile(direction * x.mean(0), (5, 1)), rtol=1e-14)


def test_weights_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"^lam: expected shape \(c,\) with c = 3 as in x, got \(4,\)$"):
        attnspec.context_broadcasting(np.ones((2, 3)), lam=np.ones(4))


def test_infinite_tokens_spoil_the_mean_quietly():
    np.testing.assert_array_equal(attnspec.context_broadcasting([[np.inf, 1.0], [-np.inf, 3.0]]), [[np.nan, 1.5], [np.nan, 2.5]])
    np.testing.assert_array_equal(attnspec.context_broadcasting([[np.inf], [1.0]], lam=[0.0]), [[np.nan], [np.nan]])
