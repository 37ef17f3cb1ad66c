"""From a run directory's records to its summary: nothing here needs the server or the run to be still there."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from paceline.bench import metrics
from paceline.bench.record import SCHEMA, CellPlan, RequestRecord, RunDirectory
from paceline.bench.sampler import read_samples

NOT_MEASURABLE_SYNC = "not measurable (sync)"
NO_STEADY_WINDOW = "no steady window"
NO_STEADY_WINDOW_WHY = (
    f"{NO_STEADY_WINDOW}: all slots were busy for less than {metrics.MIN_WINDOW_IN_E2E} median E2E latencies; "
    "give more --requests"
)
NO_TOKEN_COUNT = "the server counts no output tokens"
_T = TypeVar("_T")
_STATISTICS = ("n", "mean", "std", "min", "p50", "p90", "p95", "p99", "max")


class Statistic(msgspec.Struct, frozen=True, kw_only=True):
    """A metric over `n` samples; a figure of the whole cell has its value in `mean` and nothing else."""

    unit: str
    n: int
    mean: float | None = None
    std: float | None = None
    """Of the sample (divided by n − 1); None for fewer than two."""
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    note: str | None = None
    """Why there is nothing, or what was left out."""


class RequestCounts(msgspec.Struct, frozen=True):
    """What became of a cell's requests. Those that Ctrl-C cut off are nobody's failure."""

    started: int
    ok: int
    failed: dict[str, int]
    interrupted: int
    first_error: str | None


class CellSummary(msgspec.Struct, frozen=True):
    """One cell of ``summary.json``."""

    id: int
    params: dict[str, Any]
    requests: RequestCounts
    metrics: dict[str, Statistic]
    notes: list[str]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``summary.json``."""

    schema: int = SCHEMA
    cells: list[CellSummary]


def summarize(run: Path) -> Summary:
    """Computes the summary of the run in directory `run` from its files. Raises InputError if they are damaged."""
    directory = RunDirectory(run)
    records = directory.records()
    samples = read_samples(directory.samples_csv)
    by_cell: dict[int, list[RequestRecord]] = {}
    for record in records:
        by_cell.setdefault(record.cell, []).append(record)
    cells = [cell for cell in directory.info().cells if cell.id in by_cell]
    return Summary(cells=[_summarize_cell(cell, by_cell[cell.id], samples) for cell in cells])


