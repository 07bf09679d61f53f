import math

import numpy as np
import pytest

import attnspec

from derivatives import central_difference, complex_step

RNG = np.random.default_rng(0)
B, H, HK, N, M, D, E, C, O = 2, 4, 2, 3, 5, 4, 2, 6, 7
ARRAYS = {
    "q": RNG.standard_normal((B, H, N, D)), "k": RNG.standard_normal((B, HK, M, D)), "v": RNG.standard_normal((B, HK, M, E)),
    "x": RNG.standard_normal((B, N, C)),
}
X_KEYS = RNG.standard_normal((B, M, C))
W_O, B_O = RNG.standard_normal((O, H, E)), RNG.standard_normal(O)
GATED = {"G1": (H, E), "G2": (HK, E), "G3": (HK, D), "G4": (H, D), "G5": (1, O)}      # heads and width of what is gated


def arrays_at(position, shared=False, headwise=False):
    heads, width = GATED[position]
    arrays = {**ARRAYS, "w_gate": RNG.standard_normal((1 if shared else heads, 1 if headwise else width, C)), "position": position}
    arrays["b_gate"] = RNG.standard_normal(arrays["w_gate"].shape[:2])
    if position in ("G2", "G3"):
        arrays["x_keys"] = X_KEYS
    if position == "G5":
        arrays |= {"w_o": W_O, "b_o": B_O}
    return arrays


ACT = {
    "sigmoid": lambda z: 1 / (1 + math.exp(-z)), "silu": lambda z: z / (1 + math.exp(-z)), "identity": lambda z: z,
    "ns_sigmoid": lambda z: 0.5 + 0.5 / (1 + math.exp(-z)),
}


