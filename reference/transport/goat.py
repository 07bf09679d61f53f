"""GOAT: softmax attention with a trainable prior, written as one dot product of queries and keys that carry their position.

    p_i  = argmin over the simplex of -<p, s_i> + tau KL(p || pi_i)  =  softmax_j(s_ij / tau + log pi_ij)

    s_ij = <q_i, k_j> / sqrt(D_c)                                      over the first D_c = D - 2R - 1 coordinates of the head
    K_ij = sum_r a_r cos(w_r (i - j)) + b_r sin(w_r (i - j)) + u_j     log pi_ij, up to a constant of the row
    l_ij = s_ij + g_i K_ij,   P = softmax_j(l_ij),   o_i = sum_j P_ij v_j
    w_r  = base^(-r / (R - 1)),  r = 0 .. R - 1                        from 1 down to 1/base; w_0 = 1 where R = 1
    u_j  = c (gain (w2 . SiLU(W1 f_j + b1) + b2) + bump [j = 0] + softplus(rho) j)          rho j only under a causal mask
    f_j  = (cos(w'_r j))_r<M, (sin(w'_r j))_r<M, j / N, log(1 + j) / log(1 + N)             N = training length, or m - 1
    g_i  = sigma(gate_bias - softplus(gate_scale) |q_i|)               1 where there is no gate; |q_i| over D_c coordinates

The same logits as one dot product, which is what a fused attention kernel gets to see:

    q~_i = [ q_i / sqrt(D_c),  g_i (a cos(w i) + b sin(w i)),  g_i (a sin(w i) - b cos(w i)),  g_i ]
    k~_j = [ k_j,              cos(w j),                       sin(w j),                       u_j ]          <q~_i, k~_j> = l_ij

where q (..., h, n, d), k (..., hk, m, d), v (..., hk, m, e), a, b (hk, R), u (hk, m), K (hk, n, m), o (..., h, n, e), D = d;
W1 (s, 2M + 2), b1 and w2 (s,), b2 a number; gain, bump, rho (hk,); gate_scale and gate_bias (h,).

Source: Litman and Guo, "You Need Better Attention Priors", arXiv:2601.15380, sections 3 and 4, and the authors' package goat-attention
0.1.1, from which every formula but the first is taken; the text of the paper is known here at second hand, without equation numbers.

Conventions. tau = 1 (prior.py has others). Only the first D_c coordinates of each projected query and key count, and the scale is
1/sqrt(D_c); the others are given up for the 2R + 1 positional ones (2R where there is no u). Values keep all of theirs.
Query head h has the prior of its key head. Positions count from 0; [j = 0] and softplus(rho) j are about absolute positions.
slope * j is ALiBi: under a causal mask it differs from -slope * (i - j) by a constant of the row, which no softmax sees.
Where no training length is given, N depends on the number of keys: a step of decoding then is the last row of the full result, but not of
results for longer sequences. c is the package's schedulable goat_prior_scale; it multiplies u, not the relative part.
A grid (H, W), with `cls` for a class token in front, gives each position j the row y and column x of its patch: y has the first
R - R//2 frequencies, x the others (and M alike). The class token has no coordinates: its features are zero, and so is its relative
prior with everything; in N and [j = 0] positions are counted along the sequence, class token included.
Under a causal mask a query sees the keys whose positions are not beyond its own, positions that the offsets give: keys begin at
key_offset, queries at query_offset, and where that is not given, at key_offset + m - n for "bottom-right" (or True) and at key_offset
for "top-left". So the two differ only where there is no query_offset. Offsets may be negative, but not on a grid, nor those of keys
whose u_j is to be computed.
mask True = may attend, the opposite of the package's. A query that sees no key gets zeros from every head. A u_j of -inf hides the key,
however far the gate is closed.
The grid is after the package's code like the rest, but no golden vector of it is among those that this package is checked against.
Not covered: the package's additive masks, its limits (1e6 on a and b, 80 on additive masks), its float32 positions, offsets of
grids, the appended tokens of add_bias_kv and add_zero_attn, its initialisations (a seeded one with the slopes of ALiBi, a uniform one)
and the factories for_gpt, for_vit and for_bert, which choose R, M and an initialisation.

Identities. K shifted by a constant of the row changes nothing. a = b = 0 without u is scaled dot-product attention on D_c coordinates.
R = 0 with a zero network is ALiBi. The relative part depends on i - j alone. <q~, k~> = l. prior_scale = 0 removes u.

Wrong versions met elsewhere: scale 1/sqrt(D); the positional coordinates scaled along with the content; sin(w (j - i)) for sin(w (i - j));
frequencies base^(-r/R), which never reach 1/base; the slope of recency added without a causal mask; positions that start
anew with every chunk of a cache.
"""

