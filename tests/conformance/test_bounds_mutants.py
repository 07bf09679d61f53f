"""Every bound against mistakes that no formula survives, in float32: one element 5 % off, all 1e-3 off, a flipped sign, a shift."""

import numpy as np
import pytest

import attnspec
from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.cases import cases

RECORDS = [record for record in attnspec.formulas().values() if record.bound]


def one_off(x):
    x = x.copy()
    at = np.unravel_index(np.argmax(np.abs(x)), x.shape)
    x[at] *= 1.05
    return x


MISTAKES = {
    "one element 5 % off": one_off, "all 1e-3 off": lambda x: 1.001 * x, "sign flipped": lambda x: -x,
    "moved by one": lambda x: np.roll(x, 1, axis=-1),
}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_mistakes_exceed_the_bound(record):
    caught = dict.fromkeys(MISTAKES, False)
    for case in cases(record):
        arrays = {key: x.astype(np.float32).astype(float) if x.dtype == float else x for key, x in case.arrays.items()}
        try:
            limits = bound(record, arrays, case.options, "float32")
            want = record.function(**arrays, **case.options)
        except (NoBound, ValueError):
            continue
        for name, limit in limits.items():
            right = np.asarray(getattr(want, name) if isinstance(want, tuple) else want, dtype=float)
            for mistake, make in MISTAKES.items():
                caught[mistake] |= bool(right.size and np.any(np.abs(make(right) - right) > limit))
    assert caught == dict.fromkeys(MISTAKES, True)


SLIPS = [
    ("context_broadcasting", lambda call: {**call, "lam": np.ones(call["x"].shape[-1])}),                       # not halved
    ("context_broadcasting", lambda call: {**call, "x": call["x"] + 1e-4 * np.mean(call["x"], axis=-2, keepdims=True)}),
    ("context_broadcasting", lambda call: {**call, "lam": np.zeros(call["x"].shape[-1])}),                      # nothing broadcast
    ("multi_query_attention", lambda call: {**call, "scale": 1.0}),
    ("multi_query_attention", lambda call: {**call, "causal": True}),
    ("multi_query_attention", lambda call: {**call, "w_o": np.roll(call["w_o"], 1, axis=0)}),                   # heads shifted
    ("multi_query_attention", lambda call: {**call, "w_k": 1.02 * call["w_k"]}),
    ("multi_query_attention", lambda call: {**call, "context": np.roll(call["context"], 1, axis=-1)}),
]


@pytest.mark.parametrize("name, slip", SLIPS)
def test_a_slip_in_the_formula_exceeds_the_bound(name, slip):
    record, caught = attnspec.formulas()[name], False
    for case in cases(record):
        wrong = slip({**case.arrays, **case.options})
        (limit,) = bound(record, case.arrays, case.options, "float32").values()
        caught |= bool(np.any(np.abs(record.function(**wrong) - record.function(**case.arrays, **case.options)) > limit))
    assert caught
