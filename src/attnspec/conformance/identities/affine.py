"""Identities of the affine family."""

import numpy as np

import attnspec
from attnspec.conformance.identities import directional, identity

PHIS = ("linear_clipping", "sigmoid")


def affine(x, /, **changes):
    """Arrays of affine-scaled attention with h heads; alpha_ma between 0 and 1, as averages of alpha are."""
    arrays = x.arrays("affine_scaled_attention", h=x.h, b=2)
    return {**arrays, "alpha_ma": x.rng.random(x.h), **changes}


def alpha_of(arrays, phi="linear_clipping"):
    return attnspec.affine_alpha(arrays["x"], arrays["w_a"], phi=phi)[..., None]


def softmax_of(arrays, **options):
    return attnspec.scaled_dot_product_attention(arrays["q"], arrays["k"], arrays["v"], **options)


def constant_alpha(arrays, alpha):
    """The same arrays with <w_a, x_i> such that linear_clipping gives `alpha`, and alpha_ma equal to it."""
    x, w_a = np.zeros_like(arrays["x"]), np.zeros_like(arrays["w_a"])
    x[..., 0], w_a[:, 0] = 1.0, (alpha - 0.5) / 0.1
    return {**arrays, "x": x, "w_a": w_a, "alpha_ma": np.broadcast_to(alpha, w_a.shape[:1])}


# --- affine-scaled attention ---------------------------------------------------------------------------------------------------------


@identity("linear_clipping is odd around (0, 1/2) and between 0 and 1", "linear_clipping")
def _(x):
    z = 5 * x.normal(x.n, x.m)
    value = attnspec.linear_clipping(z)
    return np.stack([value + attnspec.linear_clipping(-z), value]), np.stack([np.ones_like(z), np.clip(value, 0, 1)])


@identity("linear_clipping rises with slope 1/10 inside and with slope 0 outside", "linear_clipping")
def _(x):
    inside, outside = x.rng.uniform(-4, 4, (2, x.n)), x.rng.choice([-1, 1], (1, x.n)) * x.rng.uniform(5, 9, (2, x.n))
    rise = [np.diff(attnspec.linear_clipping(z), axis=0) for z in (inside, outside)]
    return np.stack(rise), np.stack([0.1 * np.diff(inside, axis=0), np.zeros((1, x.n))])


@identity("alpha of one head and token is phi of their product", "affine_alpha")
def _(x):
    tokens, w_a = x.normal(x.n, x.d), 2 * x.normal(x.h, x.d)
    phi = x.rng.choice(PHIS)
    z = np.array([[sum(float(a) * float(b) for a, b in zip(w, token, strict=True)) for token in tokens] for w in w_a])
    want = 1 / (1 + np.exp(-z)) if phi == "sigmoid" else np.minimum(1, np.maximum(0, z / 10 + 0.5))
    return attnspec.affine_alpha(tokens, w_a, phi=phi), want


@identity("phi(-z) = 1 - phi(z): -w_a gives 1 - alpha", "affine_alpha")
def _(x):
    tokens, w_a = x.normal(x.n, x.d), 2 * x.normal(x.h, x.d)
    phi = x.rng.choice(PHIS)
    return attnspec.affine_alpha(tokens, -w_a, phi=phi), 1 - attnspec.affine_alpha(tokens, w_a, phi=phi)


@identity("t steps at the same alpha leave rho^t alpha_ma + (1 - rho^t) mean", "affine_moving_average")
def _(x):
    alpha_ma, alpha, rho = x.rng.random(x.h), x.rng.random((3, x.h, x.n)), x.rng.random()
    moved = alpha_ma
    for _ in range(x.m):
        moved = attnspec.affine_moving_average(moved, alpha, rho=rho)
    return moved, rho**x.m * alpha_ma + (1 - rho**x.m) * alpha.mean(axis=(0, 2))


@identity("without a mask every row of A sums to alpha_ma, whatever alpha is", "affine_scaled_attention")
def _(x):
    arrays = affine(x)
    A = attnspec.affine_scaled_attention(**arrays, phi=x.rng.choice(PHIS), return_weights=True).weights
    return A.sum(-1), np.broadcast_to(arrays["alpha_ma"][:, None], A.shape[:-1])


