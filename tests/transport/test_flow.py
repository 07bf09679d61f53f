import itertools
import math

import numpy as np
import pytest

import attnspec

from derivatives import central_difference, complex_step

RNG = np.random.default_rng(0)
q, k, v = RNG.standard_normal((2, 3, 4, 5)), RNG.standard_normal((2, 3, 6, 5)), RNG.standard_normal((2, 3, 6, 2))
S1 = 1 / (1 + math.exp(-1))


def dot(x, y, eps):
    return sum((a + eps) * (b + eps) for a, b in zip(x, y, strict=True))


def total(rows, weights=None):
    weights = [1.0] * len(rows) if weights is None else weights
    return [sum(w * row[c] for w, row in zip(weights, rows, strict=True)) for c in range(len(rows[0]))]


def sigma(x):
    return 1 / (1 + math.exp(-x))


def flows(q, k, eps, flow_eps):
    """I, I^, O^ of one head of positive features, a node at a time."""
    incoming = [1 / (dot(x, total(k), eps) + flow_eps) for x in q]
    outgoing = [1 / (dot(y, total(q), eps) + flow_eps) for y in k]
    conserved_in = [dot(x, total(k, outgoing), eps) + flow_eps for x in q]
    conserved_out = [dot(y, total(q, incoming), eps) + flow_eps for y in k]
    return incoming, conserved_in, conserved_out


def by_loops(q, k, v, eps=1e-6, flow_eps=0.0, clip=1.0, feature="sigmoid", competition="sources"):
    """Flow attention of heads q (h, n, d), k (h, m, d), v (h, m, e) with plain loops."""
    phi = sigma if feature == "sigmoid" else lambda x: max(x, 0.0) + 1e-6
    q, k = ([[[phi(x) for x in row] for row in head] for head in heads] for heads in (q, k))
    (h, n, m, e) = len(q), len(q[0]), len(k[0]), len(v[0][0])
    each = [flows(q[a], k[a], eps, flow_eps) for a in range(h)]
    force = [[math.exp(x if clip is None else min(max(x, -clip), clip)) for x in one[2]] for one in each]
    out = np.zeros((h, n, e))
    for a, i, j, c in itertools.product(range(h), range(n), range(m), range(e)):
        rivals = force[a] if competition == "sources" else [force[b][j] for b in range(h)]
        incoming, conserved_in, _ = each[a]
        share = m * force[a][j] / sum(rivals)
        out[a, i, c] += sigma(conserved_in[i] * n / m) * incoming[i] * dot(q[a][i], k[a][j], 0.0) * share * v[a][j][c]
    return out


def causal_by_loops(q, k, v, eps=1e-6, clip=1.0):
    """Causal flow attention of one head with plain loops: everything known at step t is computed from the first t rows only."""
    q, k = ([[sigma(x) for x in row] for row in rows] for rows in (q, k))
    incoming, outgoing, force, share, out = [], [], [], [], []
    for i in range(len(q)):
        t = i + 1
        incoming.append(t / dot(q[i], total(k[:t]), eps))
        outgoing.append(t / dot(k[i], total(q[:t]), eps))
        conserved_in = dot(q[i], total(k[:t], outgoing), eps) / t
        conserved_out = dot(k[i], total(q[:t], incoming), eps) / t
        force.append(math.exp(min(conserved_out, clip)))
        share.append(t * force[i] / sum(force))
        row = [sum(dot(q[i], k[j], 0.0) * share[j] * v[j][c] for j in range(t)) for c in range(len(v[0]))]
        out.append([sigma(conserved_in) * incoming[i] / t * x for x in row])
    return np.array(out)


@pytest.mark.parametrize("options", [
    {}, {"clip": None}, {"clip": 0.3}, {"clip": 5.0, "flow_eps": 1e-6}, {"flow_eps": 0.1, "clip": 0.8}, {"eps": 0.05}, {"eps": 0.0},
    {"feature": "relu", "clip": None}, {"competition": "heads", "clip": None}, {"competition": "heads", "feature": "relu", "clip": 0.8},
])
@pytest.mark.parametrize("n, m", [(4, 6), (6, 4), (5, 5), (1, 3)])
def test_against_plain_loops(n, m, options):
    rng = np.random.default_rng(n + 10 * m)
    q, k, v = rng.standard_normal((3, n, 4)), rng.standard_normal((3, m, 4)), rng.standard_normal((3, m, 2))
    got = attnspec.flow_attention(q, k, v, **options)
    np.testing.assert_allclose(got, by_loops(q, k, v, **options), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"clip": 5.0}, {"clip": 10.0, "eps": 0.0}, {"clip": 0.9, "eps": 0.1}])
