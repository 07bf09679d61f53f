"""Runs Metal kernels on the CPU, with the checks a GPU does not make."""

from .build import MetalBuildError, skip_reason
from .launch import Array, MetalError, metal_kernel, run_kernel, run_metal
from .rewrite import MetalSourceError
from .signature import generate

__all__ = [
    "Array",
    "MetalBuildError",
    "MetalError",
    "MetalSourceError",
    "generate",
    "metal_kernel",
    "run_kernel",
    "run_metal",
    "skip_reason",
]
