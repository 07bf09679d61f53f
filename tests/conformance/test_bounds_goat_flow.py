"""The bounds of GOAT and of flow attention: float32 code and the twins stay within, mistakes in the formula exceed them."""

import functools

import numpy as np
import pytest

import attnspec
from attnspec import numba_kernels
from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.cases import cases
from attnspec.conformance.verify import judged

f32 = np.float32


def sigmoid(x):
    return 1 / (1 + np.exp(np.clip(-x, None, 80)))


def softplus(x):
    return np.logaddexp(x, 0).astype(x.dtype)


def attention(s, v, visible, mistake=None):
    m = s.shape[-1]
    visible = visible & (np.arange(m) != m - 1) if mistake == "a key dropped" else visible
    s = np.where(visible, s, f32(-np.inf))
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(top == -np.inf, 0, top))
    if mistake == "a key doubled":
        e[..., -1] *= 2
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, f32(1), total) @ v


def coordinates(j, count, base, grid, cls, mistake=None):
    """Phases (n, R), in float64, and which positions have any."""
    steps = np.arange(count) / (max(count, 1) if mistake == "base^(-r/R)" else max(count - 1, 1))
    w = float(base) ** -steps
    if grid is None:
        return j[:, None] * w, np.ones((len(j), 1), bool)
    patch = j if mistake == "class token a patch" else j - cls
    y, x = np.divmod(patch, grid[0 if mistake == "grid turned" else 1])
    rows = count // 2 if mistake == "fewer rows" else count - count // 2
    return np.concatenate([y[:, None] * w[:rows], x[:, None] * w[rows:]], axis=-1), (patch >= 0)[:, None]


def head_attention(
    q, k, v, a, b, u=None, gate_scale=None, gate_bias=None, mask=None, causal=False, query_offset=None, key_offset=0, position_base=1e4,
    grid=None, cls=False, enable_gqa=False, mistake=None,
):
    """Logits of the content and of the waves of i - j, added up."""
    n, m, d, groups = q.shape[-2], k.shape[-2], q.shape[-1], q.shape[-3] // k.shape[-3]
    if query_offset is None:
        end = causal in (True, "bottom-right")
        query_offset = (0 if mistake == "key_offset forgotten" else key_offset) + (m - n if end != (mistake == "other corner") else 0)
    if mistake == "positions shifted":
        query_offset += 1
    i, j = query_offset + np.arange(n), key_offset + np.arange(m)
    if mistake == "key positions anew":
        j = np.arange(m)
    seen = np.ones((n, m), bool)
    if causal and mistake != "causal forgotten":
        seen = j <= i[:, None] + (mistake == "causal shifted")
    seen = seen if mask is None or mistake == "mask forgotten" else seen & mask
    (p_i, on_i), (p_j, on_j) = (coordinates(x, a.shape[-1], position_base, grid, cls, mistake) for x in (i, j))
    lag = p_i[:, None] - p_j
    lag = -lag if mistake == "sin(j - i)" else lag
    even, odd = np.cos(lag).astype(f32), np.sin(lag).astype(f32)
    even, odd = (odd, even) if mistake == "cos and sin swapped" else (even, odd)
    K = (even @ a[:, None, :, None] + odd @ b[:, None, :, None])[..., 0]
    K = np.zeros_like(K) if mistake == "no waves" else K if mistake == "class token waves" else np.where(on_i & on_j.T, K, f32(0))
    width = d - 2 * a.shape[-1] - (u is not None)
    K = K if u is None or mistake == "no u" else K + u[:, None, :]
    K, k, v = (np.repeat(x, groups, axis=-3) for x in (K, k, v))
    qc, kc = q[..., :width], k[..., :width]
    if mistake == "all coordinates":
        qc, kc = q, k
    if gate_scale is not None and mistake != "no gate":
        size = np.sqrt(np.sum((q if mistake == "norm of all" else qc) ** 2, axis=-1))
        rate = gate_scale if mistake == "no softplus" else softplus(gate_scale)
        z = gate_bias[:, None] + (rate[:, None] if mistake == "sign of the rate" else -rate[:, None]) * size
        g = sigmoid(z)[..., None]
        if mistake == "gate on u forgotten" and u is not None:
            shared = np.repeat(u, groups, axis=0)[:, None, :]
            K = g * (K - shared) + shared
        else:
            K = g * K
    scale = {"no scale": 1, "1/d": 1 / width, "1/sqrt(d)": d**-0.5, "sign": -(width**-0.5)}.get(mistake, width**-0.5)
    s = qc @ np.swapaxes(kc, -1, -2) * f32(scale)
    s = (s + K) * f32(width**-0.5) if mistake == "waves scaled too" else s - K if mistake == "sign of K" else s + K
    return attention(s, v, seen, mistake)


