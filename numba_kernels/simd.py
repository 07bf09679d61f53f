"""Vector registers as values in Numba code, and the matrix product's innermost block written with them.

    x = load(tile, at) - splat(top, tile)       32 bytes of `tile` from flat position `at`: 8 float32 or 4 float64
    store(tile, at, x * x)

A loop over such values is compiled to the vector instructions it spells, whatever the optimiser thinks of the loop. Arrays are contiguous
and flat positions count elements. Lanes are never looked at one by one, so that results do not depend on the machine.
"""

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

BYTES = 32              # AVX2; two registers on NEON
ROWS, COLUMNS = 6, 2    # registers of the block of a matrix product: 6 x 2 sums, 2 columns and 1 row entry fit the 16 of AVX2

INDEX, INT32, BOOL = ir.IntType(64), ir.IntType(32), ir.IntType(1)


class Vector(types.Type):
    """A register of `count` numbers of a dtype."""

    def __init__(self, dtype):
        self.dtype, self.count = dtype, BYTES // (dtype.bitwidth // 8)
        super().__init__(name=f"Vector({dtype}, {self.count})")


VECTORS = {dtype: Vector(dtype) for dtype in (types.float32, types.float64)}


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, ir.VectorType(manager.lookup(vector.dtype).get_value_type(), vector.count))


def is_vector(*values):
    return all(isinstance(v, Vector) for v in values) and len(set(values)) == 1


def constant(vector_type, value):
    return ir.Constant(vector_type, [value] * vector_type.count)


def spread(builder, scalar, vector_type):
    """A register with `scalar` in every lane."""
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, scalar, INT32(0))
    return builder.shuffle_vector(first, undefined, constant(ir.VectorType(INT32, vector_type.count), 0))


def call_intrinsic(builder, name, *registers):
    """LLVM's intrinsic of that name on registers of one type."""
    kind = registers[0].type
    bits = {"float": 32, "double": 64}[str(kind.element)]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(registers)), f"llvm.{name}.v{kind.count}f{bits}"
    )
    return builder.call(function, registers)


def address(context, builder, array_type, array, position):
    """A pointer to the element of a contiguous array at a flat position, and the element's type."""
    data = context.make_array(array_type)(context, builder, array).data
    element = context.get_data_type(array_type.dtype)
    return builder.gep(data, [position], source_etype=element), element


# --- loads and stores ----------------------------------------------------------------------------------------------------------------


@intrinsic
def load(typing, array, position):
    """The register of numbers that starts at flat `position` of `array`."""
    def generate(context, builder, signature, arguments):
        pointer, _ = address(context, builder, signature.args[0], *arguments)
        wanted = context.get_value_type(signature.return_type)
        return builder.load(builder.bitcast(pointer, wanted.as_pointer()), align=array.dtype.bitwidth // 8, typ=wanted)

    return VECTORS[array.dtype](array, types.intp), generate


@intrinsic
def store(typing, array, position, value):
    """Write a register to flat `position` of `array`."""
    def generate(context, builder, signature, arguments):
        pointer, _ = address(context, builder, signature.args[0], *arguments[:2])
        value = arguments[2]
        builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTORS[array.dtype]), generate


@intrinsic
def splat(typing, value, array):
    """A register like those of `array` with `value` in every lane."""
    def generate(context, builder, signature, arguments):
        return spread(builder, arguments[0], context.get_value_type(signature.return_type))

    return VECTORS[array.dtype](array.dtype, array), generate


@intrinsic(prefer_literal=True)
def lanes(typing, array):
    """How many numbers of `array` a register holds."""
    count = VECTORS[array.dtype].count
    return types.intp(array), lambda context, builder, signature, arguments: INDEX(count)


# --- arithmetic ----------------------------------------------------------------------------------------------------------------------


@type_callable(operator.add)
@type_callable(operator.sub)
@type_callable(operator.mul)
@type_callable(operator.truediv)
def _arithmetic(context):
    return lambda a, b: a if is_vector(a, b) else None


for _symbol, _name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv")):
    @lower_builtin(_symbol, Vector, Vector)
    def _lowered(context, builder, signature, arguments, name=_name):
        return getattr(builder, name)(*arguments, flags=["contract"])


