"""Identities of the softmax family."""

import dataclasses
import functools
import itertools

import numpy as np

import attnspec
from attnspec.conformance.identities import directional, identity


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def options(x):
    """Options of softmax attention of one batch of h heads, each set or not at random, as different ways of computing it must agree on."""
    drawn = {
        "scale": x.rng.uniform(0.1, 2.0),
        "softcap": x.rng.uniform(0.5, 5.0),
        "bias": x.normal(x.h, 1, x.m),
        "mask": x.rng.random((x.n, x.m)) < 0.8,
        "causal": x.rng.choice(["bottom-right", "top-left"]),
        "window": tuple(int(side) for side in x.rng.integers(-1, 4, 2)),
        "sink": x.normal(x.h),
    }
    return {name: value for name, value in drawn.items() if x.rng.random() < 0.5}


def same(results, others):
    """What two named tuples hold, each as one row of numbers."""
    rows = [np.concatenate([np.ravel(part) for part in result if part is not None]) for result in (results, others)]
    return rows[0], rows[1]


def derivative_of_attention(x, backward, **blocks):
    """`directional` of scaled dot-product attention with grouped heads and options at random, for the gradients of `backward`."""
    (_, k, v), groups = x.qkv(x.h), int(x.rng.integers(1, 4))
    chosen = options(dataclasses.replace(x, h=groups * x.h))
    arrays = {"q": x.normal(groups * x.h, x.n, x.d), "k": k, "v": v}
    arrays |= {name: chosen.pop(name) for name in ("bias", "sink") if name in chosen}
    do = x.normal(groups * x.h, x.n, x.e)
    gradients = backward(**arrays, do=do, **blocks, **chosen, enable_gqa=True)._asdict()

    def function(**moved):
        return attnspec.scaled_dot_product_attention(**moved, **chosen, enable_gqa=True)

    return directional(x, function, {name: gradients["d" + name] for name in arrays}, arrays, do)


# --- scaled dot-product attention ----------------------------------------------------------------------------------------------------


@identity("rows of the weights sum to 1", "scaled_dot_product_attention", "attention_weights")
def _(x):
    q, k, _ = x.qkv(x.h)
    return attnspec.attention_weights(q, k).sum(-1), np.ones((x.h, x.n))


@identity("out = P v with the weights P of attention_weights", "scaled_dot_product_attention", "attention_weights")
def _(x):
    q, k, v = x.qkv(x.h)
    chosen = options(x)
    return attnspec.scaled_dot_product_attention(q, k, v, **chosen), attnspec.attention_weights(q, k, **chosen) @ v


@identity("adding a constant to a row of logits changes nothing", "scaled_dot_product_attention")
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


@identity("where one key is visible the output is its value", "scaled_dot_product_attention")
def _(x):
    q, k, v = x.qkv()
    j = x.rng.integers(0, x.m, x.n)
    return attnspec.scaled_dot_product_attention(q, k, v, mask=np.arange(x.m) == j[:, None]), v[j]


@identity("the output lies between the smallest and the largest visible value", "scaled_dot_product_attention")
def _(x):
    q, k, v = x.qkv()
    out = attnspec.scaled_dot_product_attention(q, k, v)
    return out, np.clip(out, v.min(0), v.max(0))


@identity("a large softcap c gives the uncapped result, up to max|s|^3 / (3 c^2) in a logit s", "scaled_dot_product_attention")
def _(x):
    q, k, v = x.qkv()
    c = 1e4
    s = q @ k.T / np.sqrt(x.d)
    ds = np.max(np.abs(s)) ** 3 / (3 * c * c)                          # c tanh(s/c) = s - s^3 / (3 c^2) + ..., of alternating signs
    bound = np.expm1(2 * ds) * 2 * np.abs(v).max()                     # a weight moves by at most a factor exp(+-2 ds)
    return attnspec.scaled_dot_product_attention(q, k, v, softcap=c), attnspec.scaled_dot_product_attention(q, k, v), bound


