"""The bounds of affine-scaled and gated attention: float32 code and the twins stay within, mistakes in the formula exceed them."""

import functools

import numpy as np
import pytest

import attnspec
from attnspec import numba_kernels
from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.cases import cases
from attnspec.conformance.verify import judged

f32 = np.float32


def turned(x):
    return np.swapaxes(x, -1, -2)


def sigmoid(x):
    return 1 / (1 + np.exp(np.clip(-x, None, 80)))


def weights(q, k, scale, mask, causal, bias=0, mistake=None):
    """Softmax weights, and what is visible."""
    n, m = q.shape[-2], k.shape[-2]
    visible = np.ones((n, m), bool)
    if causal and mistake != "causal forgotten":
        visible = np.tri(n, m, (0 if causal == "top-left" else m - n) + (mistake == "causal shifted"), dtype=bool)
    if mask is not None and mistake != "mask forgotten":
        visible = visible & mask
    if mistake == "a key dropped":
        visible = visible & (np.arange(m) != m - 1)
    d = q.shape[-1]
    scale = 1 if mistake == "no scale" else d**-0.5 if scale is None else scale
    s = q @ turned(k) * f32(1 / d if mistake == "scale 1/d" else -scale if mistake == "sign" else scale) + bias
    s = np.where(visible, s, f32(-np.inf))
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(top == -np.inf, 0, top))
    if mistake == "a key doubled":
        e[..., -1] *= 2
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, f32(1), total), visible


def affine_weights(q, k, v, x, w_a, alpha_ma, scale, phi, n_keys, mask, causal, mistake):
    """P, alpha P + beta, alpha, the slope of phi and N."""
    P, visible = weights(q, k, scale, mask, causal, mistake=mistake)
    x, w_a = (f32(0.5) * x, w_a) if mistake == "half the slope" else (x, w_a)
    z = w_a @ turned(x)
    line = f32(0.1) * z + f32(0.5)
    alpha = sigmoid(z) if phi == "sigmoid" or mistake == "another phi" else line if mistake == "no clipping" else np.clip(line, 0, 1)
    slope = alpha * (1 - alpha) if phi == "sigmoid" else np.where((z > -5) & (z < 5) | (mistake == "slope beyond the kink"), f32(0.1), 0)
    alpha, alpha_ma = alpha[..., None], alpha_ma[:, None, None]
    allowed = (n_keys == "allowed") != (mistake == "wrong N")
    N = np.maximum(visible.sum(-1, keepdims=True), 1).astype(f32) if allowed else f32(k.shape[-2])
    if mistake == "n queries":
        N = f32(q.shape[-2])
    beta = {"beta is alpha": alpha, "no alpha in beta": alpha_ma, "sign of beta": alpha - alpha_ma, "no beta": 0 * alpha}.get(
        mistake, alpha_ma - alpha) / (1 if mistake == "no 1/N" else N)
    A = {"alpha_ma on P": alpha_ma * P, "no alpha": P}.get(mistake, alpha * P) + beta
    return P, A if mistake == "beta on hidden keys" else np.where(visible, A, 0), alpha[..., 0], slope, N, visible


def grouped(q, *others):
    return [np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in others]


def affine(
    q, k, v, x, w_a, alpha_ma, scale=None, phi="linear_clipping", n_keys="total", mask=None, causal=False, enable_gqa=False, mistake=None,
):
    k, v = grouped(q, k, v)
    return affine_weights(q, k, v, x, w_a, alpha_ma, scale, phi, n_keys, mask, causal, mistake)[1] @ v


