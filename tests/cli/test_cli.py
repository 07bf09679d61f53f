"""The command line through click's runner: what it computes, what it writes, how it refuses."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import attnspec
from attnspec.cli.main import main
from attnspec.dispatch import BACKENDS, Backend

RNG = np.random.default_rng(0)
q, k, v = RNG.standard_normal((2, 5, 4)), RNG.standard_normal((2, 7, 4)), RNG.standard_normal((2, 7, 3))


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    np.savez("qkv.npz", q=q, k=k, v=v)

    def run(*words):
        return CliRunner().invoke(main, [str(word) for word in words])

    return run


def refused(result, *parts):
    """One line on standard error that holds `parts`, status 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert re.fullmatch(r"attnspec: error: [^\n]+\n", result.stderr), result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr


class TestDescribe:
    def test_list_names_every_formula(self, call):
        result = call("list")
        assert result.exit_code == 0
        assert all(name in result.output for name in attnspec.formulas())

    def test_list_of_a_family_as_json(self, call):
        rows = json.loads(call("list", "--family", "signed", "--json").output)
        assert [row["name"] for row in rows] == list(attnspec.formulas("signed"))
        assert rows[1]["arrays"]["q"] == "... n d"
        assert rows[1]["backends"][-2:] == ["numba", "reference"]

    def test_unknown_family(self, call):
        refused(call("list", "--family", "sign"), "family: expected one of", "'sign'")

    @pytest.mark.parametrize("name", attnspec.formulas())
    def test_show(self, call, name):
        result = call("show", name)
        assert result.exit_code == 0, result.output
        for part in (name, "Source: ", "Wrong versions", "Identities"):
            assert part in result.output
        assert json.loads(call("show", name, "--json").output)["name"] == name

    def test_show_unknown(self, call):
        refused(call("show", "cog_attenton"), "did you mean 'cog_attention'?")

    def test_doctor(self, call):
        result = call("doctor")
        assert result.exit_code == 0
        assert "reference" in result.output
        assert json.loads(call("doctor", "--json").output)["packages"]["numpy"] == np.__version__


@pytest.mark.parametrize("name", attnspec.formulas())
class TestEveryFormula:
    def test_run_plot_and_own_arrays(self, call, name):
        record = attnspec.formulas()[name]
        result = call("run", name, "--output", "out.npz", "--plot", "map.png", "--json")
        assert result.exit_code == 0, result.output
        summary = json.loads(result.stdout)
        drawn = record.draw()
        want = record.function(**drawn)
        first = want[0] if isinstance(want, tuple) else want
        with np.load("out.npz") as out:
            np.testing.assert_allclose(out[record.outputs[0]], first, rtol=1e-10, atol=1e-12)      # by the fastest backend here
        assert summary["outputs"][record.outputs[0]]["shape"] == list(np.shape(first))
        with open("map.png", "rb") as picture:
            assert picture.read(8) == b"\x89PNG\r\n\x1a\n"

        np.savez("own.npz", **drawn)
        result = call("run", name, "--input", "own.npz", "--output", "again.npz", "--backend", "reference")
        assert result.exit_code == 0, result.output
        with np.load("again.npz") as again:
            np.testing.assert_array_equal(again[record.outputs[0]], first)

    def test_verify(self, call, name):
        result = call("verify", name)
        assert result.exit_code == 0, result.output
        assert "ok" in result.output

    def test_plot(self, call, name):
        result = call("plot", name, "--output", "map.svg")
        assert result.exit_code == 0, result.output
        with open("map.svg") as picture:
            assert "<svg" in picture.read()


