"""What the emulator cannot see of our kernels' texts."""

import re
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)")
from attnspec import mlx_backend

KERNELS = sorted(Path(mlx_backend.__file__).parent.rglob("*.metal"))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_no_kernel_names_the_address_space_of_an_input(path):
    """MLX has arrays of fewer than 8 numbers in constant memory and others in device memory: a pointer to either is `auto`."""
    code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    assert not re.search(r"\b(device|constant)\b", code)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_no_kernel_has_a_simd_operation_behind_a_short_circuit(path):
    """Lanes that do not reach it leave it undefined."""
    code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    assert not re.search(r"(&&|\|\||\?)[^;]*\bsimd_(any|all|or|sum|max|min|shuffle)", code)


def test_there_are_kernels():
    assert len(KERNELS) >= 6