@intrinsic
def maximum(typing, a, b):
    """The larger number of each lane; b where a is NaN or b is."""
    def generate(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return a(a, b), generate


@intrinsic
def minimum(typing, a, b):
    """The smaller number of each lane; b where a is NaN or b is."""
    def generate(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered("<", *arguments), *arguments)

    return a(a, b), generate


@intrinsic
def absolute(typing, a):
    def generate(context, builder, signature, arguments):
        return call_intrinsic(builder, "fabs", *arguments)

    return a(a), generate


@intrinsic
def signed_like(typing, a, b):
    """a b's sign: 0 where b is 0, and NaN where it is NaN."""
    def generate(context, builder, signature, arguments):
        a, b = arguments
        zero = constant(a.type, 0.0)
        with_sign = call_intrinsic(builder, "copysign", a, b)
        return builder.select(builder.fcmp_ordered("==", b, zero), zero, with_sign)

    return a(a, b), generate


@intrinsic
def nearest(typing, a):
    """The nearest whole number of each lane, where that is below 2^22 (float32) or 2^51 (float64): adding 1.5 * 2^23 (2^52) rounds."""
    def generate(context, builder, signature, arguments):
        shift = constant(arguments[0].type, 1.5 * 2.0 ** {32: 23, 64: 52}[a.dtype.bitwidth])
        return builder.fsub(builder.fadd(arguments[0], shift), shift)

    return a(a), generate


@intrinsic
def power_of_two(typing, a):
    """2^a for whole numbers a from -126 to 127 (float32), -1022 to 1023 (float64).

    Adding 1.5 * 2^23 (2^52) leaves a in the low bits of the mantissa, from where it is shifted into the exponent.
    """
    bits, mantissa, bias = {32: (32, 23, 127), 64: (64, 52, 1023)}[a.dtype.bitwidth]

    def generate(context, builder, signature, arguments):
        kind = arguments[0].type
        whole = ir.VectorType(ir.IntType(bits), kind.count)
        aligned = builder.bitcast(builder.fadd(arguments[0], constant(kind, 1.5 * 2.0**mantissa)), whole)
        shifted = builder.shl(aligned, constant(whole, mantissa))
        return builder.bitcast(builder.add(shifted, constant(whole, bias << mantissa)), kind)

    return a(a), generate


@intrinsic
def zero_below(typing, w, x, least):
    """w, but 0 in the lanes where x < least."""
    def generate(context, builder, signature, arguments):
        w, x, least = arguments
        return builder.select(builder.fcmp_ordered("<", x, least), constant(w.type, 0.0), w)

    return w(w, x, least), generate


@intrinsic
def unless_zero(typing, x, w):
    """x, but 0 in the lanes where w is 0."""
    def generate(context, builder, signature, arguments):
        x, w = arguments
        zero = constant(x.type, 0.0)
        return builder.select(builder.fcmp_unordered("!=", w, zero), x, zero)

    return x(x, w), generate


def fold(builder, name, vector):
    """Combine the lanes of a register pairwise, halves first."""
    count = vector.type.count
    while count > 1:
        count //= 2
        halves = [
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT32, count), [start + i for i in range(count)]))
            for start in (0, count)
        ]
        if name == "sum":
            vector = builder.fadd(*halves)
        else:
            vector = builder.select(builder.fcmp_ordered(">" if name == "max" else "<", *halves), *halves)
    return builder.extract_element(vector, INT32(0))


def _folding(name):
    @intrinsic
    def folded(typing, a):
        return a.dtype(a), lambda context, builder, signature, arguments: fold(builder, name, arguments[0])

    return folded


lane_sum, lane_max, lane_min = _folding("sum"), _folding("max"), _folding("min")


# --- matrix product ------------------------------------------------------------------------------------------------------------------


