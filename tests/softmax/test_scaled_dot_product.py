import mpmath
import numpy as np
import pytest

import attnspec

from derivatives import assert_gradients

RNG = np.random.default_rng(0)
q, k, v, do = (RNG.standard_normal((2, 3, size, width)) for size, width in ((4, 5), (6, 5), (6, 2), (4, 2)))
MASK = RNG.random((4, 6)) < 0.6
MASK[2] = False
OPTIONS = [
    {}, {"scale": 0.7}, {"scale": -2.0}, {"softcap": 0.8}, {"bias": RNG.standard_normal((3, 4, 6))}, {"mask": MASK}, {"causal": True},
    {"causal": "top-left"}, {"window": (1, 0)}, {"window": (None, 2), "causal": "bottom-right"}, {"window": (2, -1), "causal": "top-left"},
    {"sink": RNG.standard_normal(3)}, {"sink": RNG.standard_normal(3), "mask": MASK},
    {"scale": 1.5, "softcap": 2.0, "bias": RNG.standard_normal((2, 1, 4, 1)), "mask": RNG.random((2, 3, 4, 6)) < 0.7,
     "causal": True, "window": (3, 1), "sink": RNG.standard_normal(3)},
]
NAMES = [" ".join(options) or "plain" for options in OPTIONS]


