"""Turn Metal text into C++ for the shim: includes, address spaces, attributes, threadgroup arrays, kernel entry points."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<directive>^[ \t]*\#[^\n\\]*(?:\\.[^\n\\]*)*)
  | (?P<number>(?:0[xX][0-9a-fA-F]+|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)\w*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<space>\s+)
  | (?P<punct>\[\[|\]\]|::|->|.)
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
ADDRESS_SPACES = {"device", "constant", "thread", "threadgroup", "threadgroup_imageblock", "object_data"}
ERASED = ADDRESS_SPACES | {"kernel"}
# Headers of MLX the shim stands in for: intrinsics of the Metal compiler, overloads on address space alone.
PROVIDED = ("kernels/bf16.h", "kernels/bf16_math.h", "kernels/complex.h", "kernels/logging.h", "steel/utils/type_traits.h")
FLOAT_LITERAL = re.compile(r"(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")
HALF_LITERAL = re.compile(r"(?P<value>.*\d\.?)(?P<suffix>bf|BF|h|H)\Z")


class MetalSourceError(ValueError):
    """The kernel text asks for something the rewrite does not know."""


@dataclass
class Token:
    kind: str
    text: str


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: a buffer or a thread attribute."""

    name: str
    type: str
    buffer: int | None
    attribute: str | None
    pointer: bool
    reference: bool
    constant: bool


@dataclass(frozen=True)
class Kernel:
    name: str
    parameters: tuple[Parameter, ...]
    template: bool


@dataclass(frozen=True)
class Translation:
    body: str
    kernels: dict[str, Kernel]
    hosts: dict[str, str]  # host name -> instantiation expression


def tokenize(text: str) -> list[Token]:
    # finditer over a pattern ending in '.' covers every character.
    return [Token(match.lastgroup or "punct", match.group()) for match in TOKEN.finditer(text)]


def _blank(text: str) -> str:
    """Erase but keep the line count."""
    return "\n" * text.count("\n") or " "


def expand_includes(text: str, name: str, folders: Sequence[Path], seen: set[Path] | None = None) -> str:
    """Inline quoted includes (each file once); drop <metal_...>, which the shim header replaces."""
    seen = set() if seen is None else seen
    out = [f'#line 1 "{name}"\n']
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        quoted = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        if re.match(r"\s*#\s*include\s*<", line) or re.match(r"\s*#\s*pragma\s+(once|METAL|clang)", line):
            out.append("\n")
        elif quoted:
            target = quoted[1]
            if not target.endswith(PROVIDED):
                found = next((folder / target for folder in folders if (folder / target).is_file()), None)
                if found is None:
                    raise MetalSourceError(f'{name}:{number}: include "{target}" not found in {[str(f) for f in folders]}')
                if found.resolve() not in seen:
                    seen.add(found.resolve())
                    out.append(expand_includes(found.read_text(), found.name, folders, seen))
            out.append(f'\n#line {number + 1} "{name}"\n')
        else:
            out.append(line)
    return "".join(out)


