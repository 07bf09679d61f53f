"""Bounds of transport: float32 code that keeps normalised plans stays within them, with every option; mistakes exceed them."""

import numpy as np
import pytest

import attnspec
from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.cases import cases

f32 = np.float32


def worst_ratio(name, function, wanted=()):
    """The largest err/bound over the standard cases, or those that set one of the wanted options."""
    record, ratio, count = attnspec.formulas()[name], 0.0, 0
    for case in cases(record):
        if wanted and not {*case.arrays, *case.options} & {*wanted}:
            continue
        arrays = {key: x.astype(f32) if x.dtype == float else x for key, x in case.arrays.items()}
        exact = {key: x.astype(float) if x.dtype == f32 else x for key, x in arrays.items()}
        try:
            limits = bound(record, exact, case.options, "float32")
            want = record.function(**exact, **case.options)
        except (NoBound, ValueError):
            continue
        got = function(**arrays, **case.options)
        want = want._asdict() if isinstance(want, tuple) else dict.fromkeys(limits, want)
        for key, limit in limits.items():
            error = np.abs((got[key] if isinstance(got, dict) else got).astype(float) - want[key])
            ratio = max(ratio, np.max(np.where(error == 0, 0, error / np.where(limit > 0, limit, 1e-300)), initial=0))
        count += 1
    assert count
    return ratio


def half_steps(S, T, eps, columns, valid, relaxation=1, mistake=None):
    """The plan and the normalised weights of each half-step in float32, potentials kept as logarithms."""
    T = {"one half-step less": max(1, T - 1), "one half-step more": T + 1}.get(mistake, T)
    n, eps = S.shape[0], f32(eps * (1.1 if mistake == "eps 10 % larger" else 1))
    X = np.where(valid, S / eps, f32(-np.inf))
    u, v, W = np.zeros((n, 1), f32), np.zeros((1, S.shape[1]), f32), []
    for t in range(T):
        axis, count = (1, n) if (t % 2 == 0) != (mistake == "columns first") else (0, columns)
        Y = X + (v if axis else u)
        top = Y.max(axis, keepdims=True)
        top = np.where(np.isinf(top), f32(0), top)
        total = np.exp(Y - top).sum(axis, keepdims=True)
        potential = np.where(total == 0, f32(0), -np.log(f32(count)) - top - np.log(np.where(total == 0, f32(1), total)))
        if axis:
            u = potential
        else:
            v = f32(relaxation) * potential
        plan = np.exp(X + u + v)
        W.append(plan * f32(count))
    return plan, W


def problem(m, key_mask, key_marginal, mistake):
    valid = np.ones(m, bool) if key_mask is None or mistake == "mask forgotten" else np.broadcast_to(key_mask, (m,))
    return valid, max(1, valid.sum()) if key_marginal == "valid" else m


def similarity(q, k, scale, cost, mistake):
    scale = f32(q.shape[1] ** -0.5 if scale is None else scale) * f32(q.shape[1] ** -0.5 if mistake == "scale 1/d" else 1)
    scale = f32(1) if mistake == "no scale" else scale
    if cost == "dot":
        return scale, scale * (q @ k.T)
    distance = np.sum((q[:, None] - k) ** 2, axis=-1)
    return scale, scale * distance if mistake == "distance not negated" else -scale * distance


def attention(
    q, k, v, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid",
    tol=None, mistake=None,
):
    valid, columns = problem(len(k), key_mask, key_marginal, mistake)
    P, _ = half_steps(similarity(q, k, scale, cost, mistake)[1], n_iters, eps, columns, valid, mistake=mistake)
    scaling = {"rows": "cols", "cols": "rows"}.get(output_scaling, "rows") if mistake == "another scaling" else output_scaling
    out = P @ v * f32({"rows": len(q), "cols": columns, "none": 1}[scaling])
    return out / out.sum(-1, keepdims=True) if mistake == "normalised again" else out


