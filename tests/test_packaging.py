"""The package as it is installed: every folder listed, one copy of every module, a wheel that works on its own."""

import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS = {name: ROOT / folder for name, folder in CONFIG["package-dir"].items()}


def test_every_folder_with_python_files_is_listed():
    found = set()
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            inside = path.parent.relative_to(folder).parts
            if "__pycache__" not in inside:
                found.add(".".join((package, *inside)))
    assert found == set(CONFIG["packages"])
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} of {package} has no __init__.py"


def test_modules_are_loaded_once():
    code = "import sys, attnspec, attnspec.cli.main; attnspec.formulas(); print([m for m in ('reference', 'cli') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_nothing_heavy_is_imported_for_a_list():
    code = ("import sys\nfrom attnspec.cli.main import main\ntry:\n    main(['list'])\nexcept SystemExit:\n    pass\n"
            "print([m for m in ('scipy.stats', 'matplotlib', 'numba', 'mlx', 'torch', 'psutil', 'safetensors') if m in sys.modules])")
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip().splitlines()[-1] == "[]"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built from a source distribution as a publisher would."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"                                         # a copy: building leaves files behind, and old ones come back
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__"))
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source], check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def test_a_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True, system_site_packages=False)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True, capture_output=True)
    # the dependencies are this environment's: what is tried is the wheel, not the package index
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (next((tmp_path / "env").glob("lib/python*/site-packages")) / "dependencies.pth").write_text(here + "\n", encoding="utf-8")
    code = ("import attnspec, attnspec.reference\nfrom attnspec.golden import golden_cases\n"
            "assert all(golden_cases(name) for name in ('cog_attention', 'scaled_dot_product_attention'))\n"
            "from importlib import resources\n"
            "assert 'threadgroup' in resources.files('attnspec.mlx_backend.softmax').joinpath('tiles.metal').read_text()\n"
            "print(attnspec.__file__)")
    shown = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(tmp_path) in shown.stdout
    shown = subprocess.run([tmp_path / "env" / "bin" / "attnspec", "verify", "cog_attention"], cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "ok" in shown.stdout