@identity("A = alpha (P - 1/N) + alpha_ma / N", "affine_scaled_attention")
def _(x):
    arrays = affine(x)
    P = attnspec.attention_weights(arrays["q"], arrays["k"])
    A = attnspec.affine_scaled_attention(**arrays, return_weights=True).weights
    return A, alpha_of(arrays) * (P - 1 / x.m) + arrays["alpha_ma"][:, None, None] / x.m


@identity("out = alpha SDPA + beta times the prefix sums of v, causal", "affine_scaled_attention")
def _(x):
    arrays = affine(x, q=x.normal(2, x.h, x.m, x.d), x=x.normal(2, x.m, 6))
    phi = x.rng.choice(PHIS)
    alpha = alpha_of(arrays, phi)
    beta = (arrays["alpha_ma"][:, None, None] - alpha) / x.m
    want = alpha * softmax_of(arrays, causal=True) + beta * np.cumsum(arrays["v"], axis=-2)
    return attnspec.affine_scaled_attention(**arrays, phi=phi, causal=True), want


@identity("causal: row i sums to alpha_i + (alpha_ma - alpha_i)(i + 1)/m", "affine_scaled_attention")
def _(x):
    arrays = affine(x, q=x.normal(2, x.h, x.m, x.d), x=x.normal(2, x.m, 6))
    A = attnspec.affine_scaled_attention(**arrays, causal=True, return_weights=True).weights
    alpha = alpha_of(arrays)[..., 0]
    return A.sum(-1), alpha + (arrays["alpha_ma"][:, None] - alpha) * np.arange(1, x.m + 1) / x.m


@identity("n_keys = 'allowed': rows sum to alpha_ma under any mask that shows a key", "affine_scaled_attention")
def _(x):
    arrays = affine(x)
    mask = x.rng.random((x.n, x.m)) < 0.6
    A = attnspec.affine_scaled_attention(**arrays, mask=mask, n_keys="allowed", return_weights=True).weights
    return A.sum(-1), np.where(mask.any(-1), arrays["alpha_ma"][:, None], 0.0) + np.zeros(A.shape[:-1])


@identity("alpha = alpha_ma gives alpha times softmax attention", "affine_scaled_attention")
def _(x):
    alpha = x.rng.random()
    arrays = constant_alpha(affine(x), alpha)
    return attnspec.affine_scaled_attention(**arrays), alpha * softmax_of(arrays)


@identity("alpha = alpha_ma = 1 gives softmax attention", "affine_scaled_attention")
def _(x):
    arrays = constant_alpha(affine(x), 1.0)
    mask = x.rng.random((x.n, x.m)) < 0.6
    return attnspec.affine_scaled_attention(**arrays, mask=mask), softmax_of(arrays, mask=mask)


@identity("alpha = 0 gives alpha_ma times the mean of the values", "affine_scaled_attention")
def _(x):
    arrays = constant_alpha(affine(x), 0.0)
    alpha_ma = x.rng.random(x.h)
    out = attnspec.affine_scaled_attention(**{**arrays, "alpha_ma": alpha_ma})
    return out, alpha_ma[:, None, None] * np.broadcast_to(arrays["v"].mean(-2, keepdims=True), out.shape)


@identity("one value v for all keys gives alpha_ma v, so that x has no gradient", "affine_scaled_attention_backward")
def _(x):
    arrays = affine(x)
    arrays["v"] = np.broadcast_to(arrays["v"][..., :1, :], arrays["v"].shape)
    gradients = attnspec.affine_scaled_attention_backward(**arrays, do=x.normal(2, x.h, x.n, x.e))
    return gradients.dx, np.zeros_like(arrays["x"])


@identity("alpha = alpha_ma: dq, dk, dv are alpha times those of softmax attention", "affine_scaled_attention_backward")
def _(x):
    alpha, do = x.rng.random(), x.normal(2, x.h, x.n, x.e)
    arrays = constant_alpha(affine(x), alpha)
    got = attnspec.affine_scaled_attention_backward(**arrays, do=do)
    want = attnspec.scaled_dot_product_attention_backward(arrays["q"], arrays["k"], arrays["v"], do)
    got, want = (np.concatenate([g.ravel() for g in gradients[:3]]) for gradients in (got, want))
    return got, alpha * want


@identity("sum_j <dv_j, v_j> = <do, out>, as out is linear in v", "affine_scaled_attention_backward")
def _(x):
    arrays, do = affine(x), x.normal(2, x.h, x.n, x.e)
    dv = attnspec.affine_scaled_attention_backward(**arrays, do=do, causal=True).dv
    return np.sum(dv * arrays["v"]), np.sum(do * attnspec.affine_scaled_attention(**arrays, causal=True))