def affine_backward(
    q, k, v, x, w_a, alpha_ma, do, scale=None, phi="linear_clipping", n_keys="total", mask=None, causal=False, enable_gqa=False,
    mistake=None,
):
    heads, (k, v) = k.shape[-3], grouped(q, k, v)
    P, A, alpha, slope, N, visible = affine_weights(q, k, v, x, w_a, alpha_ma, scale, phi, n_keys, mask, causal, mistake)
    G = np.where(visible, do @ turned(v), f32(0))
    D = 0 if mistake == "no D" else (P * G).sum(-1, keepdims=True)
    dS = (1 if mistake == "dS without alpha" else alpha[..., None]) * P * (G - D)
    factor = f32(1 if mistake == "dS without scale" else q.shape[-1] ** -0.5 if scale is None else scale)
    dalpha = (G * (P if mistake == "dalpha without 1/N" else P - 1 / N)).sum(-1)
    dz = dalpha * (1 if mistake == "no slope" else slope)
    dk, dv = (y.reshape(heads, -1, *y.shape[1:]).sum(1) for y in (factor * turned(dS) @ q, turned(P if mistake == "dv by P" else A) @ do))
    dx = (dz[:1].T @ w_a[:1] if mistake == "one head in dx" else turned(dz) @ w_a) * (-1 if mistake == "sign of dx" else 1)
    return attnspec.AffineGradients(factor * dS @ k, dk, dv, dx, dz @ x)


ACTIVATIONS = {"sigmoid": sigmoid, "silu": lambda x: x * sigmoid(x), "identity": lambda x: x, "ns_sigmoid": lambda x: (1 + sigmoid(x)) / 2}


def gated(
    q, k, v, x, w_gate, position="G1", activation="sigmoid", mode="multiplicative", b_gate=None, x_keys=None, w_o=None, b_o=None,
    scale=None, mask=None, causal=False, enable_gqa=False, mistake=None,
):
    tokens = x if x_keys is None else x[: len(x_keys)] if mistake == "the query's token" else x_keys
    if mistake == "tokens moved":
        tokens = np.roll(tokens, 1, axis=-2)
    z = tokens[..., None, :, :] @ turned(w_gate[::-1] if mistake == "heads turned" else w_gate)
    z = z if b_gate is None or mistake == "no gate bias" else z + b_gate[:, None, :]
    gate = ACTIVATIONS["silu" if mistake == "silu" else "sigmoid" if mistake == "always sigmoid" else activation](z)
    if mistake == "bias after":
        gate = gate if b_gate is None else ACTIVATIONS[activation](z - b_gate[:, None, :]) + b_gate[:, None, :]
    position = "G2" if mistake == "before" and q.shape == k.shape else "G1" if mistake == "after" else position

    def apply(y):
        add = (mode == "additive") != (mistake == "added")
        return y if mistake == "no gate" else y * (1 - gate) if mistake == "1 - gate" else y + gate if add else y * gate

    q, k, v = apply(q) if position == "G4" else q, apply(k) if position == "G3" else k, apply(v) if position == "G2" else v
    k, v = grouped(q, k, v)
    P, visible = weights(q, k, scale, mask, causal, mistake=mistake)
    out = apply(P @ v) * visible.any(-1, keepdims=True) if position == "G1" else P @ v
    if w_o is not None:
        out = np.einsum("hne,ohe->no", out, w_o) + (0 if b_o is None or mistake == "no b_o" else b_o)
    if position == "G5":
        gate = gate[..., 0, :, :]
        out = apply(out)
        if mistake == "gate before b_o":
            out = apply(out - b_o) + b_o if b_o is not None and mode == "multiplicative" else out + 0 * b_o
    return out