class TestRun:
    def test_options_weights_and_summary(self, call):
        result = call("run", "cog_attention", "--input", "qkv.npz", "--set", "causal=top-left", "--set", "scale=0.5", "--weights", "w.npz",
                      "--backend", "reference")
        assert result.exit_code == 0, result.output
        want = attnspec.cog_attention(q, k, v, causal="top-left", scale=0.5, return_weights=True)
        with np.load("w.npz") as w:
            np.testing.assert_array_equal(w["weights"], want.weights)
        for part in ("cog_attention: reference", "q (2, 5, 4) float64", "2 5 3", "wrote w.npz"):
            assert part in result.output

    def test_arrays_one_by_one_and_options_in_the_file(self, call):
        np.save("v.npy", v)
        np.savez("rest.npz", q=q, k=k, scale=0.25)
        result = call("run", "cog_attention", "--input", "rest.npz", "--arg", "v=v.npy", "--output", "out.npz", "--backend", "reference")
        assert result.exit_code == 0, result.output
        with np.load("out.npz") as out:
            np.testing.assert_array_equal(out["out"], attnspec.cog_attention(q, k, v, scale=0.25))

    def test_safetensors_in_and_out_in_bfloat16(self, call):
        rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in {"q": q, "k": k, "v": v}.items()}
        save_file(rounded, "qkv.safetensors")
        result = call("run", "cog_attention", "--input", "qkv.safetensors", "--output", "out.safetensors", "--backend", "reference")
        assert result.exit_code == 0, result.output
        call("run", "cog_attention", "--input", "qkv.npz", "--dtype", "bfloat16", "--output", "same.npz", "--backend", "reference")
        with np.load("same.npz") as same:
            np.testing.assert_array_equal(same["out"], attnspec.cog_attention(*(x.astype(np.float64) for x in rounded.values())))

    def test_shape_and_seed(self, call):
        result = call("run", "cog_attention", "--shape", "n=3,m=4,d=2,e=5,h=2,b=6", "--seed", "7", "--output", "out.npz",
                      "--backend", "reference")
        assert result.exit_code == 0, result.output
        drawn = attnspec.formulas()["cog_attention"].draw({"n": 3, "m": 4, "d": 2, "e": 5, "h": 2, "b": 6}, 7)
        with np.load("out.npz") as out:
            assert out["out"].shape == (6, 2, 3, 5)
            np.testing.assert_array_equal(out["out"], attnspec.cog_attention(**drawn))

    def test_optional_array_with_drawn_ones(self, call):
        np.save("mask.npy", np.eye(12, dtype=bool))
        result = call("run", "cog_attention", "--arg", "mask=mask.npy", "--output", "out.npz", "--backend", "reference")
        assert result.exit_code == 0, result.output
        drawn = attnspec.formulas()["cog_attention"].draw()
        with np.load("out.npz") as out:
            np.testing.assert_array_equal(out["out"], attnspec.cog_attention(**drawn, mask=np.eye(12, dtype=bool)))

    def test_numbers_among_the_arrays_may_be_set(self, call):
        result = call("run", "sdm_fit_beta", "--set", "n_bits=64", "--set", "radius=5", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["outputs"]["beta"]["value"] == attnspec.sdm_fit_beta(n_bits=64, radius=5).beta

    def test_a_list_for_an_optional_array(self, call):
        result = call("run", "scaled_dot_product_attention", "--shape", "h=2", "--set", "sink=[0.5, -1]", "--output", "out.npz",
                      "--backend", "reference")
        assert result.exit_code == 0, result.output
        drawn = attnspec.formulas()["scaled_dot_product_attention"].draw({"h": 2})
        with np.load("out.npz") as out:
            np.testing.assert_array_equal(out["out"], attnspec.scaled_dot_product_attention(**drawn, sink=[0.5, -1]))

    def test_nonfinite_when_asked(self, call):
        np.savez("inf.npz", q=q, k=k, v=np.where(v > 2, np.inf, v))
        assert call("run", "cog_attention", "--input", "inf.npz", "--allow-nonfinite").exit_code == 0


class TestRefusals:
    def test_names(self, call):
        refused(call("run", "cog"), "formula: no 'cog' here; did you mean 'cog_attention' or 'cog_attention_backward' or 'cog_weights'?")
        refused(call("run", "atention_weigts"), "did you mean 'attention_weights'?")
        refused(call("plott"), "plott")
        refused(call("run", "cog_attention", "--backend", "cuda"), "cuda")
        refused(call("run", "cog_attention", "--set", "casual=true"), "has no parameter 'casual'", "did you mean 'causal'?")
        refused(call("run", "cog_attention", "--set", "causal"), "expected NAME=VALUE")
        refused(call("run", "cog_attention", "--set", "q=1"), "q is an array")
        refused(call("run", "cog_attention", "--set", "scale=1", "--set", "scale=2"), "scale is given twice")
        refused(call("run", "cog_attention", "--set", "causal=sideways"), "causal: expected", "'sideways'")
        refused(call("run", "cog_attention", "--set", "scale=big"), "scale: expected a number, got 'big'")

    def test_sizes(self, call):
        refused(call("run", "cog_attention", "--shape", "x=3"), "no dimension 'x'")
        refused(call("run", "cog_attention", "--shape", "n=-3"), "n=-3")
        refused(call("run", "cog_attention", "--shape", "n=2.5"), "n=2.5")
        refused(call("run", "cog_attention", "--shape", "n=2", "--input", "qkv.npz"), "--shape")
        refused(call("run", "cog_attention", "--seed", "-1"), "--seed")

    def test_too_large_is_estimated_first(self, call):
        refused(call("run", "cog_attention", "--shape", "n=10000000", "--backend", "reference"), "cog_attention would need about",
                "TB of memory", "are free")
        refused(call("run", "tensor_attention", "--shape", "n=20000", "--backend", "reference"), "tensor_attention would need about")

    def test_every_size_counts_in_the_estimate(self, call):
        refused(call("run", "scaled_dot_product_attention", "--shape", "h=1000000000,hk=1000000000"), "would need about")
        refused(call("run", "scaled_dot_product_attention", "--shape", "hk=1000000000"), "would need about")
        refused(call("run", "goat_attention", "--shape", "s=10000000000"), "goat_attention would need about")
        refused(call("run", "cog_attention", "--shape", "n=" + "9" * 5000), "--shape: expected n=WHOLE NUMBER below 10^15, got n=9999")

    @pytest.mark.parametrize("setting, parts", [
        ("bias=[[1,2],[3]]", ("bias: expected an array of numbers, got a ragged list",)),
        ("enable_gqa=abc", ("enable_gqa: expected True or False, got 'abc'",)),
        ("scale=1+2j", ("scale: expected a number, got '1+2j'",)),
        ("scale=1e400", ("scale: expected a finite number, got inf",)),
        ("window=(1000000000000000000000000000000,0)", ("window: expected a whole number <= 2^53",)),
        ("scale=" + "x" * 100000, ("scale: expected a number, got 'xxxx", "...")),
        ("mask=[[1,0]]", ("mask: expected booleans",)),
    ])
    def test_values_of_options(self, call, setting, parts):
        result = call("run", "scaled_dot_product_attention", "--set", setting)
        refused(result, *parts)
        assert len(result.stderr) < 400

    def test_a_dtype_that_cannot_hold_the_numbers(self, call):
        np.savez("large.npz", q=q * 1e6, k=k, v=v)
        refused(call("run", "cog_attention", "--input", "large.npz", "--dtype", "float16"), "q: expected finite numbers")

    def test_shapes(self, call):
        np.savez("flat.npz", q=q[0, 0], k=k, v=v)
        refused(call("run", "cog_attention", "--input", "flat.npz"), "q: expected shape (..., n, d), got (4,)")
        np.savez("short.npz", q=q, k=k, v=v[:, :5])
        refused(call("run", "cog_attention", "--input", "short.npz"), "v: expected shape (..., m, e) with m = 7 as in k, got (2, 5, 3)")
        np.savez("heads.npz", q=np.repeat(q, 2, axis=0), k=k, v=v)
        refused(call("run", "cog_attention", "--input", "heads.npz"), "k: leading axes (2,)", "enable_gqa=True")
        assert call("run", "cog_attention", "--input", "heads.npz", "--set", "enable_gqa=true").exit_code == 0

    def test_keys(self, call):
        np.savez("mask.npz", mask=np.ones((5, 7), bool))
        refused(call("run", "cog_attention", "--input", "mask.npz"), "q: missing", "needs q, k, v, got mask")
        np.savez("less.npz", q=q, k=k)
        refused(call("run", "cog_attention", "--input", "less.npz"), "v: missing", "needs q, k, v, got q, k")
        np.savez("more.npz", q=q, k=k, v=v, values=v)
        refused(call("run", "cog_attention", "--input", "more.npz"), "values: cog_attention has no such array")
        np.save("q.npy", q)
        refused(call("run", "cog_attention", "--input", "qkv.npz", "--arg", "q=q.npy"), "q is in qkv.npz too")

    def test_values(self, call):
        np.savez("nan.npz", q=q, k=np.where(k > 1, np.nan, k), v=v)
        refused(call("run", "cog_attention", "--input", "nan.npz"), "k: expected finite numbers", "--allow-nonfinite")
        np.savez("text.npz", q=q.astype(str), k=k, v=v)
        refused(call("run", "cog_attention", "--input", "text.npz"), "q: expected real numbers, got dtype <U")
        np.savez("bf16.npz", q=q.astype(ml_dtypes.bfloat16), k=k, v=v)
        refused(call("run", "cog_attention", "--input", "bf16.npz"), "q: expected real numbers, got dtype |V2", ".safetensors can")
        np.savez("complex.npz", q=q + 1j, k=k, v=v)
        refused(call("run", "cog_attention", "--input", "complex.npz"), "q: expected real numbers, got dtype complex128")

    def test_files(self, call, tmp_path):
        refused(call("run", "cog_attention", "--input", "none.npz"), "no file none.npz")
        refused(call("run", "cog_attention", "--input", "qkv.txt"), "expected a .npz or .safetensors file")
        whole = (tmp_path / "qkv.npz").read_bytes()
        for length in (0, 10, len(whole) // 2, len(whole) - 10):
            (tmp_path / "cut.npz").write_bytes(whole[:length])
            refused(call("run", "cog_attention", "--input", "cut.npz"), "cut.npz")
        broken = bytearray(whole)
        broken[200] ^= 0xFF
        (tmp_path / "broken.npz").write_bytes(bytes(broken))
        refused(call("run", "cog_attention", "--input", "broken.npz"), "broken.npz")
        (tmp_path / "cut.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")
        refused(call("run", "cog_attention", "--input", "cut.safetensors"), "cut.safetensors")

    def test_files_that_are_no_files(self, call, tmp_path):
        np.savez("empty.npz")
        refused(call("run", "cog_attention", "--input", "empty.npz"), "empty.npz holds no arrays")
        (tmp_path / "folder.npz").mkdir()
        refused(call("run", "cog_attention", "--input", "folder.npz"), "folder.npz is not a regular file")
        refused(call("run", "cog_attention", "--input", "x" * 300 + ".npz"), "--input: cannot read", "too long")
        refused(call("run", "cog_attention", "--output", "x" * 300 + ".npz"), "--output: cannot write", "too long")

    def test_nothing_is_unpickled(self, call, tmp_path):
        class Trap:
            def __reduce__(self):
                return (open, (str(tmp_path / "sprung"), "w"))

        objects = np.empty((2, 5, 4), object)
        objects[...] = Trap()
        np.savez("objects.npz", q=objects, k=k, v=v)
        refused(call("run", "cog_attention", "--input", "objects.npz"), "q holds pickled Python objects, which are never loaded")
        np.save("objects.npy", objects)
        refused(call("run", "cog_attention", "--arg", "q=objects.npy"), "never loaded")
        objects.dump("pickle.npy")
        refused(call("run", "cog_attention", "--arg", "q=pickle.npy"), "pickle.npy")
        assert not (tmp_path / "sprung").exists()

    def test_a_header_that_promises_too_much(self, call, tmp_path):
        np.save("q.npy", q)
        raw = (tmp_path / "q.npy").read_bytes().replace(b"(2, 5, 4), }  ", b"(2000, 5, 4)}")
        (tmp_path / "q.npy").write_bytes(raw)
        refused(call("run", "cog_attention", "--arg", "q=q.npy"), "q.npy")


class TestWriting:
    def test_nothing_is_overwritten_unasked(self, call, tmp_path):
        (tmp_path / "out.npz").write_text("precious")
        refused(call("run", "cog_attention", "--output", "out.npz"), "out.npz exists; --force overwrites it")
        assert (tmp_path / "out.npz").read_text() == "precious"
        assert call("run", "cog_attention", "--output", "out.npz", "--force").exit_code == 0
        with np.load("out.npz") as out:
            assert out["out"].shape == (12, 8)

    def test_a_link_to_nowhere_is_not_overwritten_either(self, call, tmp_path):
        (tmp_path / "link.npz").symlink_to("nowhere.npz")
        refused(call("run", "cog_attention", "--output", "link.npz"), "link.npz exists")
        assert (tmp_path / "link.npz").is_symlink()

    def test_targets_that_cannot_be(self, call):
        refused(call("run", "cog_attention", "--output", "nowhere/out.npz"), "no folder nowhere")
        refused(call("run", "cog_attention", "--output", "out.txt"), "expected a name ending in .npz or .safetensors")
        refused(call("run", "cog_attention", "--plot", "map.gif"), ".png")
        refused(call("run", "cog_attention", "--output", "a.npz", "--weights", "a.npz"), "already another output")
        refused(call("run", "cog_attention", "--input", "qkv.npz", "--output", "qkv.npz", "--force"), "is an input of this run")

    def test_a_failed_run_leaves_nothing(self, call, tmp_path, monkeypatch):
        before = sorted(path.name for path in tmp_path.iterdir())
        refused(call("run", "cog_attention", "--output", "out.npz", "--set", "scale=big"))
        def fail(*args, **kwargs):
            raise OSError(28, "No space left on device")
        monkeypatch.setattr("attnspec.plotting.draw", fail)
        refused(call("run", "cog_attention", "--output", "out.npz", "--plot", "map.png"), "cannot write", "No space left")
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    def test_weights_that_do_not_exist(self, call):
        refused(call("run", "cog_weights", "--weights", "w.npz"), "cog_weights has no weight matrix")


class TestPlotAndVerify:
    def test_several_side_by_side(self, call):
        names = ("scaled_dot_product_attention", "cog_attention")
        result = call("plot", *names, "--set", "causal=true", "--shape", "n=6", "--output", "maps.png")
        assert result.exit_code == 0, result.output
        assert result.output == "wrote maps.png, 2 panels\n"
        refused(call("plot", "cog_attention", "--set", "casual=1", "--output", "m.png"), "'casual'", "did you mean 'causal'?")
        refused(call("plot", "cog_attention", "--output", "maps.png"), "maps.png exists")

    def test_verify_as_json(self, call):
        data = json.loads(call("verify", "cog_attention", "--json").stdout)
        assert {row["kind"] for row in data["checks"]} == {"golden", "identity"}
        assert all(row["passed"] for row in data["checks"])

    def test_a_failure_is_shown_and_is_status_1(self, call, monkeypatch):
        monkeypatch.setattr(attnspec.reference, "cog_attention", lambda q, k, v, **options: attnspec.scaled_dot_product_attention(q, k, v))
        result = call("verify", "cog_attention")
        assert result.exit_code == 1
        assert re.search(r"FAILED cog_attention, (identity|golden) .*: error inf", result.output)

    def test_a_backend_that_is_not_here(self, call, monkeypatch):
        monkeypatch.setitem(BACKENDS, "mlx", Backend("mlx", "attnspec.reference", "no_such_library", "pip install mlx"))
        refused(call("verify", "--backend", "mlx"), "mlx", "pip install mlx")
