"""The closed loop against a server that keeps the truth."""

import gc
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.api import Api, Dialect, Mode
from paceline.bench.client import Endpoint, encode_post
from paceline.bench.load import CellOutcome, PreparedRequest, Progress, run_closed_loop
from paceline.bench.record import RequestRecord, record_exchange
from tests.bench.schedule_server import Schedule, ScheduleServer, Served

TIMEOUT_S = 30.0
CERTIFICATE = Path(__file__).with_name("localhost.pem")


def measure(
    server: ScheduleServer,
    *,
    requests: int = 4,
    concurrency: int = 1,
    warmup: int = 0,
    tokens: int = 4,
    mode: Mode = "stream",
    api: Api = "openai-chat",
    timeout_s: float = TIMEOUT_S,
    key: str | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[CellOutcome, list[RequestRecord]]:
    endpoint = Endpoint.from_url(server.url)
    dialect = Dialect(api, "scheduled", mode, 0.0, server.schedule.forced_length, server.schedule.stream_options)

    def prepare(number: int, start: int) -> list[PreparedRequest]:
        bodies = [dialect.body(f"prompt {n}", tokens) for n in range(start, start + number)]
        return [PreparedRequest(n, encode_post(endpoint, dialect.path, body, key)) for n, body in enumerate(bodies)]

    outcome = run_closed_loop(
        endpoint,
        warmup=prepare(warmup, 1000),
        measured=prepare(requests, 0),
        concurrency=concurrency,
        timeout_s=timeout_s,
        on_progress=on_progress,
    )
    records = [
        record_exchange(exchange, cell=0, mode=mode, count_tokens=None, secret=key) for exchange in outcome.exchanges
    ]
    return outcome, records


def truth_of(record: RequestRecord, server: ScheduleServer) -> Served:
    """What the server did for a record's request; it numbers them in ``queue_ms``."""
    return next(each for each in server.generations if each.serial == record.server_times["queue"])


def check_against_truth(record: RequestRecord, server: ScheduleServer) -> None:
    """All that holds however slow the machine is: nothing arrives before it was written."""
    truth = truth_of(record, server)
    assert record.status == "ok", record.error
    assert record.sent is not None
    assert record.first is not None
    assert record.last is not None
    assert record.scheduled <= record.sent <= truth.read_ns
    assert len(record.events) == len(truth.content_ns)
    for (arrived, _), written in zip(record.events, truth.content_ns, strict=True):
        assert written <= arrived
    # The role chunk came before the first content was even written, so counting it would show here.
    assert truth.role_ns < truth.content_ns[0] <= record.first == record.events[0][0]
    assert truth.finish_ns <= record.last <= record.end


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split": 1},
        {"split": 7, "line_end": "\r\n"},
        {"split": 3, "line_end": "\r"},
        {"events_per_write": 3},
        {"tokens_per_event": 3},
        {"reasoning_tokens": 2},
        {"done": False},
        {"framing": "close"},
        {"keep_alive": False},
        {"role_chunk": False},
    ],
    ids=str,
)
def test_streams_agree_with_the_servers_own_stamps(options: dict[str, Any]) -> None:
    with ScheduleServer(Schedule(**options)) as server:
        _, records = measure(server, requests=6, concurrency=2, warmup=2, tokens=7)
    assert len(records) == 6
    for record in records:
        check_against_truth(record, server)
        assert (record.tokens, record.token_source, record.finish_reason) == (7, "usage", "length")
        assert record.server_times == {"queue": truth_of(record, server).serial, "prefill": 2.5, "decode": 7.5}
        assert sum(chars for _, chars in record.events) == 7 * len("word ")
        thinking = server.schedule.reasoning_tokens
        assert record.answer == record.events[thinking][0]


def test_completions_and_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE)
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    with ScheduleServer(Schedule(), tls) as server:
        _, records = measure(server, api="openai-completions")
    for record in records:
        check_against_truth(record, server)


def test_an_unstreamed_answer_ends_with_its_last_byte() -> None:
    with ScheduleServer(Schedule()) as server:
        _, records = measure(server, mode="sync")
    for record in records:
        assert (record.status, record.tokens, record.events, record.first) == ("ok", 4, [], None)
        assert truth_of(record, server).finish_ns <= (record.last or 0) == record.end


def test_connections_are_opened_before_the_measured_time_and_kept() -> None:
    with ScheduleServer(Schedule()) as server:
        measure(server, requests=9, concurrency=3, warmup=3)
        assert server.connections == 3
        assert {each.connection for each in server.generations} == {1, 2, 3}


def test_a_server_that_closes_kept_connections_costs_no_request_and_is_told() -> None:
    with ScheduleServer(Schedule(announce_close=False)) as server:
        _, records = measure(server, requests=8, concurrency=2)
        assert [record.status for record in records] == ["ok"] * 8
        # What was sent into a closing connection was never read; it counts once, with the stamp of the second sending.
        assert len(server.generations) == 8
        for record in records:
            check_against_truth(record, server)
        assert server.connections == 8
    # A slot that met it once opens a connection for every request.
    assert sum(record.reconnects for record in records) <= 2