class _Rewriter:
    def __init__(self, text: str, constants: Mapping[Any, Any]) -> None:
        self.tokens = [t if t.kind != "comment" else Token("space", _blank(t.text)) for t in tokenize(text)]
        self.constants = constants
        self.kernels: dict[str, Kernel] = {}
        self.hosts: dict[str, str] = {}

    # -- walking over tokens, white space aside

    def skip(self, i: int, step: int = 1) -> int:
        i += step
        while 0 <= i < len(self.tokens) and self.tokens[i].kind == "space":
            i += step
        return i

    def text(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def closing(self, i: int, opener: str, closer: str) -> int:
        depth = 0
        while i < len(self.tokens):
            if self.tokens[i].text == opener:
                depth += 1
            elif self.tokens[i].text == closer:
                depth -= 1
                if depth == 0:
                    return i
            i += 1
        raise MetalSourceError(f"unbalanced {opener}")

    def source(self, first: int, end: int) -> str:
        return "".join(t.text for t in self.tokens[first:end])

    # -- the passes

    def attribute_end(self, i: int) -> int | None:
        """Index of the ]] that closes an attribute opened at i; None for a[b[c]] style indexing."""
        if self.text(i) != "[[":
            return None
        depth, j = 1, i + 1
        while j < len(self.tokens):
            if self.text(j) == "[[":
                return None
            if self.text(j) == "[":
                depth += 1
            if self.text(j) == "]" and depth > 1:
                depth -= 1
            elif self.text(j) == "]]":
                return j if depth == 1 else None
            elif self.text(j) in ";{}":
                return None
            j += 1
        return None

    def collect_kernels(self) -> None:
        i = 0
        while i < len(self.tokens):
            end = self.attribute_end(i)
            is_kernel = self.text(i) == "kernel" and self.tokens[i].kind == "name"
            if end is not None:
                names = [t.text for t in self.tokens[i:end]]
                if "host_name" in names and self.text(self.skip(i, -1)) == "template":
                    self.take_instantiation(self.skip(i, -1), i, end)
                    continue
                is_kernel = "kernel" in names
            if is_kernel:
                self.take_kernel(i, i if end is None else end)
            i = i + 1 if end is None else end + 1
        use = r'^\s*instantiate_kernel\(\s*"([^"]+)"\s*,([^;{}]*?)\)\s*;?\s*$'
        for match in re.finditer(use, self.source(0, len(self.tokens)), re.MULTILINE):
            function, *arguments = (part.strip() for part in match[2].split(",", 1))
            self.hosts[match[1]] = f"{function}<{arguments[0]}>" if arguments else function

    def take_instantiation(self, template: int, start: int, end: int) -> None:
        """template [[host_name("x")]] [[kernel]] decltype(f<a>) f<a>; -> remember x, erase the statement."""
        host = next(t.text for t in self.tokens[start:end] if t.kind == "string").strip('"')
        stop = end
        while self.text(stop) != ";":
            stop += 1
        match = re.search(r"decltype\s*\((.*?)\)\s*\1", self.source(end, stop), re.DOTALL)
        if match is None:
            match = re.search(r"\bvoid\s+(.*?)\(", self.source(end, stop), re.DOTALL)
        if match is None:
            raise MetalSourceError(f"cannot read the instantiation of {host}")
        self.hosts[host] = match[1].strip()
        for j in range(template, stop + 1):
            self.tokens[j] = Token("space", _blank(self.text(j)))

    def take_kernel(self, start: int, end: int) -> None:
        i = end
        while self.text(i) not in ("void", ";", ""):
            i = self.skip(i)
        name_at = self.skip(i)
        open_at = self.skip(name_at)
        if self.text(i) != "void" or self.text(open_at) != "(":
            return
        close_at = self.closing(open_at, "(", ")")
        before = self.skip(start, -1)
        parts = self.split(open_at + 1, close_at)
        parameters = self.numbered([self.parameter(a, b) for a, b in parts if self.source(a, b).strip()])
        kernel = Kernel(self.text(name_at), parameters, self.text(before) == ">")
        self.kernels[kernel.name] = kernel

    def split(self, first: int, end: int) -> list[tuple[int, int]]:
        """Ranges between commas outside every bracket and template argument list."""
        parts, depth, start = [], 0, first
        for i in range(first, end):
            weight = {"(": 1, "[": 1, "{": 1, "<": 1, ")": -1, "]": -1, "}": -1, ">": -1, "[[": 2, "]]": -2}.get(self.text(i), 0)
            depth += weight
            if self.text(i) == "," and depth == 0:
                parts.append((start, i))
                start = i + 1
        parts.append((start, end))
        return parts

    def parameter(self, first: int, end: int) -> Parameter:
        attribute_at = next((i for i in range(first, end) if self.text(i) == "[["), end)
        attributes = self.source(attribute_at, end)
        words = [t.text for t in self.tokens[first:attribute_at] if t.kind != "space"]
        kept = [w for w in words if w not in ERASED]
        name = kept[-1]
        buffer = re.search(r"\bbuffer\s*\(\s*(\d+)\s*\)", attributes)
        attribute = None if buffer else re.search(r"\[\[\s*(\w+)", attributes)
        if not buffer and not attribute and not {"*", "&"} & set(kept):
            raise MetalSourceError(f"kernel parameter '{name}' has neither [[buffer(n)]] nor a thread attribute")
        declared = " ".join(w for w in kept[:-1] if w not in "*&" and w != "const")
        pointer, reference = "*" in kept, "&" in kept
        # const left of the last '*' makes the pointee read-only; the constant address space always does.
        constant = "constant" in words or "const" in words[: len(words) - words[::-1].index("*") if pointer else len(words)]
        index = int(buffer[1]) if buffer else None
        return Parameter(name, declared, index, attribute[1] if attribute else None, pointer, reference, constant)

    @staticmethod
    def numbered(parameters: list[Parameter]) -> tuple[Parameter, ...]:
        """Buffers without an index take the free ones in order, as the Metal compiler assigns them."""
        taken = {p.buffer for p in parameters if p.buffer is not None}
        free = iter(n for n in range(len(taken) + len(parameters)) if n not in taken)
        return tuple(replace(p, buffer=next(free)) if p.buffer is None and p.attribute is None else p for p in parameters)

    def function_constants(self) -> None:
        """constant bool x [[function_constant(3)]]; -> static constexpr bool x = value;"""
        for i in range(len(self.tokens)):
            end = self.attribute_end(i)
            if end is None or self.text(self.skip(end)) != ";":
                continue
            match = re.search(r"function_constant\s*\(\s*(\w+)\s*\)", self.source(i, end))
            if not match:
                continue
            name = self.text(self.skip(i, -1))
            start = i
            while self.text(start - 1) not in (";", "}", "") and self.tokens[start - 1].kind != "directive":
                start -= 1
            key: Any = int(match[1]) if match[1].isdigit() else match[1]
            value = self.constants.get(name, self.constants.get(key, 0))
            declared = " ".join(t.text for t in self.tokens[start:i] if t.kind != "space" and t.text not in ERASED and t.text != name)
            lines = self.source(start, i).count("\n")
            literal = str(int(value)) if isinstance(value, (bool, int)) else repr(float(value))
            self.tokens[start] = Token("punct", "\n" * lines + f"static constexpr {declared} {name} = ({declared})({literal})")
            for j in range(start + 1, end + 1):
                self.tokens[j] = Token("space", "")

    def threadgroup_variables(self) -> None:
        """threadgroup T a[n]; at the start of a statement -> a reference into the group's arena."""
        for i in range(len(self.tokens)):
            if self.tokens[i].kind != "name" or self.text(i) != "threadgroup":
                continue
            before = self.skip(i, -1)
            if before >= 0 and self.text(before) not in (";", "{", "}", ":") and self.tokens[before].kind != "directive":
                continue
            stop = i
            while stop < len(self.tokens) and self.text(stop) != ";" and (
                self.text(stop) not in ("=", "(", "{") or self.depth_at(i + 1, stop) > 0          # a dimension may hold parentheses
            ):
                stop += 1
            if self.text(stop) != ";":  # an initialised pointer, or a function
                continue
            parts = self.split(i + 1, stop)
            first, end = parts[0]
            if any(self.text(j) in "*&" and self.depth_at(first, j) == 0 for j in range(first, end) if self.tokens[j].kind == "punct"):
                continue
            bracket = next((j for j in range(first, end) if self.text(j) == "[" and self.depth_at(first, j) == 0), end)
            name_at = self.skip(bracket, -1)
            declared = " ".join(self.source(first, name_at).split())
            made = ""
            for number, (a, b) in enumerate(parts):
                start = name_at if number == 0 else self.skip(a - 1)
                name = self.text(start)
                alias = f"emu_type_of_{name}"
                dimensions = " ".join(self.source(start + 1, b).split())
                made += f'using {alias} = {declared}{dimensions}; auto& {name} = emu::threadgroup_variable<{alias}>([] {{}}, "{name}"); '
            lines = self.source(i, stop).count("\n")
            self.tokens[i] = Token("punct", "\n" * lines + made.rstrip("; "))
            for j in range(i + 1, stop):
                self.tokens[j] = Token("space", "")

    def depth_at(self, first: int, at: int) -> int:
        depth = 0
        for j in range(first, at):
            depth += {"<": 1, "(": 1, "[": 1, ">": -1, ")": -1, "]": -1}.get(self.text(j), 0)
        return depth

    def erase(self) -> str:
        out: list[str] = []
        i = 0
        while i < len(self.tokens):
            token = self.tokens[i]
            end = self.attribute_end(i)
            if end is not None:
                out.append(_blank(self.source(i, end + 1)))
                i = end + 1
                continue
            if token.kind == "name" and token.text in ERASED:
                # A member function may be qualified with its address space; elsewhere the word stands before a type.
                out.append(" ")
            elif token.kind == "number" and not token.text.lower().startswith("0x") and (match := HALF_LITERAL.match(token.text)):
                kind = "half" if match["suffix"].lower() == "h" else "bfloat"
                out.append(f"({kind}({match['value']}{'' if '.' in match['value'] or 'e' in match['value'].lower() else '.0'}f))")
            elif token.kind == "number" and FLOAT_LITERAL.fullmatch(token.text):
                out.append(token.text + "f")  # Metal has no double: an unsuffixed literal is a float
            elif token.kind == "directive" and re.match(r"\s*#\s*define\b", token.text):
                out.append(self.directive(token.text))
            else:
                out.append(token.text)
            i += 1
        return "".join(out)

    def directive(self, text: str) -> str:
        """The body of a macro is Metal too; names and continuation lines are kept."""
        match = re.match(r"(\s*#\s*define\s+\w+(?:\([^)]*\))?)(.*)\Z", text, re.DOTALL)
        assert match is not None
        if re.match(r"\s*#\s*define\s+instantiate_kernel\b", text):
            return match[1] + "\\\n" * text.count("\n")
        body = re.sub(r"//[^\n\\]*", " ", match[2])
        # A line continuation is hidden from the tokenizer as white space and restored afterwards.
        inner = _Rewriter(body.replace("\\\n", "\f\n"), self.constants)
        inner.threadgroup_variables()
        return match[1] + inner.erase().replace("\f\n", "\\\n").replace("\f", "")


def translate(
    text: str, name: str = "kernel.metal", folders: Sequence[Path] = (), constants: Mapping[Any, Any] | None = None
) -> Translation:
    rewriter = _Rewriter(expand_includes(text, name, folders), constants or {})
    rewriter.collect_kernels()
    rewriter.function_constants()
    rewriter.threadgroup_variables()
    return Translation(rewriter.erase(), rewriter.kernels, rewriter.hosts)


# Thread attributes -> expression over emu::Place p; n and d count the threads of this group and of a full one.
PLACE: dict[str, str] = {
    "thread_position_in_grid": "p.thread_position_in_grid",
    "thread_position_in_threadgroup": "p.thread_position_in_threadgroup",
    "threadgroup_position_in_grid": "p.threadgroup_position_in_grid",
    "threads_per_grid": "p.threads_per_grid",
    "threadgroups_per_grid": "p.threadgroups_per_grid",
    "threads_per_threadgroup": "p.threads_per_threadgroup",
    "dispatch_threads_per_threadgroup": "p.dispatch_threads_per_threadgroup",
    "grid_size": "p.threads_per_grid",
    "grid_origin": "emu::Index3{0, 0, 0}",
    "thread_index_in_threadgroup": "emu::Index3{i, 0, 0}",
    "thread_index_in_simdgroup": "emu::Index3{i % 32, 0, 0}",
    "simdgroup_index_in_threadgroup": "emu::Index3{i / 32, 0, 0}",
    "thread_index_in_quadgroup": "emu::Index3{i % 4, 0, 0}",
    "quadgroup_index_in_threadgroup": "emu::Index3{i / 4, 0, 0}",
    "simdgroups_per_threadgroup": "emu::Index3{(n + 31) / 32, 0, 0}",
    "quadgroups_per_threadgroup": "emu::Index3{(n + 3) / 4, 0, 0}",
    "dispatch_simdgroups_per_threadgroup": "emu::Index3{(d + 31) / 32, 0, 0}",
    "dispatch_quadgroups_per_threadgroup": "emu::Index3{(d + 3) / 4, 0, 0}",
    "thread_execution_width": "emu::Index3{32, 0, 0}",
    "threads_per_simdgroup": "emu::Index3{32, 0, 0}",
}


def entry_code(kernel: Kernel, expression: str, slots: Mapping[int, int]) -> str:
    """The C++ function the runtime calls for each thread. slots: buffer index -> position among the bound buffers."""
    arguments = []
    for parameter in kernel.parameters:
        if parameter.buffer is not None:
            kind = "Reference" if parameter.reference else "Pointer"
            arguments.append(f"emu::{kind}{{b[{slots[parameter.buffer]}]}}")
        else:
            if parameter.attribute not in PLACE:
                raise MetalSourceError(f"parameter '{parameter.name}': unknown attribute [[{parameter.attribute}]]")
            arguments.append(f"emu::attribute<{parameter.type}>({PLACE[parameter.attribute]})")
    joined = ",\n      ".join(arguments)
    return (
        '#line 1 "emulated_entry"\n'
        'extern "C" void emu_entry(const emu::Bound* b, const emu::Place& p) {\n'
        "  const uint i = p.thread_index_in_threadgroup;\n"
        "  const emu::Index3 group = p.threads_per_threadgroup, full = p.dispatch_threads_per_threadgroup;\n"
        "  const uint n = group.x * group.y * group.z, d = full.x * full.y * full.z;\n"
        f"  {expression}(\n      {joined});\n"
        "}\n"
    )
