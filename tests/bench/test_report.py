"""From records to summary files and the table."""

import csv
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.bench.load import Progress
from paceline.bench.record import CellPlan, RequestRecord, RunDirectory, RunInfo
from paceline.bench.report.progress import ProgressBar, ProgressLines, open_progress
from paceline.bench.report.summary import Summary, distribution, summarize, write_summary
from paceline.bench.report.table import report

MS = 1_000_000


def request(number: int, sent_ms: int, first_ms: int, gaps_ms: list[int], **fields: Any) -> RequestRecord:
    stamps = [first_ms * MS]
    for gap in gaps_ms:
        stamps.append(stamps[-1] + gap * MS)
    defaults: dict[str, Any] = {
        "cell": 0,
        "id": number,
        "scheduled": sent_ms * MS,
        "sent": sent_ms * MS,
        "first": stamps[0],
        "answer": stamps[0],
        "last": stamps[-1],
        "end": stamps[-1] + MS // 2,
        "events": [(ns, 5) for ns in stamps],
        "tokens": len(stamps),
        "token_source": "usage",
        "prompt_tokens": 100 + number,
        "status": "ok",
    }
    return RequestRecord(**defaults | fields)


def summary_of(
    tmp_path: Path, records: list[RequestRecord], samples: str = "", **params: Any
) -> tuple[RunDirectory, Summary]:
    directory = RunDirectory(tmp_path / "run")
    cell = {"concurrency": 1, "input_tokens": 100, "output_tokens": 20, "mode": "stream"} | params
    directory.create(
        RunInfo(
            kind="bench-load",
            started="2026-01-01",
            started_ns=0,
            argv=["paceline", "bench", "load", "http://a b"],
            environment={},
            plan={"input_lengths": "known"},
            cells=[CellPlan(0, cell), CellPlan(1, cell)],
        )
    )
    directory.append(records)
    if samples:
        directory.samples_csv.write_text(samples)
    summary = summarize(directory.path)
    write_summary(directory, summary)
    return directory, summary


def printed(directory: RunDirectory, summary: Summary) -> str:
    return "\n".join(report(directory, directory.info(), summary))


def row(text: str, label: str) -> str:
    """The first row of the table that begins with `label`, spaces made one."""
    line = next(line for line in text.splitlines() if line.startswith(label))
    return " ".join(line.split())


# Five requests one after the other: TTFT 10, 20, 30, 40, 50 ms, then 19 gaps of 2 ms; E2E is TTFT + 38 ms.
FIVE = [request(n, 100 * n, 100 * n + 10 * (n + 1), [2] * 19) for n in range(5)]


def test_statistics_by_hand() -> None:
    statistic = distribution("ms", [1, 2, 3, 10])
    assert (statistic.n, statistic.mean, statistic.min, statistic.p50, statistic.max) == (4, 4, 1, 2.5, 10)
    assert statistic.p90 == pytest.approx(3 + 0.7 * 7)  # rank 0.9 × 3 = 2.7
    assert statistic.std == pytest.approx((50 / 3) ** 0.5)
    assert distribution("ms", [7]).std is None
    assert distribution("ms", []).mean is None


def test_the_summary_of_five_streams(tmp_path: Path) -> None:
    directory, summary = summary_of(tmp_path, FIVE)
    (cell,) = summary.cells
    figures = cell.metrics
    assert (figures["ttft"].n, figures["ttft"].mean, figures["ttft"].p50, figures["ttft"].p95) == (5, 30, 30, 48)
    assert (figures["itl"].n, figures["itl"].p99) == (95, 2)
    assert (figures["e2e"].mean, figures["tpot"].mean) == (68, 2)
    assert figures["decode_tps"].mean == pytest.approx(500)
    assert figures["output_tps"].max == pytest.approx(20 / 0.048)
    # Steady from 0 to the end of the last at 488.5 ms; whole run to its last event at 488 ms.
    assert figures["throughput_output"].mean == pytest.approx(100 / 0.4885)
    assert figures["throughput_output_whole_run"].mean == pytest.approx(100 / 0.488)
    assert figures["throughput_requests_whole_run"].mean == pytest.approx(5 / 0.488)
    assert (figures["input_tokens"].min, figures["input_tokens"].max) == (100, 104)
    assert figures["error_rate"].mean == 0
    assert cell.notes == []
    assert "queue" not in figures
    assert msgspec.json.decode(directory.summary_json.read_bytes(), type=Summary) == summary