def energy_gated(x, w_q, w_k, w_v, w_energy, b_energy, alpha, tau, mixing, scale=None, causal=True, znorm="sequence", mistake=None):
    q, k, v = x @ w_q.T, x @ w_k.T, x @ w_v.T
    y = x.astype(float)
    e, n = w_energy.astype(float) @ y.T + b_energy[:, None].astype(float), len(x)
    e = e**2 if mistake == "squared energy" else e
    prefix = (znorm == "prefix") != (mistake == "other statistics")
    z = np.zeros_like(e)
    for j in range(n):
        seen = e[:, : j + 1] if prefix else e
        ddof = mistake == "sample deviation" and seen.shape[1] > 1
        std = np.maximum(seen.std(axis=1, ddof=int(ddof)), 1e-8)
        z[:, j] = (e[:, j] - (0 if mistake == "no mean" else seen.mean(axis=1))) / (std**2 if mistake == "variance" else std)
    alpha, tau, mixing = (y.astype(float) for y in (alpha, tau, mixing))
    alpha = alpha + mixing * (mistake == "mixing as slope")
    g = sigmoid(alpha[:, None] * z - tau[:, None] if mistake == "tau outside" else alpha[:, None] * (z - tau[:, None]))
    share = np.exp(mixing - mixing.max())
    share = np.full(len(mixing), 1 / len(mixing)) if mistake == "equal shares" else share / share.sum()
    gate = share @ g
    if mistake == "queries gated":
        return gate[:, None].astype(f32) * (weights(q, k, scale, None, causal)[0] @ v)
    P, _ = weights(q, k, scale, None, causal, np.log(gate).astype(f32) * (mistake != "no gate"), mistake)
    if mistake == "not renormalised":
        P = weights(q, k, scale, None, causal)[0] * gate.astype(f32)
    return P @ v


NAMES = {
    "affine_scaled_attention": affine, "affine_scaled_attention_backward": affine_backward, "gated_attention": gated,
    "energy_gated_attention": energy_gated,
}
AFFINE = (
    "no scale", "scale 1/d", "a key dropped", "a key doubled", "causal shifted", "causal forgotten", "mask forgotten", "sign",
    "half the slope", "another phi", "no clipping", "wrong N", "n queries", "no 1/N", "beta is alpha", "no alpha in beta", "sign of beta",
    "no beta", "alpha_ma on P", "no alpha", "beta on hidden keys",
)
MISTAKES = {
    "affine_scaled_attention": AFFINE,
    "affine_scaled_attention_backward": (
        *(mistake for mistake in AFFINE if mistake not in ("no scale", "sign")), "no D", "dS without alpha", "dS without scale",
        "dalpha without 1/N", "no slope", "slope beyond the kink", "dv by P", "one head in dx", "sign of dx",
    ),
    "gated_attention": (
        "no scale", "scale 1/d", "a key dropped", "a key doubled", "causal shifted", "causal forgotten", "mask forgotten", "sign",
        "tokens moved", "heads turned", "silu", "before", "added", "no gate", "1 - gate",
    ),
    "energy_gated_attention": (
        "no scale", "scale 1/d", "a key dropped", "a key doubled", "causal shifted", "causal forgotten", "sign", "squared energy",
        "other statistics", "sample deviation", "no mean", "variance", "mixing as slope", "tau outside", "equal shares",
        "queries gated", "not renormalised", "no gate",
    ),
}


def judgement(name, arrays, options):
    """The call in float32, what the reference gives for it, and the bounds."""
    record = attnspec.formulas()[name]
    rounded = {key: x.astype(f32) if x.dtype == float else x for key, x in arrays.items()}
    exact = {key: x.astype(float) if x.dtype == f32 else x for key, x in rounded.items()}
    return {**rounded, **options}, record.function(**exact, **options), bound(record, exact, options, "float32")


def largest_ratio(judgements, function):
    found = (judged(functools.partial(function, **call), want, limits) for call, want, limits in judgements)
    return max(error / limit for error, limit in found)


