"""What tests of the Metal kernels share: a call by the emulator, judged by its formula's bound."""

import metal_emulator
import numpy as np
import pytest
from mlx_agreement import in_mlx, in_numpy, mx

import attnspec
from attnspec import mlx_backend
from attnspec.conformance.bounds import bound
from attnspec.dispatch import as_numpy
from attnspec.mlx_backend import metal

needs_a_compiler = pytest.mark.skipif(metal_emulator.skip_reason() is not None, reason=str(metal_emulator.skip_reason()))


def emulated(**options):
    """mx.fast.metal_kernel on the CPU; every element of a result must be written."""
    def make(**what):
        written = "dbias" not in what["output_names"]                  # which is filled with zeros before
        return metal_emulator.metal_kernel(**what, require_written=written, **options)

    return metal.made_by(make)


def worst_ratio(kernel, name, arrays, options, dtype="float32", **emulation):
    """err/bound of one call of the function `name`, which must take the kernel."""
    record = attnspec.formulas()[name]
    given = in_mlx(record, arrays, dtype)
    exact = in_numpy(record, given)
    with emulated(**emulation), metal.path("metal"):
        got = getattr(mlx_backend, name)(**given, **options)
        mx.eval(got)
    assert metal.taken()[kernel] == "metal"
    (limit,) = bound(record, finite(exact), options, dtype).values()
    return ratio(got, record.function(**exact, **options), limit)


def worst_gradients(name, arrays, options, dtype="float32", **emulation):
    """The largest err/bound of the gradients by kernels, through mx.vjp of the forward function."""
    backward = attnspec.formulas()[f"{name}_backward"]
    given = in_mlx(backward, arrays, dtype)
    exact = in_numpy(backward, given)
    wrt = [key for key in arrays if f"d{key}" in (*backward.outputs, "dbias", "dsink")]
    fixed = {key: x for key, x in given.items() if key not in (*wrt, "do")}

    def forward(*chosen):
        return getattr(mlx_backend, name)(**fixed, **dict(zip(wrt, chosen, strict=True)), **options)

    with emulated(**emulation), metal.path("metal"):
        _, found = mx.vjp(forward, [given[key] for key in wrt], [given["do"]])
        mx.eval(found)
    assert metal.taken()["softmax gradients"] == "metal"
    limits, want = bound(backward, finite(exact), options, dtype), backward.function(**exact, **options)._asdict()
    return max(ratio(got, want[f"d{key}"], limits[f"d{key}"]) for key, got in zip(wrt, found, strict=True))


def finite(arrays):
    """The arrays with 0 for what is not finite: hidden, or in a feature of its own, it says nothing about the others."""
    kept = ("bias", "log_prior", "sink")                               # where -inf hides
    return {key: np.where(np.isfinite(x), x, 0.0) if x.dtype == float and key not in kept else x for key, x in arrays.items()}


def ratio(got, want, limit):
    """The largest error in units of the limit; NaN and infinity must stand in the same places."""
    got = as_numpy(got).astype(float)
    assert got.shape == want.shape
    assert np.array_equal(np.isfinite(got), np.isfinite(want))
    assert np.array_equal(got[~np.isfinite(got)], want[~np.isfinite(want)], equal_nan=True)
    ordinary = np.isfinite(want)
    error = np.abs(np.subtract(got, want, where=ordinary, out=np.zeros(want.shape)))
    limit = np.broadcast_to(limit, want.shape)
    assert not np.isnan(limit[ordinary]).any()
    return np.max(np.where(error == 0, 0, error / np.where(limit > 0, limit, 1e-300)), initial=0)
