"""Cog attention: zero logits, both normalisers, masks, gradients."""

import numpy as np
import pytest
from agreement import assert_same

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("sizes", [(7, 5), (130, 600)], ids=str)
@pytest.mark.parametrize("poison", [False, True])
def test_attention_and_gradients(sizes, poison):
    n, m = sizes
    arrays = {"q": RNG.standard_normal((2, 4, n, 8)), "k": RNG.standard_normal((2, 2, m, 8)), "v": RNG.standard_normal((2, 2, m, 5))}
    arrays["q"][:, :, 2] = 0                                           # all its logits are 0
    do = RNG.standard_normal((2, 4, n, 5))
    masks = {"mask": RNG.random((4, n, m)) < 0.6}, {"causal": True}, {"causal": "top-left"}, {"mask": np.zeros((n, m), bool)}
    for options in masks if poison else ({}, {"scale": -3.0}, *masks):
        if poison:
            arrays["v"][..., 1, :] = np.nan
            options = {**options, "mask": options.get("mask", np.ones((n, m), bool)) & (np.arange(m) != 1)}
        for normaliser in ("visible", "nonzero"):
            assert_same("cog_attention", arrays, {**options, "enable_gqa": True, "normaliser": normaliser, "return_weights": True})
        assert_same("cog_attention_backward", {**arrays, "do": do}, {**options, "enable_gqa": True})


def test_weights():
    p = RNG.standard_normal((2, 7, 70)) * np.array([1, 40])[:, None, None]
    p[0, 2], p[0, 3, 4], p[0, 4, 5], p[0, 5] = 0, np.nan, np.inf, 1e300
    for mask in (None, RNG.random((7, 70)) < 0.6, RNG.random(70) < 0.5, np.zeros((7, 1), bool), np.arange(70) != 4):
        for normaliser in ("visible", "nonzero"):
            assert_same("cog_weights", {"p": p, "mask": mask}, {"normaliser": normaliser})
    assert_same("cog_weights", {"p": np.zeros((3, 0))})
