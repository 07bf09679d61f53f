"""How the golden files were made from the collected outputs: which output is which argument, under which options.

    @packs("cog_attention__CogAttn__*", formula="cog_attention", source="trestad/CogAttn @efecf29", edits="RoPE replaced by the identity")
    def _(z, case):
        return GoldenCase(args=..., options=..., expect=...)

`python -m attnspec.golden.pack FOLDER` reads FOLDER/*.npz and writes the packed files and PROVENANCE.md beside this package.
"""

from collections.abc import Callable
from typing import NamedTuple


class Packer(NamedTuple):
    pattern: str
    formula: str
    source: str
    edits: str
    convert: Callable


PACKERS: list[Packer] = []


def packs(pattern: str, *, formula: str, source: str, edits: str = "none"):
    """Register how files that match `pattern` (without .npz) become cases of `formula`: one GoldenCase or a {suffix: GoldenCase}."""

    def register(convert):
        PACKERS.append(Packer(pattern, formula, source, edits, convert))
        return convert

    return register
