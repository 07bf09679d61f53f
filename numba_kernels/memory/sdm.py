"""Twins of the neurons in reference/memory/sdm.py: addresses packed to words of 64 bits, distances by population count.

Bits may come as uint8, int8 or bool and are then never widened. The counters that `sdm_write` returns have 16 bits where no neuron can
hold more than 32767 patterns, else 64; their values are the reference's.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import whole
from attnspec.reference.memory.sdm import SDMStorage

NEURONS = 512      # of a task
PARTS = 64         # tasks that a reading of few queries is split into


@intrinsic
def population(typing, word):
    """How many bits of a word are 1."""
    def generate(context, builder, signature, arguments):
        return builder.call(builder.module.declare_intrinsic("llvm.ctpop", [ir.IntType(64)]), arguments)

    return types.uint64(types.uint64), generate


@helper
def distance(a, b):
    """Bits in which two packed addresses differ."""
    total = np.uint64(0)
    for w in range(a.size):
        total += population(a[w] ^ b[w])
    return total


def words(bits: np.ndarray) -> np.ndarray:
    """Bits (..., d) packed to (..., words) of 64."""
    octets = np.packbits(bits.astype(np.uint8, copy=False), axis=-1)
    padded = np.zeros((*octets.shape[:-1], -(-octets.shape[-1] // 8) * 8), np.uint8)
    padded[..., : octets.shape[-1]] = octets
    return padded.view(np.uint64)


@twin
def sdm_write(locations, addresses, pointers, *, radius):
    """SDMStorage (storage, counts) of the neurons at `locations` after all patterns were written; the parameters are the reference's."""
    radius = whole("radius", int(radius))
    lead = np.broadcast_shapes(locations.shape[:-2], addresses.shape[:-2], pointers.shape[:-2])
    near, near_of = heads_of(words(locations), lead)
    points, point_of = heads_of(words(addresses), lead)
    bits, bits_of = heads_of(pointers.astype(np.uint8, copy=False), lead)
    heads, r, (m, d) = math.prod(lead), locations.shape[-2], pointers.shape[-2:]
    counter = np.int16 if m <= np.iinfo(np.int16).max else np.int64
    storage, counts = np.zeros((heads, r, d), counter), np.zeros((heads, r), counter)
    in_parallel(write, heads * -(-r // NEURONS), near, near_of, points, point_of, bits, bits_of, np.uint64(radius), storage, counts,
                work=heads * r * m * 10)
    return SDMStorage(storage.reshape(*lead, r, d), counts.reshape(*lead, r))


@kernel
def write(locations, location_of, addresses, address_of, pointers, pointer_of, radius, storage, counts, first, step):
    """storage (h, r, d) and counts (h, r), each neuron's patterns one after the other."""
    heads, r, d = storage.shape
    m = addresses.shape[1]
    tasks = (r + NEURONS - 1) // NEURONS
    for task in range(first, heads * tasks, step):
        h, start = task // tasks, task % tasks * NEURONS
        for t in range(start, min(r, start + NEURONS)):
            here, line = locations[location_of[h], t], storage[h, t]
            for i in range(m):
                if distance(here, addresses[address_of[h], i]) <= radius:
                    counts[h, t] += 1
                    bits = pointers[pointer_of[h], i]
                    for c in range(d):
                        line[c] += bits[c]


@twin
def sdm_read(queries, locations, storage, counts, *, radius, n_iters=1):
    """Bits (..., n, d) that the neurons answer to the queries (..., n, d); the parameters are those of the reference."""
    radius = whole("radius", int(radius))
    lead = np.broadcast_shapes(queries.shape[:-2], locations.shape[:-2], storage.shape[:-2], counts.shape[:-1])
    near, near_of = heads_of(words(locations), lead)
    stored, stored_of = heads_of(storage, lead)
    count, count_of = heads_of(counts, lead, 1)
    heads, (n, d) = math.prod(lead), queries.shape[-2:]
    xi = np.broadcast_to(queries, (*lead, n, d)).astype(np.int64)
    parts = max(1, min(PARTS // max(heads * n, 1), near.shape[1] // NEURONS))
    for _ in range(whole("n_iters", n_iters, least=1)):
        sums = np.zeros((heads, n, parts, d + 1), np.int64)
        asked = words(xi).reshape(heads, n, near.shape[-1])
        in_parallel(read, heads * n * parts, asked, near, near_of, stored, stored_of, count, count_of, np.uint64(radius), sums,
                    work=heads * n * near[0].size * 10)
        total = sums.sum(axis=2).reshape(*lead, n, d + 1)
        held = total[..., d:]
        previous, xi = xi, np.where(held == 0, xi, (2 * total[..., :d] > held).astype(np.int64))
        if np.array_equal(previous, xi):
            break
    return xi


@kernel
def read(queries, locations, location_of, storage, storage_of, counts, count_of, radius, sums, first, step):
    """sums (h, n, parts, d + 1): over a part of the neurons near a query, what they store, and how many patterns they hold."""
    heads, n, parts, columns = sums.shape
    r = locations.shape[1]
    for task in range(first, heads * n * parts, step):
        h, i, part = task // (n * parts), task // parts % n, task % parts
        line = sums[h, i, part]
        for t in range(r * part // parts, r * (part + 1) // parts):
            if distance(queries[h, i], locations[location_of[h], t]) <= radius:
                held = storage[storage_of[h], t]
                for c in range(columns - 1):
                    line[c] += held[c]
                line[columns - 1] += counts[count_of[h], t]
