"""The one place that checks and converts what is handed to a formula: dtypes, shapes, leading axes, grouped heads, masks, options.

Every refusal is a ValueError or TypeError of one line: the argument, what was expected, what came.
"""

import difflib
import functools
from typing import Any, NamedTuple

import numpy as np

KINDS = ("bool", "int", "bits", "spins")
CAUSAL = (False, True, "bottom-right", "top-left")


class Shape(NamedTuple):
    kind: str                        # "real" or one of KINDS
    leading: bool                    # starts with "..."
    dims: tuple[tuple[str, bool], ...]      # (name, may be 1 or absent)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dims)

    def __str__(self) -> str:
        words = ["..."] * self.leading + [name for name, _ in self.dims]
        return "(" + ", ".join(words) + ("," if len(words) == 1 else "") + ")"


@functools.cache
def parse_shape(text: str) -> Shape:
    words = text.split()
    kind = words.pop(0) if words and words[0] in KINDS else "real"
    leading = bool(words) and words[0] == "..."
    return Shape(kind, leading, tuple((w.lstrip("#"), w.startswith("#")) for w in words[leading:]))


def as_array(name: str, value: Any, kind: str = "real") -> np.ndarray:
    """`value` as float64 (complex128 stays, for complex-step derivatives), or as bool or int64 for the other kinds.

    >>> as_array("q", [1, 2]).dtype
    dtype('float64')
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name}: expected an array of numbers, got a ragged {type(value).__name__}") from None
    if array.dtype.kind == "V" and array.dtype.names is None:          # bfloat16 and other dtypes of ml_dtypes
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError):
            raise TypeError(f"{name}: expected real numbers, got dtype {array.dtype}") from None
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{name}: expected real numbers, got dtype {array.dtype}")
    if kind == "real":
        return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64, copy=False)
    if kind == "bool":
        if array.dtype.kind != "b":
            raise TypeError(f"{name}: expected booleans (True = may attend), got dtype {array.dtype}; use .astype(bool) on 0 and 1")
        return array
    if array.dtype.kind == "c" or not np.all(array == np.floor(array)):
        raise ValueError(f"{name}: expected whole numbers, got dtype {array.dtype} with fractions")
    array = array.astype(np.int64)
    allowed = {"bits": (0, 1), "spins": (-1, 1)}.get(kind)
    if allowed is not None and not np.all(np.isin(array, allowed)):
        odd = array[~np.isin(array, allowed)].flat[0]
        raise ValueError(f"{name}: expected entries {allowed[0]} or {allowed[1]}, got {odd}")
    return array


def checked_arrays(record, arguments: dict[str, Any], convert=as_array) -> dict[str, Any]:
    """The arrays among `arguments`, converted, after their shapes were found to agree with the record's.

    convert: (name, value, kind) -> array.
    Raises ValueError for a wrong rank, sizes that differ, leading axes that do not broadcast; TypeError for a dtype that is no number.
    """
    arrays: dict[str, Any] = {}
    sizes: dict[str, tuple[int, str]] = {}
    lead: tuple[int, ...] = ()
    lead_of = ""
    gqa = arguments.get("enable_gqa", False)
    late = []
    for name, text in record.shapes.items():
        value = arguments.get(name)
        if value is None:
            if name in record.required and name in arguments:
                raise TypeError(f"{name}: expected an array of shape {parse_shape(text)}, got None")
            continue
        shape = parse_shape(text)
        array = arrays[name] = convert(name, value, shape.kind)
        if any(optional for _, optional in shape.dims):
            late.append((name, shape, array))
            continue
        rank = len(shape.dims)
        if array.ndim < rank or (array.ndim > rank and not shape.leading):
            raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
        tail = array.shape[array.ndim - rank :]
        for (dim, _), size in zip(shape.dims, tail, strict=True):
            known, owner = sizes.setdefault(dim, (size, name))
            if size != known:
                raise ValueError(f"{name}: expected shape {shape} with {dim} = {known} as in {owner}, got {array.shape}")
        front = array.shape[: array.ndim - rank]
        if not shape.leading:
            continue
        if gqa and name in record.grouped:
            front = check_groups(name, front, lead, lead_of)
        try:
            joined = np.broadcast_shapes(lead, front)
        except ValueError:
            hint = "; for grouped heads set enable_gqa=True" if name in record.grouped and "enable_gqa" in record.parameters else ""
            raise ValueError(f"{name}: leading axes {front} do not broadcast against {lead} of {lead_of}{hint}") from None
        lead, lead_of = joined, name if joined != lead or not lead_of else lead_of
    if "hk" in sizes and "h" in sizes and "enable_gqa" in record.parameters:
        check_head_counts(*sizes["hk"][::-1], *sizes["h"][::-1], gqa)
    for name, shape, array in late:
        joined = check_broadcast(name, shape, array, sizes, lead, lead_of)
        lead, lead_of = joined, name if joined != lead or not lead_of else lead_of
    return arrays


def check_head_counts(name: str, key_heads: int, query_name: str, heads: int, gqa: bool) -> None:
    """Check the heads of keys and values in a record that names both."""
    if not gqa and key_heads != heads:
        raise ValueError(f"{name}: expected {heads} heads as in {query_name}, got {key_heads}; for grouped heads set enable_gqa=True")
    if gqa and (key_heads == 0 or heads % key_heads):
        raise ValueError(f"{name}: expected a number of heads that divides the {heads} of {query_name}, got {key_heads}")


def check_groups(name: str, front: tuple[int, ...], lead: tuple[int, ...], lead_of: str) -> tuple[int, ...]:
    """Leading axes of grouped keys or values with as many heads as the queries, after checking that these divide."""
    if not front or not lead:
        raise ValueError(f"{name}: enable_gqa needs a head axis, shape (..., h, m, d); got leading axes {front}")
    if front[-1] == 0 or lead[-1] % front[-1]:
        raise ValueError(f"{name}: expected a number of heads that divides the {lead[-1]} of {lead_of}, got {front[-1]}")
    return (*front[:-1], lead[-1])


def check_broadcast(name, shape: Shape, array, sizes, lead, lead_of) -> tuple[int, ...]:
    """Check an array whose axes may be 1 or absent against the sizes that the others fixed; returns the leading axes with its own."""
    names = shape.names
    known = {dim: sizes[dim][0] for dim in names if dim in sizes}
    if names == ("h",) and not known:                                  # no shape names heads: the last leading axis counts them
        if not lead and array.ndim:
            raise ValueError(f"{name}: expected one number, as {lead_of} has no axis of heads, got shape {array.shape}")
        known = {"h": lead[-1]} if lead else {}
    tail = array.shape[-len(names) :] if array.ndim else ()
    for dim, size in zip(names[::-1], tail[::-1], strict=False):
        want = known.get(dim, size)
        if size not in (1, want):
            owner = sizes[dim][1] if dim in sizes else lead_of
            raise ValueError(f"{name}: expected a shape that broadcasts to {shape} with {dim} = {want} as in {owner}, got {array.shape}")
        sizes.setdefault(dim, (size, name))
    front = array.shape[: -len(names)] if array.ndim > len(names) else ()
    if front and not shape.leading:
        raise ValueError(f"{name}: expected a shape that broadcasts to {shape}, got {array.shape}")
    try:
        return np.broadcast_shapes(lead, front)
    except ValueError:
        raise ValueError(f"{name}: leading axes {front} do not broadcast against {lead} of {lead_of}") from None


def explain_signature(record, error: str, keywords: dict[str, Any]) -> str:
    """One line for a call that does not fit the signature, with the nearest name of a parameter where one was misspelt."""
    for name in keywords:
        if name not in record.parameters:
            near = difflib.get_close_matches(name.lower(), record.parameters, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(record.parameters)}"
            return f"{name}: {record.name} has no such parameter{hint}"
    named = [name for name, parameter in record.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    hint = f"; {', '.join(named)} must be named, as in {named[0]}=..." if named and error.startswith("too many positional") else ""
    return f"{record.name}: {error}{hint}"


# --- options -------------------------------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """`value` as a message can hold it."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**60 else "a number of more than 60 digits"
    return text if len(text) <= 80 else f"{text[:60]}..."


