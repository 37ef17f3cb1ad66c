"""Seeing inside a server, also one whose engine is stuck."""

import logging
from collections import defaultdict
from typing import Any

import pytest

from paceline.engine.sampling import SamplingParams
from tests.server.conftest import LiveServer, StartServer
from tests.server.fakes import ScriptedExecutor, tiny_model, wait_until

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
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    # In each track spans follow one another or lie in one another; else Perfetto drops some.
    for track in spans.values():
        open_ends: list[float] = []
        for begin, end in sorted(track, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin + 0.001:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.001
            open_ends.append(end)
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
        assert 'paceline:stalled_seconds{engine="0",model_name="tiny"} 0.' in server.http.get("/metrics").text
        executor.open.set()
        wait_until(lambda: server.http.get("/health").status_code == 200, "it goes on")
    told = [record.getMessage() for record in caplog.records if "the engine" in record.getMessage()]
    assert len(told) == 2
    assert told[1] == "the engine goes on"


def test_a_dead_thread_is_reported(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(tiny_model())

    class Dead:
        def is_alive(self) -> bool:
            return False

        def join(self) -> None:
            pass

    thread = server.engine._thread
    monkeypatch.setattr(server.engine, "_thread", Dead())
    response = server.http.get("/health")
    monkeypatch.setattr(server.engine, "_thread", thread)
    assert (response.status_code, "has died" in response.text) == (503, True)
