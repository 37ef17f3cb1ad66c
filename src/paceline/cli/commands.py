"""The tree of commands; each has a file of its own beside this one."""

from typing import Annotated

import typer

from paceline.cli.bench_engine import engine
from paceline.cli.bench_load import load
from paceline.cli.chat import chat
from paceline.cli.demo import demo
from paceline.cli.inspect import inspect
from paceline.cli.models import models
from paceline.cli.pull import pull
from paceline.cli.run_batch import run_batch
from paceline.cli.serve import serve

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 a measurement, a gate or requests of a batch failed, 2 usage or input, "
    "3 target unreachable, 130 interrupted.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure a server, or the engine by itself.")
for command in (serve, chat, run_batch, pull, models, inspect, demo):
    app.command()(command)
for command in (load, engine):
    bench.command()(command)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        from paceline import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def paceline(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve a language model on this machine, and measure any server that does."""
