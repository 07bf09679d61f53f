import itertools
import math

import numpy as np
import pytest

import attnspec

from derivatives import central_difference, complex_step

RNG = np.random.default_rng(0)
H, HK, N, M, D, E, R = 4, 2, 5, 7, 9, 3, 2
q, k, v = RNG.standard_normal((3, H, N, D)), RNG.standard_normal((3, HK, M, D)), RNG.standard_normal((3, HK, M, E))
a, b, u = RNG.standard_normal((HK, R)), RNG.standard_normal((HK, R)), RNG.standard_normal((HK, M))
gate = {"gate_scale": RNG.standard_normal(H), "gate_bias": RNG.standard_normal(H)}
NONE = np.ones((1, 0))


def waves(count, base):
    return [base ** (-r / (count - 1)) if count > 1 else 1.0 for r in range(count)]


def coordinates(position, count, grid=None, cls=False):
    """The coordinate that each of the `count` waves runs along, None for the class token."""
    if grid is None:
        return [position] * count
    if cls and position == 0:
        return None
    y, x = divmod(position - cls, grid[1])
    return [y] * (count - count // 2) + [x] * (count // 2)


def relative_by_loops(i, j, a, b, base, **where):
    at_i, at_j = coordinates(i, len(a), **where), coordinates(j, len(a), **where)
    if at_i is None or at_j is None:
        return 0.0
    w = waves(len(a), base)
    return sum(a[r] * math.cos(w[r] * (at_i[r] - at_j[r])) + b[r] * math.sin(w[r] * (at_i[r] - at_j[r])) for r in range(len(a)))


def key_prior_by_loops(j, N, w1, b1, w2, b2, gain, bump, slope, base, scale, **where):
    """u_j of one head."""
    count = (len(w1[0]) - 2) // 2
    at = coordinates(j, count, **where)
    w = waves(count, base)
    f = [math.cos(w[r] * at[r]) for r in range(count)] + [math.sin(w[r] * at[r]) for r in range(count)] if at else [0.0] * 2 * count
    f += [j / N, math.log(1 + j) / math.log(1 + N)]
    z = [sum(x * y for x, y in zip(row, f, strict=True)) + c for row, c in zip(w1, b1, strict=True)]
    network = sum(w2[s] * z[s] / (1 + math.exp(-z[s])) for s in range(len(z))) + b2
    return scale * (gain * network + bump * (j == 0) + slope * j)


def attention_by_loops(logits, values):
    """One row of softmax attention over what is visible: `logits` with None elsewhere."""
    seen = [j for j, logit in enumerate(logits) if logit is not None]
    weights = [math.exp(logits[j]) for j in seen]
    return [sum(w * values[j][c] for w, j in zip(weights, seen, strict=True)) / sum(weights) for c in range(len(values[0]))]


def network(hk=HK, waves=3, hidden=4):
    shapes = {"w1": (hidden, 2 * waves + 2), "b1": hidden, "w2": hidden, "b2": (), "gain": hk, "bump": hk, "recency": hk}
    return {name: RNG.standard_normal(shape) for name, shape in shapes.items()}


class TestLogPrior:
    def test_by_hand(self):
        # R = 3, base 4: waves 1, 1/2, 1/4; key 2 seen from query 0, i - j = -2.
        K = attnspec.goat_log_prior([0], [2], [[1.0, 2.0, 4.0]], [[3.0, 5.0, 7.0]], [[0.5]], position_base=4.0)
        want = (math.cos(2) + 2 * math.cos(1) + 4 * math.cos(0.5)) - (3 * math.sin(2) + 5 * math.sin(1) + 7 * math.sin(0.5)) + 0.5
        np.testing.assert_allclose(K, [[[want]]], rtol=1e-14)

    @pytest.mark.parametrize("R", [0, 1, 2, 5])
    @pytest.mark.parametrize("where", [{}, {"grid": (2, 3)}, {"grid": (2, 3), "cls": True}])
    def test_against_plain_loops(self, R, where):
        a, b, u = RNG.standard_normal((2, R)), RNG.standard_normal((2, R)), RNG.standard_normal((2, 6))
        i, j = [3, 0, 5], [0, 1, 2, 3, 4, 5]
        want = [[[relative_by_loops(s, t, a[h], b[h], 100.0, **where) + u[h, t] for t in j] for s in i] for h in range(2)]
        got = attnspec.goat_log_prior(i, j, a, b, u, position_base=100.0, **where)
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-13)

    def test_rows_have_the_first_waves_and_columns_the_others(self):
        # R = 3 on a grid: rows have waves 1 and 1/10, columns 1/100.
        a, b = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], np.zeros((3, 3))
        K = attnspec.goat_log_prior([0], [1, 2], a, b, position_base=100.0, grid=(2, 2))        # keys at (0, 1) and (1, 0)
        np.testing.assert_allclose(K[:, 0], [[1.0, math.cos(1)], [1.0, math.cos(0.1)], [math.cos(0.01), 1.0]], rtol=1e-14)

    def test_class_token_has_no_relative_prior_not_even_with_itself(self):
        K = attnspec.goat_log_prior(np.arange(5), np.arange(5), [[1.0, 2.0]], [[0.5, 0.5]], grid=(2, 2), cls=True)[0]
        np.testing.assert_array_equal(K[0], np.zeros(5))
        np.testing.assert_array_equal(K[:, 0], np.zeros(5))
        np.testing.assert_allclose(np.diag(K)[1:], 3.0, rtol=1e-15)

    @pytest.mark.parametrize("arguments, message", [
        ({"grid": (2, 2)}, r"^grid: expected positions 0..3 on 2 x 2 patches, got 0..4$"),
        ({"grid": (1, 3), "cls": True}, r"^grid: expected positions 0..3 on 1 x 3 patches, got 0..4$"),
        ({"grid": 4}, r"^grid: expected a pair \(height, width\), got 4$"),
        ({"grid": (0, 4)}, r"^grid: expected a whole number >= 1, got 0$"),
        ({"cls": True}, r"^cls: expected a grid with the class token, got grid=None$"),
        ({"cls": 1}, r"^cls: expected True or False, got 1$"),
        ({"position_base": 0}, r"^position_base: expected a number > 0, got 0$"),
    ])
    def test_wrong_options_are_refused_by_name(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            attnspec.goat_log_prior([0, 4], [0, 4], [[1.0]], [[1.0]], **arguments)


class TestKeyPrior:
    @pytest.mark.parametrize("waves", [0, 1, 3, 4])
    @pytest.mark.parametrize("options", [
        {}, {"training_length": 32}, {"training_length": 1}, {"absolute_base": 7.0, "prior_scale": 0.5}, {"grid": (2, 3)},
        {"grid": (2, 3), "cls": True, "training_length": 9},
    ])
    def test_against_plain_loops(self, waves, options):
        j, net = [0, 1, 2, 3, 4, 5], network(waves=waves)
        N = options.get("training_length", 5)
        where = {name: options[name] for name in ("grid", "cls") if name in options}
        shared = [net[name] for name in ("w1", "b1", "w2", "b2")]
        want = [[key_prior_by_loops(t, N, *shared, net["gain"][h], net["bump"][h], math.log(1 + math.exp(net["recency"][h])),
                                    options.get("absolute_base", 1e4), options.get("prior_scale", 1.0), **where) for t in j]
                for h in range(HK)]
        np.testing.assert_allclose(attnspec.goat_key_prior(j, **net, **options), want, rtol=1e-12, atol=1e-13)

    def test_one_key(self):
        # j = 0 and N = 1: features cos = 1, sin = 0, 0, 0; SiLU(log 3) = 3/4 log 3.
        u = attnspec.goat_key_prior([0], [[math.log(3), 9.0, 9.0, 9.0]], [0.0], [2.0], 1.0, [10.0], [5.0])
        np.testing.assert_allclose(u, [[10 * (1.5 * math.log(3) + 1) + 5]], rtol=1e-15)

    def test_bump_is_at_absolute_position_zero(self):
        zero = np.zeros((1, 2)), [0.0], [0.0], 0.0
        np.testing.assert_array_equal(attnspec.goat_key_prior([0, 1, 2], *zero, [1.0], [3.0]), [[3.0, 0.0, 0.0]])
        np.testing.assert_array_equal(attnspec.goat_key_prior([1, 2, 3], *zero, [1.0], [3.0]), [[0.0, 0.0, 0.0]])

    def test_slopes_at_both_ends(self):
        zero = np.zeros((1, 2)), [0.0], [0.0], 0.0
        u = attnspec.goat_key_prior([0, 2], *zero, np.zeros(3), np.zeros(3), [-800.0, 0.0, 800.0])
        np.testing.assert_allclose(u, [[0, 0], [0, 2 * math.log(2)], [0, 1600]], rtol=1e-15)

    def test_no_keys(self):
        net = network()
        assert attnspec.goat_key_prior(np.zeros(0, int), **net).shape == (HK, 0)

    @pytest.mark.parametrize("change, message", [
        ({"w1": np.ones((4, 5))}, r"^w1: expected shape \(s, 2 M \+ 2\), got \(4, 5\)$"),
        ({"w1": np.ones((4, 0))}, r"^w1: expected shape \(s, 2 M \+ 2\), got \(4, 0\)$"),
        ({"key_positions": [1, -1]}, r"^key_positions: expected whole numbers >= 0, got -1$"),
        ({"key_positions": [0.5, 1]}, r"^key_positions: expected whole numbers"),
        ({"training_length": 0}, r"^training_length: expected a whole number >= 1, got 0$"),
        ({"absolute_base": -1}, r"^absolute_base: expected a number > 0, got -1$"),
        ({"prior_scale": "1"}, r"^prior_scale: expected a number, got '1'$"),
    ])
    def test_wrong_arguments_are_refused_by_name(self, change, message):
        with pytest.raises(ValueError, match=message):
            attnspec.goat_key_prior(**{"key_positions": [0, 1], **network(), **change})


def gates_by_loops(q, content, gate_scale, gate_bias):
    """g of one query of one head."""
    size = math.sqrt(sum(x * x for x in q[:content]))
    return 1 / (1 + math.exp(math.log(1 + math.exp(gate_scale)) * size - gate_bias))


class TestHeadAttention:
    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("sink", [False, True])
    @pytest.mark.parametrize("causal, first", [(False, 0), ("top-left", 0), ("bottom-right", M - N)])
    def test_against_plain_loops(self, causal, first, sink, gated):
        content = D - 2 * R - sink
        mask = RNG.random((N, M)) < 0.8
        want = np.zeros((3, H, N, E))
        for batch, h, i in itertools.product(range(3), range(H), range(N)):
            hk = h // (H // HK)
            logits = []
            for j in range(M):
                s = sum(q[batch, h, i, c] * k[batch, hk, j, c] for c in range(content)) / math.sqrt(content)
                K = relative_by_loops(first + i, j, a[hk], b[hk], 1e4) + (u[hk, j] if sink else 0.0)
                g = gates_by_loops(q[batch, h, i], content, gate["gate_scale"][h], gate["gate_bias"][h]) if gated else 1.0
                logits.append(s + g * K if mask[i, j] and (not causal or j <= first + i) else None)
            if any(logit is not None for logit in logits):
                want[batch, h, i] = attention_by_loops(logits, v[batch, hk])
        got = attnspec.goat_head_attention(q, k, v, a, b, u if sink else None, **(gate if gated else {}), mask=mask, causal=causal,
                                           enable_gqa=True)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)

    def test_by_hand(self):
        # One content coordinate; logits 2 * (0, log 3 / 2) and u = (0, log 2): weights 1/7 and 6/7.
        result = attnspec.goat_head_attention([[[2.0, 99.0]]], [[[0.0, 99.0], [math.log(3) / 2, -99.0]]], [[[7.0], [14.0]]], NONE, NONE,
                                              [[0.0, math.log(2)]], return_weights=True)
        np.testing.assert_allclose(result.weights, [[[1 / 7, 6 / 7]]], rtol=1e-15)
        np.testing.assert_allclose(result.out, [[[13.0]]], rtol=1e-15)

    def test_the_coordinates_beyond_the_content_do_not_count(self):
        want = attnspec.goat_head_attention(q, k, v, a, b, u, enable_gqa=True)
        other_q, other_k = q.copy(), k.copy()
        other_q[..., D - 5:], other_k[..., D - 5:] = np.nan, np.inf
        np.testing.assert_array_equal(attnspec.goat_head_attention(other_q, other_k, v, a, b, u, enable_gqa=True), want)
        other_q = q.copy()
        other_q[..., D - 6] += 1.0
        assert np.abs(attnspec.goat_head_attention(other_q, k, v, a, b, u, enable_gqa=True) - want).max() > 1e-3

    def test_last_row_is_the_decoding_step(self):
        full = attnspec.goat_head_attention(q, k, v, a, b, u, causal=True, enable_gqa=True, **gate)
        step = attnspec.goat_head_attention(q[..., -1:, :], k, v, a, b, u, causal=True, enable_gqa=True, **gate)
        np.testing.assert_allclose(step, full[..., -1:, :], rtol=1e-13)

    def test_offsets_are_positions(self):
        want = attnspec.goat_head_attention(q, k, v, a, b, u, query_offset=3, enable_gqa=True)
        got = attnspec.goat_head_attention(q, k, v, a, b, u, query_offset=13, key_offset=10, enable_gqa=True)
        np.testing.assert_allclose(got, want, rtol=1e-12)
        assert np.abs(attnspec.goat_head_attention(q, k, v, a, b, u, enable_gqa=True) - want).max() > 1e-3
        alone = attnspec.goat_head_attention(q[..., 3:4, :], k, v, a, b, u, query_offset=6, enable_gqa=True)
        np.testing.assert_allclose(alone, want[..., 3:4, :], rtol=1e-12)

    @pytest.mark.parametrize("causal", [True, "bottom-right", "top-left"])
    @pytest.mark.parametrize("first_query, first_key", [(0, 0), (2, 0), (0, 2), (-1, 0), (-3, -4), (100, 98), (50, 0)])
    def test_causal_mask_compares_positions(self, first_query, first_key, causal):
        seen = np.array([[first_key + j <= first_query + i for j in range(M)] for i in range(N)])
        where = {"query_offset": first_query, "key_offset": first_key, "enable_gqa": True}
        got = attnspec.goat_head_attention(q, k, v, a, b, u, causal=causal, **where)
        np.testing.assert_array_equal(got, attnspec.goat_head_attention(q, k, v, a, b, u, mask=seen, **where))
        np.testing.assert_array_equal(got[..., ~seen.any(-1), :], 0.0)

    def test_where_queries_stand_without_an_offset(self):
        for causal, first in (("bottom-right", M - N), (True, M - N), ("top-left", 0)):
            got = attnspec.goat_head_attention(q, k, v, a, b, u, causal=causal, key_offset=7, enable_gqa=True)
            want = attnspec.goat_head_attention(q, k, v, a, b, u, causal=causal, query_offset=7 + first, key_offset=7, enable_gqa=True)
            np.testing.assert_array_equal(got, want)

    def test_key_of_prior_zero_stays_hidden_behind_a_closed_gate(self):
        hidden, seen = u.copy(), np.arange(M) != 3
        hidden[:, 3] = -np.inf
        closed = {"gate_scale": np.zeros(H), "gate_bias": np.full(H, -1e4)}
        for gates in ({}, gate, closed):
            got = attnspec.goat_head_attention(q, k, v, a, b, hidden, enable_gqa=True, **gates)
            want = attnspec.goat_head_attention(q, k, v, a, b, u, mask=seen, enable_gqa=True, **gates)
            np.testing.assert_array_equal(got, want)

    def test_gate_of_a_query_whose_square_overflows(self):
        # The gate's logit is bias - softplus(scale) |q| = 1 - 2e-181 * 5e180 = 0, so that half of the prior counts.
        queries, keys = np.array([[[3e180, 4e180, 0.0]]]), np.zeros((1, 2, 3))
        got = attnspec.goat_head_attention(queries, keys, np.eye(2)[None], NONE, NONE, [[0.0, 2 * np.log(3.0)]],
                                           gate_scale=[np.log(2e-181)], gate_bias=[1.0])
        np.testing.assert_allclose(got, [[[0.25, 0.75]]], rtol=1e-12)
        got = attnspec.goat_head_attention(queries, keys, np.eye(2)[None], NONE, NONE, [[0.0, 2.0]], gate_scale=[1.0], gate_bias=[1.0])
        np.testing.assert_allclose(got, [[[0.5, 0.5]]], rtol=1e-15)

    def test_query_that_sees_nothing_gets_zeros(self):
        mask = np.ones((N, M), bool)
        mask[2] = False
        out, weights, _ = attnspec.goat_head_attention(q, k, v, a, b, u, mask=mask, enable_gqa=True, return_weights=True)
        np.testing.assert_array_equal(out[..., 2, :], 0.0)
        np.testing.assert_array_equal(weights[..., 2, :], 0.0)
        np.testing.assert_allclose(weights[..., 3, :].sum(-1), 1.0, rtol=1e-14)

    def test_more_queries_than_keys_causally(self):
        out = attnspec.goat_head_attention(q[:, :HK], k[..., :2, :], v[..., :2, :], a, b, u[:, :2], causal=True)
        np.testing.assert_array_equal(out[..., : N - 2, :], 0.0)
        np.testing.assert_allclose(out[..., N - 2, :], v[..., 0, :], rtol=1e-15)
        out = attnspec.goat_head_attention(q[:, :HK], k[..., :2, :], v[..., :2, :], a, b, u[:, :2], causal="top-left")
        np.testing.assert_allclose(out[..., 0, :], v[..., 0, :], rtol=1e-15)

    def test_one_key_gives_its_value(self):
        out = attnspec.goat_head_attention(q, k[..., :1, :], v[..., :1, :], a, b, u[:, :1], enable_gqa=True, **gate)
        np.testing.assert_allclose(out, np.broadcast_to(np.repeat(v[..., :1, :], 2, axis=1), out.shape), rtol=1e-15)

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    @pytest.mark.parametrize("causal", [False, True])
    def test_no_queries_or_no_keys(self, n, m, causal):
        out = attnspec.goat_head_attention(q[..., :n, :], k[..., :m, :], v[..., :m, :], a, b, u[:, :m], causal=causal, enable_gqa=True)
        np.testing.assert_array_equal(out, np.zeros((3, H, n, E)))

    def test_huge_logits(self):
        out = attnspec.goat_head_attention([[[1e4, 0.0]]], [[[1.0, 0.0], [-1.0, 0.0]]], [[[3.0], [5.0]]], NONE, NONE, [[-1e3, 1e3]])
        np.testing.assert_array_equal(out, [[[3.0]]])

    def test_equal_logits_average_the_values(self):
        out = attnspec.goat_head_attention(np.zeros((1, 1, 2)), RNG.standard_normal((1, 4, 2)), [[[1.0], [2.0], [3.0], [6.0]]], NONE, NONE)
        np.testing.assert_allclose(out, [[[3.0]]], rtol=1e-15)

    def test_not_a_number_behind_a_mask_stays_there(self):
        mask = np.ones((N, M), bool)
        mask[0, 3] = False
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[..., 3, :] = bad_v[..., 3, :] = np.nan
        out = attnspec.goat_head_attention(q, bad_k, bad_v, a, b, u, mask=mask, enable_gqa=True)
        want = attnspec.goat_head_attention(q, k, v, a, b, u, mask=mask, enable_gqa=True)
        np.testing.assert_allclose(out[..., 0, :], want[..., 0, :], rtol=1e-13)
        assert np.all(np.isnan(out[..., 1:, :]))

    def test_mask_of_one_head(self):
        mask = RNG.random((H, N, M)) < 0.7
        out = attnspec.goat_head_attention(q, k, v, a, b, u, mask=mask, enable_gqa=True)
        for h in range(H):
            one = slice(h // 2, h // 2 + 1)
            want = attnspec.goat_head_attention(q[:, h : h + 1], k[:, one], v[:, one], a[one], b[one], u[one], mask=mask[h])
            np.testing.assert_allclose(out[:, h], want[:, 0], rtol=1e-13)

    def test_heads_with_the_same_prior_and_grouping_are_neighbours(self):
        want = attnspec.goat_head_attention(q, np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1), np.repeat(a, 2, axis=0),
                                            np.repeat(b, 2, axis=0), np.repeat(u, 2, axis=0))
        np.testing.assert_allclose(attnspec.goat_head_attention(q, k, v, a, b, u, enable_gqa=True), want, rtol=1e-14)

    @pytest.mark.parametrize("change, message", [
        ({"enable_gqa": False}, r"^k: expected 4 heads as in q, got 2; for grouped heads set enable_gqa=True$"),
        ({"q": q[:, :3]}, r"^k: expected a number of heads that divides the 3 of q, got 2$"),
        ({"a": np.ones((HK, 4)), "b": np.ones((HK, 4))}, r"^a: expected fewer than 9 positional coordinates in heads of width 9, got 9"),
        ({"b": np.ones((HK, 3))}, r"^b: expected shape \(hk, r\) with r = 2 as in a, got \(2, 3\)$"),
        ({"gate_scale": np.ones(H)}, r"^gate_scale: expected together with gate_bias, got one of the two$"),
        ({"gate_bias": np.ones(H)}, r"^gate_scale: expected together with gate_bias, got one of the two$"),
        ({"causal": "left"}, r"^causal: expected False or True or 'bottom-right' or 'top-left', got 'left'$"),
        ({"query_offset": -1, "grid": (3, 4)}, r"^grid: expected positions 0..11 on 3 x 4 patches, got -1..3$"),
        ({"key_offset": 0.5}, r"^key_offset: expected a whole number >= -9007199254740992, got 0.5$"),
        ({"mask": np.ones((3, N, M), bool)}, r"^mask: expected a shape that broadcasts to .* with h = 4 as in q, got \(3, 5, 7\)$"),
    ])
    @pytest.mark.parametrize("name", ["goat_head_attention", "goat_augmented_qk"])
    def test_wrong_arguments_are_refused_by_name(self, name, change, message):
        arguments = {"q": q, "k": k, "v": v, "a": a, "b": b, "u": u, "enable_gqa": True, **change}
        function = getattr(attnspec, name)
        if not set(change) <= set(function.record.parameters):
            return                                                     # the augmentation has no mask
        with pytest.raises(ValueError, match=message):
            function(**{key: value for key, value in arguments.items() if key in function.record.parameters})


