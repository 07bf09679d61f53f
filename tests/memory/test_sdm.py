import itertools
import math

import numpy as np
import pytest

import attnspec

RNG = np.random.default_rng(0)
n, m, r, k, radius = 12, 6, 150, 9, 4
locations, addresses, pointers, queries = (RNG.integers(0, 2, (size, n)) for size in (r, m, m, k))
storage, counts = attnspec.sdm_write(locations, addresses, pointers, radius=radius)


def distance(a, b):
    return sum(x != y for x, y in zip(a, b, strict=True))


def loop_write(locations, addresses, pointers, radius):
    """Pattern by pattern, neuron by neuron."""
    storage, counts = [[0] * len(x) for x in locations], [0] * len(locations)
    for p, q in zip(addresses, pointers, strict=True):
        for t, x in enumerate(locations):
            if distance(p, x) <= radius:
                counts[t] += 1
                storage[t] = [v + bit for v, bit in zip(storage[t], q, strict=True)]
    return storage, counts


def loop_read(query, locations, storage, counts, radius):
    active = [t for t, x in enumerate(locations) if distance(query, x) <= radius]
    total = sum(counts[t] for t in active)
    if total == 0:
        return list(query)
    return [int(sum(storage[t][i] for t in active) * 2 > total) for i in range(len(query))]


def loop_pattern_read(query, addresses, pointers, radius):
    """Weights by enumerating all addresses."""
    near = [[x for x in itertools.product((0, 1), repeat=len(query)) if distance(x, p) <= radius and distance(x, query) <= radius]
            for p in addresses]
    total = sum(map(len, near))
    if total == 0:
        return list(query)
    return [int(2 * sum(len(w) * q[i] for w, q in zip(near, pointers, strict=True)) > total) for i in range(len(query))]


def test_write_by_loops():
    want = loop_write(locations, addresses, pointers, radius)
    np.testing.assert_array_equal(storage, want[0])
    np.testing.assert_array_equal(counts, want[1])
    assert storage.dtype == counts.dtype == np.int64


def test_read_by_loops():
    want = [loop_read(query, locations, storage, counts, radius) for query in queries]
    got = attnspec.sdm_read(queries, locations, storage, counts, radius=radius)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.int64


@pytest.mark.parametrize("radius", [0, 1, 2, 3, 5, 8])
def test_pattern_read_by_enumeration(radius):
    a, p, q = (RNG.integers(0, 2, (size, 8)) for size in (5, 5, 6))
    want = [loop_pattern_read(query, a, p, radius) for query in q]
    np.testing.assert_array_equal(attnspec.sdm_update(q, a, p, radius=radius), want)


@pytest.mark.parametrize("beta", [-2.0, 0.0, 0.7, 6.0])
def test_exponential_pattern_read_by_loops(beta):
    read = attnspec.sdm_update(queries, addresses, pointers, weighting="exponential", beta=beta)
    for query, got in zip(queries, read, strict=True):
        w = [math.exp(beta * (1 - 2 * distance(query, p) / n)) for p in addresses]
        signed = [math.fsum(w[mu] * (2 * pointers[mu][i] - 1) for mu in range(m)) for i in range(n)]
        assert min(map(abs, signed)) > 1e-9 or beta == 0.0             # no near ties, except where they are exact
        np.testing.assert_array_equal(got, [int(s > 0) for s in signed])


def test_default_beta_is_the_fit():
    beta = attnspec.sdm_fit_beta(n_bits=n, radius=radius).beta
    np.testing.assert_array_equal(attnspec.sdm_update(queries, addresses, pointers, weighting="exponential", radius=radius),
                                  attnspec.sdm_update(queries, addresses, pointers, weighting="exponential", beta=beta))


