import math

import numpy as np
import pytest

import attnspec

from derivatives import central_difference, complex_step

RNG = np.random.default_rng(4)
q, M, P = (RNG.standard_normal(size) for size in ((4, 5), (6, 5), (6, 2)))
positive_q, positive_M = RNG.uniform(0.1, 1.0, (4, 5)), RNG.uniform(0.1, 1.0, (6, 5))
NAMES = ["dot", "cosine", "euclidean", "manhattan", "kl", "reverse_kl", "js", "cosine_official", "normdot_official", "js_official"]


def divergence(x, y, eps):
    return math.fsum(a * (math.log(a + eps) - math.log(b + eps)) for a, b in zip(x, y, strict=True))


def plain_similarity(name, query, memories, j, eps=1e-4):
    """Similarity of one query and memory j, in plain Python."""
    m, dot = memories[j], math.fsum(memories[j] * query)
    n, p = m / math.fsum(m), query / math.fsum(query)
    u = (n + p) / 2
    return {
        "dot": lambda: dot,
        "cosine": lambda: dot / (math.hypot(*m) * math.hypot(*query)),
        "cosine_official": lambda: dot / (math.hypot(*memories.ravel()) * math.hypot(*query)),
        "normdot_official": lambda: math.fsum(n * p) / math.fsum(math.fsum(row / math.fsum(row) * p) for row in memories),
        "euclidean": lambda: 1 / math.fsum((m - query) ** 2),
        "manhattan": lambda: 1 / math.fsum(abs(a - b) for a, b in zip(m, query, strict=True)),
        "kl": lambda: 1 / divergence(n, p, eps),
        "reverse_kl": lambda: 1 / divergence(p, n, eps),
        "js": lambda: 1 / (divergence(n, u, eps) / 2 + divergence(p, u, eps) / 2),
        "js_official": lambda: 1 / (0.5 / divergence(n, p, eps) + 0.5 / divergence(p, n, eps)),
    }[name]()


class TestSimilarity:
    @pytest.mark.parametrize("name", NAMES)
    def test_in_plain_python(self, name):
        got = attnspec.universal_hopfield_similarity(positive_q, positive_M, similarity=name)
        want = [[plain_similarity(name, row, positive_M, j) for j in range(6)] for row in positive_q]
        np.testing.assert_allclose(got, want, rtol=1e-11)

    @pytest.mark.parametrize("name", NAMES[:4] + NAMES[7:9])
    def test_of_numbers_of_both_signs(self, name):
        got = attnspec.universal_hopfield_similarity(q, M, similarity=name)
        np.testing.assert_allclose(got, [[plain_similarity(name, row, M, j) for j in range(6)] for row in q], rtol=1e-11)

    @pytest.mark.parametrize("name", NAMES[4:7])
    def test_eps(self, name):
        got = attnspec.universal_hopfield_similarity(positive_q, positive_M, similarity=name, eps=0.1)
        want = [[plain_similarity(name, row, positive_M, j, 0.1) for j in range(6)] for row in positive_q]
        np.testing.assert_allclose(got, want, rtol=1e-11)

    def test_by_hand(self):
        sim = attnspec.universal_hopfield_similarity
        query, memories = [[1.0, 2.0, 2.0]], [[2.0, 4.0, 4.0], [0.0, 3.0, -4.0], [0.0, 0.0, 0.0]]
        np.testing.assert_array_equal(sim(query, memories), [[18.0, -2.0, 0.0]])
        np.testing.assert_allclose(sim(query, memories, similarity="cosine"), [[1.0, -2 / 15, 0.0]], rtol=1e-15)
        np.testing.assert_allclose(sim(query, memories, similarity="cosine_official"), [[18.0, -2.0, 0.0]] / np.sqrt(61) / 3, rtol=1e-15)
        np.testing.assert_allclose(sim(query, memories, similarity="euclidean"), [[1 / 9, 1 / 38, 1 / 9]], rtol=1e-15)
        np.testing.assert_allclose(sim(query, memories, similarity="manhattan"), [[1 / 5, 1 / 8, 1 / 5]], rtol=1e-15)

    def test_an_exact_match_is_infinitely_similar(self):
        for name in ("euclidean", "manhattan", "kl", "reverse_kl", "js"):
            got = attnspec.universal_hopfield_similarity(positive_M[:1], positive_M[:2], similarity=name)
            assert got[0, 0] == np.inf
            assert np.isfinite(got[0, 1])

    def test_the_codes_jensen_shannon_calls_a_match_the_least_similar(self):
        got = attnspec.universal_hopfield_similarity(positive_M[:1], positive_M, similarity="js_official")
        assert got[0, 0] == 0.0
        assert got.argmin() == 0

    def test_zeros_have_no_direction(self):
        for name in ("cosine", "cosine_official", "normdot_official"):
            got = attnspec.universal_hopfield_similarity(np.zeros((1, 2)), [[1.0, 2.0], [0.0, 0.0]], similarity=name)
            np.testing.assert_array_equal(got, [[0.0, 0.0]])
            got = attnspec.universal_hopfield_similarity([[1.0, 2.0]], np.zeros((2, 2)), similarity=name)
            np.testing.assert_array_equal(got, [[0.0, 0.0]])

    @pytest.mark.parametrize("name", NAMES)
    def test_derivatives(self, name):
        arrays = {"query": positive_q, "memories": positive_M}
        for which in arrays:
            direction = RNG.standard_normal(arrays[which].shape)

            def function(**moved):
                return attnspec.universal_hopfield_similarity(**moved, similarity=name)

            rough = central_difference(function, arrays, which, direction)
            np.testing.assert_allclose(complex_step(function, arrays, which, direction), rough, rtol=1e-5, atol=1e-6 * np.abs(rough).max())

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_memories(self, name, n, m):
        for lead in ((), (2,), (0,)):
            got = attnspec.universal_hopfield_similarity(np.ones((*lead, n, 2)), np.ones((*lead, m, 2)), similarity=name)
            assert got.shape == (*lead, n, m)


