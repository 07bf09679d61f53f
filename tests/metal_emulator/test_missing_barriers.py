"""MLX's own kernels with one barrier taken out: the emulator must miss every barrier the kernel needs."""

from __future__ import annotations

import re

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from . import MetalError, run_kernel, skip_reason  # noqa: E402
from .launch import default_include_folders  # noqa: E402
from .test_wheel_kernels import K, i32, normal, text_of, u64  # noqa: E402

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))

BARRIER = re.compile(r"threadgroup_barrier\(mem_flags::mem_threadgroup\);")


def text_without(header: str, kernel: str, number: int) -> str:
    """The header's text less barrier `number` of the kernel."""
    body = next(f / K / header for f in default_include_folders() if (f / K / header).is_file()).read_text()
    start = re.search(rf"\b{kernel}\(", body)
    assert start is not None
    found = list(BARRIER.finditer(body, start.end()))[number]
    return text_of() + body[: found.start()] + " " * len(found.group()) + body[found.end() :]


def softmax(text, kernel):
    x = normal(12, 2, 700)
    threads = 192 if kernel != "softmax_looped" else 1024
    out = (2,) if "logsumexp" in kernel else x.shape
    given = {"in": x, "axis_size": i32(700)}
    run_kernel(text, f"{kernel}<float, float>", given, {"out": (out, mx.float32)}, (2 * threads,), (threads,), name=f"{kernel}.metal")


def sdpa(text, kernel):
    q, k, v = normal(1, 1, 1, 64), normal(2, 1, 40, 64), normal(3, 1, 40, 64)
    given = {"queries": q, "keys": k, "values": v, "gqa_factor": i32(1), "N": i32(40), "k_head_stride": u64(2560), "k_seq_stride": u64(64),
             "v_head_stride": u64(2560), "v_seq_stride": u64(64), "scale": np.float32(0.125)}  # fmt: skip
    run_kernel(text, f"{kernel}<float, 64, 64>", given, {"out": ((1, 1, 64), mx.float32)}, (1024,), (1024,), name=f"{kernel}.metal")


CASES = [
    *[("softmax.h", "softmax_single_row", n, softmax) for n in range(5)],
    *[("softmax.h", "softmax_looped", n, softmax) for n in range(2)],
    *[("logsumexp.h", "logsumexp", n, softmax) for n in range(4)],
    *[("sdpa_vector.h", "sdpa_vector", n, sdpa) for n in range(3)],
]


@pytest.mark.parametrize(("header", "kernel", "number", "run"), CASES)
def test_a_barrier_less_is_reported(header, kernel, number, run):
    with pytest.raises(MetalError, match="race: threadgroup array"):
        run(text_without(header, kernel, number), kernel)
