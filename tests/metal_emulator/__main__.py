"""Command line: run a kernel of a .metal file, or list its kernels.

python -m tests.metal_emulator file.metal --kernel f --buffer x=x.npy --buffer n=int32:64 --output o=float32:64 --grid 64 --threadgroup 32
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from .build import MetalBuildError, skip_reason
from .launch import ORDERS, RACES, MetalError, default_include_folders, run_kernel
from .rewrite import MetalSourceError, translate


def sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace("x", ",").split(",") if part)


def buffer_value(text: str) -> np.ndarray:
    """'file.npy', or 'dtype:1,2,3' (one value is a scalar), or 'dtype:random(4,8)'."""
    if text.endswith(".npy"):
        return np.load(text)
    dtype, _, values = text.partition(":")
    if values.startswith("random(") and values.endswith(")"):
        return np.random.default_rng(0).standard_normal(sizes(values[7:-1])).astype(dtype)
    numbers = [float(v) for v in values.split(",")]
    return np.array(numbers if len(numbers) > 1 else numbers[0], dtype=dtype)


def output_value(text: str) -> tuple[tuple[int, ...], str]:
    dtype, _, shape = text.partition(":")
    return sizes(shape), dtype


def pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.metal_emulator", description="Run a Metal kernel on the CPU.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--kernel", help="name, host name or instantiation; without it the kernels are listed")
    parser.add_argument("--buffer", action="append", default=[], type=pair, metavar="NAME=VALUE",
                        help="x.npy, float32:1,2,3 or float32:random(4,8)")  # fmt: skip
    parser.add_argument("--output", action="append", default=[], type=pair, metavar="NAME=DTYPE:SHAPE")
    parser.add_argument("--constant", action="append", default=[], type=pair, metavar="NAME=VALUE", help="function constant")
    parser.add_argument("--grid", type=sizes, default=(1,), help="threads, as 64x2x1")
    parser.add_argument("--threadgroup", type=sizes, default=(1,))
    parser.add_argument("--include", action="append", default=[], type=Path)
    parser.add_argument("--order", choices=ORDERS, default="ascending")
    parser.add_argument("--races", choices=RACES, default="strict")
    parser.add_argument("--save", type=Path, help="folder for the outputs as .npy; otherwise they are printed")
    given = parser.parse_args(argv)

    reason = skip_reason()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    folders = (given.file.parent, *given.include, *default_include_folders())
    try:
        text = given.file.read_text()
        if not given.kernel:
            found = translate(text, given.file.name, folders)
            for kernel in found.kernels.values():
                print(f"{kernel.name}{' (template)' if kernel.template else ''}: {', '.join(p.name for p in kernel.parameters)}")
            for host, expression in found.hosts.items():
                print(f"{host} = {expression}")
            return 0
        buffers = {key: buffer_value(value) for key, value in given.buffer}
        outputs = {key: output_value(value) for key, value in given.output}
        constants = {key: int(value) for key, value in given.constant}
        results = run_kernel(text, given.kernel, buffers, outputs, given.grid, given.threadgroup, function_constants=constants,
                             name=given.file.name, include_folders=folders, order=given.order, races=given.races)  # fmt: skip
    except (MetalError, MetalBuildError, MetalSourceError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    for key, array in results.items():
        if given.save:
            given.save.mkdir(parents=True, exist_ok=True)
            np.save(given.save / f"{key}.npy", array)
        else:
            print(f"{key} =\n{array}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