def test_causal_against_plain_loops(options):
    q, k, v = (3 * RNG.standard_normal((9, width)) for width in (4, 4, 2))
    got = attnspec.flow_attention_causal(q, k, v, **options)
    np.testing.assert_allclose(got, causal_by_loops(q, k, v, **options), rtol=1e-12, atol=1e-13)


class TestByHand:
    # phi(k) = 1/4 and 3/4, phi(q) = 1/2 twice: I = 2, O = (4, 4/3), I^ = 1, O^ = (1/2, 3/2); what sink i draws from j is k_j C_j.
    q, k, v = np.zeros((2, 1)), np.log([[1 / 3], [3.0]]), np.eye(2)

    @pytest.mark.parametrize("clip, ratio", [(None, 1.0), (1.0, 0.5), (0.75, 0.25), (0.5, 0.0), (2.0, 1.0)])
    def test_competition_with_and_without_clipping(self, clip, ratio):
        low = 2 / (1 + math.exp(ratio))                                # C = 2 softmax of (1/2, min(3/2, clip)), which differ by `ratio`
        want = S1 * np.array([low / 4, (2 - low) * 3 / 4])
        out = attnspec.flow_attention(self.q, self.k, self.v, eps=0.0, clip=clip)
        np.testing.assert_allclose(out, [want, want], rtol=1e-14)

    def test_allocation_counts_sinks_per_source(self):
        # Four queries of 1/2 and one key of 1/2: I = 4, O = 1, I^ = 1/4, allocation sigma(I^ n/m) = sigma(1).
        out = attnspec.flow_attention(np.zeros((4, 1)), np.zeros((1, 1)), [[1.0]], eps=0.0)
        np.testing.assert_allclose(out, np.full((4, 1), S1), rtol=1e-15)

    def test_unequal_sinks(self):
        # phi(q) = 1/4 and 3/4, one key of 1/2: O = 2, I^ = q, allocation sigma(2 q); each sink takes 1 of the value.
        out = attnspec.flow_attention(np.log([[1 / 3], [3.0]]), np.zeros((1, 1)), [[1.0]], eps=0.0)
        np.testing.assert_allclose(out[:, 0], [sigma(0.5), sigma(1.5)], rtol=1e-15)

    def test_causal_second_row(self):
        # t = 2, phi(q) = 1/2, phi(k) = (1/4, 3/4): I = (8, 4), O = (8, 8/3), I^_2 = 1/2 (2 + 2) / 2 = 1, O^ = (1, 3/4 (4 + 2) / 2 = 9/4).
        # C = (1, 2 e^2.25 / (e + e^2.25)) unclipped, and (1, 1) with clip 1.
        for clip, C in ((None, 2 / (1 + math.exp(-1.25))), (1.0, 1.0), (2.0, 2 / (1 + math.exp(-1.0)))):
            A = attnspec.flow_attention_causal(self.q, self.k, self.v, eps=0.0, clip=clip)
            np.testing.assert_allclose(A, [[S1, 0.0], [S1 / 4, S1 * C * 3 / 4]], rtol=1e-14)

    def test_eps_is_added_to_both_factors(self):
        # phi = 1/2 and eps = 1/2, one of each: I = O = 1/(1 * 1); I^ = 1 * (1/2 + 1/2) = 1; sum_j A = sigma(1) * 1/4.
        for form in (attnspec.flow_attention, attnspec.flow_attention_causal):
            np.testing.assert_allclose(form([[0.0]], [[0.0]], [[1.0]], eps=0.5), [[S1 / 4]], rtol=1e-15)

    def test_flow_eps_is_added_to_every_flow(self):
        # I = O = 1/(1/4 + 1/4) = 2; I^ = 1/2 * 2 * 1/2 + 1/4 = 3/4; A = sigma(3/4) * 2/4.
        out = attnspec.flow_attention([[0.0]], [[0.0]], [[1.0]], eps=0.0, flow_eps=0.25)
        np.testing.assert_allclose(out, [[sigma(0.75) / 2]], rtol=1e-15)

    def test_relu_features_start_at_1e_6(self):
        # One feature is 3 + 1e-6 or 1e-6; one query and one key conserve sigma(1) whatever they are.
        for x in (3.0, -3.0, 0.0):
            np.testing.assert_allclose(attnspec.flow_attention([[x]], [[-x]], [[2.0]], eps=0.0, feature="relu"), [[2 * S1]], rtol=1e-12)

    def test_heads_that_compete_with_nobody_take_everything(self):
        # One head: every share is 1, so that C_j = m = 2; sources as in the class.
        out = attnspec.flow_attention(self.q[None], self.k[None], self.v[None], eps=0.0, clip=None, competition="heads")
        np.testing.assert_allclose(out[0], np.tile(S1 * np.array([0.5, 1.5]), (2, 1)), rtol=1e-14)


