"""What the installed MLX prints for a kernel: it works without Metal inside mx.export_function."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

FENCE = "```\n"


def printed_text(build: dict[str, Any], call: dict[str, Any], inputs: Sequence[Any]) -> str:
    """The text between the fences of verbose=True. build: arguments of metal_kernel; call: those of the kernel."""
    import mlx.core as mx

    arrays = [value for value in inputs if isinstance(value, mx.array)]

    def traced(*traced_arrays: Any) -> Any:
        supply = iter(traced_arrays)
        actual = [next(supply) if isinstance(value, mx.array) else value for value in inputs]
        kernel: Any = mx.fast.metal_kernel(**build)
        return kernel(inputs=actual, verbose=True, **call)

    # The print comes from C++, so the file descriptor is captured and the C buffers are flushed around it.
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    with tempfile.TemporaryFile() as sink, tempfile.TemporaryDirectory() as folder:
        saved = os.dup(1)
        try:
            os.dup2(sink.fileno(), 1)
            mx.export_function(os.path.join(folder, "kernel.mlxfn"), traced, *arrays)
            libc.fflush(None)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        sink.seek(0)
        text = sink.read().decode()
    # MLX ends the block with a newline of its own before the closing fence.
    return text.split(FENCE, 1)[1].rsplit("\n" + FENCE, 1)[0]
