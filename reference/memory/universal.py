"""Universal Hopfield network: associative memories as similarity to the stored memories, separation of the similarities, projection.

    s_ij = β sim(m_j, q_i),     s <- s / sum_l s_il      where normalised
    w_ij = sep(s_ij),           w <- w / sum_l w_il      where normalised
    o_i  = sum_j w_ij p_j

where query q (..., n, d), memories m (..., m, d), projection p (..., m, e), by default the memories themselves, out o (..., n, e).

Similarities of a memory m and a query q:

    "dot"           <m, q>                          "cosine"            <m, q> / (|m| |q|)
    "euclidean"     1 / sum_c (q_c - m_c)^2         "manhattan"         1 / sum_c |q_c - m_c|
    "kl"            1 / KL(m', q')                  "reverse_kl"        1 / KL(q', m')           m' = m / sum_c m_c,  q' = q / sum_c q_c
    "js"            1 / (KL(m', u)/2 + KL(q', u)/2),  u = (m' + q')/2;    KL(x, y) = sum_c x_c log((x_c + ε)/(y_c + ε))
    "cosine_official"   <m, q> / (|M| |q|), |M| the Frobenius norm of all memories together
    "normdot_official"  <m', q'>, divided by its sum over the memories
    "js_official"       1 / (sim_kl/2 + sim_reverse_kl/2) of the reciprocals, large where the distributions are far apart

Separations: "softmax" of param s, "polynomial" s^param, "identity", "log", "max" (1 for the largest, else 0). The code's square, cube,
quartic, ten and sqrt are polynomials of param 2, 3, 4, 10 and 1/2.

Source: Millidge et al., "Universal Hopfield Networks: A General Framework for Single-Shot Associative Memory Models", arXiv:2202.04557;
the authors' code (BerenMillidge/Theory_Associative_Memory, functions.py).

Conventions. Defaults are those of attention, softmax of dot products without normalisation; the code normalises unless told otherwise.
β drops out where s is normalised. A row whose sum is 0 cannot be normalised and is left as it is. The names ending in "_official" are the
code's own versions where these are not what their names say. "cosine" and "js" are the textbook ones, "cosine" being 0 for a zero vector.
ε = 1e-4 stands in both logarithms, so that "KL" of such vectors need not be positive, and of close ones has either sign; "js" is never
negative. The divergences take non-negative vectors with a positive sum. A similarity that is a reciprocal is infinite where the query is a
memory, or the reciprocal beyond float64: such memories share all the weight, the limit, unless nothing is normalised and the separation is
a polynomial, the identity or the log, where out is infinite, and NaN where a value is 0. Ties of "max" go to the first. A query with a
similarity of NaN recalls NaN.

Divergences of close distributions. The logarithms of the equations above would cancel. With v = (x + y)/2 + ε, s = (x - y)/(2 v) and
a = atanh(s), so that (x + ε)/(y + ε) = (1 + s)/(1 - s) and its logarithm is 2a,

    KL(x, y)                   = sum_c 2 v (s a + (a - s)) - 2 ε a              from x log(..) - (x - y), since x and y have the same sum
    KL(x, u)/2 + KL(y, u)/2    = sum_c u/2 (log(1 - s^2) + 2 s a) + ε s a       with u = (x + y)/2; no term is negative

and a - s = s^3/3 + s^5/5 + ...; this is what is computed for every component where |s| < 1/2.

Identities. ("dot", "softmax") is attention with scale β param, the update of the continuous Hopfield network; ("dot", "identity"), P = M
and the sign of the result is one synchronous step of the classical network with W_ii kept; ("dot", "polynomial") belongs to dense
associative memory, Hamming distance with the intersection of circles to sparse distributed memory. "kl" with the roles of memories and
queries exchanged is "reverse_kl". Permuting memories and projection together changes nothing.

Wrong versions met elsewhere: the three "_official" similarities under the names cosine, normalised dot product and Jensen-Shannon;
softmax without an axis, which PyTorch resolves by the number of axes; the negative distance in one place and its reciprocal in another.
"""

import numpy as np

from attnspec.reference.formula import formula
from attnspec.reference.inputs import AttentionResult, number, one_of
from attnspec.reference.numerics import log1p, reciprocal, shares, unit
from attnspec.reference.softmax.weights import softmax_weights

SIMILARITIES = (
    "dot", "cosine", "euclidean", "manhattan", "kl", "reverse_kl", "js", "cosine_official", "normdot_official", "js_official",
)
DIVERGENCES = ("kl", "reverse_kl", "js", "js_official")
SEPARATIONS = ("softmax", "polynomial", "identity", "log", "max")


