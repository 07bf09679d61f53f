"""Matrix products of blocks: keys and values are packed once into panels, which the innermost block reads one behind the other.

A panel holds COLUMNS registers of columns (16 in float32, 8 in float64). What a panel has beyond the matrix is 0.
"""

import numpy as np

from attnspec.numba_kernels.jit import helper, kernel
from attnspec.numba_kernels.parallel import in_parallel
from attnspec.numba_kernels.simd import BYTES, COLUMNS, ROWS, block_product, lanes, load, store

CHUNK = 64      # terms added in one chain before the sum goes to memory: the error bounds allow no more


def panel_width(dtype) -> int:
    """Columns of a panel."""
    return COLUMNS * BYTES // np.dtype(dtype).itemsize


def packed_rows(x: np.ndarray) -> np.ndarray:
    """x (b, m, d) as panels of its transpose, (b, panels of m, d, width): the right side of q @ x^T."""
    b, m, d = x.shape
    width = panel_width(x.dtype)
    panels = np.empty((b, -(-m // width), d, width), x.dtype)
    in_parallel(_pack_rows, b * panels.shape[1], x, panels, work=x.size)
    return panels


@kernel
def _pack_rows(x, panels, first, step):
    _, m, _ = x.shape
    b, count, d, width = panels.shape
    for task in range(first, b * count, step):
        one, p = task // count, task % count
        panel = panels[one, p]
        for w in range(width):
            j = p * width + w
            if j < m:
                for c in range(d):
                    panel[c, w] = x[one, j, c]
            else:
                for c in range(d):
                    panel[c, w] = 0


def packed_columns(x: np.ndarray) -> np.ndarray:
    """x (b, m, e) as panels of its columns, (b, panels of e, m, width): the right side of weights @ x."""
    b, m, e = x.shape
    width = panel_width(x.dtype)
    panels = np.empty((b, -(-e // width), m, width), x.dtype)
    in_parallel(_pack_columns, b * -(-m // CHUNK), x, panels, work=x.size)
    return panels


@kernel
def _pack_columns(x, panels, first, step):
    _, _, e = x.shape
    b, count, m, width = panels.shape
    chunks = -(-m // CHUNK)
    for task in range(first, b * chunks, step):
        one, start = task // chunks, task % chunks * CHUNK
        for p in range(count):
            filled = min(width, e - p * width)
            for j in range(start, min(start + CHUNK, m)):
                if filled == width:
                    for w in range(0, width, lanes(x)):
                        store(panels, ((one * count + p) * m + j) * width + w, load(x, (one * m + j) * e + p * width + w))
                else:
                    for w in range(filled):
                        panels[one, p, j, w] = x[one, j, p * width + w]
                    for w in range(filled, width):
                        panels[one, p, j, w] = 0


@helper
def rows_product(a, rows, panels, at, panel_size, first, count, terms, out, step, alpha):
    """out[:rows, :count * width] = alpha a @ (panels first ... first + count), for packed rows from flat position `at`."""
    width = panels.shape[-1]
    for p in range(count):
        for r in range(0, rows, ROWS):
            block_product(a, r * terms, terms, panels, at + (first + p) * panel_size, out, r * step + p * width, step, terms, alpha, False)


@helper
def add_columns_product(a, rows, step, start, terms, panels, at, key, out, out_step):
    """out[:rows] += a[:rows, start:start + terms] @ x[key:key + terms], for packed columns of x from flat position `at`."""
    count, m, width = panels.shape[1:]
    for p in range(count):
        for r in range(0, rows, ROWS):
            block_product(
                a, r * step + start, step, panels, at + (p * m + key) * width, out, r * out_step + p * width, out_step, terms,
                out.dtype.type(1), True,
            )
