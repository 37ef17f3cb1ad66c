"""``paceline pull``: fetch a model; and the progress display of every command that may have to."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

_SECONDS_BETWEEN_LINES = 10.0


def pull(name: Annotated[str, typer.Argument(help="A name that `paceline models` lists.")]) -> None:
    """Download a model and print the path of its file."""
    from paceline.models import catalog

    with pull_progress() as progress:
        path = catalog.pull(name, progress)
    print(path)


@contextmanager
def pull_progress() -> Iterator[Callable[[int, int, str], None]]:
    """A progress callback for the catalog: a bar on a terminal, else a dated line now and then; both on stderr."""
    if sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    bars = progress.Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, progress.TaskID] = {}

    def show(done: int, total: int, what: str) -> None:
        if what not in tasks:
            bars.start()  # now: most of the time there is nothing to fetch, and nothing to show
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()


def _lines() -> Callable[[int, int, str], None]:
    shown_what, shown_at = "", 0.0

    def show(done: int, total: int, what: str) -> None:
        nonlocal shown_what, shown_at
        now = time.monotonic()
        if what != shown_what or now - shown_at >= _SECONDS_BETWEEN_LINES:
            shown_what, shown_at = what, now
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            print(f"{stamp} {what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB", file=sys.stderr, flush=True)

    return show