@identity("query heads of one group that are equal give equal outputs, those of the shared head", "scaled_dot_product_attention")
def _(x):
    q, k, v = x.qkv(x.h)
    return (attnspec.scaled_dot_product_attention(np.repeat(q, 3, axis=0), k, v, enable_gqa=True),
            np.repeat(attnspec.scaled_dot_product_attention(q, k, v), 3, axis=0))


@identity("causal attention of query i is full attention over its keys", "scaled_dot_product_attention")
def _(x):
    q, k, v = x.qkv()
    i = int(x.rng.integers(0, x.n))
    seen = max(i + 1 + x.m - x.n, 0)
    return (attnspec.scaled_dot_product_attention(q, k, v, causal="bottom-right")[i:i + 1],
            attnspec.scaled_dot_product_attention(q[i:i + 1], k[:seen], v[:seen]))


@identity("adding a constant to a row of logits changes nothing: sum_j dbias_ij = 0", "scaled_dot_product_attention_backward")
def _(x):
    q, k, v = x.qkv(x.h)
    gradients = attnspec.scaled_dot_product_attention_backward(q, k, v, x.normal(x.h, x.n, x.e), bias=x.normal(x.h, x.n, x.m))
    return gradients.dbias.sum(-1), np.zeros((x.h, x.n))


@identity("adding a constant to all values adds it to the output: sum_j dv_j = sum_i do_i", "scaled_dot_product_attention_backward")
def _(x):
    do = x.normal(x.n, x.e)
    return attnspec.scaled_dot_product_attention_backward(*x.qkv(), do).dv.sum(0), do.sum(0)


@identity("q and k enter by their product: <dq, q> = <dk, k>", "scaled_dot_product_attention_backward")
def _(x):
    q, k, v = x.qkv(x.h)
    gradients = attnspec.scaled_dot_product_attention_backward(q, k, v, x.normal(x.h, x.n, x.e), **options(x))
    return np.sum(gradients.dq * q), np.sum(gradients.dk * k)


@identity("its gradients are the derivative along any direction, by complex step", "scaled_dot_product_attention_backward")
def _(x):
    return derivative_of_attention(x, attnspec.scaled_dot_product_attention_backward)


# --- multi-query attention -----------------------------------------------------------------------------------------------------------


@identity("it is grouped-query attention with one head of keys and values", "multi_query_attention")
def _(x):
    a = x.arrays("multi_query_attention", h=x.h)
    k, v = a["context"] @ a["w_k"], a["context"] @ a["w_v"]
    heads = attnspec.scaled_dot_product_attention(a["x"] @ a["w_q"], k[None], v[None], enable_gqa=True)
    return attnspec.multi_query_attention(**a), np.einsum("hne,hce->nc", heads, a["w_o"])


@identity("it is multi-head attention whose keys and values are projected alike in all heads", "multi_query_attention")
def _(x):
    a = x.arrays("multi_query_attention", h=x.h)
    w_k, w_v = (np.stack([a[name]] * x.h) for name in ("w_k", "w_v"))
    heads = attnspec.scaled_dot_product_attention(a["x"] @ a["w_q"], a["context"] @ w_k, a["context"] @ w_v)
    concatenated = np.concatenate(list(heads), axis=-1) @ np.concatenate(list(a["w_o"]), axis=-1).T
    return attnspec.multi_query_attention(**a), concatenated


@identity("a row of causal self-attention is the decoding step over the keys so far", "multi_query_attention")
def _(x):
    a = x.arrays("multi_query_attention", h=x.h)
    a["context"] = a["x"]
    t = int(x.rng.integers(1, x.n + 1))
    step = {**a, "x": a["x"][t - 1:t], "context": a["x"][:t]}
    return attnspec.multi_query_attention(**a, causal=True)[t - 1:t], attnspec.multi_query_attention(**step)


@identity("a mask removes keys: attention over the context that is left", "multi_query_attention")
def _(x):
    a = x.arrays("multi_query_attention", h=x.h)
    seen = x.rng.random(x.m) < 0.6
    got = attnspec.multi_query_attention(**a, mask=seen)
    return got, attnspec.multi_query_attention(**{**a, "context": a["context"][seen]})


