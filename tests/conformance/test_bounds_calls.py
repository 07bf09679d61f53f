"""Bounds against wrong calls: what the formula itself gives, in float64, for a call that differs as a mistaken kernel would differ."""

import numpy as np
import pytest

import attnspec
from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.cases import cases

RECORDS = attnspec.formulas()


def times(factor, *names):
    return lambda call: {**call, **{name: factor * call[name] for name in names}}


def swapped(one, other):
    return lambda call: {**call, one: call[other], other: call[one]}


def changed(**options):
    return lambda call: {**call, **options}


def one_key_less(*names):
    return lambda call: {**call, **{name: call[name][..., 1:, :] for name in names}}


def one_key_twice(*names):
    return lambda call: {**call, **{name: np.concatenate([call[name], call[name][..., :1, :]], axis=-2) for name in names}}


def keys_in_turn(*names):
    """Values, or whatever goes with the keys, moved by one key."""
    return lambda call: {**call, **{name: np.roll(call[name], 1, axis=-2) for name in names}}


def moved(name, by):
    return lambda call: {**call, name: call[name] + by}


HEADS = {
    "scale of d, not of the content": lambda call: {**call, "q": call["q"] * np.sqrt(1 - 0.5 / call["q"].shape[-1])},
    "no waves": times(0.0, "a", "b"), "waves the other way": times(-1.0, "b"), "a and b swapped": swapped("a", "b"),
    "queries one later": changed(query_offset=1), "another base": changed(position_base=1e3), "values moved": keys_in_turn("v"),
}
FLOW = {
    "a key less": one_key_less("k", "v"), "a key twice": one_key_twice("k", "v"), "values moved": keys_in_turn("v"),
    "no clip": changed(clip=None), "clip of 1.1": changed(clip=1.1), "q and k 5 % off": times(1.05, "q", "k"),
    "signs": times(-1.0, "q", "k"),
    "eps of 1e-3": changed(eps=1e-3), "no features of the keys": times(0.0, "k"),
}
AFFINE = {
    "no scale": changed(scale=1.0), "scale 5 % off": lambda call: {**call, "scale": 1.05 / np.sqrt(call["q"].shape[-1])},
    "alpha_ma forgotten": times(0.0, "alpha_ma"), "alpha of -x": times(-1.0, "x"), "another phi": changed(phi="sigmoid"),
    "a key less": one_key_less("k", "v"), "values moved": keys_in_turn("v"), "causal": changed(causal=True),
}
GRADIENTS = {"sign": times(-1.0, "do"), "5 % off": times(1.05, "do"), "cotangents moved": keys_in_turn("do")}
MISTAKES = {
    "goat_head_attention": HEADS,
    "goat_augmented_qk": {name: make for name, make in HEADS.items() if name != "values moved"},
    "goat_attention": {
        "no waves": times(0.0, "a", "b"), "waves the other way": times(-1.0, "b"), "a and b swapped": swapped("a", "b"),
        "queries one later": changed(query_offset=1), "no bias at the end": times(0.0, "b_o"), "no bias of the values": times(0.0, "b_v"),
        "no network": times(0.0, "gain"), "no bump": times(0.0, "bump"), "the network's bias": times(0.0, "b1"),
        "half the prior": changed(prior_scale=0.5), "another base": changed(absolute_base=1e3),
        "w_k and w_q swapped": swapped("w_q", "w_k"),
    },
    "flow_attention": {**FLOW, "relu": changed(feature="relu"), "flow_eps of 1e-3": changed(flow_eps=1e-3)},
    "flow_attention_causal": {name: make for name, make in FLOW.items() if name not in ("a key less", "a key twice")},
    "affine_scaled_attention": AFFINE,
    "affine_scaled_attention_backward": {**AFFINE, **GRADIENTS},
    "gated_attention": {
        "gates of -x": times(-1.0, "x"), "half gates": times(0.5, "x"), "silu": changed(activation="silu"),
        "added": changed(mode="additive"),
        "before the values are weighed": lambda call: {**call, "position": "G4"}, "no scale": changed(scale=1.0),
        "values moved": keys_in_turn("v"), "a key less": one_key_less("k", "v"), "tokens moved": keys_in_turn("x"),
    },
    "energy_gated_attention": {
        "not causal": changed(causal=False), "no scale": changed(scale=1.0), "tau 0.05 up": moved("tau", 0.05),
        "alpha 5 % up": times(1.05, "alpha"), "prefixes": changed(znorm="prefix"),
        "first energy alone": lambda call: {**call, "mixing": call["mixing"] - 50.0 * (np.arange(call["mixing"].shape[-1]) > 0)},
    },
    "hopfield_energy": {
        "beta 5 % up": lambda call: {**call, "beta": 1.05 * call.get("beta", 1.0)}, "a pattern less": one_key_less("stored"),
        "a pattern twice": one_key_twice("stored"), "sign": times(-1.0, "state"), "state 1 % up": times(1.01, "state"),
    },
    "hopfield_retrieve": {
        "one update more": changed(n_iters=1, tol=None),
        "beta 5 % up": lambda call: {**call, "beta": 1.05 / np.sqrt(call["state"].shape[-1])},
        "a pattern less": one_key_less("stored"), "sign": times(-1.0, "state"),
    },
    "hopfield_retrieve_backward": {
        **GRADIENTS, "one update more": changed(n_iters=1), "beta 5 % up": lambda call: {
            **call, "beta": 1.05 / np.sqrt(call["state"].shape[-1])},
    },
}
PAIRS = [(name, mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes]


@pytest.mark.parametrize("name, mistake", PAIRS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_wrong_call_exceeds_the_bound(name, mistake, dtype):
    record = RECORDS[name]
    for case in cases(record):
        call = {**case.arrays, **case.options}
        try:
            limits = bound(record, case.arrays, case.options, dtype)
            right, wrong = record.function(**call), record.function(**MISTAKES[name][mistake](call))
        except (NoBound, ValueError, KeyError):              # KeyError: an array that is drawn only where there is room for it
            continue
        right, wrong = (x if isinstance(x, tuple) else (x,) for x in (right, wrong))
        for limit, theirs, ours in zip(limits.values(), right, wrong, strict=False):
            if theirs is not None and theirs.shape == ours.shape and np.any(np.abs(ours - theirs) > limit):
                return
    pytest.fail(f"{mistake} stays within the bound of {name} on every standard case")
