"""A server that answers on an exact schedule and keeps its own stamps, which are the truth that tests compare with.

Stamps are ``perf_counter_ns`` taken just before each write; the clock is the client's as well.
"""

import asyncio
import json
import socket
import ssl
import struct
import threading
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Literal

STARTUP_TIMEOUT_S = 10


@dataclass(frozen=True)
class Schedule:
    """How every request is answered. Times in seconds after the request was read."""

    ttft_s: float = 0.01
    itl_s: float = 0.001
    tokens_per_event: int = 1
    events_per_write: int = 1
    split: int | None = None
    """Bytes per write, to cut events at odd places."""
    line_end: str = "\n"
    role_chunk: bool = True
    reasoning_tokens: int = 0
    """So many of the first tokens come as ``reasoning_content``."""
    finish_chunk: bool = True
    usage: bool = True
    done: bool = True
    timings: bool = True
    """Ours, with the serial number of the request as ``queue_ms`` so that records can be told apart."""
    framing: Literal["chunked", "close"] = "chunked"
    keep_alive: bool = True
    announce_close: bool = True
    """False: closes after a stream without having said so, as llama-server does."""
    forced_length: bool = True
    """Whether ``ignore_eos`` is taken; if not it is refused with 400 and answers have half the tokens asked for."""
    stream_options: bool = True
    chat: bool = True
    api_key: str | None = None
    models: tuple[str, ...] = ("scheduled",)
    models_answer: tuple[int, str] | None = None
    """Status and body of ``GET /v1/models``, in place of a list."""
    max_model_len: int | None = None
    template_tokens: int = 0
    version_path: str = "/version"
    fault: Literal["http_error", "error_event", "reset", "stall", "close", "json_instead", "garbage", "gone"] | None = (
        None
    )
    """``reset``, ``stall``, ``close`` and ``error_event`` come after two content events; with ``gone`` the server
    closes this connection and listens no more."""
    faulty: tuple[int, ...] | None = None
    """Serial numbers with the fault; None: all."""


@dataclass
class Served:
    """What the server did for one request."""

    serial: int
    path: str
    body: dict[str, Any]
    read_ns: int
    connection: int
    role_ns: int = 0
    content_ns: list[int] = field(default_factory=list)
    """Stamp of each content event."""
    finish_ns: int = 0
    answered_ns: int = 0


