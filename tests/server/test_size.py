"""What is too long: bodies, and prompts that cannot fit, refused before they cost anything."""

import socket
from collections.abc import Iterator

import pytest

from paceline.models.tokenizer import Tokenizer
from paceline.server.body import MAX_BODY_BYTES
from tests.server.conftest import LiveServer, StartServer
from tests.server.fakes import tiny_model, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONGEST_TOKEN = len("<|im_start|>")
CONTEXT = 4096


def read_answer(connection: socket.socket) -> bytes:
    answer = b""
    while not answer.endswith(b"}}"):
        piece = connection.recv(65536)
        assert piece, "the server closed the connection without an answer"
        answer += piece
    return answer


def test_a_body_announced_too_long_is_refused_before_it_is_sent(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        connection.sendall(head.encode())
        answer = read_answer(connection)
    assert b" 413 " in answer
    assert b'"code":"request_too_large"' in answer
    assert f"The body has {MAX_BODY_BYTES + 1} bytes, at most {MAX_BODY_BYTES} are taken".encode() in answer


def test_a_body_of_unknown_length_is_refused_when_it_is_too_long(server: LiveServer) -> None:
    """The client would go on for ever; the answer comes all the same."""

    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * (1 << 20)

    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for sent, piece in enumerate(endless()):
            connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            if (sent + 1) * len(piece) > MAX_BODY_BYTES:
                break
        answer = read_answer(connection)
    assert b" 413 " in answer
    assert f"The body has more than {MAX_BODY_BYTES} bytes".encode() in answer


def test_a_body_of_exactly_the_limit_is_read(server: LiveServer) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    assert server.http.post(COMPLETIONS, content=body.ljust(MAX_BODY_BYTES)).status_code == 200
    assert server.http.post(COMPLETIONS, content=body.ljust(MAX_BODY_BYTES + 1)).status_code == 413


def test_a_connection_is_still_good_after_a_413(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        body = b" " * (MAX_BODY_BYTES + 1)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert b" 413 " in read_answer(connection)
        connection.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 404 " in read_answer(connection)


def test_the_key_is_asked_for_before_the_length(start_server: StartServer) -> None:
    server = start_server(tiny_model(), api_keys=["secret"])
    assert server.http.post(COMPLETIONS, content=b" " * (MAX_BODY_BYTES + 1)).status_code == 401


def test_a_client_that_leaves_in_mid_body_is_no_bug(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "paceline.server"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        wait_until(lambda: bool(caplog.records), "logged")
    assert caplog.records[0].message.startswith(f"POST {COMPLETIONS} 499 ")


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the texts that are tokenized."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def count(self: Tokenizer, text: str, **options: bool) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", count)
    return lengths


@pytest.mark.parametrize("text", ["x" * (CONTEXT * LONGEST_TOKEN + 1), "한" * (CONTEXT * LONGEST_TOKEN // 3 + 1)])
def test_a_prompt_that_can_never_fit_is_not_tokenized(server: LiveServer, encoded: list[int], text: str) -> None:
    size = len(text.encode())
    message = {"role": "user", "content": text}
    for path, body, param in (
        (COMPLETIONS, {"prompt": ["short", text]}, "prompt"),
        (CHAT, {"messages": [message]}, "messages"),
    ):
        response = server.post(path, **body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
        told = f"{param} has {size} bytes, the context holds {CONTEXT} tokens of at most {LONGEST_TOKEN} bytes each"
        assert told in error["message"]
    assert encoded == []


def test_more_messages_than_tokens_are_not_rendered(server: LiveServer, encoded: list[int]) -> None:
    message = {"role": "user", "content": ""}
    error = server.post(CHAT, messages=[message] * (CONTEXT + 1)).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert f"{CONTEXT + 1} messages are more than the context has tokens, {CONTEXT}" in error["message"]
    assert encoded == []


def test_the_longest_prompt_that_fits_is_taken(server: LiveServer) -> None:
    response = server.post(COMPLETIONS, prompt="<|im_start|>" * (CONTEXT - 1), max_tokens=1)
    assert response.json()["usage"]["prompt_tokens"] == CONTEXT - 1


def test_the_first_prompt_too_long_spares_the_others(server: LiveServer, encoded: list[int]) -> None:
    response = server.post(COMPLETIONS, prompt=["a", "x" * CONTEXT, "b"])
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert encoded == [1, CONTEXT]


def test_wrong_parameters_are_refused_before_the_prompt_is_tokenized(server: LiveServer, encoded: list[int]) -> None:
    assert server.post(COMPLETIONS, prompt="x", max_tokens=0).status_code == 400
    assert encoded == []
