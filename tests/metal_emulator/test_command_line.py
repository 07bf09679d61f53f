"""python -m tests.metal_emulator, called in process."""

from __future__ import annotations

import numpy as np
import pytest

from . import skip_reason
from .__main__ import main

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))

TEXT = """#include <metal_stdlib>
using namespace metal;
constant int factor [[function_constant(0)]];
template <typename T>
[[kernel]] void scale(device const T* x [[buffer(0)]], device T* o [[buffer(1)]], constant int& n [[buffer(2)]],
                      uint i [[thread_position_in_grid]]) {
  if (int(i) < n) o[i] = x[i] * T(factor);
}
template [[host_name("scale_float")]] [[kernel]] decltype(scale<float>) scale<float>;
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "scale.metal"
    path.write_text(TEXT)
    return path


def test_lists_the_kernels(file, capsys):
    assert main([str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == ["scale (template): x, o, n, i", "scale_float = scale<float>"]


def test_runs_and_saves(file, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(8, dtype=np.float32))
    arguments = ["--kernel", "scale_float", "--buffer", f"x={tmp_path / 'x.npy'}", "--buffer", "n=int32:8", "--output", "o=float32:8",
                 "--grid", "8", "--threadgroup", "4", "--constant", "factor=3", "--save", str(tmp_path)]  # fmt: skip
    assert main([str(file), *arguments]) == 0
    assert (np.load(tmp_path / "o.npy") == 3 * np.arange(8)).all()


def test_reports_an_error_with_its_line(file, capsys):
    arguments = ["--kernel", "scale<float>", "--buffer", "x=float32:1,2", "--buffer", "n=int32:8", "--output", "o=float32:8", "--grid", "8"]
    assert main([str(file), *arguments]) == 1
    told = capsys.readouterr().err
    assert "out of bounds: read of 4 bytes at buffer 0 'x'[2]" in told
    assert "scale.metal:7" in told


def test_unknown_kernel(file, capsys):
    assert main([str(file), "--kernel", "other"]) == 1
    assert "no kernel 'other' in scale.metal; it has scale_float" in capsys.readouterr().err
