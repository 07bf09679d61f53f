"""Flow attention: linear attention as a flow network in which sources compete and sinks are allocated what they receive.

    q <- phi(q),  k <- phi(k)                                          phi > 0, by default the logistic sigmoid of every entry
    I_i  = 1 / <q_i + eps, sum_j k_j + eps>                            one over the flow into sink i
    O_j  = 1 / <k_j + eps, sum_i q_i + eps>                            one over the flow out of source j
    I^_i = <q_i + eps, sum_j O_j k_j + eps>                            flow into sink i where every source gives 1
    O^_j = <k_j + eps, sum_i I_i q_i + eps>                            flow out of source j where every sink takes 1
    o_i  = sigma(I^_i n/m) sum_j I_i <q_i, k_j> C_j v_j                allocation times aggregation
    C_j  = m exp(clip(O^_j)) / sum_l exp(clip(O^_l))                   competition

where q (..., n, d), k (..., m, d), v (..., m, e), o (..., n, e); sinks are the queries, sources the keys; clip(x) bounds x to
[-clip, clip]; no scale. The sum over j is q_i I_i times the (d, e) matrix sum_j k_j^T C_j v_j: the cost is linear in n and m.

Causal, where n = m and t = i + 1 counts the sources up to i; all sums run over the prefix:

    I_i  = t / <q_i + eps, sum_{j<=i} k_j + eps>                       O_i  = t / <k_i + eps, sum_{j<=i} q_j + eps>
    I^_i = <q_i + eps, sum_{j<=i} O_j k_j + eps> / t                   O^_i = <k_i + eps, sum_{j<=i} I_j q_j + eps> / t
    C_i  = t exp(clip(O^_i)) / sum_{l<=i} exp(clip(O^_l))
    o_i  = sigma(I^_i) sum_{j<=i} (I_i / t) <q_i, k_j> C_j v_j

Source: Wu et al., "Flowformer: Linearizing Transformers with Conservation Flows", arXiv:2202.06258, section 3.2, and the authors' code
(Flow_Attention.py for both forms; the folders of the experiments for the variants).

Conventions. The clipping is the code's, "for stability": 1 in the core code, 5 in the vision and the causal language code, 10 in the
causal reinforcement-learning code, none in the time-series and the Long Range Arena code. It does more than that: O^ has the mean n/m, so
for n = m a clip of 1 binds for about half of the sources, which then all compete alike, and for n > m for nearly all of them.
The vision code adds 1e-6 once more to each of the four flows (flow_eps); this is after that code, but no golden vector of it is among
those that this package is checked against. The Long Range Arena code has phi(x) = relu(x) + 1e-6 and takes the softmax of the
competition over the heads, not the sources (feature="relu", competition="heads", clip=None together reproduce it).
There are no masks; causal C_j is normalised over the prefix of source j, so the last row is not the row of the bidirectional form.
Heads that compete are those of q, k and v broadcast together. A flow below 1e-300 counts as none, so that features that underflow give
zeros and no infinities where eps = 0. No keys: zeros. The derivative does not exist where O^ = clip, nor with relu where an entry is 0.

Identities (with eps = 0 where flows are meant). sum_i I^_i = m: every source gives 1. sum_j O^_j = n: every sink takes 1. sum_j C_j = m.
o is linear in v. Permuting keys and values together changes nothing. One query and one key: o = sigma(1) v. The causal form never looks
ahead: its first rows are those of the shorter sequence.

Wrong versions met elsewhere: the softmax of the competition over the head axis (the authors' Long Range Arena code); I^ without n/m,
which only shows where n != m; the competition without its factor m; conservation left out, sigma(1/I) in place of sigma(I^); the causal
form made by masking the bidirectional one, which looks ahead through sum_i q_i.
"""

import numpy as np

from attnspec.reference.activations import sigmoid
from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, number, one_of, visible_keys
from attnspec.reference.softmax.weights import softmax_weights, weighted_values

FEATURES = ("sigmoid", "relu")
COMPETITIONS = ("sources", "heads")


def features(x, feature):
    """phi(x): positive features, entry by entry."""
    one_of("feature", feature, FEATURES)
    return sigmoid(x) if feature == "sigmoid" else np.where(x.real < 0, 0.0, x) + 1e-6


def flow(x, total, eps):
    """<x_i + eps, total + eps>: what flows between each node and all those on the other side, `total` being their sum."""
    return np.sum((x + eps) * (total + eps), axis=-1)


def per(x):
    """1 / x, and 0 where nothing flows: there are no sources or no sinks, or their features have underflowed."""
    nothing = x.real < 1e-300
    return np.where(nothing, 0.0, 1 / np.where(nothing, 1.0, x))


def clipped(x, clip):
    """x bounded to [-clip, clip]; None leaves it as it is."""
    if clip is None:
        return x
    clip = number("clip", clip, above=0)
    return np.where(x.real > clip.real, clip, np.where(x.real < -clip.real, -clip, x))


def share(x, axis):
    """Softmax of x along `axis`."""
    e = np.exp(x - np.max(x.real, axis=axis, keepdims=True, initial=-np.inf))
    return e / np.sum(e, axis=axis, keepdims=True)