def layer(
    q_input, k_input, v_input, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, a, b, w1=None, b1=None, w2=None, b2=None, gain=None, bump=None,
    recency=None, mask=None, key_mask=None, causal=False, key_offset=0, prior_scale=1.0, absolute_base=1e4, training_length=None,
    grid=None, cls=False, mistake=None, **options,
):
    m, u = len(k_input), None
    q, k, v = (np.einsum("nc,hdc->hnd", x, w) + (0 if mistake == f"no {name}" else y[:, None, :]) for x, w, y, name in (
        (q_input, w_q, b_q, "b_q"), (k_input, w_k, b_k, "b_k"), (k_input if mistake == "values of keys" else v_input, w_v, b_v, "b_v")))
    if w1 is not None:
        j = np.arange(m) + (0 if mistake == "prior positions anew" else key_offset) + (mistake == "prior shifted")
        N = max(m - 1, 1) if training_length is None or mistake == "training length" else training_length
        N = m if mistake == "N = m" else N
        phase, on = coordinates(j, w1.shape[-1] // 2 - 1, absolute_base, grid, cls)
        log = np.log(np.maximum(j, 1)) if mistake == "log j" else np.log1p(j) / np.log1p(N)
        f = np.concatenate([on * np.cos(phase), on * np.sin(phase), np.stack([j / N, log], axis=-1)], axis=-1).astype(f32)
        z = f @ w1.T + (0 if mistake == "no b1" else b1)
        hidden = sigmoid(z) if mistake == "sigmoid, not SiLU" else np.maximum(z, 0) if mistake == "relu" else z * sigmoid(z)
        y = hidden @ w2 + (0 if mistake == "no b2" else b2)
        first = j == (1 if mistake == "bump at 1" else 0)
        u = (1 if mistake == "no gain" else gain[:, None]) * y + bump[:, None] * (first & (mistake != "no bump"))
        if recency is not None and (causal or mistake == "recency always") and mistake != "no recency":
            u = u + (recency if mistake == "recency as it is" else softplus(recency))[:, None] * j.astype(f32)
        u = (u * f32(1 if mistake == "no prior_scale" else prior_scale)).astype(f32)
    if key_mask is not None and mistake != "key_mask forgotten":
        mask = key_mask if mask is None else mask & key_mask
    options |= {"mask": mask, "causal": causal, "key_offset": key_offset, "grid": grid, "cls": cls, "mistake": mistake}
    heads = head_attention(q, k, v, a, b, u, **options)
    out = np.einsum("hnd,chd->nc", heads[::-1] if mistake == "heads turned" else heads, w_o)
    return out if mistake == "no b_o" else out + b_o


def flows(q, k, v, eps, flow_eps, clip, feature, mistake, causal):
    """Both forms of flow attention, with sums over everything or over the prefix."""
    phi = (lambda x: np.maximum(x, 0) + f32(1e-6)) if (feature == "relu") != (mistake == "another feature") else sigmoid
    q, k, n, m = phi(q), k if mistake == "keys as they are" else phi(k), len(q), len(k)
    eps, flow_eps = f32(0 if mistake == "no eps" else eps), f32(0 if mistake == "no flow_eps" else flow_eps)
    seen = np.tri(n, m, int(mistake == "looks ahead"), dtype=bool) if causal else np.ones((n, m), bool)
    weights = seen.astype(f32)
    if mistake in ("a key dropped", "a key doubled") and m > 1:
        weights[:, -1] = weights[:, -1] * (0 if mistake == "a key dropped" else 2)
    own = np.tri(m, n, dtype=bool).astype(f32) if causal else np.ones((m, n), f32)
    t = np.arange(1, n + 1, dtype=f32) if causal else f32(1)
    t = f32(1) if mistake == "no t" else t

    def flow(x, total):
        return np.sum((x + eps) * (total + eps), axis=-1) + flow_eps

    I, O = t / flow(q, weights @ k), t / flow(k, own @ q)
    I_hat = flow(q, weights @ (k * O[:, None])) / t * f32(1 if causal or mistake == "no n/m" else m / n if mistake == "m/n" else n / m)
    O_hat = flow(k, own @ (q * I[:, None])) / t
    I_hat, O_hat = {"not conserved": (1 / I, 1 / O), "flows swapped": (O, I) if n == m else (I_hat, O_hat)}.get(mistake, (I_hat, O_hat))
    bounded = clip is not None and mistake != "no clip"
    X = np.clip(O_hat, -f32(clip) if clip else 0, clip) if bounded else O_hat
    X = -X if mistake == "sign" else X
    if causal:
        e = np.where(seen, np.exp(np.minimum(X - np.where(seen, X, f32(-np.inf)).max(-1, keepdims=True), 0)), 0)
        C = t * np.diagonal(e) / e.sum(-1)
        if mistake == "competition of the last":
            C = t * e[-1] / e[-1].sum()
    else:
        e = np.exp(X - X.max()) * weights[0]
        C = f32(1 if mistake == "no factor m" else n if mistake == "factor n" else m) * e / e.sum()
    C = np.ones_like(C) if mistake == "no competition" else C
    allocation = {"no allocation": 1, "allocation not squashed": I_hat, "tanh": np.tanh(I_hat)}.get(mistake, sigmoid(I_hat))
    I = np.ones_like(I) if mistake == "no I" else I
    A = (allocation * I / t)[:, None] * (q @ k.T) * C
    return np.where(seen, A, 0) @ v


def flow_attention(q, k, v, eps=1e-6, flow_eps=0.0, clip=1.0, feature="sigmoid", mistake=None):
    return flows(q, k, v, eps, flow_eps, clip, feature, mistake, causal=False)


def flow_attention_causal(q, k, v, eps=1e-6, clip=1.0, mistake=None):
    return flows(q, k, v, eps, 0.0, clip, "sigmoid", mistake, causal=True)


WRITTEN = {
    "goat_head_attention": head_attention, "goat_attention": layer, "flow_attention": flow_attention,
    "flow_attention_causal": flow_attention_causal,
}
HEADS = (
    "a key dropped", "a key doubled", "no scale", "1/d", "1/sqrt(d)", "sign", "positions shifted", "base^(-r/R)", "sin(j - i)",
    "cos and sin swapped", "no waves", "no u", "all coordinates", "waves scaled too", "sign of K", "other corner", "causal forgotten",
    "causal shifted", "mask forgotten", "key_offset forgotten", "key positions anew", "no gate", "norm of all", "no softplus",
    "sign of the rate", "gate on u forgotten", "class token a patch", "class token waves", "grid turned", "fewer rows",
)
FLOWS = (
    "a key dropped", "a key doubled", "keys as they are", "not conserved", "no clip", "sign", "no competition", "no allocation",
    "allocation not squashed", "tanh", "no I", "no eps", "another feature",
)
MISTAKES = {
    "goat_head_attention": HEADS,
    "goat_attention": (
        *HEADS, "no b_q", "no b_v", "no b_o", "values of keys", "heads turned", "prior positions anew", "prior shifted",
        "training length", "N = m", "log j", "no b1", "sigmoid, not SiLU", "relu", "bump at 1", "no gain", "no bump",
        "recency always", "no recency", "recency as it is", "no prior_scale", "key_mask forgotten",
    ),
    "flow_attention": (*FLOWS, "no n/m", "m/n", "no factor m", "factor n", "no flow_eps"),
    "flow_attention_causal": (*FLOWS, "looks ahead", "no t", "competition of the last"),
}


def calls(name):
    """The standard cases, then offsets, gates, grids and the other options of 7 tokens and 5 keys."""
    standard = [(case.arrays, case.options) for case in cases(attnspec.formulas()[name])]
    yield from standard
    if name.startswith("flow"):
        arrays = standard[6][0]
        yield from ((arrays, {"clip": None}), (arrays, {"clip": 5.0}))
        if name == "flow_attention":
            yield from ((arrays, {"feature": "relu"}), (arrays, {"flow_eps": 1e-2}))
        return
    wide = standard[3][0]                                                # heads of width 8
    rng = np.random.default_rng(9)
    n, m = (wide[key].shape[-2] for key in (("q", "k") if "q" in wide else ("q_input", "k_input")))
    gate = {"gate_scale": rng.standard_normal(4), "gate_bias": rng.standard_normal(4)}
    places = [
        {"causal": True}, {"causal": "top-left"}, {"query_offset": 2, "causal": True}, {"key_offset": 3}, {"position_base": 100.0},
        {"key_offset": 3, "causal": True}, {"grid": (2, 3)}, {"grid": (2, 3), "cls": True}, {"query_offset": 9, "key_offset": 7},
    ]
    for options in places:
        yield wide, options
        yield wide | gate, options
    waves = {key: rng.standard_normal((4, 3)) for key in "ab"}
    yield wide | waves, {"grid": (2, 3)}
    if name == "goat_attention":
        for options in ({"prior_scale": 0.5}, {"training_length": 20}, {"absolute_base": 10.0}):
            yield wide, options
        yield {**wide, "key_mask": np.arange(m) != 1, "mask": rng.random((4, n, m)) < 0.7}, {}


@functools.cache
def judgements(name):
    """Those calls in float32, what the reference gives for them, and the bounds."""
    record, found = attnspec.formulas()[name], []
    for arrays, options in calls(name):
        rounded = {key: x.astype(f32) if x.dtype == float else x for key, x in arrays.items()}
        exact = {key: x.astype(float) if x.dtype == f32 else x for key, x in rounded.items()}
        found.append(({**rounded, **options}, record.function(**exact, **options), bound(record, exact, options, "float32")))
    assert len(found) >= 15
    return found


def worst(name, function):
    """The largest err/bound over all those calls."""
    ratios = []
    for call, want, limits in judgements(name):
        error, limit = judged(functools.partial(function, **call), want, limits)
        ratios.append(error / limit)
    return max(ratios)


@pytest.mark.parametrize("name, mistake", [(name, mistake) for name, rows in MISTAKES.items() for mistake in (None, *rows)])
def test_mistakes_in_the_formula(name, mistake):
    ratio = worst(name, functools.partial(WRITTEN[name], mistake=mistake))
    assert ratio < 1 if mistake is None else ratio > 1


@pytest.mark.parametrize("name", WRITTEN)
def test_the_twins_stay_within(name):
    assert worst(name, getattr(numba_kernels, name)) < 1


def test_priors_that_hide_keys_have_no_bound():
    record = attnspec.formulas()["goat_head_attention"]
    arrays = record.draw()
    with pytest.raises(NoBound, match=r"derived for finite priors u$"):
        bound(record, {**arrays, "u": np.full_like(arrays["u"], -np.inf)}, {}, "float32")
