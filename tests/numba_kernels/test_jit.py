"""The cache of compiled kernels: used again, not used when a helper changed, never in the way."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import attnspec.numba_kernels

PACKAGE = Path(attnspec.numba_kernels.__file__).parent

KERNELS = """
from attnspec.numba_kernels import jit
jit.HERE = __import__("pathlib").Path(__file__).parent
from {helper} import double

@jit.kernel
def quadruple(x):
    return double(double(x))
"""
HELPER = """
from attnspec.numba_kernels import jit

@jit.helper
def double(x):
    return {factor} * x
"""
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import kernels
print(kernels.quadruple(5), sum(kernels.quadruple.stats.cache_hits.values()))
"""


def run(folder, **environment):
    done = subprocess.run([sys.executable, "-W", "error", "-c", RUN, str(folder)], capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_a_changed_helper_is_noticed(tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "kernels.py").write_text(KERNELS.format(helper="doubling"))
    (code / "doubling.py").write_text(HELPER.format(factor=2))
    cache = str(tmp_path / "cache")
    assert run(code, NUMBA_CACHE_DIR=cache) == ["20", "0"]
    assert run(code, NUMBA_CACHE_DIR=cache) == ["20", "1"]
    (code / "doubling.py").write_text(HELPER.format(factor=3))
    shutil.rmtree(code / "__pycache__", ignore_errors=True)
    assert run(code, NUMBA_CACHE_DIR=cache) == ["45", "0"]


def test_no_folder_to_write_in(tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "kernels.py").write_text(KERNELS.format(helper="doubling"))
    (code / "doubling.py").write_text(HELPER.format(factor=2))
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run(code, NUMBA_CACHE_DIR=str(blocked / "cache")) == ["20", "0"]
    assert run(code, NUMBA_CACHE_DIR="", HOME="/dev/null", XDG_CACHE_HOME="/dev/null/x") == ["20", "0"]


def test_a_broken_cache_is_compiled_again(tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "kernels.py").write_text(KERNELS.format(helper="doubling"))
    (code / "doubling.py").write_text(HELPER.format(factor=2))
    cache = tmp_path / "cache"
    assert run(code, NUMBA_CACHE_DIR=str(cache)) == ["20", "0"]
    for path in cache.rglob("*.nb?"):
        path.write_bytes(b"broken")
    assert run(code, NUMBA_CACHE_DIR=str(cache)) == ["20", "0"]


def test_every_kernel_is_cached_outside_the_package():
    """Nothing is left in the package's own folders, which may be shared or read-only."""
    assert not list(PACKAGE.rglob("*.nbi"))
