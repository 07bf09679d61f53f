"""Identities of the signed family."""

import numpy as np

import attnspec
from attnspec.conformance.identities import directional, identity


@identity("sum_j |A_ij| = 1 where no logit is 0", "cog_attention", "cog_weights")
def _(x):
    q, k, v = x.qkv(x.h)
    A = [attnspec.cog_attention(q, k, v, return_weights=True).weights, attnspec.cog_weights(q @ np.swapaxes(k, -1, -2))]
    return np.abs(A).sum(-1), np.ones((2, x.h, x.n))


@identity("adding a constant to all logits changes the weights: with signs s the row e^{|p + c|} = e^{s c} e^{|p|} where no sign flips",
          "cog_weights")
def _(x):
    p = x.rng.choice([-1.0, 1.0], (x.n, x.m)) * x.rng.uniform(2.0, 4.0, (x.n, x.m))
    shifted = attnspec.cog_weights(p) * np.exp(1.5 * np.sign(p))
    return attnspec.cog_weights(p + 1.5), shifted / np.abs(shifted).sum(-1, keepdims=True)


@identity("where all logits are positive it is softmax attention", "cog_attention")
def _(x):
    q, k, v = x.qkv()
    q, k = np.abs(q), np.abs(k)
    return attnspec.cog_attention(q, k, v), attnspec.scaled_dot_product_attention(q, k, v)


@identity("-q_i in place of q_i flips the sign of row i", "cog_attention")
def _(x):
    q, k, v = x.qkv()
    flip = x.rng.choice([-1.0, 1.0], (x.n, 1))
    return attnspec.cog_attention(flip * q, k, v), flip * attnspec.cog_attention(q, k, v)


@identity("scale = 0 gives A = 0", "cog_attention")
def _(x):
    return attnspec.cog_attention(*x.qkv(), scale=0.0), np.zeros((x.n, x.e))


@identity("|o| is at most max_j |v_j|", "cog_attention")
def _(x):
    q, k, v = x.qkv()
    size = np.abs(attnspec.cog_attention(q, k, v))
    return size, np.minimum(size, np.abs(v).max(0))


@identity("normaliser 'nonzero' = 'visible' times 1/(1 + 1e-6 e^{max|p|} / sum e^{|p|}) without zeros", "cog_weights")
def _(x):
    p = x.normal(x.n, x.m)
    e = np.exp(np.abs(p))
    factor = 1 / (1 + 1e-6 * e.max(-1, keepdims=True) / e.sum(-1, keepdims=True))
    return attnspec.cog_weights(p, normaliser="nonzero"), attnspec.cog_weights(p) * factor


@identity("normaliser 'nonzero': a key with a logit of 0 is a masked key", "cog_weights", "cog_attention")
def _(x):
    q, k, v = x.qkv()
    here = x.rng.random(x.m) < 0.6
    k = np.where(here[:, None], k, 0.0)
    p = q @ k.T
    got = [attnspec.cog_attention(q, k, v, scale=1.0, normaliser="nonzero"), attnspec.cog_weights(p, normaliser="nonzero")]
    want = [attnspec.cog_attention(q, k[here], v[here], scale=1.0, normaliser="nonzero"),
            attnspec.cog_weights(p, here, normaliser="nonzero")]
    return np.concatenate(got, -1), np.concatenate(want, -1)


@identity("sum_j g_ij dp_ij = 0: for equal keys, where g does not vary along a row, dq = 0", "cog_attention_backward")
def _(x):
    q, k, v = x.qkv()
    k = np.tile(k[:1], (x.m, 1))
    dq = attnspec.cog_attention_backward(q, k, v, x.normal(x.n, x.e)).dq
    return dq, np.zeros((x.n, x.d))


@identity("its gradients are the derivative along any direction, by complex step", "cog_attention_backward")
def _(x):
    groups = int(x.rng.integers(1, 4))
    _, k, v = x.qkv(x.h)
    arrays = {"q": x.normal(groups * x.h, x.n, x.d), "k": k, "v": v}
    options = {"scale": x.rng.uniform(0.1, 2.0), "mask": x.rng.random((x.n, x.m)) < 0.8,
               "causal": (False, "bottom-right", "top-left")[x.rng.integers(3)], "enable_gqa": True}
    do = x.normal(groups * x.h, x.n, x.e)
    gradients = attnspec.cog_attention_backward(**arrays, do=do, **options)._asdict()
    return directional(x, lambda **moved: attnspec.cog_attention(**moved, **options), {name: gradients["d" + name] for name in arrays},
                       arrays, do)


@identity("for positive queries and keys its gradients are those of softmax attention", "cog_attention_backward")
def _(x):
    q, k, v = x.qkv(x.h)
    q, k, do = np.abs(q), np.abs(k), x.normal(x.h, x.n, x.e)
    options = {"causal": [False, "bottom-right", "top-left"][x.rng.integers(3)], "mask": x.rng.random((x.n, x.m)) < 0.7}
    got, want = (backward(q, k, v, do, **options)
                 for backward in (attnspec.cog_attention_backward, attnspec.scaled_dot_product_attention_backward))
    return np.concatenate([g.ravel() for g in got[:3]]), np.concatenate([w.ravel() for w in want[:3]])