def product_of_blocks(turned):
    """The code of `block_product`, or of its form whose left side is turned: entry (row r, term t) at a_at + t * a_step + r."""

    def generate(context, builder, signature, arguments):
        a, a_at, a_step, b, b_at, c, c_at, c_step, terms, alpha, _ = arguments
        add = signature.args[-1].literal_value
        a_pointer, element = address(context, builder, signature.args[0], a, a_at)
        b_pointer, _ = address(context, builder, signature.args[3], b, b_at)
        c_pointer, _ = address(context, builder, signature.args[5], c, c_at)
        vector = context.get_value_type(VECTORS[signature.args[0].dtype])
        size, width = signature.args[0].dtype.bitwidth // 8, vector.count
        row_step, term_step = (INDEX(1), a_step) if turned else (a_step, INDEX(1))
        rows = [builder.gep(a_pointer, [builder.mul(row_step, INDEX(r))], source_etype=element) for r in range(ROWS)]
        cells = [(r, w) for r in range(ROWS) for w in range(COLUMNS)]

        def register(pointer, position):
            return builder.bitcast(builder.gep(pointer, [position], source_etype=element), vector.as_pointer())

        before, loop, after = builder.block, builder.append_basic_block("terms"), builder.append_basic_block("summed")
        builder.cbranch(builder.icmp_signed(">", terms, INDEX(0)), loop, after)

        builder.position_at_end(loop)
        t = builder.phi(INDEX)
        sums = {cell: builder.phi(vector) for cell in cells}
        columns = [
            builder.load(register(b_pointer, builder.add(builder.mul(t, INDEX(COLUMNS * width)), INDEX(w * width))), align=size, typ=vector)
            for w in range(COLUMNS)
        ]
        added = {}
        for r in range(ROWS):
            entry = builder.load(builder.gep(rows[r], [builder.mul(t, term_step)], source_etype=element), align=size, typ=element)
            entries = spread(builder, entry, vector)
            for w in range(COLUMNS):
                added[r, w] = builder.fadd(builder.fmul(entries, columns[w], flags=["contract"]), sums[r, w], flags=["contract"])
        following = builder.add(t, INDEX(1))
        builder.cbranch(builder.icmp_signed("<", following, terms), loop, after)
        for phi, start, again in [(t, INDEX(0), following)] + [(sums[cell], constant(vector, 0.0), added[cell]) for cell in cells]:
            phi.add_incoming(start, before)
            phi.add_incoming(again, loop)

        builder.position_at_end(after)
        totals = {cell: builder.phi(vector) for cell in cells}
        for cell in cells:
            totals[cell].add_incoming(constant(vector, 0.0), before)
            totals[cell].add_incoming(added[cell], loop)
        factor = spread(builder, alpha, vector)
        for r, w in cells:
            pointer = register(c_pointer, builder.add(builder.mul(c_step, INDEX(r)), INDEX(w * width)))
            value = builder.fmul(totals[r, w], factor, flags=["contract"])
            if add:
                value = builder.fadd(builder.load(pointer, align=size, typ=vector), value, flags=["contract"])
            builder.store(value, pointer, align=size)
        return context.get_dummy_value()

    return generate


def product_signature(a, b, c, add):
    index = types.intp
    return types.void(a, index, index, b, index, c, index, index, index, a.dtype, add)


@intrinsic(prefer_literal=True)
def block_product(typing, a, a_at, a_step, b, b_at, c, c_at, c_step, terms, alpha, add):
    """C = alpha A B, or C += alpha A B where `add`, for one block of ROWS rows and COLUMNS registers of columns.

    A: ROWS rows of `a`, the first at a_at, a_step apart.  B: `terms` rows of `b`, packed one behind the other from b_at.
    C: ROWS rows of `c`, the first at c_at, c_step apart.  The sum over `terms` stays in registers, one addition after the other.
    """
    return (product_signature(a, b, c, add), product_of_blocks(False)) if isinstance(add, types.Literal) else None


@intrinsic(prefer_literal=True)
def turned_block_product(typing, a, a_at, a_step, b, b_at, c, c_at, c_step, terms, alpha, add):
    """`block_product` of the transpose of a block of `a`: its `terms` rows, the first at a_at, a_step apart, are columns of A."""
    return (product_signature(a, b, c, add), product_of_blocks(True)) if isinstance(add, types.Literal) else None
