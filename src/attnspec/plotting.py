"""Pictures of what a formula does: weight matrices as heat maps, curves for what has one axis.

Colours can be told apart by the colour-blind: cividis where nothing is negative, the diverging PuOr around 0 for signed weights.
"""

import math
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import numpy as np

MOST_PANELS = 8


class Panel(NamedTuple):
    """One picture: a matrix, or a curve where `values` has one axis."""

    title: str
    values: np.ndarray
    rows: str = "query"
    columns: str = "key"


def panels_of(title: str, values: Any, rows: str = "query", columns: str = "key") -> list[Panel]:
    """`values` (..., n, m) as one panel for each leading index, at most 8; values with fewer axes as one curve."""
    values = np.asarray(values, dtype=float)
    if values.ndim <= 2:
        return [Panel(title, values, rows, columns)]
    indices = list(np.ndindex(values.shape[:-2]))
    return [Panel(f"{title} [{', '.join(map(str, index))}]", values[index], rows, columns) for index in indices[:MOST_PANELS]]


def draw(panels: list[Panel], target: IO[bytes], kind: str) -> None:
    """Draw the panels side by side into `target` as a picture of that kind (png, pdf, svg). Matrices share one colour scale."""
    from matplotlib.figure import Figure

    columns = min(len(panels), 4)
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns + 1.2, 3.5 * lines + 0.3), layout="constrained")
    matrices = [panel.values for panel in panels if panel.values.ndim == 2 and panel.values.size]
    low = min((float(np.nanmin(m)) for m in matrices), default=0.0)
    high = max((float(np.nanmax(m)) for m in matrices), default=1.0)
    signed = low < 0
    if signed:
        high = max(high, -low)
    colours: dict[str, Any] = {
        "cmap": "PuOr" if signed else "cividis", "interpolation": "nearest", "vmin": -high if signed else 0.0, "vmax": high or 1.0,
    }
    image, mapped = None, []
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(lines, columns, place)
        axes.set_title(panel.title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.set_xlabel(panel.columns, fontsize=8)
        if panel.values.ndim == 2 and panel.values.size:
            image = axes.imshow(panel.values, **{**colours, "aspect": "equal" if near_square(panel.values.shape) else "auto"})
            axes.set_ylabel(panel.rows, fontsize=8)
            mapped.append(axes)
            whole_ticks(axes, panel.values.shape)
        elif panel.values.ndim == 2:
            axes.text(0.5, 0.5, f"empty {panel.values.shape}", ha="center", transform=axes.transAxes)
        else:
            curve = np.atleast_1d(panel.values)
            axes.plot(np.arange(curve.size), curve, marker="o", markersize=3, color="#00336f")
            axes.grid(alpha=0.3)
    if image is not None:
        figure.colorbar(image, ax=mapped, shrink=0.8).ax.tick_params(labelsize=8)
    figure.savefig(target, format=kind, dpi=130)


def near_square(shape: tuple[int, ...]) -> bool:
    return max(shape) <= 4 * min(shape)


def whole_ticks(axes: Any, shape: tuple[int, ...]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(min(8, shape[1]), integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(min(8, shape[0]), integer=True))


AXES = {"n": "query", "m": "key", "d": "feature", "e": "feature", "h": "head"}


def titled(record: Any, result: Any) -> tuple[str, np.ndarray, str, str]:
    """What to draw of a formula's result, as (title, values, name of the rows, name of the columns).

    That is its weights where it has any, else its first output; several numbers are drawn together.
    """
    fields: Mapping[str, Any] = result._asdict() if hasattr(result, "_asdict") else {record.outputs[0]: result}
    fields = {key: np.asarray(value) for key, value in fields.items() if value is not None}
    if "weights" in fields:
        return f"{record.name} weights", fields["weights"], "query", "key"
    if len(fields) > 1 and all(value.ndim == 0 for value in fields.values()):
        return record.name, np.array([float(value) for value in fields.values()]), "", ", ".join(fields)
    name, values = next(iter(fields.items()))
    dims = [dim.lstrip("#") for dim in record.shapes.get(name, "").split() if dim not in ("...", "bool", "int", "bits", "spins")]
    rows, columns = (["batch", "batch"] + [AXES.get(dim, dim) for dim in dims])[-2:]
    title = record.name if name in ("out", "weights") else f"{record.name}: {name}"
    return title, values, rows, columns
