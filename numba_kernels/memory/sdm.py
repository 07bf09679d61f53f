"""Twins of reference/memory/sdm.py: addresses packed to words of 64 bits, distances by counting bits, exact as the reference.

Bits may come as bool, uint8 or int8 and are then never widened; answers are int64 as the reference's. The storage that `sdm_write`
returns has 16, 32 or 64 bits a counter, the fewest that hold twice the number of patterns, so that 2 storage - counts does not overflow.
Pattern weights, whole numbers of any length in the reference, are added in float64; a bit whose sum is within its rounding error is
decided by counting the patterns of each weight.
"""

import functools
import math
from decimal import MAX_EMAX, Decimal, localcontext

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, add_columns_product, packed_columns
from attnspec.numba_kernels.memory.sdm_circle import bits_and_radius, intersections, log_intersections
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import INDEX, address, constant, spread
from attnspec.numba_kernels.softmax.tiles import KEYS, QUERIES
from attnspec.numba_kernels.twin import twin
from attnspec.reference.inputs import number, one_of, whole
from attnspec.reference.memory.sdm import SDMStorage

WORD = 64
GROUP, LONGEST = 8, 31            # rows whose words stand side by side, in two registers; words until a byte may overflow
NEURONS, PATTERNS = 512, 256      # of a block: their addresses of 1000 bits are 64 KB and 32 KB
PARTS = 64                        # tasks that a reading of few queries is split into
WEIGHTINGS = ("circle", "exponential")


# --- bits in words -------------------------------------------------------------------------------------------------------------------


@intrinsic
def word_at(typing, array, position):
    """The word of the 64 bytes from flat `position`: bit i is 1 where byte i is not 0."""
    def generate(context, builder, signature, arguments):
        pointer, _ = address(context, builder, signature.args[0], *arguments)
        kind = ir.VectorType(ir.IntType(8), WORD)
        entries = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1, typ=kind)
        return builder.bitcast(builder.icmp_unsigned("!=", entries, ir.Constant(kind, [0] * WORD)), ir.IntType(WORD))

    return types.uint64(array, types.intp), generate


