"""The wire: framing, stamps, failures, TLS."""

import asyncio
import ssl
from pathlib import Path
from time import perf_counter_ns

import pytest

from paceline.bench.client import Endpoint, Exchange, connect, encode_post
from paceline.errors import InputError

CERTIFICATE = Path(__file__).with_name("localhost.pem")
TIMEOUT_S = 20.0


class Canned(asyncio.Protocol):
    """Answers each read with the next canned pieces, and closes after the last if told to."""

    def __init__(self, answers: list[list[bytes]], close: bool) -> None:
        self.answers = answers
        self.close = close

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for piece in self.answers.pop(0) if self.answers else []:
            self.transport.write(piece)
        if self.close and not self.answers:
            self.transport.close()


def exchanges(
    *answers: list[bytes], close: bool = False, timeout_s: float = TIMEOUT_S, tls: bool = False
) -> tuple[list[Exchange], bool]:
    """What the client makes of canned answers over one connection, and whether that could be used again."""

    async def run() -> tuple[list[Exchange], bool]:
        loop = asyncio.get_running_loop()
        server_tls = client_tls = None
        if tls:
            server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            server_tls.load_cert_chain(CERTIFICATE)
            client_tls = ssl.create_default_context(cafile=str(CERTIFICATE))
        server = await loop.create_server(lambda: Canned(list(answers), close), "127.0.0.1", 0, ssl=server_tls)
        port = server.sockets[0].getsockname()[1]
        endpoint = Endpoint("https" if tls else "http", "localhost" if tls else "127.0.0.1", port, "")
        connection = await connect(endpoint, client_tls, TIMEOUT_S)
        done = []
        for number in range(len(answers)):
            exchange = Exchange(number, scheduled_ns=perf_counter_ns())
            await connection.send(encode_post(endpoint, "/", b"{}", None), exchange, timeout_s)
            done.append(exchange)
            if not connection.reusable:
                break
        reusable = connection.reusable
        connection.close()
        server.close()
        return done, reusable

    return asyncio.run(run())


def test_content_length_and_reuse() -> None:
    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"]
    (first, second), reusable = exchanges(answer, answer)
    assert first.body == second.body == b"hello"
    assert (first.http_status, first.headers["x-a"], first.failure) == (200, "b", None)
    assert first.scheduled_ns <= first.sent_ns < first.reads[0][0] == first.end_ns < second.sent_ns
    assert reusable


def test_chunks_split_anywhere_keep_their_order_and_stamps() -> None:
    head, body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    pieces = [head[:9], head[9:], *(body[n : n + 1] for n in range(len(body)))]
    (exchange,), reusable = exchanges(pieces)
    assert exchange.body == b"abcdefg"
    stamps = [ns for ns, _ in exchange.reads]
    assert stamps == sorted(stamps)
    assert exchange.sent_ns < stamps[0] <= stamps[-1] <= exchange.end_ns
    assert reusable


def test_a_body_without_length_ends_with_the_connection() -> None:
    (exchange,), reusable = exchanges([b"HTTP/1.1 200 OK\r\n\r\n", b"to the end"], close=True)
    assert (exchange.body, exchange.failure) == (b"to the end", None)
    assert exchange.end_ns >= exchange.reads[-1][0]
    assert not reusable


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"HTTP/1.1 200 OK\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"],
    ],
    ids=["nothing", "half a head", "short body", "no last chunk"],
)
def test_a_connection_that_closes_too_early_is_a_failure(pieces: list[bytes]) -> None:
    (exchange,), reusable = exchanges(pieces, close=True)
    assert exchange.failure is not None
    assert exchange.failure.kind == "disconnected"
    assert exchange.end_ns > exchange.sent_ns
    assert not reusable


def test_a_kept_connection_that_was_closed_is_told_from_a_server_that_fails() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    async def run(first: list[bytes], second: list[bytes]) -> tuple[Exchange, bool]:
        loop = asyncio.get_running_loop()
        canned = [first, second] if first else [second]
        server = await loop.create_server(lambda: Canned(list(canned), close=True), "127.0.0.1", 0)
        endpoint = Endpoint("http", "127.0.0.1", server.sockets[0].getsockname()[1], "")
        connection = await connect(endpoint, None, TIMEOUT_S)
        for _ in canned:
            exchange = Exchange(0, scheduled_ns=perf_counter_ns())
            await connection.send(b"request", exchange, TIMEOUT_S)
        server.close()
        return exchange, connection.was_closed_before(exchange)

    exchange, closed_before = asyncio.run(run([answer], []))
    assert closed_before
    assert exchange.failure is not None
    # A new connection, an answer that began, and an answer that was complete are something else.
    for first, second in (([], []), ([answer], [answer[:20]]), ([answer], [answer])):
        assert not asyncio.run(run(first, second))[1]


