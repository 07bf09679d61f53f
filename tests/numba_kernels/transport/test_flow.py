"""Flow attention, both forms, with every option."""

import pytest
from agreement import assert_same

from attnspec import reference


@pytest.mark.parametrize("sizes", [(7, 5), (150, 220)], ids=str)
def test_flow(sizes):
    n, m = sizes
    arrays = reference.flow_attention.record.draw({"n": n, "m": m, "d": 9, "e": 5, "h": 3})
    for options in ({}, {"clip": None}, {"feature": "relu"}, {"competition": "heads", "clip": None, "flow_eps": 1e-6}, {"eps": 0.0}):
        assert_same("flow_attention", arrays, {**options, "return_weights": True})
    arrays = reference.flow_attention_causal.record.draw({"n": n, "d": 9, "e": 5, "h": 3})
    for options in ({}, {"clip": 5}, {"clip": None, "eps": 0.0}):
        assert_same("flow_attention_causal", arrays, {**options, "return_weights": True})
