"""Arrays from and to the user's files. Nothing is unpickled, nothing overwritten unasked, nothing left half-written."""

import contextlib
import math
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import click
import numpy as np

from attnspec.reference.inputs import shown


class Refusal(click.ClickException):
    """A request that cannot be met because of what was handed in: one line, exit status 2."""

    exit_code = 2


@contextlib.contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """Turn the one-line errors of the library into refusals."""
    try:
        yield
    except MemoryError as error:
        raise Refusal(f"{prefix}not enough memory: {error}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise Refusal(prefix + str(error)) from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a .npz or .safetensors file by name."""
    if path.suffix not in (".npz", ".safetensors"):
        raise Refusal(f"--input: expected a .npz or .safetensors file, got {path}")
    return read(path, "--input")


def read_array(name: str, path: Path) -> np.ndarray:
    """The one array of a .npy file."""
    if path.suffix != ".npy":
        raise Refusal(f"--arg {name}: expected a .npy file, got {path}")
    return read(path, f"--arg {name}")["array"]


def read(path: Path, what: str) -> dict[str, np.ndarray]:
    try:
        if not path.is_file():
            raise Refusal(f"{what}: no file {path}" if not path.exists() else f"{what}: {path} is not a regular file")
    except (OSError, ValueError) as error:
        raise Refusal(f"{what}: cannot read {shown(str(path))}: {error}") from error
    try:
        with path.open("rb") as file:
            if path.suffix == ".npy":
                check_header(file, path.stat().st_size, "array")
                file.seek(0)
                with warnings.catch_warnings(action="ignore"):         # a header written by Python 2
                    return {"array": np.load(file, allow_pickle=False)}
            if path.suffix == ".npz":
                return read_npz(file)
        check_memory(path.stat().st_size, path.name)
        import ml_dtypes  # noqa: F401                                 # gives NumPy the name "bfloat16", which load_file asks for
        from safetensors.numpy import load_file

        return load_file(path)
    except Refusal as refusal:
        raise Refusal(f"{what}: {path}: {refusal.message}") from None
    except MemoryError:
        raise Refusal(f"{what}: {path} does not fit in memory") from None
    except Exception as error:                # damaged files fail in many ways (zip, zlib, header syntax, safetensors): all mean the same
        raise Refusal(f"{what}: cannot read {path}: {error or type(error).__name__}") from error


def read_npz(file: IO[bytes]) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(file):
        raise Refusal("not a .npz file (no zip archive), or cut short")
    with zipfile.ZipFile(file) as archive:
        check_memory(sum(member.file_size for member in archive.infolist()), "it")
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                raise Refusal(f"{member.filename} is no array")
            with archive.open(member) as header:
                check_header(header, member.file_size, member.filename.removesuffix(".npy"))
    file.seek(0)
    with warnings.catch_warnings(action="ignore"), np.load(file, allow_pickle=False) as loaded:
        return {key: loaded[key] for key in loaded.files}


def check_header(file: IO[bytes], size: int, name: str) -> None:
    """Refuse an array by its header, before anything is allocated for it: Python objects, missing data, more than fits in memory."""
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings(action="ignore"):
            shape, _, dtype = read_header(file)
        if min(shape, default=0) < 0:
            raise ValueError(f"a negative size in {shape}")
    except ValueError as error:
        raise Refusal(f"{name} is not stored as a NumPy array ({error})") from None
    if dtype.hasobject:
        raise Refusal(f"{name} holds pickled Python objects, which are never loaded")
    stored = math.prod(shape) * dtype.itemsize
    if size < stored:
        raise Refusal(f"{name} is cut short: its header promises {stored} bytes, {size} are there")
    check_memory(stored, name)


def check_memory(needed: int, what: str) -> None:
    """Refuse what would need more memory than is free."""
    import psutil

    free = psutil.virtual_memory().available
    if needed > free:
        raise Refusal(f"{what} would need about {size_text(needed)} of memory; {size_text(free)} are free")


def size_text(size: float) -> str:
    """A number of bytes as people read it."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


class Targets:
    """Files to write at the end of a command, all of them or none: each is first written beside its place, then moved there."""

    def __init__(self, force: bool) -> None:
        self.force = force
        self.paths: set[Path] = set()
        self.writers: dict[Path, Callable[[IO[bytes]], None]] = {}

    def check(self, what: str, path: Path | None, suffixes: tuple[str, ...], inputs: Iterable[Path] = ()) -> None:
        """Refuse a target before the work is done: a wrong suffix, a file that exists, a folder that does not, a name given twice."""
        if path is None:
            return
        if path.suffix.lower() not in suffixes:
            raise Refusal(f"{what}: expected a name ending in {' or '.join(suffixes)}, got {path}")
        try:
            self.check_place(what, path)
        except (OSError, ValueError) as error:
            raise Refusal(f"{what}: cannot write {shown(str(path))}: {error}") from error
        if path.resolve() in {other.resolve() for other in inputs}:
            raise Refusal(f"{what}: {path} is an input of this run")
        if path.resolve() in {other.resolve() for other in self.paths}:
            raise Refusal(f"{what}: {path} is already another output of this run")
        self.paths.add(path)

    def check_place(self, what: str, path: Path) -> None:
        if path.is_dir():
            raise Refusal(f"{what}: {path} is a folder")
        if os.path.lexists(path) and not self.force:                   # a link to nowhere is there, too
            raise Refusal(f"{what}: {path} exists; --force overwrites it")
        if not path.parent.is_dir():
            raise Refusal(f"{what}: no folder {path.parent}")
        if not os.access(path.parent, os.W_OK):
            raise Refusal(f"{what}: cannot write in {path.parent}")
        path.resolve()

    def put(self, path: Path, write: Callable[[IO[bytes]], None]) -> None:
        self.writers[path] = write

    def put_arrays(self, path: Path, arrays: dict[str, Any]) -> None:
        def write(file: IO[bytes]) -> None:
            if path.suffix.lower() == ".safetensors":
                from safetensors.numpy import save

                file.write(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
            else:
                np.savez_compressed(file, allow_pickle=False, **arrays)

        self.put(path, write)

    def commit(self) -> None:
        """Write everything, then move it into place."""
        written: list[tuple[str, Path]] = []
        try:
            for path, write in self.writers.items():
                handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
                written.append((name, path))
                with os.fdopen(handle, "wb") as file:
                    write(file)
                os.chmod(name, 0o666 & ~UMASK)
            while written:
                os.replace(*written[0])
                written.pop(0)
        except OSError as error:
            raise Refusal(f"cannot write {written[-1][1] if written else 'the output'}: {error}") from error
        finally:
            for name, _ in written:
                with contextlib.suppress(OSError):
                    os.unlink(name)


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


UMASK = current_umask()           # mkstemp makes files that only their owner can read; outputs should be as any other file