@identity("a mask with a head axis hides a key from one head: that head's part of y, by itself, is without it", "multi_query_attention")
def _(x):
    a = x.arrays("multi_query_attention", h=x.h)
    mask = x.rng.random((x.h, x.n, x.m)) < 0.6
    k, v = a["context"] @ a["w_k"], a["context"] @ a["w_v"]
    y = np.zeros((x.n, a["x"].shape[-1]))
    for h, i in np.ndindex(x.h, x.n):
        q_i, seen = a["x"][i : i + 1] @ a["w_q"][h], mask[h, i]
        y[i] += (attnspec.scaled_dot_product_attention(q_i, k[seen], v[seen]) @ a["w_o"][h].T)[0]
    return attnspec.multi_query_attention(**a, mask=mask), y


# --- sinks ---------------------------------------------------------------------------------------------------------------------------


@identity("a sink z is a gate: out = sigma(L - z) softmax attention, L being the log-sum-exp without it", "attention_with_sink")
def _(x):
    q, k, v = x.qkv(x.h)
    sink = 3 * x.normal(x.h)
    plain = attnspec.scaled_dot_product_attention(q, k, v, return_lse=True)
    return attnspec.attention_with_sink(q, k, v, sink), sigmoid(plain.lse - sink[:, None])[..., None] * plain.out


@identity("rows of the weights sum to sigma(L - z)", "attention_with_sink")
def _(x):
    q, k, v = x.qkv(x.h)
    sink = 3 * x.normal(x.h)
    L = attnspec.scaled_dot_product_attention(q, k, v, return_lse=True).lse
    return attnspec.attention_with_sink(q, k, v, sink, return_weights=True).weights.sum(-1), sigmoid(L - sink[:, None])


@identity("a sink at -inf is none", "attention_with_sink", "scaled_dot_product_attention_backward")
def _(x):
    q, k, v = x.qkv(x.h)
    do, none = x.normal(x.h, x.n, x.e), np.full(x.h, -np.inf)
    chosen = {name: value for name, value in options(x).items() if name != "sink"}
    plain = (*attnspec.scaled_dot_product_attention(q, k, v, **chosen, return_lse=True),
             *attnspec.scaled_dot_product_attention_backward(q, k, v, do, **chosen), np.zeros(x.h))
    return same((*attnspec.attention_with_sink(q, k, v, none, **chosen, return_lse=True),
                 *attnspec.scaled_dot_product_attention_backward(q, k, v, do, **chosen, sink=none)), plain)


@identity("a constant added to a row of logits and to the sink changes nothing", "attention_with_sink")
def _(x):
    q, k, v = x.qkv(x.h)
    sink, shift = x.normal(x.h), 5 * x.normal(x.h)
    return (attnspec.attention_with_sink(q, k, v, sink + shift, bias=shift[:, None, None]), attnspec.attention_with_sink(q, k, v, sink))


@identity("a sink of 0 is softmax-one", "attention_with_sink", "softmax_one_attention")
def _(x):
    q, k, v = x.qkv(x.h)
    return attnspec.attention_with_sink(q, k, v, np.zeros(x.h)), attnspec.softmax_one_attention(q, k, v)


@identity("where all logits are -inf the output is 0", "attention_with_sink", "softmax_one_attention")
def _(x):
    q, k, v = x.qkv(x.h)
    bias = np.full((x.n, x.m), -np.inf)
    return (attnspec.attention_with_sink(q, k, v, x.normal(x.h), bias=bias) + attnspec.softmax_one_attention(q, k, v, bias=bias),
            np.zeros((x.h, x.n, x.e)))


@identity("softmax-one is softmax with one more key and value, both zero", "softmax_one_attention")
def _(x):
    q, k, v = x.qkv()
    one_more = [np.concatenate([array, np.zeros((1, array.shape[1]))]) for array in (k, v)]
    return attnspec.softmax_one_attention(q, k, v), attnspec.scaled_dot_product_attention(q, *one_more)


