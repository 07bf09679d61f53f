import math

import numpy as np
import pytest

import attnspec

from derivatives import assert_gradients, central_difference

RNG = np.random.default_rng(0)
B, H, N, M, D, E, C = 2, 3, 4, 5, 2, 2, 4
ARRAYS = {
    "q": RNG.standard_normal((B, H, N, D)), "k": RNG.standard_normal((B, H, M, D)), "v": RNG.standard_normal((B, H, M, E)),
    "x": RNG.standard_normal((B, N, C)), "w_a": 2 * RNG.standard_normal((H, C)), "alpha_ma": RNG.random(H),
}
MASK = RNG.random((N, M)) < 0.6
MASK[1] = False                                                        # a query that sees nothing
OPTIONS = [
    {}, {"phi": "sigmoid"}, {"causal": True}, {"causal": "top-left", "scale": 0.7, "n_keys": "allowed"},
    {"mask": MASK, "phi": "sigmoid"}, {"mask": RNG.random((B, H, N, M)) < 0.5, "n_keys": "allowed", "causal": True},
]


def by_loops(q, k, v, x, w_a, alpha_ma, scale=None, phi="linear_clipping", n_keys="total", mask=None, causal=False):
    """One batch entry, one number at a time, in plain Python."""
    (heads, n, d), m, e = q.shape, k.shape[-2], v.shape[-1]
    out = np.zeros((heads, n, e))
    for h in range(heads):
        for i in range(n):
            keys = [j for j in range(m) if mask is None or mask[h, i, j]]
            if causal:
                keys = [j for j in keys if j <= (i if causal == "top-left" else i + m - n)]
            if not keys:
                continue
            s = {j: (1 / math.sqrt(d) if scale is None else scale) * math.fsum(q[h, i] * k[h, j]) for j in keys}
            total = math.fsum(math.exp(s[j]) for j in keys)
            z = math.fsum(w_a[h] * x[i])
            alpha = 1 / (1 + math.exp(-z)) if phi == "sigmoid" else min(1.0, max(0.0, 0.1 * z + 0.5))
            beta = (alpha_ma[h] - alpha) / (m if n_keys == "total" else len(keys))
            for c in range(e):
                out[h, i, c] = math.fsum((alpha * math.exp(s[j]) / total + beta) * v[h, j, c] for j in keys)
    return out


@pytest.mark.parametrize("options", OPTIONS)
def test_against_plain_loops(options):
    got = attnspec.affine_scaled_attention(**ARRAYS, **options)
    mask = options.get("mask")
    mask = None if mask is None else np.broadcast_to(mask, (B, H, N, M))
    for b in range(B):
        one = {name: array[b] if name in "qkvx" else array for name, array in ARRAYS.items()}
        want = by_loops(**one, **{**options, "mask": None if mask is None else mask[b]})
        np.testing.assert_allclose(got[b], want, rtol=1e-12, atol=1e-14)


def parts(alpha, alpha_ma, P, v=((1.0,), (3.0,)), **options):
    """Attention of one query on two keys, given alpha, alpha_ma and softmax weights."""
    q, k = [[[1.0]]], np.log(np.asarray(P, float))[None, :, None]
    return attnspec.affine_scaled_attention(q, k, np.asarray(v)[None], [[1.0]], [[(alpha - 0.5) / 0.1]], [alpha_ma], scale=1.0,
                                            return_weights=True, **options)


