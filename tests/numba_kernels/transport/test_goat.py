"""GOAT through augmented queries and keys: offsets, grids, gates, masks, and the whole layer."""

import numpy as np
import pytest
from agreement import assert_same

from attnspec import reference

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("sizes", [(7, 5), (150, 220)], ids=str)
def test_heads(sizes):
    n, m = sizes
    gate = {"gate_scale": RNG.standard_normal(4), "gate_bias": RNG.standard_normal(4)}
    positions = ({}, {"causal": True}, {"causal": "top-left", "key_offset": 3}, {"causal": True, "query_offset": 4}, gate,
                 {"grid": (20, 20)}, {"grid": (20, 20), "cls": True, **gate}, {"position_base": 100.0})
    for name, more in (("goat_augmented_qk", {}), ("goat_head_attention", {"return_weights": True})):
        sizes = {"n": n, "m": m, "d": 12, "h": 4, "hk": 2, **({"e": 5} if more else {})}
        arrays = getattr(reference, name).record.draw(sizes)
        for options in positions:
            assert_same(name, arrays, {**options, **more, "enable_gqa": True})
    options = {"enable_gqa": True, "return_weights": True}
    assert_same("goat_head_attention", arrays, {**options, "mask": RNG.random((4, n, m)) < 0.6})
    arrays["u"][:, 1], arrays["u"][0] = -np.inf, -np.inf
    assert_same("goat_head_attention", arrays, {**options, **gate})


@pytest.mark.parametrize("sizes", [(7, 5), (150, 220)], ids=str)
def test_layer(sizes):
    n, m = sizes
    arrays = reference.goat_attention.record.draw({"n": n, "m": m, "d": 12, "h": 4, "hk": 2, "c": 10})
    for options in ({}, {"causal": True, "recency": RNG.standard_normal(2)}, {"key_mask": RNG.random(m) < 0.7},
                    {"training_length": 50, "prior_scale": 0.5}):
        assert_same("goat_attention", {**arrays, **options}, {"return_weights": True})
