"""Energy-gated attention: softmax weights times a gate of the key's own energy, renormalised, so that tokens of low energy recede.

    e_sj  = <w_s, x_j> + b_s                                         s = 1..S scales; S = 1 is EGA-1
    e~_sj = (e_sj - mean_j e_sj) / max(std_j e_sj, 1e-8)             over the positions of the sequence
    g_j   = sum_s softmax(c)_s sigmoid(alpha_s (e~_sj - tau_s))
    A_ij  = P_ij g_j / max(sum_l P_il g_l, 1e-8),                    P = softmax(scale q k^T), causal
    o_i   = sum_j A_ij v_j

    EGA-C   e_sj = sum_p (b_sp + sum_u <F_sp[:, u], x_{j-l+1+u}>)^2                       two filters p of length l, causal
    EGA-M   e_sj = |sum_t exp(i w_s t - t^2 / (2 sigma_s^2 + 1e-8)) y_{j-l_s+1+t}|^2       y_j the mean of x_j's channels, t = 0..l_s-1

for one head: x (..., n, c), q = x w_q^T (..., n, d), k = x w_k^T, v = x w_v^T (..., n, e), w_q, w_k (..., d, c), w_v (..., e, c),
w_energy (..., s, c), b_energy, alpha, tau, mixing = c, omega = w and sigma (..., s), filters F (..., s, p, c, l), biases (..., s, p),
energy (..., s, n), o (..., n, e). scale is 1/sqrt(d) unless given. The weights' leading axes broadcast against those of x: heads are
weights (h, d, c) with x (..., 1, n, c).

Source: Zeris, "Energy-Gated Attention", arXiv:2605.21842, and the author's code; the code is what is reproduced here, the paper's equations
are known through accounts of it.

Conventions. The energy is linear in the layer's input x, not a squared norm, and does not come from the keys. std is the population's.
std_floor="clamp" divides by max(std, 1e-8) as the code does, "add" by std + 1e-8 as the paper is reported to; a sequence of one token has
e~ = 0 under both. The statistics run over the whole sequence, later tokens too, so the official attention is not causal although its
softmax is: the last token changes every earlier output. znorm="prefix" takes mean and std over the positions up to j only; it is causal,
and not official. There is no mask, as padding would enter the statistics: cut the sequence instead.
EGA-C: position j meets the last tap u = l - 1. A shorter filter among longer ones is one with zeros in front. EGA-M: tap t = 0, the
envelope's peak, meets the oldest sample. omega and sigma are the values after exp (the code learns logarithms); then
omega <- min(omega, 0.95 pi), sigma <- max(sigma, 1e-3), and omega <- 5 / sigma where omega sigma < 5. Lengths are 3, 7, 15, 31, ...
Initial values: alpha 2, tau 0, mixing 1/S, omega pi/l, sigma 5/omega. A head of S = 1 has c + 4 parameters beside its projections:
12,480 for 6 layers of 8 heads at c = 256.

Identities. A = softmax(s_ij + log g_j), a bias that depends on the key alone. Rows of A sum to 1. w_energy = 0 or alpha = 0 gives softmax
attention. For S = 1 the mixing weight is 1, whatever c. b_energy changes nothing, and positive factors of the energy nothing either.

Wrong versions met elsewhere: the energy of the keys k_j, or |x_j|^2; sample instead of population standard deviation; statistics taken for
causal; the gate without renormalisation; the Morlet kernel reversed, so that its peak meets the newest sample.
"""

from typing import Any

import numpy as np

from attnspec.reference.activations import sigmoid
from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, number, one_of, visible_keys, whole
from attnspec.reference.softmax.weights import attention_weights, softmax_weights, weighted_values