class TestByHand:
    def test_superposition(self):
        # one neuron holds 110, 100, 101: two thirds, one third and one third of ones
        memory = attnspec.sdm_write([[0, 0, 0]], [[0, 0, 0]] * 3, [[1, 1, 0], [1, 0, 0], [1, 0, 1]], radius=0)
        np.testing.assert_array_equal(memory.storage, [[3, 1, 1]])
        np.testing.assert_array_equal(memory.counts, [3])
        np.testing.assert_array_equal(attnspec.sdm_read([[0, 0, 0]], [[0, 0, 0]], *memory, radius=0), [[1, 0, 0]])

    def test_sums_are_divided_not_averages_averaged(self):
        # neurons with 3 of 3 ones, 0 of 1 and 0 of 1: 3/5 in all, but a mean of shares of 1/3
        x = [[0, 0], [0, 1], [1, 0]]
        np.testing.assert_array_equal(attnspec.sdm_read([[0, 0]], x, [[3, 3], [0, 0], [0, 0]], [3, 1, 1], radius=1), [[1, 1]])

    def test_a_tie_gives_zero(self):
        memory = attnspec.sdm_write([[0, 0]], [[0, 0], [0, 0]], [[1, 0], [0, 1]], radius=0)
        np.testing.assert_array_equal(attnspec.sdm_read([[0, 0]], [[0, 0]], *memory, radius=0), [[0, 0]])
        for options in ({"radius": 1}, {"weighting": "exponential", "beta": 3.3}):
            np.testing.assert_array_equal(attnspec.sdm_update([[1, 1]], [[0, 1], [1, 0]], [[1, 0], [0, 1]], **options), [[0, 0]])

    def test_ties_of_unlike_weights_are_exact(self):
        # weights 1462, 742, 252 twice each (n = 16, radius 5, distances 5, 7, 9): every bit has half of the weight
        d_v = [5, 7, 9, 9, 7, 5]
        patterns = np.array([[1] * d + [0] * (16 - d) for d in d_v])
        answers = np.array([[bit] * 16 for bit in (1, 0, 1, 0, 1, 0)])
        for options in ({"radius": 5}, {"weighting": "exponential", "beta": 2.524328694886159}):
            got = attnspec.sdm_update(np.zeros((1, 16), int), patterns, answers, **options)
            np.testing.assert_array_equal(got, np.zeros((1, 16)))

    def test_reading_further_converges_and_stays(self):
        # 0000 -> 0001 -> 0011 -> 0111 -> 0111: each pattern points to the next
        chain = np.array([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1]])
        pointers = np.array([[0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]])
        for n_iters, want in [(1, 1), (2, 2), (3, 3), (4, 3), (50, 3)]:
            np.testing.assert_array_equal(attnspec.sdm_update(chain[:1], chain, pointers, radius=0, n_iters=n_iters), chain[[want]])
            memory = attnspec.sdm_write(chain, chain, pointers, radius=0)
            np.testing.assert_array_equal(attnspec.sdm_read(chain[:1], chain, *memory, radius=0, n_iters=n_iters), chain[[want]])


class TestSpecialValues:
    def test_a_query_out_of_reach_stays_as_it_is(self):
        memory = attnspec.sdm_write([[0, 0, 0], [1, 1, 0]], [[0, 0, 0]], [[0, 1, 0]], radius=0)
        query = [[1, 1, 1], [1, 1, 0], [0, 0, 0]]                      # no neuron; a neuron that holds nothing; the pattern's own
        want = [[1, 1, 1], [1, 1, 0], [0, 1, 0]]
        np.testing.assert_array_equal(attnspec.sdm_read(query, [[0, 0, 0], [1, 1, 0]], *memory, radius=0), want)
        np.testing.assert_array_equal(attnspec.sdm_update(query, [[0, 0, 0]], [[0, 1, 0]], radius=0), want)

    @pytest.mark.parametrize("k, m, r", [(0, 3, 4), (3, 0, 4), (3, 2, 0), (0, 0, 0)])
    def test_nothing_there(self, k, m, r):
        query, address, x = np.ones((k, 5), int), np.ones((m, 5), int), np.ones((r, 5), int)
        memory = attnspec.sdm_write(x, address, address, radius=1)
        np.testing.assert_array_equal(memory.storage, np.full((r, 5), m))
        np.testing.assert_array_equal(memory.counts, np.full(r, m))
        np.testing.assert_array_equal(attnspec.sdm_read(query, x, *memory, radius=1), query)
        np.testing.assert_array_equal(attnspec.sdm_update(query, address, address, radius=1), query)
        np.testing.assert_array_equal(attnspec.sdm_update(query, address, address, weighting="exponential", beta=1), query)

    def test_one_pattern(self):
        got = attnspec.sdm_update(queries, addresses[:1], pointers[:1], radius=n)
        np.testing.assert_array_equal(got, np.repeat(pointers[:1], k, axis=0))

    def test_enormous_beta_reads_the_nearest(self):
        for beta in (1e3, 1e6):
            got = attnspec.sdm_update([[1, 1, 1, 0]], [[1, 1, 1, 1], [0, 0, 0, 0]], [[1, 0, 1, 0], [0, 1, 0, 1]],
                                            weighting="exponential", beta=beta)
            np.testing.assert_array_equal(got, [[1, 0, 1, 0]])

    @pytest.mark.parametrize("beta", [1e8, 1e300, 1.7e308, -1e8, -1e300, -1.7e308])
    def test_a_beta_beyond_all_floats_decides_in_the_order_of_the_distances(self, beta):
        a, p, q = (np.random.default_rng(5).integers(0, 2, (size, 9)) for size in (30, 31, 40))
        p, want = p[1:], []
        for query in q:
            by_distance = {}
            for address, pointer in zip(a, p, strict=True):
                by_distance.setdefault(distance(query, address), []).append(2 * pointer - 1)
            leads = [sum(by_distance[d_v]) for d_v in sorted(by_distance, reverse=beta < 0)]
            want.append([next((int(lead[i] > 0) for lead in leads if lead[i] != 0), 0) for i in range(9)])
        np.testing.assert_array_equal(attnspec.sdm_update(q, a, p, weighting="exponential", beta=beta), want)

    def test_just_below_and_above_the_step_that_decides_alone(self):
        # one pattern at distance 0 says 1, m at distance 1 say 0: the bit is 1 where exp(2 beta/d) > m, so from beta = d/2 log(m)
        for m in (1, 3, 100, 1000):
            a, p = np.array([[0, 0]] + [[0, 1]] * m), np.array([[1, 1]] + [[0, 0]] * m)
            for beta, bit in ((math.log(m) - 1e-9, 0), (math.log(m) + 1e-9, 1)):
                np.testing.assert_array_equal(attnspec.sdm_update([[0, 0]], a, p, weighting="exponential", beta=beta), [[bit, bit]])

    def test_long_addresses(self):
        a = RNG.integers(0, 2, (3, 2000))                              # I and 2^n are far beyond float64
        noisy = a ^ (RNG.random((3, 2000)) < 0.1)
        np.testing.assert_array_equal(attnspec.sdm_update(noisy, a, a, radius=900), a)

    def test_booleans_and_floats_that_are_bits(self):
        for dtype in (bool, np.uint8, float):
            got = attnspec.sdm_update(queries.astype(dtype), addresses.astype(dtype), pointers.astype(dtype), radius=radius)
            np.testing.assert_array_equal(got, attnspec.sdm_update(queries, addresses, pointers, radius=radius))


