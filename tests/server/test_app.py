"""What surrounds the endpoints: health, metrics, keys, ids, the log, and the server's end."""

import logging
import re
import socket
import threading

import httpx
import pytest

from paceline.errors import InputError
from paceline.server.address import bind
from paceline.server.app import create_app
from paceline.server.listen import HttpServer
from tests.server.conftest import LiveServer, StartServer
from tests.server.fakes import ScriptedExecutor, tiny_model, wait_until


def test_health(server: LiveServer) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    head = server.http.head("/health")
    assert (head.status_code, head.content) == (200, b"")


def samples(server: LiveServer) -> dict[str, float]:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_have_vllms_names_labels_and_our_numbers(start_server: StartServer) -> None:
    server = start_server(tiny_model(), served_names=["tiny", "alias"])
    prompt = "x" * 40
    for _ in range(2):
        server.post("/v1/completions", prompt=prompt, max_tokens=5)
    labels = '{engine="0",model_name="tiny"}'
    found = samples(server)
    expected = {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "prompt_tokens_total": 80,
        "generation_tokens_total": 10,
        "num_preemptions_total": 0,
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 32,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 8,
        "request_time_per_output_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_prefill_time_seconds_count": 2,
        "request_decode_time_seconds_count": 2,
    }
    named = {re.sub(r"\{.*\}", labels, name): value for name, value in found.items() if "_bucket" not in name}
    assert {name: named[f"vllm:{name}{labels}"] for name in expected} == expected
    assert found['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'] == 2
    assert not [name for name in found if "_created" in name]


def test_what_steps_are_expected_to_cost_is_told_where_it_is_learned(
    server: LiveServer, start_server: StartServer
) -> None:
    assert "paceline:step_" not in server.http.get("/metrics").text
    server = start_server(tiny_model(target_itl_ms=50))
    server.post("/v1/completions", prompt="x" * 40, max_tokens=5)
    found = {name.split("{")[0]: value for name, value in samples(server).items()}
    cost = server.engine.cost
    assert found["paceline:step_prompt_token_seconds"] == cost.token_ms / 1e3 > 0
    assert found["paceline:step_fixed_seconds"] == cost.fixed_ms / 1e3
    assert found["paceline:step_decoding_request_seconds"] == cost.decoding_ms / 1e3
    assert found["paceline:step_slowdown_ratio"] == cost.slowdown


def test_the_gauges_move(start_server: StartServer) -> None:
    executor = ScriptedExecutor(num_blocks=100)
    server = start_server(tiny_model(executor=executor, max_num_seqs=1))
    executor.open.clear()
    threads = [threading.Thread(target=server.post, args=("/v1/completions",), kwargs={"prompt": "x"}) for _ in "ab"]
    for thread in threads:
        thread.start()
    wait_until(lambda: (s := server.engine.stats()).running == s.waiting == 1, "one runs and one waits")
    found = {name.split("{")[0]: value for name, value in samples(server).items()}
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (1, 1)
    assert found["vllm:kv_cache_usage_perc"] == 0.01
    executor.open.set()
    for thread in threads:
        thread.join(timeout=20)


def test_a_key_guards_everything_but_health(start_server: StartServer) -> None:
    server = start_server(tiny_model(), api_keys=["first", "second"])
    assert server.http.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/docs", "/nothing"):
        refused = server.http.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    for header in ("Bearer wrong", "first", "Basic first", "Bearer", "Bearer \xe9"):
        refused = server.http.get("/v1/models", headers={"authorization": header.encode("latin-1")})
        assert refused.status_code == 401
    for key in ("first", "second"):
        assert server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_a_request_id_is_taken_over_cleaned_and_returned(server: LiveServer) -> None:
    taken = server.http.get("/health", headers={"x-request-id": "a-1.b_2:c"})
    assert taken.headers["x-request-id"] == "a-1.b_2:c"
    cleaned = server.http.get("/health", headers={"x-request-id": 'a"{31m} b/' + "x" * 500})
    assert cleaned.headers["x-request-id"] == ("a31mb" + "x" * 500)[:128]
    assert re.fullmatch("[0-9a-f]{32}", server.http.get("/health").headers["x-request-id"])
    assert "x-request-id" in server.http.get("/nothing").headers
    assert "x-request-id" in server.post("/v1/completions", prompt="x", stream=True).headers


def test_equal_request_ids_are_no_conflict(start_server: StartServer) -> None:
    executor = ScriptedExecutor()
    server = start_server(tiny_model(executor=executor))
    executor.open.clear()
    answers: list[httpx.Response] = []

    def ask() -> None:
        headers = {"x-request-id": "same"}
        answers.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers=headers, timeout=20))

    threads = [threading.Thread(target=ask) for _ in "ab"]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.engine.has_work and len(server.engine._generations) == 2, "both are under way")
    executor.open.set()
    for thread in threads:
        thread.join(timeout=20)
    assert [answer.status_code for answer in answers] == [200, 200]


def test_one_log_line_per_request_without_line_breaks_of_the_client(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline.server"):
        server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}, headers={"x-request-id": "me"})
        server.http.get("/v1/%0aforged")
        server.http.get("/health")
    first, second = [record.message for record in caplog.records]
    line = r"POST /v1/completions 200 in \d+ ms: 3 prompt \(0 cached\) \+ 2 tokens, length \(me\)"
    assert re.fullmatch(line, first)
    assert second.startswith("GET /v1/%0aforged 404 in ")


def test_the_log_tells_a_client_that_left(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    executor = ScriptedExecutor(num_blocks=8000, seconds_per_step=0.002)
    server = start_server(tiny_model(executor=executor, max_model_len=200_000))
    asked = {"prompt": "x", "max_tokens": 100_000}
    with caplog.at_level(logging.INFO, "paceline.server"):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=asked, timeout=0.2)
        wait_until(lambda: "client closed the connection" in caplog.text, "logged")
    assert "POST /v1/completions 499" in caplog.text


def test_stopping_ends_streams_and_answers_with_an_error(start_server: StartServer) -> None:
    executor = ScriptedExecutor(num_blocks=8000, seconds_per_step=0.002)
    server = start_server(tiny_model(executor=executor, max_model_len=200_000))
    answers: dict[bool, httpx.Response] = {}

    def ask(stream: bool) -> None:
        asked = {"prompt": "x", "max_tokens": 100_000, "stream": stream}
        answers[stream] = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=20)

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.engine.stats().running == 2, "both run")
    server.stop()
    for thread in threads:
        thread.join(timeout=20)
    assert answers[False].status_code == 503
    assert answers[False].json()["error"]["code"] == "server_stopping"
    assert answers[True].text.endswith("}\n\ndata: [DONE]\n\n")
    assert '"code":"server_stopping"' in answers[True].text
    assert server.engine.stats().kv_blocks_used == 0


def test_a_taken_port_is_told_before_anything_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port}: Address already in use.*--port") as error:
            bind("127.0.0.1", port)
        assert error.value.exit_code == 2


def test_a_port_taken_while_the_model_was_loaded() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            first.listen()
            server = HttpServer(create_app(tiny_model(), served_names=["tiny"]), on_ready=lambda: None)
            with pytest.raises(InputError, match=f"port {port}: Address already in use"):
                server.run_on(second)


def test_a_host_that_is_none() -> None:
    with pytest.raises(InputError, match=r"--host 256\.0\.0\.1"):
        bind("256.0.0.1", 0)


def test_an_empty_host_does_not_open_every_network() -> None:
    with pytest.raises(InputError, match="--host is empty"):
        bind("", 0)


def test_an_address_of_another_machine_is_not_a_taken_port() -> None:
    with pytest.raises(InputError, match=r"--host 203\.0\.113\.1 is not an address of this machine") as error:
        bind("203.0.113.1", 0)  # a network that nobody has (RFC 5737)
    assert "Stop the program" not in str(error.value)


def test_a_bound_port_refuses_connections_until_the_server_listens() -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname(), timeout=5)