FLOOR = 1e-8
ZNORMS = ("sequence", "prefix")
STD_FLOORS = ("clamp", "add")
SOURCE = "arXiv:2605.21842 and the author's code"
HEAD = {"x": "... n c", "w_q": "... d c", "w_k": "... d c", "w_v": "... e c"}
GATE = {"alpha": "... s", "tau": "... s", "mixing": "... s"}
SIZES = {"c": 6, "s": 2, "p": 2, "l": 3}
MORLET_KINKS = "omega = 0.95 pi, sigma = 1e-3 or omega sigma = 5"
ATTENTION: dict[str, Any] = {
    "family": "affine",
    "source": SOURCE,
    "kinks": "std_j e_sj = 1e-8 or sum_l P_il g_l = 1e-8",
    "sizes": SIZES,
    "workspace": "... n n",
}


# --- energies ------------------------------------------------------------------------------------------------------------------------


@formula(
    family="affine",
    shapes={"x": "... n c", "w_energy": "... s c", "b_energy": "... s", "energy": "... s n"},
    equation="e_sj = <w_s, x_j> + b_s",
    latex=r"e_{sj}=\langle w_s,x_j\rangle+b_s",
    source=SOURCE,
    sizes=SIZES,
)
def linear_energy(x, w_energy, b_energy):
    """Energies (..., s, n) of the tokens x (..., n, c) by w_energy (..., s, c) and b_energy (..., s): EGA-1, for s > 1 EGA-S.

    Raises ValueError where shapes do not match, naming the argument.

    >>> linear_energy([[1.0, 2.0], [3.0, 4.0]], [[1.0, -1.0]], [0.5])
    array([[-0.5, -0.5]])
    """
    return w_energy @ np.swapaxes(x, -1, -2) + b_energy[..., None]


@formula(
    family="affine",
    shapes={"x": "... n c", "filters": "... s p c l", "biases": "... s p", "energy": "... s n"},
    equation="e_sj = sum_p (b_sp + sum_u <F_sp[:, u], x_{j-l+1+u}>)^2",
    latex=r"e_{sj}=\sum_p\Big(b_{sp}+\sum_{u=0}^{l-1}\langle F_{sp,u},x_{j-l+1+u}\rangle\Big)^2",
    source=SOURCE,
    sizes=SIZES,
)
def convolution_energy(x, filters, biases):
    """Energies (..., s, n) of the tokens x (..., n, c) by causal filters (..., s, p, c, l), p = 2 in the paper: EGA-C.

    biases: (..., s, p). Tokens before the first count as zeros; the last tap meets the token itself.
    Raises ValueError where shapes do not match, naming the argument.

    >>> convolution_energy([[1.0], [2.0], [5.0]], [[[[-1.0, 1.0]], [[0.0, 1.0]]]], [[0.0, 0.0]])   # differences and values
    array([[ 2.,  5., 34.]])
    """
    return np.sum((causal_correlation(x, filters) + biases[..., None]) ** 2, axis=-2)


@formula(
    family="affine",
    shapes={"x": "... n c", "omega": "... s", "sigma": "... s", "energy": "... s n"},
    equation="e_sj = |sum_t exp(i w_s t - t^2 / (2 sigma_s^2 + eps)) y_{j-l_s+1+t}|^2,  y_j = mean of x_j",
    latex=r"e_{sj}=\Big|\sum_{t=0}^{l_s-1}e^{\mathrm i\omega_s t-t^2/(2\sigma_s^2+\epsilon)}\,\bar x_{j-l_s+1+t}\Big|^2",
    source=SOURCE,
    kinks=MORLET_KINKS,
    sizes=SIZES,
    draw=lambda sizes, rng: draw_morlet(("x",), sizes, rng),
)
def morlet_energy(x, omega, sigma, *, lengths=None, eps=1e-8):
    """Energies (..., s, n) of the mean channel of the tokens x (..., n, c) by causal Morlet wavelets: EGA-M.

    omega, sigma: (..., s) frequency and width, brought into range as this page's conventions say.  lengths: taps of each of the s wavelets,
    default 3, 7, 15, 31, ...  eps: 1e-8, in the author's last script 1e-6.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> morlet_energy([[4.0], [0.0], [0.0]], [np.pi / 2], [10.0], lengths=(2,)).round(2)      # an oldest sample has weight 1
    array([[15.84, 16.  ,  0.  ]])
    """
    eps = number("eps", eps, least=0)
    lengths = wavelet_lengths(lengths, omega.shape[-1])
    omega = np.where(omega.real > 0.95 * np.pi, 0.95 * np.pi, omega)
    sigma = np.where(sigma.real < 1e-3, 1e-3, sigma)
    omega = np.where((omega * sigma).real < 5, 5 / sigma, omega)
    y = x.sum(axis=-1, keepdims=True) / max(x.shape[-1], 1)
    energies = []
    for s, length in enumerate(lengths):
        t, w, width = np.arange(length), omega[..., s, None], sigma[..., s, None]
        envelope = np.exp(-(t**2) / (2 * width**2 + eps))
        wavelet = np.stack([np.cos(w * t) * envelope, np.sin(w * t) * envelope], axis=-2)          # (..., 2, length)
        energies.append(np.sum(causal_correlation(y, wavelet[..., None, :, None, :]) ** 2, axis=-2))
    return np.concatenate(energies, axis=-2)


