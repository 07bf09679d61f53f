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
