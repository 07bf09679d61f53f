"""Hopfield energy, update, retrieval by count and by tolerance, and its gradients."""

import numpy as np
import pytest
from agreement import assert_same

from attnspec import reference

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("sizes", [(7, 5), (150, 220)], ids=str)
def test_every_option(sizes):
    n, m = sizes
    arrays = reference.hopfield_retrieve.record.draw({"n": n, "m": m, "d": 9, "h": 3})
    mask = RNG.random((n, m)) < 0.6
    for options in ({}, {"n_iters": 3, "tol": None}, {"n_iters": 20, "tol": 1e-3, "beta": 2.0}, {"n_iters": None, "beta": 3.0},
                    {"mask": mask}, {"n_iters": 2, "mask": mask}):
        assert_same("hopfield_retrieve", arrays, {**options, "return_info": True})
    projected = {**arrays, "projection": RNG.standard_normal((3, m, 4))}
    assert_same("hopfield_retrieve", projected, {"n_iters": 2})
    assert_same("hopfield_update", arrays, {"mask": mask, "beta": 1.5})
    for beta in (None, 0, 1e-3, 1.0, 50.0):
        assert_same("hopfield_energy", arrays, {"beta": beta})
    backward = reference.hopfield_retrieve_backward.record.draw({"n": n, "m": m, "d": 9, "h": 3})
    for options in ({}, {"n_iters": 2}, {"n_iters": 1, "mask": mask}):
        assert_same("hopfield_retrieve_backward", backward, options)
    assert_same("hopfield_retrieve_backward", {**projected, "do": RNG.standard_normal((3, n, 4))}, {"n_iters": 1})


def test_no_patterns():
    arrays = {"state": np.ones((2, 3)), "stored": np.zeros((0, 3))}
    assert_same("hopfield_energy", arrays)
    assert_same("hopfield_update", arrays)