def by_loops(q, k, v, scale=None, softcap=None, bias=0.0, mask=True, causal=False, window=(None, None), sink=None):
    """The definition, a number at a time, in 40 digits."""
    lead, (n, d), m = q.shape[:-2], q.shape[-2:], k.shape[-2]
    bias, mask = (np.broadcast_to(x, (*lead, n, m)) for x in (bias, mask))
    out, lse = np.zeros((*lead, n, v.shape[-1])), np.full((*lead, n), -np.inf)
    with mpmath.workdps(40):
        scale = 1 / mpmath.sqrt(d) if scale is None else mpmath.mpf(scale)
        for *b, i in np.ndindex(lead + (n,)):
            b = tuple(b)
            total, sums = mpmath.exp(mpmath.mpf(sink[b[-1]])) if sink is not None else mpmath.mpf(0), [mpmath.mpf(0)] * v.shape[-1]
            for j in range(m):
                own = i + m - n if causal in (True, "bottom-right") else i
                left, right = (side if side not in (None, -1) else n + m for side in window)
                if not mask[*b, i, j] or (causal and j > own) or j < own - left or j > own + right:
                    continue
                s = scale * sum(mpmath.mpf(q[*b, i, c]) * mpmath.mpf(k[*b, j, c]) for c in range(d))
                if softcap:
                    s = softcap * mpmath.tanh(s / softcap)
                p = mpmath.exp(s + mpmath.mpf(bias[*b, i, j]))
                total += p
                sums = [one + p * mpmath.mpf(x) for one, x in zip(sums, v[*b, j], strict=True)]
            if total:
                out[*b, i], lse[*b, i] = [float(one / total) for one in sums], float(mpmath.log(total))
    return out, lse


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_against_the_definition(options):
    got = attnspec.scaled_dot_product_attention(q, k, v, **options, return_weights=True, return_lse=True)
    out, lse = by_loops(q, k, v, **options)
    np.testing.assert_allclose(got.out, out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(got.lse, lse, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(got.weights @ v, out, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("n, m", [(5, 3), (3, 5), (1, 4), (4, 1)])
@pytest.mark.parametrize("options", [
    {"causal": True}, {"causal": "top-left"}, {"window": (1, 1)}, {"causal": True, "window": (1, 0)},
], ids=str)
def test_against_the_definition_at_other_sizes(n, m, options):
    arrays = RNG.standard_normal((n, 2)), RNG.standard_normal((m, 2)), RNG.standard_normal((m, 3))
    np.testing.assert_allclose(attnspec.scaled_dot_product_attention(*arrays, **options), by_loops(*arrays, **options)[0],
                               rtol=1e-13, atol=1e-14)


class TestSpecialValues:
    def test_by_hand(self):
        result = attnspec.scaled_dot_product_attention([[1.0]], np.log([[1.0], [3.0]]), [[8.0, 0.0], [4.0, 1.0]],
                                                       return_weights=True, return_lse=True)
        np.testing.assert_allclose(result.weights, [[0.25, 0.75]], rtol=1e-15)
        np.testing.assert_allclose(result.out, [[5.0, 0.75]], rtol=1e-15)
        np.testing.assert_allclose(result.lse, [np.log(4)], rtol=1e-15)

    @pytest.mark.parametrize("sink, lse", [(None, -np.inf), (0.5, 0.5)])
    def test_query_that_sees_nothing_gets_zeros(self, sink, lse):
        mask = np.array([[True, False], [False, False]])
        result = attnspec.scaled_dot_product_attention(np.zeros((2, 1)), np.zeros((2, 1)), [[3.0], [5.0]], mask=mask, sink=sink,
                                                       return_weights=True, return_lse=True)
        np.testing.assert_array_equal(result.out[1], [0.0])
        np.testing.assert_array_equal(result.weights[1], [0.0, 0.0])
        assert result.lse[1] == lse
        assert result.weights[0, 1] == 0.0

    def test_one_key(self):
        result = attnspec.scaled_dot_product_attention([[0.3], [1e4]], [[-7.0]], [[2.0, 3.0]], return_lse=True)
        np.testing.assert_array_equal(result.out, [[2.0, 3.0], [2.0, 3.0]])
        np.testing.assert_allclose(result.lse, [-2.1, -7e4], rtol=1e-15)

    def test_more_queries_than_keys(self):
        arrays = np.zeros((3, 1)), np.zeros((2, 1)), [[2.0], [4.0]]
        np.testing.assert_array_equal(attnspec.scaled_dot_product_attention(*arrays, causal=True), [[0.0], [2.0], [3.0]])
        np.testing.assert_array_equal(attnspec.scaled_dot_product_attention(*arrays, causal="top-left"), [[2.0], [3.0], [3.0]])

    def test_bias_of_minus_infinity(self):
        bias = [[-np.inf, 0.0], [-np.inf, -np.inf]]
        got = attnspec.scaled_dot_product_attention(np.ones((2, 1)), [[5.0], [1.0]], [[3.0], [4.0]], bias=bias, return_lse=True)
        np.testing.assert_array_equal(got.out, [[4.0], [0.0]])
        np.testing.assert_array_equal(got.lse, [1.0, -np.inf])

    def test_huge_logits(self):
        got = attnspec.scaled_dot_product_attention([[1e4], [-1e4]], [[1.0], [1.0], [-1.0]], [[2.0], [4.0], [8.0]])
        np.testing.assert_array_equal(got, [[3.0], [8.0]])

    def test_equal_logits(self):
        out = attnspec.scaled_dot_product_attention([[1.0]], np.ones((3, 1)), [[1.0], [2.0], [6.0]])
        np.testing.assert_allclose(out, [[3.0]], rtol=1e-15)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"bias": [[0.5, -np.inf, 0.0], [0.5, 0.0, 0.0]]}, {"sink": 1.0},
                                         {"softcap": np.inf}], ids=str)
    def test_what_stands_behind_a_mask_stays_there(self, bad, options):
        spoilt, clean = np.array([[1.0], [0.0], [2.0]]), np.array([[1.0], [0.0], [2.0]])
        spoilt[1] = bad
        mask = np.array([[True, False, True], [True, True, True]])
        got = attnspec.scaled_dot_product_attention(np.ones((2, 1)), spoilt, spoilt, mask=mask, **options, return_weights=True)
        want = attnspec.scaled_dot_product_attention(np.ones((2, 1)), clean, clean, mask=mask, **options, return_weights=True)
        np.testing.assert_array_equal(got.out[0], want.out[0])
        np.testing.assert_array_equal(got.weights[0], want.weights[0])
        assert not np.isfinite(got.out[1])

    def test_a_visible_infinite_logit_makes_its_row_not_a_number(self):
        got = attnspec.scaled_dot_product_attention(np.ones((2, 1)), np.zeros((2, 1)), [[1.0], [2.0]], bias=[[np.inf, 0.0], [0.0, 0.0]])
        np.testing.assert_array_equal(got, [[np.nan], [1.5]])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    @pytest.mark.parametrize("options", [{}, {"causal": True}, {"sink": [1.0, 2.0]}], ids=str)
    def test_no_queries_or_no_keys(self, n, m, options):
        arrays = np.ones((2, n, 4)), np.ones((2, m, 4)), np.ones((2, m, 5))
        got = attnspec.scaled_dot_product_attention(*arrays, **options, return_lse=True)
        np.testing.assert_array_equal(got.out, np.zeros((2, n, 5)))
        want = np.broadcast_to(np.array(options.get("sink", [-np.inf] * 2))[:, None], (2, n)) if m == 0 else np.zeros((2, 0))
        np.testing.assert_array_equal(got.lse, want)
        gradients = attnspec.scaled_dot_product_attention_backward(*arrays, np.ones((2, n, 5)), **options)
        for gradient, array in zip(gradients[:3], arrays, strict=True):
            np.testing.assert_array_equal(gradient, np.zeros(array.shape))

    def test_no_features(self):
        out = attnspec.scaled_dot_product_attention(np.ones((2, 0)), np.ones((2, 0)), [[1.0], [3.0]])
        np.testing.assert_array_equal(out, [[2.0], [2.0]])


