"""Attention with a prior: a bias, and a mask where it is -inf."""

import numpy as np
import pytest
from agreement import assert_same

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("sizes", [(7, 5), (130, 600)], ids=str)
def test_priors(sizes):
    n, m = sizes
    arrays = {"q": RNG.standard_normal((3, n, 8)), "k": RNG.standard_normal((3, m, 8)), "v": RNG.standard_normal((3, m, 4))}
    holes = np.where(RNG.random((n, m)) < 0.4, -np.inf, RNG.standard_normal((n, m)))
    for prior in (RNG.standard_normal((n, m)), holes, RNG.standard_normal(m), np.full(m, -np.inf), np.zeros(())):
        for options in ({}, {"tau": 0.7, "causal": True}, {"scale": 3.0, "mask": RNG.random((n, m)) < 0.5}):
            assert_same("prior_attention", {**arrays, "log_prior": prior}, {**options, "return_weights": True})
    arrays["v"][:, 1] = np.nan
    prior = np.where(np.arange(m) == 1, -np.inf, 0.0)
    assert_same("prior_attention", {**arrays, "log_prior": prior}, {"return_weights": True})
