"""Identities of the higher_order family."""

import math

import numpy as np

import attnspec
from attnspec.conformance.identities import directional, identity


def sets(x, t=2, *lead):
    """Queries (..., n, d), and t sets of keys (..., m_a, d) and values (..., m_a, e) of different sizes."""
    sizes = (x.m, x.h, x.n)[:t]
    return x.normal(*lead, x.n, x.d), [x.normal(*lead, m, x.d) for m in sizes], [x.normal(*lead, m, x.e) for m in sizes]


def pairs(x, *lead):
    """q, k1, k2, v1, v2."""
    q, keys, values = sets(x, 2, *lead)
    return q, *keys, *values


def tokens(x):
    """q, k1, k2, v1, v2 with n of each, for causal forms."""
    return *(x.normal(x.n, x.d) for _ in range(3)), *(x.normal(x.n, x.e) for _ in range(2))


def small(x):
    """q, k1, k2, v1, v2 with entries in (-1, 1), so that |S| <= 1 at scale 1/d."""
    return tuple(np.tanh(array) for array in pairs(x))


@identity("with one set of keys and scale 1/sqrt(d) it is softmax attention", "tensor_attention")
def _(x):
    q, k, v = x.qkv(x.h)
    got = attnspec.tensor_attention_general(q, [k], [v], scale=x.d**-0.5)
    return got, attnspec.scaled_dot_product_attention(q, k, v)


@identity("k2 = 1 and v2 = 1 leave attention over k1, v1", "tensor_attention")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    got = attnspec.tensor_attention(q, k1, np.ones_like(k2), v1, np.ones_like(v2))
    return got, attnspec.scaled_dot_product_attention(q, k1, v1, scale=1 / x.d)


@identity("k3 = 1 and v3 = 1 leave attention over pairs", "tensor_attention")
def _(x):
    arrays = pairs(x)
    k3, v3 = np.ones((x.n, x.d)), np.ones((x.n, x.e))
    return attnspec.tensor_attention(*arrays, k3=k3, v3=v3), attnspec.tensor_attention(*arrays)


@identity("swapping (k1, v1) with (k2, v2) changes nothing", "tensor_attention", "two_simplicial_attention", "tensor_attention_blocked")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    functions = attnspec.tensor_attention, attnspec.two_simplicial_attention, attnspec.tensor_attention_blocked
    return [f(q, k1, k2, v1, v2) for f in functions], [f(q, k2, k1, v2, v1) for f in functions]


@identity("the order of the sets changes nothing at order 4", "tensor_attention")
def _(x):
    q, keys, values = sets(x, 3)
    order = x.rng.permutation(3)
    got = attnspec.tensor_attention_general(q, [keys[a] for a in order], [values[a] for a in order])
    k1, k2, k3 = keys
    v1, v2, v3 = values
    return got, attnspec.tensor_attention(q, k1, k2, v1, v2, k3=k3, v3=v3)


@identity("v1 = v2 = 1 gives 1", "tensor_attention", "two_simplicial_attention", "tensor_attention_blocked")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    functions = attnspec.tensor_attention, attnspec.two_simplicial_attention, attnspec.tensor_attention_blocked
    return [f(q, k1, k2, np.ones_like(v1), np.ones_like(v2)) for f in functions], np.ones((3, x.n, x.e))


@identity("q = 0 gives mean(v1) mean(v2)", "tensor_attention", "two_simplicial_attention", "tensor_attention_blocked")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    functions = attnspec.tensor_attention, attnspec.two_simplicial_attention, attnspec.tensor_attention_blocked
    return [f(0 * q, k1, k2, v1, v2) for f in functions], np.broadcast_to(v1.mean(0) * v2.mean(0), (3, x.n, x.e))


@identity("|o| is at most max|v1| max|v2|", "tensor_attention")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    size = np.abs(attnspec.tensor_attention(q, k1, k2, v1, v2))
    return size, np.minimum(size, np.abs(v1).max(0) * np.abs(v2).max(0))


