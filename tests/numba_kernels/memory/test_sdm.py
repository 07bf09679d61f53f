"""Sparse distributed memory with packed bits, circle intersections, and the attention form."""

import numpy as np
import pytest
from agreement import assert_same

from attnspec import numba_kernels, reference
from attnspec.numba_kernels.parallel import threads

RNG = np.random.default_rng(0)


def bits(*shape):
    return RNG.integers(0, 2, shape)


@pytest.mark.parametrize("d", [1, 7, 64, 70, 130])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, bool, np.int64, ">i4", float])
def test_write_and_read(d, dtype):
    locations, addresses, pointers, queries = bits(2, 600, d), bits(9, d), bits(2, 9, d), bits(2, 6, d)
    for radius in (d // 3, d // 2, d):
        written = numba_kernels.sdm_write(locations.astype(dtype), addresses.astype(dtype), pointers.astype(dtype), radius=radius)
        want = reference.sdm_write(locations, addresses, pointers, radius=radius)
        assert written.storage.dtype == np.int16
        np.testing.assert_array_equal(written.storage, want.storage)
        np.testing.assert_array_equal(written.counts, want.counts)
        for n_iters in (1, 4):
            got = numba_kernels.sdm_read(queries.astype(dtype), locations.astype(dtype), *written, radius=radius, n_iters=n_iters)
            np.testing.assert_array_equal(got, reference.sdm_read(queries, locations, *want, radius=radius, n_iters=n_iters))
            assert got.dtype == np.int64


def test_more_patterns_than_a_block_and_more_words_than_a_byte_counts():
    locations, patterns, queries = bits(40, 2100), bits(300, 2100), bits(3, 2100)
    want = reference.sdm_write(locations, patterns, patterns, radius=1050)
    for storage in (want.storage, want.storage.astype(np.int16), want.storage.astype(np.int32), want.storage.astype(">i2")):
        got = numba_kernels.sdm_read(queries, locations, storage, want.counts, radius=1050)
        np.testing.assert_array_equal(got, reference.sdm_read(queries, locations, *want, radius=1050))
    written = numba_kernels.sdm_write(locations, patterns, patterns, radius=1050)
    np.testing.assert_array_equal(written.storage, want.storage)
    np.testing.assert_array_equal(written.counts, want.counts)


def test_counters_are_as_wide_as_the_number_of_patterns_needs():
    one = np.ones((1, 1), np.uint8)
    for m, dtype in ((16383, np.int16), (16384, np.int32)):
        written = numba_kernels.sdm_write(one, np.broadcast_to(one, (m, 1)), np.broadcast_to(one, (m, 1)), radius=0)
        assert written.storage.dtype == dtype
        np.testing.assert_array_equal(2 * written.storage - written.counts[:, None], [[m]])


def test_leading_axes_of_pointers_alone_give_no_counts():
    arrays = {"locations": bits(20, 9), "addresses": bits(2, 1, 5, 9), "pointers": bits(3, 5, 9)}
    assert_same("sdm_write", arrays, {"radius": 4})
    assert_same("sdm_write", {**arrays, "addresses": bits(5, 9)}, {"radius": 4})


def test_what_is_no_bit_is_refused():
    for dtype in (np.uint8, np.int8, np.int64):
        with pytest.raises(ValueError, match=r"^locations: expected entries 0 or 1, got 2$"):
            numba_kernels.sdm_write(np.full((2, 3), 2, dtype), bits(1, 3), bits(1, 3), radius=1)
    with pytest.raises(ValueError, match=r"^pointers: expected entries 0 or 1, got -1$"):
        numba_kernels.sdm_write(bits(2, 3), bits(1, 3), np.full((1, 3), -1, np.int8), radius=1)


@pytest.mark.parametrize("n, m, d", [(3, 1, 1), (6, 2, 8), (9, 30, 9), (130, 700, 70), (2, 5, 2100), (0, 3, 4), (3, 0, 4)])
def test_update(n, m, d):
    queries, addresses, pointers = bits(n, d), bits(m, d), bits(m, d)
    for options in ({"radius": d // 3}, {"radius": d}, {"radius": d // 2, "n_iters": 4}, {"beta": 0.0}, {"beta": -2.0}, {"beta": 1e300},
                    {"beta": 6.0, "n_iters": 3}, *([{"radius": d // 2, "beta": None}] if d >= 4 else [])):
        options = {"weighting": "exponential", **options} if "beta" in options else options
        want = reference.sdm_update(queries, addresses, pointers, **options)
        got = numba_kernels.sdm_update(queries, addresses, pointers, **options)
        np.testing.assert_array_equal(got, want)
        assert got.dtype == np.int64


def test_ties_are_exact():
    # weights 1462, 742, 252 twice each (n = 16, radius 5, distances 5, 7, 9), every bit having half of all; then one vote more or less
    patterns = np.array([[1] * d + [0] * (16 - d) for d in [5, 7, 9, 9, 7, 5, 16]])
    for last, want in ((0, 0), (1, 1)):
        answers = np.array([[bit] * 16 for bit in (1, 0, 1, 0, 1, 0, last)])
        got = numba_kernels.sdm_update(np.zeros((1, 16), int), patterns, answers, weighting="exponential", beta=2.524328694886159)
        np.testing.assert_array_equal(got, np.full((1, 16), want))
    # two weights whose quotient is 1 - 6e-31, equal as float64
    lone = np.zeros((2, 200), int)
    lone[1, :60] = 1
    for beta, bit in ((1e-30, 0), (-1e-30, 1)):
        got = numba_kernels.sdm_update(np.zeros((1, 200), int), lone, [[0] * 200, [1] * 200], weighting="exponential", beta=beta)
        np.testing.assert_array_equal(got, np.full((1, 200), bit))


def test_threads_change_nothing():
    locations, patterns, queries = bits(3000, 100), bits(200, 100), bits(150, 100)
    real = [RNG.standard_normal((size, 20)).astype(np.float32) for size in (300, 700, 700)]
    found = []
    for count in (1, 2):
        with threads(count):
            written = numba_kernels.sdm_write(locations, patterns, patterns, radius=45)
            found.append((*written, numba_kernels.sdm_read(queries, locations, *written, radius=45),
                          numba_kernels.sdm_update(queries, patterns, patterns, radius=45),
                          numba_kernels.sdm_attention(*real, radius=8), numba_kernels.sdm_attention(*real, radius=8, weighting="cap")))
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("n", [1, 2, 5, 16, 101, 1000, 1100])
def test_circles(n):
    for radius in {0, n // 3, n // 2, n}:
        for options in ({}, {"log": True}, {"n_locations": 10**6}, {"n_locations": 0.1, "log": True}, {"n_locations": 2**1100 + 7}):
            circle = {"n_bits": n, "radius": radius, **options}
            assert_same("sdm_circle_intersection", {"distance": np.arange(n + 1)}, circle, rtol=0, atol=0)


WEIGHTINGS = [
    {"radius": 11}, {"radius": 0}, {"radius": 30}, {"weighting": "exponential", "beta": 4.0}, {"weighting": "exponential", "radius": 9},
    {"weighting": "exponential", "beta": 1.79e308}, {"weighting": "exponential", "beta": -1e300}, {"weighting": "cap", "radius": 11},
    {"weighting": "cap", "radius": 15}, {"weighting": "cap", "radius": 21}, {"weighting": "cap", "radius": 11, "resolution": 40},
]


@pytest.mark.parametrize("options", WEIGHTINGS, ids=str)
def test_attention(options):
    arrays = {name: RNG.standard_normal((size, 30)) for name, size in (("queries", 7), ("addresses", 5), ("pointers", 5))}
    for steps in ({}, {"n_iters": 3}, {"unit_norm": True}):
        assert_same("sdm_attention", {**arrays, **options}, {"return_weights": True, **steps})
    lead = {"queries": RNG.standard_normal((2, 1, 7, 30)), "addresses": arrays["addresses"], "pointers": RNG.standard_normal((3, 5, 30))}
    assert_same("sdm_attention", {**lead, **options}, {"return_weights": True})
    odd = {**arrays, "queries": np.where(np.arange(7)[:, None] == 2, np.nan, arrays["queries"])}
    odd["queries"][4], odd["queries"][5, 3] = 0.0, np.inf
    assert_same("sdm_attention", {**odd, **options}, {"return_weights": True})
    near = {**arrays, "queries": arrays["addresses"]}
    near["pointers"] = np.where(np.arange(5)[:, None] == 3, np.nan, arrays["pointers"])      # arrives where it is in reach, and there only
    assert_same("sdm_attention", {**near, **options}, {"return_weights": True})


@pytest.mark.parametrize("sizes", [(150, 600), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("options", [*WEIGHTINGS[:2], WEIGHTINGS[3], WEIGHTINGS[6]], ids=str)
def test_attention_over_tiles(sizes, options):
    n, m = sizes
    arrays = {name: RNG.standard_normal((size, 30)) for name, size in (("queries", n), ("addresses", m), ("pointers", m))}
    assert_same("sdm_attention", {**arrays, **options}, {"return_weights": True})


def test_vectors_of_signs_have_whole_distances():
    for width in range(1, 80, 6):
        flipped = (1 - 2 * np.tri(width + 1, width, -1)).astype(np.float32)
        got = numba_kernels.sdm_attention(np.ones((1, width), np.float32), flipped, flipped, radius=width // 3, return_weights=True).weights
        want = reference.sdm_circle_intersection(np.arange(width + 1), n_bits=width, radius=width // 3)
        np.testing.assert_allclose(got[0], want / want.sum(), rtol=1e-6)


@pytest.mark.parametrize("options", [
    {"radius": None}, {"radius": 31}, {"radius": 1, "weighting": "exponential"}, {"weighting": "softmax"}, {"n_iters": 0},
    {"weighting": "cap", "resolution": 1}, {"weighting": "exponential", "beta": "hot"}, {"weighting": "exponential", "beta": np.inf},
], ids=str)
def test_refusals_are_those_of_the_reference(options):
    call = {**{name: np.ones((2, 30)) for name in ("queries", "addresses", "pointers")}, "radius": 4, **options}
    with pytest.raises(ValueError, match=":") as theirs:
        reference.sdm_attention(**call)
    with pytest.raises(ValueError, match=":") as ours:
        numba_kernels.sdm_attention(**call)
    assert str(ours.value) == str(theirs.value)
