"""The wire: HTTP/1.1 over asyncio, stamped before anything else looks at the bytes.

Only HTTP's framing is followed while measuring, because a connection cannot be used again before its answer has
ended. What the body says is read after the run, from the stamped pieces kept here.
"""

import asyncio
import ssl
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Literal, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from paceline.errors import InputError

_OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1")
"""What people copy from a curl line or from ``OPENAI_BASE_URL``."""

FailureKind = Literal["connect_error", "timeout", "disconnected", "malformed", "interrupted"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an exchange has no complete answer."""

    kind: FailureKind
    message: str


@dataclass(slots=True)
class Exchange:
    """One request and what came back, all stamps by ``perf_counter_ns``; 0 means: has not happened."""

    id: int
    scheduled_ns: int
    """When the load plan wanted the request to start."""
    sent_ns: int = 0
    """Just before the first byte was handed to the kernel."""
    end_ns: int = 0
    """When the last byte came, or the failure."""
    http_status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    """The body, chunk framing removed: (stamp of the read, bytes)."""
    failure: Failure | None = None
    reconnects: int = 0
    """How often the server turned out to have closed a kept connection, so that the request was sent on a new one."""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.reads)

    def fail(self, kind: FailureKind, message: str) -> None:
        """Ends the exchange now, without a complete answer."""
        self.end_ns = perf_counter_ns()
        self.failure = Failure(kind, message)

    def reconnect(self) -> None:
        """Forgets a sending that met a closed connection."""
        self.sent_ns = self.end_ns = 0
        self.failure = None
        self.reconnects += 1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens, taken from a URL."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    base_path: str
    """Path in front of ``/v1/…``; empty for most servers."""

    @classmethod
    def from_url(cls, url: str) -> "Endpoint":
        """Reads ``http[s]://host[:port][/base]``; one of OpenAI's paths at its end is left out. Raises InputError."""
        try:
            parts: SplitResult = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"{url!r} is not a URL: {error}. Give one like http://localhost:8000") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{url!r} is not an http or https URL. Give one like http://localhost:8000")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise InputError("the URL must be scheme, host, port and path only; a key goes into --api-key")
        if not (parts.hostname + parts.path).isprintable() or " " in parts.hostname + parts.path:
            raise InputError(f"{url!r} has characters that a URL cannot have")
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        given = parts.path.rstrip("/")
        base = next((given.removesuffix(path) for path in _OPENAI_PATHS if given.endswith(path)), given).rstrip("/")
        return cls(scheme, parts.hostname, port or (443 if scheme == "https" else 80), base)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base_path}"


def encode_post(endpoint: Endpoint, path: str, body: bytes, api_key: str | None) -> bytes:
    """The bytes of one POST with a JSON body, made before the measured time. Raises InputError for an unusable key."""
    authorization = ""
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise InputError("the API key has characters that an HTTP header cannot carry")
        authorization = f"Authorization: Bearer {api_key}\r\n"
    head = (
        f"POST {endpoint.base_path}{path} HTTP/1.1\r\n"
        f"Host: {endpoint.authority}\r\n"
        f"{authorization}"
        "User-Agent: paceline\r\n"
        "Accept: text/event-stream, application/json\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1", errors="replace") + body


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time. Made by `connect`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._read_ns = 0
        self._in_body = False
        self._keep_alive = True
        self._reads = 0
        self._reads_before = 0

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent: the last answer ended, and both sides keep the connection."""
        return self._keep_alive and self._transport is not None and not self._transport.is_closing()

    def was_closed_before(self, exchange: Exchange) -> bool:
        """Whether the server closed this connection, used before, while the request of `exchange` was on its way.

        RFC 9112 section 9.3.1 lets either side close an idle connection at any time; llama-server does so after
        every stream, unannounced. Such a request was not read, so sending it again is no second try.
        """
        closed = exchange.failure is not None and exchange.failure.kind == "disconnected"
        return closed and 0 < self._reads_before == self._reads

    async def send(self, payload: bytes, exchange: Exchange, timeout_s: float) -> None:
        """Sends one request and waits for the end of its answer, recording both in `exchange`.

        Whatever the server does ends up in the exchange; nothing is raised and nothing is tried again.
        """
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._exchange = exchange
        self._done = loop.create_future()
        self._reads_before = self._reads
        timer = loop.call_later(timeout_s, self._fail, "timeout", f"no complete answer within {timeout_s:g} s")
        try:
            exchange.sent_ns = perf_counter_ns()
            self._transport.write(payload)
            await self._done
        finally:
            timer.cancel()
            self._exchange = None
            if not exchange.end_ns:
                # The task was cancelled: the answer, if it still comes, belongs to nobody.
                exchange.fail("interrupted", "stopped by the user")
                self.close()

    def close(self) -> None:
        self._keep_alive = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Without this uvloop gathers writes until the end of the loop's iteration, after the stamp of sending.
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        self._read_ns = perf_counter_ns()
        self._reads += 1
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail("malformed", f"the answer is not HTTP/1.1: {type(error).__name__}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._read_ns = perf_counter_ns()
        exchange = self._exchange
        if exchange is not None and self._in_body and exc is None and _ends_with_connection(exchange.headers):
            self._complete()
        else:
            self._fail("disconnected", f"connection closed before the answer ended{f': {exc}' if exc else ''}")

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._exchange is None:
            # Nobody asked: some proxies send 408 on an idle connection before they close it.
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._exchange is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            # Interim answers (100, 103; RFC 9110 section 15.2) announce the real one.
            self._exchange.headers.clear()
            return
        self._exchange.http_status = status
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.reads.append((self._read_ns, body))

    def on_message_complete(self) -> None:
        if self._in_body:
            self._complete()

    def _complete(self) -> None:
        self._in_body = False
        self._keep_alive = self._parser.should_keep_alive()
        if self._exchange is not None:
            self._exchange.end_ns = self._read_ns
        self._wake()
        if not self._keep_alive:
            self.close()

    def _fail(self, kind: FailureKind, message: str) -> None:
        self._in_body = False
        if self._exchange is not None:
            self._exchange.fail(kind, message)
        self._wake()
        self.close()

    def _wake(self) -> None:
        self._exchange = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _ends_with_connection(headers: dict[str, str]) -> bool:
    """RFC 9112 section 6.3: a body without a length and without chunks ends when the server closes."""
    return "content-length" not in headers and "chunked" not in headers.get("transfer-encoding", "")


def tls_context(endpoint: Endpoint) -> ssl.SSLContext | None:
    """The system's certificate store (``SSL_CERT_FILE`` is honoured); None for plain http."""
    return ssl.create_default_context() if endpoint.scheme == "https" else None


async def connect(endpoint: Endpoint, tls: ssl.SSLContext | None, timeout_s: float) -> Connection:
    """Opens a connection. Raises OSError (refused, unknown host, TLS) or TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        _, connection = await loop.create_connection(Connection, endpoint.host, endpoint.port, ssl=tls)
    return connection
