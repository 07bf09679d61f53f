"""MLX's tiled attention for long queries: block loaders, simdgroup matrices through reinterpreted fragments, ragged ends."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from . import run_kernel, skip_reason  # noqa: E402
from .test_wheel_kernels import DTYPES, TOLERANCE, difference, expanded_attention, normal, text_of  # noqa: E402

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))

BQ, BK, D, WM, WN = 32, 16, 64, 4, 1
HEADS, KV_HEADS, N, M = 2, 1, 45, 53  # neither length is a multiple of its block


def parameters(heads: int, n: int, m: int, scale: float) -> np.ndarray:
    """AttnParams as bytes: 14 four-byte fields, then strides (batch, head, row) of q, k, v, o."""
    ints = [1, heads, D, n, m, HEADS // KV_HEADS]
    blocks = [-(-n // BQ), -(-m // BK), n // BQ, m // BK, n % BQ, m % BK, m - n]
    strides = [heads * n * D, n * D, D] + [KV_HEADS * m * D, m * D, D] * 2 + [heads * n * D, n * D, D]
    head = np.array(ints, np.int32).tobytes() + np.float32(scale).tobytes() + np.array(blocks, np.int32).tobytes()
    return np.frombuffer(head + np.array(strides, np.int64).tobytes(), dtype=np.uint8)


@pytest.mark.parametrize(("t", "mode"), [*[(t, m) for t in DTYPES for m in ("plain", "causal")], ("float", "mask")])
def test_steel_attention(t, mode):
    dtype = DTYPES[t]
    q, k, v = normal(1, HEADS, N, D, dtype=dtype), normal(2, KV_HEADS, M, D, dtype=dtype), normal(3, KV_HEADS, M, D, dtype=dtype)
    buffers = {"Q": q, "K": k, "V": v, "params": parameters(HEADS, N, M, 0.125)}
    mask: object = "causal" if mode == "causal" else None
    constants = {"align_Q": False, "align_K": False, "do_causal": mode == "causal", "has_mask": mode == "mask"}
    if mode == "mask":
        visible = normal(4, HEADS, N, M) > -0.3
        mask = visible[None]
        buffers |= {"mask": visible, "mask_params": np.frombuffer(np.array([HEADS * N * M, N * M, M], np.int64).tobytes(), np.uint8)}
    kernel = f"attention<{t}, {BQ}, {BK}, {D}, {D}, {WM}, {WN}, bool, float>"
    got = run_kernel(text_of("steel/attn/kernels/steel_attention.h"), kernel, buffers,
                     {"O": ((HEADS, N, D), dtype)}, grid=(32 * -(-N // BQ), WM * HEADS, WN), threadgroup=(32, WM, WN),
                     function_constants=constants, require_written=True)  # fmt: skip
    assert difference(got["O"], expanded_attention(q, k, v, 0.125, mask)) < TOLERANCE[t]
