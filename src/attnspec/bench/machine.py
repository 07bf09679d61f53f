"""What a figure was measured on, and how fast that machine multiplies matrices."""

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from threadpoolctl import threadpool_limits

SIZE = 2048                # of the square matrices
PACKAGES = ("attnspec", "numpy", "scipy", "numba", "mlx", "torch")


@dataclass(frozen=True)
class Machine:
    """A machine and the software on it."""

    processor: str
    cores: int
    memory: float                     # bytes
    system: str
    versions: dict[str, str]
    threads: int                      # used in the measurement
    sgemm: float                      # float32 operations per second of NumPy's matrix product with these threads
    date: str

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (f"{self.processor}, {self.cores} logical cores, {self.memory / 1e9:.0f} GB, {self.system}; {versions}; "
                f"{self.threads} threads; sgemm {self.sgemm / 1e9:.0f} GFLOP/s; {self.date}")


def describe_machine(threads: int) -> Machine:
    """This machine, its matrix product measured now."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(
        processor=processor(), cores=os.cpu_count() or 1, memory=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.machine()}", versions=versions, threads=threads, sgemm=sgemm_rate(threads),
        date=time.strftime("%Y-%m-%d"),
    )


def processor() -> str:
    """The processor's name, with the widest vectors Numba finds in it."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0] if models else name
    try:
        from llvmlite import binding
    except ImportError:
        return name
    features = binding.get_host_cpu_features()
    widest = next((label for feature, label in (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("neon", "NEON")) if features.get(feature)), "")
    return f"{name} ({binding.get_host_cpu_name()}{', ' + widest if widest else ''})"


def sgemm_rate(threads: int, rounds: int = 7) -> float:
    """Operations per second of a float32 matrix product, the best of a few rounds."""
    a, b = np.random.default_rng(0).standard_normal((2, SIZE, SIZE)).astype(np.float32)
    out = np.empty_like(a)
    best = np.inf
    with threadpool_limits(threads, user_api="blas"):
        for _ in range(rounds):
            start = time.perf_counter()
            np.matmul(a, b, out=out)
            best = min(best, time.perf_counter() - start)
    return 2 * SIZE**3 / best
