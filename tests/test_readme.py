"""The README says what is true: its table is the records', its commands are those that continuous integration runs."""

import re
from pathlib import Path

from click.testing import CliRunner

import attnspec
from attnspec.cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_formulas_is_up_to_date():
    table = CliRunner().invoke(main, ["list", "--markdown"]).stdout
    assert table in README, "put the output of `attnspec list --markdown` into the README"


def test_the_examples_in_python_run():
    scope: dict = {"my_kernel": attnspec.cog_attention}
    for code in re.findall(r"```python\n(.*?)```", README, flags=re.S):
        exec(code, scope)
    assert scope["A"].shape == (4, 128, 128)
    assert scope["limit"].shape == scope["mine"].shape


def test_there_are_two_commands():
    assert len(re.findall(r"^    python3 -m venv", README, flags=re.M)) == 2


def test_pictures_and_links_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
