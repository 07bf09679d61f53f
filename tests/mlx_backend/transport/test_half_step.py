"""The Metal kernel of Sinkhorn's half-steps, run by the emulator: attention by it is within the bound with every option."""

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
import metal_agreement  # noqa: E402
from metal_agreement import emulated  # noqa: E402
from mlx_agreement import in_mlx  # noqa: E402

import attnspec  # noqa: E402
from attnspec import mlx_backend  # noqa: E402
from attnspec.mlx_backend import metal  # noqa: E402

pytestmark = metal_agreement.needs_a_compiler
RNG = np.random.default_rng(0)
RECORD = attnspec.formulas()["sinkhorn_attention"]


def drawn(n, m, d, e, h=2):
    return {name: RNG.standard_normal((h, *size)) for name, size in {"q": (n, d), "k": (m, d), "v": (m, e)}.items()}


def worst_ratio(arrays, options, dtype="float32", **emulation):
    return metal_agreement.worst_ratio("half step", "sinkhorn_attention", arrays, options, dtype, **emulation)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (7, 5, 4, 3), (37, 70, 16, 9)], ids=str)
def test_within_the_bound(sizes):
    for options in ({"n_iters": 1}, {"n_iters": 3}, {"n_iters": 4}, {"n_iters": 6, "eps": 0.5}):
        assert worst_ratio(drawn(*sizes), options) < 1


@pytest.mark.parametrize("options", [
    {"output_scaling": "cols"}, {"output_scaling": "none", "n_iters": 4}, {"cost": "squared_distance"},
    {"cost": "squared_distance", "n_iters": 4, "scale": 0.3}, {"scale": 2.0, "eps": 0.7},
], ids=str)
def test_every_option(options):
    assert worst_ratio(drawn(19, 37, 8, 8), options, order="shuffled", seed=2) < 1


@pytest.mark.parametrize("cost", ["dot", "squared_distance"])
@pytest.mark.parametrize("marginal", ["valid", "all"])
def test_masked_keys(cost, marginal):
    arrays = drawn(19, 37, 8, 8) | {"key_mask": RNG.random((2, 37)) < 0.6}
    arrays["k"][~arrays["key_mask"]], arrays["v"][~arrays["key_mask"]] = np.nan, np.inf
    for n_iters in (3, 4):
        assert worst_ratio(arrays, {"cost": cost, "key_marginal": marginal, "n_iters": n_iters, "output_scaling": "cols"}) < 1


def test_gradients_are_those_of_the_graph():
    arrays = [mx.array(x.astype(np.float32)) for x in drawn(9, 12, 8, 8).values()]

    def loss(*arrays):
        return mx.sum(mlx_backend.sinkhorn_attention(*arrays, n_iters=4) ** 2)

    with emulated(), metal.path("metal"):
        ours = mx.grad(loss, argnums=(0, 1, 2))(*arrays)
        mx.eval(ours)
    with metal.path("graph"):
        theirs = mx.grad(loss, argnums=(0, 1, 2))(*arrays)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=0, atol=1e-5)


def test_what_the_kernel_cannot_do_is_refused():
    given = in_mlx(RECORD, drawn(5, 6, 4, 4))
    with emulated(), metal.path("metal"):
        with pytest.raises(ValueError, match=r"the kernel half step: it makes a fixed number of half-steps$"):
            mlx_backend.sinkhorn_attention(**given, tol=1e-3)
        with pytest.raises(ValueError, match=r"the kernel half step: it does not write weights$"):
            mlx_backend.sinkhorn_attention(**given, return_weights=True)
