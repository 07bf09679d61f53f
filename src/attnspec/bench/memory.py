"""How much memory a call takes beyond its inputs and outputs, and how long the first call takes, each in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

TOKENS, FEATURES = 32768, 64
WATCHED = {
    "softmax": ("scaled_dot_product_attention", ("q", "k", "v"), {}),
    "Cog": ("cog_attention", ("q", "k", "v"), {}),
    "affine-scaled": ("affine_scaled_attention", ("q", "k", "v", "x", "w_a", "alpha_ma"), {}),
    "Sinkhorn, 3 half-steps, streaming": ("sinkhorn_attention", ("q", "k", "v"), {"n_iters": 3}),
}

GROWTH = """
import json, sys, threading, time
import numpy as np, psutil
from attnspec import numba_kernels
from attnspec.reference import RECORDS
name, arrays, options, n, d, threads = json.loads(sys.argv[1])
function, record = getattr(numba_kernels, name), RECORDS[name]
def drawn(n):
    x = record.draw({"n": n, "m": n, "d": d, **({"h": 1} if "h" in record.dimensions else {})})
    return {key: x[key].astype(np.float32) for key in arrays}
with numba_kernels.threads(threads):
    function(**drawn(600), **options)                      # compiled, libraries loaded, pools started
    given = drawn(n)
    process = psutil.Process()
    before = peak = process.memory_info().rss
    done = threading.Event()
    def watch():
        global peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)
    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    out = function(**given, **options)
    seconds = time.perf_counter() - start
    done.set(); watcher.join()
print(json.dumps({"growth": max(peak, process.memory_info().rss) - before - out.nbytes, "seconds": seconds}))
"""

FIRST = """
import sys, time
start = time.perf_counter()
import numpy as np
from attnspec import numba_kernels
q = np.ones((2, 8, 4), np.float32)
getattr(numba_kernels, sys.argv[1])(q, q, q)
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Growth:
    """Bytes a call needed beyond its inputs and outputs, beside the n * m numbers of a dense weight matrix."""

    work: str
    growth: int
    dense: int
    seconds: float


def memory_growth(label: str, threads: int) -> Growth:
    """Of one watched function at one head, n = m = 32768, d = 64 in float32."""
    name, arrays, options = WATCHED[label]
    request = json.dumps([name, arrays, options, TOKENS, FEATURES, threads])
    found = json.loads(run_apart(GROWTH, request))
    return Growth(label, found["growth"], 4 * TOKENS**2, found["seconds"])


@dataclass(frozen=True)
class Start:
    """Seconds from a fresh interpreter's start to the first result: nothing compiled yet, and all compiled before."""

    formula: str
    compiling: float
    cached: float
    command: float                    # a whole `attnspec run`, compiled before


def first_results(name: str) -> Start:
    """How long a first call takes with an empty cache of compiled kernels, with a full one, and from the command line."""
    with tempfile.TemporaryDirectory() as cache:
        compiling, cached = (float(run_apart(FIRST, name, NUMBA_CACHE_DIR=cache)) for _ in range(2))
        times = []
        for _ in range(2):                                                    # the first compiles for float64 too
            start = time.perf_counter()
            code = "import sys; from attnspec.cli.main import main; main(sys.argv[1:])"
            run_apart(code, "run", name, "--backend", "numba", NUMBA_CACHE_DIR=cache)
            times.append(time.perf_counter() - start)
    return Start(name, compiling, cached, times[-1])


def run_apart(code: str, *arguments: str, **environment: str) -> str:
    """What a Python program prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(f"a measurement failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout
