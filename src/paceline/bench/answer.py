"""What a server's answer says: stamped bytes of a body to content events, token counts and times of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from paceline.bench.sse import parse_events

AnswerStatus = Literal["ok", "server_error", "incomplete", "malformed"]

# llama.cpp's names (tools/server, "timings") to DESIGN's; ours already carry them.
_SERVER_TIMES = {
    "queue_ms": "queue",
    "prefill_ms": "prefill",
    "decode_ms": "decode",
    "prompt_ms": "prefill",
    "predicted_ms": "decode",
}
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Content(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Content | None = None
    message: _Content | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: dict[str, Any] | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Answer:
    """What one answer amounts to. Stamps in ns; 0 means: not in this answer."""

    status: AnswerStatus = "ok"
    error: str | None = None
    events: list[tuple[int, int]] = field(default_factory=list)
    """(stamp, characters) of every event with content, reasoning or a tool call; empty for an unstreamed answer."""
    answer_ns: int = 0
    """First content event that is not reasoning."""
    last_ns: int = 0
    """Last event with content or a finish reason."""
    text: str = ""
    """All that was generated, reasoning included, in order of arrival."""
    finish_reason: str | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    server_times: dict[str, float] = field(default_factory=dict)
    """``queue``, ``prefill``, ``decode`` in ms, as far as the server tells."""

    def take_chunk(self, chunk: _Chunk) -> None:
        """What a stream's chunk and an unstreamed body have in common."""
        if chunk.error is not None:
            self.status, self.error = "server_error", _error_text(chunk.error)
        if chunk.usage is not None:
            self.output_tokens = chunk.usage.completion_tokens
            self.prompt_tokens = chunk.usage.prompt_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        for name, value in (chunk.timings or {}).items():
            if name in _SERVER_TIMES and isinstance(value, int | float):
                self.server_times[_SERVER_TIMES[name]] = float(value)


@dataclass(slots=True)
class _ThinkTags:
    """Follows ``<think>…</think>`` inside plain content, where a server does not split reasoning off."""

    seen: str = ""
    in_answer: bool = False

    def is_answer(self, content: str) -> bool:
        """Whether the answer has begun once `content` is added to what came before."""
        if not self.in_answer:
            self.seen += content
            text = self.seen.lstrip()
            if text.startswith(_THINK_OPEN):
                self.in_answer = bool(text.partition(_THINK_CLOSE)[2].strip())
            else:
                # A text that could still become the tag decides nothing yet.
                self.in_answer = bool(text) and not _THINK_OPEN.startswith(text)
        return self.in_answer


def read_stream(reads: Sequence[tuple[int, bytes]]) -> Answer:
    """Reads a whole recorded SSE stream of chat or text completion chunks.

    A missing ``[DONE]`` is tolerated where a finish reason came; a stream with neither is ``incomplete``.
    """
    answer, think = Answer(), _ThinkTags()
    parts: list[str] = []
    done = False
    for event in parse_events(reads):
        if event.data == "[DONE]":
            done = True
            break
        try:
            chunk = _decode_chunk(event.data)
        except msgspec.MsgspecError as error:
            answer.status = "server_error" if event.name == "error" else "malformed"
            answer.error = f"{event.data[:300]!r}" if event.name == "error" else f"{error}: {event.data[:300]!r}"
            break
        if event.name == "error" and chunk.error is None:
            chunk.error = event.data
        answer.take_chunk(chunk)
        for choice in chunk.choices or ():
            _take_choice(answer, think, parts, event.ns, choice)
    answer.text = "".join(parts)
    if answer.status == "ok" and not done and answer.finish_reason is None:
        answer.status, answer.error = "incomplete", "the stream ended without a finish reason and without [DONE]"
    return answer


def _take_choice(answer: Answer, think: _ThinkTags, parts: list[str], ns: int, choice: _Choice) -> None:
    delta = choice.delta or _Content(content=choice.text)
    content = delta.content or ""
    reasoning = delta.reasoning_content or delta.reasoning or ""
    tools = _tool_text(delta)
    if text := reasoning + content + tools:
        parts.append(text)
        answer.events.append((ns, len(text)))
        answer.last_ns = ns
        if not answer.answer_ns and (tools or (content and think.is_answer(content))):
            answer.answer_ns = ns
    if choice.finish_reason is not None:
        answer.finish_reason = choice.finish_reason
        answer.last_ns = ns


def read_body(body: bytes, end_ns: int) -> Answer:
    """Reads an unstreamed answer whose last byte came at `end_ns`."""
    answer = Answer(last_ns=end_ns)
    try:
        chunk = _decode_chunk(body)
    except msgspec.MsgspecError as error:
        answer.status, answer.error = "malformed", f"{error}: {body[:300]!r}"
        return answer
    answer.take_chunk(chunk)
    if chunk.error is None and not chunk.choices:
        answer.status, answer.error = "malformed", f"an answer without choices: {body[:300]!r}"
    for choice in chunk.choices or ():
        message = choice.message or _Content(content=choice.text)
        reasoning = message.reasoning_content or message.reasoning or ""
        answer.text += reasoning + (message.content or "") + _tool_text(message)
        answer.finish_reason = choice.finish_reason
    return answer


def error_message(body: bytes) -> str:
    """The message of an error body in OpenAI's shape, else the start of the body as it is."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace").strip()
    if isinstance(decoded, dict) and (inner := decoded.get("error", decoded.get("detail"))) is not None:
        return _error_text(inner)
    return body[:300].decode(errors="replace").strip()


def _error_text(error: Any) -> str:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()


def _tool_text(content: _Content) -> str:
    calls = (call.function for call in content.tool_calls or () if call.function is not None)
    return "".join((call.name or "") + (call.arguments or "") for call in calls)
