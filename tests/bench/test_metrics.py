"""Every metric against numbers worked out by hand."""

from typing import Any

import pytest

from paceline.bench import metrics
from paceline.bench.metrics import Window
from paceline.bench.record import RequestRecord

MS = 1_000_000


def record(**fields: Any) -> RequestRecord:
    """Stamps given in ms."""
    for name in ("scheduled", "sent", "first", "answer", "last", "end"):
        if fields.get(name) is not None:
            fields[name] *= MS
    fields["events"] = [(ns * MS, 1) for ns in fields.get("events", [])]
    fields.setdefault("end", fields.get("last"))
    defaults: dict[str, Any] = {"cell": 0, "id": 0, "scheduled": 0, "sent": 0, "status": "ok"}
    return RequestRecord(**defaults | fields)


STREAM = record(
    scheduled=90,
    sent=100,
    first=150,
    answer=170,
    last=450,
    end=460,
    events=[150, 170, 200, 440],
    tokens=21,
)
SYNC = record(sent=100, last=600, tokens=50)


def test_latencies_of_a_stream() -> None:
    assert metrics.ttft(STREAM) == 50
    assert metrics.ttfa(STREAM) == 70
    assert metrics.e2e(STREAM) == 350
    assert metrics.itl(STREAM) == [20, 30, 240]
    assert metrics.tpot(STREAM) == 15  # (450 − 150) / (21 − 1)


def test_rates_of_a_stream() -> None:
    assert metrics.output_tps(STREAM) == pytest.approx(60)  # 21 / 0.35 s
    assert metrics.decode_tps(STREAM) == pytest.approx(20 / 0.3)
    assert metrics.tokens_per_event(STREAM) == 5.25


def test_an_unstreamed_answer_has_a_total_and_a_rate_only() -> None:
    assert metrics.e2e(SYNC) == 500
    assert metrics.output_tps(SYNC) == pytest.approx(100)
    assert metrics.ttft(SYNC) is metrics.ttfa(SYNC) is metrics.tpot(SYNC) is metrics.decode_tps(SYNC) is None
    assert metrics.itl(SYNC) == []
    assert metrics.tokens_per_event(SYNC) is None


def test_one_token_has_no_tpot() -> None:
    assert metrics.tpot(record(first=5, last=9, tokens=1)) is None
    assert metrics.tpot(record(first=5, last=9, tokens=2)) == 4
    assert metrics.tpot(record(first=5, last=9, tokens=None)) is None


def test_rates_under_sixteen_tokens_are_too_short() -> None:
    short, enough = (record(first=10, last=40, tokens=tokens) for tokens in (15, 16))
    assert metrics.output_tps(short) is metrics.decode_tps(short) is None
    assert metrics.output_tps(enough) == pytest.approx(400)
    assert metrics.decode_tps(enough) == pytest.approx(500)


def test_a_coalesced_stream_is_told_from_bursts() -> None:
    assert metrics.is_coalesced(record(events=[7] * 40, last=7, tokens=40))
    assert not metrics.is_coalesced(record(events=[7, 7, 7, 8, 8, 8], last=8, tokens=6))
    assert not metrics.is_coalesced(record(events=[7, 7], last=7, tokens=2))


# Two slots. A 0–100, then C 110–220; B 10–200, then D 200–300. All busy from 10 (B sent); the last is sent at 200, and
# the first to end after that is C at 220.
A = record(id=0, sent=0, first=20, last=100, events=[20, 60, 100], tokens=3)
B = record(id=1, sent=10, first=30, last=190, end=195, events=[30, 190], tokens=4)
C = record(id=2, sent=110, first=120, last=220, events=[120, 220], tokens=2)
D = record(id=3, sent=200, first=250, last=300, events=[250, 300], tokens=10)


def test_steady_window() -> None:
    # Latencies 100, 180, 110, 100: the median is 105, and 210 ms are less than three of them.
    assert metrics.steady_window([A, B, C, D], 2) is None
    quick = [record(id=9, sent=None, end=50, status="connect_error", scheduled=0)]
    more = [record(id=10 + n, sent=n, last=n + 1, status="ok") for n in range(300, 310)]
    # More short requests after D in the other slot bring the median down to 1 ms.
    assert metrics.steady_window([A, B, C, D, *quick, *more], 2) == Window(10 * MS, 310 * MS)


def test_steady_window_ends_when_a_slot_finds_no_work_also_after_a_failure() -> None:
    failed = record(id=4, sent=205, end=215, status="timeout")
    quick = [record(id=10 + n, sent=-20 + n, last=-19 + n) for n in range(9)]
    assert metrics.steady_window([*quick, A, B, C, D, failed], 2) == Window(10 * MS, 215 * MS)


def test_no_steady_window_where_the_slots_were_never_all_busy() -> None:
    assert metrics.steady_window([A, C], 2) is None
    assert metrics.steady_window([], 1) is None


def test_whole_run_is_first_sent_to_last_finished() -> None:
    failed = record(id=5, sent=-50, end=900, status="timeout")
    assert metrics.whole_run([A, B, C, D, failed]) == Window(-50 * MS, 300 * MS)
    assert metrics.whole_run([failed]) is None


def test_throughput_counts_the_events_inside_the_window() -> None:
    window = Window(30 * MS, 230 * MS)
    # A: 2 of 3 events, 2 tokens; B: the event at the very start is outside, 1 of 2, 2 tokens; C: both, 2; D: none.
    assert [metrics.tokens_inside(each, window) for each in (A, B, C, D)] == [2, 2, 2, 0]
    assert metrics.throughput_output([A, B, C, D], window) == pytest.approx(6 / 0.2)
    assert metrics.throughput_requests([A, B, C, D], window) == pytest.approx(3 / 0.2)


def test_unstreamed_tokens_count_at_completion() -> None:
    assert metrics.tokens_inside(SYNC, Window(500 * MS, 600 * MS)) == 50
    assert metrics.tokens_inside(SYNC, Window(100 * MS, 599 * MS)) == 0


def test_failures_give_no_throughput() -> None:
    failed = record(sent=0, last=100, end=120, events=[100], tokens=7, status="disconnected")
    assert metrics.throughput_output([failed], Window(0, 200 * MS)) == 0
    assert metrics.throughput_requests([failed], Window(0, 200 * MS)) == 0


@pytest.mark.parametrize(
    ("statuses", "gone"),
    [
        ([], False),
        (["ok", "ok"], False),
        (["ok", "disconnected", "connect_error"], True),
        (["connect_error"], True),
        (["connect_error", "ok"], False),
        (["timeout", "ok", "connect_error"], True),
        (["ok", "disconnected"], False),
        (["ok", "http_error", "connect_error"], False),
        (["ok", "connect_error", "disconnected"], False),
    ],
)
def test_a_server_is_gone_when_only_connections_fail_at_the_end(statuses: list[Any], gone: bool) -> None:
    records = [record(status=status, end=number + 1) for number, status in enumerate(statuses)]
    assert metrics.server_is_gone(records[::-1]) is gone
