"""Affine-scaled attention: the sum of the visible values under each kind of mask."""

import numpy as np
import pytest
from agreement import assert_same

from attnspec import reference

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("sizes", [(7, 5), (130, 600), (9, 4)], ids=str)
@pytest.mark.parametrize("name", ["affine_scaled_attention", "affine_scaled_attention_backward"])
def test_every_option(name, sizes):
    n, m = sizes
    arrays = getattr(reference, name).record.draw({"n": n, "m": m, "d": 8, "e": 5, "h": 4, "hk": 2, "c": 6, "b": 2})
    more = {} if name.endswith("backward") else {"return_weights": True}
    mask = RNG.random((4, n, m)) < 0.6
    for options in ({}, {"phi": "sigmoid"}, {"causal": True}, {"causal": "top-left", "n_keys": "allowed"}, {"mask": mask},
                    {"mask": mask, "causal": True, "n_keys": "allowed"}, {"mask": np.zeros((n, m), bool)}, {"scale": 2.0}):
        assert_same(name, arrays, {**options, **more, "enable_gqa": True})
    if not name.endswith("backward"):
        arrays["v"][..., 1, :] = np.nan
        assert_same(name, arrays, {"mask": mask & (np.arange(m) != 1), "enable_gqa": True})
        assert_same(name, arrays, {"causal": "top-left", "enable_gqa": True})
