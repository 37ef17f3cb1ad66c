"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), built by hand.

Tokens that are ready at once leave as one event each, in one write: a reader still sees the engine's steps.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.engine.outputs import RequestOutput
from paceline.server.wire import Choice, Payload, timings_payload

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_MARK = "\x00"
"""Stands for the text where a chunk is cut in two; nothing else in a chunk can hold it."""


def event(payload: Payload) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"


class ChunkEncoder:
    """The events of one choice. All of a text event but the text is encoded once."""

    __slots__ = ("_begun", "_choice", "_envelope", "_prefix", "_suffix")

    def __init__(self, choice: Choice, envelope: Payload) -> None:
        self._choice = choice
        self._envelope = envelope
        self._begun = False
        self._prefix, self._suffix = self._chunk(choice.piece(_MARK, None)).split(_encode(_MARK))

    def opening(self) -> bytes:
        opening = self._choice.opening()
        return b"" if opening is None else self._chunk(opening)

    def output(self, output: RequestOutput) -> bytes:
        """The events of one output; empty while text is held back."""
        begun, self._begun = self._begun, self._begun or bool(output.token_ids) or output.finish_reason is not None
        beginning = self._choice.beginning() if self._begun and not begun else None
        return (b"" if beginning is None else self._chunk(beginning)) + self._text(output)

    def _text(self, output: RequestOutput) -> bytes:
        if output.logprobs:
            return self._chunk(self._choice.piece(output.text, self._choice.logprobs(output.logprobs)))
        if output.text:
            return self._prefix + _encode(output.text) + self._suffix
        return b""

    def finish(self, output: RequestOutput, seed: int) -> bytes:
        assert output.timings is not None
        assert output.usage is not None
        timings = timings_payload(output.timings, output.usage)
        return self._chunk(self._choice.finish(output, seed), timings=timings)

    def _chunk(self, choice: Payload, **extra: Payload) -> bytes:
        return event(self._envelope | {"choices": [choice]} | extra)


class EventStream(Response):
    """Sends events as they come, and says when the client has gone away.

    Starlette's own StreamingResponse would do, but it learns of a closed connection by cancelling the stream's task,
    and we want the engine told and the stream ended in order.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_disconnect: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        # Proxies such as nginx otherwise collect a stream before they pass it on.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._on_disconnect = on_disconnect

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async with watch_disconnect(receive, self._on_disconnect):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class watch_disconnect:  # noqa: N801 - reads as the verb it is in a with statement
    """While the block runs, call ``on_disconnect`` if the client closes the connection, or if the block fails."""

    def __init__(self, receive: Receive, on_disconnect: Callable[[], None]) -> None:
        self._receive = receive
        self._on_disconnect = on_disconnect

    async def __aenter__(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._watcher.cancel()
        if kind is not None:
            self._on_disconnect()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_disconnect()
