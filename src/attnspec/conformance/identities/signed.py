"""Identities of the signed family."""

import numpy as np

import attnspec
from attnspec.conformance.identities import identity


@identity("sum_j |A_ij| = 1 where no logit is 0", "cog_attention", "cog_weights")
def _(x):
    A = attnspec.cog_attention(*x.qkv(x.h), return_weights=True).weights
    return np.abs(A).sum(-1), np.ones((x.h, x.n))


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


@identity("normaliser 'nonzero' = 'visible' times 1/(1 + 1e-6 e^{max|p|} / sum e^{|p|}) without zeros", "cog_weights", "cog_attention")
def _(x):
    p = x.normal(x.n, x.m)
    e = np.exp(np.abs(p))
    factor = 1 / (1 + 1e-6 * e.max(-1, keepdims=True) / e.sum(-1, keepdims=True))
    return attnspec.cog_weights(p, normaliser="nonzero"), attnspec.cog_weights(p) * factor


@identity("dp is orthogonal to rows: sum_j |A_ij| g_ij dp_ij / |A_ij| = 0, seen as q-gradient 0 for equal keys", "cog_attention_backward")
def _(x):
    q, k, v = x.qkv()
    k = np.tile(k[:1], (x.m, 1))
    dq = attnspec.cog_attention_backward(q, k, v, x.normal(x.n, x.e)).dq
    return dq, np.zeros((x.n, x.d))
