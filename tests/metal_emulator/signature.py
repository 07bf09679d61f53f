"""The kernel text MLX builds for mx.fast.metal_kernel, reproduced byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Alphabetical, as MLX prints them; the flag says whether the type is uint3 (otherwise uint).
ATTRIBUTES: tuple[tuple[str, bool], ...] = (
    ("dispatch_quadgroups_per_threadgroup", False),
    ("dispatch_simdgroups_per_threadgroup", False),
    ("dispatch_threads_per_threadgroup", True),
    ("grid_origin", True),
    ("grid_size", True),
    ("quadgroup_index_in_threadgroup", False),
    ("quadgroups_per_threadgroup", False),
    ("simdgroup_index_in_threadgroup", False),
    ("simdgroups_per_threadgroup", False),
    ("thread_execution_width", False),
    ("thread_index_in_quadgroup", False),
    ("thread_index_in_simdgroup", False),
    ("thread_index_in_threadgroup", False),
    ("thread_position_in_grid", True),
    ("thread_position_in_threadgroup", True),
    ("threadgroup_position_in_grid", True),
    ("threadgroups_per_grid", True),
    ("threads_per_grid", True),
    ("threads_per_simdgroup", False),
    ("threads_per_threadgroup", True),
)

# numpy/MLX dtype name -> the name MLX writes in kernel text; float64 has no Metal type.
TYPE_NAMES: dict[str, str] = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "complex64": "complex64_t",
}

CONSTANT_BELOW = 8  # inputs with fewer elements than this live in the constant address space


@dataclass(frozen=True)
class InputSpec:
    """What the text depends on for one input."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class GeneratedKernel:
    """The text, its entry name, and what each buffer index is bound to."""

    name: str
    text: str
    bindings: tuple[tuple[str, str], ...]  # (kind, name): kind is input, shape, strides, ndim or output


def dtype_name(dtype: Any) -> str:
    """'float32' for mx.float32, np.float32, np.dtype('float32') or the string itself."""
    text = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype)
    text = text.rsplit(".", 1)[-1]
    return "bool" if text in ("bool_", "bool") else text


def type_name(dtype: Any) -> str:
    name = dtype_name(dtype)
    if name not in TYPE_NAMES:
        raise TypeError(f"dtype {name} has no Metal type")
    return TYPE_NAMES[name]


def _template_parts(template: Sequence[tuple[str, Any]]) -> tuple[str, str]:
    """('typename T, int N', '<float, 4>') for the pairs given to the call."""
    parameters, arguments = [], []
    for name, value in template:
        if isinstance(value, bool):
            parameters.append(f"bool {name}")
            arguments.append(str(int(value)))
        elif isinstance(value, int):
            parameters.append(f"int {name}")
            arguments.append(str(value))
        elif isinstance(value, float):
            raise TypeError(f"template argument {name} is a float; Metal templates take int, bool or a dtype")
        else:
            parameters.append(f"typename {name}")
            arguments.append(type_name(value))
    return ", ".join(parameters), f"<{', '.join(arguments)}>"


def _suffix(spec: InputSpec) -> str:
    """One part of the entry name per input: 's' marks a scalar, 'c' the constant address space."""
    mark = "s" if not spec.shape else "c" if spec.size < CONSTANT_BELOW else ""
    return f"_{TYPE_NAMES[spec.dtype]}{mark}"


def generate(
    name: str,
    inputs: Sequence[InputSpec],
    outputs: Sequence[tuple[str, str]],  # (name, dtype name)
    source: str,
    header: str = "",
    template: Sequence[tuple[str, Any]] = (),
    atomic_outputs: bool = False,
) -> GeneratedKernel:
    parameters, arguments = _template_parts(template)
    entry = f"custom_kernel_{name}"
    if template:
        entry += "_" + arguments.replace("<", "_").replace(", ", "_").replace("-", "_")[:-1]
    entry += "".join(_suffix(spec) for spec in inputs) + "".join(f"_{TYPE_NAMES[dtype]}" for _, dtype in outputs)

    lines: list[str] = []
    bindings: list[tuple[str, str]] = []

    def add(kind: str, base: str, declaration: str) -> None:
        lines.append(f"  {declaration} [[buffer({len(bindings)})]]")
        bindings.append((kind, base))

    for spec in inputs:
        space = "constant" if spec.size < CONSTANT_BELOW else "device"
        add("input", spec.name, f"const {space} {TYPE_NAMES[spec.dtype]}{'*' if spec.shape else '&'} {spec.name}")
        # MLX looks for the bare substring, so a comment or a longer name asks for the buffer too.
        if spec.shape and f"{spec.name}_shape" in source:
            add("shape", spec.name, f"const constant int* {spec.name}_shape")
        if spec.shape and f"{spec.name}_strides" in source:
            add("strides", spec.name, f"const constant int64_t* {spec.name}_strides")
        if spec.shape and f"{spec.name}_ndim" in source:
            add("ndim", spec.name, f"const constant int& {spec.name}_ndim")
    for output, dtype in outputs:
        metal = TYPE_NAMES[dtype]
        add("output", output, f"device {f'atomic<{metal}>' if atomic_outputs else metal}* {output}")

    used = [f"  {'uint3' if wide else 'uint'} {attr} [[{attr}]]" for attr, wide in ATTRIBUTES if attr in source]
    # MLX counts inputs + outputs, not buffers, to find the last line: with shape buffers and no attribute
    # a later output follows an already closed list. The text is wrong, and reproduced as it is.
    first_output = len(lines) - len(outputs)
    closed = []
    for position, line in enumerate(lines):
        output_number = position - first_output
        last = output_number >= 0 and not used and len(bindings[:position]) >= len(inputs) + len(outputs) - 1
        closed.append(line + (") {\n" if last else ",\n"))
    closed += [attr + (") {\n" if attr is used[-1] else ",\n") for attr in used]

    text = header
    if template:
        text += f"template <{parameters}>\n"
    text += f"[[kernel]] void {entry}(\n" + "".join(closed) + source + "\n}\n"
    if template:
        text += f'\ntemplate [[host_name("{entry}")]] [[kernel]] decltype({entry}{arguments}) {entry}{arguments};\n'
    return GeneratedKernel(entry, text, tuple(bindings))
