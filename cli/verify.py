"""attnspec verify: check formulas on a backend."""

import json
import math
import sys
from typing import Any

import click

from attnspec.cli.files import refusing
from attnspec.dispatch import BACKENDS, formulas, record_of, select


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--backend", type=click.Choice(list(BACKENDS)), default="reference", show_default=True, help="Which backend to check.")
@click.option("--json", "as_json", is_flag=True, help="Print every check as JSON.")
def verify(names: tuple[str, ...], backend: str, as_json: bool) -> None:
    """Check formulas on a backend.

    Each NAME, or every formula that the backend has.

    The reference is checked against golden vectors and identities, a twin against the reference with the error bound of its formula.
    err/bound is the largest error in units of what it may be; the exit status is 1 where it exceeds 1.
    """
    from rich.console import Console
    from rich.progress import Progress

    from attnspec.conformance import Check
    from attnspec.conformance import verify as checks_of

    with refusing():
        for name in names:
            record_of(name)
            select(name, backend)
        reason = BACKENDS[backend].missing()
        if reason is not None:
            raise ValueError(f"--backend: {backend} is not here: {reason}")
        chosen = names or [name for name in formulas() if BACKENDS[backend].has(name)]
    found: dict[str, list[Check]] = {}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        for name in progress.track(chosen, description="checking"):
            found[name] = list(checks_of(name, backend))
    if as_json:
        rows = [as_row(check) for checks in found.values() for check in checks]
        click.echo(json.dumps({"backend": backend, "checks": rows}, indent=2))
    else:
        show_table(found, backend)
    failed = any(not check.passed and check.skipped is None for checks in found.values() for check in checks)
    empty = [name for name, checks in found.items() if not any(check.skipped is None for check in checks)]
    for name in empty:
        click.echo(f"attnspec: {name}: nothing was checked", err=True)
    sys.exit(1 if failed or empty else 0)


def as_row(check: Any) -> dict[str, Any]:
    numbers = {"error": check.error, "bound": check.bound, "ratio": check.ratio}
    return {"formula": check.formula, "kind": check.kind, "case": check.case, "passed": check.passed,
            "skipped": check.skipped, "note": check.note,
            **{key: value if math.isfinite(value) else str(value) for key, value in numbers.items()}}


def show_table(found: dict[str, list[Any]], backend: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    kinds = [kind for kind in ("golden", "identity", "bound") if any(check.kind == kind for checks in found.values() for check in checks)]
    table = Table(title=f"verify: {backend}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("formula", no_wrap=True)
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("err/bound", justify="right")
    table.add_column("")
    for name, checks in found.items():
        judged = [check for check in checks if check.skipped is None]
        counts = []
        for kind in kinds:
            of_kind = [check for check in judged if check.kind == kind]
            passed = sum(check.passed for check in of_kind)
            counts.append(f"{passed}/{len(of_kind)}" if of_kind else "-")
        ratio = max((check.ratio for check in judged), default=math.nan)
        skipped = len(checks) - len(judged)
        verdict = "[bold red]FAILED[/]" if any(not check.passed for check in judged) else "ok" if judged else "not checked"
        table.add_row(name, *counts, f"{ratio:.2g}", verdict + (f", {skipped} not judged" if skipped else ""))
    console.print(table)
    judged = [check for checks in found.values() for check in checks if check.skipped is None]
    passed = sum(check.passed for check in judged)
    console.print(f"{passed} of {len(judged)} checks passed; err/bound is the largest error in units of what it may be", highlight=False)
    for checks in found.values():
        for check in checks:
            if check.skipped is None and not check.passed:
                console.print(f"FAILED {check.formula}, {check.kind} {check.case}: error {check.error:.3g}, allowed {check.bound:.3g}"
                              + (f" ({check.note})" if check.note else ""), highlight=False, markup=False)
    reasons = {(name, check.skipped) for name, checks in found.items() for check in checks if check.skipped}
    for name, reason in sorted(reasons):
        console.print(f"not judged: {name}: {reason}", highlight=False, markup=False)