@identity("its gradients are the derivative along any direction, by complex step", "affine_scaled_attention_backward")
def _(x):
    groups = int(x.rng.integers(1, 4))
    arrays = x.arrays("affine_scaled_attention", h=groups * x.h, hk=x.h, b=2)
    options = {"scale": x.rng.uniform(0.1, 2.0), "phi": str(x.rng.choice(PHIS)), "n_keys": str(x.rng.choice(["total", "allowed"])),
               "mask": x.rng.random((x.n, x.m)) < 0.8, "causal": (False, "bottom-right", "top-left")[x.rng.integers(3)],
               "enable_gqa": True}
    do = x.normal(2, groups * x.h, x.n, x.e)
    gradients = attnspec.affine_scaled_attention_backward(**arrays, do=do, **options)._asdict()
    return directional(x, lambda **moved: attnspec.affine_scaled_attention(**moved, **options),
                       {name[1:]: gradient for name, gradient in gradients.items()}, arrays, do)      # alpha_ma, which has none, stays


# --- gated attention -----------------------------------------------------------------------------------------------------------------


def gated(x, position="G1", **changes):
    """Arrays of gated attention in self-attention, elementwise with a gate per head."""
    arrays = x.arrays("gated_attention", m=x.n, h=x.h, g=x.d if position in ("G3", "G4") else x.e)
    if position == "G5":
        arrays["w_gate"] = x.normal(1, x.m, arrays["x"].shape[-1])
        arrays["w_o"] = x.normal(x.m, x.h, x.e)
    return {**arrays, "position": position, **changes}


def any_position(x):
    return str(x.rng.choice(["G1", "G2", "G3", "G4", "G5"]))


def with_bias(arrays, value):
    """The gate's logits all equal to `value`."""
    w_gate = arrays["w_gate"]
    return {**arrays, "w_gate": np.zeros_like(w_gate), "b_gate": np.full(w_gate.shape[:2], value)}


def layer(arrays, **options):
    """Softmax attention of the same arrays, projected where they have a w_o."""
    out = softmax_of(arrays, **options)
    return np.einsum("hne,ohe->no", out, arrays["w_o"]) if "w_o" in arrays else out


@identity("an open gate leaves softmax attention", "gated_attention")
def _(x):
    arrays = gated(x, any_position(x))
    return attnspec.gated_attention(**with_bias(arrays, 60.0)), layer(arrays)          # sigmoid(60) is 1 in float64


@identity("w_gate = 0 halves the output at G1, G2, G5, and the logits at G3, G4", "gated_attention")
def _(x):
    position = any_position(x)
    arrays = with_bias(gated(x, position), 0.0)
    want = layer(arrays, scale=0.5 / np.sqrt(x.d)) if position in ("G3", "G4") else 0.5 * layer(arrays)
    return attnspec.gated_attention(**arrays), want


@identity("ns_sigmoid = (1 + sigmoid)/2: at G1, G2 and G5 the mean of the ungated and the gated output", "gated_attention")
def _(x):
    arrays = gated(x, str(x.rng.choice(["G1", "G2", "G5"])))
    got = attnspec.gated_attention(**arrays, activation="ns_sigmoid")
    return got, (layer(arrays) + attnspec.gated_attention(**arrays)) / 2


@identity("headwise = elementwise with equal lanes", "gated_attention")
def _(x):
    arrays = gated(x, any_position(x))
    headwise = arrays["w_gate"][:, :1]
    got = attnspec.gated_attention(**{**arrays, "w_gate": headwise})
    return got, attnspec.gated_attention(**{**arrays, "w_gate": np.broadcast_to(headwise, arrays["w_gate"].shape)})


@identity("head-shared = a gate per head with equal heads", "gated_attention")
def _(x):
    arrays = gated(x, any_position(x))
    shared = arrays["w_gate"][:1]
    got = attnspec.gated_attention(**{**arrays, "w_gate": shared})
    return got, attnspec.gated_attention(**{**arrays, "w_gate": np.broadcast_to(shared, arrays["w_gate"].shape)})


@identity("silu(z) = z sigmoid(z): at G1 the product of the gates with identity and sigmoid", "gated_attention")
def _(x):
    arrays = gated(x)
    got = attnspec.gated_attention(**arrays, activation="silu")
    by_identity, by_sigmoid = (attnspec.gated_attention(**arrays, activation=name) for name in ("identity", "sigmoid"))
    return got * softmax_of(arrays), by_identity * by_sigmoid


