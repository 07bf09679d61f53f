"""Identities of the softmax family."""

import numpy as np

import attnspec
from attnspec.conformance.identities import identity


@identity("rows of the weights sum to 1", "scaled_dot_product_attention", "attention_weights")
def _(x):
    q, k, _ = x.qkv(x.h)
    return attnspec.attention_weights(q, k).sum(-1), np.ones((x.h, x.n))


@identity("adding a constant to a row of logits changes nothing", "scaled_dot_product_attention", "attention_weights")
def _(x):
    q, k, v = x.qkv()
    bias, row = x.normal(x.n, x.m), 5 * x.normal(x.n, 1)
    return (attnspec.scaled_dot_product_attention(q, k, v, bias=bias + row),
            attnspec.scaled_dot_product_attention(q, k, v, bias=bias))


@identity("permuting keys and values together changes nothing", "scaled_dot_product_attention")
def _(x):
    q, k, v = x.qkv()
    order = x.rng.permutation(x.m)
    return attnspec.scaled_dot_product_attention(q, k[order], v[order]), attnspec.scaled_dot_product_attention(q, k, v)


@identity("scale = 0 gives the mean of the visible values", "scaled_dot_product_attention")
def _(x):
    q, k, v = x.qkv()
    seen = x.rng.integers(1, x.m + 1)
    mask = np.arange(x.m) < seen
    return attnspec.scaled_dot_product_attention(q, k, v, scale=0.0, mask=mask), np.tile(v[:seen].mean(0), (x.n, 1))


@identity("adding a constant to a row of logits changes nothing: sum_j dbias_ij = 0", "scaled_dot_product_attention_backward")
def _(x):
    q, k, v = x.qkv(x.h)
    gradients = attnspec.scaled_dot_product_attention_backward(q, k, v, x.normal(x.h, x.n, x.e), bias=x.normal(x.h, x.n, x.m))
    return gradients.dbias.sum(-1), np.zeros((x.h, x.n))