def test_summary_csv_has_a_row_per_cell_and_metric(tmp_path: Path) -> None:
    directory, summary = summary_of(tmp_path, [*FIVE, *(msgspec.structs.replace(each, cell=1) for each in FIVE)])
    rows = list(csv.DictReader(directory.summary_csv.open()))
    assert len(rows) == sum(len(cell.metrics) for cell in summary.cells)
    ttft = next(row for row in rows if row["cell"] == "1" and row["metric"] == "ttft")
    assert (ttft["concurrency"], ttft["unit"], ttft["n"], ttft["mean"], ttft["p50"]) == ("1", "ms", "5", "30.0", "30.0")


def test_the_table_has_the_numbers_the_command_and_the_files(tmp_path: Path) -> None:
    directory, summary = summary_of(tmp_path, FIVE)
    text = printed(directory, summary)
    assert row(text, "TTFT (ms)") == "TTFT (ms) 30.0 30.0 48.0 49.6 5"
    assert "concurrency 1 · 100 tokens in, 20 out · stream · 5 requests ok, 0 failed" in text
    assert "Repeat with: paceline bench load 'http://a b'" in text
    assert "Input lengths: known." in text
    for path in (directory.run_json, directory.requests_jsonl, directory.summary_json, directory.summary_csv):
        assert str(path) in text
    assert str(directory.samples_csv) not in text
    assert "TTFA" not in text


def test_sync_says_not_measurable_and_never_zero(tmp_path: Path) -> None:
    whole = [
        msgspec.structs.replace(each, first=None, answer=None, events=[], server_times={"queue": 1.0}) for each in FIVE
    ]
    directory, summary = summary_of(tmp_path, whole, mode="sync")
    figures = summary.cells[0].metrics
    for name in ("ttft", "ttfa", "itl", "tpot", "decode_tps"):
        assert (figures[name].n, figures[name].mean, figures[name].note) == (0, None, "not measurable (sync)")
    assert figures["e2e"].n == figures["output_tps"].n == figures["queue"].n == 5
    text = printed(directory, summary)
    for name in ("TTFT", "ITL", "TPOT"):
        assert row(text, f"{name} (ms)") == f"{name} (ms) not measurable (sync) 0"


def test_failures_are_counted_told_and_never_dropped(tmp_path: Path) -> None:
    timeout = RequestRecord(cell=0, id=8, scheduled=0, sent=500 * MS, end=900 * MS, status="timeout", error="no answer")
    reset = msgspec.structs.replace(FIVE[0], id=9, sent=0, status="disconnected", error="reset", tokens=None)
    directory, summary = summary_of(tmp_path, [*FIVE, timeout, reset, timeout])
    counts = summary.cells[0].requests
    assert (counts.started, counts.ok, counts.failed) == (8, 5, {"timeout": 2, "disconnected": 1})
    assert summary.cells[0].metrics["error_rate"].mean == 37.5
    assert summary.cells[0].metrics["ttft"].n == 5
    text = printed(directory, summary)
    assert "5 requests ok, 3 failed" in text
    assert "failed: 1 disconnected, 2 timeout; the first: timeout: no answer" in text


def test_interrupted_requests_are_no_failures(tmp_path: Path) -> None:
    cut = RequestRecord(cell=0, id=8, scheduled=0, sent=500 * MS, end=600 * MS, status="interrupted", error="stopped")
    _, summary = summary_of(tmp_path, [*FIVE, cut])
    cell = summary.cells[0]
    assert (cell.requests.interrupted, cell.requests.failed, cell.metrics["error_rate"].mean) == (1, {}, 0)
    assert cell.notes == ["interrupted: 1 requests were cut off and count nowhere"]


