"""The bounds of tensor attention's gradients and of its polynomial form: correct code stays within, each mistake exceeds them."""

import functools
import math

import numpy as np
import pytest

import attnspec
from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.cases import cases
from attnspec.conformance.verify import judged
from attnspec.reference.higher_order.tensor import visible_tuples


def logits(q, k1, k2, scale):
    return np.einsum("il,jl,kl->ijk", q * q.dtype.type(1 / q.shape[-1] if scale is None else scale), k1, k2)


def seen(q, k1, k2, mask, causal, shift=0):
    visible = np.broadcast_to(visible_tuples(len(q), (len(k1), len(k2)), mask, causal), (len(q), len(k1), len(k2)))
    if shift and causal:
        visible = np.roll(visible, shift, axis=0)
    return visible


def gradients(q, k1, k2, v1, v2, do, scale=None, mask=None, causal=False, mistake=None):
    """A backward pass, tensor by tensor."""
    real = q.dtype.type
    visible = seen(q, k1, k2, mask, causal, mistake == "causal shifted")
    if mistake == "a key dropped":
        visible = visible & (np.arange(len(k1))[:, None] != len(k1) - 1)
    if mistake == "scale 1/sqrt(d)":
        scale = len(q[0]) ** -0.5 if scale is None else scale
    s = np.where(visible, logits(q, k1, k2, scale), -np.inf)
    top = s.max((1, 2), keepdims=True)
    e = np.exp(s - np.where(top == -np.inf, 0, top))
    total = e.sum((1, 2), keepdims=True)
    P = e / np.where(total == 0, real(1), total)
    dP = np.einsum("ic,jc,kc->ijk", do, v1, v2)
    D = real(0) if mistake == "no D" else np.einsum("ijk,ijk->i", P, dP)[:, None, None]
    dS = P * (dP - D) * real(1 if mistake == "no scale" else 1 / q.shape[-1] if scale is None else scale)
    found = {
        "dq": np.einsum("ijk,jl,kl->il", dS, k1, k2), "dk1": np.einsum("ijk,il,kl->jl", dS, q, k2),
        "dk2": np.einsum("ijk,il,jl->kl", dS, q, k1), "dv1": np.einsum("ijk,ic,kc->jc", P, do, v2),
        "dv2": np.einsum("ijk,ic,jc->kc", P, do, v1),
    }
    if mistake in found:                                                # one gradient 5 % off
        found[mistake] = found[mistake] * real(1.05)
    if mistake == "sign":
        found["dk2"] = -found["dk2"]
    if mistake == "values exchanged":
        found["dv1"], found["dv2"] = np.einsum("ijk,ic,jc->jc", P, do, v1), np.einsum("ijk,ic,kc->kc", P, do, v2)
    return attnspec.TensorAttentionGradients(**found)


def poly(q, k1, k2, v1, v2, degree=8, centre=0.0, scale=None, causal=False, mistake=None):
    """Attention with the polynomial's weights, all pairs at once."""
    real = q.dtype.type
    c = centre + (0.1 if mistake == "another centre" else 0)
    g = degree - 1 if mistake == "degree 7" else degree
    visible = seen(q, k1, k2, None, causal, mistake == "causal shifted")
    if mistake == "a key dropped":
        visible = visible & (np.arange(len(k1))[:, None] != len(k1) - 1)
    if mistake == "scale 1/sqrt(d)":
        scale = len(q[0]) ** -0.5 if scale is None else scale
    z = logits(q, k1, k2, scale) - real(c)
    A = np.zeros_like(z)
    for t in range(g, -1, -1):
        A = A * z + real(math.exp(c) / math.factorial(t))
    if mistake == "factorials left out":
        A = sum(z**t for t in range(g + 1))
    A = np.where(visible, A, real(0))
    D = A.sum((1, 2))[:, None]
    empty = ~visible.any((1, 2))[:, None]
    out = np.einsum("ijk,jc,kc->ic", A, v1, v2) / np.where(empty, real(1), D)
    return np.where(empty, real(0), out * real(1.05 if mistake == "5 % off" else -1 if mistake == "sign" else 1))


def worst_ratio(name, function, dtype):
    """The largest err/bound over the standard cases that have a bound."""
    record = attnspec.formulas()[name]
    found = []
    for case in cases(record):
        rounded = {key: value.astype(dtype) if value.dtype == float else value for key, value in case.arrays.items()}
        exact = {key: value.astype(np.float64) if value.dtype == dtype else value for key, value in rounded.items()}
        try:
            limits = bound(record, exact, case.options, dtype)
        except NoBound:
            continue
        error, limit = judged(functools.partial(function, **rounded, **case.options), record.function(**exact, **case.options), limits)
        found.append(error / limit)
    assert len(found) >= 12
    return max(found)


WRITTEN = {"tensor_attention_backward": gradients, "tensor_attention_poly": poly}
MISTAKES = {
    "tensor_attention_backward": (
        "dq", "dk1", "dk2", "dv1", "dv2", "no D", "no scale", "scale 1/sqrt(d)", "a key dropped", "causal shifted", "sign",
        "values exchanged",
    ),
    "tensor_attention_poly": (
        "5 % off", "sign", "scale 1/sqrt(d)", "a key dropped", "causal shifted", "factorials left out", "degree 7", "another centre",
    ),
}
BELOW_FLOAT32 = ("degree 7", "another centre")           # of small logits a polynomial of degree 8 is exact to 1e-8


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", WRITTEN)
def test_correct_implementations_stay_within(name, dtype):
    assert worst_ratio(name, WRITTEN[name], dtype) < 1


@pytest.mark.parametrize("name, mistake", [(name, mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes])
def test_mistakes_exceed(name, mistake):
    dtype = "float64" if mistake in BELOW_FLOAT32 else "float32"
    assert worst_ratio(name, functools.partial(WRITTEN[name], mistake=mistake), dtype) > 1


def test_the_polynomial_bound_is_infinite_where_the_normaliser_may_vanish():
    one = np.ones((1, 1))
    record = attnspec.formulas()["tensor_attention_poly"]
    arrays = {"q": -one, "k1": one, "k2": one, "v1": one, "v2": one}
    assert bound(record, arrays, {"degree": 1}, "float32")["out"] == np.inf


def test_ranks_that_the_formula_refuses_have_no_bound():
    record = attnspec.formulas()["tensor_attention_poly"]
    arrays = {name: np.ones((63, 16)) for name in record.required}
    with pytest.raises(NoBound, match=r"^the formula refuses 735471 monomials, C\(16 \+ 8, 8\), at these sizes$"):
        bound(record, arrays, {}, "float32")


@pytest.mark.parametrize("name", WRITTEN)
def test_queries_that_see_nothing(name):
    """A bound of 0 on what is exactly 0, finite elsewhere."""
    record = attnspec.formulas()[name]
    arrays = record.draw({"n": 6, "m1": 3, "m2": 4, "d": 2, "e": 2})
    limits = bound(record, arrays, {"causal": True}, "float32")
    assert all(np.all(np.isfinite(limit)) for limit in limits.values())
    first = next(iter(limits.values()))
    assert np.all(first[0] <= 1e-40)
    assert np.all(first[-1] > 1e-9)