def write_summary(directory: RunDirectory, summary: Summary) -> None:
    """Writes ``summary.json`` and ``summary.csv``."""
    directory.write(directory.summary_json, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    directory.write(directory.summary_csv, _csv(summary).encode())


def distribution(unit: str, values: Sequence[float], note: str | None = None) -> Statistic:
    """Percentiles are linear-interpolated order statistics."""
    if not values:
        return Statistic(unit=unit, n=0, note=note)
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(array, (50, 90, 95, 99)))
    return Statistic(
        unit=unit,
        n=len(array),
        mean=float(array.mean()),
        std=float(array.std(ddof=1)) if len(array) > 1 else None,
        min=float(array.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(array.max()),
        note=note,
    )


def _summarize_cell(
    cell: CellPlan, records: Sequence[RequestRecord], samples: dict[str, list[tuple[int, float]]]
) -> CellSummary:
    ok = metrics.finished(records)
    figures = _latencies(ok, sync=cell.params["mode"] == "sync")
    figures |= _server_times(ok) | _rates(ok, sync=cell.params["mode"] == "sync")
    figures |= _throughputs(records, ok, cell.params["concurrency"])
    figures |= _lengths(ok)
    counts = _count(records)
    answered = counts.started - counts.interrupted
    rate = 100 * sum(counts.failed.values()) / answered if answered else None
    figures["error_rate"] = Statistic(unit="%", n=answered, mean=rate)
    figures |= _resources(records, samples)
    notes = _notes(records, ok, counts, cell.params["output_tokens"])
    if ok and figures["throughput_output"].note == NO_STEADY_WINDOW:
        notes.insert(0, NO_STEADY_WINDOW_WHY)
    return CellSummary(cell.id, cell.params, counts, figures, notes)


def _count(records: Sequence[RequestRecord]) -> RequestCounts:
    statuses = Counter(record.status for record in records)
    failed = {str(status): number for status, number in statuses.items() if status not in ("ok", "interrupted")}
    errors = (f"{record.status}: {record.error}" for record in records if record.status in failed)
    return RequestCounts(len(records), statuses["ok"], failed, statuses["interrupted"], next(errors, None))


def _present(metric: Callable[[RequestRecord], _T | None], records: Iterable[RequestRecord]) -> list[_T]:
    return [value for record in records if (value := metric(record)) is not None]


def _latencies(ok: Sequence[RequestRecord], *, sync: bool) -> dict[str, Statistic]:
    e2e = distribution("ms", _present(metrics.e2e, ok))
    if sync:
        nothing = Statistic(unit="ms", n=0, note=NOT_MEASURABLE_SYNC)
        return {"ttft": nothing, "ttfa": nothing, "tpot": nothing, "itl": nothing, "e2e": e2e}
    coalesced = sum(metrics.is_coalesced(record) for record in ok)
    gaps = [gap for record in ok if not metrics.is_coalesced(record) for gap in metrics.itl(record)]
    itl_note = f"not measurable in {coalesced} of {len(ok)} streams (coalesced on the way)" if coalesced else None
    uncounted = NO_TOKEN_COUNT if ok and all(record.tokens is None for record in ok) else None
    return {
        "ttft": distribution("ms", _present(metrics.ttft, ok)),
        "ttfa": distribution("ms", _present(metrics.ttfa, ok)),
        "tpot": distribution("ms", _present(metrics.tpot, ok), uncounted),
        "itl": distribution("ms", gaps, itl_note),
        "e2e": e2e,
    }


def _server_times(ok: Sequence[RequestRecord]) -> dict[str, Statistic]:
    times = {
        name: [record.server_times[name] for record in ok if name in record.server_times]
        for name in ("queue", "prefill", "decode")
    }
    return {name: distribution("ms", values) for name, values in times.items() if values}


def _rates(ok: Sequence[RequestRecord], *, sync: bool) -> dict[str, Statistic]:
    short = sum(metrics.is_too_short(record) for record in ok if record.tokens is not None)
    note = f"too short (under {metrics.MIN_TOKENS_FOR_RATE} tokens): {short} of {len(ok)} left out" if short else None
    if ok and all(record.tokens is None for record in ok):
        note = NO_TOKEN_COUNT
    decode = Statistic(unit="tokens/s", n=0, note=NOT_MEASURABLE_SYNC)
    return {
        "output_tps": distribution("tokens/s", _present(metrics.output_tps, ok), note),
        "decode_tps": decode if sync else distribution("tokens/s", _present(metrics.decode_tps, ok), note),
        "tokens_per_event": distribution("tokens", _present(metrics.tokens_per_event, ok)),
    }


def _throughputs(
    records: Sequence[RequestRecord], ok: Sequence[RequestRecord], concurrency: int
) -> dict[str, Statistic]:
    windows = {"": metrics.steady_window(records, concurrency), "_whole_run": metrics.whole_run(records)}
    figures = {}
    for suffix, window in windows.items():
        for name, unit, metric in (
            ("throughput_output", "tokens/s", metrics.throughput_output),
            ("throughput_requests", "requests/s", metrics.throughput_requests),
        ):
            if window is None:
                statistic = Statistic(unit=unit, n=0, note=None if suffix else NO_STEADY_WINDOW)
            elif name == "throughput_output" and all(record.tokens is None for record in ok):
                statistic = Statistic(unit=unit, n=0, note=NO_TOKEN_COUNT)
            else:
                completed = sum(record.last is not None and record.last in window for record in ok)
                statistic = Statistic(unit=unit, n=completed, mean=metric(records, window))
            figures[name + suffix] = statistic
    return figures


def _lengths(ok: Sequence[RequestRecord]) -> dict[str, Statistic]:
    return {
        "input_tokens": distribution("tokens", _present(lambda record: record.prompt_tokens, ok)),
        "output_tokens": distribution("tokens", _present(lambda record: record.tokens, ok)),
        "cached_tokens": distribution("tokens", _present(lambda record: record.cached_tokens, ok)),
    }


def _resources(records: Sequence[RequestRecord], samples: dict[str, list[tuple[int, float]]]) -> dict[str, Statistic]:
    """Samples taken while the cell ran; what was not sampled is absent."""
    start, end = min(record.scheduled for record in records), max(record.end for record in records)
    figures = {}
    for name, column in samples.items():
        values = [value for ns, value in column if start <= ns <= end]
        if not values:
            continue
        if name.endswith("_bytes"):
            figures[name.removesuffix("_bytes")] = distribution("MiB", [value / 2**20 for value in values])
        else:
            figures[name.removesuffix("_percent")] = distribution("%", values)
    return figures


def _notes(
    records: Sequence[RequestRecord], ok: Sequence[RequestRecord], counts: RequestCounts, output_tokens: int
) -> list[str]:
    notes = []
    counted = [record.tokens for record in ok if record.tokens is not None]
    other = sum(tokens != output_tokens for tokens in counted)
    if other:
        notes.append(
            f"lengths not forced: {other} of {len(counted)} answers have other than {output_tokens} tokens "
            f"({min(counted)} to {max(counted)})"
        )
    sources = {record.token_source for record in ok if record.token_source is not None}
    if "tokenizer" in sources:
        notes.append("output tokens counted with the reference tokenizer, where the server sends no usage")
    if ok and not counted:
        notes.append("the server counts no output tokens; --tokenizer PATH or NAME gives the token metrics")
    cached = sum(_present(lambda record: record.cached_tokens, ok))
    prompt = sum(_present(lambda record: record.prompt_tokens, ok))
    if cached:
        notes.append(f"{cached} of {prompt} prompt tokens came from the server's prefix cache")
    reconnects = sum(record.reconnects for record in records)
    if reconnects:
        notes.append(f"{reconnects} times the server had closed a kept connection when the next request came")
    if counts.interrupted:
        notes.append(f"interrupted: {counts.interrupted} requests were cut off and count nowhere")
    return notes


def _csv(summary: Summary) -> str:
    params = list(dict.fromkeys(name for cell in summary.cells for name in cell.params))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["cell", *params, "metric", "unit", *_STATISTICS, "note"])
    for cell in summary.cells:
        for name, statistic in cell.metrics.items():
            figures = [getattr(statistic, column) for column in _STATISTICS]
            parameters = [cell.params.get(param) for param in params]
            writer.writerow([cell.id, *parameters, name, statistic.unit, *figures, statistic.note])
    return out.getvalue()