class ScheduleServer:
    """Serves from a thread of its own while its context is open."""

    def __init__(self, schedule: Schedule, tls: ssl.SSLContext | None = None) -> None:
        self.schedule = schedule
        self.served: list[Served] = []
        self.connections = 0
        self._tls = tls
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://localhost:{self.port}"

    @property
    def generations(self) -> list[Served]:
        return [each for each in self.served if each.body]

    def __enter__(self) -> "ScheduleServer":
        self._thread.start()
        assert self._started.wait(STARTUP_TIMEOUT_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STARTUP_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = server = self._loop.run_until_complete(
            asyncio.start_server(self._connection, "localhost", 0, ssl=self._tls, family=socket.AF_INET)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                served = Served(
                    serial=len(self.generations),
                    path=head.split(" ")[1],
                    body=json.loads(content) if content else {},
                    read_ns=perf_counter_ns(),
                    connection=number,
                )
                self.served.append(served)
                again = await _Answer(self.schedule, served, headers, writer, self._server).give()
                served.answered_ns = perf_counter_ns()
                if not again:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the test is over
        finally:
            writer.close()


@dataclass
class _Answer:
    schedule: Schedule
    served: Served
    headers: dict[str, str]
    writer: asyncio.StreamWriter
    server: asyncio.Server

    async def give(self) -> bool:
        """Answers; returns whether the connection is kept."""
        schedule, body = self.schedule, self.served.body
        key = self.headers.get("authorization", "").removeprefix("bearer ")
        if schedule.api_key is not None and key != schedule.api_key:
            return self._json(401, {"error": {"message": f"wrong key {key}"}})
        if self.served.path.endswith("/v1/models"):
            return self._models()
        if self.served.path == schedule.version_path:
            return self._json(200, {"version": "1.2.3", "build_info": "b1-abc"})
        if not body:
            return self._json(404, {"error": {"message": "no such route"}})
        if "chat" in self.served.path and not schedule.chat:
            return self._json(400, {"error": {"message": "this model has no chat template"}})
        if "ignore_eos" in body and not schedule.forced_length:
            return self._json(400, {"error": {"message": "unknown field ignore_eos"}})
        if "stream_options" in body and not schedule.stream_options:
            return self._json(422, {"detail": "unknown field stream_options"})
        fault = schedule.fault if schedule.faulty is None or self.served.serial in schedule.faulty else None
        if fault == "http_error":
            return self._json(503, {"error": {"message": f"no room, {key or 'no key'}"}})
        if fault == "gone":
            self.server.close()
            return False
        if fault == "garbage":
            self.writer.write(b"SSH-2.0-not-http\r\n")
            return False
        if not body["stream"] or fault == "json_instead":
            return await self._whole(fault)
        return await self._stream(fault)

    def _models(self) -> bool:
        if self.schedule.models_answer is not None:
            return self._write(self.schedule.models_answer[0], self.schedule.models_answer[1].encode())
        card: dict[str, Any] = {"owned_by": "schedule"}
        if self.schedule.max_model_len is not None:
            card["max_model_len"] = self.schedule.max_model_len
        return self._json(200, {"data": [{"id": name, **card} for name in self.schedule.models]})

    @property
    def tokens(self) -> int:
        asked: int = self.served.body["max_tokens"]
        return asked if self.schedule.forced_length else (asked + 1) // 2

    @property
    def usage(self) -> dict[str, Any]:
        body = self.served.body
        text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        return {
            "prompt_tokens": len(text.split()) + self.schedule.template_tokens,
            "completion_tokens": self.tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    @property
    def timings(self) -> dict[str, float]:
        return {"queue_ms": self.served.serial, "prefill_ms": 2.5, "decode_ms": 7.5}

    def _json(self, status: int, content: dict[str, Any]) -> bool:
        return self._write(status, json.dumps(content).encode())

    def _write(self, status: int, body: bytes) -> bool:
        keep = "keep-alive" if self.schedule.keep_alive else "close"
        self.writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Connection: {keep}\r\n\r\n".encode()
            + body
        )
        return self.schedule.keep_alive

    async def _until(self, seconds: float) -> None:
        left = seconds - (perf_counter_ns() - self.served.read_ns) / 1e9
        await asyncio.sleep(max(0.0, left))

    async def _whole(self, fault: str | None) -> bool:
        if fault == "stall":
            await asyncio.sleep(3600)
        await self._until(self.schedule.ttft_s + self.tokens * self.schedule.itl_s)
        text = "word " * self.tokens
        choice = {"text": text, "message": {"content": text}, "finish_reason": "length"}
        answer = {"choices": [choice]} | ({"usage": self.usage} if self.schedule.usage else {})
        self.served.finish_ns = perf_counter_ns()
        return self._json(200, answer | ({"timings": self.timings} if self.schedule.timings else {}))

    async def _stream(self, fault: str | None) -> bool:
        schedule = self.schedule
        chunked = schedule.framing == "chunked"
        head = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream"]
        head += ["Transfer-Encoding: chunked"] if chunked else []
        head += [] if chunked and schedule.keep_alive else ["Connection: close"]
        self.writer.write("\r\n".join([*head, "\r\n"]).encode())
        if schedule.role_chunk and "chat" in self.served.path:
            self.served.role_ns = self._send([{"choices": [{"delta": {"role": "assistant", "content": ""}}]}])
        if not await self._content(fault):
            return fault == "error_event"
        end: list[Any] = []
        if schedule.finish_chunk:
            timings = {"timings": self.timings} if schedule.timings else {}
            end.append({"choices": [{"delta": {}, "finish_reason": "length"}]} | timings)
        if schedule.usage and "stream_options" in self.served.body:
            end.append({"choices": [], "usage": self.usage})
        if schedule.done:
            end.append("[DONE]")
        self.served.finish_ns = self._send(end)
        if chunked:
            self.writer.write(b"0\r\n\r\n")
        return chunked and schedule.keep_alive and schedule.announce_close

    async def _content(self, fault: str | None) -> bool:
        schedule = self.schedule
        events = [self._event(start) for start in range(0, self.tokens, schedule.tokens_per_event)]
        for start in range(0, len(events), schedule.events_per_write):
            if start >= 2 and fault is not None:
                return await self._break(fault)
            await self._until(schedule.ttft_s + start * schedule.itl_s)
            together = events[start : start + schedule.events_per_write]
            ns = self._send(together)
            self.served.content_ns += [ns] * len(together)
            await self.writer.drain()
        return True

    def _event(self, start: int) -> dict[str, Any]:
        text = "word " * min(self.schedule.tokens_per_event, self.tokens - start)
        if "chat" not in self.served.path:
            return {"choices": [{"text": text, "finish_reason": None}]}
        name = "reasoning_content" if start < self.schedule.reasoning_tokens else "content"
        return {"choices": [{"delta": {name: text}, "finish_reason": None}]}

    async def _break(self, fault: str) -> bool:
        if fault == "stall":
            await asyncio.sleep(3600)
        elif fault == "reset":
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.writer.transport.abort()
        elif fault == "error_event":
            self._send([{"error": {"message": "out of blocks"}}])
            self.writer.write(b"0\r\n\r\n")
        return False

    def _send(self, events: list[Any]) -> int:
        """Writes events together, or cut at odd places; returns the stamp from just before."""
        end = self.schedule.line_end
        texts = (each if isinstance(each, str) else json.dumps(each) for each in events)
        data = "".join(f"data: {text}{end}{end}" for text in texts).encode()
        step = self.schedule.split or len(data) or 1
        ns = perf_counter_ns()
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            chunked = self.schedule.framing == "chunked"
            self.writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if chunked else piece)
        return ns
