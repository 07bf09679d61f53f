"""Kernels nobody here wrote: those of the installed MLX wheel, against MLX's own CPU results."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from . import MetalError, run_kernel, skip_reason  # noqa: E402

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))

K = "mlx/backend/metal/kernels"
DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat": mx.bfloat16}
# One rounding of the output type, relative to values of order one; float32 leaves room for the order of the sums.
TOLERANCE = {"float": 4e-6, "half": 2e-3, "bfloat": 1.6e-2}


def text_of(*headers: str) -> str:
    return "".join(f'#include "{K}/{h}"\n' for h in ("utils.h", *headers))


def normal(seed: int, *shape: int, dtype=mx.float32):
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def difference(got, want) -> float:
    return float(mx.max(mx.abs(got.astype(mx.float32) - want.astype(mx.float32))))


def i32(value: int) -> np.ndarray:
    return np.asarray(value, dtype=np.int32)


def u64(value: int) -> np.ndarray:
    return np.asarray(value, dtype=np.uint64)


def expanded_attention(q, k, v, scale, mask=None):
    """MLX's CPU result in float32, from inputs already rounded to the kernel's type."""
    f = mx.float32
    return mx.fast.scaled_dot_product_attention(q.astype(f)[None], k.astype(f)[None], v.astype(f)[None], scale=scale, mask=mask)[0]


# (heads, kv heads, queries, keys)
SHAPE = (4, 2, 3, 37)


@pytest.mark.parametrize("t", DTYPES)
@pytest.mark.parametrize("mode", ["plain", "causal", "bool", "additive", "sinks"])
def test_sdpa_vector(t, mode):
    heads, kv_heads, n, m = SHAPE
    d, dtype, scale = 64, DTYPES[t], 0.125
    q, k, v = normal(1, heads, n, d, dtype=dtype), normal(2, kv_heads, m, d, dtype=dtype), normal(3, kv_heads, m, d, dtype=dtype)
    buffers = {"queries": q, "keys": k, "values": v, "gqa_factor": i32(heads // kv_heads), "N": i32(m), "k_head_stride": u64(m * d),
               "k_seq_stride": u64(d), "v_head_stride": u64(m * d), "v_seq_stride": u64(d), "scale": np.float32(scale)}  # fmt: skip
    constants, mask = {}, None
    if mode == "causal":
        constants, mask = {"do_causal": True}, "causal"
    elif mode == "sinks":
        constants = {"has_sinks": True}
        buffers |= {"sinks": normal(5, heads, dtype=dtype), "num_q_heads": i32(heads)}
    elif mode in ("bool", "additive"):
        mask = normal(4, heads, n, m) > -0.3 if mode == "bool" else normal(4, heads, n, m, dtype=dtype)
        constants = {"has_mask": True, f"{'bool' if mode == 'bool' else 'float'}_mask": True}
        buffers |= {"bmask" if mode == "bool" else "fmask": mask, "mask_kv_seq_stride": i32(1), "mask_q_seq_stride": i32(m),
                    "mask_head_stride": i32(n * m)}  # fmt: skip
        mask = mask[None] if mode == "bool" else mask.astype(mx.float32)[None]
    got = run_kernel(text_of("sdpa_vector.h"), f"sdpa_vector<{t}, {d}, {d}>", buffers, {"out": ((heads, n, d), dtype)},
                     grid=(heads * 1024, n, 1), threadgroup=(1024, 1, 1), function_constants=constants, require_written=True)  # fmt: skip
    if mode == "sinks":
        f = mx.float32
        sinks = buffers["sinks"].astype(f)
        want = mx.fast.scaled_dot_product_attention(q.astype(f)[None], k.astype(f)[None], v.astype(f)[None], scale=scale, sinks=sinks)[0]
    else:
        want = expanded_attention(q, k, v, scale, mask)
    assert difference(got["out"], want) < TOLERANCE[t]


@pytest.mark.parametrize("t", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_vector_in_two_passes(t, causal):
    heads, kv_heads, n, m = SHAPE
    m, blocks, d, dtype, scale = 200, 32, 64, DTYPES[t], 0.125
    group = heads // kv_heads
    q, k, v = normal(1, heads, n, d, dtype=dtype), normal(2, kv_heads, m, d, dtype=dtype), normal(3, kv_heads, m, d, dtype=dtype)
    constants = {"blocks": blocks, "do_causal": causal}
    text = text_of("sdpa_vector.h")
    first = run_kernel(text, f"sdpa_vector_2pass_1<{t}, {d}, {d}>",
                       {"queries": q, "keys": k, "values": v, "N": i32(m), "k_head_stride": u64(m * d), "k_seq_stride": u64(d),
                        "v_head_stride": u64(m * d), "v_seq_stride": u64(d), "scale": np.float32(scale)},
                       {"out": ((heads, n, blocks, d), dtype), "sums": ((heads, n, blocks), mx.float32),
                        "maxs": ((heads, n, blocks), mx.float32)},
                       grid=(kv_heads * 32, group, blocks * n), threadgroup=(32, group, n), function_constants=constants,
                       require_written=True)  # fmt: skip
    second = run_kernel(text, f"sdpa_vector_2pass_2<{t}, {d}>",
                        {"partials": first["out"], "sums": first["sums"], "maxs": first["maxs"], 4: i32(blocks)},
                        {"out": ((heads, n, d), dtype)}, grid=(heads * 1024, n, 1), threadgroup=(1024, 1, 1),
                        function_constants=constants, require_written=True)  # fmt: skip
    want = expanded_attention(q, k, v, scale, "causal" if causal else None)
    assert difference(second["out"], want) < 2 * TOLERANCE[t]  # the partial sums are rounded to the type as well


@pytest.mark.parametrize("t", DTYPES)
@pytest.mark.parametrize(("kernel", "width", "threads"), [("softmax_single_row", 77, 32), ("softmax_single_row", 500, 128),
                                                          ("softmax_looped", 4500, 1024)])  # fmt: skip
def test_softmax(t, kernel, width, threads):
    x = normal(6, 3, width, dtype=DTYPES[t])
    x[1, 2:9] = -mx.inf
    got = run_kernel(text_of("softmax.h"), f"{kernel}<{t}, float>", {"in": x, "axis_size": i32(width)}, {"out": (x.shape, DTYPES[t])},
                     grid=(3 * threads, 1, 1), threadgroup=(threads, 1, 1), require_written=True)  # fmt: skip
    assert difference(got["out"], mx.softmax(x.astype(mx.float32), axis=-1)) < TOLERANCE[t]


@pytest.mark.parametrize("t", DTYPES)
def test_softmax_in_the_type_itself(t):
    """AccT = T: every operation rounds to the type, so the error is that of a sum of rounded terms."""
    x = normal(7, 2, 64, dtype=DTYPES[t])
    got = run_kernel(text_of("softmax.h"), f"softmax_single_row<{t}>", {"in": x, "axis_size": i32(64)}, {"out": (x.shape, DTYPES[t])},
                     grid=(64, 1, 1), threadgroup=(32, 1, 1))  # fmt: skip
    assert difference(got["out"], mx.softmax(x.astype(mx.float32), axis=-1)) < TOLERANCE[t]


@pytest.mark.parametrize("t", DTYPES)
@pytest.mark.parametrize(("kernel", "width", "threads"), [("logsumexp", 100, 32), ("logsumexp_looped", 4500, 1024)])
def test_logsumexp(t, kernel, width, threads):
    x = normal(8, 4, width, dtype=DTYPES[t])
    x[3] = -mx.inf
    got = run_kernel(text_of("logsumexp.h"), f"{kernel}<{t}>", {"in": x, "axis_size": i32(width)}, {"out": ((4,), DTYPES[t])},
                     grid=(4 * threads, 1, 1), threadgroup=(threads, 1, 1), require_written=True)["out"]  # fmt: skip
    want = mx.logsumexp(x.astype(mx.float32), axis=-1)
    assert float(got[3]) == float(want[3]) == -np.inf
    assert difference(got[:3], want[:3]) < 5 * TOLERANCE[t]  # values of order five to ten


def gated_delta_reference(q, k, v, g, beta, state):
    """The recurrence in float64; q, k: [T, Hk, Dk], v: [T, Hv, Dv], g, beta: [T, Hv], state: [Hv, Dv, Dk]."""
    s, out = state.astype(np.float64), np.zeros(v.shape)
    repeat = v.shape[1] // q.shape[1]
    for t in range(len(q)):
        kt, qt = np.repeat(k[t], repeat, 0).astype(float), np.repeat(q[t], repeat, 0).astype(float)
        s = s * g[t][:, None, None]
        delta = (v[t] - np.einsum("hvk,hk->hv", s, kt)) * beta[t][:, None]
        s = s + delta[:, :, None] * kt[:, None, :]
        out[t] = np.einsum("hvk,hk->hv", s, qt)
    return out, s


@pytest.mark.parametrize("kernel", ["gated_delta_seq", "gated_delta_fused_chunk"])
@pytest.mark.parametrize("steps", [16, 21])
def test_gated_delta_update(kernel, steps):
    """The chunked form runs on simdgroup matrices: loads transposed, products, and fragments touched by lane."""
    hk, hv, dk, dv, chunk = 1, 2, 64, 32, 8
    r = np.random.default_rng(9)
    q, k = (r.standard_normal((steps, hk, dk)).astype(np.float32) / 8 for _ in range(2))
    v = r.standard_normal((steps, hv, dv)).astype(np.float32)
    g = r.uniform(0.7, 1.0, (steps, hv)).astype(np.float32)
    beta = r.uniform(0.1, 0.9, (steps, hv)).astype(np.float32)
    state = r.standard_normal((hv, dv, dk)).astype(np.float32)
    fused = kernel == "gated_delta_fused_chunk"
    rows = dv // 8 if fused else dv

    def run(**options):
        return run_kernel(text_of("gated_delta_update.h"), f"{kernel}<float, {dk}, {dv}, {hk}, {hv}, {chunk}>",
                          {"q": q, "k": k, "v": v, "state_in": state, "g": g, "beta": beta, "T": i32(steps)},
                          {"y": (v.shape, np.float32), "state_out": (state.shape, np.float32)},
                          grid=(32, rows, hv), threadgroup=(32, 4, 1), require_written=True, **options)  # fmt: skip

    if fused:
        # The kernel overwrites gamma for the next chunk with no barrier after the last reads: only lockstep protects it.
        with pytest.raises(MetalError, match="race: threadgroup array 'gamma_all'"):
            run()
    got = run(races="collectives" if fused else "strict")
    want, want_state = gated_delta_reference(q, k, v, g, beta, state)
    assert np.abs(got["y"] - want).max() < 1e-5
    assert np.abs(got["state_out"] - want_state).max() < 1e-5


@pytest.mark.parametrize("order", ["descending", "shuffled"])
def test_the_order_of_threads_changes_nothing(order):
    x = normal(10, 5, 300)
    given = {"in": x, "axis_size": i32(300)}
    shape = {"out": (x.shape, mx.float32)}

    def run(order):
        return run_kernel(text_of("softmax.h"), "softmax_single_row<float>", given, shape, (5 * 96,), (96,), order=order)["out"]

    assert mx.array_equal(run("ascending"), run(order))


@pytest.mark.parametrize("t", DTYPES)
def test_cross_entropy_and_its_gradient(t):
    rows, width = 3, 333
    x = normal(11, rows, width, dtype=DTYPES[t])
    targets, weights = np.array([0, 332, -5], np.int32), np.array([1, -2, 0.5], np.float32)
    text, sizes = text_of("cross_entropy.h"), ((rows * 64,), (64,))
    loss = run_kernel(text, f"cross_entropy<{t}>", {"in": x, "targets": targets, "axis_size": i32(width)}, {"out": ((rows,), mx.float32)},
                      *sizes, require_written=True)["out"]  # fmt: skip
    f = x.astype(mx.float32)
    chosen = mx.take_along_axis(f, mx.array(targets % width)[:, None], axis=-1)[:, 0]
    assert difference(loss, mx.logsumexp(f, axis=-1) - chosen) < TOLERANCE["float"]
    given = {"in": x, "targets": targets, "loss": loss, "cotan": weights, "axis_size": i32(width)}
    grad = run_kernel(text, f"cross_entropy_vjp<{t}>", given,
                      {"out": (x.shape, DTYPES[t])}, *sizes, require_written=True)["out"]  # fmt: skip
    one_hot = np.eye(width, dtype=np.float32)[targets]
    assert difference(grad, mx.array(weights)[:, None] * (mx.softmax(f, axis=-1) - one_hot)) < TOLERANCE[t]