MOST = 2**53      # whole numbers up to here are exact as float64, and far from overflow as int64


def whole(name: str, value: Any, least: int = 0) -> int:
    """`value` as an int, if it is a whole number between least and 2^53."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}: expected a whole number >= {least}, got {shown(value)}")
    if value > MOST:
        raise ValueError(f"{name}: expected a whole number <= 2^53, got {shown(value)}")
    return int(value)


def number(name: str, value: Any, above: float | None = None, least: float | None = None, finite: bool = False) -> Any:
    """`value`, if it is one real number (or a complex one, for derivatives) within the limits; infinity only if not `finite`."""
    try:
        array = as_array(name, value)
    except (TypeError, ValueError):
        array = None
    if array is None or array.ndim or np.isnan(array.real):
        raise ValueError(f"{name}: expected a number, got {shown(value)}")
    if finite and not np.isfinite(array):
        raise ValueError(f"{name}: expected a finite number, got {shown(value)}")
    if above is not None and not array.real > above:
        raise ValueError(f"{name}: expected a number > {above:g}, got {shown(value)}")
    if least is not None and not array.real >= least:
        raise ValueError(f"{name}: expected a number >= {least:g}, got {shown(value)}")
    return array[()]


def one_of(name: str, value: Any, choices: tuple) -> Any:
    """`value`, if it is one of `choices`."""
    if isinstance(value, np.bool_):
        value = bool(value)
    if not any(value is c or (isinstance(value, str) and value == c) for c in choices):
        raise ValueError(f"{name}: expected {' or '.join(repr(c) for c in choices)}, got {shown(value)}")
    return value


# --- queries and keys ----------------------------------------------------------------------------------------------------------------


class AttentionResult(NamedTuple):
    """What an attention function returns when asked for more than its output; fields not asked for are None."""

    out: np.ndarray
    weights: np.ndarray | None = None
    lse: np.ndarray | None = None


def default_scale(scale: Any, q: np.ndarray) -> Any:
    """`scale`, or 1/sqrt(d) where it is None."""
    if scale is None:
        return 1.0 / np.sqrt(max(q.shape[-1], 1))
    return number("scale", scale, finite=True)


def grouped_heads(q: np.ndarray, *keys_values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Keys and values with one copy per query head: query head h uses key head h // (H / Hk), so neighbours share one."""
    return tuple(np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in keys_values)


