"""The terminal's table: one block per cell, metric × mean, p50, p95, p99 with sample counts.

Plain text of at most 80 columns, the same on a terminal and in a pipe, and no figure is ever shortened to fit.
"""

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from paceline.bench.record import RunDirectory, RunInfo
from paceline.bench.report.summary import CellSummary, Statistic, Summary

WIDTH = 80
_LABELS = {
    "ttft": "TTFT",
    "ttfa": "TTFA, answer begins",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
    "queue": "queue, server",
    "prefill": "prefill, server",
    "decode": "decode, server",
    "output_tps": "generation speed",
    "decode_tps": "decode speed",
    "tokens_per_event": "tokens per event",
    "throughput_output": "throughput, steady",
    "throughput_output_whole_run": "throughput, whole run",
    "throughput_requests": "throughput, steady",
    "throughput_requests_whole_run": "throughput, whole run",
    "input_tokens": "input length",
    "output_tokens": "output length",
    "cached_tokens": "cached input",
    "error_rate": "failed",
    "host_memory": "memory, whole machine",
    "host_cpu": "CPU, whole machine",
    "server_rss": "memory, server",
    "server_cpu": "CPU, server",
}
_FIGURES = ("mean", "p50", "p95", "p99")
_FIGURE_WIDTH = 9
_COUNT_WIDTH = 8
_LABEL_WIDTH = 34
"""Of the longest label with its unit."""


def report(directory: RunDirectory, info: RunInfo, summary: Summary) -> Iterator[str]:
    """The lines of the report: the tables, how prompt lengths are known, the command that repeats the run, the files.

    The command and the paths are never broken, whatever their length: they are there to be copied.
    """
    for cell in summary.cells:
        yield from _block(cell)
    yield from _wrapped(f"Input lengths: {info.plan['input_lengths']}.")
    yield f"Repeat with: {shlex.join(info.argv)}"
    yield "Files:"
    yield from (f"  {path}" for path in directory.files() if path.exists())


def _block(cell: CellSummary) -> Iterator[str]:
    rows = {name: each for name, each in cell.metrics.items() if _is_worth_a_row(name, each, cell)}
    yield from _wrapped(_title(cell))
    yield _row("", _FIGURES, "n")
    for name, each in rows.items():
        yield _metric_row(_label(name, each), each)
    for remark in _remarks(cell, rows):
        yield from _wrapped(remark, indent="  ")
    yield ""


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


def _label(name: str, each: Statistic) -> str:
    return f"{_LABELS.get(name, name)} ({each.unit})"


def _metric_row(label: str, each: Statistic) -> str:
    if _says_why_empty(each):
        return f"{label:<{_LABEL_WIDTH}}{each.note:>{len(_FIGURES) * _FIGURE_WIDTH}}{each.n:>{_COUNT_WIDTH}}"
    return _row(label, [_figure(getattr(each, name)) for name in _FIGURES], str(each.n))


def _row(label: str, figures: Sequence[str], count: str) -> str:
    # The spaces are apart from the widths: a figure that is wider than its column moves the row, and stays whole.
    columns = "".join(f" {figure:>{_FIGURE_WIDTH - 1}}" for figure in figures)
    return f"{label:<{_LABEL_WIDTH}}{columns} {count:>{_COUNT_WIDTH - 1}}"


def _says_why_empty(each: Statistic) -> bool:
    """Whether the note stands in the row itself, in place of figures."""
    return each.n == 0 and each.note is not None and len(each.note) < len(_FIGURES) * _FIGURE_WIDTH


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _remarks(cell: CellSummary, rows: dict[str, Statistic]) -> Iterator[str]:
    for name, each in rows.items():
        if each.note is not None and not _says_why_empty(each):
            yield f"{_LABELS.get(name, name)}: {each.note}"
    yield from cell.notes
    if cell.requests.failed:
        kinds = ", ".join(f"{number} {status}" for status, number in sorted(cell.requests.failed.items()))
        yield f"failed: {kinds}; the first: {cell.requests.first_error}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
