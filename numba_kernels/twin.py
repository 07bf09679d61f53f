"""The boundary between callers' arrays and kernels: what a twin takes, and what it hands to its kernel."""

import functools
import inspect
from typing import Any

import ml_dtypes
import numpy as np

from attnspec.reference import formula
from attnspec.reference.inputs import as_array

HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
DTYPES = ("float32", "float64", "float16", "bfloat16")
CHECKED = 4096      # rows looked through at a time for a wrong entry


def twin(function=None, *, lacks: dict[str, str] | None = None, dtypes: tuple[str, ...] = DTYPES, compact: tuple[str, ...] = ()):
    """Make `function` the twin of the reference's formula of that name.

    Calls are checked as the reference checks them, and in the same words. Its real arrays arrive all in one dtype: float64 if any is
    float64 or an integer, else float32. float16 and bfloat16 are computed in float32; the results go back to the dtype if all came in it.
    Bits arrive as uint8. Whole numbers arrive as int64, those named in `compact` as int16 or int32 where they came so.
    `lacks` is explained in reference/formula.py.
    """
    if function is None:
        return functools.partial(twin, lacks=lacks, dtypes=dtypes, compact=compact)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        record = formula.RECORDS[function.__name__]
        given: list[np.dtype] = []
        bound = formula.checked_arguments(record, signature, args, kwargs, functools.partial(real_or_kind, given, compact))
        working = np.dtype(np.float32 if given and all(d in (*HALF, np.float32) for d in given) else np.float64)
        for name, value in bound.arguments.items():
            if name in record.shapes and isinstance(value, np.ndarray) and value.dtype.kind in "fV":
                bound.arguments[name] = value.astype(working, copy=False)
        with np.errstate(all="ignore"):
            result = function(*bound.args, **bound.kwargs)
        halves = {d for d in given if d in HALF}
        return in_dtype(result, halves.pop()) if len(halves) == 1 and all(d in HALF for d in given) else result

    signature = inspect.signature(function)
    return formula.twin(dtypes=dtypes, lacks=lacks)(checked)


def real_or_kind(given: list[np.dtype], compact: tuple[str, ...], name: str, value: Any, kind: str) -> np.ndarray:
    """`value` as an array: real numbers in their floating dtype, which is noted in `given`, bits as uint8, others as in the reference."""
    dtype = getattr(value, "dtype", None)
    whole = isinstance(value, np.ndarray) and value.dtype.kind in "biu"
    if kind == "bits":
        return small_bits(name, value) if whole else as_array(name, value, kind).astype(np.uint8)
    if kind == "int" and whole:
        return value if name in compact and dtype in (np.int16, np.int32) else value.astype(np.int64, copy=False)
    if kind != "real" or not isinstance(value, np.ndarray) or dtype not in (*HALF, np.float32, np.float64):
        array = as_array(name, value, kind)
        if array.dtype.kind == "c":
            raise TypeError(f"{name}: expected real numbers, got dtype {array.dtype}; complex steps need the reference")
    else:
        array = value
    if kind == "real":
        given.append(array.dtype.newbyteorder("="))
    return array


def small_bits(name: str, array: np.ndarray) -> np.ndarray:
    """Whole numbers as bits of a byte each, without any array of larger numbers on the way: a memory's addresses may fill the computer's.

    Raises ValueError as the reference does where one is neither 0 nor 1.
    """
    single = array.view(np.uint8) if array.itemsize == 1 else array
    if single.max(initial=0) > 1 or single.min(initial=0) < 0:
        rows = np.atleast_1d(array)
        for start in range(0, len(rows), CHECKED):
            as_array(name, rows[start : start + CHECKED], "bits")
    return single.astype(np.uint8, copy=False)


def in_dtype(result: Any, dtype: np.dtype) -> Any:
    """A result, or each array of a named tuple, rounded to `dtype`."""
    if isinstance(result, tuple):
        return type(result)(*(in_dtype(x, dtype) for x in result))
    return result.astype(dtype) if isinstance(result, np.ndarray) and result.dtype.kind == "f" else result
