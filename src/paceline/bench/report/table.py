"""The terminal's table: one block per cell, Metric × mean, p50, p95, p99 with sample counts."""

import shlex
import sys
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.bench.record import RunDirectory, RunInfo
from paceline.bench.report.summary import CellSummary, Statistic, Summary

_LABELS = {
    "ttft": "TTFT",
    "ttfa": "TTFA (answer begins)",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
    "queue": "queue (server)",
    "prefill": "prefill (server)",
    "decode": "decode (server)",
    "output_tps": "generation speed per request",
    "decode_tps": "decode speed per request",
    "tokens_per_event": "tokens per event",
    "throughput_output": "output throughput, steady",
    "throughput_output_whole_run": "output throughput, whole run",
    "throughput_requests": "request throughput, steady",
    "throughput_requests_whole_run": "request throughput, whole run",
    "input_tokens": "input length",
    "output_tokens": "output length",
    "cached_tokens": "cached input",
    "error_rate": "failed",
    "host_memory": "memory in use, this machine",
    "host_cpu": "CPU, this machine",
    "server_rss": "memory, server processes",
    "server_cpu": "CPU, server processes",
}


def render(summary: Summary) -> RenderableType:
    """The tables of all cells."""
    return Group(*(part for cell in summary.cells for part in _block(cell)))


def open_console() -> Console:
    """Standard output; wide enough for the notes where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 140)


def print_report(console: Console, directory: RunDirectory, info: RunInfo, summary: Summary) -> None:
    """Prints the tables, how prompt lengths are known, the command that repeats the run and the files."""
    console.print(render(summary))
    lines = (
        f"Input lengths: {info.plan['input_lengths']}.",
        f"Repeat with: {shlex.join(info.argv)}",
        "Files:",
        *(f"  {path}" for path in directory.files() if path.exists()),
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _block(cell: CellSummary) -> Iterable[RenderableType]:
    statistics = {name: each for name, each in cell.metrics.items() if _is_worth_a_row(name, each, cell)}
    with_notes = any(each.note for each in statistics.values())
    table = Table(title=_title(cell), title_justify="left", title_style="bold")
    table.add_column("Metric", no_wrap=True)
    for column in ("mean", "p50", "p95", "p99", "n"):
        table.add_column(column, justify="right", no_wrap=True)
    if with_notes:
        table.add_column("note")
    for name, each in statistics.items():
        figures = [_figure(value) for value in (each.mean, each.p50, each.p95, each.p99)]
        note = [each.note or ""] if with_notes else []
        table.add_row(f"{_LABELS.get(name, name)} ({each.unit})", *figures, str(each.n), *note)
    yield table
    for line in _remarks(cell):
        yield Text(line)
    yield Text()


def _title(cell: CellSummary) -> str:
    params, counts = cell.params, cell.requests
    failed = sum(counts.failed.values())
    return (
        f"concurrency {params['concurrency']} · {params['input_tokens']} tokens in, {params['output_tokens']} out · "
        f"{params['mode']} · {counts.ok} requests ok, {failed} failed"
    )


def _is_worth_a_row(name: str, each: Statistic, cell: CellSummary) -> bool:
    """The files have every metric; a row that says nothing, or what another row says, is left out here."""
    if name == "ttfa":
        ttft = cell.metrics["ttft"]
        return (each.n, each.mean) != (ttft.n, ttft.mean)
    if name == "cached_tokens":
        return bool(each.max)
    if name == "tokens_per_event":
        return each.n > 0 and not (each.min == each.max == 1)
    return each.n > 0 or each.note is not None


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _remarks(cell: CellSummary) -> Iterable[str]:
    yield from (f"  {note}" for note in cell.notes)
    if cell.requests.failed:
        kinds = ", ".join(f"{number} {status}" for status, number in sorted(cell.requests.failed.items()))
        yield f"  failed: {kinds}; the first: {cell.requests.first_error}"