def packed(bits: np.ndarray, group: int = 1) -> np.ndarray:
    """bits (b, r, d), uint8, as words (b, groups of rows, words, group): the rows of a group have their words side by side."""
    b, r, d = bits.shape
    words = np.zeros((b, -(-r // group), -(-d // WORD), group), np.uint64)
    in_parallel(pack_rows, b * -(-r // NEURONS), bits, words, work=bits.size)
    return words


@kernel
def pack_rows(bits, words, first, step):
    """words (b, groups, words, group) of bits (b, r, d)."""
    b, r, d = bits.shape
    group = words.shape[3]
    blocks = (r + NEURONS - 1) // NEURONS
    for task in range(first, b * blocks, step):
        one, start = task // blocks, task % blocks * NEURONS
        for t in range(start, min(r, start + NEURONS)):
            line, lane, row = words[one, t // group], t % group, (one * r + t) * d
            for w in range(d // WORD):
                line[w, lane] = word_at(bits, row + w * WORD)
            if d % WORD:
                rest = np.uint64(0)
                for i in range(d // WORD * WORD, d):
                    rest |= np.uint64(bits[one, t, i]) << np.uint64(i % WORD)
                line[d // WORD, lane] = rest


@intrinsic
def add_differing_bits(typing, a, a_at, b, b_at, count, out, out_at):
    """out[out_at + g] += number of bits in which `count` <= 31 words of a, from a_at, differ from those of row g of the group at b_at."""
    byte, lanes = ir.VectorType(ir.IntType(8), 8 * GROUP), ir.VectorType(INDEX, GROUP)

    def generate(context, builder, signature, arguments):
        a, a_at, b, b_at, count, out, out_at = arguments
        a_pointer, word = address(context, builder, signature.args[0], a, a_at)
        b_pointer, _ = address(context, builder, signature.args[2], b, b_at)
        out_pointer, _ = address(context, builder, signature.args[5], out, out_at)
        out_pointer = builder.bitcast(out_pointer, lanes.as_pointer())
        population = cgutils.get_or_insert_function(builder.module, ir.FunctionType(byte, [byte]), f"llvm.ctpop.v{byte.count}i8")

        before, loop, after = builder.block, builder.append_basic_block("words"), builder.append_basic_block("counted")
        builder.cbranch(builder.icmp_signed(">", count, INDEX(0)), loop, after)
        builder.position_at_end(loop)
        w, sums = builder.phi(INDEX), builder.phi(byte)
        entry = spread(builder, builder.load(builder.gep(a_pointer, [w], source_etype=word), align=8, typ=word), lanes)
        others = builder.gep(b_pointer, [builder.mul(w, INDEX(GROUP))], source_etype=word)
        differ = builder.xor(entry, builder.load(builder.bitcast(others, lanes.as_pointer()), align=8, typ=lanes))
        added = builder.add(sums, builder.call(population, [builder.bitcast(differ, byte)]))
        following = builder.add(w, INDEX(1))
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        for phi, start, again in ((w, INDEX(0), following), (sums, ir.Constant(byte, [0] * 8 * GROUP), added)):
            phi.add_incoming(start, before)
            phi.add_incoming(again, loop)

        builder.position_at_end(after)
        total = builder.phi(byte)
        total.add_incoming(ir.Constant(byte, [0] * 8 * GROUP), before)
        total.add_incoming(added, loop)
        total = builder.bitcast(total, lanes)
        pairs = constant(lanes, 0x00FF00FF00FF00FF)
        total = builder.add(builder.and_(total, pairs), builder.and_(builder.lshr(total, constant(lanes, 8)), pairs))
        for shift in (16, 32):
            total = builder.add(total, builder.lshr(total, constant(lanes, shift)))
        total = builder.and_(total, constant(lanes, 0xFFFF))
        builder.store(builder.add(builder.load(out_pointer, align=8, typ=lanes), total), out_pointer, align=8)
        return context.get_dummy_value()

    return types.void(a, types.intp, b, types.intp, types.intp, out, types.intp), generate


@helper
def distances(rows, row, groups, first, count, apart):
    """apart[:count * GROUP]: bits in which row `row`, flat, of `rows` differs from those of the groups first ... first + count, flat."""
    words = groups.shape[2]
    for g in range(count):
        for i in range(g * GROUP, (g + 1) * GROUP):
            apart[i] = 0
        for w in range(0, words, LONGEST):
            add_differing_bits(rows, row * words + w, groups, ((first + g) * words + w) * GROUP, min(LONGEST, words - w), apart, g * GROUP)


# --- neurons -------------------------------------------------------------------------------------------------------------------------


@twin
def sdm_write(locations, addresses, pointers, *, radius):
    """SDMStorage (storage, counts) of the neurons at `locations` after all patterns were written; the parameters are the reference's.

    storage is int16, int32 or int64, the smallest that holds twice the number of patterns; counts is int64.
    """
    radius = whole("radius", int(radius))
    of_counts = np.broadcast_shapes(locations.shape[:-2], addresses.shape[:-2])
    lead = np.broadcast_shapes(of_counts, pointers.shape[:-2])
    near, near_of = heads_of(locations, lead)
    points, point_of = heads_of(addresses, lead)
    bits, bits_of = heads_of(pointers, lead)
    heads, r, (m, d) = math.prod(lead), locations.shape[-2], pointers.shape[-2:]
    counter = next(kind for kind in (np.int16, np.int32, np.int64) if 2 * m <= np.iinfo(kind).max)
    storage, counts = np.zeros((heads, r, d), counter), np.zeros((heads, r), np.int64)
    in_parallel(write_blocks, heads * -(-r // NEURONS), packed(near), near_of, packed(points, GROUP), point_of, m, bits, bits_of, radius,
                storage, counts, work=heads * r * m * 10)
    counts = counts.reshape(*lead, r)[(0,) * (len(lead) - len(of_counts))]              # without the copies for leading axes of pointers
    return SDMStorage(storage.reshape(*lead, r, d), counts[tuple(slice(size) for size in of_counts)])


@kernel
def write_blocks(locations, location_of, addresses, address_of, m, pointers, pointer_of, radius, storage, counts, first, step):
    """storage (h, r, d) and counts (h, r): a block of neurons takes the patterns near it, a block of patterns at a time."""
    heads, r, d = storage.shape
    blocks, groups = (r + NEURONS - 1) // NEURONS, addresses.shape[1]
    apart = np.empty(PATTERNS, np.int64)
    for task in range(first, heads * blocks, step):
        h, start = task // blocks, task % blocks * NEURONS
        row, group, bits = location_of[h] * r, address_of[h] * groups, pointers[pointer_of[h]]
        for i0 in range(0, m, PATTERNS):
            count = min(PATTERNS, m - i0)
            for t in range(start, min(r, start + NEURONS)):
                distances(locations, row + t, addresses, group + i0 // GROUP, (count + GROUP - 1) // GROUP, apart)
                line = storage[h, t]
                for i in range(count):
                    if apart[i] <= radius:
                        counts[h, t] += 1
                        pattern = bits[i0 + i]
                        for c in range(d):
                            line[c] += pattern[c]


@twin(compact=("storage", "counts"))
def sdm_read(queries, locations, storage, counts, *, radius, n_iters=1):
    """Bits (..., n, d) that the neurons answer to the queries (..., n, d); the parameters are those of the reference.

    storage may be int16, int32 or int64, as `sdm_write` returns it, and is not widened.
    """
    radius = whole("radius", int(radius))
    lead = np.broadcast_shapes(queries.shape[:-2], locations.shape[:-2], storage.shape[:-2], counts.shape[:-1])
    near, near_of = heads_of(locations, lead)
    stored, stored_of = heads_of(storage, lead)
    held, held_of = heads_of(counts.astype(np.int64, copy=False), lead, 1)
    heads, (n, d), r = math.prod(lead), queries.shape[-2:], locations.shape[-2]
    near = packed(near, GROUP)
    parts = max(1, min(PARTS // max(heads * n, 1), r // NEURONS))
    xi = np.broadcast_to(queries, (*lead, n, d))
    for _ in range(whole("n_iters", n_iters, least=1)):
        sums = np.zeros((heads, n, parts, d + 1), np.int64)
        asked = packed(np.ascontiguousarray(xi, np.uint8).reshape(heads, n, d))
        in_parallel(read_parts, heads * n * parts, asked, near, near_of, stored, stored_of, held, held_of, radius, sums,
                    work=heads * n * r * (10 + d // WORD))
        sums = sums.sum(axis=2).reshape(*lead, n, d + 1)
        total = sums[..., d:]
        previous, xi = xi, np.where(total == 0, xi, (2 * sums[..., :d] > total).astype(np.int64))
        if np.array_equal(previous, xi):
            break
    return xi


@kernel
def read_parts(queries, locations, location_of, storage, storage_of, counts, count_of, radius, sums, first, step):
    """sums (h, n, parts, d + 1): over the neurons near a query in a part of all, what they store, and how many patterns they hold."""
    heads, n, parts, columns = sums.shape
    r, groups = storage.shape[1], locations.shape[1]
    apart = np.empty(GROUP, np.int64)
    for task in range(first, heads * n * parts, step):
        h, i, part = task // (n * parts), task // parts % n, task % parts
        line = sums[h, i, part]
        for g in range(groups * part // parts, groups * (part + 1) // parts):
            distances(queries, h * n + i, locations, location_of[h] * groups + g, 1, apart)
            for t in range(g * GROUP, min(r, (g + 1) * GROUP)):
                if apart[t % GROUP] <= radius:
                    stored = storage[storage_of[h], t]
                    for c in range(columns - 1):
                        line[c] += stored[c]
                    line[columns - 1] += counts[count_of[h], t]


# --- patterns ------------------------------------------------------------------------------------------------------------------------


@twin
def sdm_update(queries, addresses, pointers, *, radius=None, weighting="circle", beta=None, n_iters=1):
    """Bits (..., n, d) read from a memory of the patterns with a neuron at every address; the parameters are those of the reference."""
    one_of("weighting", weighting, WEIGHTINGS)
    (n, d), m = queries.shape[-2:], addresses.shape[-2]
    if beta is None and d < 1:
        raise ValueError(f"queries: expected at least 1 in the last axis, got {d}")
    if weighting == "circle":
        exact = intersections(*bits_and_radius(d, required(radius)))
    else:
        exact = whole_exponentials(float(np.real(fitted_beta(beta, d, radius))), d, m)
    mantissa, exponent, kind = float_parts(exact)

    lead = np.broadcast_shapes(queries.shape[:-2], addresses.shape[:-2], pointers.shape[:-2])
    heads = math.prod(lead)
    points, point_of = heads_of(addresses, lead)
    bits, bits_of = heads_of(pointers, lead)
    words, signs = packed(points, GROUP), packed_columns(2.0 * bits - 1)
    xi = np.broadcast_to(queries, (*lead, n, d))
    for _ in range(whole("n_iters", n_iters, least=1)):
        asked, votes = np.ascontiguousarray(xi, np.uint8).reshape(heads, n, d), np.empty((heads, n, d), np.int8)
        in_parallel(vote_blocks, heads * -(-n // QUERIES), packed(asked), words, point_of, bits, signs, bits_of, mantissa, exponent, kind,
                    votes, work=heads * n * m * (d + 10))
        for h, i, c in np.argwhere(votes == UNDECIDED):
            apart = np.count_nonzero(points[point_of[h]] != asked[h, i], axis=-1)
            votes[h, i, c] = sum(exact[k] * (2 * int(bit) - 1) for k, bit in zip(apart, bits[bits_of[h], :, c], strict=True)) > 0
        votes = votes.reshape(*lead, n, d)
        previous, xi = xi, np.where(votes == SILENT, xi, votes).astype(np.int64)
        if np.array_equal(previous, xi):
            break
    return xi


UNDECIDED, SILENT = 2, 3      # votes that are no bit: within the rounding error, and of patterns that weigh nothing


@kernel
def vote_blocks(queries, addresses, address_of, pointers, signs, pointer_of, mantissa, exponent, kind, votes, first, step):
    """votes (h, n, d): 1 where sum_m w_im (2 q_m - 1) > 0, 0 where it is not, UNDECIDED or SILENT.

    w = mantissa 2^exponent at each distance, scaled so that the largest of a row is below 1. Rounded weights and m additions are together
    off by less than (m + 8) 2^-53 sum_m w_im. Distances of one kind have one weight.
    """
    heads, n, d = votes.shape
    _, m, _ = pointers.shape
    groups, width = addresses.shape[1], signs.shape[3]
    e_step = signs.shape[1] * width
    blocks = (n + QUERIES - 1) // QUERIES
    apart, W = np.empty((QUERIES, groups * GROUP), np.int64), np.empty((QUERIES, KEYS + width), np.float64)
    acc, total = np.empty((QUERIES, e_step), np.float64), np.empty(QUERIES, np.float64)
    top, balance = np.empty(QUERIES, np.int64), np.zeros(mantissa.size, np.int64)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * QUERIES
        rows = min(QUERIES, n - i0)
        p = pointer_of[h]
        top[:], total[:], acc[:] = -FAR, 0.0, 0.0
        for r in range(rows):
            distances(queries, h * n + i0 + r, addresses, address_of[h] * groups, groups, apart[r])
            for k in apart[r, :m]:
                if mantissa[k] > 0:
                    top[r] = max(top[r], exponent[k])
        for j in range(0, m, KEYS):
            count = min(KEYS, m - j)
            for r in range(rows):
                for t in range(count):
                    k = apart[r, j + t]
                    W[r, t] = np.ldexp(mantissa[k], np.int32(max(exponent[k] - top[r], -2000))) if mantissa[k] > 0 else 0.0
                    total[r] += W[r, t]
            for start in range(0, count, CHUNK):
                add_columns_product(W, rows, W.shape[1], start, min(CHUNK, count - start), signs, p * m * e_step, j + start, acc, e_step)
        for r in range(rows):
            error = (m + 8) * 2.0**-53 * total[r]
            for c in range(d):
                vote = 1 if acc[r, c] > error else 0
                if total[r] == 0:
                    vote = SILENT
                elif abs(acc[r, c]) <= error:
                    for j in range(m):
                        balance[kind[apart[r, j]]] += 2 * np.int64(pointers[p, j, c]) - 1
                    for j in range(m):
                        k = kind[apart[r, j]]
                        if balance[k] != 0 and mantissa[k] > 0:
                            one_sided = vote == 0 or vote == k + 4
                            vote = k + 4 if one_sided else UNDECIDED
                    if vote >= 4:
                        vote = 1 if balance[vote - 4] > 0 else 0
                    for j in range(m):
                        balance[kind[apart[r, j]]] = 0
                votes[h, i0 + r, c] = vote


FAR = 2**62


def float_parts(exact: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mantissas in [1/2, 1] to 64 bits, exponents, and for each number the first position of an equal neighbour."""
    length = [x.bit_length() for x in exact]
    mantissa = [(x >> size - 64 if size > 64 else x << 64 - size) / 2**64 for x, size in zip(exact, length, strict=True)]
    kind = np.arange(len(exact))
    for k in range(1, len(exact)):
        if exact[k] == exact[k - 1]:
            kind[k] = kind[k - 1]
    return np.array(mantissa), np.array(length, np.int64), kind


@functools.lru_cache(8)
def whole_exponentials(beta: float, d: int, m: int) -> tuple[int, ...]:
    """exp(-2 beta k/d), k = 0 .. d, as the reference defines them: whole numbers of 40 digits and more, all times the same number."""
    with localcontext(prec=40, Emax=MAX_EMAX):
        most = Decimal(4 * max(m, 1)).ln()
        step = max(-most, min(most, 2 * Decimal(beta) / max(d, 1)))
        lowest = min(Decimal(0), -step * d)
        return tuple(int((-step * k - lowest).exp().scaleb(40)) for k in range(d + 1))


def required(radius):
    """The radius, which is an option only where another option replaces it."""
    if radius is None:
        raise ValueError("radius: expected a whole number, got None")
    return radius


def fitted_beta(beta, n: int, radius):
    """beta, or the authors' fit to the logarithm of the circle intersection, the covariance divided by d - 1 and the variance by d."""
    if beta is not None:
        return number("beta", beta, finite=True)
    _, d = bits_and_radius(n, required(radius))
    whole("radius", d, least=2)
    x, y = 1 - 2 * np.arange(d) / n, log_intersections(n, d)[:d]
    return float(np.sum((x - x.mean()) * (y - y.mean())) / (d - 1) / np.mean((x - x.mean()) ** 2))