@identity("softmax-one is sigma(L) softmax attention, L being the log-sum-exp", "softmax_one_attention")
def _(x):
    q, k, v = x.qkv()
    plain = attnspec.scaled_dot_product_attention(q, k, v, return_lse=True)
    return attnspec.softmax_one_attention(q, k, v), sigmoid(plain.lse)[..., None] * plain.out


@identity("a mask removes keys: every query has attention over those it may see", "scaled_dot_product_attention", "softmax_one_attention",
          "attention_with_sink")
def _(x):
    q, k, v = x.qkv()
    mask, z = x.rng.random((x.n, x.m)) < 0.6, x.normal(1)
    functions = (attnspec.scaled_dot_product_attention, attnspec.softmax_one_attention,
                 lambda q, k, v, **options: attnspec.attention_with_sink(q[None], k[None], v[None], z, **options)[0])
    got = [f(q, k, v, mask=mask) for f in functions]
    return got, [np.concatenate([f(q[i : i + 1], k[mask[i]], v[mask[i]]) for i in range(x.n)]) for f in functions]


@identity("dsink is the derivative of the gate sigma(L - z)", "scaled_dot_product_attention_backward")
def _(x):
    q, k, v = x.qkv(x.h)
    sink, do = x.normal(x.h), x.normal(x.h, x.n, x.e)
    plain = attnspec.scaled_dot_product_attention(q, k, v, return_lse=True)
    gate = sigmoid(plain.lse - sink[:, None])
    dz = -np.sum(gate * (1 - gate) * np.sum(do * plain.out, axis=-1), axis=-1)        # of sigma(L - z) <dO, softmax attention>
    return attnspec.scaled_dot_product_attention_backward(q, k, v, do, sink=sink).dsink, dz


# --- by blocks -----------------------------------------------------------------------------------------------------------------------


@identity("it is scaled dot-product attention, whatever the chunks", "online_softmax_attention")
def _(x):
    q, k, v = x.qkv(x.h)
    chosen = {**options(x), "return_lse": True}
    query_chunk, key_chunk = (int(size) for size in x.rng.integers(1, 10, 2))
    return same(attnspec.online_softmax_attention(q, k, v, query_chunk=query_chunk, key_chunk=key_chunk, **chosen),
                attnspec.scaled_dot_product_attention(q, k, v, **chosen))


@identity("it is scaled dot-product attention, whatever the number of hosts", "ring_attention")
def _(x):
    q, k, v = x.qkv(x.h)
    chosen = {**options(x), "return_lse": True}
    return same(attnspec.ring_attention(q, k, v, hosts=int(x.rng.integers(1, 10)), **chosen),
                attnspec.scaled_dot_product_attention(q, k, v, **chosen))


@identity("a host may meet the key blocks in any order: keys and values rolled around the ring change nothing", "ring_attention")
def _(x):
    q, k, v = x.qkv(x.h)
    hosts, turn = (int(number) for number in x.rng.integers(1, 10, 2))
    return (attnspec.ring_attention(q, np.roll(k, turn, axis=-2), np.roll(v, turn, axis=-2), hosts=hosts),
            attnspec.ring_attention(q, k, v, hosts=hosts))


@identity("adding a constant to all values adds it to the output: sum_j dv_j = sum_i do_i", "blockwise_attention_backward")
def _(x):
    do = x.normal(x.n, x.e)
    return attnspec.blockwise_attention_backward(*x.qkv(), do, query_block=3, key_block=2).dv.sum(0), do.sum(0)


@identity("it is scaled_dot_product_attention_backward, whatever the blocks", "blockwise_attention_backward")
def _(x):
    q, k, v = x.qkv(x.h)
    chosen, do = options(x), x.normal(x.h, x.n, x.e)
    query_block, key_block = (int(size) for size in x.rng.integers(1, 10, 2))
    return same(attnspec.blockwise_attention_backward(q, k, v, do, query_block=query_block, key_block=key_block, **chosen),
                attnspec.scaled_dot_product_attention_backward(q, k, v, do, **chosen))