def test_only_failures_still_make_a_summary(tmp_path: Path) -> None:
    failed = RequestRecord(cell=0, id=8, scheduled=0, sent=None, end=9, status="connect_error", error="refused")
    directory, summary = summary_of(tmp_path, [failed])
    assert summary.cells[0].metrics["error_rate"].mean == 100
    assert summary.cells[0].metrics["ttft"].mean is None
    assert "1 failed" in printed(directory, summary)


def test_too_short_answers_have_no_rates(tmp_path: Path) -> None:
    short = request(6, 600, 610, [2] * 3)
    _, summary = summary_of(tmp_path, [*FIVE, short])
    rate = summary.cells[0].metrics["decode_tps"]
    assert (rate.n, rate.note) == (5, "too short (under 16 tokens): 1 of 6 left out")
    assert summary.cells[0].notes == ["lengths not forced: 1 of 6 answers have other than 20 tokens (4 to 20)"]


def test_a_short_run_has_no_steady_window_but_a_whole_run_figure(tmp_path: Path) -> None:
    directory, summary = summary_of(tmp_path, FIVE[:1])
    figures = summary.cells[0].metrics
    assert (figures["throughput_output"].mean, figures["throughput_output"].note) == (None, "no steady window")
    assert figures["throughput_output_whole_run"].mean == pytest.approx(20 / 0.048)
    text = printed(directory, summary)
    assert row(text, "throughput, steady (tokens/s)") == "throughput, steady (tokens/s) no steady window 0"
    why = "no steady window: all slots were busy for less than 3 median E2E latencies; give more --requests"
    assert why in " ".join(text.split())


def test_no_figure_is_shortened_and_no_line_of_the_table_is_wider_than_80(tmp_path: Path) -> None:
    """Minutes of latency, long prompts, a note on every row that can have one, a long error, sampled terabytes."""
    slow = [
        request(n, 1_000_000 * n, 1_000_000 * n + 123_456, [98_765] * 5 + [0] * 40, prompt_tokens=131_072, cell=n % 2)
        for n in range(12)
    ]
    failed = RequestRecord(cell=0, id=99, scheduled=0, sent=1, end=9, status="http_error", error="word " * 60)
    samples = f"ns,host_memory_bytes,host_cpu_percent\n{50 * MS},{2**44},25600\n"
    directory, summary = summary_of(
        tmp_path, [*slow, failed], samples, concurrency=1024, input_tokens=131_072, output_tokens=16_384
    )
    tables = printed(directory, summary).partition("Input lengths")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert "…" not in tables
    assert row(tables, "TTFT (ms)") == "TTFT (ms) 123456 123456 123456 123456 6"
    assert row(tables, "E2E (ms)") == "E2E (ms) 617281 617281 617281 617281 6"
    assert row(tables, "memory, whole machine (MiB)").startswith("memory, whole machine (MiB) 16777216 16777216")
    assert "ITL: not measurable in 6 of 6 streams (coalesced on the way)" in tables
    headings = [" ".join(line.split()) for line in tables.splitlines() if "p50" in line]
    assert headings == ["mean p50 p95 p99 n"] * 2


def test_latency_comes_first_and_resources_last(tmp_path: Path) -> None:
    records = [msgspec.structs.replace(each, server_times={"queue": 1.0}) for each in FIVE]
    directory, summary = summary_of(tmp_path, records, f"ns,server_rss_bytes\n{50 * MS},{2**20}\n")
    lines = printed(directory, summary).splitlines()
    labels = ("TTFT", "E2E", "queue", "generation speed", "throughput", "input length", "failed", "memory, server")
    places = [next(number for number, line in enumerate(lines) if line.startswith(label)) for label in labels]
    assert places == sorted(places)


