import functools

import numpy as np
import pytest

import attnspec
from attnspec.golden import golden_cases
from attnspec.reference.softmax import ring

from derivatives import complex_step

RNG = np.random.default_rng(0)
q, k, v = (RNG.standard_normal((2, 3, size, width)) for size, width in ((5, 4), (7, 4), (7, 2)))
MASK = RNG.random((5, 7)) < 0.5
MASK[1], MASK[2, :4] = False, False
OPTIONS = [
    {}, {"scale": 0.7}, {"softcap": 0.8}, {"bias": RNG.standard_normal((3, 5, 7))}, {"bias": RNG.standard_normal(7)}, {"mask": MASK},
    {"mask": MASK[:1]}, {"causal": True}, {"causal": "top-left"}, {"window": (1, 0)}, {"sink": RNG.standard_normal(3)},
    {"scale": 1.5, "softcap": 2.0, "bias": RNG.standard_normal((2, 1, 5, 1)), "mask": RNG.random((2, 3, 5, 7)) < 0.7, "causal": True,
     "window": (3, 1), "sink": RNG.standard_normal(3)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 5, 7, 9])
def test_it_is_scaled_dot_product_attention(options, hosts):
    got = attnspec.ring_attention(q, k, v, hosts=hosts, **options, return_lse=True)
    want = attnspec.scaled_dot_product_attention(q, k, v, **options, return_lse=True)
    np.testing.assert_allclose(got.out, want.out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "attention_with_sink"])
def test_it_reproduces_the_golden_vectors_of_other_formulas(name):
    cases = golden_cases(name)
    assert cases
    for case in cases:
        error, tol = case.outcome(functools.partial(attnspec.ring_attention, hosts=3))
        assert error <= tol, case.name


def test_every_host_meets_every_block_once_beginning_with_its_own(monkeypatch):
    """The schedule, seen from the first numbers of the blocks that are multiplied."""
    met, original = [], ring.attention_logits
    monkeypatch.setattr(ring, "attention_logits", lambda q, k, *rest: met.append((int(q[0, 0]), int(k[0, 0]))) or original(q, k, *rest))
    numbers = np.arange(4.0)[:, None]
    attnspec.ring_attention(numbers, numbers, numbers, hosts=4)
    assert met == [(h, (h - t) % 4) for t in range(4) for h in range(4)]


def test_blocks_differ_by_one_row_at_most():
    assert ring.owned(8, 4) == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    assert ring.owned(7, 3) == [slice(0, 2), slice(2, 4), slice(4, 7)]
    assert ring.owned(1, 3) == [slice(0, 0), slice(0, 0), slice(0, 1)]


class TestSpecialValues:
    def test_by_hand(self):
        got = attnspec.ring_attention([[1.0], [0.0]], np.log([[1.0], [3.0], [4.0]]), [[8.0], [0.0], [16.0]], hosts=2, return_lse=True)
        np.testing.assert_allclose(got.out, [[9.0], [8.0]], rtol=1e-15)
        np.testing.assert_allclose(got.lse, np.log([8.0, 3.0]), rtol=1e-15)

    def test_causal_positions_are_counted_among_all(self):
        got = attnspec.ring_attention(np.zeros((4, 1)), np.zeros((4, 1)), [[2.0], [4.0], [9.0], [1.0]], hosts=4, causal=True)
        np.testing.assert_allclose(got, [[2.0], [3.0], [5.0], [4.0]], rtol=1e-15)

    def test_query_that_sees_nothing_gets_zeros(self):
        got = attnspec.ring_attention(np.zeros((3, 1)), np.zeros((2, 1)), [[2.0], [4.0]], hosts=2, causal=True, return_lse=True)
        np.testing.assert_array_equal(got.out, [[0.0], [2.0], [3.0]])
        np.testing.assert_allclose(got.lse, [-np.inf, 0.0, np.log(2)], rtol=1e-15)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_stands_behind_a_mask_stays_there(self, bad):
        spoilt = np.array([[1.0], [bad], [2.0]])
        got = attnspec.ring_attention(np.zeros((2, 1)), spoilt, spoilt, mask=np.array([[True, False, True], [True, True, True]]), hosts=2)
        assert got[0, 0] == 1.5
        assert not np.isfinite(got[1, 0])

    def test_huge_logits(self):
        got = attnspec.ring_attention([[1.0], [-1.0]], [[-1e4], [0.0], [1e4]], [[2.0], [4.0], [8.0]], hosts=3)
        np.testing.assert_array_equal(got, [[8.0], [2.0]])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, n, m):
        got = attnspec.ring_attention(np.ones((2, n, 4)), np.ones((2, m, 4)), np.ones((2, m, 5)), return_lse=True)
        np.testing.assert_array_equal(got.out, np.zeros((2, n, 5)))
        np.testing.assert_array_equal(got.lse, np.full((2, n), -np.inf if m == 0 else 0.0))


def test_grouped_heads():
    arrays = RNG.standard_normal((4, 5, 2)), RNG.standard_normal((2, 7, 2)), RNG.standard_normal((1, 7, 3))
    np.testing.assert_allclose(attnspec.ring_attention(*arrays, hosts=3, enable_gqa=True),
                               attnspec.scaled_dot_product_attention(*arrays, enable_gqa=True), rtol=1e-13, atol=1e-14)


def test_last_row_is_the_decoding_step():
    full = attnspec.ring_attention(q, k, v, causal=True)
    np.testing.assert_allclose(attnspec.ring_attention(q[..., -1:, :], k, v, causal=True), full[..., -1:, :], rtol=1e-13)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_complex_step_derivatives(name):
    arrays, options = {"q": q, "k": k, "v": v}, OPTIONS[-1]
    direction = RNG.standard_normal(arrays[name].shape)
    got = complex_step(functools.partial(attnspec.ring_attention, hosts=3, **options), arrays, name, direction)
    want = complex_step(functools.partial(attnspec.scaled_dot_product_attention, **options), arrays, name, direction)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options, message", [
    ({"hosts": 0}, "hosts: expected a whole number >= 1, got 0"),
    ({"hosts": True}, "hosts: expected a whole number >= 1, got True"),
    ({"causal": "left"}, "causal: expected False or True or 'bottom-right' or 'top-left', got 'left'"),
], ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        attnspec.ring_attention(q, k, v, **options)
