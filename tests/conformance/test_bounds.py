"""The error bounds, on float32 implementations written here: correct ones stay within, each mistake exceeds them."""

import functools

import numpy as np
import pytest

import attnspec
from attnspec.conformance.bounds import bound
from attnspec.conformance.cases import cases
from attnspec.conformance.verify import judged

f32 = np.float32


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def products(q, k, scale):
    return q @ np.swapaxes(k, -1, -2) * f32(q.shape[-1] ** -0.5 if scale is None else scale)


def plain(q, k, v, scale=None):
    return softmax(products(q, k, scale)) @ v


def with_sink(q, k, v, sink, scale=None):
    s = products(q, k, scale)
    s = np.concatenate([s, np.broadcast_to(sink[..., None, None], (*s.shape[:-1], 1))], axis=-1)
    return softmax(s)[..., :-1] @ v


def cog(q, k, v, scale=None):
    s = products(q, k, scale)
    return (np.sign(s) * softmax(abs(s))) @ v


def affine(q, k, v, x, w_a, alpha_ma, scale=None):
    alpha = np.clip(f32(0.1) * (w_a @ np.swapaxes(x, -1, -2)) + f32(0.5), 0, 1)[..., None]
    return alpha * plain(q, k, v, scale) + (alpha_ma[:, None, None] - alpha) / f32(k.shape[-2]) * v.sum(-2, keepdims=True)


def gated(q, k, v, x, w_gate, scale=None):
    return plain(q, k, v, scale) / (1 + np.exp(-(x[..., None, :, :] @ np.swapaxes(w_gate, -1, -2))))


def tensor(q, k1, k2, v1, v2, scale=None):
    s = np.einsum("il,jl,kl->ijk", q * f32(1 / q.shape[-1] if scale is None else scale), k1, k2)
    return np.einsum("ijk,jc,kc->ic", softmax(s.reshape(len(s), -1)).reshape(s.shape), v1, v2)


def two_simplicial(q, k1, k2, v1, v2, scale=None):
    return tensor(q, k1, k2, v1, v2, q.shape[-1] ** -0.5 if scale is None else scale)


def hopfield(state, stored, n_iters=0):
    for _ in range(n_iters + 1):
        state = softmax(products(state, stored, None)) @ stored
    return state


def sinkhorn(q, k, v, n_iters=3, eps=1.0, scale=None):
    def log_sum_exp(x, axis):
        top = x.max(axis, keepdims=True)
        return top + np.log(np.exp(x - top).sum(axis, keepdims=True))

    S = products(q, k, scale) / f32(eps)
    n, m = S.shape
    u, w = np.zeros((n, 1), f32), np.zeros((1, m), f32)
    for t in range(n_iters):
        if t % 2 == 0:
            u = -f32(np.log(n)) - log_sum_exp(S + w, 1)
        else:
            w = -f32(np.log(m)) - log_sum_exp(S + u, 0)
    return np.exp(S + u + w + f32(np.log(n))) @ v


CORRECT = {
    "scaled_dot_product_attention": plain,
    "attention_with_sink": with_sink,
    "cog_attention": cog,
    "affine_scaled_attention": affine,
    "gated_attention": gated,
    "tensor_attention": tensor,
    "two_simplicial_attention": two_simplicial,
    "hopfield_retrieve": hopfield,
    "sinkhorn_attention": sinkhorn,
}

MISTAKES = {
    "scaled_dot_product_attention": [
        ("scale 1/d", lambda q, k, v, scale=None: plain(q, k, v, 1 / q.shape[-1] if scale is None else scale)),
        ("a key doubled", lambda q, k, v, scale=None: plain(q, *(np.concatenate([x, x[..., :1, :]], axis=-2) for x in (k, v)), scale)),
        ("no normaliser", lambda q, k, v, scale=None: np.exp(products(q, k, scale)) @ v),
        ("causal", lambda q, k, v, scale=None: attnspec.scaled_dot_product_attention(q, k, v, scale=scale, causal=True)),
        ("5 % off", lambda q, k, v, scale=None: plain(q, k, v, scale) * f32(1.05)),
    ],
    "attention_with_sink": [
        ("normaliser misses the sink", lambda q, k, v, sink, scale=None: plain(q, k, v, scale)),
        ("sink of one", lambda q, k, v, sink, scale=None: with_sink(q, k, v, np.zeros_like(sink), scale)),
    ],
    "cog_attention": [
        ("softmax", plain),
        ("sign times softmax", lambda q, k, v, scale=None: (np.sign(products(q, k, scale)) * softmax(products(q, k, scale))) @ v),
    ],
    "affine_scaled_attention": [
        ("no beta", lambda q, k, v, x, w_a, alpha_ma, scale=None: affine(q, k, v, x, w_a, alpha_ma * 0, scale)),
        ("half the slope", lambda q, k, v, x, w_a, alpha_ma, scale=None: affine(q, k, v, x / 2, w_a, alpha_ma, scale)),
    ],
    "gated_attention": [("no gate", lambda q, k, v, x, w_gate, scale=None: plain(q, k, v, scale))],
    "tensor_attention": [
        ("scale 1/sqrt(d)", two_simplicial),
        ("values reversed", lambda q, k1, k2, v1, v2, scale=None: tensor(q, k1, k2, v1[::-1], v2, scale)),
    ],
    "two_simplicial_attention": [("scale 1/d", tensor)],
    "hopfield_retrieve": [("one update more", lambda state, stored, n_iters=0: hopfield(state, stored, n_iters + 1))],
    "sinkhorn_attention": [
        ("one half-step less", lambda q, k, v, n_iters=3, eps=1.0, scale=None: sinkhorn(q, k, v, max(1, n_iters - 1), eps, scale)),
        ("eps 10 % larger", lambda q, k, v, n_iters=3, eps=1.0, scale=None: sinkhorn(q, k, v, n_iters, 1.1 * eps, scale)),
    ],
}


def ratios(name, twin):
    """err/bound of a float32 implementation on every standard case whose arrays and options it takes."""
    record = attnspec.formulas()[name]
    known = CORRECT[name].__code__.co_varnames[: CORRECT[name].__code__.co_argcount]
    found = []
    for case in cases(record):
        if not {*case.arrays, *case.options} <= set(known):
            continue
        rounded = {key: value.astype(f32) for key, value in case.arrays.items()}
        exact = {key: value.astype(np.float64) for key, value in rounded.items()}
        limits = bound(record, exact, case.options, "float32")
        error, limit = judged(functools.partial(twin, **rounded, **case.options), record.function(**exact, **case.options), limits)
        found.append(error / limit)
    assert len(found) >= 12
    return found


@pytest.mark.parametrize("name", CORRECT)
def test_correct_implementations_stay_within(name):
    assert max(ratios(name, CORRECT[name])) < 1


@pytest.mark.parametrize(
    "name, twin", [pytest.param(name, twin, id=f"{name}-{what}") for name, rows in MISTAKES.items() for what, twin in rows],
)
def test_mistakes_exceed(name, twin):
    assert max(ratios(name, twin)) > 1


def test_no_bound_is_said_so():
    record = attnspec.formulas()["context_broadcasting"]
    with pytest.raises(NotImplementedError, match=r"^no error bound is derived for context_broadcasting yet$"):
        bound(record, record.draw(), {}, "float32")
