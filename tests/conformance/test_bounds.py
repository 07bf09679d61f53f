"""The error bounds, on float32 implementations written here: correct ones stay within, each mistake exceeds them."""

import functools

import numpy as np
import pytest

import attnspec
from attnspec.conformance.bounds import NoBound, bound
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
        if not {*case.arrays, *case.options} - {"tol"} <= set(known):
            continue
        rounded = {key: value.astype(f32) for key, value in case.arrays.items()}
        exact = {key: value.astype(np.float64) for key, value in rounded.items()}
        limits = bound(record, exact, case.options, "float32")
        options = {key: value for key, value in case.options.items() if key != "tol"}
        error, limit = judged(functools.partial(twin, **rounded, **options), record.function(**exact, **case.options), limits)
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
    record = attnspec.formulas()["goat_key_prior"]
    with pytest.raises(NoBound, match=r"^no error bound is derived for goat_key_prior yet$"):
        bound(record, record.draw(), {}, "float32")


def gradients(q, k, v, do, scale=None, signed=False, mistake=None):
    """A float32 backward pass that saves the output and the log-sum-exp, as a fused kernel does."""
    s = products(q, k, scale)
    size, g = (abs(s), np.sign(s)) if signed else (s, f32(1))
    top = size.max(-1, keepdims=True)
    e = np.exp(size - top)
    total = e.sum(-1, keepdims=True)
    out, L = (g * (e / total)) @ v, top + np.log(total)
    P = np.exp(size - L)
    D = 0 if mistake == "no D" else (do * out).sum(-1, keepdims=True)
    dS = g * (P * (g * (do @ np.swapaxes(v, -1, -2)) - D))
    factor = f32(1 if mistake == "no scale" else q.shape[-1] ** -0.5 if scale is None else scale)
    turned = np.swapaxes(dS, -1, -2)
    dv = np.swapaxes(P if mistake == "unsigned" else g * P, -1, -2) @ do
    return attnspec.AttentionGradients(factor * (dS @ k), factor * (turned @ q), dv)


@pytest.mark.parametrize("name, signed", [("scaled_dot_product_attention_backward", False), ("cog_attention_backward", True)])
class TestGradients:
    def ratios(self, name, signed, mistake=None):
        CORRECT[name] = gradients
        return ratios(name, functools.partial(gradients, signed=signed, mistake=mistake))

    def test_correct_ones_stay_within(self, name, signed):
        assert max(self.ratios(name, signed)) < 1

    @pytest.mark.parametrize("mistake", ["no D", "no scale"])
    def test_mistakes_exceed(self, name, signed, mistake):
        assert max(self.ratios(name, signed, mistake)) > 1

    def test_signs_matter(self, name, signed):
        assert (max(self.ratios(name, signed, "unsigned")) > 1) == signed


class TestCornersOfTheBounds:
    def bound(self, name="scaled_dot_product_attention", dtype="float32", **call):
        record = attnspec.formulas()[name]
        arrays = {key: np.asarray(value, dtype=float) if key != "mask" else value for key, value in call.items() if key in record.arrays}
        options = {key: value for key, value in call.items() if key not in record.arrays}
        return bound(record, arrays, options, dtype)["out"]

    def test_a_value_that_nobody_sees_bounds_nothing(self):
        got = [self.bound(q=[[1.0]], k=[[1.0], [unseen]], v=[[1.0], [unseen]], mask=np.array([True, False])) for unseen in (0.0, np.nan)]
        np.testing.assert_array_equal(got[1], got[0])

    def test_a_sink_at_minus_infinity_is_none(self):
        arrays = {"q": [[1.0], [2.0]], "k": [[1.0], [0.5]], "v": [[1.0], [3.0]]}
        np.testing.assert_allclose(self.bound(**arrays, sink=-np.inf), self.bound(**arrays), rtol=1e-12)

    def test_hopeless_logits_have_an_infinite_bound(self):
        got = self.bound(q=[[4e3, 1.0]], k=[[4e3, 0.0], [4e3, 1.0]], v=[[1.0], [2.0]], dtype="bfloat16")
        assert np.all(got == np.inf)

    def test_grouped_heads_of_tensor_attention(self):
        arrays = attnspec.formulas()["two_simplicial_attention"].draw({"n": 3, "h": 4, "hk": 2})
        assert np.all(np.isfinite(self.bound("two_simplicial_attention", **arrays, enable_gqa=True)))

    def test_blocked_tensor_attention_has_the_bound_of_the_dense_one(self):
        arrays = attnspec.formulas()["tensor_attention"].draw({"n": 3})
        np.testing.assert_array_equal(self.bound("tensor_attention_blocked", **arrays, block=2), self.bound("tensor_attention", **arrays))

    @pytest.mark.parametrize("name, options", [
        ("sinkhorn_attention", {"tol": 1e-3}), ("hopfield_retrieve", {"n_iters": 3}),
        ("sinkhorn_attention_backward", {"gradient": "implicit"}), ("goat_head_attention", {"u": np.full((4, 12), -np.inf)}),
    ])
    def test_what_is_not_derived_is_refused(self, name, options):
        arrays = attnspec.formulas()[name].draw()
        with pytest.raises(NoBound, match="derived"):
            self.bound(name, **{**arrays, **options})


@pytest.mark.parametrize("name", [name for name, record in attnspec.formulas().items() if record.bound])
def test_every_bound_is_computed_on_the_standard_cases(name):
    """Finite and positive wherever a bound is derived; NoBound says where it is not, nothing else may be raised."""
    record = attnspec.formulas()[name]
    computed = 0
    for case in cases(record):
        arrays = {key: np.asarray(value, dtype=float) if value.dtype == float else value for key, value in case.arrays.items()}
        try:
            limits = bound(record, arrays, case.options, "float32")
        except NoBound:
            continue
        computed += 1
        for limit in limits.values():
            assert np.all(limit >= 0)
            assert np.all(np.isfinite(limit))
    assert computed
