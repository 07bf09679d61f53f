"""attnspec bench: time the kernels beside what people use today."""

import json
import sys
from typing import Any

import click

from attnspec.cli.arguments import parse_sizes
from attnspec.cli.files import refusing
from attnspec.dispatch import BACKENDS, record_of, select


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--backend", type=click.Choice(list(BACKENDS)), default="numba", show_default=True, help="Which backend to time.")
@click.option("--shape", metavar="n=512,d=64,...", help="Time the NAMEs beside the reference at these sizes.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True, help="Of the drawn arrays.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Threads for every contestant.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True,
              help="How often each contestant runs, in turn; slow ones less.")
@click.option("--memory/--no-memory", default=None, help="Measure memory and first calls too (by default only without NAMEs).")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--markdown", is_flag=True, help="Print as Markdown, for docs/benchmarks.md.")
def bench(
    names: tuple[str, ...], backend: str, shape: str | None, dtype: str, threads: int, rounds: int, memory: bool | None, as_json: bool,
    markdown: bool,
) -> None:
    """Time formulas on a backend.

    Each NAME, or the whole table: our kernels beside PyTorch's (where it is installed) and NumPy's way, on the same arrays, in turn.
    A formula without a workload in the table is timed beside the reference. Ratios are of medians: above 1 ours is faster.

    \b
    attnspec bench                                       the table; some 15 minutes on two cores
    attnspec bench cog_attention
    attnspec bench sdm_attention --shape n=256,m=512     beside the reference
    """
    from rich.console import Console
    from rich.progress import Progress

    from attnspec.bench import describe_machine, measure

    with refusing():
        for name in names:
            record_of(name)
            select(name, backend, dtype=dtype)
        reason = BACKENDS[backend].missing()
        if reason is not None:
            raise ValueError(f"--backend: {backend} is not here: {reason}")
        if shape is not None and not names:
            raise ValueError("--shape: expected a NAME to time at these sizes")
        chosen = choose(names, backend, parse_sizes(shape), dtype)
    machine = describe_machine(threads)
    rows, growths, starts = [], [], []
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        for work in progress.track(chosen, description="timing"):
            rows += list(measure(work, rounds, threads, machine.sgemm))
        if backend == "numba" and (memory or (memory is None and not names)):
            from attnspec.bench.memory import WATCHED, first_results, memory_growth

            growths = [memory_growth(label, threads) for label in progress.track(list(WATCHED), description="memory")]
            firsts = ("scaled_dot_product_attention", "cog_attention", "sinkhorn_attention")
            starts = [first_results(name) for name in progress.track(firsts, description="first calls")]
    if as_json:
        click.echo(json.dumps(as_data(machine, rows, growths, starts), indent=2))
    elif markdown:
        click.echo(as_markdown(machine, rows, growths, starts))
    else:
        show_tables(machine, rows, growths, starts)


def choose(names: tuple[str, ...], backend: str, sizes: dict[str, int], dtype: str) -> list[Any]:
    """The workloads of the table, or those of the names; beside the reference where there are none, or at sizes of one's own."""
    from attnspec.bench import general_workload, mlx_workloads, workloads

    table = workloads() if backend == "numba" else mlx_workloads() if backend == "mlx" else []
    if not names:
        if not table:
            raise ValueError(f"--backend: the table has workloads for numba and mlx only; give the NAMEs to time on {backend}")
        return table
    chosen = []
    for name in names:
        found = [work for work in table if work.formula == name] if not sizes and dtype == "float32" else []
        chosen += found or [general_workload(record_of(name), backend, sizes, dtype)]
    return chosen


HEADS = ("work", "ours", "peer", "its time", "ratio", "asked", "of limit")


def cells(row: Any) -> tuple[str, ...]:
    """One row as text: milliseconds, how many times faster ours is, what was asked for, and the share of the physical limit."""
    return (
        row.work, milliseconds(row.ours.median), row.peer, milliseconds(row.other.median) if row.other else row.missing,
        "" if row.ratio is None else f"{row.ratio:.2f}", "" if row.reach is None else f"{row.reach:.2f}",
        "" if row.limit is None else f"{row.limit / row.ours.median:.0%}",
    )


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


NOTE = ("ours, its time: medians; ratio: its time / ours; asked: the ratio to reach; of limit: the time of the matrix products alone, at "
        "the measured sgemm rate, over ours")


def memory_cells(one: Any) -> tuple[str, ...]:
    return one.work, f"{one.growth / 1e6:.0f} MB", f"{one.dense / 1e6:.0f} MB", milliseconds(one.seconds)


def start_cells(one: Any) -> tuple[str, ...]:
    return one.formula, f"{one.compiling:.1f} s", f"{one.cached:.2f} s", f"{one.command:.2f} s"


def tables_of(rows: list[Any], growths: list[Any], starts: list[Any]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """(title, heads, lines) of each table that has lines."""
    tables = [
        ("Time", HEADS, [cells(row) for row in rows]),
        ("Memory beyond inputs and outputs, one head, n = m = 32768, d = 64, float32", ("work", "growth", "dense weights", "time"),
         [memory_cells(one) for one in growths]),
        ("From the start of Python to the first result", ("formula", "compiling", "compiled before", "attnspec run"),
         [start_cells(one) for one in starts]),
    ]
    return [table for table in tables if table[2]]


def show_tables(machine: Any, rows: list[Any], growths: list[Any], starts: list[Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(str(machine), highlight=False, markup=False)
    for title, heads, lines in tables_of(rows, growths, starts):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for i, head in enumerate(heads):
            table.add_column(head, justify="left" if i == 0 or head == "peer" else "right", no_wrap=head not in ("work", "peer"))
        for line in lines:
            table.add_row(*line)
        console.print(table)
    console.print(NOTE, highlight=False, markup=False)


def as_markdown(machine: Any, rows: list[Any], growths: list[Any], starts: list[Any]) -> str:
    parts = [f"Measured on {machine}.", f"{NOTE[0].upper()}{NOTE[1:]}."]
    for title, heads, lines in tables_of(rows, growths, starts):
        rule = ["---" if head in ("work", "peer", "formula") else "---:" for head in heads]
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *lines]))
    return "\n\n".join(parts)


def as_data(machine: Any, rows: list[Any], growths: list[Any], starts: list[Any]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "machine": asdict(machine),
        "time": [{**asdict(row), "ratio": row.ratio} for row in rows],
        "memory": [asdict(one) for one in growths],
        "first calls": [asdict(one) for one in starts],
    }
