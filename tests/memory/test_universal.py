import math

import mpmath
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

    @pytest.mark.parametrize("eps", [1e-4, 1e-12, 0.5, 1e-300])
    @pytest.mark.parametrize("step", [0, 1, 2**10, 2**20, 2**30, 2**44, 2**47, 2**49])
    def test_divergences_of_close_distributions_do_not_cancel(self, step, eps):
        """Against 400 digits; whole numbers that sum to a power of 2 are distributions without rounding."""
        y = np.array([2**50, 2**47, 0, 1, 0])
        x = y + np.array([-step, min(step, 2**46), 1, 2**40, 0])
        x[4], y[4] = 2**52 - x[:4].sum(), 2**52 - y[:4].sum()
        got = {name: 1 / attnspec.universal_hopfield_similarity(y[None], x[None], similarity=name, eps=eps)[0, 0]
               for name in ("kl", "reverse_kl", "js")}
        with mpmath.workdps(400):
            p, q = ([mpmath.mpf(int(v)) / 2**52 for v in z] for z in (x, y))
            e = mpmath.mpf(eps)

            def exact(a, b):
                return mpmath.fsum(s * mpmath.log((s + e) / (t + e)) for s, t in zip(a, b, strict=True))

            u = [(s + t) / 2 for s, t in zip(p, q, strict=True)]
            want = {"kl": exact(p, q), "reverse_kl": exact(q, p), "js": exact(p, u) / 2 + exact(q, u) / 2}
        np.testing.assert_allclose(got["js"], float(want["js"]), rtol=1e-14)
        # Terms of js are positive, but those of kl, of the size of log(x/y) max(eps, |x - y|), have both signs.
        pairs = list(zip((x / 2**52).tolist(), (y / 2**52).tolist(), strict=True))
        terms = sum(abs(math.log(s + eps) - math.log(t + eps)) * (min(eps, max(s, t) + eps) + abs(s - t)) for s, t in pairs)
        for name in ("kl", "reverse_kl"):
            np.testing.assert_allclose(got[name], float(want[name]), rtol=1e-14, atol=1e-14 * terms)

    @pytest.mark.parametrize("name", ["kl", "reverse_kl", "js", "js_official"])
    def test_derivatives_of_close_distributions(self, name):
        query, memories = np.array([[1.0, 2.0, 3.0, 2.0]]), np.array([[1.0, 2.0, 3.0 + 2.0**-20, 2.0]])

        def similarity(h):
            m, q, e = [mpmath.mpf(v) for v in memories[0].tolist()], [mpmath.mpf(v) for v in query[0].tolist()], mpmath.mpf(1e-4)
            m[1] += h
            m, q = [v / sum(m) for v in m], [v / sum(q) for v in q]
            u = [(a + b) / 2 for a, b in zip(m, q, strict=True)]

            def exact(a, b):
                return mpmath.fsum(s * mpmath.log((s + e) / (t + e)) for s, t in zip(a, b, strict=True))

            return {"kl": 1 / exact(m, q), "reverse_kl": 1 / exact(q, m), "js": 2 / (exact(m, u) + exact(q, u)),
                    "js_official": 2 / (1 / exact(m, q) + 1 / exact(q, m))}[name]

        with mpmath.workdps(60):
            h = mpmath.mpf(10) ** -25
            value, slope = float(similarity(0)), float((similarity(h) - similarity(-h)) / (2 * h))
        got = attnspec.universal_hopfield_similarity(query, memories + 1e-30j * np.eye(4)[1:2], similarity=name)[0, 0]
        # x - y is 1e-7 of x, whose rounding is 1e-16
        np.testing.assert_allclose([got.real, got.imag / 1e-30], [value, slope], rtol=1e-8)

    def test_a_match_up_to_scale_takes_the_weight(self):
        for factor in (1 / 3, 0.1, 7.3, 1e5):
            got = attnspec.universal_hopfield(factor * positive_M[2:3], positive_M, P, similarity="js")
            np.testing.assert_allclose(got, P[2:3], rtol=1e-12)

    def test_divergences_of_tiny_and_huge_numbers(self):
        for name in ("kl", "reverse_kl", "js", "js_official"):
            want = attnspec.universal_hopfield_similarity(positive_q, positive_M, similarity=name)
            for factor in (2.0**-900, 2.0**1023):
                got = attnspec.universal_hopfield_similarity(factor * positive_q, positive_M, similarity=name)
                np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("name", ["cosine", "cosine_official", "normdot_official"])
    def test_tiny_and_huge_vectors_have_directions(self, name):
        want = attnspec.universal_hopfield_similarity(positive_q, positive_M, similarity=name)
        for a, b in [(1e-200, 1.0), (1.0, 1e-200), (1e200, 1e200), (1e-200, 1e-200), (1e-300, 1e307), (1e307, 1.0), (1.5e308, 1.5e308)]:
            got = attnspec.universal_hopfield_similarity(a * positive_q, b * positive_M, similarity=name)
            np.testing.assert_allclose(got, want, rtol=1e-14)

    def test_distances_whose_reciprocals_leave_float64(self):
        sim = attnspec.universal_hopfield_similarity
        for dtype in (float, complex):
            memories = np.array([[0.0], [1.0]], dtype)
            np.testing.assert_array_equal(sim([[1e-160]], memories, similarity="euclidean").real, [[np.inf, 1.0]])
            np.testing.assert_array_equal(sim([[1e-310]], memories, similarity="manhattan").real, [[np.inf, 1.0]])
            np.testing.assert_array_equal(sim([[1e200]], memories, similarity="euclidean").real, [[0.0, 0.0]])
            for name in ("euclidean", "manhattan"):
                options = {"similarity": name, "separation": "polynomial", "normalise": True}
                got = attnspec.universal_hopfield([[1e-310]], memories, [[5.0], [1.0]], **options)
                np.testing.assert_array_equal(got.real, [[5.0]])

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

    @pytest.mark.parametrize("normalise", [False, True])
    @pytest.mark.parametrize("separation", ["softmax", "polynomial", "identity", "log", "max"])
    def test_not_a_number_is_not_hidden(self, separation, normalise):
        memories = np.array([[1.0, 1.0], [np.nan, 1.0], [2.0, 3.0]])
        for query, similarity in (([[1.0, 1.0]], "euclidean"), ([[1.0, 2.0]], "dot")):      # the first an exact match besides
            options = {"similarity": similarity, "separation": separation, "normalise": normalise}
            assert np.all(np.isnan(attnspec.universal_hopfield(query, memories, **options)))
            got = attnspec.universal_hopfield([[np.nan, 1.0], [1.0, 2.0]], memories[[0, 2]], **options)
            np.testing.assert_array_equal(np.isnan(got), [[True, True], [False, False]])

    @pytest.mark.parametrize("param", [1, 2, 3, 99, 100, 101, 150, 151])
    def test_derivatives_of_high_powers_of_negative_similarities(self, param):
        s = np.array([[-1.25], [0.75], [-0.5]])
        got = attnspec.universal_hopfield([[1.0 + 1e-30j]], s, np.eye(3), separation="polynomial", param=param)[0]
        np.testing.assert_allclose(got.real, s[:, 0] ** param, rtol=1e-13)
        np.testing.assert_allclose(got.imag / 1e-30, param * s[:, 0] ** param, rtol=1e-13)

    def test_huge_similarities_are_normalised(self):
        got = attnspec.universal_hopfield([[0.0]], [[1e-154], [-1e-154], [1.0]], np.eye(3), similarity="euclidean", separation="identity",
                                          normalise=True)
        np.testing.assert_allclose(got, [[0.5, 0.5, 0.0]], atol=1e-300)

    def test_a_complex_exact_match_is_as_a_real_one(self):
        for options in ({}, {"separation": "max"}, {"normalise": True, "separation": "polynomial", "param": 3}):
            got = attnspec.universal_hopfield(positive_M[2:3] + 0j, positive_M, P, similarity="euclidean", beta=2.0, **options)
            np.testing.assert_allclose(got, P[2:3], rtol=1e-15)

    def test_a_match_without_normalisation_times_a_value_of_zero(self):
        got = attnspec.universal_hopfield([[1.0]], [[1.0], [2.0]], [[5.0, 0.0], [1.0, 1.0]], similarity="euclidean", separation="identity")
        np.testing.assert_array_equal(got, [[np.inf, np.nan]])

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
        ("eps", 0.0), ("eps", np.inf), ("beta", np.inf), ("param", np.inf), ("param", -np.inf),
    ])
    def test_options(self, name, value):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            attnspec.universal_hopfield(q, M, **{name: value})

    @pytest.mark.parametrize("name", ["kl", "reverse_kl", "js", "js_official"])
    def test_divergences_of_what_are_no_distributions(self, name):
        with pytest.raises(ValueError, match=f"^memories: expected finite entries >= 0 with a positive sum for the similarity '{name}'"):
            attnspec.universal_hopfield(positive_q, M, similarity=name)
        with pytest.raises(ValueError, match=f"^query: expected finite entries >= 0 with a positive sum for the similarity '{name}'"):
            attnspec.universal_hopfield(np.zeros((1, 5)), positive_M, similarity=name)
        for bad in (np.inf, np.nan):
            with pytest.raises(ValueError, match=r"^query: expected finite entries >= 0"):
                attnspec.universal_hopfield_similarity([[1.0, bad, 1.0, 1.0, 1.0]], positive_M, similarity=name)

    def test_powers_and_logarithms_of_negative_similarities(self):
        with pytest.raises(ValueError, match=r"^param: expected a whole number where similarities are negative, got 0.5$"):
            attnspec.universal_hopfield([[1.0]], [[-1.0]], separation="polynomial", param=0.5)
        with pytest.raises(ValueError, match=r"^param: expected a number >= 0 where a similarity is 0, got -1$"):
            attnspec.universal_hopfield([[1.0]], [[0.0]], separation="polynomial", param=-1)
        with pytest.raises(ValueError, match=r"^separation: expected similarities > 0 for 'log'$"):
            attnspec.universal_hopfield([[1.0]], [[0.0]], separation="log")
