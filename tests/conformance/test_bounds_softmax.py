"""Bounds of the gradients by softcap, bias and sink, and of merged partials: correct float32 code stays within, mistakes exceed."""

import numpy as np
import pytest

import attnspec
from attnspec.conformance.bounds import bound
from attnspec.conformance.cases import cases

f32 = np.float32


def worst_ratio(name, function, wanted):
    """The largest err/bound over the standard cases that set one of the wanted options, and how many these were."""
    record = attnspec.formulas()[name]
    ratio, count = 0.0, 0
    for case in cases(record):
        if wanted and not {*case.arrays, *case.options} & {*wanted}:
            continue
        arrays = {key: x.astype(f32) if x.dtype == float else x for key, x in case.arrays.items()}
        exact = {key: x.astype(float) if x.dtype == f32 else x for key, x in arrays.items()}
        limits = bound(record, exact, case.options, "float32")
        got, want = function(**arrays, **case.options), record.function(**exact, **case.options)._asdict()
        for key, limit in limits.items():
            error = np.abs(got[key].astype(float) - want[key])
            ratio = max(ratio, np.max(np.where(error == 0, 0, error / np.where(limit > 0, limit, 1e-300)), initial=0))
        count += 1
    return ratio, count


def backward(q, k, v, do, softcap=None, bias=None, sink=None, mistake=None):
    x = q @ np.swapaxes(k, -1, -2) * f32(q.shape[-1] ** -0.5)
    s = x if softcap is None else f32(softcap) * np.tanh(x / f32(softcap))
    slope = f32(1) if softcap is None or mistake == "no slope" else 1 - (s / f32(softcap)) ** 2
    s = s if bias is None else s + bias
    z = f32(-np.inf) if sink is None else sink[..., None, None]
    top = np.maximum(s.max(-1, keepdims=True), z)
    e, e_sink = np.exp(s - top), np.exp(z - top)
    total = e.sum(-1, keepdims=True) + (0 if mistake == "sink not counted" else e_sink)
    P = e / total
    D = (do * (P @ v)).sum(-1, keepdims=True)
    dS = P * (do @ np.swapaxes(v, -1, -2) - D)
    dX = dS * slope * f32(q.shape[-1] ** -0.5)
    dbias = dS * f32(1.05 if mistake == "bias 5 % off" else 1)
    dsink = (e_sink / total * D).sum((-1, -2)) * f32(1 if mistake == "sign of the sink" else -1)
    return {"dq": dX @ k, "dk": np.swapaxes(dX, -1, -2) @ q, "dv": np.swapaxes(P, -1, -2) @ do,
            "dbias": dX if mistake == "bias scaled" else dbias, "dsink": dsink}


@pytest.mark.parametrize("mistake", [None, "no slope", "bias 5 % off", "bias scaled", "sink not counted", "sign of the sink"])
def test_gradients_by_the_options(mistake):
    ratio, count = worst_ratio("scaled_dot_product_attention_backward", lambda **call: backward(**call, mistake=mistake),
                               ("softcap", "bias", "sink"))
    assert count == 3
    assert ratio < 1 if mistake is None else ratio > 1


def merge(m1, l1, o1, m2, l2, o2, mistake=None):
    m = np.maximum(m1, m2)
    a1, a2 = np.exp(m1 - m), np.exp(m2 - m)
    if mistake == "not rescaled":
        a1 = np.ones_like(a1)
    o2 = o2 * f32(1.0001) if mistake == "o 1e-4 off" else o2
    l2 = np.zeros_like(l2) if mistake == "one dropped" else l2
    return {"m": m1 if mistake == "old maximum" else m, "l": l1 * a1 + l2 * a2, "o": o1 * a1[..., None] + o2 * a2[..., None]}


@pytest.mark.parametrize("mistake", [None, "not rescaled", "o 1e-4 off", "one dropped", "old maximum"])
def test_merged_partials(mistake):
    ratio, _ = worst_ratio("merge_attention_partials", lambda **call: merge(**call, mistake=mistake), ())
    assert ratio < 1 if mistake is None else ratio > 1
