"""What tests of the MLX twins share: comparison with the reference, in float64, by the formula's own bound."""

import numpy as np
import pytest

from attnspec import reference
from attnspec.conformance.bounds import NoBound, bound
from attnspec.conformance.verify import as_float64
from attnspec.reference.inputs import parse_shape

from derivatives import complex_step

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
from attnspec import mlx_backend  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16")


def in_mlx(record, arrays, dtype="float32"):
    """Arrays as a caller has them: real ones in the dtype, others in their own."""
    real = {name: parse_shape(record.shapes[name]).kind == "real" for name in arrays}
    return {name: mx.array(np.asarray(x, np.float32)).astype(getattr(mx, dtype)) if real[name] else mx.array(np.asarray(x))
            for name, x in arrays.items()}


def in_numpy(record, arrays):
    """The same arrays for the reference, rounded as they are."""
    return {name: as_float64(x) if parse_shape(record.shapes[name]).kind == "real" else np.array(x) for name, x in arrays.items()}


def plain(function, arrays):
    return function(**arrays)


def compiled(function, arrays):
    """The function under mx.compile, with its arrays traced."""
    return mx.compile(lambda *values: function(**dict(zip(arrays, values, strict=True))))(*arrays.values())


def traced(function, arrays):
    """The function plainly, after a trace of it by mx.compile, whose kernels take MLX seconds to build on a CPU and are not built."""
    results = function(**arrays)
    shapes = [[(x.shape, x.dtype) for x in found if x is not None] for found in (as_tuple(results), as_tuple(compiled(function, arrays)))]
    assert shapes[0] == shapes[1]
    return results


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def mapped(function, arrays):
    """The function under mx.vmap, over the first axis of every array; a tree with None is none for mx.vmap."""
    kind = []

    def of_arrays(*values):
        result = function(**dict(zip(arrays, values, strict=True)))
        if not hasattr(result, "_asdict"):
            return result
        found = {key: x for key, x in result._asdict().items() if x is not None}
        kind[:] = [type(result), tuple(found)]
        return tuple(found.values())

    results = mx.vmap(of_arrays)(*arrays.values())
    return kind[0](**{**dict.fromkeys(kind[0]._fields), **dict(zip(kind[1], results, strict=True))}) if kind else results


def outputs_of(record, result):
    return dict(result._asdict()) if hasattr(result, "_asdict") else {record.outputs[0]: result}


def assert_agrees(name, arrays, options=None, dtype="float32", through=plain, limits=None):
    """The twin's results are the reference's: NaN and infinity in the same places, the rest within the bound where there is one.

    limits: bounds of outputs by name, for those that the record has none for.  Returns the largest error in units of its bound.
    """
    options = options or {}
    record = reference.RECORDS[name]
    given = in_mlx(record, arrays, dtype)
    exact = in_numpy(record, given)
    want = outputs_of(record, record.function(**exact, **options))
    got = outputs_of(record, through(lambda **x: getattr(mlx_backend, name)(**x, **options), given))
    limits = {**bounds_of(record, exact, options, dtype), **(limits or {})}
    worst = 0.0
    for key, theirs in want.items():
        if theirs is None:
            assert got[key] is None, key
            continue
        assert isinstance(got[key], mx.array), key
        assert str(got[key].dtype).endswith(dtype) or not mx.issubdtype(got[key].dtype, mx.floating), f"{key}: {got[key].dtype}"
        worst = max(worst, assert_close(f"{name} {key} {list(options)} {dtype}", as_float64(got[key]), theirs, limits.get(key)))
    return worst


def bounds_of(record, exact, options, dtype):
    """Bounds by output; of arrays whose entries that are not finite are 1, as those may only arrive where nothing is compared."""
    finite = {name: np.where(np.isfinite(x), x, 1.0) if x.dtype.kind == "f" and name not in ("sink", "bias", "log_prior") else x
              for name, x in exact.items()}
    try:
        return bound(record, finite, options, dtype)
    except NoBound:
        return {}


