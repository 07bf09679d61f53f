"""attnspec plot: the weights of one or several formulas side by side, on the same arrays."""

from pathlib import Path
from typing import Any

import click

from attnspec.cli.arguments import check_workspace, gather, nearest_of, pairs, with_inputs
from attnspec.cli.files import Refusal, Targets, refusing
from attnspec.cli.run import PICTURES, choose
from attnspec.dispatch import BACKENDS, record_of


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@with_inputs
@click.option("--backend", type=click.Choice(["auto", *BACKENDS]), default="auto", show_default=True, help="Where to compute.")
@click.option("--output", type=click.Path(path_type=Path), required=True, metavar="MAP.png", help="Where to write it: .png, .pdf or .svg.")
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
def plot(names: tuple[str, ...], backend: str, output: Path, force: bool, settings: tuple[str, ...], **given: Any) -> None:
    """Draw the weights of one or several formulas.

    Heat maps of the weights of each NAME (of its output where it has no weights), side by side, the weights in one colour scale.
    An option given by --set goes to every formula that has it; drawn arrays of the same name and shape are the same for all.

    \b
    attnspec plot scaled_dot_product_attention sinkhorn_attention cog_attention --shape n=24,d=8 --output maps.png
    """
    from attnspec import plotting

    with refusing():
        records = [record_of(name) for name in names]
    for key in pairs("--set", settings):
        if not any(key in record.parameters for record in records):
            known = dict.fromkeys(option for record in records for option in record.options)
            raise Refusal(f"--set: none of {', '.join(names)} has a parameter {key!r}{nearest_of(key, known)}")
    targets = Targets(force)
    panels = []
    for record in records:
        own = [item for item in settings if item.partition("=")[0].strip() in record.parameters]
        arrays, options, files = gather(record, settings=own, **given)
        targets.paths.clear()
        targets.check("--output", output, PICTURES, files)
        with refusing():
            selection, options = choose(record, backend, arrays, options, needs_weights=True)
        check_workspace(record, arrays, selection.backend, True)
        with refusing():
            panels += plotting.panels_of(record, arrays, selection.function(**arrays, **options))
    targets.put(output, lambda file: plotting.draw(panels, file, output.suffix.lower().removeprefix(".")))
    targets.commit()
    click.echo(f"wrote {output}, {len(panels)} panel{'s' * (len(panels) > 1)}")