@identity("its gradients are the derivative along any direction, by complex step", "blockwise_attention_backward")
def _(x):
    query_block, key_block = (int(size) for size in x.rng.integers(1, 10, 2))
    return derivative_of_attention(x, attnspec.blockwise_attention_backward, query_block=query_block, key_block=key_block)


def partials(x, pieces):
    """Partials of `pieces` consecutive sets of keys, some of them empty, and the attention over all keys."""
    q, k, v = x.qkv(x.h)
    cuts = [0, *sorted(x.rng.integers(0, x.m + 1, pieces - 1)), x.m]
    parts = [attnspec.attention_partial(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(cuts)]
    return parts, attnspec.scaled_dot_product_attention(q, k, v, return_lse=True)


def merge(a, b):
    return attnspec.merge_attention_partials(*a, *b)


@identity("partials of all keys, split anywhere, merge to scaled dot-product attention", "attention_partial", "merge_attention_partials",
          "finish_attention_partial")
def _(x):
    parts, full = partials(x, 4)
    return same(attnspec.finish_attention_partial(*functools.reduce(merge, parts)), full)


@identity("merging is associative: a tree gives what a chain gives", "merge_attention_partials")
def _(x):
    (a, b, c, d), _ = partials(x, 4)
    return same(merge(merge(a, b), merge(c, d)), merge(merge(merge(a, b), c), d))


@identity("merging is commutative", "merge_attention_partials")
def _(x):
    (a, b), _ = partials(x, 2)
    return same(merge(a, b), merge(b, a))


@identity("(-inf, 0, 0) merges with a partial to that partial, and is the partial of keys that nobody sees", "merge_attention_partials",
          "attention_partial")
def _(x):
    q, k, v = x.qkv()
    a, unseen = attnspec.attention_partial(q, k, v), attnspec.attention_partial(q, k, v, mask=np.zeros(x.m, bool))
    nothing = (np.full(x.n, -np.inf), np.zeros(x.n), np.zeros((x.n, x.e)))
    rows = [same(merge(a, nothing), a), same(merge(nothing, a), a), same(unseen, nothing), same(merge(unseen, unseen), nothing)]
    return tuple(np.concatenate(side) for side in zip(*rows, strict=True))


@identity("a partial merged with itself has l and o doubled, the same m and the same output", "merge_attention_partials",
          "finish_attention_partial")
def _(x):
    (a,), full = partials(x, 1)
    twice = merge(a, a)
    out = attnspec.finish_attention_partial(*twice).out
    return same((*twice, out), (a.m, 2 * a.l, 2 * a.o, full.out))


@identity("normalised: L = log(e^L1 + e^L2), out = out2 - sigma(L1 - L2) (out2 - out1)", "merge_attention_partials",
          "finish_attention_partial")
def _(x):
    q, k, v = x.qkv()
    a, b = attnspec.attention_partial(q, k, v), attnspec.attention_partial(q, x.normal(x.m, x.d), x.normal(x.m, x.e))
    (out1, _, L1), (out2, _, L2) = attnspec.finish_attention_partial(*a), attnspec.finish_attention_partial(*b)
    joined = out2 - sigmoid(L1 - L2)[:, None] * (out2 - out1), np.logaddexp(L1, L2)
    out, _, L = attnspec.finish_attention_partial(*merge(a, b))
    return same((out, L), joined)


@identity("merging (z, 1, 0) is a sink z", "merge_attention_partials", "attention_with_sink")
def _(x):
    q, k, v = x.qkv(1)
    z = float(x.normal())
    sink = (np.full((1, x.n), z), np.ones((1, x.n)), np.zeros((1, x.n, x.e)))
    merged = attnspec.finish_attention_partial(*merge(attnspec.attention_partial(q, k, v), sink))
    return same(merged, attnspec.attention_with_sink(q, k, v, np.array([z]), return_lse=True))
