"""Gated attention at each position, with each activation, and energy-gated attention."""

import numpy as np
import pytest
from agreement import assert_same

from attnspec import reference

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("sizes", [(7, 5), (130, 200)], ids=str)
def test_every_gate(sizes):
    n, m = sizes
    arrays = {"q": RNG.standard_normal((2, 4, n, 8)), "k": RNG.standard_normal((2, 2, m, 8)), "v": RNG.standard_normal((2, 2, m, 6)),
              "x": RNG.standard_normal((2, n, 10))}
    keys = RNG.standard_normal((2, m, 10))
    w_o, b_o = RNG.standard_normal((7, 4, 6)), RNG.standard_normal(7)
    gates = [("G1", (4, 6), {}), ("G1", (1, 1), {"w_o": w_o, "b_o": b_o}), ("G2", (2, 6), {"x_keys": keys}),
             ("G3", (1, 8), {"x_keys": keys}), ("G4", (4, 1), {}), ("G5", (1, 7), {"w_o": w_o})]
    for position, (heads, width), more in gates:
        arrays["w_gate"] = RNG.standard_normal((heads, width, 10))
        for activation in ("sigmoid", "silu", "identity", "ns_sigmoid"):
            for mode in ("multiplicative", "additive"):
                options = {"position": position, "activation": activation, "mode": mode, "enable_gqa": True, **more}
                assert_same("gated_attention", arrays, {**options, "b_gate": RNG.standard_normal((heads, width)), "return_weights": True})
                assert_same("gated_attention", arrays, {**options, "causal": True, "mask": RNG.random((n, m)) < 0.3})


@pytest.mark.parametrize("n", [1, 7, 150])
def test_energy_gates(n):
    arrays = reference.energy_gated_attention.record.draw({"n": n, "d": 9, "e": 5, "h": 3})
    for options in ({}, {"causal": False}, {"znorm": "prefix"}, {"std_floor": "add", "znorm": "prefix"}, {"scale": 2.0}):
        assert_same("energy_gated_attention", arrays, {**options, "return_weights": True})
    steep = {**arrays, "alpha": 60 * arrays["alpha"]}                  # gates near 0: the floor of the normaliser matters
    assert_same("energy_gated_attention", steep, {"return_weights": True})