def wavelet_lengths(lengths, s):
    if s == 0:
        raise ValueError("omega: expected at least one wavelet, got none")
    if lengths is None:
        return tuple(2 ** (scale + 2) - 1 for scale in range(s))
    try:
        lengths = tuple(lengths)
    except TypeError:
        raise ValueError(f"lengths: expected {s} whole numbers, got {lengths!r}") from None
    if len(lengths) != s:
        raise ValueError(f"lengths: expected {s} whole numbers, as many as omega, got {lengths!r}")
    return tuple(whole("lengths", length, least=1) for length in lengths)


def causal_correlation(x, filters):
    """(..., s, p, n): filters (..., s, p, c, l) over x (..., n, c), the last tap at the token itself, zeros before the first token."""
    n, l = x.shape[-2], filters.shape[-1]
    j = np.arange(n)[:, None] + np.arange(l) - (l - 1)                                             # the token that each tap meets
    windows = np.where((j >= 0)[..., None], x[..., np.maximum(j, 0), :], 0.0)                      # (..., n, l, c)
    return np.einsum("...nlc,...pcl->...pn", windows[..., None, :, :, :], filters)


# --- the gate ------------------------------------------------------------------------------------------------------------------------


def z_normalised(e, znorm, std_floor):
    """e (..., n) minus its mean, over its standard deviation; both over all positions, or over those up to each one."""
    one_of("znorm", znorm, ZNORMS)
    one_of("std_floor", std_floor, STD_FLOORS)
    n = e.shape[-1]
    seen = np.tri(n, dtype=bool) if znorm == "prefix" else np.ones((1, n), bool)
    count = np.maximum(seen.sum(axis=-1), 1)
    mean = np.sum(np.where(seen, e[..., None, :], 0.0), axis=-1) / count
    deviations = np.where(seen, e[..., None, :] - mean[..., None], 0.0)
    variance = np.sum(deviations**2, axis=-1) / count
    # The root has no derivative at 0, so it is taken only of what the floor leaves.
    if std_floor == "clamp":
        std = np.sqrt(np.where(variance.real > FLOOR**2, variance, FLOOR**2))
    else:
        std = np.where(variance.real > 0, np.sqrt(np.where(variance.real > 0, variance, 1.0)), 0.0) + FLOOR
    return (e - mean) / std


