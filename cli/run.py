"""attnspec run: compute a formula on the user's arrays, or on drawn ones."""

import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from attnspec.cli.arguments import check_workspace, gather, largest_array, with_inputs
from attnspec.cli.files import Targets, refusing
from attnspec.dispatch import BACKENDS, Selection, as_numpy, record_of, select
from attnspec.plotting import weight_dims
from attnspec.reference.formula import Formula

ARRAYS = (".npz", ".safetensors")
MANY = 2**22               # weights that a twin is not asked for just to summarise them
PICTURES = (".png", ".pdf", ".svg")


@click.command()
@click.argument("name")
@with_inputs
@click.option("--backend", type=click.Choice(["auto", *BACKENDS]), default="auto", show_default=True, help="Where to compute.")
@click.option("--output", type=click.Path(path_type=Path), metavar="OUT.npz", help="Write every output, by name.")
@click.option("--weights", type=click.Path(path_type=Path), metavar="W.npz", help="Write the weight matrix.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="MAP.png", help="Draw the weights (or the output) as heat maps.")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def run(
    name: str, backend: str, output: Path | None, weights: Path | None, plot: Path | None, force: bool, as_json: bool, **given: Any,
) -> None:
    """Compute the formula NAME.

    \b
    attnspec run cog_attention --input qkv.npz --set causal=true --output out.npz
    attnspec run sinkhorn_attention --shape n=64,d=16,h=2 --set n_iters=5 --plot map.png
    """
    with refusing():
        record = record_of(name)
    if given["dtype"] is None and given["input_path"] is None:
        given["dtype"] = dtype_of_draws(name, backend)
    arrays, options, files = gather(record, **given)
    targets = Targets(force)
    targets.check("--output", output, ARRAYS, files)
    targets.check("--weights", weights, ARRAYS, files)
    targets.check("--plot", plot, PICTURES, files)
    has_weights = "return_weights" in record.options
    with refusing():
        if weights is not None and not has_weights:
            raise ValueError(f"--weights: {name} has no weight matrix to return")
        selection, options = choose(record, backend, arrays, options, needs_weights=weights is not None or plot is not None)
    check_workspace(record, arrays, selection.backend, options.get("return_weights", False))

    start = time.perf_counter()
    with refusing():
        result = selection.function(**arrays, **options)
        fields = named_outputs(record, result)
    elapsed = time.perf_counter() - start

    if output is not None:
        targets.put_arrays(output, {key: value for key, value in fields.items() if key != "weights" or "weights" in record.outputs})
    if weights is not None:
        targets.put_arrays(weights, {"weights": fields["weights"]})
    if plot is not None:
        from attnspec import plotting

        panels = plotting.panels_of(record, arrays, result)
        targets.put(plot, lambda file: plotting.draw(panels, file, plot.suffix.lower().removeprefix(".")))
    targets.commit()

    summary = {
        "formula": name,
        "backend": selection.backend,
        "why": list(selection.why),
        "seconds": elapsed,
        "options": {key: value for key, value in options.items() if key != "return_weights"},
        "inputs": {key: {"shape": list(np.shape(value)), "dtype": str(np.asarray(value).dtype)} for key, value in arrays.items()},
        "outputs": {key: describe(value, key_axes_of(record, key)) for key, value in fields.items()},
        "written": [str(path) for path in (output, weights, plot) if path is not None],
    }
    if as_json:
        click.echo(json.dumps(summary, indent=2, default=str, allow_nan=True))
    else:
        show_summary(summary)


def dtype_of_draws(name: str, backend: str) -> str | None:
    """float32 for a backend that takes no float64, else None, which leaves drawn arrays as they are."""
    named = BACKENDS.get(backend)
    function = None if named is None or named.missing() is not None else named.function(name)
    limits = getattr(function, "limits", None)
    return None if limits is None or "float64" in limits.dtypes else "float32"