def visible_keys(
    n: int, m: int, mask: np.ndarray | None = None, causal: bool | str = False, window: Any = None, *,
    queries: slice = slice(None), keys: slice = slice(None),
) -> np.ndarray:
    """Which keys each query may see: bool, broadcastable to (..., n, m), or to a block of it where `queries` and `keys` cut one out.

    causal: "bottom-right" (or True) lets query i see keys j <= i + m - n, "top-left" j <= i.
    window: (left, right) lets it see keys p - left <= j <= p + right around its own position p, None or -1 being unbounded;
    p = i + m - n where causal is bottom-right, else p = i.

    >>> visible_keys(2, 3, causal=True).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    causal = one_of("causal", causal, CAUSAL)
    p = np.arange(n)[queries, None] + (m - n if causal in (True, "bottom-right") else 0)
    j = np.arange(m)[None, keys]
    visible = (j <= p) | (causal is False)
    if window is not None:
        left, right = window_sides(window)
        visible = visible & ((left is None) | (j >= p - (left or 0))) & ((right is None) | (j <= p + (right or 0)))
    return visible if mask is None else visible & mask


def window_sides(window: Any) -> tuple[int | None, int | None]:
    """(left, right) of a window, None where unbounded."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window: expected a pair (left, right), got {shown(window)}") from None
    return tuple(None if side is None or side == -1 else whole("window", side) for side in (left, right))  # type: ignore[return-value]


def sum_to_shape(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The adjoint of broadcasting: `gradient` summed over the axes along which an array of `shape` was repeated.

    >>> sum_to_shape(np.ones((2, 3)), (3,))
    array([2., 2., 2.])
    """
    gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    repeated = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] != 1)
    return gradient.sum(axis=repeated, keepdims=True)


def sum_groups(gradient: np.ndarray, heads: int) -> np.ndarray:
    """The adjoint of `grouped_heads`: the gradients (..., H, m, d) of each group's copies, summed to (..., heads, m, d)."""
    *front, all_heads, m, d = gradient.shape
    return gradient.reshape(*front, heads, all_heads // heads, m, d).sum(axis=-3)
