"""Merging partials: the reference's, and attention over halves of the keys."""

import numpy as np

from attnspec import numba_kernels, reference

RNG = np.random.default_rng(0)


def test_merged_halves_are_the_whole():
    q, k, v = (RNG.standard_normal((2, 3, n, 8)) for n in (300, 40, 40))
    halves = [reference.attention_partial(q, k[..., part, :], v[..., part, :]) for part in (slice(0, 15), slice(15, 40))]
    merged = numba_kernels.merge_attention_partials(*halves[0], *halves[1])
    want = reference.merge_attention_partials(*halves[0], *halves[1])
    for ours, theirs in zip(merged, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-14, atol=1e-15)
    out = reference.finish_attention_partial(*merged).out
    np.testing.assert_allclose(out, reference.scaled_dot_product_attention(q, k, v), rtol=0, atol=1e-14)


def test_special_partials():
    inf, nan = np.inf, np.nan
    m1, m2 = np.array([[-inf], [-inf], [0], [inf], [nan], [-inf]]), np.array([[-inf], [1], [-inf], [0], [0], [nan]])
    l1, l2 = np.array([[0.0], [0], [2], [1], [1], [0]]), np.array([[0.0], [3], [0], [1], [1], [1]])
    o1, o2 = l1[..., None] * np.ones(2), 2 * l2[..., None] * np.ones(2)
    got, want = numba_kernels.merge_attention_partials(m1, l1, o1, m2, l2, o2), reference.merge_attention_partials(m1, l1, o1, m2, l2, o2)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_partials_broadcast():
    m1, l1, o1 = RNG.standard_normal((3, 1, 5)), np.ones(5), RNG.standard_normal((2, 5, 4))
    got, want = (f(m1, l1, o1, m1[0], l1, o1[0]) for f in (numba_kernels.merge_attention_partials, reference.merge_attention_partials))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-14)