class TestByHand:
    def test_negative_weights(self):
        result = parts(0.8, 0.4, (0.1, 0.9))
        np.testing.assert_allclose(result.weights, [[[-0.12, 0.52]]], rtol=1e-14)
        np.testing.assert_allclose(result.out, [[[1.44]]], rtol=1e-14)

    def test_a_row_under_the_mask_keeps_the_number_of_all_keys(self):
        mask = np.array([[True, False]])
        np.testing.assert_allclose(parts(0.8, 0.4, (0.5, 0.5), mask=mask).weights, [[[0.6, 0.0]]], rtol=1e-14)
        np.testing.assert_allclose(parts(0.8, 0.4, (0.5, 0.5), mask=mask, n_keys="allowed").weights, [[[0.4, 0.0]]], rtol=1e-14)

    def test_linear_clipping(self):
        z = [-1e6, -5.0, -4.0, 0.0, 2.5, 4.0, 5.0, np.inf]
        np.testing.assert_allclose(attnspec.linear_clipping(z), [0, 0, 0.1, 0.5, 0.75, 0.9, 1, 1], rtol=1e-15, atol=1e-16)
        np.testing.assert_array_equal(attnspec.linear_clipping(np.nan), np.nan)

    def test_alpha(self):
        x, w_a = [[1.0, 2.0], [0.0, 50.0]], [[1.0, 0.0], [2.0, -1.0]]
        np.testing.assert_allclose(attnspec.affine_alpha(x, w_a), [[0.6, 0.5], [0.5, 0.0]], rtol=1e-15)
        np.testing.assert_allclose(attnspec.affine_alpha(x, w_a, phi="sigmoid"), [[np.e / (1 + np.e), 0.5], [0.5, np.exp(-50)]], rtol=1e-14)

    def test_moving_average(self):
        alpha = [[[0.1, 0.3], [1.0, 1.0]], [[0.5, 0.7], [0.0, 0.0]]]                 # means 0.4 and 0.5 over batch and queries
        np.testing.assert_allclose(attnspec.affine_moving_average([0.0, 1.0], alpha), [0.04, 0.95], rtol=1e-14)
        np.testing.assert_allclose(attnspec.affine_moving_average([0.0, 1.0], alpha, rho=0.5), [0.2, 0.75], rtol=1e-14)
        np.testing.assert_array_equal(attnspec.affine_moving_average([0.2, 1.0], alpha, rho=1), [0.2, 1.0])

    def test_moving_average_over_nothing_moves_nothing(self):
        before = np.array([0.2, 1.0])
        after = attnspec.affine_moving_average(before, np.ones((2, 0)))
        np.testing.assert_array_equal(after, before)
        assert after is not before


class TestSpecialValues:
    def test_one_key_gets_alpha_ma_whatever_alpha_is(self):
        result = attnspec.affine_scaled_attention(np.ones((1, 2, 1)), np.ones((1, 1, 1)), [[[3.0]]], [[7.0], [-1.0]], [[1.0]], [0.25],
                                                  return_weights=True)
        np.testing.assert_allclose(result.weights, [[[0.25], [0.25]]], rtol=1e-15)
        np.testing.assert_allclose(result.out, [[[0.75], [0.75]]], rtol=1e-15)

    @pytest.mark.parametrize("phi", ["linear_clipping", "sigmoid"])
    def test_query_that_sees_nothing_gets_zeros_even_of_an_unknown_token(self, phi):
        options, do = {"mask": MASK, "phi": phi}, np.ones((B, H, N, E))
        spoilt = {**ARRAYS, "x": ARRAYS["x"].copy()}
        spoilt["x"][:, 1] = np.nan
        result = attnspec.affine_scaled_attention(**spoilt, **options, return_weights=True)
        np.testing.assert_array_equal(result.out[..., 1, :], np.zeros((B, H, E)))
        np.testing.assert_array_equal(result.weights[..., 1, :], np.zeros((B, H, M)))
        np.testing.assert_allclose(result.out, attnspec.affine_scaled_attention(**ARRAYS, **options), rtol=1e-14)
        clean = attnspec.affine_scaled_attention_backward(**ARRAYS, do=do, **options)
        for got, want in zip(attnspec.affine_scaled_attention_backward(**spoilt, do=do, **options), clean, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)

    def test_causal_with_more_queries_than_keys(self):
        out = attnspec.affine_scaled_attention(np.ones((1, 3, 1)), np.ones((1, 2, 1)), [[[2.0], [4.0]]], np.zeros((3, 1)), [[1.0]], [0.9],
                                               causal=True)
        # Query 0 sees nothing; query 1 one key with 0.5 + 0.4/2; query 2 both with 0.25 + 0.4/2 each.
        np.testing.assert_allclose(out, [[[0.0], [1.4], [2.7]]], rtol=1e-14)

    def test_beta_never_reaches_a_masked_key(self):
        weights = attnspec.affine_scaled_attention(**ARRAYS, causal="top-left", return_weights=True).weights
        np.testing.assert_array_equal(weights[..., np.triu(np.ones((N, M), bool), 1)], 0.0)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_stands_at_a_masked_position_stays_there(self, bad):
        keys, values = np.ones((2, 1, 2, 1))
        keys[0, 1] = values[0, 1] = bad
        mask = np.array([[True, False], [True, True]])
        arrays = {"q": np.ones((1, 2, 1)), "k": keys, "v": values, "x": np.zeros((2, 1)), "w_a": np.ones((1, 1)), "alpha_ma": [0.75]}
        with np.errstate(invalid="ignore"):                            # inf - inf in the row that sees it
            out = attnspec.affine_scaled_attention(**arrays, mask=mask)
            gradients = attnspec.affine_scaled_attention_backward(**arrays, do=np.ones((1, 2, 1)), mask=mask)
        assert out[0, 0, 0] == 0.5 + 0.25 / 2
        assert np.isnan(out[0, 1, 0])
        assert gradients.dq[0, 0, 0] == 0
        assert gradients.dx[0, 0] == 0.1 * (1 - 1 / 2)

    def test_huge_logits(self):
        result = parts(0.8, 0.4, (1.0, 1.0))
        huge = attnspec.affine_scaled_attention([[[1e4]]], [[[1.0], [-1.0]]], [[[1.0], [3.0]]], [[1.0]], [[3.0]], [0.4],
                                                return_weights=True)
        np.testing.assert_allclose(result.weights, [[[0.2, 0.2]]], rtol=1e-14)      # equal logits: alpha_ma / N each
        np.testing.assert_allclose(huge.weights, [[[0.6, -0.2]]], rtol=1e-14)

    def test_huge_gates(self):
        alpha = attnspec.affine_alpha([[1e300], [-1e300]], [[1.0]], phi="sigmoid")
        np.testing.assert_array_equal(alpha, [[1.0, 0.0]])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    @pytest.mark.parametrize("n_keys", ["total", "allowed"])
    def test_no_queries_or_no_keys(self, n, m, n_keys):
        arrays = {"q": np.ones((2, n, 2)), "k": np.ones((2, m, 2)), "v": np.ones((2, m, 5)), "x": np.ones((n, 3)),
                  "w_a": np.ones((2, 3)), "alpha_ma": np.ones(2)}
        np.testing.assert_array_equal(attnspec.affine_scaled_attention(**arrays, n_keys=n_keys), np.zeros((2, n, 5)))
        gradients = attnspec.affine_scaled_attention_backward(**arrays, do=np.ones((2, n, 5)), n_keys=n_keys)
        for name, got in gradients._asdict().items():
            np.testing.assert_array_equal(got, np.zeros_like(arrays[name[1:]]), err_msg=name)


