"""The bounds of Hopfield networks: float32 code and the twins stay within, mistakes in the formula exceed them."""

import functools

import numpy as np
import pytest

import attnspec
from attnspec import numba_kernels
from attnspec.conformance.bounds import bound
from attnspec.conformance.cases import cases
from attnspec.conformance.verify import judged

f32 = np.float32


def counted(m, mistake):
    """How often each pattern counts."""
    times = np.ones(m, f32)
    if m > 1:
        times[0] = {"one dropped": 0, "one doubled": 2}.get(mistake, 1)
    return times


def weights(state, stored, beta, mask, times):
    s = state @ np.swapaxes(stored, -1, -2) * f32(beta)
    s = s if mask is None else np.where(mask, s, f32(-np.inf))
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(top == -np.inf, 0, top)) * times
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, f32(1), total)


def chosen(state, beta, n_iters, mistake):
    """Beta and the number of updates that a mistaken implementation would take."""
    d = state.shape[-1]
    beta = {"no scale": 1.0, "1/d": 1 / d, "squared": None if beta is None else beta**2}.get(mistake, beta)
    beta = d**-0.5 if beta is None else beta
    n_iters = n_iters + {"one update more": 1, "one update less": -1}.get(mistake, 0)
    return -beta if mistake == "sign" else beta, max(n_iters, 0)


def retrieve(state, stored, projection=None, beta=None, n_iters=0, tol=None, mask=None, mistake=None):
    beta, n_iters = chosen(state, beta, n_iters, mistake)
    mask = None if mistake == "mask forgotten" else mask
    for step in range(n_iters + 1):
        b = 1.0 if mistake == "beta at first only" and step else beta
        A = weights(state, stored, b, mask, counted(len(stored), mistake))
        state = A @ stored
    return state if projection is None else A @ projection


def energy(state, stored, beta=1.0, mistake=None):
    beta, _ = chosen(state, beta, 0, mistake)
    s = state @ np.swapaxes(stored, -1, -2)
    top = s.max(-1)
    top = s.min(-1) if beta < 0 else top
    times = counted(len(stored), mistake)
    total = np.sum(times * np.exp(f32(beta) * (s - top[..., None])), axis=-1)
    log = np.log(total / (1 if mistake == "no log N" else times.sum()))
    lse = top + log / f32(1 if mistake == "lse without 1/beta" else beta)
    squares = np.sum(stored * stored, axis=-1)
    M2 = squares.mean(-1, keepdims=True) if mistake == "mean norm" else squares.max(-1, keepdims=True)
    half, one = (f32(1 if mistake == f"{what} not halved" else 0 if mistake == f"no {what}" else 0.5) for what in ("state", "M"))
    return (lse if mistake == "sign of lse" else -lse) + half * np.sum(state * state, axis=-1) + one * M2


def backward(state, stored, do, projection=None, beta=None, n_iters=0, mask=None, mistake=None):
    beta, n_iters = chosen(state, beta, n_iters, mistake)
    mask = None if mistake == "mask forgotten" else mask
    T = functools.partial(np.swapaxes, axis1=-1, axis2=-2)
    states, A = [state], []
    for _ in range(n_iters + 1):
        A.append(weights(states[-1], stored, beta, mask, counted(len(stored), mistake)))
        states.append(A[-1] @ stored)
    G, dY, dV = do, np.zeros_like(stored), None
    for step in range(n_iters, -1, -1):
        read = step == n_iters and projection is not None
        P, V = A[step], projection if read else stored
        dP = G @ T(V)
        D = 0 if mistake == "no D" else (P * dP).sum(-1, keepdims=True)
        dS = P * (dP - D) * f32(1 if mistake == "dS without beta" else beta)
        dV = T(P) @ G if read else dV
        if mistake != "keys forgotten":
            dY = dY + T(dS) @ states[0 if mistake == "first state" else step + (mistake == "next state")]
        if not read and mistake != "values forgotten" and not (mistake == "updates' values forgotten" and step < n_iters):
            dY = dY + T(P) @ G
        G = G if mistake == "update not pulled back" and step < n_iters else dS @ stored
    return attnspec.HopfieldGradients(G, dY, dV)


WRITTEN = {"hopfield_energy": energy, "hopfield_retrieve": retrieve, "hopfield_retrieve_backward": backward}
OPTIONS = {
    "hopfield_energy": ({"beta": 0.25}, {"beta": 4.0}),
    "hopfield_retrieve": ({"beta": 0.5, "n_iters": 3, "tol": None}, {"beta": 2.0}),
    "hopfield_retrieve_backward": ({"beta": 0.5, "n_iters": 2}, {"beta": 2.0}),
}


def worst(name, function, only_updates=False):
    """The largest err/bound over the standard cases and those with another beta, in float32."""
    record = attnspec.formulas()[name]
    standard = list(cases(record))
    more = [(case.arrays, options) for case in standard if case.name.startswith("normal-n7") for options in OPTIONS[name]]
    rng, (arrays, _) = np.random.default_rng(5), more[0]
    if name != "hopfield_energy":                                       # something else is read out
        wide = {**arrays, "projection": rng.standard_normal((5, 3))} | ({"do": rng.standard_normal((7, 3))} if "do" in arrays else {})
        more += [(wide, {}), (wide, OPTIONS[name][0])]
    found = []
    for arrays, options in [(case.arrays, case.options) for case in standard] + more:
        rounded = {key: x.astype(f32) if x.dtype == float else x for key, x in arrays.items()}
        exact = {key: x.astype(float) if x.dtype == f32 else x for key, x in rounded.items()}
        limits = bound(record, exact, options, "float32")
        error, limit = judged(functools.partial(function, **rounded, **options), record.function(**exact, **options), limits)
        found.append(error / limit)
    assert len(found) >= 14
    return max(found)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_twins_stay_within(name):
    assert worst(name, getattr(numba_kernels, name)) < 1


MISTAKES = {
    "hopfield_energy": (
        "no scale", "1/d", "one dropped", "one doubled", "sign", "squared", "no log N", "lse without 1/beta", "mean norm",
        "state not halved", "M not halved", "no state", "no M", "sign of lse",
    ),
    "hopfield_retrieve": (
        "no scale", "1/d", "one dropped", "one doubled", "sign", "squared", "one update more", "one update less", "beta at first only",
        "mask forgotten",
    ),
    "hopfield_retrieve_backward": (
        "no scale", "1/d", "one dropped", "one doubled", "sign", "squared", "one update more", "one update less", "no D",
        "dS without beta", "keys forgotten", "values forgotten", "updates' values forgotten", "first state", "next state",
        "update not pulled back", "mask forgotten",
    ),
}


@pytest.mark.parametrize("name, mistake", [(name, mistake) for name, rows in MISTAKES.items() for mistake in (None, *rows)])
def test_mistakes_in_the_formula(name, mistake):
    ratio = worst(name, functools.partial(WRITTEN[name], mistake=mistake))
    assert ratio < 1 if mistake is None else ratio > 1