from typing import NamedTuple

import numpy as np

from attnspec.reference.activations import sigmoid, silu
from attnspec.reference.formula import formula
from attnspec.reference.inputs import CAUSAL, MOST, AttentionResult, number, one_of, whole
from attnspec.reference.numerics import norm
from attnspec.reference.transport.prior import prior_attention

SOURCE = "arXiv:2601.15380, section 4, and the package goat-attention 0.1.1"
LOGITS = r"l_{ij}=\frac{\langle q_i,k_j\rangle}{\sqrt{D_c}}+g_i\Big(\sum_r a_r\cos\omega_r(i-j)+b_r\sin\omega_r(i-j)+u_j\Big)"
FRONT = {"q": "... h n d", "k": "... hk m d"}
PRIOR = {"a": "hk r", "b": "hk r", "u": "hk m"}
GATE = {"gate_scale": "h", "gate_bias": "h"}
NETWORK = {"w1": "s f", "b1": "s", "w2": "s", "b2": "", "gain": "hk", "bump": "hk", "recency": "hk"}


def softplus(x):
    """log(1 + exp(x)), without overflow."""
    return np.where(x.real > 0, x, 0.0) + np.log1p(np.exp(np.where(x.real > 0, -x, x)))


# --- positions -----------------------------------------------------------------------------------------------------------------------


def frequencies(count, base):
    """w_r = base^(-r / (count - 1)), r = 0 .. count - 1: from 1 down to 1/base."""
    return base ** (-np.arange(count) / max(count - 1, 1))


def phases(positions, w, grid, cls):
    """Phases w_r j (n, R) of the positions j (n,), and which of them have coordinates: on a grid the class token has none.

    Raises ValueError where the grid is no pair of sizes, or a position lies outside of it.
    """
    if grid is None:
        if cls:
            raise ValueError("cls: expected a grid with the class token, got grid=None")
        return positions[:, None] * w, np.ones((len(positions), 1), bool)
    try:
        H, W = grid
    except (TypeError, ValueError):
        raise ValueError(f"grid: expected a pair (height, width), got {grid!r}") from None
    H, W = whole("grid", H, least=1), whole("grid", W, least=1)
    patch = positions - cls
    if np.any((positions < 0) | (patch >= H * W)):
        raise ValueError(f"grid: expected positions 0..{H * W + cls - 1} on {H} x {W} patches, got {positions.min()}..{positions.max()}")
    y, x = np.divmod(patch, W)
    rows = len(w) - len(w) // 2
    phase = np.concatenate([y[:, None] * w[:rows], x[:, None] * w[rows:]], axis=-1)
    return phase, (patch >= 0)[:, None]


def sequence_positions(n, m, causal, query_offset, key_offset):
    """Positions (n,) of the queries and (m,) of the keys."""
    one_of("causal", causal, CAUSAL)
    key_offset = whole("key_offset", key_offset, least=-MOST)
    if query_offset is None:
        query_offset = key_offset + (m - n if causal in (True, "bottom-right") else 0)
    else:
        query_offset = whole("query_offset", query_offset, least=-MOST)
    return query_offset + np.arange(n), key_offset + np.arange(m)


def at_positions(i, j, mask, causal):
    """The mask, and under a causal one only keys at positions j (m,) that are not beyond those of the queries i (n,)."""
    visible = (j <= i[:, None]) | (causal is False)
    return visible if mask is None else visible & mask


# --- the prior -----------------------------------------------------------------------------------------------------------------------


