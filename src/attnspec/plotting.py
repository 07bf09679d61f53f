"""Pictures of what a formula does: weights as heat maps, curves for what has one axis, bars for numbers.

Colours can be told apart by the colour-blind: cividis where nothing is negative, the diverging PuOr around 0 for signed values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from attnspec.dispatch import as_numpy, headed

MOST_PANELS = 8
AXES = {"n": "query", "m": "key", "m1": "first key", "m2": "second key", "m3": "third key", "d": "feature", "e": "feature", "h": "head",
        "hk": "key head", "c": "channel", "r": "neuron"}


@dataclass(frozen=True)
class Panel:
    """One picture: a heat map of a matrix, a curve of `values` with one axis (over `x`, where given), or bars with `labels`."""

    title: str
    values: np.ndarray
    rows: str = "query"
    columns: str = "key"
    scale: str = "weights"                        # panels with the same name here share their colours
    x: np.ndarray | None = None
    labels: tuple[str, ...] = ()


def panels_of(record: Any, arrays: Mapping[str, Any], result: Any) -> list[Panel]:
    """Panels for a formula's result: its weights where it has any, else its first output, one for each leading index, at most 8.

    arrays: what the formula was called with; a curve is drawn over the one array of its shape, if there is just one.
    """
    fields: Mapping[str, Any] = result._asdict() if hasattr(result, "_asdict") else {record.outputs[0]: result}
    fields = {key: as_numpy(value).astype(float) for key, value in fields.items() if value is not None}
    if all(value.ndim == 0 for value in fields.values()):
        return [Panel(record.name, np.array(list(fields.values())), labels=tuple(fields))]
    is_weights = "weights" in fields
    name = "weights" if is_weights else next(key for key, value in fields.items() if value.ndim)
    values = fields[name]
    title = f"{record.name} weights" if is_weights else record.name if name == "out" else f"{record.name}: {name}"
    dims = [dim.lstrip("#") for dim in record.shapes.get(name, weight_dims(record)).split()]
    dims = [AXES.get(dim, dim) for dim in dims if dim not in ("...", "bool", "int", "bits", "spins")]
    heads = ["head"] if headed(record) and "head" not in dims else []
    names = (["batch"] * values.ndim + heads + dims)[-values.ndim :]
    scale = "weights" if is_weights else record.name
    if values.ndim == 1:
        over = [(key, array) for key, array in arrays.items() if np.shape(array) == values.shape]
        key, x = over[0] if len(over) == 1 else (names[-1], None)
        return [Panel(title, values, "", key, scale, None if x is None else np.asarray(x, dtype=float))]
    indices = list(np.ndindex(values.shape[:-2]))
    titles = [title + "".join(f", {axis} {i}" for axis, i in zip(names, index, strict=False)) for index in indices[:MOST_PANELS]]
    if len(indices) > MOST_PANELS:
        titles[-1] += f" ({MOST_PANELS} of {len(indices)} shown)"
    return [Panel(text, values[index], names[-2], names[-1], scale) for text, index in zip(titles, indices, strict=False)]


def weight_dims(record: Any) -> str:
    """Axes of a weight matrix whose shape the record does not give: queries by keys, or by each member of a tuple of keys."""
    keys = [dim for dim in record.dimensions if dim.rstrip("0123456789") == "m" and record.is_required(dim)]
    return " ".join(["n", *(keys or ["n"])])


def draw(panels: list[Panel], target: IO[bytes], kind: str) -> None:
    """Draw the panels side by side into `target` as a picture of that kind: png, pdf or svg."""
    from matplotlib.figure import Figure

    columns = min(len(panels), 4)
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns + 1.2, 3.5 * lines + 0.3), layout="constrained")
    images: dict[str, list[Any]] = {}
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(lines, columns, place)
        axes.set_title(panel.title, fontsize=9)
        axes.tick_params(labelsize=8)
        if panel.labels:
            axes.bar(panel.labels, panel.values, color="#00336f")
            axes.margins(y=0.15)
            for i, value in enumerate(panel.values):
                axes.annotate(f"{value:.5g}", (i, value), ha="center", va="bottom", fontsize=8)
        elif panel.values.size == 0:
            axes.text(0.5, 0.5, f"empty, {panel.values.shape}", ha="center", transform=axes.transAxes)
        elif panel.values.ndim == 1:
            x = np.arange(panel.values.size) if panel.x is None else panel.x
            order = np.argsort(x)
            axes.plot(x[order], panel.values[order], marker="o", markersize=3, color="#00336f")
            axes.set_xlabel(panel.columns, fontsize=8)
            axes.grid(alpha=0.3)
        else:
            height, width = panel.values.shape
            aspect = "equal" if max(height, width) <= 4 * min(height, width) else "auto"
            alike = [other.values for other in panels if other.scale == panel.scale and other.values.ndim == 2]
            style = {**colours_of(alike), "interpolation": "nearest", "aspect": aspect}
            image = axes.imshow(panel.values, **style)
            images.setdefault(panel.scale, []).append(image)
            axes.set_xlabel(panel.columns, fontsize=8)
            axes.set_ylabel(panel.rows, fontsize=8)
            whole_ticks(axes, panel.values.shape)
    for group in images.values():
        figure.colorbar(group[0], ax=[image.axes for image in group], shrink=0.8).ax.tick_params(labelsize=8)
    figure.savefig(target, format=kind, dpi=130, bbox_inches="tight", pad_inches=0.1)


def colours_of(matrices: list[np.ndarray]) -> dict[str, Any]:
    """Colour map and limits for matrices that share them; what is not finite is left blank."""
    finite = np.concatenate([matrix[np.isfinite(matrix)] for matrix in matrices])
    low, high = finite.min(initial=0.0), finite.max(initial=0.0)
    if low < 0:
        high = max(high, -low)
        return {"cmap": "PuOr", "vmin": -high, "vmax": high}
    return {"cmap": "cividis", "vmin": 0.0, "vmax": high or 1.0}


def whole_ticks(axes: Any, shape: tuple[int, ...]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(min(8, shape[1]), integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(min(8, shape[0]), integer=True))