class TestSpecialValues:
    @pytest.mark.parametrize("eps", [1e-6, 0.0])
    @pytest.mark.parametrize("competition", ["sources", "heads"])
    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_keys(self, n, m, eps, competition):
        out, A, _ = attnspec.flow_attention(np.ones((2, n, 2)), np.ones((2, m, 2)), np.ones((2, m, 5)), eps=eps, competition=competition,
                                            return_weights=True)
        np.testing.assert_array_equal(out, np.zeros((2, n, 5)))
        assert A.shape == (2, n, m)

    def test_nothing_to_attend_causally(self):
        assert attnspec.flow_attention_causal(np.ones((0, 2)), np.ones((0, 2)), np.ones((0, 5))).shape == (0, 5)

    def test_equal_keys_share_equally(self):
        q, k, v = RNG.standard_normal((4, 3)), np.tile(RNG.standard_normal(3), (6, 1)), RNG.standard_normal((6, 2))
        A = attnspec.flow_attention(q, k, v, return_weights=True).weights
        np.testing.assert_allclose(A, np.tile(A[:, :1], (1, 6)), rtol=1e-14)

    def test_saturated_features(self):
        # phi = 1 everywhere: all queries and keys are alike.
        q, k, v = np.full((3, 2), 1e4), np.full((5, 2), 1e4), RNG.standard_normal((5, 2))
        np.testing.assert_allclose(attnspec.flow_attention(q, k, v, eps=0.0), np.tile(S1 * v.mean(0), (3, 1)), rtol=1e-14)

    @pytest.mark.parametrize("form", [attnspec.flow_attention, attnspec.flow_attention_causal])
    @pytest.mark.parametrize("clip", [1.0, 10.0, None])
    def test_vanishing_features_stay_finite(self, form, clip):
        q, k, v = 1e3 * RNG.standard_normal((6, 3)), 1e3 * RNG.standard_normal((6, 3)), RNG.standard_normal((6, 2))
        assert np.all(np.isfinite(form(q, k, v, clip=clip)))

    def test_unclipped_causal_competition_does_not_overflow(self):
        # The first sources flow almost nothing; a later one at full strength has an outgoing flow of thousands, and takes all.
        q, k = np.zeros((3, 1)), np.array([[-10.0], [-10.0], [10.0]])
        A = attnspec.flow_attention_causal(q, k, np.eye(3), eps=0.0, clip=None)
        assert np.all(np.isfinite(A))
        np.testing.assert_allclose(A[2, 2], 3 * S1, rtol=1e-3)

    def test_what_is_not_a_number_in_the_future_stays_there(self):
        q, k, v = RNG.standard_normal((5, 3)), RNG.standard_normal((5, 3)), RNG.standard_normal((5, 2))
        want = attnspec.flow_attention_causal(q[:3], k[:3], v[:3])
        for array in (q, k, v):
            array[3] = np.nan
        got = attnspec.flow_attention_causal(q, k, v)
        np.testing.assert_allclose(got[:3], want, rtol=1e-13)
        assert np.all(np.isnan(got[3:]))


def test_heads_of_the_values_compete_too():
    q, k, v = RNG.standard_normal((3, 5)), RNG.standard_normal((4, 5)), RNG.standard_normal((2, 4, 2))
    options = {"competition": "heads", "clip": None}
    for queries, keys in ((q, k), (q[None], k), (q, k[None])):
        out, A, _ = attnspec.flow_attention(queries, keys, v, **options, return_weights=True)
        np.testing.assert_allclose(out, by_loops([q, q], [k, k], v, **options), rtol=1e-12)
        np.testing.assert_allclose(A @ v, out, rtol=1e-12)


