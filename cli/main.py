"""The program `attnspec`: its commands, and how it refuses."""

import errno
import importlib
import logging
import os
import sys
from typing import Any

import click

import attnspec

COMMANDS = {
    "list": ("describe", "list_command"),
    "show": ("describe", "show"),
    "doctor": ("describe", "doctor"),
    "run": ("run", "run"),
    "verify": ("verify", "verify"),
    "bench": ("bench", "bench"),
    "plot": ("plot", "plot"),
}


class Program(click.Group):
    """A group that imports a command when it is called, and turns every refusal into one line and exit status 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name]
        return getattr(importlib.import_module(f"attnspec.cli.{module}"), attribute)

    def main(self, args: Any = None, prog_name: str | None = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        os.environ["MPLBACKEND"] = "agg"                               # pictures go to files, whatever the user's matplotlib is set to
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **extra)
        try:
            status = super().main(args, prog_name, standalone_mode=False, **extra)
        except click.ClickException as error:
            click.echo(f"attnspec: error: {' '.join(error.format_message().split())}", err=True)
            sys.exit(2)
        except click.Abort:
            click.echo("attnspec: interrupted", err=True)
            sys.exit(130)
        except OSError as error:
            sys.stdout = None     # whoever read it has gone, or it takes no more: nothing is left to flush to
            if error.errno != errno.EPIPE:
                click.echo(f"attnspec: error: {error}", err=True)
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


@click.group(cls=Program, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(attnspec.__version__, prog_name="attnspec")
@click.pass_context
def main(context: click.Context) -> None:
    """Attention formulas as plain NumPy: look them up, run them on your arrays, draw their weights, check them.

    \b
    attnspec list                                   what there is
    attnspec show cog_attention                     one formula, as a page
    attnspec run sinkhorn_attention --plot map.png  compute it, on drawn arrays
    attnspec run cog_attention --input qkv.npz --output out.npz
    attnspec verify                                 check everything here
    attnspec bench                                  time the fast kernels beside what people use today
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


if __name__ == "__main__":
    main()
