"""The Metal kernel of tensor attention, run by the emulator: within the bound, and what is hidden never arrives."""

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import metal_agreement  # noqa: E402
from metal_agreement import emulated  # noqa: E402

from attnspec import mlx_backend  # noqa: E402
from attnspec.mlx_backend import metal  # noqa: E402

pytestmark = metal_agreement.needs_a_compiler
RNG = np.random.default_rng(0)


def worst_ratio(arrays, options, dtype="float32", **emulation):
    return metal_agreement.worst_ratio("pairs", "tensor_attention", arrays, options, dtype, **emulation)


def drawn(n, m1, m2, d, e, h=2):
    sizes = {"q": (n, d), "k1": (m1, d), "k2": (m2, d), "v1": (m1, e), "v2": (m2, e)}
    return {name: RNG.standard_normal((h, *size)) for name, size in sizes.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (7, 5, 4, 4, 3), (37, 6, 40, 16, 9)], ids=str)
def test_within_the_bound(sizes, dtype):
    for options in ({}, {"causal": True}, {"causal": "top-left", "scale": 0.7}):
        assert worst_ratio(drawn(*sizes), options, dtype) < 1


def test_masks_and_shared_sets():
    arrays = drawn(9, 5, 12, 8, 8) | {"mask": RNG.random((9, 5, 12)) < 0.5}
    arrays["mask"][3] = False
    arrays["mask"][:, 2], arrays["mask"][:, :, 7] = False, False
    arrays["k1"][:, 2], arrays["v1"][:, 2], arrays["k2"][:, 7], arrays["v2"][:, 7] = np.nan, np.inf, np.inf, np.nan
    assert worst_ratio(arrays, {}) < 1
    arrays = drawn(9, 5, 12, 8, 8) | {"k2": RNG.standard_normal((12, 8)), "mask": RNG.random((2, 1, 5, 1)) < 0.7}
    assert worst_ratio(arrays, {}, order="shuffled", seed=3) < 1


def test_gradients_are_those_of_the_graph():
    arrays = [mx.array(x.astype(np.float32)) for x in drawn(9, 5, 6, 8, 8).values()]

    def loss(*arrays):
        return mx.sum(mlx_backend.tensor_attention(*arrays, causal=True) ** 2)

    with emulated(), metal.path("metal"):
        ours = mx.grad(loss, argnums=tuple(range(5)))(*arrays)
        mx.eval(ours)
    with metal.path("graph"):
        theirs = mx.grad(loss, argnums=tuple(range(5)))(*arrays)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=0, atol=1e-5)