@formula(
    family="affine",
    shapes={"energy": "... s n", **GATE, "gate": "... n"},
    equation="g_j = sum_s softmax(mixing)_s sigmoid(alpha_s ((e_sj - mean_s) / std_s - tau_s))",
    latex=r"g_j=\sum_s\operatorname{softmax}(c)_s\,\sigma(\alpha_s(\tilde e_{sj}-\tau_s)),\quad\tilde e=(e-\bar e)/\mathrm{std}(e)",
    source=SOURCE,
    kinks="std_j e_sj = 1e-8",
    sizes=SIZES,
)
def energy_gate(energy, alpha, tau, mixing, *, znorm="sequence", std_floor="clamp"):
    """Gate (..., n) between 0 and 1 of tokens with energies (..., s, n).

    alpha, tau, mixing: (..., s) slope, threshold and logit of the mixing weight of each scale.
    znorm: statistics over the whole "sequence" (the author's code; not causal) or over the "prefix" up to each token (not official).
    std_floor: "clamp" divides by max(std, 1e-8), "add" by std + 1e-8.
    Raises ValueError where shapes do not match or an option is unknown, naming the argument.

    >>> energy_gate([[1.0, 3.0]], [np.log(3.0)], [0.0], [0.7])                     # normalised energies -1 and 1
    array([0.25, 0.75])
    """
    e = z_normalised(energy, znorm, std_floor)
    g = sigmoid(alpha[..., None] * (e - tau[..., None]))
    share = softmax_weights(mixing[..., None, :])[0]                   # (..., 1, s)
    return (share @ g)[..., 0, :]


# --- attention -----------------------------------------------------------------------------------------------------------------------


def gated_by_energy(x, w_q, w_k, w_v, gate, scale, causal, return_weights):
    """Self-attention of x whose softmax weights are multiplied by the keys' gate (..., n) and renormalised."""
    q, k, v = (x @ np.swapaxes(w, -1, -2) for w in (w_q, w_k, w_v))
    visible = visible_keys(q.shape[-2], k.shape[-2], None, causal)
    P = attention_weights(q, k, scale=scale, causal=causal)
    weighed = np.where(visible, P * gate[..., None, :], 0.0)
    total = np.sum(weighed, axis=-1, keepdims=True)
    A = weighed / np.where(total.real < FLOOR, FLOOR, total)
    out = weighted_values(A, v, visible)
    return AttentionResult(out, A) if return_weights else out


@formula(
    shapes={**HEAD, "w_energy": "... s c", "b_energy": "... s", **GATE, "out": "... n e"},
    equation="out = A v,  A_ij = P_ij g_j / sum_l P_il g_l,  g = gate of the energies <w_s, x_j> + b_s",
    latex=r"A_{ij}=\frac{P_{ij}g_j}{\sum_l P_{il}g_l},\quad g_j=\sum_s\operatorname{softmax}(c)_s\,\sigma(\alpha_s(\tilde e_{sj}-\tau_s))",
    bound="energy gated",
    **ATTENTION,
)
def energy_gated_attention(
    x, w_q, w_k, w_v, w_energy, b_energy, alpha, tau, mixing, *, scale=None, causal=True, znorm="sequence", std_floor="clamp",
    return_weights=False,
):
    """Energy-gated self-attention of one head over the tokens x (..., n, c), with linear energies; returns (..., n, e).

    w_q, w_k: (..., d, c) and w_v: (..., e, c) the projections.  w_energy, b_energy: as in `linear_energy`.
    alpha, tau, mixing, znorm, std_floor: as in `energy_gate`.  scale: multiplies the logits, default 1/sqrt(d).
    causal: True (or "bottom-right", "top-left", the same here), or False.  return_weights: also return A (..., n, n).
    Raises ValueError where shapes do not match or an option is unknown, naming the argument.

    >>> one, zero = [[1.0]], [[0.0]]
    >>> energy_gated_attention([[1.0], [3.0]], zero, zero, one, one, [0.0], [np.log(3.0)], [0.0], [0.0])   # gates 1/4 and 3/4
    array([[1. ],
           [2.5]])
    """
    gate = energy_gate(linear_energy(x, w_energy, b_energy), alpha, tau, mixing, znorm=znorm, std_floor=std_floor)
    return gated_by_energy(x, w_q, w_k, w_v, gate, scale, causal, return_weights)