def test_every_request_is_sent_once_and_never_more_than_the_concurrency_at_once() -> None:
    with ScheduleServer(Schedule(ttft_s=0.005)) as server:
        _, records = measure(server, requests=20, concurrency=4)
    assert sorted(record.id for record in records) == list(range(20))
    assert len(server.generations) == 20
    changes = [(record.sent or 0, 1) for record in records] + [(record.end, -1) for record in records]
    in_flight = peak = 0
    for _, change in sorted(changes):
        in_flight += change
        peak = max(peak, in_flight)
    assert peak == 4


def test_warmup_is_over_before_the_first_measured_request_and_not_recorded() -> None:
    with ScheduleServer(Schedule()) as server:
        _, records = measure(server, requests=4, concurrency=2, warmup=4)
    prompts = [each.body["messages"][0]["content"] for each in server.generations]
    assert sorted(prompts[:4]) == [f"prompt {n}" for n in range(1000, 1004)]
    assert len(records) == 4
    warm_ends = max(each.answered_ns for each in server.generations[:4])
    assert all(warm_ends <= each.read_ns for each in server.generations[4:])


@pytest.mark.parametrize(
    ("fault", "status", "word", "events"),
    [
        ("http_error", "http_error", "HTTP 503: no room", 0),
        ("error_event", "server_error", "out of blocks", 2),
        ("reset", "disconnected", "reset", 2),
        ("close", "disconnected", "closed", 2),
        ("json_instead", "malformed", "--mode sync", 0),
        ("garbage", "malformed", "not HTTP", 0),
    ],
)
def test_faults_are_recorded_as_what_they_are_and_the_others_go_on(
    fault: Any, status: str, word: str, events: int
) -> None:
    with ScheduleServer(Schedule(fault=fault, faulty=(1, 2))) as server:
        _, records = measure(server, requests=5)
        assert [record.status for record in records] == ["ok", status, status, "ok", "ok"]
        assert len(server.generations) == 5
    for record in records[1:3]:
        assert word in (record.error or "")
        assert len(record.events) == events
        assert record.end >= (record.sent or 0)


def test_a_stalled_stream_times_out() -> None:
    with ScheduleServer(Schedule(fault="stall", faulty=(0,))) as server:
        _, records = measure(server, requests=2, timeout_s=1.0)
    assert records[0].status == "timeout"
    assert "1 s" in (records[0].error or "")
    assert len(records[0].events) == 2
    # What the server never said is not made up.
    assert (records[0].tokens, records[0].finish_reason) == (None, None)
    assert records[1].status in ("ok", "timeout")


def test_a_server_that_is_gone_is_a_recorded_connection_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = ScheduleServer(Schedule())
        gone.port = unused.getsockname()[1]
        outcome, records = measure(gone, requests=3, concurrency=2)
    assert [record.status for record in records] == ["connect_error"] * 3
    assert all(record.sent is None for record in records)
    assert not outcome.interrupted


def test_no_usage_means_no_token_count() -> None:
    with ScheduleServer(Schedule(usage=False)) as server:
        _, records = measure(server)
    assert all((record.status, record.tokens, record.token_source) == ("ok", None, None) for record in records)
    assert all(len(record.events) == 4 for record in records)


def test_ctrl_c_stops_and_keeps_what_was_done() -> None:
    sent: list[int] = []
    with ScheduleServer(Schedule(fault="stall", faulty=(3, 4))) as server:

        def interrupt_when_stalled(progress: Progress) -> None:
            if progress.done == 3 and len(server.generations) == 5 and not sent:
                sent.append(signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        outcome, records = measure(server, requests=50, concurrency=2, on_progress=interrupt_when_stalled)
    assert outcome.interrupted
    assert [record.status for record in records] == ["ok"] * 3 + ["interrupted"] * 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_progress_counts_warmup_and_failures_apart() -> None:
    seen: list[Progress] = []
    with ScheduleServer(Schedule(fault="http_error", faulty=(2,))) as server:
        measure(server, requests=3, warmup=1, on_progress=seen.append)
    assert seen[0].warming_up
    assert seen[-1] == Progress(done=3, failed=1, total=3, warming_up=False)


def test_runs_outside_the_main_thread_and_leaves_the_garbage_collector_as_it_was() -> None:
    states: list[bool] = []
    with ScheduleServer(Schedule()) as server:

        def note(progress: Progress) -> None:
            states.append(gc.isenabled() == progress.warming_up)

        thread = threading.Thread(target=measure, args=(server,), kwargs={"warmup": 1, "on_progress": note})
        thread.start()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert states
    assert all(states)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