MISTAKES = [None, "one half-step less", "one half-step more", "eps 10 % larger", "columns first", "no scale", "scale 1/d",
            "another scaling"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_attention(mistake):
    ratio = worst_ratio("sinkhorn_attention", lambda **call: attention(**call, mistake=mistake))
    assert ratio < 1 if mistake is None else ratio > 1


@pytest.mark.parametrize("mistake, option", [
    (None, "key_mask"), ("mask forgotten", "key_mask"), (None, "cost"), (None, "output_scaling"),
    ("distance not negated", "cost"), ("scale 1/d", "cost"), ("another scaling", "output_scaling"),
])
def test_options_of_attention(mistake, option):
    ratio = worst_ratio("sinkhorn_attention", lambda **call: attention(**call, mistake=mistake), (option,))
    assert ratio < 1 if mistake is None else ratio > 1


def plan(scores, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", rho=np.inf, tol=None, mistake=None):
    valid, columns = problem(scores.shape[1], key_mask, key_marginal, mistake)
    relaxation = 1 if np.isinf(rho) else rho / (rho + eps)
    if mistake == "relaxed by rho + 1":
        relaxation = rho / (rho + 1)
    return half_steps(scores, n_iters, eps, columns, valid, 1 if mistake == "not relaxed" else relaxation, mistake)[0]


@pytest.mark.parametrize("mistake", [None, "one half-step less", "one half-step more", "eps 10 % larger", "columns first",
                                     "mask forgotten"])
@pytest.mark.parametrize("name", ["sinkhorn_plan", "sinkhorn_unbalanced_plan"])
def test_plans(name, mistake):
    rho = {} if name == "sinkhorn_plan" else {"rho": 10.0}
    ratio = worst_ratio(name, lambda **call: plan(**{**rho, **call}, mistake=mistake))
    assert ratio < 1 if mistake is None else ratio > 1


@pytest.mark.parametrize("mistake", ["not relaxed", "relaxed by rho + 1"])
def test_relaxed_columns(mistake):
    assert worst_ratio("sinkhorn_unbalanced_plan", lambda **call: plan(**{"rho": 10.0, **call}, mistake=mistake), ("rho", "eps")) > 1


def scores_gradient(S, dP, T, eps, columns, valid, gradient, mistake):
    P, W = half_steps(S, T, eps, columns, valid)
    dS = P * dP
    du, dv = dS.sum(1, keepdims=True), dS.sum(0, keepdims=True)
    for t in reversed(range(T)):
        if t % 2 == 0:
            step = du * W[t]
            dS, du, dv = dS - step, np.zeros_like(du), dv - (0 if mistake == "columns not moved by rows" else step.sum(0, keepdims=True))
        else:
            step = dv * W[t]
            if (gradient == "unrolled") != (mistake == "detached" and T > 1):
                dS, du = dS - step, du - (0 if mistake == "rows not moved by columns" else step.sum(1, keepdims=True))
            dv = np.zeros_like(dv)
        if mistake == "last step only":
            break
    return P, dS / f32(1 if mistake == "not divided by eps" else eps) * f32(-1 if mistake == "sign" else 1)


def plan_backward(scores, dplan, n_iters=3, eps=1.0, key_mask=None, key_marginal="valid", gradient="unrolled", mistake=None):
    valid, columns = problem(scores.shape[1], key_mask, key_marginal, mistake)
    return scores_gradient(scores, dplan, n_iters, eps, columns, valid, gradient, mistake)[1]


BACKWARD = [None, "columns not moved by rows", "rows not moved by columns", "detached", "last step only", "not divided by eps", "sign"]


@pytest.mark.parametrize("mistake", [*BACKWARD, "mask forgotten"])
def test_gradients_of_plans(mistake):
    ratio = worst_ratio("sinkhorn_plan_backward", lambda **call: plan_backward(**call, mistake=mistake))
    assert ratio < 1 if mistake is None else ratio > 1


def attention_backward(
    q, k, v, do, n_iters=3, eps=1.0, scale=None, cost="dot", output_scaling="rows", key_mask=None, key_marginal="valid",
    gradient="unrolled", mistake=None,
):
    valid, columns = problem(len(k), key_mask, key_marginal, mistake)
    scale, S = similarity(q, k, scale, cost, mistake)
    c = f32({"rows": len(q), "cols": columns, "none": 1}[output_scaling])
    P, dS = scores_gradient(S, c * (do @ v.T), n_iters, eps, columns, valid, gradient, mistake)
    dq, dk = dS @ k, dS.T @ q
    if cost != "dot":
        dq, dk = dq - dS.sum(1)[:, None] * q, dk - dS.sum(0)[:, None] * k
        scale = scale * f32(1 if mistake == "half a square" else 2)
    dv = P.T @ do * (f32(1) if mistake == "dv not scaled" else c)
    return {"dq": scale * dq, "dk": (f32(1) if mistake == "dk not scaled" else scale) * dk, "dv": dv}


@pytest.mark.parametrize("mistake", [*BACKWARD, "scale 1/d", "dv not scaled", "dk not scaled", "half a square", "mask forgotten"])
def test_gradients_of_attention(mistake):
    ratio = worst_ratio("sinkhorn_attention_backward", lambda **call: attention_backward(**call, mistake=mistake))
    assert ratio < 1 if mistake is None else ratio > 1
