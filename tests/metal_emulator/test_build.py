"""The build: what is cached, what a change rebuilds, and the reason given where nothing can be built."""

from __future__ import annotations

import numpy as np
import pytest

from . import build, skip_reason
from .launch import _compiled, run_kernel

TEXT = "kernel void f(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = VALUE; }"


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("METAL_EMULATOR_CACHE", str(tmp_path))
    _compiled.cache_clear()
    yield tmp_path
    _compiled.cache_clear()


def run(value: str):
    return run_kernel(TEXT.replace("VALUE", value), "f", {}, {"o": ((2,), np.float32)}, (2,), (2,))["o"].tolist()


@pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))
def test_equal_text_is_built_once(empty_cache, monkeypatch):
    assert run("1") == [1, 1]
    assert len(list(empty_cache.glob("kernel-*.so"))) == 1
    _compiled.cache_clear()
    commands = []
    monkeypatch.setattr(build, "_run", lambda *a: commands.append(a))
    assert run("1") == [1, 1]
    assert not commands
    assert not [p for p in empty_cache.iterdir() if p.is_dir()]  # no scratch folder stays behind


@pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))
def test_other_text_is_another_library(empty_cache):
    assert (run("1"), run("2")) == ([1, 1], [2, 2])
    assert len(list(empty_cache.glob("kernel-*.so"))) == 2
    assert len(list(empty_cache.glob("libmetal_runtime-*.so"))) == 1


def test_a_missing_compiler_is_a_reason_to_skip(monkeypatch):
    build.compiler.cache_clear()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    try:
        assert skip_reason() == "the Metal emulator needs a C++ compiler (g++, clang++, c++); none was found"
        with pytest.raises(build.MetalBuildError, match="needs a C\\+\\+ compiler"):
            build.build("", "nothing")
    finally:
        build.compiler.cache_clear()