class TestRecall:
    def test_by_hand(self):
        # dot products 1 and 3, values 10 and 20
        recall = attnspec.universal_hopfield
        arrays = ([[1.0]], [[1.0], [3.0]], [[10.0], [20.0]])
        np.testing.assert_allclose(recall(*arrays, separation="identity"), [[70.0]], rtol=1e-15)
        np.testing.assert_allclose(recall(*arrays, separation="identity", beta=2.0), [[140.0]], rtol=1e-15)
        np.testing.assert_allclose(recall(*arrays, separation="identity", normalise=True), [[17.5]], rtol=1e-15)
        np.testing.assert_allclose(recall(*arrays, separation="polynomial", param=2), [[190.0]], rtol=1e-15)
        np.testing.assert_allclose(recall(*arrays, separation="polynomial", param=2, normalise=True), [[19.0]], rtol=1e-15)
        np.testing.assert_allclose(recall(*arrays, separation="polynomial", param=0.5), [[10 + 20 * np.sqrt(3.0)]], rtol=1e-15)
        np.testing.assert_allclose(recall(*arrays, separation="log"), [[20 * np.log(3.0)]], rtol=1e-15)
        np.testing.assert_array_equal(recall(*arrays, separation="max"), [[20.0]])
        e = np.exp([0.25 * 2, 0.75 * 2])
        np.testing.assert_allclose(recall(*arrays, param=2.0, normalise=True), [[(10 * e[0] + 20 * e[1]) / e.sum()]], rtol=1e-15)
        e = np.exp([1.0 * 0.3, 3.0 * 0.3])
        np.testing.assert_allclose(recall(*arrays, beta=0.1, param=3.0), [[(10 * e[0] + 20 * e[1]) / e.sum()]], rtol=1e-14)

    def test_memories_stand_for_a_missing_projection(self):
        np.testing.assert_array_equal(attnspec.universal_hopfield(q, M), attnspec.universal_hopfield(q, M, M))

    def test_weights(self):
        got = attnspec.universal_hopfield(q, M, P, separation="polynomial", param=3, return_weights=True)
        np.testing.assert_allclose(got.weights, (q @ M.T) ** 3, rtol=1e-13)
        np.testing.assert_array_equal(got.out, got.weights @ P)

    @pytest.mark.parametrize("name", ["euclidean", "manhattan", "kl", "js"])
    @pytest.mark.parametrize("options", [
        {}, {"normalise": True, "separation": "polynomial", "param": 3}, {"normalise": True, "separation": "identity"},
        {"separation": "max"}, {"normalise": True, "separation": "max"},
    ])
    def test_an_exact_match_takes_all_the_weight(self, name, options):
        got = attnspec.universal_hopfield(positive_M[2:3], positive_M, P, similarity=name, **options)
        np.testing.assert_allclose(got, P[2:3], rtol=1e-15)

    def test_exact_matches_share_it(self):
        twice = np.concatenate([positive_M, positive_M[2:3]])
        values = np.arange(7.0)[:, None]
        got = attnspec.universal_hopfield(positive_M[1:3], twice, values, similarity="euclidean")
        np.testing.assert_array_equal(got, [[1.0], [4.0]])
        got = attnspec.universal_hopfield(positive_M[1:3], twice, values, similarity="euclidean", separation="identity", normalise=True)
        np.testing.assert_array_equal(got, [[1.0], [4.0]])

    def test_the_limit_of_a_match(self):
        query = positive_M[2:3] + 1e-9
        for options in ({}, {"normalise": True}, {"normalise": True, "separation": "identity"}):
            near = attnspec.universal_hopfield(query, positive_M, P, similarity="euclidean", **options)
            exact = attnspec.universal_hopfield(positive_M[2:3], positive_M, P, similarity="euclidean", **options)
            np.testing.assert_allclose(near, exact, rtol=1e-8)

    def test_a_match_without_normalisation_diverges(self):
        got = attnspec.universal_hopfield([[1.0]], [[1.0], [2.0]], [[5.0], [1.0]], similarity="euclidean", separation="identity")
        np.testing.assert_array_equal(got, [[np.inf]])

    def test_rows_that_sum_to_zero_stay_as_they_are(self):
        got = attnspec.universal_hopfield([[1.0]], [[1.0], [-1.0]], [[2.0], [5.0]], separation="identity", normalise=True)
        np.testing.assert_array_equal(got, [[-3.0]])
        got = attnspec.universal_hopfield([[0.0]], [[1.0], [-1.0]], [[2.0], [5.0]], normalise=True)
        np.testing.assert_array_equal(got, [[3.5]])

    def test_ties_of_the_largest_go_to_the_first(self):
        got = attnspec.universal_hopfield([[1.0]], [[2.0], [3.0], [3.0]], [[1.0], [2.0], [4.0]], separation="max", return_weights=True)
        np.testing.assert_array_equal(got.weights, [[0.0, 1.0, 0.0]])

    def test_huge_similarities(self):
        np.testing.assert_array_equal(attnspec.universal_hopfield([[1e4]], [[1e3], [-1e3]]), [[1e3]])

    @pytest.mark.parametrize("separation", ["softmax", "polynomial", "identity", "log", "max"])
    @pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
    def test_no_queries_or_no_memories(self, separation, n, m):
        for normalise in (False, True):
            got = attnspec.universal_hopfield(np.ones((n, 2)), np.ones((m, 2)), np.ones((m, 5)), separation=separation, normalise=normalise)
            np.testing.assert_array_equal(got, np.zeros((n, 5)))

    def test_leading_axes(self):
        queries, memories = RNG.standard_normal((2, 1, 4, 5)), RNG.standard_normal((3, 6, 5))
        for name in ("dot", "cosine_official", "normdot_official", "manhattan"):
            got = attnspec.universal_hopfield(queries, memories, similarity=name)
            want = [[attnspec.universal_hopfield(queries[i, 0], memories[j], similarity=name) for j in range(3)] for i in range(2)]
            np.testing.assert_allclose(got, want, rtol=1e-12)

    @pytest.mark.parametrize("separation, param", [("softmax", 2.0), ("polynomial", 3), ("polynomial", 0.5), ("log", 1), ("identity", 1)])
    @pytest.mark.parametrize("normalise", [False, True])
    def test_derivatives(self, separation, param, normalise):
        arrays = {"query": positive_q, "memories": positive_M, "projection": P}
        for which in arrays:
            direction = RNG.standard_normal(arrays[which].shape)

            def function(**moved):
                return attnspec.universal_hopfield(**moved, separation=separation, param=param, normalise=normalise)

            rough = central_difference(function, arrays, which, direction)
            np.testing.assert_allclose(complex_step(function, arrays, which, direction), rough, rtol=1e-5, atol=1e-6 * np.abs(rough).max())