class TestAugmentedHeads:
    def test_by_hand(self):
        # R = 1: wave 1; query at position 2, key at 1; a = 3, b = 5; D_c = 4.
        q, k = [[[1.0, 2.0, 3.0, 4.0, 9.0, 9.0, 9.0]]], [[[5.0, 6.0, 7.0, 8.0, 9.0, 9.0, 9.0]]]
        queries, keys = attnspec.goat_augmented_qk(q, k, [[3.0]], [[5.0]], [[0.5]], query_offset=2, key_offset=1)
        c, s = math.cos(2), math.sin(2)
        np.testing.assert_allclose(queries[0, 0], [0.5, 1.0, 1.5, 2.0, 3 * c + 5 * s, 3 * s - 5 * c, 1.0], rtol=1e-15)
        np.testing.assert_allclose(keys[0, 0], [5.0, 6.0, 7.0, 8.0, math.cos(1), math.sin(1), 0.5], rtol=1e-15)

    @pytest.mark.parametrize("options", [
        {}, gate, {"causal": True, **gate}, {"query_offset": 4, "key_offset": 2}, {"grid": (3, 4)}, {"grid": (2, 3), "cls": True, **gate},
    ])
    @pytest.mark.parametrize("sink", [False, True])
    def test_plain_attention_of_them_is_goat_attention(self, sink, options):
        u_or_none = u if sink else None
        queries, keys = attnspec.goat_augmented_qk(q, k, a, b, u_or_none, enable_gqa=True, **options)
        assert queries.shape == q.shape
        assert keys.shape == k.shape
        # Queries times sqrt(d) undo the scale of a kernel that divides by it.
        plain = attnspec.scaled_dot_product_attention(queries * math.sqrt(D), keys, v, causal=options.get("causal", False), enable_gqa=True)
        want = attnspec.goat_head_attention(q, k, v, a, b, u_or_none, enable_gqa=True, **options)
        np.testing.assert_allclose(plain, want, rtol=1e-12, atol=1e-13)

    def test_class_token_carries_no_position(self):
        queries, keys = attnspec.goat_augmented_qk(q, k, a, b, grid=(2, 3), cls=True, enable_gqa=True)
        np.testing.assert_array_equal(queries[..., 0, D - 4:], 0.0)
        np.testing.assert_array_equal(keys[..., 0, D - 4:], 0.0)