@identity("additive at G1, G2 and G5: the gate's own term is what the layer adds where all else is 0", "gated_attention")
def _(x):
    position = str(x.rng.choice(["G1", "G2", "G5"]))
    arrays = gated(x, position, mode="additive", activation="silu")
    nothing = {**arrays, "v": np.zeros_like(arrays["v"])}
    return attnspec.gated_attention(**arrays), layer(arrays) + attnspec.gated_attention(**nothing)


@identity("a sink z is the headwise G1 gate sigmoid(L - z)", "gated_attention")
def _(x):
    q, k, v = x.qkv(x.h)
    z = x.normal(x.h)
    L = attnspec.scaled_dot_product_attention(q, k, v, return_lse=True).lse
    got = attnspec.gated_attention(q, k, v, L.T, np.eye(x.h)[:, None, :], b_gate=-z[:, None])
    return got, attnspec.scaled_dot_product_attention(q, k, v, sink=z)


@identity("a G2 gate that does not depend on the input equals the same gate at G1", "gated_attention")
def _(x):
    arrays = gated(x)
    arrays |= {"w_gate": np.zeros_like(arrays["w_gate"]), "b_gate": x.normal(x.h, x.e)}
    return attnspec.gated_attention(**{**arrays, "position": "G2"}), attnspec.gated_attention(**arrays)


@identity("a headwise gate that does not depend on the input does the same to queries and to keys", "gated_attention")
def _(x):
    arrays = gated(x)
    arrays |= {"w_gate": np.zeros((x.h, 1, arrays["x"].shape[-1])), "b_gate": x.normal(x.h, 1)}
    return attnspec.gated_attention(**{**arrays, "position": "G3"}), attnspec.gated_attention(**{**arrays, "position": "G4"})


@identity("a mask removes keys: attention over those that are left, and their tokens", "gated_attention")
def _(x):
    position = any_position(x)
    arrays = gated(x, position, mode=str(x.rng.choice(["multiplicative", "additive"])))
    seen = x.rng.random(x.n) < 0.6
    seen[x.rng.integers(x.n)] = True
    left = {**arrays, "k": arrays["k"][:, seen], "v": arrays["v"][:, seen]}
    if position in ("G2", "G3"):
        left["x_keys"] = arrays["x"][seen]
    return attnspec.gated_attention(**arrays, mask=seen), attnspec.gated_attention(**left)


# --- energy-gated attention ----------------------------------------------------------------------------------------------------------

EGA = ("energy_gated_attention", "convolution_energy_gated_attention", "morlet_energy_gated_attention")
ENERGY = {EGA[0]: (attnspec.linear_energy, ("w_energy", "b_energy")), EGA[1]: (attnspec.convolution_energy, ("filters", "biases")),
          EGA[2]: (attnspec.morlet_energy, ("omega", "sigma"))}


def plain(arrays, **options):
    """Softmax attention with the projections of an energy-gated head."""
    q, k, v = (arrays["x"] @ arrays[w].T for w in ("w_q", "w_k", "w_v"))
    return attnspec.scaled_dot_product_attention(q, k, v, **options)


def each_of_ega(check):
    """One result (got, want) from the three variants in turn."""
    def run(x):
        results = [check(x, name) for name in EGA]
        return tuple(np.concatenate([np.ravel(result[side]) for result in results]) for side in (0, 1))
    return run


@identity("A = softmax(s_ij + log g_j)", *EGA)
@each_of_ega
def _(x, name):
    arrays = x.arrays(name, s=3)
    energy, of = ENERGY[name]
    g = attnspec.energy_gate(energy(arrays["x"], *(arrays[w] for w in of)), *(arrays[w] for w in ("alpha", "tau", "mixing")))
    return getattr(attnspec, name)(**arrays), plain(arrays, causal=True, bias=np.log(g)[None, :])


@identity("rows of A sum to 1", *EGA)
@each_of_ega
def _(x, name):
    A = getattr(attnspec, name)(**x.arrays(name), return_weights=True).weights
    return A.sum(-1), np.ones(x.n)


@identity("alpha = 0 gives softmax attention", *EGA)
@each_of_ega
def _(x, name):
    arrays = x.arrays(name)
    arrays["alpha"] = np.zeros_like(arrays["alpha"])
    causal = bool(x.rng.integers(2))
    return getattr(attnspec, name)(**arrays, causal=causal), plain(arrays, causal=causal)