def distribution(name, x, similarity):
    """Rows divided by their sums."""
    if not np.all(np.isfinite(x) & (x.real >= 0)) or not np.all(np.any(x.real > 0, axis=-1)):
        raise ValueError(f"{name}: expected finite entries >= 0 with a positive sum for the similarity {similarity!r}")
    return shares(x)


def close_parts(x, y, eps):
    """Where |s| < 1/2, and v, s, a of this page; s = a = 0 elsewhere."""
    v = (x + y) / 2 + eps
    s = (x - y) / (2 * v)
    close = s.real**2 < 1 / 4
    s = np.where(close, s, 0.0)
    return close, v, s, np.arctanh(s)


def atanh_less(s, a):
    """a - s for a = atanh(s): a series for small s, where the difference cancels."""
    small = s.real**2 < 0.01
    series = np.where(small, s, 0.0) * sum(np.where(small, s * s, 0.0) ** k / (2 * k + 1) for k in range(1, 9))
    return np.where(small, series, a - s)


def kl(x, y, eps):
    """KL(x, y) of distributions along the last axis."""
    close, v, s, a = close_parts(x, y, eps)
    far = x * (np.log(x + eps) - np.log(y + eps)) - (x - y)
    return np.sum(np.where(close, 2 * v * (s * a + atanh_less(s, a)) - 2 * eps * a, far), axis=-1)


def js(x, y, eps):
    """KL(x, u)/2 + KL(y, u)/2, u = (x + y)/2, of distributions along the last axis."""
    close, v, s, a = close_parts(x, y, eps)
    u = (x + y) / 2
    far = (x * (np.log(x + eps) - np.log(v)) + y * (np.log(y + eps) - np.log(v))) / 2
    return np.sum(np.where(close, u / 2 * (log1p(-s * s) + 2 * s * a) + eps * s * a, far), axis=-1)


@formula(
    family="memory",
    shapes={"query": "... n d", "memories": "... m d", "scores": "... n m"},
    equation="s_ij = sim(m_j, q_i)",
    latex=r"s_{ij}=\operatorname{sim}(m_j,q_i)",
    source="arXiv:2202.04557; BerenMillidge/Theory_Associative_Memory, functions.py",
    kinks="similarity 'manhattan' where an entry of query and memory agree; 'cosine' and 'cosine_official' of a vector of zeros",
    workspace="... n m d",
)
def universal_hopfield_similarity(query, memories, *, similarity="dot", eps=1e-4):
    """Similarities (..., n, m) of each query (..., n, d) and each of the memories (..., m, d).

    similarity: one of "dot", "cosine", "euclidean", "manhattan", "kl", "reverse_kl", "js", "cosine_official", "normdot_official",
    "js_official", as this page defines them.  eps: the ε in the logarithms of the divergences, > 0.
    Raises ValueError where shapes do not match, an option is unknown, or a divergence meets negative entries, naming the argument.

    >>> universal_hopfield_similarity([[1.0, 2.0]], [[3.0, 2.0], [1.0, 0.0]], similarity="euclidean")
    array([[0.25, 0.25]])
    """
    one_of("similarity", similarity, SIMILARITIES)
    eps = number("eps", eps, above=0, finite=True)
    q, M = query, memories
    if similarity == "dot":
        return q @ np.swapaxes(M, -1, -2)
    if similarity == "cosine":
        return unit(q) @ np.swapaxes(unit(M), -1, -2)
    if similarity == "cosine_official":
        together = unit(M.reshape(*M.shape[:-2], M.shape[-2] * M.shape[-1])).reshape(M.shape)
        return unit(q) @ np.swapaxes(together, -1, -2)
    if similarity == "normdot_official":
        return shares(shares(q) @ np.swapaxes(shares(M), -1, -2))

    if similarity in DIVERGENCES:
        M, q = distribution("memories", M, similarity), distribution("query", q, similarity)
    q, M = q[..., :, None, :], M[..., None, :, :]
    if similarity == "euclidean":
        return reciprocal(np.sum((q - M) ** 2, axis=-1))
    if similarity == "manhattan":
        return reciprocal(np.sum((q - M) * np.sign((q - M).real), axis=-1))
    if similarity == "kl":
        return reciprocal(kl(M, q, eps))
    if similarity == "reverse_kl":
        return reciprocal(kl(q, M, eps))
    if similarity == "js":
        return reciprocal(js(M, q, eps))
    return reciprocal(reciprocal(kl(M, q, eps)) / 2 + reciprocal(kl(q, M, eps)) / 2)


