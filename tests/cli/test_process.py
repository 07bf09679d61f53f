"""The command line as a process of its own: streams, exit statuses, start-up time."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

PROGRAM = Path(sys.executable).parent / "attnspec"


def run(*words, cwd, **surroundings):
    return subprocess.run([PROGRAM, *words], cwd=cwd, env={**os.environ, **surroundings}, capture_output=True, text=True, check=False)


def test_run_and_refuse(tmp_path):
    done = run("run", "cog_attention", "--output", "out.npz", "--plot", "map.png", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {"out.npz", "map.png"}
    again = run("run", "cog_attention", "--output", "out.npz", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "attnspec: error: --output: out.npz exists; --force overwrites it\n"


def test_verify_passes_and_says_so(tmp_path):
    done = run("verify", "cog_attention", "scaled_dot_product_attention", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    process = subprocess.Popen([PROGRAM, "list", "--json"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait()


@pytest.mark.parametrize("words", [["list"], ["show", "cog_attention"]])
def test_start_up_time_is_printed(tmp_path, words, capsys):
    start = time.perf_counter()
    assert run(*words, cwd=tmp_path).returncode == 0
    with capsys.disabled():
        print(f"\nattnspec {' '.join(words)}: {time.perf_counter() - start:.2f} s")


def test_bfloat16_from_safetensors(tmp_path):
    """In a process of its own: NumPy knows the name bfloat16 only after ml_dtypes was imported, which this test's process has done."""
    arrays = {name: np.ones((2, 3), ml_dtypes.bfloat16) for name in "qkv"}
    save_file(arrays, tmp_path / "qkv.safetensors")
    done = run("run", "cog_attention", "--input", "qkv.safetensors", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["inputs"]["q"]["dtype"] == "bfloat16"


def test_without_a_command_it_helps(tmp_path):
    done = run(cwd=tmp_path)
    assert done.returncode == 0
    assert "Commands:" in done.stdout


def test_surroundings_that_spoil_pictures_elsewhere(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    nowhere = str(tmp_path / "file" / "config")
    done = run("run", "cog_attention", "--plot", "map.png", cwd=tmp_path, MPLBACKEND="nonsense", MPLCONFIGDIR=nowhere, HOME=nowhere)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["list"], ["run", "cog_attention"], ["show", "tensor_attention"]])
def test_ascii_terminals_and_full_disks(tmp_path, words):
    done = run(*words, cwd=tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stderr) == (0, "")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, *words], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1
        assert done.stderr == "attnspec: error: [Errno 28] No space left on device\n"