def test_last_row_is_the_decoding_step():
    step = {**ARRAYS, "q": ARRAYS["q"][..., -1:, :], "x": ARRAYS["x"][..., -1:, :]}
    for n_keys in ("total", "allowed"):
        full = attnspec.affine_scaled_attention(**ARRAYS, causal=True, n_keys=n_keys)
        got = attnspec.affine_scaled_attention(**step, causal=True, n_keys=n_keys)
        np.testing.assert_allclose(got, full[..., -1:, :], rtol=1e-13)


def test_grouped_heads_are_shared_by_neighbours():
    q, k, v = RNG.standard_normal((6, 3, 2)), RNG.standard_normal((2, 5, 2)), RNG.standard_normal((2, 5, 3))
    x, w_a, alpha_ma = RNG.standard_normal((3, 4)), RNG.standard_normal((6, 4)), RNG.random(6)
    got = attnspec.affine_scaled_attention(q, k, v, x, w_a, alpha_ma, enable_gqa=True)
    for h in range(6):
        one = attnspec.affine_scaled_attention(q[h, None], k[h // 3, None], v[h // 3, None], x, w_a[h, None], alpha_ma[h, None])
        np.testing.assert_allclose(got[h], one[0], rtol=1e-13)
    with pytest.raises(ValueError, match=r"^k: .*for grouped heads set enable_gqa=True$"):
        attnspec.affine_scaled_attention(q, k, v, x, w_a, alpha_ma)
    with pytest.raises(ValueError, match=r"^k: expected a number of heads that divides the 6 of q, got 4$"):
        attnspec.affine_scaled_attention(q, np.ones((4, 5, 2)), np.ones((4, 5, 3)), x, w_a, alpha_ma, enable_gqa=True)


def of_gradients(gradients):
    return {name[1:]: gradient for name, gradient in gradients._asdict().items()}


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(options):
    do = RNG.standard_normal((B, H, N, E))
    gradients = attnspec.affine_scaled_attention_backward(**ARRAYS, do=do, **options)
    assert_gradients(lambda **a: attnspec.affine_scaled_attention(**a, **options), of_gradients(gradients), ARRAYS, do)


def test_gradients_of_shared_arrays():
    """Grouped heads, and queries and tokens without the batch axis that the keys have."""
    arrays = {"q": RNG.standard_normal((4, 3, 2)), "k": RNG.standard_normal((2, 2, 5, 2)), "v": RNG.standard_normal((2, 2, 5, 3)),
              "x": RNG.standard_normal((3, 4)), "w_a": RNG.standard_normal((4, 4)), "alpha_ma": RNG.random(4)}
    do = RNG.standard_normal((2, 4, 3, 3))
    gradients = attnspec.affine_scaled_attention_backward(**arrays, do=do, enable_gqa=True, causal=True)
    assert_gradients(lambda **a: attnspec.affine_scaled_attention(**a, enable_gqa=True, causal=True), of_gradients(gradients), arrays, do)


def test_gradient_beyond_the_kinks_is_zero_and_central_differences_see_half_of_it_on_them():
    arrays = {"q": np.ones((1, 3, 1)), "k": np.array([[[0.0], [1.0]]]), "v": np.array([[[1.0], [4.0]]]),
              "x": np.array([[9.0], [5.0], [-5.0]]), "w_a": np.ones((1, 1)), "alpha_ma": np.array([0.5])}
    do = np.ones((1, 3, 1))
    dx = attnspec.affine_scaled_attention_backward(**arrays, do=do).dx
    np.testing.assert_array_equal(dx, np.zeros((3, 1)))
    rough = central_difference(lambda **a: attnspec.affine_scaled_attention(**a), arrays, "x", np.ones((3, 1)))
    slope = 0.1 * (np.e / (1 + np.e) * 3 + 1 - 2.5)                    # phi' <dO, P v - mean v> inside
    np.testing.assert_allclose(rough[0, :, 0], [0.0, slope / 2, slope / 2], atol=1e-8)


@pytest.mark.parametrize("option, message", [
    ({"phi": "relu"}, r"^phi: expected 'linear_clipping' or 'sigmoid', got 'relu'$"),
    ({"n_keys": 6}, r"^n_keys: expected 'total' or 'allowed', got 6$"),
    ({"causal": "bottom"}, r"^causal: "),
    ({"scale": "big"}, r"^scale: "),
    ({"mask": np.ones((N, M + 1), bool)}, r"^mask: "),
    ({"mask": np.ones((B, N, M), bool)}, r"^mask: "),
    ({"w_a": np.ones((H + 1, C))}, r"^w_a: expected shape \(h, c\) with h = 3 as in q, got \(4, 4\)$"),
    ({"alpha_ma": np.ones(H + 1)}, r"^alpha_ma: "),
])
def test_wrong_options_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        attnspec.affine_scaled_attention(**{**ARRAYS, **option})
    with pytest.raises(ValueError, match=message):
        attnspec.affine_scaled_attention_backward(**{**ARRAYS, "do": np.ones((B, H, N, E)), **option})


@pytest.mark.parametrize("rho", [-0.1, 1.1, np.nan, "half"])
def test_rho_out_of_range_is_refused(rho):
    with pytest.raises(ValueError, match=r"^rho: expected a number"):
        attnspec.affine_moving_average([0.5], [[0.5]], rho=rho)


def test_unknown_phi_of_alpha_is_refused():
    with pytest.raises(ValueError, match=r"^phi: "):
        attnspec.affine_alpha([[1.0]], [[1.0]], phi="tanh")


@pytest.mark.parametrize("phi", ["linear_clipping", "sigmoid"])
@pytest.mark.parametrize("x", [[np.inf, np.inf], [1e200, 1.0], [np.nan, 0.0]], ids=str)
def test_the_input_of_a_query_that_sees_nothing_never_arrives(phi, x):
    w_a = [[1e200, -1.0]]
    arrays = [[[1.0], [1.0]]], [[[1.0], [2.0]]], [[[1.0], [3.0]]], [x, [0.0, 0.0]], w_a, [0.5]
    mask = [[False, False], [True, True]]
    got = attnspec.affine_scaled_attention(*arrays, mask=mask, phi=phi)
    np.testing.assert_allclose(got[0, 0], [0.0], atol=0)
    P = math.e / (1 + math.e)                                          # of the second key; alpha = alpha_ma = 1/2 at x = 0
    np.testing.assert_allclose(got[0, 1], [(1 + 2 * P) / 2], rtol=1e-15)
    gradients = attnspec.affine_scaled_attention_backward(*arrays, [[[np.inf], [1.0]]], mask=mask, phi=phi)
    np.testing.assert_array_equal(gradients.dx[0], [0.0, 0.0])
    np.testing.assert_array_equal(gradients.dw_a, [[0.0, 0.0]])
    np.testing.assert_allclose(gradients.dv, [[[(1 - P) / 2], [P / 2]]], rtol=1e-15)


def test_a_visible_infinite_value_spoils_the_gradients_quietly():
    arrays = [[[1.0]]], [[[1.0], [2.0]]], [[[np.inf], [3.0]]], [[1.0]], [[1.0]], [0.5]
    for do in (0.0, 1.0):
        assert np.isnan(attnspec.affine_scaled_attention_backward(*arrays, [[[do]]]).dq).all()