@identity("for a fixed j1 it is attention of q k1_j1 over k2, v2, and the j1 are mixed by their log-sum-exps", "tensor_attention")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    each = attnspec.scaled_dot_product_attention(q * k1[:, None, :], k2, v2, scale=1 / x.d, return_lse=True)
    w = np.exp(each.lse - each.lse.max(0))                             # (m1, n)
    want = np.einsum("jn,je,jne->ne", w / w.sum(0), v1, each.out)
    return attnspec.tensor_attention(q, k1, k2, v1, v2), want


@identity("its gradients: <dv1, v1> = <dv2, v2> = <dO, o>, <dq, q> = <dk1, k1> = <dk2, k2>", "tensor_attention_backward")
def _(x):
    arrays = q, k1, k2, v1, v2 = pairs(x)
    do = x.normal(x.n, x.e)
    g = attnspec.tensor_attention_backward(*arrays, do)
    out = np.sum(do * attnspec.tensor_attention(*arrays))
    products = np.sum(g.dv1 * v1), np.sum(g.dv2 * v2), np.sum(g.dk1 * k1), np.sum(g.dk2 * k2)
    return products, (out, out, np.sum(g.dq * q), np.sum(g.dq * q))


@identity("with v1 = v2 = 1 no gradient reaches q, k1, k2", "tensor_attention_backward")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    g = attnspec.tensor_attention_backward(q, k1, k2, np.ones_like(v1), np.ones_like(v2), x.normal(x.n, x.e))
    return np.concatenate([g.dq, g.dk1, g.dk2]), np.zeros((x.n + len(k1) + len(k2), x.d))


@identity("its gradients are the derivative along any direction, by complex step", "tensor_attention_backward")
def _(x):
    arrays = dict(zip(("q", "k1", "k2", "v1", "v2"), pairs(x, 2), strict=True))
    options = {"scale": x.rng.uniform(0.1, 1.0), "mask": x.rng.random((x.n, x.m, x.h)) < 0.8,
               "causal": (False, "bottom-right", "top-left")[x.rng.integers(3)]}
    do = x.normal(2, x.n, x.e)
    gradients = attnspec.tensor_attention_backward(**arrays, do=do, **options)._asdict()
    return directional(x, lambda **moved: attnspec.tensor_attention(**moved, **options), {name: gradients["d" + name] for name in arrays},
                       arrays, do)


@identity("tiles of any size give tensor attention", "tensor_attention_blocked")
def _(x):
    arrays = pairs(x, 2)
    options = {"causal": ("bottom-right", "top-left", False)[x.n % 3], "mask": x.rng.random((x.n, x.m, x.h)) < 0.7}
    block = int(x.rng.integers(1, 10))
    return attnspec.tensor_attention_blocked(*arrays, block=block, **options), attnspec.tensor_attention(*arrays, **options)


@identity("lse is the log of the sum of exp(S) over all pairs", "tensor_attention_blocked")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    s = np.einsum("id,jd,ld->ijl", q, k1, k2) / x.d
    got = attnspec.tensor_attention_blocked(q, k1, k2, v1, v2, block=2, return_lse=True).lse
    return np.exp(got - s.max((1, 2))), np.exp(s - s.max((1, 2), keepdims=True)).sum((1, 2))


@identity("it is attention with the weights U1 (U2 x U3)^T, made of all pairs of rows of tensor_poly_features", "tensor_attention_poly")
def _(x):
    q, k1, k2, v1, v2 = small(x)
    options = {"degree": 2 * int(x.rng.integers(3)), "centre": float(x.rng.uniform(-1, 1)), "scale": float(x.rng.uniform(-1, 1)) / x.d}
    u1, u2, u3 = attnspec.tensor_poly_features(q, k1, k2, **options)
    w = np.einsum("ir,jr,lr->ijl", u1, u2, u3)
    want = np.einsum("ijl,je,le->ie", w, v1, v2) / w.sum((1, 2))[:, None]
    return attnspec.tensor_attention_poly(q, k1, k2, v1, v2, **options), want