@formula(
    shapes={**HEAD, "filters": "... s p c l", "biases": "... s p", **GATE, "out": "... n e"},
    equation="out = A v,  A_ij = P_ij g_j / sum_l P_il g_l,  g = gate of the energies of causal filters",
    latex=r"A_{ij}=\frac{P_{ij}g_j}{\sum_l P_{il}g_l},\quad e_{sj}=\sum_p\big((F_{sp}*x)_j+b_{sp}\big)^2",
    **ATTENTION,
)
def convolution_energy_gated_attention(
    x, w_q, w_k, w_v, filters, biases, alpha, tau, mixing, *, scale=None, causal=True, znorm="sequence", std_floor="clamp",
    return_weights=False,
):
    """EGA-C: `energy_gated_attention` with the energies of `convolution_energy`, by filters (..., s, p, c, l) and biases (..., s, p).

    The other parameters are those of `energy_gated_attention`.
    Raises ValueError where shapes do not match or an option is unknown, naming the argument.

    >>> one, zero = [[1.0]], [[0.0]]
    >>> convolution_energy_gated_attention([[1.0], [2.0]], zero, zero, one, [[[[1.0]]]], [[0.0]], [np.log(3.0)], [0.0], [0.0])
    array([[1.  ],
           [1.75]])
    """
    gate = energy_gate(convolution_energy(x, filters, biases), alpha, tau, mixing, znorm=znorm, std_floor=std_floor)
    return gated_by_energy(x, w_q, w_k, w_v, gate, scale, causal, return_weights)


@formula(
    shapes={**HEAD, "omega": "... s", "sigma": "... s", **GATE, "out": "... n e"},
    equation="out = A v,  A_ij = P_ij g_j / sum_l P_il g_l,  g = gate of the energies of Morlet wavelets",
    latex=r"A_{ij}=\frac{P_{ij}g_j}{\sum_l P_{il}g_l},\quad e_{sj}=\Big|\sum_t e^{\mathrm i\omega_s t-t^2/(2\sigma_s^2+\epsilon)}\,"
          r"\bar x_{j-l_s+1+t}\Big|^2",
    draw=lambda sizes, rng: draw_morlet((*HEAD, *GATE), sizes, rng),
    **{**ATTENTION, "kinks": f"{ATTENTION['kinks']}; {MORLET_KINKS}"},
)
def morlet_energy_gated_attention(
    x, w_q, w_k, w_v, omega, sigma, alpha, tau, mixing, *, lengths=None, eps=1e-8, scale=None, causal=True, znorm="sequence",
    std_floor="clamp", return_weights=False,
):
    """EGA-M: `energy_gated_attention` with the energies of `morlet_energy`, of frequencies omega and widths sigma (..., s).

    lengths, eps: as in `morlet_energy`. The other parameters are those of `energy_gated_attention`.
    Raises ValueError where shapes do not match or an option is unknown, naming the argument.

    >>> one, zero = [[1.0]], [[0.0]]
    >>> morlet_energy_gated_attention([[1.0], [2.0]], zero, zero, one, [1.0], [5.0], [np.log(3.0)], [0.0], [0.0], lengths=(1,))
    array([[1.  ],
           [1.75]])
    """
    energy = morlet_energy(x, omega, sigma, lengths=lengths, eps=eps)
    gate = energy_gate(energy, alpha, tau, mixing, znorm=znorm, std_floor=std_floor)
    return gated_by_energy(x, w_q, w_k, w_v, gate, scale, causal, return_weights)


def draw_morlet(normal, sizes, rng):
    """Standard normal arrays, with frequencies and widths on both sides of their limits."""
    shapes = {**HEAD, **GATE}
    lead = tuple(sizes[axis] for axis in ("b", "h") if axis in sizes)
    arrays = {name: rng.standard_normal(lead + tuple(sizes[dim] for dim in shapes[name].split()[1:])) for name in normal}
    return {**arrays, "omega": rng.uniform(0.2, 3.5, (*lead, sizes["s"])), "sigma": rng.uniform(0.5, 12.0, (*lead, sizes["s"]))}
