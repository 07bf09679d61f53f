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
ε = 1e-4 stands in both logarithms, so that "KL" of such vectors need not be positive. The divergences take non-negative vectors with a
positive sum. A similarity that is a reciprocal is infinite where the query is a memory, or the divergence rounds to 0: such memories share
all the weight, the limit, unless nothing is normalised and the separation is a polynomial, the identity or the log, where out is infinite.
Ties of "max" go to the first.

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
from attnspec.reference.softmax.weights import softmax_weights

SIMILARITIES = (
    "dot", "cosine", "euclidean", "manhattan", "kl", "reverse_kl", "js", "cosine_official", "normdot_official", "js_official",
)
DIVERGENCES = ("kl", "reverse_kl", "js", "js_official")
SEPARATIONS = ("softmax", "polynomial", "identity", "log", "max")


def reciprocal(x):
    """1 / x, infinite where x = 0."""
    return np.where(x == 0, np.inf, 1 / np.where(x == 0, 1.0, x))


def over(x, total):
    """x / total, and x where total = 0."""
    return x / np.where(total == 0, 1.0, total)


def norm(x):
    square = np.sum(x * x, axis=-1, keepdims=True)
    return np.where(square == 0, 0.0, np.sqrt(np.where(square == 0, 1.0, square)))


def distribution(name, x, similarity):
    """Rows divided by their sums."""
    total = np.sum(x, axis=-1, keepdims=True)
    if not np.all(x.real >= 0) or not np.all(total.real > 0):
        raise ValueError(f"{name}: expected entries >= 0 with a positive sum for the similarity {similarity!r}")
    return x / total


def kl(x, y, eps):
    return np.sum(x * (np.log(x + eps) - np.log(y + eps)), axis=-1)


@formula(
    family="memory",
    shapes={"query": "... n d", "memories": "... m d", "scores": "... n m"},
    equation="s_ij = sim(m_j, q_i)",
    latex=r"s_{ij}=\operatorname{sim}(m_j,q_i)",
    source="arXiv:2202.04557; BerenMillidge/Theory_Associative_Memory, functions.py",
    kinks="similarity 'manhattan' where an entry of query and memory agree",
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
    eps = number("eps", eps, above=0)
    q, M = query, memories
    dot = q @ np.swapaxes(M, -1, -2)
    if similarity == "dot":
        return dot
    if similarity == "cosine":
        return over(dot, norm(q) * np.swapaxes(norm(M), -1, -2))
    if similarity == "cosine_official":
        return over(dot, norm(q) * norm(M.reshape(*M.shape[:-2], 1, M.shape[-2] * M.shape[-1])))
    if similarity == "normdot_official":
        q, M = (over(x, np.sum(x, axis=-1, keepdims=True)) for x in (q, M))
        dot = q @ np.swapaxes(M, -1, -2)
        return over(dot, np.sum(dot, axis=-1, keepdims=True))

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
        middle = (q + M) / 2
        return reciprocal(kl(M, middle, eps) / 2 + kl(q, middle, eps) / 2)
    return reciprocal(reciprocal(kl(M, q, eps)) / 2 + reciprocal(kl(q, M, eps)) / 2)


def infinite_rows(s):
    """Whether a query meets an infinite similarity, which then takes all the weight: (..., n, 1)."""
    return np.any(s.real == np.inf, axis=-1, keepdims=True)


def first_of_the_largest(s):
    top = s.real == np.max(s.real, axis=-1, keepdims=True, initial=-np.inf)
    return np.where(top & (np.cumsum(top, axis=-1) == 1), 1.0, 0.0)


def separate(s, separation, param):
    """w (..., n, m) of similarities s."""
    if separation == "softmax":
        matched = infinite_rows(s)
        return softmax_weights(number("param", param, above=0) * np.where(matched, 0.0, s), (s.real == np.inf) | ~matched)[0]
    if separation == "max":
        return first_of_the_largest(s)
    if separation == "polynomial":
        if param.real != np.floor(param.real) and not np.all(s.real >= 0):
            raise ValueError(f"param: expected a whole number where similarities are negative, got {param.real:g}")
        if param.real < 0 and not np.all(s != 0):
            raise ValueError(f"param: expected a number >= 0 where a similarity is 0, got {param.real:g}")
        return s**param
    if separation == "log":
        if not np.all(s.real > 0):
            raise ValueError("separation: expected similarities > 0 for 'log'")
        return np.log(s)
    return s


@formula(
    family="memory",
    shapes={"query": "... n d", "memories": "... m d", "projection": "... m e", "out": "... n e"},
    equation="out = sep(beta sim(M, q)) P",
    latex=r"o_i=\sum_j\operatorname{sep}\bigl(\beta\operatorname{sim}(m_j,q_i)\bigr)\,p_j",
    source="arXiv:2202.04557; BerenMillidge/Theory_Associative_Memory, functions.py",
    kinks="separation 'max' at ties; similarity 'manhattan' where an entry of query and memory agree",
    workspace="... n m d",
)
def universal_hopfield(
    query, memories, projection=None, *, similarity="dot", separation="softmax", beta=1.0, param=1.0, normalise=False, eps=1e-4,
    return_weights=False,
):
    """What each query (..., n, d) recalls from the memories (..., m, d); returns (..., n, e).

    projection: (..., m, e) what is recalled in place of the memories.
    similarity, eps: as in `universal_hopfield_similarity`.  beta: factor of the similarities, > 0.
    separation: "softmax", "polynomial", "identity", "log" or "max".  param: factor inside the softmax, or degree of the polynomial.
    normalise: divide similarities and separated similarities by their sums over the memories, as the authors' code does by default.
    return_weights: return an AttentionResult with w (..., n, m).
    Raises ValueError where shapes do not match, an option is unknown or out of range, or similarities are not such that the separation is
    defined, naming the argument.

    >>> universal_hopfield([[1.0, 0.0]], [[1.0, 0.0], [3.0, 4.0]], separation="polynomial", param=2, normalise=True)
    array([[2.8, 3.6]])
    """
    one_of("separation", separation, SEPARATIONS)
    one_of("normalise", normalise, (True, False))
    beta, param = number("beta", beta, above=0), number("param", param)
    s = beta * universal_hopfield_similarity(query, memories, similarity=similarity, eps=eps)
    values = memories if projection is None else projection

    if normalise:
        s = np.where(infinite_rows(s), s.real == np.inf, s)
        s = over(s, np.sum(s, axis=-1, keepdims=True))
    w = separate(s, separation, param)
    if normalise:
        w = over(w, np.sum(w, axis=-1, keepdims=True))
    with np.errstate(invalid="ignore"):                                # inf times a value of 0
        out = w @ values
    return AttentionResult(out, w) if return_weights else out
