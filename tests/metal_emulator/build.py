"""Compile translated kernels with the host's C++ compiler; libraries are cached by text, shim, flags and compiler."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SHIM = Path(__file__).parent / "shim"
COMPILERS = ("g++", "clang++", "c++")
COMMON = ("-std=gnu++17", "-fPIC", "-w", "-g1", "-gdwarf-4", "-fno-exceptions", "-fno-rtti")
# No contraction and no excess precision: every operation rounds once, as the text says.
KERNEL = ("-O1", "-fsanitize=thread", "-fsanitize=bounds,alignment,integer-divide-by-zero", "-ffp-contract=off", "-fno-math-errno",
          "-fno-strict-aliasing", "-fwrapv", "-fno-trapping-math",
          # An uninitialised variable is a fixed absurd value (-1.7e38 for a float), never a lucky zero.
          "-ftrivial-auto-var-init=pattern")  # fmt: skip
GCC_KERNEL = (
    "-fexcess-precision=16",
    "--param=tsan-instrument-func-entry-exit=0",
)
CLANG_KERNEL = ("-ffloat16-excess-precision=none",)


class MetalBuildError(RuntimeError):
    """The C++ compiler rejected the translated kernel."""


@functools.cache
def compiler() -> tuple[str, str] | None:
    """(path, version line) of the first C++ compiler found, or None."""
    for name in (os.environ.get("METAL_EMULATOR_CXX"), *COMPILERS):
        path = shutil.which(name) if name else None
        if path:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return path, done.stdout.splitlines()[0]
    return None


def skip_reason() -> str | None:
    """Why nothing can be emulated here, or None."""
    if sys.platform != "linux":
        return f"the Metal emulator is built for Linux, not {sys.platform}: its linking, and its checks of addresses, are ELF and mmap"
    return None if compiler() else f"the Metal emulator needs a C++ compiler ({', '.join(COMPILERS)}); none was found"


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "metal_emulator"
    folder = Path(os.environ.get("METAL_EMULATOR_CACHE", default))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"metal_emulator_{os.getuid()}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@functools.cache
def _machine() -> tuple[str, ...]:
    """Half conversions in hardware where this processor has them; without, each costs a library call."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    return ("-mf16c", "-mfma", "-mavx2") if all(word in flags for word in ("f16c", " fma", "avx2")) else ()


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = "\n".join(line for line in done.stderr.splitlines() if "error" in line or "undefined" in line)[:4000]
        raise MetalBuildError(f"{what} does not compile:\n{shown or done.stderr[:4000]}")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _shim_digest() -> str:
    return _digest(*(path.name + path.read_text() for path in sorted(SHIM.iterdir()) if path.is_file()))


def _flags() -> tuple[list[str], list[str]]:
    found = compiler()
    if found is None:
        raise MetalBuildError(skip_reason())
    clang = "clang" in found[1].lower()
    return [*COMMON, *_machine()], [*KERNEL, *(CLANG_KERNEL if clang else GCC_KERNEL)]


def build(code: str, name: str) -> Path:
    """Path of the shared library of this C++ text; the runtime it needs lies beside it."""
    found = compiler()
    common, kernel = _flags()
    assert found is not None
    folder = cache_folder()
    base = _digest(_shim_digest(), *found, *common, *kernel)
    target = folder / f"kernel-{_digest(base, code)}.so"
    # One runtime for all kernels of a process: it owns the address space of the buffers and the thread stacks.
    runtime = folder / f"libmetal_runtime-{base}.so"
    if target.is_file() and runtime.is_file():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = Path(scratch)
        if not runtime.is_file():
            _run([found[0], *common, "-O2", "-shared", f"-Wl,-soname,{runtime.name}", str(SHIM / "runtime.cpp"), "-o",
                  str(place / "runtime.so")], "the runtime")  # fmt: skip
            os.replace(place / "runtime.so", runtime)
        (place / "kernel.cpp").write_text(code)
        _run([found[0], *common, *kernel, f"-I{SHIM}", "-c", str(place / "kernel.cpp"), "-o", str(place / "kernel.o")], name)
        # Linked without -fsanitize: the runtime supplies the hooks the sanitiser's own library would.
        _run([found[0], "-shared", "-Wl,-Bsymbolic", "-Wl,-rpath,$ORIGIN", str(place / "kernel.o"), str(runtime), "-o",
              str(place / "kernel.so"), "-lm"], name)  # fmt: skip
        os.replace(place / "kernel.so", target)  # atomic: parallel test processes may build the same kernel
    return target


def source_line(library: Path, offset: int) -> str:
    """'file:line' of an instruction of the library, '' when the tools to tell are missing."""
    tool = shutil.which("addr2line")
    if not tool:
        return ""
    done = subprocess.run([tool, "-i", "-e", str(library), hex(offset)], capture_output=True, text=True, check=False)
    lines = [line.split(" (")[0] for line in done.stdout.splitlines()]
    # With inlining the shim's own frames come first; the first frame outside it is the kernel's line.
    own = {path.name for path in SHIM.iterdir()}
    for line in lines:
        file = line.rsplit(":", 1)[0].rsplit("/", 1)[-1]
        if not line.startswith("?") and file not in own:
            return f"{file}:{line.rsplit(':', 1)[1]}"
    return ""
