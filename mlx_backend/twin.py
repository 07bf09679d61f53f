"""The boundary between callers' arrays and graphs: what a twin takes, and in which dtype its results go back."""

import contextvars
import functools
import inspect
from typing import Any

import mlx.core as mx
import numpy as np

from attnspec.mlx_backend import metal
from attnspec.mlx_backend.known import known_true
from attnspec.reference import formula
from attnspec.reference.inputs import as_array

HALF = (mx.float16, mx.bfloat16)
DTYPES = ("float32", "float16", "bfloat16")
ALLOWED = {"bits": (0, 1), "spins": (-1, 1)}
WHOLE = {"bits": mx.uint8, "spins": mx.int8, "int": mx.int64}


_common: contextvars.ContextVar[mx.Dtype] = contextvars.ContextVar("common dtype", default=mx.float32)


def common_dtype() -> mx.Dtype:
    """The half dtype in which all arrays of the call came, else float32."""
    return _common.get()


def twin(function=None, *, lacks: dict[str, str] | None = None, dtypes: tuple[str, ...] = DTYPES):
    """Make `function` the twin of the reference's formula of that name.

    Calls are checked as the reference checks them, and in the same words, but for entries that a transformation does not know yet. Real
    arrays arrive as float32, so that only the results are rounded: to the half dtype that all arrays with a dtype came in, else to float32.
    Lists have none.
    `lacks` is explained in reference/formula.py.
    """
    if function is None:
        return functools.partial(twin, lacks=lacks, dtypes=dtypes)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        record = formula.RECORDS[function.__name__]
        given: list[mx.Dtype] = []
        bound = formula.checked_arguments(record, signature, args, kwargs, functools.partial(real_or_kind, given))
        token = _common.set(given[0] if given and given[0] in HALF and len(set(given)) == 1 else mx.float32)
        try:
            with metal.call_of(function.__name__):
                return in_dtype(function(*bound.args, **bound.kwargs), common_dtype())
        finally:
            _common.reset(token)

    signature = inspect.signature(function)
    return formula.twin(dtypes=dtypes, lacks=lacks)(checked)


def real_or_kind(given: list[mx.Dtype], name: str, value: Any, kind: str) -> mx.array:
    """`value` as an mx.array: real numbers as float32, the dtype they came in noted in `given`, other kinds in a dtype of their own."""
    if not isinstance(value, mx.array):
        return converted(given, name, value, kind)
    if value.dtype == mx.complex64:
        raise TypeError(f"{name}: expected real numbers, got dtype {dtype_name(value)}")
    if kind == "real":
        if mx.issubdtype(value.dtype, mx.floating):
            given.append(value.dtype)
        return value.astype(mx.float32)
    if kind == "bool" and value.dtype != mx.bool_:
        raise TypeError(f"{name}: expected booleans (True = may attend), got dtype {dtype_name(value)}; use .astype(bool) on 0 and 1")
    if kind in ALLOWED:
        low, high = ALLOWED[kind]
        if known_true(mx.any(mx.logical_and(value != low, value != high))):
            as_array(name, np.array(value), kind)                      # says which entry
    return value if kind == "bool" else value.astype(WHOLE[kind])


def converted(given: list[mx.Dtype], name: str, value: Any, kind: str) -> mx.array:
    """What is no mx.array yet; its entries are known, and looked at as the reference does."""
    array = as_array(name, value, kind)
    if array.dtype.kind == "c":
        raise TypeError(f"{name}: expected real numbers, got dtype {array.dtype}; complex steps need the reference")
    if kind != "real":
        return mx.array(array) if kind == "bool" else mx.array(array, WHOLE[kind])
    dtype = str(getattr(value, "dtype", ""))
    if dtype.startswith(("float", "bfloat")):
        given.append({"float16": mx.float16, "bfloat16": mx.bfloat16}.get(dtype, mx.float32))
    with np.errstate(over="ignore"):                                   # beyond float32: infinite
        return mx.array(array.astype(np.float32))


def dtype_name(array: mx.array) -> str:
    return str(array.dtype).rpartition(".")[2]


def in_dtype(result: Any, dtype: mx.Dtype) -> Any:
    """A result, or each array of a named tuple, rounded to `dtype`."""
    if isinstance(result, tuple):
        return type(result)(*(in_dtype(x, dtype) for x in result))
    return result.astype(dtype) if isinstance(result, mx.array) and mx.issubdtype(result.dtype, mx.floating) else result