C = 6
layer = {
    "q_input": RNG.standard_normal((3, N, C)), "k_input": RNG.standard_normal((3, M, C)), "v_input": RNG.standard_normal((3, M, C)),
    "w_q": RNG.standard_normal((H, D, C)), "b_q": RNG.standard_normal((H, D)), "w_k": RNG.standard_normal((HK, D, C)) / 3,
    "b_k": RNG.standard_normal((HK, D)), "w_v": RNG.standard_normal((HK, D, C)), "b_v": RNG.standard_normal((HK, D)),
    "w_o": RNG.standard_normal((C, H, D)), "b_o": RNG.standard_normal(C), "a": a, "b": b,
}
net = network()


def layer_by_steps(arrays, u, first=0, mask=True, **options):
    """The layer from torch's point of view: flat projections, heads cut out of them, heads put together again."""
    x, y, z = arrays["q_input"], arrays["k_input"], arrays["v_input"]
    flat = [t @ arrays[f"w_{name}"].reshape(-1, C).T + arrays[f"b_{name}"].reshape(-1) for t, name in ((x, "q"), (y, "k"), (z, "v"))]
    heads = [np.moveaxis(t.reshape(*t.shape[:2], -1, D), 2, 1) for t in flat]
    out = attnspec.goat_head_attention(*heads, arrays["a"], arrays["b"], u, query_offset=first, mask=np.broadcast_to(mask, (3, H, N, M)),
                                       enable_gqa=True, **options)
    return np.moveaxis(out, 1, 2).reshape(3, N, H * D) @ arrays["w_o"].reshape(C, -1).T + arrays["b_o"]