def test_what_is_not_http_is_malformed() -> None:
    (exchange,), reusable = exchanges([b"SSH-2.0-OpenSSH\r\n"])
    assert exchange.failure is not None
    assert exchange.failure.kind == "malformed"
    assert not reusable


def test_a_stall_ends_with_the_timeout_and_keeps_what_came() -> None:
    (exchange,), reusable = exchanges(
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"], timeout_s=0.2
    )
    assert exchange.failure is not None
    assert (exchange.failure.kind, exchange.body) == ("timeout", b"hello")
    assert "0.2 s" in exchange.failure.message
    assert exchange.end_ns - exchange.sent_ns >= 200_000_000
    assert not reusable


def test_interim_answers_are_not_the_answer() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nContent-Length: 9\r\n\r\n"
    (exchange,), _ = exchanges([interim, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"])
    assert (exchange.http_status, exchange.body, exchange.headers) == (200, b"ok", {"content-length": "2"})


def test_connection_close_is_not_used_again() -> None:
    (exchange,), reusable = exchanges([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"])
    assert (exchange.body, exchange.failure, reusable) == (b"ok", None, False)


def test_an_answer_that_nobody_asked_for_makes_the_connection_unusable() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    (exchange,), reusable = exchanges([answer + b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"])
    assert (exchange.http_status, exchange.body, reusable) == (200, b"ok", False)


def test_tls() -> None:
    (exchange,), reusable = exchanges([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"], tls=True)
    assert (exchange.body, exchange.failure, reusable) == (b"hello", None, True)


def test_cancelling_records_an_interruption() -> None:
    async def run() -> tuple[Exchange, bool]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Canned([[]], close=False), "127.0.0.1", 0)
        endpoint = Endpoint("http", "127.0.0.1", server.sockets[0].getsockname()[1], "")
        connection = await connect(endpoint, None, TIMEOUT_S)
        exchange = Exchange(0, scheduled_ns=perf_counter_ns())
        sending = asyncio.create_task(connection.send(b"x", exchange, TIMEOUT_S))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        server.close()
        return exchange, connection.reusable

    exchange, reusable = asyncio.run(run())
    assert exchange.failure is not None
    assert (exchange.failure.kind, reusable) == ("interrupted", False)


@pytest.mark.parametrize(
    ("url", "endpoint", "canonical"),
    [
        ("http://localhost:8000", ("http", "localhost", 8000, ""), "http://localhost:8000"),
        ("http://localhost:8000/v1/", ("http", "localhost", 8000, ""), "http://localhost:8000"),
        ("https://api.test/openai/v1", ("https", "api.test", 443, "/openai"), "https://api.test:443/openai"),
        ("http://[::1]:9/", ("http", "::1", 9, ""), "http://[::1]:9"),
        ("http://a:1/v1/chat/completions", ("http", "a", 1, ""), "http://a:1"),
        ("http://a:1/api/v1/completions/", ("http", "a", 1, "/api"), "http://a:1/api"),
        ("http://a:1/v1/models", ("http", "a", 1, ""), "http://a:1"),
        ("http://a:1/other/path", ("http", "a", 1, "/other/path"), "http://a:1/other/path"),
    ],
)
def test_urls(url: str, endpoint: tuple[str, str, int, str], canonical: str) -> None:
    found = Endpoint.from_url(url)
    assert (found.scheme, found.host, found.port, found.base_path) == endpoint
    assert found.url == canonical


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://a",
        "http://",
        "http://a:99999",
        "http://u:p@a",
        "http://a/?key=1",
        "http://a/b c",
        "http://a/\x01",
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(InputError):
        Endpoint.from_url(url)


def test_a_post_is_one_well_formed_request() -> None:
    endpoint = Endpoint("https", "::1", 8443, "/base")
    payload = encode_post(endpoint, "/v1/completions", b"{}", "sk-1")
    head, _, body = payload.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v1/completions HTTP/1.1"
    assert {b"Host: [::1]:8443", b"Authorization: Bearer sk-1", b"Content-Length: 2"} <= set(lines)
    assert body == b"{}"
    assert b"Authorization" not in encode_post(endpoint, "/", b"", None)
    with pytest.raises(InputError):
        encode_post(endpoint, "/", b"", "a\r\nX-Evil: 1")