class TestOptions:
    def test_scale_is_of_the_head_and_one_over_its_root(self):
        q_nine = np.zeros((1, 9))
        q_nine[0, 0] = 3.0
        k_nine = np.zeros((2, 9))
        k_nine[1, 0] = np.log(2.0)
        np.testing.assert_allclose(attnspec.scaled_dot_product_attention(q_nine, k_nine, [[0.0], [3.0]]), [[2.0]], rtol=1e-15)

    def test_softcap_comes_before_bias_and_mask(self):
        got = attnspec.scaled_dot_product_attention([[1.0]], [[1e6], [1e6], [0.0]], np.eye(3), softcap=np.log(2.0),
                                                    bias=[0.0, np.log(3.0), 0.0], mask=[True, True, False])
        np.testing.assert_allclose(got, [[0.25, 0.75, 0.0]], rtol=1e-15)

    @pytest.mark.parametrize("options, seen", [
        ({"causal": True}, ["1100", "1110", "1111"]),
        ({"causal": "bottom-right"}, ["1100", "1110", "1111"]),
        ({"causal": "top-left"}, ["1000", "1100", "1110"]),
        ({"window": (1, 0)}, ["1000", "1100", "0110"]),
        ({"window": (0, 1)}, ["1100", "0110", "0011"]),
        ({"window": (None, 0)}, ["1000", "1100", "1110"]),
        ({"window": (-1, 0)}, ["1000", "1100", "1110"]),
        ({"window": (1, 0), "causal": True}, ["1100", "0110", "0011"]),
        ({"window": (0, 5), "causal": True}, ["0100", "0010", "0001"]),
        ({"window": (0, 5), "causal": "top-left"}, ["1000", "0100", "0010"]),
        ({"window": (1, 1), "causal": False, "mask": [True, False, True, True]}, ["1000", "1010", "0011"]),
    ], ids=str)
    def test_what_is_visible(self, options, seen):
        P = attnspec.scaled_dot_product_attention(np.zeros((3, 1)), np.zeros((4, 1)), np.eye(4), **options)
        assert ["".join("01"[int(p > 0)] for p in row) for row in P] == seen

    def test_neighbouring_query_heads_share_a_key_head(self):
        got = attnspec.scaled_dot_product_attention(np.ones((6, 1, 1)), np.ones((2, 1, 1)), [[[1.0]], [[2.0]]], enable_gqa=True)
        np.testing.assert_array_equal(got[:, 0, 0], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0])

    def test_keys_and_values_may_differ_in_their_number_of_heads(self):
        keys, values = RNG.standard_normal((2, 5, 3)), RNG.standard_normal((1, 5, 2))
        queries = RNG.standard_normal((4, 2, 3))
        np.testing.assert_array_equal(
            attnspec.scaled_dot_product_attention(queries, keys, values, enable_gqa=True),
            attnspec.scaled_dot_product_attention(queries, keys[[0, 0, 1, 1]], values[[0, 0, 0, 0]]))

    def test_sink_is_neither_scaled_nor_capped_nor_biased_nor_masked(self):
        got = attnspec.scaled_dot_product_attention(np.zeros((1, 1)), np.zeros((2, 1)), [[2.0], [7.0]], scale=0.1, softcap=0.01,
                                                    bias=[[np.log(2.0)]], mask=[True, False], sink=np.log(6.0))
        np.testing.assert_allclose(got, [[2 * 2 / 8]], rtol=1e-15)

    def test_fields_that_were_not_asked_for_are_none(self):
        assert isinstance(attnspec.scaled_dot_product_attention(q, k, v), np.ndarray)
        assert attnspec.scaled_dot_product_attention(q, k, v, return_weights=True).lse is None
        assert attnspec.scaled_dot_product_attention(q, k, v, return_lse=True).weights is None

    @pytest.mark.parametrize("options, message", [
        ({"softcap": -1.0}, r"softcap: expected a number >= 0, got -1.0"),
        ({"scale": "large"}, r"scale: expected a number, got 'large'"),
        ({"causal": "left"}, r"causal: expected False or True or 'bottom-right' or 'top-left', got 'left'"),
        ({"causal": 1}, r"causal: expected .* got 1"),
        ({"window": 3}, r"window: expected a pair \(left, right\), got 3"),
        ({"window": (1, -2)}, r"window: expected a whole number >= 0, got -2"),
        ({"bias": np.ones((4, 5))}, r"bias: expected a shape that broadcasts to \(..., n, m\) with m = 6 as in k, got \(4, 5\)"),
        ({"mask": np.ones((3, 6), bool)}, r"mask: expected a shape that broadcasts to \(..., n, m\) with n = 4 as in q, got \(3, 6\)"),
        ({"sink": np.ones(2)}, r"sink: expected a shape that broadcasts to \(h,\) with h = 3 as in q, got \(2,\)"),
    ], ids=lambda x: x if isinstance(x, str) else str(list(x)))
    @pytest.mark.parametrize("backward", [False, True])
    def test_wrong_options_are_refused(self, options, message, backward):
        name, arrays = ("scaled_dot_product_attention_backward", (q, k, v, do)) if backward else ("scaled_dot_product_attention", (q, k, v))
        with pytest.raises(ValueError, match=f"^{message}$"):
            getattr(attnspec, name)(*arrays, **options)

    def test_additive_masks_and_grouped_heads_are_refused_where_they_would_pass_silently(self):
        with pytest.raises(TypeError, match=r"^mask: expected booleans \(True = may attend\)"):
            attnspec.scaled_dot_product_attention(q, k, v, mask=np.zeros((4, 6)))
        with pytest.raises(ValueError, match=r"^k: leading axes .* for grouped heads set enable_gqa=True$"):
            attnspec.scaled_dot_product_attention(np.ones((6, 2, 1)), np.ones((2, 2, 1)), np.ones((2, 2, 1)))