def test_coalesced_streams_have_no_itl(tmp_path: Path) -> None:
    joined = [request(n, 100 * n, 100 * n + 90, [0] * 19) for n in range(5, 8)]
    _, summary = summary_of(tmp_path, [*FIVE, *joined])
    itl = summary.cells[0].metrics["itl"]
    assert (itl.n, itl.min, itl.note) == (95, 2, "not measurable in 3 of 8 streams (coalesced on the way)")


def test_a_server_that_counts_nothing_gives_no_token_figures(tmp_path: Path) -> None:
    uncounted = [msgspec.structs.replace(each, tokens=None, token_source=None) for each in FIVE]
    directory, summary = summary_of(tmp_path, uncounted)
    figures = summary.cells[0].metrics
    for name in ("tpot", "output_tps", "decode_tps", "throughput_output"):
        assert (figures[name].mean, figures[name].note) == (None, "the server counts no output tokens")
    assert figures["ttft"].n == 5
    assert figures["throughput_requests"].mean is not None
    assert "--tokenizer" in printed(directory, summary)


def test_tokens_counted_by_the_tokenizer_and_cached_prompts_are_told(tmp_path: Path) -> None:
    records = [msgspec.structs.replace(each, token_source="tokenizer", cached_tokens=10) for each in FIVE]
    directory, summary = summary_of(tmp_path, records)
    assert "50 of 510 prompt tokens came from the server's prefix cache" in summary.cells[0].notes
    assert any("reference tokenizer" in note for note in summary.cells[0].notes)
    assert "cached input" in printed(directory, summary)


def test_closed_connections_are_told(tmp_path: Path) -> None:
    _, summary = summary_of(tmp_path, [msgspec.structs.replace(each, reconnects=1) for each in FIVE])
    assert "5 times the server had closed a kept connection when the next request came" in summary.cells[0].notes


def test_the_answers_begin_has_a_row_where_models_think(tmp_path: Path) -> None:
    thinking = [msgspec.structs.replace(each, answer=each.last) for each in FIVE]
    directory, summary = summary_of(tmp_path, thinking)
    assert summary.cells[0].metrics["ttfa"].mean == 68
    assert "TTFA" in printed(directory, summary)


def test_samples_of_the_cell_are_joined(tmp_path: Path) -> None:
    samples = f"ns,server_rss_bytes,server_cpu_percent\n{50 * MS},{2**20},50\n{80 * MS},{3 * 2**20},150\n"
    samples += f"{10_000 * MS},{99 * 2**20},1\n"
    _, summary = summary_of(tmp_path, FIVE, samples)
    memory = summary.cells[0].metrics["server_rss"]
    assert (memory.unit, memory.n, memory.max) == ("MiB", 2, 3)
    assert summary.cells[0].metrics["server_cpu"].mean == 100


def test_cells_that_were_never_started_are_left_out(tmp_path: Path) -> None:
    directory, summary = summary_of(tmp_path, [])
    assert summary.cells == []
    assert str(directory.requests_jsonl) in printed(directory, summary)


def test_progress_lines_are_plain_and_rare() -> None:
    stream = io.StringIO()
    with open_progress(stream) as progress:
        assert isinstance(progress, ProgressLines)
        progress.start_cell("concurrency 2")
        for done in range(6):
            progress.update(Progress(done, 1, 5, warming_up=False))
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "concurrency 2: 0/5 requests, 1 failed",
        "concurrency 2: 5/5 requests, 1 failed",
    ]


def test_a_terminal_gets_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with open_progress(stream) as progress:
        assert isinstance(progress, ProgressBar)
        progress.say("a server")
        progress.start_cell("concurrency 2")
        progress.update(Progress(2, 0, 2, warming_up=True))
        progress.update(Progress(4, 1, 5, warming_up=False))
    assert "a server" in stream.getvalue()
    assert "4/5" in stream.getvalue()
    assert "1 failed" in stream.getvalue()
