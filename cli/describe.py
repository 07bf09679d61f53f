"""attnspec list, show and doctor: what there is, what it means, what works here."""

import importlib.metadata
import inspect
import json
import os
import platform
import re
import sys
from typing import Any

import click

from attnspec.cli.files import refusing
from attnspec.dispatch import BACKENDS, backends, formulas, record_of
from attnspec.reference.formula import Formula
from attnspec.reference.inputs import parse_shape

ONE = {"real": "a number", "int": "a whole number", "bool": "True or False", "bits": "0 or 1", "spins": "-1 or +1"}


def backends_of(record: Formula) -> list[str]:
    """The backends here that have this formula."""
    return [b.name for b in BACKENDS.values() if b.missing() is None and b.has(record.name)]


def as_data(record: Formula) -> dict[str, Any]:
    """The record as plain data."""
    return {
        "name": record.name,
        "family": record.family,
        "equation": record.equation,
        "latex": record.latex,
        "source": record.source,
        "status": record.status,
        "arrays": {name: record.shapes[name] for name in record.arrays},
        "required": list(record.required),
        "outputs": {name: record.shapes[name] for name in record.outputs},
        "options": record.options,
        "bound": record.bound,
        "kinks": record.kinks,
        "backends": backends_of(record),
    }


@click.command("list")
@click.option("--family", metavar="FAMILY", help="Only this family.")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
@click.option("--markdown", is_flag=True, help="Print the table of the README.")
def list_command(family: str | None, as_json: bool, markdown: bool) -> None:
    """List the formulas: name, family, backends, source."""
    with refusing("--"):
        records = formulas(family)
    if as_json:
        click.echo(json.dumps([as_data(record) for record in records.values()], indent=2, default=str))
        return
    if markdown:
        click.echo("| formula | family | equation | source | known by |\n|---|---|---|---|---|")
        for record in records.values():
            equation = record.equation.replace("|", "\\|")
            click.echo(f"| `{record.name}` | {record.family} | `{equation}` | {record.source} | {record.status} |")
        return
    rows = [("formula", "family", "backends", "source")]
    rows += [(record.name, record.family, ", ".join(backends_of(record)), short_source(record.source)) for record in records.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        click.echo("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]]))


def short_source(source: str) -> str:
    """The paper of a source without its equations and sections; `show` prints it whole."""
    paper = re.match(r"arXiv:[\d.]+\d", source)
    return paper[0] if paper else source.partition(";")[0]


@click.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def show(name: str, as_json: bool) -> None:
    """Show one formula as a page.

    Its equation, shapes, parameters, source, conventions, identities and the wrong versions met elsewhere.
    """
    from attnspec.conformance.identities import identities
    from attnspec.golden import golden_cases

    with refusing():
        record = record_of(name)
    facts = {"identities": [one.text for one in identities(name)], "golden": [case.name for case in golden_cases(name)]}
    if as_json:
        page = {**as_data(record), **facts, "page": record.page, "docstring": record.function.__doc__}
        click.echo(json.dumps(page, indent=2, default=str))
        return
    click.echo(f"{name}   ({record.family}; {record.status})\n")
    click.echo(f"    {record.equation}\n")
    click.echo(f"{name}{inspect.signature(record.function)}\n")
    for name, text in record.shapes.items():
        shape = parse_shape(text)
        kind = {"real": "", "int": " of whole numbers", "bool": " of booleans", "bits": " of 0 and 1", "spins": " of -1 and +1"}[shape.kind]
        loose = " (broadcastable)" if any(optional for _, optional in shape.dims) else ""
        number = not shape.dims and not shape.leading
        role = "returns" if name in record.outputs else "number" if number else "array" if name in record.required else "optional array"
        click.echo(f"    {role:15} {name:15} {ONE[shape.kind] if number else f'{shape}{kind}{loose}'}")
    for name, default in record.options.items():
        click.echo(f"    {'option':15} {name:15} default {default!r}")
    click.echo(f"\n{inspect.getdoc(record.function)}\n")
    click.echo("-" * 72)
    click.echo(record.page)
    click.echo("-" * 72)
    click.echo("Identities that `attnspec verify` checks:")
    for text in facts["identities"]:
        click.echo(f"  - {text}")
    click.echo(f"Golden vectors: {', '.join(facts['golden']) or 'none'}")
    click.echo(f"Backends here: {', '.join(backends_of(record))}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def doctor(as_json: bool) -> None:
    """Say what works here, and what is missing.

    Versions, backends, threads, BLAS, and how to get what is not there.
    """
    import psutil
    from threadpoolctl import threadpool_info

    packages = ("attnspec", "numpy", "scipy", "numba", "mlx", "matplotlib", "ml_dtypes", "safetensors")
    pools = threadpool_info()
    report: dict[str, Any] = {
        "python": sys.version.split()[0],
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} logical cores, "
                   f"{psutil.virtual_memory().total / 1e9:.1f} GB of memory, {psutil.virtual_memory().available / 1e9:.1f} GB free",
        "packages": {name: version(name) for name in packages},
        "backends": {name: reason or f"ready, {sum(map(BACKENDS[name].has, formulas()))} formulas"
                     for name, reason in backends().items()},
        "blas": [f"{pool['internal_api']} {pool.get('version') or ''}, {pool['num_threads']} threads, {pool.get('architecture', '')}"
                 for pool in pools if pool["user_api"] == "blas"],
        "threads": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")},
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for key, value in report.items():
        if isinstance(value, str):
            click.echo(f"{key:10} {value}")
            continue
        absent = "not set" if key == "threads" else "not installed"
        lines = value if isinstance(value, list) else [f"{name:22} {text or absent}" for name, text in value.items()]
        for i, line in enumerate(lines or ["none found"]):
            click.echo(f"{key if i == 0 else '':10} {line}")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