class TestRefusals:
    @pytest.mark.parametrize("name, value", [
        ("similarity", "hamming"), ("separation", "square"), ("beta", 0.0), ("param", "3"), ("param", 0.0), ("normalise", "yes"),
        ("eps", 0.0),
    ])
    def test_options(self, name, value):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            attnspec.universal_hopfield(q, M, **{name: value})

    @pytest.mark.parametrize("name", ["kl", "reverse_kl", "js", "js_official"])
    def test_divergences_of_what_are_no_distributions(self, name):
        with pytest.raises(ValueError, match=f"^memories: expected entries >= 0 with a positive sum for the similarity '{name}'"):
            attnspec.universal_hopfield(positive_q, M, similarity=name)
        with pytest.raises(ValueError, match=f"^query: expected entries >= 0 with a positive sum for the similarity '{name}'"):
            attnspec.universal_hopfield(np.zeros((1, 5)), positive_M, similarity=name)

    def test_powers_and_logarithms_of_negative_similarities(self):
        with pytest.raises(ValueError, match=r"^param: expected a whole number where similarities are negative, got 0.5$"):
            attnspec.universal_hopfield([[1.0]], [[-1.0]], separation="polynomial", param=0.5)
        with pytest.raises(ValueError, match=r"^param: expected a number >= 0 where a similarity is 0, got -1$"):
            attnspec.universal_hopfield([[1.0]], [[0.0]], separation="polynomial", param=-1)
        with pytest.raises(ValueError, match=r"^separation: expected similarities > 0 for 'log'$"):
            attnspec.universal_hopfield([[1.0]], [[0.0]], separation="log")