@functools.cache
def judgements(name):
    """The standard cases and some of options that these leave out."""
    calls = [(case.arrays, case.options) for case in cases(attnspec.formulas()[name])]
    arrays, _ = calls[6]
    if name.startswith("affine"):
        steep = {**arrays, "x": 4 * arrays["x"]}                        # well beyond the kinks of phi
        calls += [(arrays, {"phi": "sigmoid"}), (arrays, {"n_keys": "allowed", "causal": True}), (steep, {})]
    if name.startswith("gated"):
        calls.append(({**arrays, "q": arrays["q"][:, :5], "x": arrays["x"][:5]}, {}))               # as many queries as keys
    if name.startswith("energy"):
        calls += [(calls[i][0], {"znorm": "prefix", "causal": causal}) for i in (0, 3, 6, 9) for causal in (False, True)]
    found = []
    for arrays, options in calls:
        try:
            found.append(judgement(name, arrays, options))
        except NoBound:
            continue
    assert len(found) >= 12
    return found


def worst(name, function):
    return largest_ratio(judgements(name), function)


@pytest.mark.parametrize("name, mistake", [(name, mistake) for name, rows in MISTAKES.items() for mistake in (None, *rows)])
def test_mistakes_in_the_formula(name, mistake):
    ratio = worst(name, functools.partial(NAMES[name], mistake=mistake))
    assert ratio < 1 if mistake is None else ratio > 1


@pytest.mark.parametrize("name", NAMES)
def test_the_twins_stay_within(name):
    assert worst(name, getattr(numba_kernels, name)) < 1


def gate_calls():
    """Gated attention at every position, with every activation and mode, a bias of the gate, headwise gates and an output projection."""
    for i, (position, hg, g, n) in enumerate([("G1", 4, 3, 7), ("G2", 4, 3, 5), ("G3", 4, 4, 5), ("G4", 4, 4, 7), ("G5", 1, 6, 7)]):
        for activation in ACTIVATIONS:
            rng = np.random.default_rng(i)
            shapes = {"q": (4, 7, 4), "k": (4, 5, 4), "v": (4, 5, 3), "x": (7, 6), "w_gate": (hg, g, 6)}
            if n == 5:
                shapes["x_keys"] = (5, 6)
            arrays = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
            gate = {"b_gate": rng.standard_normal((hg, g))}
            out = {"w_o": rng.standard_normal((6, 4, 3)), "b_o": rng.standard_normal(6)}
            full = {**arrays, **gate, **out}
            yield full, {"position": position, "activation": activation}
            yield full, {"position": position, "activation": activation, "mode": "additive", "causal": True}
            if position != "G5":
                headwise = {**arrays, "w_gate": arrays["w_gate"][:, :1], "b_gate": gate["b_gate"][:, :1]}
                yield headwise, {"position": position, "activation": activation}
                yield {**arrays, "k": arrays["k"][:2], "v": arrays["v"][:2], "w_gate": arrays["w_gate"][:1]}, {
                    "position": position, "activation": activation, "enable_gqa": True}


@functools.cache
def gate_judgements():
    return [judgement("gated_attention", arrays, options) for arrays, options in gate_calls()]


def worst_gate(function):
    return largest_ratio(gate_judgements(), function)


EVERYWHERE = (
    "the query's token", "no gate bias", "bias after", "always sigmoid", "after", "no b_o", "gate before b_o", "added", "no scale",
    "tokens moved", "1 - gate",
)


def misfitting(function):
    """Where a mistake does not fit the arrays, none is made."""
    def caught(**call):
        try:
            return function(**call)
        except ValueError:
            return gated(**call)
    return caught


@pytest.mark.parametrize("mistake", [None, *EVERYWHERE])
def test_mistakes_of_gates_at_every_position(mistake):
    ratio = worst_gate(misfitting(functools.partial(gated, mistake=mistake)))
    assert ratio < 1 if mistake is None else ratio > 1


def test_the_gates_of_the_twin_stay_within():
    assert worst_gate(numba_kernels.gated_attention) < 1


def test_gates_near_the_floor_have_no_bound():
    record = attnspec.formulas()["energy_gated_attention"]
    arrays = record.draw()
    with pytest.raises(NoBound, match="near the floor of the normaliser"):
        bound(record, {**arrays, "tau": arrays["tau"] + 50, "alpha": np.abs(arrays["alpha"]) + 1}, {}, "float32")
