"""run_metal and run_kernel: generate, translate, compile and run a Metal kernel on the CPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import build as building
from .rewrite import Kernel, MetalSourceError, entry_code, translate
from .signature import InputSpec, dtype_name, generate

THREADGROUP_BYTES = 32768  # M1: threadgroup memory of one group
THREADS = 1024  # M1: threads of one group
UTILS = '#include "mlx/backend/metal/kernels/utils.h"\n'  # the preamble MLX puts before a custom kernel
ORDERS = ("ascending", "descending", "shuffled")
RACES = ("off", "collectives", "strict")


_ONE_AT_A_TIME = threading.Lock()  # the runtime holds one launch


class MetalError(RuntimeError):
    """The kernel did something Metal leaves undefined, or exceeds a limit."""


class _BufferIn(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("element", ctypes.c_uint32),
                ("writable", ctypes.c_int32), ("bound", ctypes.c_int32), ("index", ctypes.c_int32)]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [("buffers", ctypes.POINTER(_BufferIn)), ("count", ctypes.c_int32), ("grid", ctypes.c_uint32 * 3),
                ("group", ctypes.c_uint32 * 3), ("order", ctypes.c_int32), ("seed", ctypes.c_uint64), ("check_races", ctypes.c_int32),
                ("flush_denormals", ctypes.c_int32), ("seconds", ctypes.c_int32),
                ("threadgroup_limit", ctypes.c_uint32), ("thread_limit", ctypes.c_uint32),
                ("message", ctypes.c_char_p), ("message_bytes", ctypes.c_uint64), ("fault_address", ctypes.c_uint64),
                ("threadgroup_bytes", ctypes.c_uint64), ("unwritten", ctypes.c_uint64 * 64),
                ("first_unwritten", ctypes.c_uint64 * 64)]  # fmt: skip


@dataclass(frozen=True)
class Array:
    """Bits of an array with the dtype's name: NumPy has no bfloat16, which travels as uint16."""

    data: np.ndarray
    dtype: str

    @classmethod
    def of(cls, value: Any) -> Array:
        if isinstance(value, Array):
            return value
        if isinstance(value, bool):
            return cls(np.asarray(value, dtype=np.bool_), "bool")
        if isinstance(value, int):
            return cls(np.asarray(value, dtype=np.int32), "int32")
        if isinstance(value, float):
            return cls(np.asarray(value, dtype=np.float32), "float32")
        if type(value).__module__.startswith("mlx"):
            import mlx.core as mx

            name = dtype_name(value.dtype)
            # view() refuses 0-d arrays in some versions, hence the reshapes around it.
            raw = np.array(value.reshape(-1).view(mx.uint16)).reshape(tuple(value.shape)) if name == "bfloat16" else np.array(value)
            return cls(raw, name)
        array = np.asarray(value)
        name = dtype_name(array.dtype)
        return cls(array.view(np.uint16) if name == "bfloat16" else array, name)


def _storage(name: str) -> np.dtype:
    return np.dtype("uint16" if name == "bfloat16" else name)


def _give_back(raw: np.ndarray, name: str, dtype: Any) -> Any:
    """In the caller's kind: mx arrays for mx dtypes, NumPy otherwise (bfloat16 as its bits)."""
    if type(dtype).__module__.startswith("mlx"):
        import mlx.core as mx

        made = mx.array(np.ascontiguousarray(raw))
        return made.reshape(-1).view(mx.bfloat16).reshape(raw.shape) if name == "bfloat16" else made
    return raw


def default_include_folders() -> tuple[Path, ...]:
    """The headers of the installed mlx wheel."""
    spec = importlib.util.find_spec("mlx")
    found = [Path(folder) / "include" for folder in (spec.submodule_search_locations or [])] if spec else []
    return tuple(folder for folder in found if folder.is_dir())


@functools.cache
def _load(path: Path) -> tuple[Any, int]:
    """(emu_run, address of the kernel's entry). emu_run is taken through the kernel's library: the runtime that one is bound to."""
    library = ctypes.CDLL(str(path))
    library.emu_run.argtypes = [ctypes.POINTER(_Launch), ctypes.c_void_p]
    entry = ctypes.cast(library.emu_entry, ctypes.c_void_p).value
    assert entry is not None
    return library.emu_run, entry