@identity("w_energy = 0 gives softmax attention", "energy_gated_attention")
def _(x):
    arrays = x.arrays("energy_gated_attention")
    arrays["w_energy"] = np.zeros_like(arrays["w_energy"])
    return attnspec.energy_gated_attention(**arrays), plain(arrays, causal=True)


@identity("one scale: the mixing weight is 1 whatever its logit", "energy_gate")
def _(x):
    energy, alpha, tau = x.normal(1, x.n), x.normal(1), x.normal(1)
    got, want = (attnspec.energy_gate(energy, alpha, tau, logit) for logit in (5 * x.normal(1), np.zeros(1)))
    return got, want


@identity("energies a e + b, a > 0, gate as e does", "energy_gate")
def _(x):
    energy, parameters = x.normal(x.h, x.n), x.normal(3, x.h)
    znorm = str(x.rng.choice(["sequence", "prefix"]))
    a, b = x.rng.uniform(0.5, 2, (x.h, 1)), x.normal(x.h, 1)
    # The floor of 1e-8 scales with nothing, but two equal energies are all that could meet it.
    return attnspec.energy_gate(a * energy + b, *parameters, znorm=znorm), attnspec.energy_gate(energy, *parameters, znorm=znorm)


@identity("-alpha gives 1 - g", "energy_gate")
def _(x):
    energy, (alpha, tau, mixing) = x.normal(x.h, x.n), x.normal(3, x.h)
    return attnspec.energy_gate(energy, -alpha, tau, mixing), 1 - attnspec.energy_gate(energy, alpha, tau, mixing)


@identity("prefix statistics at the last position are those of the sequence", "energy_gate")
def _(x):
    energy, parameters = x.normal(x.h, x.n), x.normal(3, x.h)
    got, want = (attnspec.energy_gate(energy, *parameters, znorm=znorm)[-1] for znorm in ("prefix", "sequence"))
    return got, want


@identity("prefix statistics are causal: a shorter sequence gives the first rows", *EGA)
@each_of_ega
def _(x, name):
    arrays, length = x.arrays(name), int(x.rng.integers(1, x.n + 1))
    full = getattr(attnspec, name)(**arrays, znorm="prefix")
    return getattr(attnspec, name)(**{**arrays, "x": arrays["x"][:length]}, znorm="prefix"), full[:length]


@identity("the energy of one token is <w, x> + b", "linear_energy")
def _(x):
    tokens, w, b = x.normal(x.n, x.d), x.normal(x.h, x.d), x.normal(x.h)
    want = [[sum(float(a) * float(t) for a, t in zip(w[s], token, strict=True)) + float(b[s]) for token in tokens] for s in range(x.h)]
    return attnspec.linear_energy(tokens, w, b), want


@identity("linear energies are affine in x: e(x + y) + e(0) = e(x) + e(y)", "linear_energy")
def _(x):
    a, b = x.normal(2, x.n, x.d)
    w, bias = x.normal(x.h, x.d), x.normal(x.h)
    e = [attnspec.linear_energy(tokens, w, bias) for tokens in (a + b, 0 * a, a, b)]
    return e[0] + e[1], e[2] + e[3]


@identity("filters of length 1 with one part: the square of the linear energy", "convolution_energy")
def _(x):
    tokens, w, bias = x.normal(x.n, x.d), x.normal(x.h, x.d), x.normal(x.h)
    got = attnspec.convolution_energy(tokens, w[:, None, :, None], bias[:, None])
    return got, attnspec.linear_energy(tokens, w, bias) ** 2


@identity("zeros in front of a filter change nothing", "convolution_energy")
def _(x):
    arrays = x.arrays("convolution_energy")
    longer = np.pad(arrays["filters"], [(0, 0)] * 3 + [(int(x.m), 0)])
    return attnspec.convolution_energy(**{**arrays, "filters": longer}), attnspec.convolution_energy(**arrays)


@identity("a later token changes no earlier energy, and a sequence that starts later only moves", "convolution_energy", "morlet_energy")
def _(x):
    results, t = [], int(x.rng.integers(1, x.n + 1))
    for name in ("convolution_energy", "morlet_energy"):
        energy, arrays = getattr(attnspec, name), x.arrays(name)
        tokens, whole = arrays["x"], energy(**arrays)
        results.append((energy(**{**arrays, "x": tokens[:t]}), whole[:, :t]))
        late = np.concatenate([np.zeros((x.m, tokens.shape[-1])), tokens])
        results.append((energy(**{**arrays, "x": late})[:, x.m :], whole))
    return tuple(np.concatenate([result[side].ravel() for result in results]) for side in (0, 1))