@identity("degree 1 at centre c is sum (1 + S - c) v1 v2 / sum (1 + S - c)", "tensor_attention_poly")
def _(x):
    q, k1, k2, v1, v2 = small(x)
    c = float(x.rng.uniform(-1.0, 0.4))
    w = 1 + np.einsum("id,jd,ld->ijl", q, k1, k2) / (2 * x.d) - c      # > 0.1, as |S| <= 1/2
    want = np.einsum("ijl,je,le->ie", w, v1, v2) / w.sum((1, 2))[:, None]
    return attnspec.tensor_attention_poly(q, k1, k2, v1, v2, degree=1, centre=c, scale=1 / (2 * x.d)), want


@identity("v1 = v2 = 1 gives 1 at any degree and centre", "tensor_attention_poly")
def _(x):
    q, k1, k2, v1, v2 = small(x)
    options = {"degree": 2 * (x.n % 3), "centre": float(x.rng.uniform(-1, 1)), "causal": (False, "top-left")[x.m % 2]}
    return attnspec.tensor_attention_poly(q, k1, k2, np.ones_like(v1), np.ones_like(v2), **options), np.ones((x.n, x.e))


@identity("degree 0 gives mean(v1) mean(v2)", "tensor_attention_poly")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    return attnspec.tensor_attention_poly(q, k1, k2, v1, v2, degree=0), np.tile(v1.mean(0) * v2.mean(0), (x.n, 1))


@identity("degree 1 at centre 0 is sum (1 + S) v1 v2 / sum (1 + S)", "tensor_attention_poly")
def _(x):
    q, k1, k2, v1, v2 = small(x)
    w = 1 + np.einsum("id,jd,ld->ijl", q, k1, k2) / (2 * x.d)
    want = np.einsum("ijl,je,le->ie", w, v1, v2) / w.sum((1, 2))[:, None]
    return attnspec.tensor_attention_poly(q, k1, k2, v1, v2, degree=1, scale=1 / (2 * x.d)), want


@identity("it is tensor attention to within the guaranteed bound", "tensor_attention_poly", "tensor_attention_poly_error")
def _(x):
    arrays = small(x)
    causal = (False, "bottom-right", "top-left")[x.n % 3]
    options = {"degree": int(x.rng.integers(1, 6)), "centre": float(x.rng.uniform(-0.5, 0.5)), "scale": float(x.rng.uniform(-1, 1)) / x.d}
    bound = attnspec.tensor_attention_poly_error(*arrays, **options)
    want = attnspec.tensor_attention(*arrays, scale=options["scale"], causal=causal)
    error = np.abs(attnspec.tensor_attention_poly(*arrays, causal=causal, **options) - want)
    return error, np.minimum(error, bound)


@identity("a degree of 16 is exact where |S| <= 1", "tensor_attention_poly")
def _(x):
    arrays = tuple(array[..., :3] for array in small(x)[:3]) + small(x)[3:]
    return attnspec.tensor_attention_poly(*arrays, degree=16), attnspec.tensor_attention(*arrays)


@identity("causal rows are those of the keys up to the query", "tensor_attention_poly")
def _(x):
    q, k1, k2, v1, v2 = (0.5 * array for array in tokens(x))
    i = int(x.rng.integers(x.n))
    seen = slice(i + 1)
    want = attnspec.tensor_attention_poly(q[i : i + 1], k1[seen], k2[seen], v1[seen], v2[seen], degree=4)
    return attnspec.tensor_attention_poly(q, k1, k2, v1, v2, degree=4, causal=True)[i], want[0]


@identity("error = 2 eps/(1 - eps) max|v1| max|v2| with eps = e^R R^(g+1)/(g+1)!, R = max|S| for one query and one pair",
          "tensor_attention_poly_error")
