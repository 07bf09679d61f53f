"""Tensor attention in near-linear time: exp replaced by a polynomial, whose monomials split between queries and keys.

    exp(z) ~ P(z) = e^c sum_{t<=g} (z - c)^t / t! = sum_{s<=g} c_s z^s,   c_s = e^c / s! sum_{u<=g-s} (-c)^u / u!
    P(scale sum_l q_l a_l b_l) = sum_{|α|<=g} c_|α| |α|!/α! scale^|α| q^α a^α b^α              x^α = prod_l x_l^α_l

    U1_iα = c_|α| |α|!/α! (scale q_i)^α,  U2_jα = k1_j^α,  U3_jα = k2_j^α          so that A ~ U1 (U2 ⊘ U3)^T
    N = U1 [(U2^T V1) ∘ (U3^T V2)],  D = U1 [(U2^T 1) ∘ (U3^T 1)],  o = N / D

where q (..., n, d), k1 (..., m1, d), k2 (..., m2, d), v1 (..., m1, e), v2 (..., m2, e), U1 (..., n, r), U2 (..., m1, r), U3 (..., m2, r),
o (..., n, e); r = C(d + g, g), the number of monomials of degree <= g in d variables; scale is 1/d unless given. Nothing of
size n m1 or more is made: o takes time n r e. Under causal the sums over keys become running sums,
N_i = sum_α U1_iα (sum_{j<=i} U2_jα v1_j) ∘ (sum_{j<=i} U3_jα v2_j), and D_i alike.

Error. With |S| <= R = |scale| d max|q| max|k1| max|k2| (B^3 for entries up to B at scale 1/d), P is within a factor 1 ± ε of exp:

    ε = max(e^w w^(g+1), u^(g+1)) / (g+1)!,   w = max(R + c, 0),  u = max(R - c, 0);   e^R R^(g+1) / (g+1)! at c = 0
    |o - exact| <= 2 ε / (1 - ε) max|v1| max|v2|                                       no bound where ε >= 1

Source: Alman and Song, arXiv:2310.04064, section 3 (the low-rank factors U1, U2, U3 and their evaluation), as described in its abstract
and reviews. The Taylor polynomial, the exact rank and the error bound are derived here; the paper takes the polynomial of Aggarwal and
Alman, arXiv:2205.06249, and states a looser rank.

Conventions. Those of tensor.py, without a mask, which does not split. With d = Θ(log n) and entries o((log n)^(1/3)) the time is
n^(1+o(1)). A polynomial of even degree is positive; one of odd degree may give D <= 0 where R is large: the result is then meaningless,
and infinite or NaN where D = 0. A query that sees no key gets zeros. Degrees that need more than MOST_FEATURES monomials over all rows are
refused. The error bound leaves out rounding.

Identities. v1 = v2 = 1 gives 1 at any degree. Degree 0 gives mean(v1) ∘ mean(v2). Degree 1 at c = 0: sum (1 + S) (v1 ∘ v2) / sum (1 + S).
(A ⊘ B)^T (C ⊘ E) = (A^T C) ∘ (B^T E), which is why N needs no pairs. As g grows it becomes `tensor_attention`.

Wrong versions met elsewhere: |α|!/α! left out; scale applied once instead of to the power |α|; a rank of C(2(d+g), 2g) allocated; the
causal mask applied to the finished result, which has seen all keys.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from attnspec.reference.formula import formula, quietly
from attnspec.reference.higher_order.tensor import FACTS, SHAPES, checked_like, tensor_scale
from attnspec.reference.inputs import CAUSAL, number, one_of, whole

MOST_FEATURES = 20_000_000          # 160 MB for each of U1, U2, U3


def small_entries(sizes, rng):
    """Entries in (-1, 1): logits of at most 1, where a degree of 8 is exact to 1e-5."""
    lead = tuple(sizes[name] for name in ("b", "h") if name in sizes)
    shapes = {"q": ("n", "d"), "k1": ("m1", "d"), "k2": ("m2", "d"), "v1": ("m1", "e"), "v2": ("m2", "e")}
    return {name: rng.uniform(-1, 1, lead + tuple(sizes[dim] for dim in dims)) for name, dims in shapes.items()}


POLY: dict[str, Any] = {
    **FACTS,
    "source": "arXiv:2310.04064, section 3",
    "status": "derived",
    "sizes": {**FACTS["sizes"], "d": 3},
    "draw": small_entries,
}
UNMASKED = {name: shape for name, shape in SHAPES.items() if name != "mask"}


class PolynomialFactors(NamedTuple):
    """U1 (..., n, r), U2 (..., m1, r) and U3 (..., m2, r) with exp(S) ~ U1 (U2 ⊘ U3)^T."""

    u1: np.ndarray
    u2: np.ndarray
    u3: np.ndarray


def exponents(d, degree):
    """All α in N^d with |α| <= degree, (C(d + degree, degree), d): by |α|, then from the first variable to the last."""
    products = itertools.chain.from_iterable(itertools.combinations_with_replacement(range(d), t) for t in range(degree + 1))
    alpha = np.zeros((math.comb(d + degree, degree), d), np.int64)
    for row, variables in enumerate(products):
        for l in variables:
            alpha[row, l] += 1
    return alpha


def inverse_factorials(degree):
    """1/s! for s = 0..degree."""
    return np.cumprod(1.0 / np.maximum(np.arange(degree + 1), 1))


def monomials(x, alpha):
    """x^α for each row x (..., d) and each exponent vector of alpha (r, d): (..., r)."""
    degree = int(alpha.max(initial=0))
    powers = [np.ones_like(x)]
    product = np.ones((*x.shape[:-1], len(alpha)), x.dtype)
    for _ in range(degree):
        powers.append(powers[-1] * x)
    tables = np.stack(powers, axis=-1)                             # (..., d, degree + 1)
    for l in range(x.shape[-1]):
        product = product * tables[..., l, alpha[:, l]]
    return product


def factors(q, k1, k2, degree, centre, scale):
    """U1, U2, U3 for arrays that were checked."""
    d, g, c = q.shape[-1], whole("degree", degree), number("centre", centre)
    rank = math.comb(d + g, g)
    rows = max(1, d, *(math.prod(x.shape[:-1]) for x in (q, k1, k2)))  # d because of the table of exponents
    if rows * rank > MOST_FEATURES:
        raise ValueError(f"degree: expected at most {MOST_FEATURES} features, got {rows} times the rank C({d} + {g}, {g}) = {rank}")
    alpha = exponents(d, g)
    inverse = inverse_factorials(g)
    total = alpha.sum(axis=-1)
    tail = np.cumsum((-c) ** np.arange(g + 1) * inverse)               # sum_{u<=g-s} (-c)^u / u! stands at g - s
    weight = np.exp(c) * tail[g - total] * np.prod(inverse[alpha], axis=-1)                 # c_|α| |α|!/α!
    return PolynomialFactors(weight * monomials(tensor_scale(scale, q) * q, alpha), monomials(k1, alpha), monomials(k2, alpha))


@quietly
def tensor_poly_features(q, k1, k2, *, degree=8, centre=0.0, scale=None):
    """The factors U1 (..., n, r), U2 (..., m1, r), U3 (..., m2, r) of a polynomial of exp(S): sum_α U1_iα U2_jα U3_lα = P(S_ijl).

    q (..., n, d), k1 (..., m1, d), k2 (..., m2, d).  degree: g, of the polynomial; the rank is r = C(d + g, g), the monomials in
    order of their degree.  centre: c, where the Taylor polynomial is exact.  scale: multiplies the logits, default 1/d.
    Returns PolynomialFactors (u1, u2, u3).
    Raises ValueError where shapes do not match, an option is out of range or the rank is too large, naming the argument.

    >>> tensor_poly_features([[2.0]], [[3.0]], [[1.0], [2.0]], degree=2).u1          # 1, x, x^2/2
    array([[1., 2., 2.]])
    """
    arrays = checked_like({name: UNMASKED[name] for name in ("q", "k1", "k2")}, {"q": q, "k1": k1, "k2": k2})
    return factors(**arrays, degree=degree, centre=centre, scale=scale)


@formula(
    shapes={**UNMASKED, "out": "... n e"},
    equation="out = N / D,  N = U1 [(U2^T V1) ∘ (U3^T V2)],  D = U1 [(U2^T 1) ∘ (U3^T 1)],  U1 (U2 ⊘ U3)^T ~ exp(S)",
    bound="tensor polynomial",
    **{**POLY, "latex": r"o=\frac{U_1[(U_2^\top V_1)\circ(U_3^\top V_2)]}{U_1[(U_2^\top\mathbf 1)\circ(U_3^\top\mathbf 1)]},\quad "
                        r"U_1(U_2\oslash U_3)^\top\approx\exp\bigl(\mathrm{scale}\,Q(K_1\oslash K_2)^\top\bigr)"},
)
def tensor_attention_poly(q, k1, k2, v1, v2, *, degree=8, centre=0.0, scale=None, causal=False):
    """Approximate tensor attention of q (..., n, d) over pairs of k1 (..., m1, d), v1 (..., m1, e) and k2 (..., m2, d), v2 (..., m2, e).

    degree: g, of the Taylor polynomial that stands for exp; even ones keep all weights positive.  centre: c, where that polynomial is
    exact; of use where the logits lie around another number than 0.  scale: multiplies the logits, default 1/d.
    causal: False, "bottom-right" (or True) or "top-left", for each member of a pair.
    Returns (..., n, e); `tensor_attention_poly_error` bounds its error.
    Raises ValueError where shapes do not match, an option is out of range or the rank is too large, naming the argument.

    >>> tensor_attention_poly([[1.0]], [[0.0], [1.0]], [[1.0]], [[0.0], [1.0]], [[1.0]], degree=1)          # (1 + 1) / (1 + (1 + 1))
    array([[0.66666667]])
    """
    one_of("causal", causal, CAUSAL)
    n, m1, m2 = q.shape[-2], k1.shape[-2], k2.shape[-2]
    i = np.arange(n)
    last1, last2 = (np.full(n, m - 1) if causal is False else i if causal == "top-left" else i + m - n for m in (m1, m2))
    U1, U2, U3 = factors(q, k1, k2, degree, centre, scale)
    W1, W2 = (np.concatenate([v, np.ones((*v.shape[:-1], 1))], axis=-1) for v in (v1, v2))           # the last column gives D
    if causal is False:
        ND = U1 @ ((np.swapaxes(U2, -1, -2) @ W1) * (np.swapaxes(U3, -1, -2) @ W2))
    else:
        columns = []
        for w1, w2 in zip(np.moveaxis(W1, -1, 0), np.moveaxis(W2, -1, 0), strict=True):
            sums = running_sums(U2 * w1[..., None], last1) * running_sums(U3 * w2[..., None], last2)
            columns.append(np.sum(U1 * sums, axis=-1))
        ND = np.stack(columns, axis=-1)
    N, D = ND[..., :-1], ND[..., -1:]
    nothing = (np.minimum(last1, m1 - 1) < 0) | (np.minimum(last2, m2 - 1) < 0)
    with np.errstate(divide="ignore", invalid="ignore"):               # D = 0 at an odd degree: that shows, as inf or NaN
        return np.where(nothing[:, None], 0.0, N / D)


def running_sums(x, last):
    """sum_{j<=last_i} x_j for x (..., m, r): (..., n, r); last_i < 0 sums nothing."""
    none = np.zeros((*x.shape[:-2], 1, x.shape[-1]))
    sums = np.concatenate([none, np.cumsum(x, axis=-2)], axis=-2)
    return sums[..., np.clip(last + 1, 0, x.shape[-2]), :]


def magnitude(x):
    """|x|, complex-step safe."""
    return x * np.sign(x.real)


def largest(x):
    """max |x_ij| over the last two axes, 0 where there are none."""
    size = magnitude(x).reshape(*x.shape[:-2], math.prod(x.shape[-2:]))
    size = np.concatenate([size, np.zeros((*size.shape[:-1], 1))], axis=-1)
    return np.take_along_axis(size, np.argmax(size.real, axis=-1, keepdims=True), axis=-1)[..., 0]


@formula(
    shapes={**UNMASKED, "error": "..."},
    equation="error = 2 ε / (1 - ε) max|v1| max|v2|,  ε = max(e^w w^(g+1), u^(g+1)) / (g+1)!,  w = R + c,  u = R - c",
    kinks="where an entry of q, k1, k2, v1 or v2 ceases to be the largest, and where ε = 1 or R = |c|",
    **{**POLY, "latex": r"\frac{2\varepsilon}{1-\varepsilon}\max|v_1|\max|v_2|,\quad \varepsilon=\frac{e^RR^{g+1}}{(g+1)!}\ (c=0),\quad "
                        r"R=|\mathrm{scale}|\,d\,\max|q|\max|k_1|\max|k_2|"},
)
def tensor_attention_poly_error(q, k1, k2, v1, v2, *, degree=8, centre=0.0, scale=None):
    """Guaranteed bound on |tensor_attention_poly - tensor_attention| in any entry of the output, causal or not: (...), inf where ε >= 1.

    q (..., n, d), k1 (..., m1, d), k2 (..., m2, d), v1 (..., m1, e), v2 (..., m2, e).  degree, centre, scale: as in
    `tensor_attention_poly`. The bound holds in exact arithmetic; rounding comes on top.
    Raises ValueError where shapes do not match or an option is out of range, naming the argument.

    >>> x = np.ones((1, 1))
    >>> tensor_attention_poly_error(x, x, x, x, x, degree=8).round(7)             # ε = e / 9!
    np.float64(1.5e-05)
    """
    g, c = whole("degree", degree), number("centre", centre)
    R = magnitude(np.asarray(tensor_scale(scale, q))) * q.shape[-1] * largest(q) * largest(k1) * largest(k2)
    w, u = (np.where(x.real <= 0, 0.0, x) for x in (R + c, R - c))
    below, above = (math.prod(x / s for s in range(1, g + 2)) for x in (w, u))
    below = np.exp(w) * below                                      # exp is smallest, and ε with it largest, at z = -R
    eps = np.where(below.real >= above.real, below, above)
    small = eps.real < 1
    eps = np.where(small, eps, 0.0)
    return np.where(small, 2 * eps / (1 - eps) * largest(v1) * largest(v2), np.inf)[()]