@formula(
    family="transport",
    shapes={"q": "... n d", "k": "... m d", "v": "... m e", "out": "... n e"},
    equation="out_i = sigma(I^_i n/m) I_i q_i sum_j k_j^T C_j v_j,  C = m softmax(clip(O^)),  q and k standing for phi(q), phi(k)",
    latex=r"o_i=\sigma\!\left(\tfrac{n}{m}\hat I_i\right)\frac{q_i}{\langle q_i,\sum_j k_j\rangle}\sum_j k_j^\top\,m\,"
          r"\mathrm{softmax}(\hat O)_j\,v_j,\quad\hat I_i=\Big\langle q_i,\sum_j\tfrac{k_j}{\langle k_j,\sum_l q_l\rangle}\Big\rangle,\quad"
          r"\hat O_j=\Big\langle k_j,\sum_i\tfrac{q_i}{\langle q_i,\sum_l k_l\rangle}\Big\rangle",
    source="arXiv:2202.06258, section 3.2, and thuml/Flowformer, Flow_Attention.py",
    bound="flow",
    kinks="O^_j = clip; entries of q and k that are 0, with feature='relu'",
    workspace="... d e",
)
def flow_attention(q, k, v, *, eps=1e-6, flow_eps=0.0, clip=1.0, feature="sigmoid", competition="sources", return_weights=False):
    """Flow attention of q (..., n, d) over k (..., m, d), v (..., m, e); returns (..., n, e).

    eps: added to both factors of every flow.  flow_eps: added to the flows themselves, 0 except in the vision code (1e-6).
    clip: bounds the conserved outgoing flow; 1 in the core code, None (or inf) for no bound.
    feature: "sigmoid", or "relu" for relu(x) + 1e-6.  competition: "sources", or "heads" for the softmax over the head axis of
    (..., h, m), as in the Long Range Arena code.
    return_weights: return an AttentionResult whose weights A (..., n, m) give the output A v.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> flow_attention([[0.0]], [[5.0]], [[1.0]], eps=0.0).round(6)   # one query, one key: sigma(1) of the value
    array([[0.731059]])
    """
    eps, flow_eps = number("eps", eps, least=0), number("flow_eps", flow_eps, least=0)
    n, m = q.shape[-2], k.shape[-2]
    q, k = features(q, feature), features(k, feature)
    I = per(flow(q, np.sum(k, axis=-2, keepdims=True), eps) + flow_eps)
    O = per(flow(k, np.sum(q, axis=-2, keepdims=True), eps) + flow_eps)
    I_hat = flow(q, np.sum(k * O[..., None], axis=-2, keepdims=True), eps) + flow_eps
    O_hat = clipped(flow(k, np.sum(q * I[..., None], axis=-2, keepdims=True), eps) + flow_eps, clip)
    if one_of("competition", competition, COMPETITIONS) == "heads":
        O_hat = np.broadcast_to(O_hat, (*np.broadcast_shapes(O_hat.shape[:-1], v.shape[:-2]), m))      # heads of the values compete too
        if O_hat.ndim < 2:
            raise ValueError(f"competition: 'heads' expects a head axis, q (..., h, n, d), k (..., h, m, d), got {q.shape} and {k.shape}")
    C = m * share(O_hat, axis=-1 if competition == "sources" else -2)
    allocation = sigmoid(I_hat * (n / max(m, 1)))
    out = allocation[..., None] * ((q * I[..., None]) @ (np.swapaxes(k, -1, -2) @ (v * C[..., None])))
    if not return_weights:
        return out
    return AttentionResult(out, (allocation * I)[..., None] * (q @ np.swapaxes(k, -1, -2)) * C[..., None, :])


@formula(
    family="transport",
    shapes={"q": "... n d", "k": "... n d", "v": "... n e", "out": "... n e"},
    equation="out_i = sigma(I^_i) (I_i / t) q_i sum_{j<=i} k_j^T C_j v_j,  t = i + 1,  all flows over the prefix",
    latex=r"o_i=\sigma(\hat I_i)\frac{q_i}{\langle q_i,\sum_{j\le i}k_j\rangle}\sum_{j\le i}k_j^\top C_j v_j,\quad"
          r"C_j=\frac{j\,e^{\hat O_j}}{\sum_{l\le j}e^{\hat O_l}}",
    source="arXiv:2202.06258, section 3.2, and thuml/Flowformer, Flow_Attention.py (Flow_Attention_Causal)",
    bound="flow",
    kinks="O^_i = clip",
    workspace="... n n",
)
def flow_attention_causal(q, k, v, *, eps=1e-6, clip=1.0, return_weights=False):
    """Causal flow attention of q (..., n, d) over k (..., n, d), v (..., n, e), as many keys as queries; returns (..., n, e).

    eps: added to both factors of every flow.  clip: bounds the conserved outgoing flow; 1 in the core code, 5 in the language and 10 in
    the reinforcement-learning code, None (or inf) for no bound.
    return_weights: return an AttentionResult whose weights A (..., n, n) give the output A v.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> flow_attention_causal([[0.0], [0.0]], [[0.0], [0.0]], [[1.0], [3.0]], eps=0.0).round(6)    # sigma(1) times the running mean
    array([[0.731059],
           [1.462117]])
    """
    eps = number("eps", eps, least=0)
    n = q.shape[-2]
    t = np.arange(1, n + 1)
    prefix = visible_keys(n, n, causal=True)
    q, k = sigmoid(q), sigmoid(k)
    I = t * per(flow(q, np.cumsum(k, axis=-2), eps))
    O = t * per(flow(k, np.cumsum(q, axis=-2), eps))
    I_hat = flow(q, np.cumsum(k * O[..., None], axis=-2), eps) / t
    O_hat = clipped(flow(k, np.cumsum(q * I[..., None], axis=-2), eps) / t, clip)
    P, _ = softmax_weights(O_hat[..., None, :], prefix)                # row i: how the sources up to i compete
    C = t * np.diagonal(P, axis1=-2, axis2=-1)
    A = np.where(prefix, (sigmoid(I_hat) * I / t)[..., None] * (q @ np.swapaxes(k, -1, -2)) * C[..., None, :], 0.0)
    out = weighted_values(A, v, prefix)
    return AttentionResult(out, A) if return_weights else out