class TestLayer:
    def test_is_projections_prior_and_heads(self):
        u = attnspec.goat_key_prior(np.arange(M), **{**net, "recency": None}, prior_scale=0.5, absolute_base=50.0, training_length=20)
        got = attnspec.goat_attention(**layer, **net, **gate, prior_scale=0.5, absolute_base=50.0, training_length=20, position_base=9.0)
        np.testing.assert_allclose(got, layer_by_steps(layer, u, position_base=9.0, **gate), rtol=1e-11, atol=1e-11)

    def test_recency_counts_under_a_causal_mask_only(self):
        for causal, first in ((True, M - N), ("top-left", 0)):
            u = attnspec.goat_key_prior(np.arange(M), **net)
            mask = np.arange(M) <= np.arange(N)[:, None] + first
            np.testing.assert_allclose(attnspec.goat_attention(**layer, **net, causal=causal), layer_by_steps(layer, u, first, mask),
                                       rtol=1e-11, atol=1e-11)
        without = {name: array for name, array in net.items() if name != "recency"}
        np.testing.assert_array_equal(attnspec.goat_attention(**layer, **net), attnspec.goat_attention(**layer, **without))

    def test_relative_prior_alone(self):
        np.testing.assert_allclose(attnspec.goat_attention(**layer), layer_by_steps(layer, None), rtol=1e-11, atol=1e-11)

    def test_key_prior_alone(self):
        arrays = {**layer, "a": np.zeros((HK, 0)), "b": np.zeros((HK, 0))}
        u = attnspec.goat_key_prior(np.arange(M), **{**net, "recency": None})
        np.testing.assert_allclose(attnspec.goat_attention(**arrays, **net), layer_by_steps(arrays, u), rtol=1e-11, atol=1e-11)

    def test_grid_with_a_class_token(self):
        arrays = {**layer, "k_input": layer["k_input"][:, :N], "v_input": layer["v_input"][:, :N]}
        where = {"grid": (2, 2), "cls": True}
        u = attnspec.goat_key_prior(np.arange(N), **{**net, "recency": None}, **where)
        heads = [np.einsum("bnc,hdc->bhnd", arrays[f"{x}_input"], arrays[f"w_{x}"]) + arrays[f"b_{x}"][:, None] for x in ("q", "k", "v")]
        out = attnspec.goat_head_attention(*heads, a, b, u, enable_gqa=True, **where)
        want = np.einsum("bhnd,chd->bnc", out, arrays["w_o"]) + arrays["b_o"]
        np.testing.assert_allclose(attnspec.goat_attention(**arrays, **net, **where), want, rtol=1e-11, atol=1e-11)

    def test_masks_of_heads_and_keys(self):
        mask, key_mask = RNG.random((H, N, M)) < 0.8, RNG.random((3, M)) < 0.8
        both = mask & key_mask[:, None, None, :]
        got = attnspec.goat_attention(**layer, mask=mask, key_mask=key_mask)
        np.testing.assert_allclose(got, layer_by_steps(layer, None, mask=both), rtol=1e-11, atol=1e-11)
        np.testing.assert_array_equal(got, attnspec.goat_attention(**layer, mask=both))

    def test_causal_mask_and_recency_with_offsets(self):
        # The last two queries at their positions, over all keys.
        arrays = {**layer, "q_input": layer["k_input"]}
        full = attnspec.goat_attention(**arrays, **net, **gate, causal=True, training_length=20)
        step = {**layer, "q_input": layer["k_input"][:, 3:5]}
        got = attnspec.goat_attention(**step, **net, **gate, causal=True, training_length=20, query_offset=3)
        np.testing.assert_allclose(got, full[:, 3:5], rtol=1e-11)

    def test_negative_offsets(self):
        want = attnspec.goat_attention(**layer, query_offset=2)
        np.testing.assert_allclose(attnspec.goat_attention(**layer, query_offset=-3, key_offset=-5), want, rtol=1e-11)
        with pytest.raises(ValueError, match=r"^key_offset: expected a whole number >= 0, got -5$"):
            attnspec.goat_attention(**layer, **net, key_offset=-5)

    def test_query_that_sees_no_key_gets_the_output_bias(self):
        key_mask = np.ones((3, M), bool)
        key_mask[1] = False
        out, weights, _ = attnspec.goat_attention(**layer, **net, key_mask=key_mask, return_weights=True)
        np.testing.assert_array_equal(out[1], np.tile(layer["b_o"], (N, 1)))
        np.testing.assert_array_equal(weights[1], np.zeros((H, N, M)))
        np.testing.assert_allclose(weights[0].sum(-1), np.ones((H, N)), rtol=1e-14)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_is_not_finite_behind_a_mask_stays_there(self, bad):
        key_mask = np.arange(M) != 2
        arrays = {name: array.copy() for name, array in layer.items()}
        arrays["k_input"][:, 2] = arrays["v_input"][:, 2] = bad
        np.testing.assert_allclose(attnspec.goat_attention(**arrays, **net, key_mask=key_mask),
                                   attnspec.goat_attention(**layer, **net, key_mask=key_mask), rtol=1e-12)

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, n, m):
        arrays = {**layer, "q_input": np.ones((3, n, C)), "k_input": np.ones((3, m, C)), "v_input": np.ones((3, m, C))}
        np.testing.assert_array_equal(attnspec.goat_attention(**arrays, **net), np.tile(layer["b_o"], (3, n, 1)))

    def test_decoding_needs_a_training_length(self):
        def rows(m, **options):
            arrays = {**layer, "q_input": layer["k_input"][:, :m], "k_input": layer["k_input"][:, :m], "v_input": layer["v_input"][:, :m]}
            return attnspec.goat_attention(**arrays, **net, causal=True, **options)

        np.testing.assert_allclose(rows(M, training_length=11)[:, :4], rows(4, training_length=11), rtol=1e-11)
        assert np.abs(rows(M)[:, :4] - rows(4)).max() > 1e-3
        step = {**layer, "q_input": layer["k_input"][:, -1:]}
        np.testing.assert_allclose(attnspec.goat_attention(**step, **net, causal=True), rows(M)[:, -1:], rtol=1e-11)

    @pytest.mark.parametrize("change, message", [
        ({"w1": None}, r"^w1: expected all of w1, b1, w2, b2, gain, bump or none, got b1, w2, b2, gain, bump$"),
        (dict.fromkeys(("w1", "b1", "w2", "b2", "gain", "bump")), r"^w1: expected all of w1, .* or none, got recency$"),
        ({"w_q": np.ones((3, D, C)), "b_q": np.ones((3, D)), "w_o": np.ones((C, 3, D))},
         r"^w_k: expected a number of heads that divides the 3 of w_q, got 2$"),
        ({"mask": np.ones((3, N, M), bool)}, r"^mask: expected a shape that broadcasts to .* with h = 4 as in w_q, got \(3, 5, 7\)$"),
        ({"grid": (2, 2)}, r"^grid: expected positions 0..3 on 2 x 2 patches, got 0..6$"),
        ({"w_o": np.ones((C, HK, D))}, r"^w_o: expected shape \(c, h, d\) with h = 4 as in w_q, got \(6, 2, 9\)$"),
    ])
    def test_wrong_arguments_are_refused_by_name(self, change, message):
        with pytest.raises(ValueError, match=message):
            attnspec.goat_attention(**{**layer, **net, **change})


@pytest.mark.parametrize("name", ["q_input", "w_q", "a", "b", "w1", "b2", "gain", "bump", "recency", "gate_scale", "gate_bias"])
def test_complex_step_through_gate_and_prior(name):
    arrays = {**layer, **net, **gate}
    direction = RNG.standard_normal(np.shape(arrays[name]))

    def value(**moved):
        return attnspec.goat_attention(**moved, causal=True, training_length=8)

    np.testing.assert_allclose(complex_step(value, arrays, name, direction), central_difference(value, arrays, name, direction),
                               rtol=1e-5, atol=1e-6)
