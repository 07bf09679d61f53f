"""The bound of SDM attention: float32 code with float64 cosines and the twin stay within, mistakes exceed it; bits are exact."""

import math

import numpy as np
import pytest

import attnspec
from attnspec import numba_kernels
from attnspec.conformance.bounds import bound
from attnspec.conformance.cases import cases
from attnspec.conformance.verify import judged

f32 = np.float32
RECORD = attnspec.formulas()["sdm_attention"]
WEIGHTINGS = [{}, {"weighting": "exponential", "radius": None, "beta": 4.0}, {"weighting": "cap"}, {"weighting": "cap", "resolution": 50}]
STEPS = [{}, {"n_iters": 3}, {"unit_norm": True}, {"n_iters": 2, "unit_norm": True}]


def unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))


def attention(
    queries, addresses, pointers, radius=None, weighting="circle", beta=4.0, resolution=None, n_iters=1, unit_norm=False, mistake="",
):
    """Weights and averages in float32; cosines too where the weights are smooth."""
    d = queries.shape[-1]
    if mistake == "one dropped":
        addresses, pointers = addresses[1:], pointers[1:]
    if mistake == "one doubled":
        addresses, pointers = (np.concatenate([x, x[:1]]) for x in (addresses, pointers))
    if mistake == "wider":
        radius, beta = None if radius is None else min(d, radius + 1), 1.05 * beta
    kind, xi = f32 if weighting == "exponential" else float, queries
    for _ in range(n_iters + (mistake == "one step more")):
        cos = unit(xi.astype(kind)) @ unit(addresses.astype(kind)).T
        if mistake == "not normalised":
            cos = np.clip(xi.astype(kind) @ addresses.astype(kind).T / d, -1, 1)
        if weighting == "circle":
            nearest = np.round if mistake == "distances rounded" else np.floor
            d_v = np.clip(nearest(d * (1 - cos) / 2 + 1e-9), 0, d).astype(int)
            table = [sum(math.comb(k, i) * math.comb(d - k, j) for i in range(k + 1) for j in range(d - k + 1)
                         if i + j <= radius and k - i + j <= radius) for k in range(d + 1)]
            w = np.array(table, float)[d_v]
        elif weighting == "cap":
            index = np.clip(np.trunc((resolution or 1) * (cos + 1) / 2 - 1), 0, None)
            at = cos if resolution is None else -1 + 2 * index / (resolution - 1)
            w = attnspec.sdm_cap_intersection(np.clip(at, -1, 1), n_bits=d, radius=radius)
        else:
            w = np.exp(f32(-beta if mistake == "sign" else beta) * (cos - np.max(cos, axis=-1, keepdims=True)))
        total = w.sum(-1, keepdims=True)
        o = (w / np.where(total == 0, 1, total)).astype(f32) @ pointers
        o = unit(o) if unit_norm and mistake != "norm forgotten" else o
        xi = np.where(total == 0, xi, o * f32(1.05 if mistake == "5 % off" else 1))
    return xi


def worst(function, **options):
    """The largest err/bound over the standard cases that set no option of their own."""
    found = []
    for case in cases(RECORD):
        n, d = case.arrays["queries"].shape
        if case.options or d < 2 or (n > 10 and "weighting" in options):      # caps take the reference long
            continue
        given = {**{k: x.astype(f32) if x.dtype == float else int(x) for k, x in case.arrays.items()}, **options}
        exact = {k: x.astype(float) if isinstance(x, np.ndarray) else x for k, x in given.items()}
        arrays, rest = ({k: x for k, x in exact.items() if (k in RECORD.shapes) == one} for one in (True, False))
        if exact["radius"] is None:
            arrays.pop("radius")
        error, limit = judged(lambda given=given: function(**given), RECORD.function(**exact), bound(RECORD, arrays, rest, "float32"))
        found.append(error / limit)
    assert len(found) == (6 if "weighting" in options else 9)
    return max(found)


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_correct_ones_stay_within(weighting, steps):
    assert worst(attention, **weighting, **steps) < 1
    assert worst(numba_kernels.sdm_attention, **weighting, **steps) < 0.6


MISTAKES = ["one dropped", "one doubled", "wider", "one step more", "not normalised", "5 % off"]


@pytest.mark.parametrize("weighting, mistake", [
    *((weighting, mistake) for weighting in WEIGHTINGS for mistake in MISTAKES),
    (WEIGHTINGS[0], "distances rounded"), (WEIGHTINGS[1], "sign"),
], ids=str)
def test_mistakes_exceed(weighting, mistake):
    assert worst(lambda **call: attention(**call, mistake=mistake), **weighting) > 1


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_a_forgotten_norm_exceeds(weighting):
    assert worst(lambda **call: attention(**call, mistake="norm forgotten"), **weighting, unit_norm=True) > 1


@pytest.mark.parametrize("name", ["sdm_write", "sdm_read", "sdm_update", "sdm_circle_intersection"])
def test_bits_and_counts_are_exact(name):
    record = attnspec.formulas()[name]
    arrays = record.draw()
    assert all(np.all(limit == 0) for limit in bound(record, arrays, {}, "float64").values())
    want = record.function(**arrays)
    outputs = want._asdict() if hasattr(want, "_asdict") else {"out": want}
    changed = {key: x + (np.arange(x.size).reshape(x.shape) == x.size - 1) for key, x in outputs.items()}
    got = type(want)(**changed) if hasattr(want, "_asdict") else changed["out"]
    error, limit = judged(lambda: got, want, bound(record, arrays, {}, "float64"))
    assert error == 1 > limit