@pytest.mark.parametrize("causal", [True, "bottom-right"])
def test_last_row_is_the_decoding_step(causal):
    full = attnspec.scaled_dot_product_attention(q, k, v, causal=causal, window=(3, 0))
    step = attnspec.scaled_dot_product_attention(q[..., -1:, :], k, v, causal=causal, window=(3, 0))
    np.testing.assert_allclose(step, full[..., -1:, :], rtol=1e-13)


class TestGradients:
    def check(self, arrays, cotangent, **options):
        """All gradients, those of a bias and a sink among `arrays` included, against the complex step."""
        gradients = attnspec.scaled_dot_product_attention_backward(**arrays, do=cotangent, **options)
        named = {name: getattr(gradients, f"d{name}") for name in arrays}
        for name, array in arrays.items():
            assert named[name].shape == np.shape(array), name
        assert (gradients.dbias is None) == ("bias" not in arrays)
        assert (gradients.dsink is None) == ("sink" not in arrays)
        assert_gradients(lambda **a: attnspec.scaled_dot_product_attention(**a, **options), named, arrays, cotangent)

    @pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
    def test_options(self, options):
        learned = {name: value for name, value in options.items() if name in ("bias", "sink")}
        self.check({"q": q, "k": k, "v": v, **learned}, do, **{name: options[name] for name in options if name not in learned})

    def test_of_grouped_heads(self):
        arrays = {"q": RNG.standard_normal((2, 6, 3, 2)), "k": RNG.standard_normal((2, 2, 5, 2)), "v": RNG.standard_normal((2, 3, 5, 4)),
                  "bias": RNG.standard_normal((6, 3, 5)), "sink": RNG.standard_normal(6)}
        self.check(arrays, RNG.standard_normal((2, 6, 3, 4)), enable_gqa=True, softcap=1.0)

    @pytest.mark.parametrize("lead", [
        {"q": (2,)}, {"k": (2,)}, {"v": (2,)}, {"do": (2,)}, {"mask": (2,)}, {"q": (2, 1), "k": (3,)}, {"q": (1,), "k": (1,), "v": (2,)},
        {"v": (2,), "do": (1,)}, {"q": (2, 3), "k": (1, 3), "v": (2, 1), "do": (2, 3)},
    ], ids=str)
    def test_of_broadcast_axes(self, lead):
        shapes = {"q": (4, 3), "k": (5, 3), "v": (5, 2), "do": (4, 2)}
        arrays = {name: RNG.standard_normal(lead.get(name, ()) + shape) for name, shape in shapes.items()}
        cotangent = arrays.pop("do")
        self.check(arrays, cotangent, mask=RNG.random(lead.get("mask", ()) + (4, 5)) < 0.8)

    @pytest.mark.parametrize("shape", [(), (6,), (1,), (4, 1), (4, 6), (1, 6), (3, 1, 1), (2, 1, 4, 6), (3, 4, 6)], ids=str)
    def test_of_a_broadcast_bias(self, shape):
        self.check({"q": q, "k": k, "v": v, "bias": RNG.standard_normal(shape)}, do, causal=True)

    def test_of_a_bias_with_more_axes_than_the_rest(self):
        arrays = {"q": q[0, 0], "k": k[0, 0], "v": v[0, 0], "bias": RNG.standard_normal((2, 4, 6))}
        self.check(arrays, RNG.standard_normal((2, 4, 2)), softcap=1.5)

    @pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
    def test_of_a_broadcast_sink(self, shape):
        self.check({"q": q, "k": k, "v": v, "sink": RNG.standard_normal(shape)}, do, mask=MASK)

    def test_of_one_head_without_head_axis(self):
        self.check({"q": q[0, 0], "k": k[0, 0], "v": v[0, 0], "sink": np.array(0.3)}, do[0, 0])

    def test_with_a_bias_of_minus_infinity(self):
        bias = np.where(MASK, 0.5, -np.inf)
        with_bias = attnspec.scaled_dot_product_attention_backward(q, k, v, do, bias=bias)
        with_mask = attnspec.scaled_dot_product_attention_backward(q, k, v, do, mask=MASK)
        for got, want in zip(with_bias[:3], with_mask[:3], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)
        np.testing.assert_array_equal(with_bias.dbias[..., ~MASK], 0.0)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("options", [{}, {"softcap": 0.8}, {"bias": np.ones((4, 6))}, {"sink": np.zeros(3)}],
                             ids=lambda options: " ".join(options) or "plain")
    def test_what_stands_behind_a_mask_stays_there(self, bad, options):
        mask = np.ones((4, 6), bool)
        mask[1], mask[:, 2] = False, False
        spoilt_q, spoilt_k, spoilt_v = q.copy(), k.copy(), v.copy()
        spoilt_q[..., 1, :], spoilt_k[..., 2, :], spoilt_v[..., 2, :] = bad, bad, bad
        got = attnspec.scaled_dot_product_attention_backward(spoilt_q, spoilt_k, spoilt_v, do, mask=mask, **options)
        want = attnspec.scaled_dot_product_attention_backward(q, k, v, do, mask=mask, **options)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-14) if other is not None else None
        np.testing.assert_array_equal(got.dq[..., 1, :], 0.0)
        np.testing.assert_array_equal(got.dk[..., 2, :], 0.0)
        np.testing.assert_array_equal(got.dv[..., 2, :], 0.0)

    def test_not_a_number_reaches_only_what_it_was_seen_by(self):
        spoilt = k.copy()
        spoilt[..., 2, :] = np.nan
        mask = np.ones((4, 6), bool)
        mask[:3, 2], mask[3, 4] = False, False                         # only query 3 sees key 2, and it does not see key 4
        got = attnspec.scaled_dot_product_attention_backward(q, spoilt, v, do, mask=mask)
        assert np.all(np.isnan(got.dq).any((0, 1, 3)) == [False, False, False, True])
        assert np.all(np.isnan(got.dv).any((0, 1, 3)) == [True, True, True, True, False, True])
        assert np.all(np.isnan(got.dk).any((0, 1, 3)) == [True, True, True, True, False, True])

    def test_with_a_sink_at_minus_infinity(self):
        got = attnspec.scaled_dot_product_attention_backward(q, k, v, do, mask=MASK, sink=[-np.inf, -np.inf, -np.inf])
        want = attnspec.scaled_dot_product_attention_backward(q, k, v, do, mask=MASK)
        for one, other in zip(got[:3], want[:3], strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(got.dsink, np.zeros(3))

    def test_by_hand(self):
        # Two keys of weight 1/2 and values 3, 1: o = 2, dS = 1/2 (v - 2) = 1/2, -1/2.
        gradients = attnspec.scaled_dot_product_attention_backward([[2.0]], [[5.0], [5.0]], [[3.0], [1.0]], [[1.0]], bias=np.zeros((1, 2)))
        np.testing.assert_array_equal(gradients.dbias, [[0.5, -0.5]])
        np.testing.assert_array_equal(gradients.dq, [[0.0]])
        np.testing.assert_array_equal(gradients.dk, [[1.0], [-1.0]])
        np.testing.assert_array_equal(gradients.dv, [[0.5], [0.5]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_cotangent_of_a_query_that_sees_nothing_never_arrives(bad):
    arrays = np.ones((1, 2, 1)), np.zeros((1, 3, 1)), np.array([[[1.0], [2.0], [6.0]]])
    got = attnspec.scaled_dot_product_attention_backward(*arrays, np.array([[[bad], [1.0]]]), mask=[[False], [True]], sink=[0.0])
    np.testing.assert_allclose(got.dsink, [-9 / 16], rtol=1e-15)       # three keys and the sink at 1/4: out = 9/4
    np.testing.assert_allclose(got.dv, np.full((1, 3, 1), 1 / 4), rtol=1e-15)
    np.testing.assert_array_equal(got.dq, np.zeros((1, 2, 1)))


@pytest.mark.parametrize("do, dv", [(0.0, 0.0), (1.0, 0.5)])
def test_a_visible_infinite_value_spoils_the_gradients_quietly(do, dv):
    got = attnspec.scaled_dot_product_attention_backward([[1.0]], [[0.0], [0.0]], [[np.inf], [1.0]], [[do]])
    np.testing.assert_array_equal(got.dq, [[np.nan]])
    np.testing.assert_array_equal(got.dv, [[dv], [dv]])
    got = attnspec.scaled_dot_product_attention_backward([[1.0]], [[0.0], [0.0]], [[np.inf, -np.inf], [1.0, 1.0]], [[1.0, 1.0]])
    np.testing.assert_array_equal(got.dk, [[np.nan], [np.nan]])


@pytest.mark.parametrize("options", [{}, {"bias": np.array([[-np.inf, 0.0]])}], ids=lambda options: " ".join(options) or "plain")
def test_huge_and_infinite_entries_behind_the_mask(options):
    for huge in (1e200, np.inf):
        arrays = [[1e200]], [[huge], [0.0]], [[1e200], [3.0]], [[1e200]]
        got = attnspec.scaled_dot_product_attention_backward(*arrays, mask=[[False, True]], **options)
        np.testing.assert_array_equal(got.dv, [[0.0], [1e200]])
        np.testing.assert_array_equal(got.dq, [[0.0]])