def assert_close(what, ours, theirs, limit):
    assert ours.shape == theirs.shape, f"{what}: shape {ours.shape}, not {theirs.shape}"
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs), err_msg=f"{what}: NaN")
        infinite = np.isinf(theirs)
        np.testing.assert_array_equal(np.where(infinite, ours, 0), np.where(infinite, theirs, 0), err_msg=f"{what}: infinity")
    finite = np.isfinite(theirs)
    assert limit is not None, f"{what}: nothing to judge it by"
    error, limit = np.abs(ours[finite] - theirs[finite]), np.broadcast_to(limit, theirs.shape)[finite]
    assert np.all(error <= limit), f"{what}: {np.max(error / limit):.3g} of its bound"
    return float(np.max(np.divide(error, limit, where=error > 0, out=np.zeros_like(error)), initial=0.0))


def assert_gradients(name, arrays, options=None, wrt=("q", "k", "v"), dtype="float32", through=plain, cotangent="do"):
    """mx.grad of the twin, for the cotangent of that name, is the reference's backward within the bound of that."""
    options = options or {}
    record = reference.RECORDS[name]
    backward = reference.RECORDS[f"{name}_backward"]
    given = in_mlx(backward, arrays, dtype)
    exact = in_numpy(backward, given)
    want = outputs_of(backward, backward.function(**exact, **options))
    limits = bounds_of(backward, exact, options, dtype)

    def gradients(**values):
        weights = values.pop(cotangent)

        def loss(*chosen):
            found = getattr(mlx_backend, name)(**{**values, **dict(zip(wrt, chosen, strict=True))}, **options)
            return mx.sum(found.astype(mx.float32) * weights.astype(mx.float32))

        found = mx.grad(loss, argnums=tuple(range(len(wrt))))(*(values[key] for key in wrt))
        return found if isinstance(found, tuple) else (found,)

    for key, ours in zip(wrt, through(gradients, given), strict=True):
        assert str(ours.dtype).endswith(dtype), ours.dtype
        assert_close(f"grad {name} d{key} {list(options)} {dtype}", as_float64(ours), want[f"d{key}"], limits[f"d{key}"])
    assert set(wrt) <= set(record.parameters)


def assert_derivatives(name, arrays, options=None, wrt=None, tolerance=2e-5, output=None, through=plain):
    """mx.grad of a function whose reference has no backward: along a direction in each array, by complex steps.

    wrt: the arrays, all real ones by default.  output: the one of a named tuple that is differentiated.
    tolerance: of the sum over the products of gradient and direction, in units of their sizes.
    """
    record, options = reference.RECORDS[name], options or {}
    wrt = wrt or tuple(key for key in arrays if parse_shape(record.shapes[key]).kind == "real")
    given = in_mlx(record, arrays)
    exact = in_numpy(record, given)
    rng = np.random.default_rng(0)

    def result(function, call):
        found = function(**call, **options)
        return found if output is None else getattr(found, output)

    do = rng.standard_normal(np.shape(result(record.function, exact)))

    def gradients(**values):
        def loss(*chosen):
            return mx.sum(result(getattr(mlx_backend, name), {**values, **dict(zip(wrt, chosen, strict=True))}) * mx.array(do, mx.float32))

        found = mx.grad(loss, argnums=tuple(range(len(wrt))))(*(values[key] for key in wrt))
        return found if isinstance(found, tuple) else (found,)

    largest = 0.0
    for key, gradient in zip(wrt, through(gradients, given), strict=True):
        direction = rng.standard_normal(exact[key].shape)
        want = np.sum(do * complex_step(lambda **call: result(record.function, call), exact, key, direction))
        terms = as_float64(gradient) * direction
        assert np.all(np.isfinite(terms)), f"{name} d{key} {list(options)}"
        off, size = abs(np.sum(terms) - want), np.sum(np.abs(terms)) + abs(want)
        largest = max(largest, size)                                   # a gradient that cancels has the rounding of those beside it
        assert off <= tolerance * max(size, 0.1 * largest) + 1e-30, f"{name} d{key} {list(options)}: {off / size:.2g} of its size"