@identity("a Morlet wavelet is a pair of filters that are equal on all channels", "morlet_energy")
def _(x):
    tokens, length = x.normal(x.n, x.d), 2 * x.m + 1
    sigma = x.rng.uniform(3, 9, 1)
    omega = x.rng.uniform(5 / sigma, 0.95 * np.pi)
    t = np.arange(length)
    wave = np.exp(1j * omega * t - t**2 / (2 * sigma**2 + 1e-8)) / x.d
    filters = np.stack([wave.real, wave.imag])[:, None, :] + np.zeros((2, x.d, 1))
    want = attnspec.convolution_energy(tokens, filters[None], np.zeros((1, 2)))
    return attnspec.morlet_energy(tokens, omega, sigma, lengths=(length,)), want


def wavelet_sums(y, omega, sigma, length):
    """sum_t exp(i omega t - t^2 / (2 sigma^2 + 1e-8)) y_{j - length + 1 + t} for every j, zeros before y_0."""
    t = np.arange(length)
    wave = np.exp(1j * omega * t - t**2 / (2 * sigma**2 + 1e-8))
    return np.correlate(np.concatenate([np.zeros(length - 1), y]), wave.conj(), "valid")       # np.correlate conjugates its second argument


@identity("omega > 0.95 pi acts as 0.95 pi, sigma < 1e-3 as 1e-3, and then omega < 5/sigma as 5/sigma", "morlet_energy")
def _(x):
    tokens, lengths = x.normal(x.n, x.d), (5, 2 * x.m + 1, 3, 4)
    sigma = np.array([*x.rng.uniform(6, 9, 2), *x.rng.uniform([-9, 1], [-1, 1.5])])
    omega = np.array([np.pi * x.rng.uniform(0.96, 2), x.rng.uniform(0.1, 4.9) / sigma[1], *x.rng.uniform(0.1, 6.0, 2)])
    limits = ((0.95 * np.pi, sigma[0]), (5 / sigma[1], sigma[1]), (5 / 1e-3, 1e-3), (5 / sigma[3], sigma[3]))    # 0.95 pi 1.5 < 5
    want = [np.abs(wavelet_sums(tokens.mean(-1), *pair, length)) ** 2 for pair, length in zip(limits, lengths, strict=True)]
    return attnspec.morlet_energy(tokens, omega, sigma, lengths=lengths), want


# --- context broadcasting ------------------------------------------------------------------------------------------------------------


@identity("(I + 11^T/n)/2: uniform attention averaged with the identity", "context_broadcasting")
def _(x):
    tokens = x.normal(2, x.n, x.d)
    uniform = attnspec.scaled_dot_product_attention(tokens, tokens, tokens, scale=0.0)
    return attnspec.context_broadcasting(tokens), (tokens + uniform) / 2


@identity("the mean of the tokens is kept, what differs from it is halved", "context_broadcasting")
def _(x):
    tokens = x.normal(x.n, x.d)
    out, mean = attnspec.context_broadcasting(tokens), tokens.mean(0)
    return np.concatenate([out.mean(0, keepdims=True), out - mean]), np.concatenate([mean[None], (tokens - mean) / 2])


@identity("lam = 1, halved, is the form without lam; lam = 0 changes nothing", "context_broadcasting")
def _(x):
    tokens = x.normal(x.n, x.d)
    halved, same = attnspec.context_broadcasting(tokens, lam=np.ones(x.d)) / 2, attnspec.context_broadcasting(tokens, lam=np.zeros(x.d))
    return np.stack([halved, same]), np.stack([attnspec.context_broadcasting(tokens), tokens])


@identity("one token is left alone", "context_broadcasting")
def _(x):
    tokens = x.normal(1, x.d)
    return attnspec.context_broadcasting(tokens), tokens


@identity("with lam: out_ic = x_ic + lam_c mean_c, linear in lam", "context_broadcasting")
def _(x):
    tokens, lam = x.normal(x.n, x.d), x.normal(x.d)
    want = [[tokens[i, c] + lam[c] * (sum(tokens[:, c]) / x.n) for c in range(x.d)] for i in range(x.n)]
    return attnspec.context_broadcasting(tokens, lam=lam), want