def choose(
    record: Formula, backend: str, arrays: dict[str, Any], options: dict[str, Any], needs_weights: bool,
) -> tuple[Selection, dict[str, Any]]:
    """The backend for this call, asked for its weights where they are needed, or where it gives them without much ado."""
    dtype = next((str(np.asarray(array).dtype) for array in arrays.values() if np.asarray(array).dtype.kind in "fV"), None)
    request = {**options, **{key: arrays[key] for key in arrays if key not in record.required}}
    if "return_weights" not in record.options:
        return select(record.name, backend, options=request, dtype=dtype), options
    asked = {**request, "return_weights": True}
    selection = select(record.name, backend, options=asked if needs_weights else request, dtype=dtype)
    limits = getattr(selection.function, "limits", None)
    small = selection.backend == "reference" or largest_array(record, arrays) <= MANY
    if needs_weights or (small and (limits is None or "return_weights" not in limits.lacks)):
        options = {**options, "return_weights": True}
    return selection, options


def named_outputs(record: Formula, result: Any) -> dict[str, np.ndarray]:
    """A result's arrays by name."""
    if not isinstance(result, tuple):
        return {record.outputs[0]: as_numpy(result)}
    fields = result._asdict() if hasattr(result, "_asdict") else dict(zip(record.outputs, result, strict=True))
    return {key: as_numpy(value) for key, value in fields.items() if value is not None}


def describe(array: np.ndarray, key_axes: int) -> dict[str, Any]:
    """Shape, dtype and a few numbers of an array; the range of its row sums where its last `key_axes` axes are over keys."""
    numbers = array.astype(np.float64)
    facts: dict[str, Any] = {"shape": list(array.shape), "dtype": str(array.dtype)}
    if array.size == 1:
        facts["value"] = numbers.item()
    elif array.size:
        top = np.max(np.abs(numbers), initial=0.0) or 1.0              # taken out, so that no square overflows
        norm = top * np.sqrt(np.sum((numbers / top) ** 2)) if np.isfinite(top) else top
        facts |= {"norm": float(norm), "min": float(numbers.min()), "max": float(numbers.max())}
        if key_axes and array.ndim > key_axes:
            sums = numbers.sum(axis=tuple(range(-key_axes, 0)))
            facts["row sums"] = [float(sums.min()), float(sums.max())]
    return facts


def key_axes_of(record: Formula, name: str) -> int:
    """How many of an output's last axes are over keys: one for weights and plans, one for each member of a tuple of keys."""
    dims = record.shapes.get(name, weight_dims(record) if name == "weights" else "").split()
    keys = [dim for dim in dims if dim.rstrip("0123456789") == "m"]
    return len(keys) if "n" in dims and dims[-1:] == keys[-1:] else 0


def show_summary(summary: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{summary['formula']}: {summary['backend']}, {1e3 * summary['seconds']:.1f} ms", highlight=False, markup=False)
    inputs = [f"{name} ({', '.join(map(str, facts['shape']))}) {facts['dtype']}" for name, facts in summary["inputs"].items()]
    console.print(f"inputs: {'; '.join(inputs)}", highlight=False, markup=False)
    facts_of = summary["outputs"]
    columns = [fact for fact in ("value", "norm", "min", "max", "row sums") if any(fact in facts for facts in facts_of.values())]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("output", "shape", "dtype", *columns):
        table.add_column(column, justify="right" if column in columns else "left", no_wrap=column in columns)
    for name, facts in facts_of.items():
        shown = [facts[fact] if isinstance(facts.get(fact), list) else [facts[fact]] if fact in facts else [] for fact in columns]
        cells = [" .. ".join(dict.fromkeys(f"{number:.{10 if fact == 'value' else 5}g}" for number in numbers))
                 for fact, numbers in zip(columns, shown, strict=True)]
        table.add_row(name, " ".join(map(str, facts["shape"])) or "number", facts["dtype"], *cells)
    console.print(table)
    for path in summary["written"]:
        console.print(f"wrote {path}", highlight=False, markup=False)
