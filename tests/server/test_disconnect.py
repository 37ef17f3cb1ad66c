"""A client that goes away frees what its request holds, in whatever state the request is."""

import json
import socket

import pytest

from tests.server.conftest import LiveServer, StartServer
from tests.server.fakes import ScriptedExecutor, tiny_model, wait_until

ENDLESS = {"prompt": "x", "max_tokens": 100_000}


def connect(server: LiveServer, **body: object) -> socket.socket:
    """A connection with a request sent and nothing read."""
    payload = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    return connection


def slow_server(start_server: StartServer, **options: int) -> LiveServer:
    executor = ScriptedExecutor(num_blocks=8000, seconds_per_step=0.002)
    return start_server(tiny_model(executor=executor, max_model_len=200_000, **options))


@pytest.mark.parametrize("stream", [True, False])
def test_while_it_decodes(start_server: StartServer, stream: bool) -> None:
    server = slow_server(start_server)
    with connect(server, stream=stream, **ENDLESS):
        wait_until(lambda: server.engine.stats().generation_tokens > 5, "decoding")
    wait_until(lambda: server.engine.stats().running == 0, "aborted")
    assert server.engine.stats().kv_blocks_used == 0
    assert server.engine.stats().waiting == 0


@pytest.mark.parametrize("stream", [True, False])
def test_while_it_waits_for_its_turn(start_server: StartServer, stream: bool) -> None:
    server = slow_server(start_server, max_num_seqs=1)
    with connect(server, **ENDLESS):
        wait_until(lambda: server.engine.stats().running == 1, "running")
        with connect(server, stream=stream, **ENDLESS):
            wait_until(lambda: server.engine.stats().waiting == 1, "waiting")
        wait_until(lambda: server.engine.stats().waiting == 0, "aborted in the queue")
        assert server.engine.stats().running == 1


@pytest.mark.parametrize("stream", [True, False])
def test_its_blocks_are_free_with_the_next_step(start_server: StartServer, stream: bool) -> None:
    executor = ScriptedExecutor()
    server = start_server(tiny_model(executor=executor))
    executor.open.clear()
    with connect(server, stream=stream, **ENDLESS):
        wait_until(lambda: server.engine.stats().running == 1, "in a step")
    # The step is held, so the abort is known to the engine before it ends.
    wait_until(lambda: bool(server.engine._aborted), "the abort has reached the engine")
    executor.open.set()
    wait_until(lambda: server.engine.stats().kv_blocks_used == 0, "freed")
    assert len(executor.sequences_per_step) == 1


def test_every_prompt_of_a_request_goes(start_server: StartServer) -> None:
    server = slow_server(start_server)
    with connect(server, prompt=["a", "b", "c"], max_tokens=100_000, stream=True):
        wait_until(lambda: server.engine.stats().running == 3, "running")
    wait_until(lambda: server.engine.stats().kv_blocks_used == 0, "aborted")


def test_a_reader_that_stops_reading_does_not_hold_up_others(start_server: StartServer) -> None:
    server = start_server(tiny_model(max_model_len=4000))
    with connect(server, stream=True, **ENDLESS):
        assert server.post("/v1/completions", prompt="y", max_tokens=4).status_code == 200
        wait_until(lambda: server.engine.stats().kv_blocks_used == 0, "generated to the end without a reader")
