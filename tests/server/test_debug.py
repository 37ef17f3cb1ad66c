"""Seeing inside a server, also one whose engine is stuck."""

import logging
import re
import threading
from typing import Any

import pytest

from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.server.health import Health, stall_limit
from tests.server.conftest import LiveServer, StartServer
from tests.server.fakes import ScriptedExecutor, tiny_model, wait_until
from tests.server.test_trace_events import check_nesting

COMPLETIONS = "/v1/completions"


def trace(server: LiveServer, **params: int) -> list[dict[str, Any]]:
    body = server.http.get("/debug/trace", params=params).json()
    assert set(body) == {"traceEvents", "displayTimeUnit"}
    return body["traceEvents"]


def test_the_trace_is_what_perfetto_reads(start_server: StartServer) -> None:
    server = start_server(tiny_model())
    assert trace(server) == []
    for prompt in ("x" * 700, "y"):
        server.post(COMPLETIONS, prompt=prompt, max_tokens=4)
    events = trace(server)
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        assert event["ph"] == "M" or event["ts"] > 0
        assert event["ph"] != "X" or event["dur"] >= 0
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(names)
    check_nesting(events)
    chunks = [event for event in events if event["name"].endswith(" tokens")]
    assert [(chunk["args"]["from"], chunk["args"]["tokens"]) for chunk in chunks] == [(0, 512), (512, 188)]
    assert sum(event["name"] == "execute" for event in trace(server, last=2)) == 2


def test_the_state_of_a_busy_server(start_server: StartServer) -> None:
    executor = ScriptedExecutor(seconds_per_step=0.01)
    server = start_server(tiny_model(executor=executor, max_num_seqs=1))
    params = SamplingParams(max_tokens=3000)
    for name in ("runs", "waits"):
        server.engine.submit([65], params, request_id=name)
    wait_until(lambda: server.engine.stats().running == 1, "one runs")
    state = server.http.get("/debug/state").json()
    assert [request["request_id"] for request in state["running"]] == ["runs"]
    assert [request["waits_for"] for request in state["waiting"]] == ["a place: max_num_seqs 1 are running"]
    assert state["pool"]["used"] >= 1
    tracks = [e["args"]["name"] for e in trace(server) if e["name"] == "thread_name"]
    assert {"runs", "waits"} <= set(tracks)
    for name in ("runs", "waits"):
        server.engine.abort(name)


def test_they_need_the_key(start_server: StartServer) -> None:
    server = start_server(tiny_model(), api_keys=["secret"])
    assert server.http.get("/debug/state").status_code == 401
    assert server.http.get("/debug/trace").status_code == 401
    assert server.http.get("/debug/state", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_an_engine_that_does_not_step_is_reported(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    executor = ScriptedExecutor()
    server = start_server(tiny_model(executor=executor), stall_seconds=0.05)
    assert server.http.get("/health").status_code == 200
    executor.open.clear()
    with caplog.at_level(logging.WARNING, logger="paceline.server"):
        server.engine.submit([65], SamplingParams(max_tokens=2))
        wait_until(lambda: server.http.get("/health").status_code == 503, "the stall is seen")
        assert "in one step for" in server.http.get("/health").json()["error"]["message"]
        (seconds,) = re.findall(r"paceline:stalled_seconds\{.*\} (\S+)", server.http.get("/metrics").text)
        assert float(seconds) > 0.05
        executor.open.set()
        wait_until(lambda: server.http.get("/health").status_code == 200, "it goes on")
    told = [record.getMessage() for record in caplog.records if "the engine" in record.getMessage()]
    assert len(told) == 2
    assert told[1] == "the engine goes on"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_reported(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(tiny_model())
    engine_thread = next(thread for thread in threading.enumerate() if thread.name == "paceline-engine")

    def die() -> None:
        raise SystemExit

    monkeypatch.setattr(server.engine, "_step", die)
    server.engine.submit([65], SamplingParams(max_tokens=2))
    engine_thread.join(20)
    for path in ("/health", "/debug/state"):
        response = server.http.get(path)
        assert (response.status_code, "thread has died" in response.text) == (503, True)
    assert "+Inf" in re.findall(r"paceline:stalled_seconds\{.*", server.http.get("/metrics").text)[0]


def test_the_limit_allows_for_larger_steps() -> None:
    assert stall_limit(256) == stall_limit(512) == 60
    assert stall_limit(2048) == 240
    engine = tiny_model(max_num_batched_tokens=512).engine
    assert Health(engine)._stall_seconds == 60


def test_the_trace_of_a_stuck_engine(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(tiny_model())
    server.post(COMPLETIONS, prompt="x", max_tokens=4)

    def stuck() -> None:
        raise PacelineError("the engine has been in the same step for 61 s")

    monkeypatch.setattr(server.engine, "state", stuck)
    assert {"execute", "decode"} <= {event["name"] for event in trace(server)}
    response = server.http.get("/debug/state")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stalled")


def test_who_ends_while_the_trace_is_made_is_in_it(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(tiny_model())
    state = server.engine.state

    def end_and_look() -> Any:
        server.post(COMPLETIONS, prompt="x", max_tokens=4)
        return state()

    server.post(COMPLETIONS, prompt="x", max_tokens=4)
    monkeypatch.setattr(server.engine, "state", end_and_look)
    assert [event["name"] for event in trace(server)].count("decode") == 2


@pytest.mark.parametrize("last", ["0", "-1", "1e9", "all"])
def test_a_number_of_steps_that_is_none_is_refused(start_server: StartServer, last: str) -> None:
    response = start_server(tiny_model()).http.get("/debug/trace", params={"last": last})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "last")
    assert error["message"].startswith(f"last is '{last}': Input should be ")


def test_the_cache_in_numbers(start_server: StartServer) -> None:
    server = start_server(tiny_model(executor=ScriptedExecutor(num_blocks=200)))
    for _ in range(2):  # two full blocks, and 6 tokens in a third
        server.post(COMPLETIONS, prompt="x" * 70, max_tokens=1)
    page = server.http.get("/metrics").text
    values = dict(re.findall(r"paceline:(\w+)\{.*\} (\S+)", page))
    assert {name: float(value) for name, value in values.items()} == {
        "kv_blocks_used": 0,
        "kv_blocks_cached": 2,
        "kv_blocks_blank": 198,
        "kv_slots_wasted": 0,
        "prefix_reuse_ratio": 64 / 140,
        "stalled_seconds": 0,
    }
