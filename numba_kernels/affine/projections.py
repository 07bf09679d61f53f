"""Products with the small matrices of a layer, x w^T, on the panels of the kernels.

NumPy's library would do them in its own threads, which wait for more work by spinning and slow the kernels that come next.
"""

import math

import numpy as np

from attnspec.numba_kernels.arrays import heads_of
from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.matrix import CHUNK, packed_rows
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import ROWS, block_product
from attnspec.numba_kernels.softmax.tiles import copy_rows

BLOCK = 96      # rows of a task


def project(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x w^T, (..., n, g), of x (..., n, c) and w (..., g, c)."""
    lead = np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    n, g, c = x.shape[-2], *w.shape[-2:]
    rows, row_of = heads_of(x, lead)
    matrices, matrix_of = heads_of(w, lead)
    out = np.empty((math.prod(lead), n, g), x.dtype)
    in_parallel(project_blocks, len(out) * -(-n // BLOCK), rows, row_of, packed_rows(matrices), matrix_of, out, work=out.size * c)
    return out.reshape(*lead, n, g)


@helper
def project_rows(x, one, i0, rows, block, panels, w_one, p, acc):
    """acc[:rows] += x[one, i0:i0 + rows] @ panel p of panels[w_one]; what `block` holds is these rows where they are fewer than BLOCK."""
    if rows == BLOCK:
        project_panel(x, (one * x.shape[1] + i0) * x.shape[2], rows, panels, w_one, p, acc)
    else:                                                    # the product reads whole groups of rows, which x may not have
        project_panel(block, 0, rows, panels, w_one, p, acc)


@helper
def project_panel(x, at, rows, panels, one, p, acc):
    """acc[:rows] += rows of x from flat position `at` @ panel p of panels[one], CHUNK terms at a time."""
    _, count, terms, width = panels.shape
    panel = (one * count + p) * terms * width
    for start in range(0, terms, CHUNK):
        for r in range(0, rows, ROWS):
            block_product(
                x, at + r * terms + start, terms, panels, panel + start * width, acc, r * width, width, min(CHUNK, terms - start),
                acc.dtype.type(1), True,
            )


@kernel
def project_blocks(x, x_of, panels, w_of, out, first, step):
    """out (h, n, g)."""
    heads, n, g = out.shape
    _, count, terms, width = panels.shape
    blocks = (n + BLOCK - 1) // BLOCK
    block, acc = np.zeros((BLOCK, terms), out.dtype), np.empty((BLOCK, width), out.dtype)
    for task in range(first, heads * blocks, step):
        h, i0 = task // blocks, task % blocks * BLOCK
        rows = min(BLOCK, n - i0)
        if rows < BLOCK:
            copy_rows(x, x_of[h], i0, rows, block)
        for p in range(count):
            acc[:] = out.dtype.type(0)
            project_rows(x, x_of[h], i0, rows, block, panels, w_of[h], p, acc)
            for r in range(rows):
                for w in range(min(width, g - p * width)):
                    out[h, i0 + r, p * width + w] = acc[r, w]
