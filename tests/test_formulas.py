"""What holds for every formula because of its record: shapes, dtypes, leading axes, derivatives, refusals, documentation."""

import ast
import inspect

import numpy as np
import pytest

import attnspec
from attnspec.reference.inputs import parse_shape

from derivatives import central_difference, complex_step

RECORDS = attnspec.formulas()
every = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


def fields(result):
    return result._asdict() if hasattr(result, "_asdict") else {"out": result}


def floats(record, arrays):
    return [name for name in arrays if parse_shape(record.shapes[name]).kind == "real"]


@every
def test_outputs_have_the_recorded_shapes(record):
    sizes = record.complete_sizes()
    result = record.function(**record.draw())
    if isinstance(result, tuple):
        results = {name: got for name, got in result._asdict().items() if got is not None}
    else:
        results = {record.outputs[0]: result}
    assert set(results) <= set(record.outputs)
    for name, got in results.items():
        shape = parse_shape(record.shapes[name])
        want = tuple(sizes[dim] for dim in shape.names)
        got = np.asarray(got)
        assert got.shape[got.ndim - len(want):] == want, name
        assert got.dtype == (np.int64 if shape.kind in ("int", "bits", "spins") else bool if shape.kind == "bool" else np.float64), name
        assert np.all(np.isfinite(got)), name


@every
def test_inputs_are_left_alone_and_may_be_read_only_or_strided(record):
    arrays = record.draw()
    want = fields(record.function(**arrays))
    strided = {}
    for name, array in arrays.items():
        doubled = np.repeat(array, 2, axis=-1) if array.ndim else array
        strided[name] = doubled[..., ::2] if array.ndim else array
        strided[name].setflags(write=False)
    got = fields(record.function(**strided))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12, atol=1e-13) if want[name] is not None else None
    for name, array in record.draw().items():
        np.testing.assert_array_equal(arrays[name], array)


@every
def test_float32_inputs_are_computed_in_float64(record):
    arrays = record.draw()
    single = {name: array.astype(np.float32) if array.dtype == float else array for name, array in arrays.items()}
    double = {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in single.items()}
    got, want = fields(record.function(**single)), fields(record.function(**double))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


@every
def test_leading_axes_broadcast(record):
    free = [name for name in record.required if parse_shape(record.shapes[name]).leading]
    if not free:
        return                                                         # nothing to broadcast: the formula has no leading axes
    one, two = record.draw(rng=0), record.draw(rng=1)
    both = {name: np.stack([one[name], two[name]]) if name in free else one[name] for name in one}
    got = fields(record.function(**both))
    for i, arrays in enumerate((one, {name: two[name] if name in free else one[name] for name in one})):
        for name, want in fields(record.function(**arrays)).items():
            if want is None or (name in record.outputs and not parse_shape(record.shapes[name]).leading):
                continue
            np.testing.assert_allclose(np.asarray(got[name])[i], want, rtol=1e-11, atol=1e-12, err_msg=name)


@every
def test_complex_step_derivatives_are_right(record):
    if record.discrete:
        return                                                         # integers in or out: there is no derivative
    arrays = record.draw({dim: 3 for dim in ("n", "m") if dim in record.dimensions}, rng=3)
    rng = np.random.default_rng(4)
    for name in floats(record, arrays):
        direction = rng.standard_normal(np.shape(arrays[name]))
        for index, output in enumerate(record.outputs):
            shape = parse_shape(record.shapes[output])

            def value(index=index, **moved):
                result = record.function(**moved)
                return result[index] if isinstance(result, tuple) else result

            if shape.kind != "real" or (index and not isinstance(value(**arrays), np.ndarray)):
                continue
            exact = complex_step(value, arrays, name, direction)
            rough = central_difference(value, arrays, name, direction)
            slack = 1e-6 * max(1.0, np.abs(rough).max(initial=0.0))
            np.testing.assert_allclose(exact, rough, rtol=1e-5, atol=slack, err_msg=f"{output} by {name}")


@every
def test_wrong_shapes_are_refused_by_name(record):
    arrays = record.draw()
    for name in record.required:
        shape = parse_shape(record.shapes[name])
        if len(shape.dims) == 0 or any(optional for _, optional in shape.dims):
            continue
        flat = np.ones(()) if len(shape.dims) else arrays[name]
        with pytest.raises(ValueError, match=f"^{name}: expected shape") as refusal:
            record.function(**{**arrays, name: flat})
        assert "\n" not in str(refusal.value)


@every
def test_arrays_that_are_no_numbers_are_refused_by_name(record):
    arrays = record.draw()
    for name in record.required:
        for bad in (np.full(np.shape(arrays[name]), "x"), np.full(np.shape(arrays[name]), None)):
            with pytest.raises(TypeError, match=f"^{name}: expected"):
                record.function(**{**arrays, name: bad})


@every
def test_unknown_parameters_are_refused_with_the_nearest_name(record):
    option = next(iter(record.parameters))
    with pytest.raises(TypeError, match=f"did you mean '{option}'"):
        record.function(**{**record.draw(), option + "s": 1})


@every
def test_documentation_is_complete(record):
    page, doc = record.page, inspect.getdoc(record.function)
    assert "Source: " in page, "the file's docstring names its source"
    assert "Wrong versions met elsewhere: " in page
    assert doc, "the function has a docstring"
    assert "Raises " in doc
    for name in record.parameters:
        inherited = "parameters are those of" in doc
        assert inherited or name in doc, f"{name} is explained"
    assert record.equation
    assert record.latex
    assert record.source


def test_reference_code_uses_nothing_that_drops_an_imaginary_part():
    """np.sign, abs, clip, maximum and their kin on a complex number lose the derivative; the reference writes them on .real."""
    banned = {"abs", "absolute", "fabs", "vdot", "logaddexp", "hypot", "var", "std"}
    found = []
    for record in RECORDS.values():
        if record.discrete:
            continue
        tree = ast.parse(inspect.getsource(inspect.getmodule(record.function)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in banned and isinstance(node.value, ast.Name) and node.value.id == "np":
                found.append(f"{record.name}: np.{node.attr} in line {node.lineno}")
    assert not found


@pytest.mark.parametrize("name", [name for name in RECORDS if name.endswith("_backward")])
def test_gradients_go_back_through_broadcasting(name):
    """An array that five heads have copies of has five gradients, each as of one head; every other array has their sum."""
    record = RECORDS[name]
    arrays = record.draw({dim: size for dim, size in {"n": 3, "m": 4, "d": 6, "e": 2}.items() if dim in record.dimensions})
    results = record.function(**arrays)
    plain = dict(zip(record.outputs, results, strict=False) if isinstance(results, tuple) else [(*record.outputs, results)])
    for copied in arrays:
        if "..." not in record.shapes[copied].split():
            continue
        results = record.function(**{**arrays, copied: np.stack([arrays[copied]] * 5)})
        for gradient, got in zip(plain, results if isinstance(results, tuple) else (results,), strict=False):
            if got is not None:
                each = np.stack([plain[gradient]] * 5) if gradient == f"d{copied}" else 5 * plain[gradient]
                np.testing.assert_allclose(got, each, rtol=1e-12, atol=1e-13, err_msg=f"{gradient} with five {copied}", strict=True)
