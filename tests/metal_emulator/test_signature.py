"""Text equality: signature.generate against what the installed MLX prints."""

from __future__ import annotations

import pytest

mx = pytest.importorskip("mlx.core")

from .printed import printed_text  # noqa: E402
from .signature import ATTRIBUTES, InputSpec, dtype_name, generate  # noqa: E402

P = "thread_position_in_grid"
z = mx.zeros


def case(name, inputs=(), outputs=(("o", mx.float32),), source=f"o[{P}.x] = 0;", header="", template=(), atomic=False):
    return pytest.param(inputs, outputs, source, header, template, atomic, id=name)


def named(**arrays):
    return tuple(arrays.items())


DTYPES = [mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64, mx.float16, mx.bfloat16, mx.float32,
          mx.complex64]  # fmt: skip

CASES = [
    *[case(f"dtype-{dtype_name(d)}", named(x=z((9,), d)), (("o", d),), template=(("T", d),)) for d in DTYPES],
    *[case(f"size-{n}", named(x=z((n,)))) for n in (0, 1, 7, 8, 9)],
    *[case(f"attribute-{a}", named(x=z((3, 4))), source=f"o[0] = {a}{'.x' if wide else ''};") for a, wide in ATTRIBUTES],
    *[case(f"template-int-{n}", template=(("N", n),)) for n in (0, 1, -1, -3, 2147483647, -2147483648)],
    *[case(f"template-bool-{b}", template=(("B", b),)) for b in (True, False)],
    case("template-mixed", named(x=z((9,), mx.float16)), template=(("T", mx.float16), ("N", -3), ("B", True), ("U", mx.bfloat16))),
    case("size-0-of-2d", named(x=z((3, 0)))),
    case("size-8-of-3d", named(x=z((2, 2, 2)))),
    case("zero-d", named(x=mx.array(1.0), n=mx.array(3))),
    case("python-scalars", (("x", z((16,))), ("n", 5), ("f", 2.5), ("flag", True))),
    case("zero-d-with-shape-text", (("n", 5),), source=f"n_shape; n_strides; n_ndim; {P}"),
    case("shape", named(x=z((9, 2))), source=f"o[{P}.x] = x_shape[0];"),
    case("strides", named(x=z((9, 2))), source=f"o[{P}.x] = x_strides[0];"),
    case("ndim", named(x=z((9, 2))), source=f"o[{P}.x] = x_ndim;"),
    case("shape-strides-ndim", named(x=z((9, 2)), y=z((3,))), source=f"// y_ndim x_ndim x_strides y_shape x_shape\no[{P}.x] = 1;"),
    case("substring-collision", named(x=z((9, 2)), ax=z((9,)), b=z((2,))), source=f"int max_shape = 3; o[{P}.x] = max_shape;"),
    case("attribute-in-comment", source="// threads_per_grid would do\no[0] = 1;"),
    case("attribute-in-longer-name", source="o[0] = dispatch_threads_per_threadgroup.x;"),
    case("shape-only-in-header", named(x=z((9, 2))), header="// x_shape threads_per_grid\n"),
    case("header", header="inline float twice(float v) { return v + v; }\n"),
    case("header-no-newline", header="#define A 1", template=(("N", 1),)),
    case("no-attribute", named(x=z((9,))), source="o[0] = x[0];"),
    case("no-input-no-attribute", source="o[0] = 1;"),
    case("two-outputs-no-attribute", named(x=z((9,))), (("o", mx.float32), ("p", mx.int32)), source="o[0] = 1; p[0] = 2;"),
    case("two-outputs-shape-no-attribute", named(x=z((9,))), (("o", mx.float32), ("p", mx.int32)), source="o[0] = x_shape[0];"),
    case("three-outputs-two-shapes", named(x=z((9,))), (("o", mx.float32), ("p", mx.int32), ("q", mx.bool_)), source="x_shape x_ndim"),
    case("one-output-shape-no-attribute", named(x=z((9,))), source="o[0] = x_shape[0];"),
    case("atomic", named(x=z((9,))), (("o", mx.int32), ("p", mx.uint32)), atomic=True),
    case("atomic-float-template", named(x=z((9,))), (("o", mx.float32),), template=(("T", mx.float32),), atomic=True),
    case("multi-line-source", named(x=z((9,))), source=f"\n    uint i = {P}.x;\n    o[i] = x[i];\n"),
]


@pytest.mark.parametrize(("inputs", "outputs", "source", "header", "template", "atomic"), CASES)
def test_text_equals_what_mlx_prints(inputs, outputs, source, header, template, atomic):
    names = [name for name, _ in inputs]
    values = [value for _, value in inputs]
    build = {"name": "k", "input_names": names, "output_names": [n for n, _ in outputs], "source": source, "header": header,
             "atomic_outputs": atomic}  # fmt: skip
    call = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1), "output_shapes": [(4,)] * len(outputs), "output_dtypes": [d for _, d in outputs]}
    if template:
        call["template"] = list(template)
    arrays = [v if isinstance(v, mx.array) else mx.array(v) for v in values]
    specs = [InputSpec(n, dtype_name(a.dtype), tuple(a.shape)) for n, a in zip(names, arrays, strict=True)]
    made = generate("k", specs, [(n, dtype_name(d)) for n, d in outputs], source, header, list(template), atomic)
    assert made.text == printed_text(build, call, values)


def test_there_are_enough_cases():
    assert len(CASES) >= 50
