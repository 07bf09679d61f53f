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


def twin(function=None, *, lacks: dict[str, str] | None = None, dtypes: tuple[str, ...] = DTYPES):
    """Make `function` the twin of the reference's formula of that name.

    Calls are checked as the reference checks them, and in the same words. Its real arrays arrive all in one dtype: float64 if any is
    float64 or an integer, else float32. float16 and bfloat16 are computed in float32; the results go back to the dtype if all came in it.
    `lacks` is explained in reference/formula.py.
    """
    if function is None:
        return functools.partial(twin, lacks=lacks, dtypes=dtypes)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        record = formula.RECORDS[function.__name__]
        given: list[np.dtype] = []
        bound = formula.checked_arguments(record, signature, args, kwargs, functools.partial(real_or_kind, given))
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


def real_or_kind(given: list[np.dtype], name: str, value: Any, kind: str) -> np.ndarray:
    """`value` as an array, its floating dtype kept and noted in `given`; other kinds as the reference has them, but small whole numbers
    as small as they come."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, np.ndarray) and kind == "bits" and dtype in (np.bool_, np.uint8, np.int8) and fits(value, 0, 1):
        return value.view(np.uint8) if value.flags.c_contiguous else value.astype(np.uint8)
    if isinstance(value, np.ndarray) and kind == "int" and dtype == np.int16:
        return value
    if kind != "real" or not isinstance(value, np.ndarray) or dtype not in (*HALF, np.float32, np.float64):
        array = as_array(name, value, kind)
        if array.dtype.kind == "c":
            raise TypeError(f"{name}: expected real numbers, got dtype {array.dtype}; complex steps need the reference")
    else:
        array = value
    if kind == "real":
        given.append(array.dtype.newbyteorder("="))
    return array


def fits(array: np.ndarray, least: int, most: int) -> bool:
    return array.size == 0 or (array.min() >= least and array.max() <= most)


def in_dtype(result: Any, dtype: np.dtype) -> Any:
    """A result, or each array of a named tuple, rounded to `dtype`."""
    if isinstance(result, tuple):
        return type(result)(*(in_dtype(x, dtype) for x in result))
    return result.astype(dtype) if isinstance(result, np.ndarray) and result.dtype.kind == "f" else result