def draw_network(sizes, rng):
    """Arrays of the key prior: 2M + 2 features, at least two."""
    full = {**sizes, "f": 2 * max(1, sizes["f"] // 2)}
    shapes = {name: tuple(full[dim] for dim in shape.split()) for name, shape in NETWORK.items()}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


@formula(
    family="transport",
    shapes={"key_positions": "int m", **NETWORK, "u": "hk m"},
    equation="u_j = c (gain (w2 SiLU(W1 f_j + b1) + b2) + bump [j = 0] + softplus(rho) j),  "
             "f_j = (cos(w j), sin(w j), j/N, log1p(j)/log1p(N))",
    latex=r"u_j=c\left(\mathrm{gain}\,(w_2^\top\mathrm{SiLU}(W_1f_j+b_1)+b_2)+\mathrm{bump}\,[j=0]+\mathrm{softplus}(\rho)\,j\right)",
    source=SOURCE,
    sizes={"hk": 4, "s": 4, "f": 8},
    workspace="m f",
    draw=lambda sizes, rng: {"key_positions": np.arange(sizes["m"]), **draw_network(sizes, rng)},
)
def goat_key_prior(
    key_positions, w1, b1, w2, b2, gain, bump, recency=None, *,
    prior_scale=1.0, absolute_base=1e4, training_length=None, grid=None, cls=False,
):
    """The part u (hk, m) of GOAT's log prior that depends on the key alone, the "sink", for keys at key_positions (m,).

    w1 (s, 2M + 2), b1 (s,), w2 (s,), b2 (): the network that all heads share.  gain, bump (hk,): per head, what multiplies its output,
    and what the key at position 0 has in addition.  recency (hk,): rho, of the slope softplus(rho) along the keys, which belongs under
    a causal mask; None for none.  prior_scale: c, multiplies all of it.  absolute_base: 1/base is the lowest of the M frequencies.
    training_length: N; None for m - 1, at least 1.  grid: (height, width) of the patches that positions count row by row.
    cls: position 0 is a class token, the patches follow.
    Raises ValueError where shapes do not match, a position is negative or outside of the grid, or an option is out of range, naming
    the argument.

    >>> network = np.zeros((1, 2)), np.zeros(1), np.zeros(1), 0.5
    >>> goat_key_prior([0, 1, 2], *network, gain=[2.0], bump=[3.0])
    array([[4., 1., 1.]])
    """
    if np.any(key_positions < 0):
        raise ValueError(f"key_positions: expected whole numbers >= 0, got {key_positions.min()}")
    F = w1.shape[-1]
    if F < 2 or F % 2:
        raise ValueError(f"w1: expected shape (s, 2 M + 2), got {w1.shape}")
    c = number("prior_scale", prior_scale)
    base = number("absolute_base", absolute_base, above=0)
    j = key_positions
    N = max(len(j) - 1, 1) if training_length is None else whole("training_length", training_length, least=1)
    phase, placed = phases(j, frequencies(F // 2 - 1, base), grid, cls)
    extra = np.stack([j / N, np.log1p(j) / np.log1p(N)], axis=-1)
    f = np.concatenate([placed * np.cos(phase), placed * np.sin(phase), extra], axis=-1)
    u = gain[:, None] * (silu(f @ w1.T + b1) @ w2 + b2) + bump[:, None] * (j == 0)
    if recency is not None:
        u = u + softplus(recency)[:, None] * j
    return c * u


@formula(
    family="transport",
    shapes={"query_positions": "int n", "key_positions": "int m", **PRIOR, "K": "hk n m"},
    equation="K_ij = sum_r a_r cos(w_r (i - j)) + b_r sin(w_r (i - j)) + u_j",
    latex=r"K_{ij}=\sum_r a_r\cos\omega_r(i-j)+b_r\sin\omega_r(i-j)+u_j,\quad\omega_r=\mathrm{base}^{-r/(R-1)}",
    source=SOURCE,
    sizes={"hk": 4, "r": 2},
    workspace="n m r",
    draw=lambda sizes, rng: {
        "query_positions": np.arange(sizes["n"]), "key_positions": np.arange(sizes["m"]),
        "a": rng.standard_normal((sizes["hk"], sizes["r"])), "b": rng.standard_normal((sizes["hk"], sizes["r"])),
        "u": rng.standard_normal((sizes["hk"], sizes["m"])),
    },
)
def goat_log_prior(query_positions, key_positions, a, b, u=None, *, position_base=1e4, grid=None, cls=False):
    """GOAT's log prior K (hk, n, m) of queries at query_positions (n,) for keys at key_positions (m,).

    a, b (hk, R): weights of the even and odd waves of i - j; R = 0 leaves u alone.  u (hk, m): the keys' own prior, as `goat_key_prior`
    gives it; None leaves the relative part alone.  position_base: 1/base is the lowest of the R frequencies.
    grid: (height, width) of the patches that positions count row by row.  cls: position 0 is a class token, the patches follow.
    Raises ValueError where shapes do not match, a position lies outside of the grid, or an option is out of range, naming the argument.

    >>> goat_log_prior([0, 1], [0, 1], a=[[1.0]], b=[[0.0]]).round(3)
    array([[[1.  , 0.54],
            [0.54, 1.  ]]])
    """
    w = frequencies(a.shape[-1], number("position_base", position_base, above=0))
    phase_i, placed_i = phases(query_positions, w, grid, cls)
    phase_j, placed_j = phases(key_positions, w, grid, cls)
    lag = phase_i[:, None, :] - phase_j[None, :, :]
    K = np.cos(lag) @ a[:, None, :, None] + np.sin(lag) @ b[:, None, :, None]
    K = np.where(placed_i & placed_j.T, K[..., 0], 0.0)
    return K if u is None else K + u[:, None, :]


# --- attention of heads --------------------------------------------------------------------------------------------------------------


def content_width(d, a, u):
    """D_c, what the positional coordinates leave of a head of width d."""
    taken = 2 * a.shape[-1] + (u is not None)
    if taken >= d:
        raise ValueError(f"a: expected fewer than {d} positional coordinates in heads of width {d}, got {taken} for {a.shape}")
    return d - taken


def prior_gate(q_content, gate_scale, gate_bias):
    """g (..., h, n), how far a query trusts the prior; 1 where there is no gate."""
    if (gate_scale is None) != (gate_bias is None):
        raise ValueError("gate_scale: expected together with gate_bias, got one of the two")
    if gate_scale is None:
        return np.ones(q_content.shape[:-1])
    size = norm(q_content)[..., 0]
    return sigmoid(gate_bias[:, None] - softplus(gate_scale)[:, None] * size)


def per_query_head(x, q, k):
    """x (hk, ...) with one entry per query head."""
    return np.repeat(x, q.shape[-3] // max(k.shape[-3], 1), axis=0)


def fitting(sizes):
    """Sizes at which the positional coordinates leave some content in a head of width d, and whether that holds with u too."""
    r = min(sizes["r"], max(0, (sizes["d"] - 2) // 2))
    return {**sizes, "r": r}, sizes["d"] > 2 * r + 1


def draw_heads(sizes, rng, names=("q", "k", "v", "a", "b", "u")):
    """Standard normal heads and prior; as many frequencies, and u, as the width of the heads has room for."""
    sizes, room = fitting(sizes)
    shapes = {**FRONT, "v": "... hk m e", **PRIOR}
    lead = (sizes["b"],) if "b" in sizes else ()
    arrays = {}
    for name in names:
        dims = shapes[name].split()
        arrays[name] = rng.standard_normal(lead * (dims[0] == "...") + tuple(sizes[dim] for dim in dims if dim != "..."))
    if not room:
        del arrays["u"]
    return arrays


class AugmentedHeads(NamedTuple):
    """Queries and keys whose plain dot products are the logits of GOAT attention."""

    q_augmented: np.ndarray
    k_augmented: np.ndarray


@formula(
    family="transport",
    shapes={**FRONT, **PRIOR, **GATE, "q_augmented": "... h n d", "k_augmented": "... hk m d"},
    equation="q~ = [q/sqrt(D_c), g (a cos(w i) + b sin(w i)), g (a sin(w i) - b cos(w i)), g],  k~ = [k, cos(w j), sin(w j), u_j]",
    latex=r"\tilde q_i=\left[\tfrac{q_i}{\sqrt{D_c}},\;g_i(a\cos\omega i+b\sin\omega i),\;g_i(a\sin\omega i-b\cos\omega i),\;g_i\right],"
          r"\quad\tilde k_j=\left[k_j,\;\cos\omega j,\;\sin\omega j,\;u_j\right]",
    source=SOURCE,
    bound="goat features",
    kinks="q = 0 over its D_c coordinates, with a gate",
    sizes={"hk": "h", "r": 2},
    draw=lambda sizes, rng: draw_heads(sizes, rng, ("q", "k", "a", "b", "u")),
)
def goat_augmented_qk(
    q, k, a, b, u=None, *, gate_scale=None, gate_bias=None, causal=False, query_offset=None, key_offset=0, position_base=1e4, grid=None,
    cls=False, enable_gqa=False,
):
    """Queries (..., h, n, d) and keys (..., hk, m, d) whose plain dot product, without any scale, is GOAT's logit s + g K.

    Returns AugmentedHeads(q, k) of the same shapes as q (..., h, n, d) and k (..., hk, m, d); a kernel that scales by 1/sqrt(d) itself
    wants the queries times sqrt(d).
    a, b, u, gate_scale, gate_bias, query_offset, key_offset, position_base, grid, cls, enable_gqa: as in `goat_head_attention`.
    causal: only says where the queries stand if there is no query_offset; the mask is the caller's.
    u must be finite where a gate may close.
    Raises ValueError where shapes do not match, the positional coordinates leave no room, or an option is out of range, naming the
    argument.

    >>> q, k = goat_augmented_qk([[[3.0, 7.0]]], [[[2.0, 7.0]]], np.ones((1, 0)), np.ones((1, 0)), u=[[0.5]])
    >>> q, k
    (array([[[3., 1.]]]), array([[[2. , 0.5]]]))
    """
    i, j = sequence_positions(q.shape[-2], k.shape[-2], causal, query_offset, key_offset)
    w = frequencies(a.shape[-1], number("position_base", position_base, above=0))
    phase_i, placed_i = phases(i, w, grid, cls)
    phase_j, placed_j = phases(j, w, grid, cls)
    cos_i, sin_i = placed_i * np.cos(phase_i), placed_i * np.sin(phase_i)
    cos_j, sin_j = placed_j * np.cos(phase_j), placed_j * np.sin(phase_j)
    A, B = (per_query_head(x, q, k)[:, None, :] for x in (a, b))
    D_c = content_width(q.shape[-1], a, u)
    q, k = q[..., :D_c], k[..., :D_c]
    g = prior_gate(q, gate_scale, gate_bias)[..., None]

    heads = [q / np.sqrt(D_c), g * (A * cos_i + B * sin_i), g * (A * sin_i - B * cos_i)]
    keys = [k] + [np.broadcast_to(x, k.shape[:-1] + x.shape[-1:]) for x in (cos_j, sin_j)]
    if u is not None:
        heads.append(g)
        keys.append(np.broadcast_to(u[..., None], k.shape[:-1] + (1,)))
    return AugmentedHeads(np.concatenate(heads, axis=-1), np.concatenate(keys, axis=-1))


@formula(
    family="transport",
    shapes={**FRONT, "v": "... hk m e", **PRIOR, **GATE, "mask": "bool ... #h #n #m", "out": "... h n e"},
    equation="out = softmax_j(<q_i, k_j>/sqrt(D_c) + g_i K_ij) v,  K_ij = sum_r a_r cos(w_r (i-j)) + b_r sin(w_r (i-j)) + u_j",
    latex=r"o_i=\sum_j\frac{e^{l_{ij}}}{\sum_l e^{l_{il}}}v_j,\quad " + LOGITS,
    source=SOURCE,
    bound="goat heads",
    kinks="q = 0 over its D_c coordinates, with a gate",
    sizes={"hk": "h", "r": 2},
    workspace="... h n m",
    draw=draw_heads,
)
def goat_head_attention(
    q, k, v, a, b, u=None, *, gate_scale=None, gate_bias=None, mask=None, causal=False, query_offset=None, key_offset=0,
    position_base=1e4, grid=None, cls=False, enable_gqa=False, return_weights=False,
):
    """GOAT attention of projected heads q (..., h, n, d) over k (..., hk, m, d), v (..., hk, m, e); returns (..., h, n, e).

    Only the first D_c = d - 2R - 1 coordinates of q and k count (d - 2R without u).
    a, b (hk, R): weights of the waves of i - j, R = 0 for none.  u (hk, m): the keys' own log prior, as `goat_key_prior` gives it; None
    for none.  gate_scale, gate_bias (h,): both or none; with them each query weighs the prior by its own size.
    mask: bool, broadcastable to (..., h, n, m), True = may attend.  causal: False, "bottom-right" (or True) or "top-left": a query sees
    the keys at its own position and before it.
    query_offset: position of the first query; None for key_offset + m - n where causal is bottom-right, else key_offset.
    key_offset: position of the first key.  position_base: 1/base is the lowest of the R frequencies.
    grid: (height, width) of the patches that positions count row by row.  cls: position 0 is a class token, the patches follow.
    enable_gqa: key heads may be fewer than query heads and are shared by neighbouring ones.  return_weights: return an AttentionResult
    with weights (..., h, n, m).
    Raises ValueError where shapes do not match, the positional coordinates leave no room, or an option is out of range, naming the
    argument.

    >>> none = np.ones((1, 0))
    >>> goat_head_attention([[[0.0, 0.0]]], np.ones((1, 2, 2)), [[[0.0], [4.0]]], none, none, u=np.log([[1.0, 3.0]])).round(12)
    array([[[3.]]])
    """
    i, j = sequence_positions(q.shape[-2], k.shape[-2], causal, query_offset, key_offset)
    K = per_query_head(goat_log_prior(i, j, a, b, u, position_base=position_base, grid=grid, cls=cls), q, k)
    D_c = content_width(q.shape[-1], a, u)
    q, k = q[..., :D_c], k[..., :D_c]
    g = prior_gate(q, gate_scale, gate_bias)[..., None]
    prior = np.where(K.real == -np.inf, -np.inf, g * np.where(K.real == -np.inf, 0.0, K))
    return prior_attention(q, k, v, prior, mask=at_positions(i, j, mask, causal), enable_gqa=enable_gqa, return_weights=return_weights)


# --- the whole layer -----------------------------------------------------------------------------------------------------------------

LAYER = {
    "q_input": "... n c", "k_input": "... m c", "v_input": "... m c", "w_q": "h d c", "b_q": "h d", "w_k": "hk d c", "b_k": "hk d",
    "w_v": "hk d c", "b_v": "hk d", "w_o": "c h d", "b_o": "c", "a": "hk r", "b": "hk r",
}


def draw_layer(sizes, rng):
    """Standard normal inputs and weights, those of the projections over the root of the width they sum over."""
    sizes, room = fitting(sizes)
    sizes = {**sizes, "hk": int(np.gcd(sizes["h"], sizes["hk"]))}
    lead = (sizes["b"],) if "b" in sizes else ()
    arrays = {}
    for name, shape in LAYER.items():
        dims = shape.split()
        arrays[name] = rng.standard_normal(lead * (dims[0] == "...") + tuple(sizes[dim] for dim in dims if dim != "..."))
    for name in ("w_q", "w_k", "w_v"):
        arrays[name] /= np.sqrt(sizes["c"])
    arrays["w_o"] /= np.sqrt(sizes["h"] * sizes["d"])
    return arrays | draw_network(sizes, rng) if room else arrays


def projected(x, w, b):
    """Heads (..., h, n, d) of x (..., n, c)."""
    return np.einsum("...nc,hdc->...hnd", x, w) + b[:, None, :]


@formula(
    family="transport",
    shapes={**LAYER, **NETWORK, **GATE, "mask": "bool ... #h #n #m", "key_mask": "bool ... #m", "out": "... n c"},
    equation="out = sum_h softmax_j(<q_i, k_j>/sqrt(D_c) + g_i K_ij) v W_o + b_o,  q = x W_q + b_q and so on, K as in goat_log_prior",
    latex=r"y_i=\sum_h W^O_h\sum_j\frac{e^{l_{ij}}}{\sum_l e^{l_{il}}}v_j+b^O,\quad " + LOGITS,
    source=SOURCE,
    bound="goat layer",
    kinks="q = 0 over its D_c coordinates, with a gate",
    sizes={"h": 4, "hk": "h", "c": 6, "r": 2, "s": 4, "f": 8},
    workspace="... h n m",
    draw=draw_layer,
)
def goat_attention(
    q_input, k_input, v_input, w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, a, b, w1=None, b1=None, w2=None, b2=None, gain=None, bump=None,
    recency=None, *, gate_scale=None, gate_bias=None, mask=None, key_mask=None, causal=False, query_offset=None, key_offset=0,
    prior_scale=1.0, position_base=1e4, absolute_base=1e4, training_length=None, grid=None, cls=False, return_weights=False,
):
    """A layer of GOAT attention, from inputs q_input (..., n, c), k_input and v_input (..., m, c) to outputs (..., n, c).

    w_q (h, d, c), b_q (h, d), w_k, w_v (hk, d, c), b_k, b_v (hk, d): projections, y = x w^T + b for each head; query heads h and key
    heads hk, which divide them.  w_o (c, h, d), b_o (c,): from the heads to the output.
    a, b (hk, R): weights of the waves of i - j, R = 0 for none.
    w1 (s, 2M + 2), b1 (s,), w2 (s,), b2 (), gain, bump (hk,): the keys' own prior, see `goat_key_prior`; all or none.
    recency (hk,): its slope along the keys, used where causal is set.
    gate_scale, gate_bias (h,): both or none; with them each query weighs the prior by its own size.
    mask: bool, broadcastable to (..., h, n, m), key_mask: bool (..., m), True = may attend.
    causal, query_offset, key_offset, position_base: as in `goat_head_attention`.
    prior_scale, absolute_base, training_length: as in `goat_key_prior`.  grid, cls: positions on a grid of patches, as in both.
    return_weights: return an AttentionResult with the weights (..., h, n, m) of every head.
    A query that sees no key gets b_o.
    Raises ValueError where shapes do not match, the positional coordinates leave no room, or an option is out of range, naming the
    argument.

    >>> one, zero, none = np.ones((1, 1, 1)), np.zeros((1, 1)), np.ones((1, 0))
    >>> goat_attention([[0.0]], [[1.0], [2.0]], [[1.0], [2.0]], one, zero, one, zero, one, zero, one, [0.25], none, none)
    array([[1.75]])
    """
    h, hk, n, m = len(w_q), len(w_k), q_input.shape[-2], k_input.shape[-2]
    if hk == 0 or h % hk:
        raise ValueError(f"w_k: expected a number of heads that divides the {h} of w_q, got {hk}")
    network = {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "gain": gain, "bump": bump}
    given = [name for name, array in network.items() if array is not None]
    if (given or recency is not None) and len(given) < len(network):
        missing = [name for name in network if name not in given]
        raise ValueError(f"{missing[0]}: expected all of {', '.join(network)} or none, got {', '.join(given) or 'recency'}")
    if key_mask is not None:
        keys = key_mask[..., None, None, :] if key_mask.ndim else key_mask
        mask = keys if mask is None else mask & keys
    if w1 is not None:
        whole("key_offset", key_offset)

    q, k, v = projected(q_input, w_q, b_q), projected(k_input, w_k, b_k), projected(v_input, w_v, b_v)
    _, j = sequence_positions(n, m, causal, query_offset, key_offset)
    u = None
    if w1 is not None:
        u = goat_key_prior(j, w1, b1, w2, b2, gain, bump, None if causal is False else recency, prior_scale=prior_scale,
                           absolute_base=absolute_base, training_length=training_length, grid=grid, cls=cls)
    heads = goat_head_attention(
        q, k, v, a, b, u, gate_scale=gate_scale, gate_bias=gate_bias, mask=mask, causal=causal, query_offset=query_offset,
        key_offset=key_offset, position_base=position_base, grid=grid, cls=cls, enable_gqa=True, return_weights=True)
    out = np.einsum("...hnd,chd->...nc", heads.out, w_o) + b_o
    return AttentionResult(out, heads.weights) if return_weights else out