@functools.cache
def _entry_offset(path: Path) -> int:
    """Where the entry lies in the file: the difference to its address is where the library was loaded."""
    if not shutil.which("nm"):
        return -1
    done = subprocess.run(["nm", "-D", str(path)], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.endswith(" emu_entry"):
            return int(line.split()[0], 16)
    return -1


@functools.cache
def _compiled(
    text: str, kernel: str, name: str, folders: tuple[Path, ...], constants: tuple[tuple[Any, Any], ...]
) -> tuple[Kernel, Path, tuple[int, ...]]:
    """(Kernel, library, buffer indices in bound order)."""
    translation = translate(text, name, folders, dict(constants))
    expression = translation.hosts.get(kernel, kernel)
    base = expression.split("<", 1)[0].strip()
    if base not in translation.kernels:
        known = sorted(translation.hosts) or sorted(translation.kernels)
        raise MetalSourceError(f"no kernel '{kernel}' in {name}; it has {', '.join(known)}")
    found = translation.kernels[base]
    if found.template and "<" not in expression:
        raise MetalSourceError(f"kernel '{base}' is a template: name an instantiation, as in '{base}<float>'")
    indices = tuple(p.buffer for p in found.parameters if p.buffer is not None)
    entry = entry_code(found, expression, {index: slot for slot, index in enumerate(indices)})
    code = f'#include "emulator.hpp"\nusing namespace metal;\n{translation.body}\n{entry}'
    return found, building.build(code, name), indices


def run_kernel(
    text: str,
    kernel: str,
    buffers: Mapping[int | str, Any],
    outputs: Mapping[int | str, tuple[Sequence[int], Any]],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    *,
    function_constants: Mapping[Any, Any] | None = None,
    init_value: float | None = None,
    name: str = "kernel.metal",
    include_folders: Sequence[Path] | None = None,
    order: str = "ascending",
    seed: int = 0,
    races: str = "strict",
    require_written: bool = False,
    flush_denormals: bool = False,
    threadgroup_limit: int = THREADGROUP_BYTES,
    thread_limit: int = THREADS,
    seconds: int = 120,
) -> dict[int | str, Any]:
    """Run one kernel of a complete Metal text.

    kernel: its name, host name, or an instantiation such as 'softmax_looped<float, float>'. buffers and outputs are keyed by buffer
    index or parameter name; outputs give (shape, dtype) and come back as arrays. grid counts threads. A buffer that is not given may
    not be accessed. order is 'ascending', 'descending' or 'shuffled' (by seed), for threads and threadgroups alike. races: 'strict'
    (barriers alone order memory), 'collectives' (simd operations also order the lanes of their simdgroup) or 'off'. seconds: processor
    time after which the kernel counts as hung.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, not {order!r}")
    if races not in RACES:
        raise ValueError(f"races must be one of {RACES}, not {races!r}")
    folders = tuple(default_include_folders() if include_folders is None else include_folders)
    found, library, indices = _compiled(text, kernel, name, folders, tuple(sorted((function_constants or {}).items(), key=str)))

    parameters = {p.buffer: p for p in found.parameters if p.buffer is not None}
    by_name = {p.name: p.buffer for p in parameters.values()}

    def index_of(key: int | str) -> int:
        index = by_name.get(key, key) if isinstance(key, str) else key
        if index not in parameters:
            raise MetalSourceError(f"kernel '{found.name}' has no buffer {key!r}; it has {sorted(by_name)}")
        return index

    inputs = {index_of(key): Array.of(value) for key, value in buffers.items()}
    made: dict[int, tuple[int | str, np.ndarray, str, Any]] = {}
    for key, (shape, dtype) in outputs.items():
        element = dtype_name(dtype)
        raw = np.empty(tuple(shape), dtype=_storage(element))
        raw.reshape(-1).view(np.uint8)[:] = 0xFF  # NaN in every float type; reads and missed writes show
        if init_value is not None:
            raw[...] = _bfloat_bits(init_value) if element == "bfloat16" else np.asarray(init_value).astype(raw.dtype)
        made[index_of(key)] = (key, raw, element, dtype)

    table = (_BufferIn * max(len(indices), 1))()
    keep: list[Any] = []
    for slot, index in enumerate(indices):
        row = table[slot]
        row.name, row.index = parameters[index].name.encode(), index
        given = made[index][1] if index in made else inputs[index].data if index in inputs else None
        if given is None:
            row.element = 1
            continue
        # An input keeps its own memory order only when it owns a contiguous block; strided views are laid out by the caller.
        block = given if given.flags.c_contiguous else np.ascontiguousarray(given)
        keep.append(block)
        row.data, row.bytes, row.element = block.ctypes.data, block.nbytes, block.dtype.itemsize // (2 if block.dtype.kind == "c" else 1)
        row.bound, row.writable = 1, int(index in made)

    message = ctypes.create_string_buffer(4096)
    request = _Launch()
    request.buffers, request.count = table, len(indices)
    size = [int(g) for g in (*grid, 1, 1)[:3]]
    # MLX clamps the threadgroup to the grid, axis by axis.
    request.grid[:] = size
    request.group[:] = [min(int(t), g) for t, g in zip((*threadgroup, 1, 1), size, strict=False)]
    request.order, request.seed = ORDERS.index(order), seed
    request.check_races, request.flush_denormals = RACES.index(races), int(flush_denormals)
    request.seconds = seconds
    request.threadgroup_limit, request.thread_limit = threadgroup_limit, thread_limit
    request.message, request.message_bytes = ctypes.cast(message, ctypes.c_char_p), len(message)
    if min(size) > 0:
        run, entry = _load(library)
        with _ONE_AT_A_TIME:
            failed = run(ctypes.byref(request), entry)
        if failed:
            offset = _entry_offset(library) if request.fault_address else -1
            where = building.source_line(library, request.fault_address - entry + offset) if offset >= 0 else ""
            raise MetalError(f"kernel '{kernel}': {message.value.decode()}" + (f" at {where}" if where else ""))
        if require_written:
            for slot, index in enumerate(indices):
                if index in made and request.unwritten[slot]:
                    raise MetalError(
                        f"kernel '{kernel}': buffer {index} '{parameters[index].name}': {request.unwritten[slot]} of "
                        f"{made[index][1].size} elements never written, the first at index {request.first_unwritten[slot]}"
                    )
    return {key: _give_back(raw, element, dtype) for key, raw, element, dtype in made.values()}


def _bfloat_bits(value: float) -> int:
    bits = int(np.asarray(value, dtype=np.float32).view(np.uint32))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def run_metal(
    source: str,
    inputs: Sequence[Any],
    *,
    input_names: Sequence[str],
    output_names: Sequence[str],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[Any],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    name: str = "emulated",
    header: str = "",
    template: Sequence[tuple[str, Any]] = (),
    init_value: float | None = None,
    atomic_outputs: bool = False,
    ensure_row_contiguous: bool = True,
    **options: Any,
) -> list[Any]:
    """Run the body of an mx.fast.metal_kernel on the CPU; arguments as there, options as in run_kernel."""
    arrays = [Array.of(value) for value in inputs]
    if len(arrays) != len(input_names):
        raise ValueError(f"{len(arrays)} inputs for {len(input_names)} names {list(input_names)}")
    specs = [InputSpec(n, a.dtype, tuple(a.data.shape)) for n, a in zip(input_names, arrays, strict=True)]
    results = [(n, dtype_name(d)) for n, d in zip(output_names, output_dtypes, strict=True)]
    made = generate(name, specs, results, source, header, list(template), atomic_outputs)

    by_name = dict(zip(input_names, arrays, strict=True))
    shapes = dict(zip(output_names, output_shapes, strict=True))
    dtypes = dict(zip(output_names, output_dtypes, strict=True))
    buffers: dict[int | str, Any] = {}
    outputs: dict[int | str, tuple[Sequence[int], Any]] = {}
    for index, (kind, base) in enumerate(made.bindings):
        if kind == "output":
            outputs[index] = (shapes[base], dtypes[base])
            continue
        given = by_name[base]
        data = np.ascontiguousarray(given.data).reshape(given.data.shape) if ensure_row_contiguous else given.data
        strides = np.array([s // data.itemsize for s in data.strides], dtype=np.int64)
        values = {"input": _memory_of(data), "shape": np.array(data.shape, dtype=np.int32), "strides": strides,
                  "ndim": np.array(data.ndim, dtype=np.int32)}  # fmt: skip
        buffers[index] = Array(values[kind], given.dtype) if kind == "input" else values[kind]
    results_by_index = run_kernel(UTILS + f'#line 1 "{name}.metal"\n' + made.text, made.name, buffers, outputs, grid, threadgroup,
                                  init_value=init_value, name=f"{name}.metal", **options)  # fmt: skip
    return [results_by_index[index] for index, (kind, _) in enumerate(made.bindings) if kind == "output"]


def _memory_of(data: np.ndarray) -> np.ndarray:
    """The block a strided array spans, as the kernel sees it through real strides (which must not be negative)."""
    if data.flags.c_contiguous:
        return data
    if any(s < 0 for s in data.strides):
        raise ValueError("negative strides cannot be bound without a copy")
    extent = 1 + sum((n - 1) * (s // data.itemsize) for n, s in zip(data.shape, data.strides, strict=True)) if data.size else 0
    return np.lib.stride_tricks.as_strided(data, shape=(extent,), strides=(data.itemsize,))


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Any = None,
    **emulation: Any,
) -> Callable[..., list[Any]]:
    """A stand-in for mx.fast.metal_kernel that runs on the CPU; emulation: options of run_kernel for every call."""
    del compile_options  # the emulator always evaluates in 'safe' mode

    def call(*, inputs: Sequence[Any], grid: Any, threadgroup: Any, output_shapes: Any, output_dtypes: Any, template: Any = (),
             init_value: float | None = None, verbose: bool = False, stream: Any = None) -> list[Any]:  # fmt: skip
        del stream, verbose
        return run_metal(source, inputs, name=name, input_names=input_names, output_names=output_names, header=header,
                         template=template or (), grid=grid, threadgroup=threadgroup, output_shapes=output_shapes,
                         output_dtypes=output_dtypes, init_value=init_value, atomic_outputs=atomic_outputs,
                         ensure_row_contiguous=ensure_row_contiguous, **emulation)  # fmt: skip

    return call
