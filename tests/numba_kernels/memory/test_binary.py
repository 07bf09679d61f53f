"""Binary and dense associative memory, bit by bit those of the reference."""

import numpy as np
import pytest
from agreement import assert_same

from attnspec import numba_kernels

RNG = np.random.default_rng(0)


def spins(*shape):
    return 2 * RNG.integers(0, 2, shape) - 1


@pytest.mark.parametrize("sizes", [(16, 3), (33, 5), (5, 1)], ids=str)
def test_recall(sizes):
    d, m = sizes
    for _ in range(10):
        arrays = {"patterns": spins(2, m, d), "state": spins(4, 2, d)}
        for options in ({}, {"mode": "synchronous", "max_sweeps": 3}, {"ties": "plus"}, {"threshold": RNG.standard_normal(d)},
                        {"order": RNG.permutation(d)}, {"normalise": False, "max_sweeps": 2}, {"max_sweeps": 0}):
            assert_same("hopfield_binary", arrays, options, rtol=0, atol=0)
            assert_same("hopfield_binary", arrays, {**options, "return_info": True}, rtol=1e-12)
        for options in ({}, {"degree": 2}, {"degree": 5, "rectified": True, "max_sweeps": 4},
                        {"interaction": "exponential", "max_sweeps": 3}, {"mode": "synchronous", "max_sweeps": 3},
                        {"order": RNG.integers(0, d, 7)}):
            assert_same("dense_associative_memory", arrays, options, rtol=0, atol=0)


def test_what_64_bits_do_not_hold_is_refused():
    arrays = {"patterns": spins(4, 100), "state": spins(100)}
    with pytest.raises(ValueError, match=r"^degree: expected 2 m \(d \+ 1\)\^degree below 2\^63, got degree 10 for 4 patterns"):
        numba_kernels.dense_associative_memory(**arrays, degree=10)