def _(x):
    q, k1, k2 = x.rng.uniform(0.2, 0.9, (3, 1, 1))
    v1, v2 = x.normal(1, x.e), x.normal(1, x.e)
    R, g = (q * k1 * k2).item(), x.n
    eps = math.exp(R) * R ** (g + 1) / math.factorial(g + 1)
    want = 2 * eps / (1 - eps) * np.abs(v1).max() * np.abs(v2).max() if eps < 1 else np.inf
    return attnspec.tensor_attention_poly_error(q, k1, k2, v1, v2, degree=g), want


@identity("it is tensor attention at scale 1/sqrt(d)", "two_simplicial_attention")
def _(x):
    arrays = pairs(x, 2)
    causal = (False, "bottom-right", "top-left")[x.n % 3]
    return attnspec.two_simplicial_attention(*arrays, causal=causal), attnspec.tensor_attention(*arrays, scale=x.d**-0.5, causal=causal)


@identity("windows of 1 give v1_i v2_i", "two_simplicial_attention")
def _(x):
    q, k1, k2, v1, v2 = tokens(x)
    return attnspec.two_simplicial_attention(q, k1, k2, v1, v2, window1=1, window2=1), v1 * v2


@identity("windows of n or more are plain causal attention", "two_simplicial_attention")
def _(x):
    arrays = tokens(x)
    got = attnspec.two_simplicial_attention(*arrays, window1=x.n, window2=x.n + x.m)
    return got, attnspec.two_simplicial_attention(*arrays, causal=True)


@identity("a window w is the mask p - w < j <= p, of each member of the pair", "two_simplicial_attention")
def _(x):
    arrays = pairs(x, 2)
    causal = (False, "bottom-right", "top-left")[x.rng.integers(3)]
    w1, w2 = (int(size) for size in x.rng.integers(1, 9, 2))
    seen = []
    for m, w in ((x.m, w1), (x.h, w2)):
        p, j = np.arange(x.n)[:, None] + (m - x.n if causal == "bottom-right" else 0), np.arange(m)
        seen.append((p - w < j) & (j <= p))
    mask = seen[0][:, :, None] & seen[1][:, None, :]
    return (attnspec.two_simplicial_attention(*arrays, window1=w1, window2=w2, causal=causal),
            attnspec.two_simplicial_attention(*arrays, mask=mask))


@identity("a mask removes pairs: every query has attention over the rows of both sets that it may see", "tensor_attention",
          "two_simplicial_attention", "tensor_attention_blocked")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    a, b = x.rng.random((x.n, x.m)) < 0.7, x.rng.random((x.n, x.h)) < 0.7
    functions = attnspec.tensor_attention, attnspec.two_simplicial_attention, attnspec.tensor_attention_blocked
    got = [f(q, k1, k2, v1, v2, mask=a[:, :, None] & b[:, None, :]) for f in functions]
    return got, [np.concatenate([f(q[i : i + 1], k1[a[i]], k2[b[i]], v1[a[i]], v2[b[i]]) for i in range(x.n)]) for f in functions]


@identity("under causal the first token gets v1_0 v2_0", "two_simplicial_attention")
def _(x):
    q, k1, k2, v1, v2 = tokens(x)
    return attnspec.two_simplicial_attention(q, k1, k2, v1, v2, causal=True)[0], v1[0] * v2[0]


@identity("k2_bias adds to the keys, v2_bias to the values: a bias b adds b times the result with v2 = 1", "two_simplicial_attention")
def _(x):
    q, k1, k2, v1, v2 = pairs(x)
    a, b = x.normal(2)
    got = attnspec.two_simplicial_attention(q, k1, k2, v1, v2, k2_bias=a, v2_bias=b)
    plain, ones = (attnspec.two_simplicial_attention(q, k1, k2 + a, v1, v) for v in (v2, np.ones_like(v2)))
    return got, plain + b * ones