def by_loops(q, k, v, x, w_gate, b_gate, position, activation, mode, x_keys=None, w_o=None, b_o=None, causal=False):
    """One batch entry, one number at a time."""
    def gate(y, token, head, lane):
        h, c = min(head, w_gate.shape[0] - 1), min(lane, w_gate.shape[1] - 1)
        g = ACT[activation](math.fsum(w_gate[h, c] * token) + b_gate[h, c])
        return y * g if mode == "multiplicative" else y + g

    def gated(Y, tokens):
        return np.array([[[gate(y, tokens[i], h, c) for c, y in enumerate(row)] for i, row in enumerate(head)] for h, head in enumerate(Y)])

    q = gated(q, x) if position == "G4" else q
    k = gated(k, x_keys) if position == "G3" else k
    v = gated(v, x_keys) if position == "G2" else v
    out = np.zeros((H, N, E))
    for h in range(H):
        for i in range(N):
            keys = [j for j in range(M) if not causal or j <= i + M - N]
            weights = {j: math.exp(math.fsum(q[h, i] * k[h // (H // HK), j]) / math.sqrt(D)) for j in keys}
            for c in range(E):
                out[h, i, c] = math.fsum(weights[j] * v[h // (H // HK), j, c] for j in keys) / math.fsum(weights.values())
    out = gated(out, x) if position == "G1" else out
    if w_o is None:
        return out
    layer = np.array([[sum(w_o[o, h, c] * out[h, i, c] for h in range(H) for c in range(E)) + b_o[o] for o in range(O)] for i in range(N)])
    return gated(layer[None], x)[0] if position == "G5" else layer


@pytest.mark.parametrize("position", GATED)
@pytest.mark.parametrize("shared, headwise", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("activation, mode", [("sigmoid", "multiplicative"), ("silu", "additive"), ("ns_sigmoid", "multiplicative"),
                                              ("identity", "multiplicative")])
def test_against_plain_loops(position, shared, headwise, activation, mode):
    arrays = {**arrays_at(position, shared, headwise), "activation": activation, "mode": mode, "causal": True}
    got = attnspec.gated_attention(**arrays, enable_gqa=True)
    for b in range(B):
        one = {name: value[b] if name in ("q", "k", "v", "x", "x_keys") else value for name, value in arrays.items()}
        np.testing.assert_allclose(got[b], by_loops(**one), rtol=1e-12, atol=1e-13)


class TestByHand:
    def test_each_head_has_its_own_gate(self):
        v = np.array([[[8.0, 4.0]], [[1.0, 1.0]]])
        w_gate = np.log([[[3.0]], [[1 / 3]]])                          # headwise: gates 3/4 and 1/4
        out = attnspec.gated_attention(np.ones((2, 1, 1)), np.ones((2, 1, 1)), v, [[1.0]], w_gate)
        np.testing.assert_allclose(out, [[[6.0, 3.0]], [[0.25, 0.25]]], rtol=1e-15)

    def test_elementwise(self):
        w_gate = np.log([[[3.0], [1 / 3]]])
        out = attnspec.gated_attention(np.ones((1, 1, 1)), np.ones((1, 1, 1)), [[[8.0, 4.0]]], [[1.0]], w_gate)
        np.testing.assert_allclose(out, [[[6.0, 1.0]]], rtol=1e-15)

    def test_values_are_gated_by_their_own_tokens(self):
        v, x_keys = [[[4.0], [4.0]]], [[np.log(3.0)], [-np.log(3.0)]]  # gates 3/4 and 1/4
        out = attnspec.gated_attention(np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), v, [[7.0]], [[[1.0]]], position="G2", x_keys=x_keys)
        np.testing.assert_allclose(out, [[[2.0]]], rtol=1e-15)

    def test_additive(self):
        out = attnspec.gated_attention(np.ones((1, 1, 1)), np.ones((1, 1, 1)), [[[8.0]]], [[2.0]], [[[1.0]]], mode="additive",
                                       activation="identity")
        np.testing.assert_array_equal(out, [[[10.0]]])

    def test_layer_output(self):
        v, w_o = np.array([[[1.0]], [[2.0]]]), np.array([[[1.0], [10.0]]])
        out = attnspec.gated_attention(np.ones((2, 1, 1)), np.ones((2, 1, 1)), v, [[0.0]], np.ones((2, 1, 1)), w_o=w_o, b_o=[100.0])
        np.testing.assert_array_equal(out, [[0.5 * 1 + 0.5 * 20 + 100]])
        out = attnspec.gated_attention(np.ones((2, 1, 1)), np.ones((2, 1, 1)), v, [[0.0]], [[[1.0]]], position="G5", w_o=w_o, b_o=[100.0])
        np.testing.assert_array_equal(out, [[0.5 * 121]])


class TestSpecialValues:
    @pytest.mark.parametrize("position", GATED)
    @pytest.mark.parametrize("mode", ["multiplicative", "additive"])
    def test_query_that_sees_nothing(self, position, mode):
        arrays = {**arrays_at(position), "mode": mode, "enable_gqa": True, "mask": np.array([[True] * M, [False] * M, [True] * M])}
        arrays["x"] = arrays["x"].copy()
        arrays["x"][:, 1] = np.nan
        out = attnspec.gated_attention(**arrays)
        if position == "G5":                                           # W_O has its bias, and the gate its token
            np.testing.assert_array_equal(np.isnan(out).any(-1), [[False, True, False]] * B)
        else:
            np.testing.assert_array_equal(out[..., 1, :], np.zeros((B, H, E)))
            assert np.all(np.isfinite(out))

    @pytest.mark.parametrize("position", ["G1", "G2", "G3", "G4"])
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_stands_at_a_masked_position_stays_there(self, position, bad):
        arrays = {**arrays_at(position), "enable_gqa": True}
        mask = np.ones((N, M), bool)
        mask[0, 2] = False
        spoilt = {**arrays, "mask": mask}
        for name in ("k", "v", "x_keys"):
            if name in arrays:
                spoilt[name] = arrays[name].copy()
                spoilt[name][..., 2, :] = bad
        with np.errstate(invalid="ignore"):                            # inf - inf where it is seen
            got = attnspec.gated_attention(**spoilt)
        clean = attnspec.gated_attention(**arrays, mask=mask)
        np.testing.assert_allclose(got[..., 0, :], clean[..., 0, :], rtol=1e-13, atol=1e-15)
        assert np.all(np.isnan(got[..., 1:, :]))

    def test_huge_gates(self):
        v, q = np.full((1, 1, 1), 3.0), np.ones((1, 1, 1))
        for z, want in ((1e300, 3.0), (-1e300, 0.0)):
            np.testing.assert_array_equal(attnspec.gated_attention(q, q, v, [[z]], [[[1.0]]]), [[[want]]])

    def test_huge_and_equal_logits(self):
        k, v = np.array([[[1.0], [1.0], [-1.0]]]), np.array([[[2.0], [4.0], [9.0]]])
        out = attnspec.gated_attention([[[1e5]]], k, v, [[0.0]], [[[1.0]]])
        np.testing.assert_array_equal(out, [[[1.5]]])

    def test_causal_with_more_queries_than_keys(self):
        out = attnspec.gated_attention(np.zeros((1, 3, 1)), np.zeros((1, 2, 1)), [[[2.0], [4.0]]], np.zeros((3, 1)), [[[1.0]]], causal=True)
        np.testing.assert_array_equal(out, [[[0.0], [1.0], [1.5]]])

    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    @pytest.mark.parametrize("mode", ["multiplicative", "additive"])
    def test_no_queries_or_no_keys(self, n, m, mode):
        arrays = {"q": np.ones((2, n, 3)), "k": np.ones((2, m, 3)), "v": np.ones((2, m, 5)), "x": np.ones((n, 4)), "mode": mode}
        np.testing.assert_array_equal(attnspec.gated_attention(**arrays, w_gate=np.ones((2, 5, 4))), np.zeros((2, n, 5)))
        out = attnspec.gated_attention(**arrays, w_gate=np.ones((2, 1, 4)), w_o=np.ones((6, 2, 5)), b_o=np.arange(6.0))
        np.testing.assert_array_equal(out, np.tile(np.arange(6.0), (n, 1)))


@pytest.mark.parametrize("position", GATED)
def test_last_row_is_the_decoding_step(position):
    arrays = {**arrays_at(position), "causal": True, "enable_gqa": True}
    step = {**arrays, "q": arrays["q"][..., -1:, :], "x": arrays["x"][..., -1:, :]}
    full = attnspec.gated_attention(**arrays)
    np.testing.assert_allclose(attnspec.gated_attention(**step), full[..., -1:, :], rtol=1e-13)


def test_keys_share_the_tokens_of_the_queries_in_self_attention():
    for position in ("G2", "G3"):
        arrays = {**arrays_at(position), "x": X_KEYS, "q": RNG.standard_normal((B, H, M, D)), "enable_gqa": True}
        given = attnspec.gated_attention(**arrays)
        del arrays["x_keys"]
        np.testing.assert_array_equal(attnspec.gated_attention(**arrays), given)


def test_weights_are_those_of_what_the_softmax_saw():
    arrays = {**arrays_at("G1"), "enable_gqa": True, "causal": True}
    result = attnspec.gated_attention(**arrays, return_weights=True)
    np.testing.assert_array_equal(result.out, attnspec.gated_attention(**arrays))
    want = attnspec.attention_weights(arrays["q"], arrays["k"], causal=True, enable_gqa=True)
    np.testing.assert_array_equal(result.weights, want)


def test_scale_option():
    arrays = {**arrays_at("G1"), "enable_gqa": True}
    doubled = attnspec.gated_attention(**{**arrays, "q": 2 * arrays["q"]}, scale=0.3)
    np.testing.assert_allclose(doubled, attnspec.gated_attention(**arrays, scale=0.6), rtol=1e-13)


@pytest.mark.parametrize("position", GATED)
@pytest.mark.parametrize("activation", ["sigmoid", "silu", "ns_sigmoid"])
def test_derivatives_of_all_arrays(position, activation):
    arrays = {name: value for name, value in arrays_at(position).items() if name != "position"}

    def function(**a):
        return attnspec.gated_attention(**a, position=position, activation=activation, enable_gqa=True)

    for name, array in arrays.items():
        direction = RNG.standard_normal(array.shape)
        exact, rough = (derivative(function, arrays, name, direction) for derivative in (complex_step, central_difference))
        np.testing.assert_allclose(exact, rough, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("position, change, message", [
    ("G1", {"position": "G6"}, r"^position: expected 'G1' or .* or 'G5', got 'G6'$"),
    ("G1", {"activation": "tanh"}, r"^activation: expected 'sigmoid' or 'silu' or 'identity' or 'ns_sigmoid', got 'tanh'$"),
    ("G1", {"mode": "mul"}, r"^mode: expected 'multiplicative' or 'additive', got 'mul'$"),
    ("G1", {"w_gate": np.ones((2, E, C)), "b_gate": None}, r"^w_gate: .*\(4 or 1, 2 or 1, c\) at position 'G1', got \(2, 2, 6\)$"),
    ("G1", {"w_gate": np.ones((H, D, C)), "b_gate": None}, r"^w_gate: .*\(4 or 1, 2 or 1, c\) at position 'G1', got \(4, 4, 6\)$"),
    ("G2", {"w_gate": np.ones((H, E, C)), "b_gate": None}, r"^w_gate: expected shape \(2 or 1, 2 or 1, c\)"),
    ("G3", {"w_gate": np.ones((HK, E, C)), "b_gate": None}, r"^w_gate: expected shape \(2 or 1, 4 or 1, c\)"),
    ("G4", {"w_gate": np.ones((HK, D, C)), "b_gate": None}, r"^w_gate: expected shape \(4 or 1, 4 or 1, c\)"),
    ("G5", {"w_gate": np.ones((H, O, C)), "b_gate": None}, r"^w_gate: expected shape \(1, 7 or 1, c\)"),
    ("G1", {"w_gate": np.ones((H, E, C + 1))}, r"^w_gate: expected shape \(hg, g, c\) with c = 6 as in x"),
    ("G1", {"b_gate": np.ones((H, E + 1))}, r"^b_gate: "),
    ("G1", {"x_keys": X_KEYS}, r"^x_keys: expected only at positions 'G2' and 'G3'"),
    ("G2", {"x_keys": None}, r"^x_keys: expected the hidden states of the 5 keys, as x has those of 3 queries, got None$"),
    ("G3", {"x_keys": X_KEYS[:, 1:]}, r"^x_keys: "),
    ("G5", {"w_o": None, "b_o": None}, r"^w_o: expected an array of shape \(o, h, e\) at position 'G5'"),
    ("G5", {"w_o": W_O[:, :2]}, r"^w_o: "),
    ("G1", {"b_o": B_O}, r"^b_o: expected only together with w_o"),
    ("G1", {"mask": np.ones((N, M - 1), bool)}, r"^mask: "),
    ("G1", {"causal": "left"}, r"^causal: "),
    ("G1", {"enable_gqa": False}, r"^k: .*for grouped heads set enable_gqa=True$"),
])
def test_wrong_options_are_refused(position, change, message):
    with pytest.raises(ValueError, match=message):
        attnspec.gated_attention(**{**arrays_at(position), "enable_gqa": True, **change})


@pytest.mark.parametrize("position", ["G1", "G2", "G3", "G4"])
def test_a_gate_that_overflows_where_nobody_looks_says_nothing(position):
    one, x = np.ones((1, 2, 1)), np.array([[1e200, 1e200], [0.0, 0.0]])
    mask = [[False, False], [False, True]]                             # nobody looks at token 0, which sees nothing
    got = attnspec.gated_attention(one, one, one, x, [[[1e200, -1e200]]], position=position, activation="silu", mask=mask)
    want = [[[0.0], [0.0]]] if position in ("G1", "G2") else [[[0.0], [1.0]]]
    np.testing.assert_array_equal(got, want)
