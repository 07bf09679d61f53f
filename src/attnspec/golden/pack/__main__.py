"""python -m attnspec.golden.pack FOLDER [FAMILY ...]: pack FOLDER/*.npz into the golden files of the package.

PROVENANCE.md is written anew when all families are packed.
"""

import fnmatch
import importlib
import pathlib
import sys

import numpy as np

from attnspec.golden import GoldenCase, save
from attnspec.golden.pack import PACKERS
from attnspec.reference import FAMILIES

HEAD = """# Where the golden vectors come from

Each row is one case: what computed it, and what was changed in that code to run it in float64. `python -m attnspec.golden.pack FOLDER`
wrote the files and this page; src/attnspec/golden/pack says how each output became an argument or an expectation.
"tol" bounds the error relative to the larger of 1 and the expected value.

| formula | case | computed by | edits | tol |
|---|---|---|---|---|
"""


def main(folder: str, *families: str) -> None:
    target = pathlib.Path(__file__).parents[1]
    for family in families or FAMILIES:
        importlib.import_module(f"attnspec.golden.pack.{family}")
    packed: dict[str, list[GoldenCase]] = {}
    rows = []
    for packer in PACKERS:
        for path in sorted(pathlib.Path(folder).glob("*.npz")):
            if not fnmatch.fnmatchcase(path.stem, packer.pattern):
                continue
            short = "__".join(path.stem.split("__")[1:])
            with np.load(path, allow_pickle=False) as z:
                made = packer.convert(z, short)
            for suffix, case in (made if isinstance(made, dict) else {"": made}).items():
                case.formula, case.name = packer.formula, short + suffix
                packed.setdefault(packer.formula, []).append(case)
                rows.append(f"| {packer.formula} | {case.name} | {packer.source} | {packer.edits} | {case.tol:g} |\n")
    for name, cases in packed.items():
        save(target / f"{name}.npz", cases)
    if not families:
        (target / "PROVENANCE.md").write_text(HEAD + "".join(sorted(rows)), encoding="utf-8")
    print(f"{len(rows)} cases of {len(packed)} formulas")


if __name__ == "__main__":
    main(*sys.argv[1:])
