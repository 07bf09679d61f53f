"""What `run` and `plot` have in common: a formula's arrays, from files or drawn, and its options."""

import ast
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from attnspec.cli.files import Refusal, check_memory, read_array, read_arrays, refusing
from attnspec.dispatch import nearest
from attnspec.reference.formula import Formula
from attnspec.reference.inputs import as_array, parse_shape

DTYPES = ("float64", "float32", "float16", "bfloat16")
COPIES = 8      # of the largest intermediate array, in float64: logits, masked logits, exponentials, weights, masks, and for operations

input_options = [
    click.option("--input", "input_path", type=click.Path(path_type=Path), metavar="FILE",
                 help="A .npz or .safetensors file with the formula's parameter names as keys."),
    click.option("--arg", "args", multiple=True, metavar="NAME=FILE.npy", help="One array from a .npy file; may be repeated."),
    click.option("--set", "settings", multiple=True, metavar="OPTION=VALUE", help="An option of the formula; may be repeated."),
    click.option("--shape", metavar="n=128,m=96,...", help="Sizes for drawn arrays, by the record's dimension names; b and h lead."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed for drawn arrays."),
    click.option("--dtype", type=click.Choice(DTYPES), help="Round the real arrays to this type first."),
    click.option("--allow-nonfinite", is_flag=True, help="Compute with NaN and infinities."),
]


def with_inputs(command):
    """Add the options that say what a formula is computed on."""
    for option in reversed(input_options):
        command = option(command)
    return command


def pairs(flag: str, items: Iterable[str]) -> dict[str, str]:
    """{name: text} from NAME=TEXT items, each name once."""
    found: dict[str, str] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.strip():
            raise Refusal(f"{flag}: expected NAME=VALUE, got {item!r}")
        if name.strip() in found:
            raise Refusal(f"{flag}: {name.strip()} is given twice")
        found[name.strip()] = text.strip()
    return found


def parse_sizes(text: str | None) -> dict[str, int]:
    sizes = {}
    for name, value in pairs("--shape", (text or "").split(",") if text else []).items():
        if not (value.isascii() and value.isdecimal()) or len(value) > 15:
            raise Refusal(f"--shape: expected {name}=WHOLE NUMBER below 10^15, got {name}={value[:40]}")
        sizes[name] = int(value)
    return sizes


def parse_value(text: str) -> Any:
    """A Python literal, or true, false, none in any case; anything else is a string."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return text if isinstance(value, complex | bytes | dict | set) else value


def parse_settings(record: Formula, settings: Iterable[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, text in pairs("--set", settings).items():
        if name not in record.parameters:
            raise Refusal(f"--set: {record.name} has no parameter {name!r}{nearest_of(name, record.options)}")
        value = parse_value(text)
        if name in record.required and not is_number(record, name):
            raise Refusal(f"--set: {name} is an array of {record.name}; give it by --input or --arg")
        if name in record.arrays and value is not None:
            with refusing("--set "):
                value = as_array(name, value, parse_shape(record.shapes[name]).kind)
        options[name] = value
    return options


def is_number(record: Formula, name: str) -> bool:
    """Whether an array of the record has no axes, as a radius has."""
    shape = parse_shape(record.shapes[name])
    return not shape.dims and not shape.leading


def nearest_of(name: str, names: Iterable[str]) -> str:
    """A hint at the nearest name, or the list of all."""
    names = list(names)
    return nearest(name, names) or f"; it has {', '.join(names) or 'none'}"


def gather(
    record: Formula, input_path: Path | None, args: Iterable[str], settings: Iterable[str], shape: str | None, seed: int, dtype: str | None,
    allow_nonfinite: bool,
) -> tuple[dict[str, Any], dict[str, Any], list[Path]]:
    """(arrays, options, files read) for one formula: the user's arrays, or drawn ones where there is no --input and no required --arg."""
    options = parse_settings(record, settings)
    files: list[Path] = []
    arrays: dict[str, Any] = {}
    if input_path is not None:
        files.append(input_path)
        arrays.update(read_arrays(input_path))
        if not arrays:
            raise Refusal(f"--input: {input_path} holds no arrays")
    for name, text in pairs("--arg", args).items():
        if name in arrays:
            raise Refusal(f"--arg: {name} is in {input_path} too")
        files.append(Path(text))
        arrays[name] = read_array(name, Path(text))
    for name in list(arrays):
        if name not in record.parameters:
            raise Refusal(f"{name}: {record.name} has no such array{nearest_of(name, record.arrays)}")
        if name in options:
            raise Refusal(f"--set: {name} is in the files too")
        if name in record.options:
            if arrays[name].ndim:
                raise Refusal(f"{name}: expected one value for this option, got an array of shape {arrays[name].shape}")
            options[name] = arrays.pop(name).item()

    arrays.update({name: options.pop(name) for name in record.arrays if options.get(name) is not None})
    missing = [name for name in record.required if name not in arrays]
    if input_path is None and all(is_number(record, name) or name in missing for name in record.required):
        arrays = {**draw(record, shape, seed), **arrays}
    elif missing:
        raise Refusal(f"{missing[0]}: missing; {record.name} needs {', '.join(record.required)}, got {', '.join(arrays)}")
    elif shape is not None:
        raise Refusal("--shape: sizes are for drawn arrays, these come from files")

    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.kind in "cOSUMmT" or (array.dtype.kind == "V" and array.dtype.name.startswith("void")):
            hint = "; .npz cannot hold bfloat16, .safetensors can" if array.dtype.str == "|V2" else ""
            raise Refusal(f"{name}: expected real numbers, got dtype {array.dtype}{hint}")
        with np.errstate(over="ignore"):                               # what does not fit the dtype becomes infinite, which is refused
            arrays[name] = array = rounded(record, name, array, dtype)
        if np.asarray(array).dtype.kind in "fV" and not allow_nonfinite:
            refuse_nonfinite(name, np.asarray(array).astype(np.float64))
    return arrays, options, files


def draw(record: Formula, shape: str | None, seed: int) -> dict[str, Any]:
    given = parse_sizes(shape)
    with refusing("--"):
        sizes = record.complete_sizes(given)
    drawn = record.required if record.draw_arrays is None else record.arrays            # its own draw may fill optional ones too
    total = sum(math.prod(record.size_of(name, sizes)) for name in drawn if all(d in sizes for d in parse_shape(record.shapes[name]).names))
    check_memory(8 * total, record.name)
    with refusing("--shape: "):
        return record.draw(given, seed)


def check_workspace(record: Formula, arrays: Mapping[str, Any], backend: str, weights: bool) -> None:
    """Refuse a computation that would take more memory than is free, roughly.

    The reference makes its largest intermediate array several times over; a twin makes one of that size only to return it.
    """
    copies = COPIES if backend == "reference" else 3 * weights
    check_memory(8 * (sum(np.size(array) for array in arrays.values()) + copies * largest_array(record, arrays)), record.name)


def largest_array(record: Formula, arrays: Mapping[str, Any]) -> int:
    """Numbers in the largest array that computing the formula on these arrays makes."""
    sizes: dict[str, int] = {}
    lead: tuple[int, ...] = ()
    for name, array in arrays.items():
        dims = parse_shape(record.shapes[name]).names
        tail = np.shape(array)[np.ndim(array) - len(dims):]
        sizes.update({dim: max(size, sizes.get(dim, 0)) for dim, size in zip(dims, tail, strict=False)})
        lead = max(lead, np.shape(array)[: np.ndim(array) - len(dims)], key=math.prod)
    texts = [record.workspace] if record.workspace else [record.shapes[name] for name in record.outputs]
    return max(math.prod((*lead, *(sizes.get(dim, 1) for dim in parse_shape(text).names))) for text in texts)


def refuse_nonfinite(name: str, array: np.ndarray) -> None:
    bad = ~np.isfinite(array)
    if bad.any():
        where = ", ".join(str(int(i)) for i in np.argwhere(bad)[0])
        raise Refusal(f"{name}: expected finite numbers, got {int(bad.sum())} of {array.size} that are not, the first at ({where}); "
                      "--allow-nonfinite computes with them")


def rounded(record: Formula, name: str, array: Any, dtype: str | None) -> Any:
    if dtype is None or parse_shape(record.shapes[name]).kind != "real":
        return array
    import ml_dtypes

    return np.asarray(array).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