@pytest.mark.parametrize("x", [-700.0, -709.0, -740.0, -745.0, -1e4])
def test_flows_that_underflow_count_as_none(x):
    for form in (attnspec.flow_attention, attnspec.flow_attention_causal):
        out = form(np.full((3, 2), x), np.zeros((3, 2)), np.ones((3, 1)), eps=0.0)
        assert np.all(np.isfinite(out))
        if x < -709:
            np.testing.assert_array_equal(out, np.zeros((3, 1)))


def test_the_causal_form_is_not_the_bidirectional_one():
    q, k, v = RNG.standard_normal((4, 3)), RNG.standard_normal((4, 3)), RNG.standard_normal((4, 2))
    assert np.abs(attnspec.flow_attention_causal(q, k, v)[-1] - attnspec.flow_attention(q, k, v)[-1]).max() > 1e-3


def test_causal_weights_give_the_output_and_are_lower_triangular():
    q, k, v = RNG.standard_normal((2, 6, 3)), RNG.standard_normal((2, 6, 3)), RNG.standard_normal((2, 6, 4))
    out, A, _ = attnspec.flow_attention_causal(q, k, v, return_weights=True)
    np.testing.assert_allclose(A @ v, out, rtol=1e-13)
    np.testing.assert_array_equal(A[:, np.arange(6)[:, None] < np.arange(6)], 0.0)
    assert np.all(A[:, np.arange(6)[:, None] >= np.arange(6)] > 0)


def test_clip_binds_for_about_half_of_the_sources_where_n_equals_m():
    # Without clipping sum_j O^_j = n; equal shares are those of sources at the bound.
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((40, 8)), rng.standard_normal((40, 8))
    A, free = (attnspec.flow_attention(q, k, np.eye(40), eps=0.0, clip=clip) for clip in (1.0, 1e-300))
    share = (A / free)[0]
    at_the_bound = np.isclose(share, share.max(), rtol=1e-12).sum()
    assert 12 < at_the_bound < 28


def test_no_bound_is_an_infinite_one():
    for form, arrays in ((attnspec.flow_attention, (q, k, v)), (attnspec.flow_attention_causal, (q, q, q))):
        np.testing.assert_array_equal(form(*arrays, clip=np.inf), form(*arrays, clip=None))


def test_leading_axes_broadcast_one_by_one():
    got = attnspec.flow_attention(q[:, :1], k[0], v)
    want = [[attnspec.flow_attention(q[b, 0], k[0, h], v[b, h]) for h in range(3)] for b in range(2)]
    np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("options", [{"clip": 0.7}, {"feature": "relu", "clip": None}, {"competition": "heads", "flow_eps": 0.01}])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_complex_step_with_options(name, options):
    arrays = {"q": q, "k": k, "v": v}
    direction = RNG.standard_normal(arrays[name].shape)

    def value(**moved):
        return attnspec.flow_attention(**moved, **options)

    np.testing.assert_allclose(complex_step(value, arrays, name, direction), central_difference(value, arrays, name, direction),
                               rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options, message", [
    ({"clip": 0.0}, r"^clip: expected a number > 0, got 0.0$"),
    ({"clip": "no"}, r"^clip: expected a number, got 'no'$"),
    ({"eps": -1e-6}, r"^eps: expected a number >= 0, got -1e-06$"),
    ({"flow_eps": None}, r"^flow_eps: expected a number, got None$"),
    ({"feature": "elu"}, r"^feature: expected 'sigmoid' or 'relu', got 'elu'$"),
    ({"competition": "queries"}, r"^competition: expected 'sources' or 'heads', got 'queries'$"),
])
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        attnspec.flow_attention(q, k, v, **options)


def test_competing_heads_need_a_head_axis():
    with pytest.raises(ValueError, match=r"^competition: 'heads' expects a head axis, .* got \(4, 5\) and \(6, 5\)$"):
        attnspec.flow_attention(q[0, 0], k[0, 0], v[0, 0], competition="heads")


def test_causal_needs_as_many_keys_as_queries():
    with pytest.raises(ValueError, match=r"^k: expected shape \(\.\.\., n, d\) with n = 4 as in q, got \(2, 3, 6, 5\)$"):
        attnspec.flow_attention_causal(q, k, v)