def infinite_rows(s):
    """Whether a query meets an infinite similarity, which then takes all the weight, and none that is NaN: (..., n, 1)."""
    return np.any(s.real == np.inf, axis=-1, keepdims=True) & ~np.any(np.isnan(s.real), axis=-1, keepdims=True)


def first_of_the_largest(s):
    largest = np.max(s.real, axis=-1, keepdims=True, initial=-np.inf)
    top = s.real == largest
    return np.where(np.isnan(largest), np.nan, top & (np.cumsum(top, axis=-1) == 1))


def power(s, param):
    """s^param of a positive base with the sign put back: NumPy's power of a negative complex number goes through its angle near pi."""
    whole = param.real == np.floor(param.real)
    if not whole and np.any(s.real < 0):
        raise ValueError(f"param: expected a whole number where similarities are negative, got {param.real:g}")
    if param.real < 0 and np.any(s == 0):
        raise ValueError(f"param: expected a number >= 0 where a similarity is 0, got {param.real:g}")
    negative, infinite = s.real < 0, s.real == np.inf
    positive_power = np.where(infinite, 1.0, np.where(negative, -s, s)) ** param
    signed = np.where(negative & (param.real % 2 == 1), -positive_power, positive_power)
    return np.where(infinite, np.inf**param.real, signed)


def separate(s, separation, param):
    """w (..., n, m) of similarities s."""
    if separation == "softmax":
        matched = infinite_rows(s)
        return softmax_weights(number("param", param, above=0, finite=True) * np.where(matched, 0.0, s), (s.real == np.inf) | ~matched)[0]
    if separation == "max":
        return first_of_the_largest(s)
    if separation == "polynomial":
        return power(s, param)
    if separation == "log":
        if np.any(s.real <= 0):
            raise ValueError("separation: expected similarities > 0 for 'log'")
        return np.log(s)
    return s


@formula(
    family="memory",
    shapes={"query": "... n d", "memories": "... m d", "projection": "... m e", "out": "... n e"},
    equation="out = sep(beta sim(M, q)) P",
    latex=r"o_i=\sum_j\operatorname{sep}\bigl(\beta\operatorname{sim}(m_j,q_i)\bigr)\,p_j",
    source="arXiv:2202.04557; BerenMillidge/Theory_Associative_Memory, functions.py",
    kinks="separation 'max' at ties; similarity 'manhattan' where an entry of query and memory agree; cosines of a vector of zeros",
    workspace="... n m d",
)
def universal_hopfield(
    query, memories, projection=None, *, similarity="dot", separation="softmax", beta=1.0, param=1.0, normalise=False, eps=1e-4,
    return_weights=False,
):
    """What each query (..., n, d) recalls from the memories (..., m, d); returns (..., n, e).

    projection: (..., m, e) what is recalled in place of the memories.
    similarity, eps: as in `universal_hopfield_similarity`.  beta: factor of the similarities, finite and > 0.
    separation: "softmax", "polynomial", "identity", "log" or "max".  param: factor inside the softmax, > 0, or degree of the polynomial.
    normalise: divide similarities and separated similarities by their sums over the memories, as the authors' code does by default.
    return_weights: return an AttentionResult with w (..., n, m).
    Raises ValueError where shapes do not match, an option is unknown or out of range, or similarities are not such that the separation is
    defined, naming the argument.

    >>> universal_hopfield([[1.0, 0.0]], [[1.0, 0.0], [3.0, 4.0]], separation="polynomial", param=2, normalise=True)
    array([[2.8, 3.6]])
    """
    one_of("separation", separation, SEPARATIONS)
    one_of("normalise", normalise, (True, False))
    beta, param = number("beta", beta, above=0, finite=True), number("param", param, finite=True)
    s = universal_hopfield_similarity(query, memories, similarity=similarity, eps=eps)
    s = np.where(s.real == np.inf, s, beta * np.where(s.real == np.inf, 0.0, s))     # inf times a complex number is NaN
    values = memories if projection is None else projection

    if normalise:
        s = np.where(infinite_rows(s), s.real == np.inf, s)
        s = shares(s)
    w = separate(s, separation, param)
    if normalise:
        w = shares(w)
    out = w @ values
    return AttentionResult(out, w) if return_weights else out