def test_a_noisy_query_is_completed():
    rng = np.random.default_rng(2)
    x, p = rng.integers(0, 2, (2000, 64)), rng.integers(0, 2, (5, 64))
    noisy = p.copy()
    for row in noisy:
        row[rng.choice(64, 6, replace=False)] ^= 1
    memory = attnspec.sdm_write(x, p, p, radius=26)
    np.testing.assert_array_equal(attnspec.sdm_read(noisy, x, *memory, radius=26, n_iters=10), p)


def test_number_of_active_neurons_is_binomial():
    rng = np.random.default_rng(3)
    x = rng.integers(0, 2, (100_000, 16))
    counts = attnspec.sdm_write(x, [[0] * 16], [[0] * 16], radius=5).counts
    p = attnspec.sdm_circle_intersection(0, n_bits=16, radius=5) / 2**16
    np.testing.assert_allclose(counts.sum(), 100_000 * p, atol=4 * math.sqrt(100_000 * p * (1 - p)))


@pytest.mark.parametrize("call, message", [
    (lambda: attnspec.sdm_write(locations, addresses, pointers, radius=-1), r"^radius: expected a whole number >= 0, got -1$"),
    (lambda: attnspec.sdm_write(2 * locations, addresses, pointers, radius=1), r"^locations: expected entries 0 or 1, got 2$"),
    (lambda: attnspec.sdm_write(locations, addresses, pointers[:-1], radius=1), r"^pointers: expected shape \(..., m, d\) with m = 6"),
    (lambda: attnspec.sdm_read(queries, locations, storage, counts, radius=1, n_iters=0), r"^n_iters: expected a whole number >= 1"),
    (lambda: attnspec.sdm_read(queries - 0.5, locations, storage, counts, radius=1), r"^queries: expected whole numbers"),
    (lambda: attnspec.sdm_update(queries, addresses, pointers), r"^radius: expected a whole number, got None$"),
    (lambda: attnspec.sdm_update(queries, addresses, pointers, weighting="exponential"), r"^radius: expected a whole number"),
    (lambda: attnspec.sdm_update(queries, addresses, pointers, radius=13), r"^radius: expected a whole number from 0 to the 12 bits"),
    (lambda: attnspec.sdm_update(queries, addresses, pointers, radius=2, weighting="cap"), r"^weighting: expected 'circle' or 'exp"),
    (lambda: attnspec.sdm_update(queries, addresses, pointers, weighting="exponential", beta="x"), r"^beta: expected a number"),
    (lambda: attnspec.sdm_update(queries, addresses, pointers, weighting="exponential", beta=math.inf), r"^beta: expected a finite"),
    (lambda: attnspec.sdm_update(*[np.ones((2, 0), int)] * 3, radius=0), r"^queries: expected at least 1 in the last axis, got 0$"),
])
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
