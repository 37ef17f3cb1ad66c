"""What happened: one record per request, and the run directory that keeps them (DESIGN section 5)."""

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.bench.answer import error_message, read_body, read_stream
from paceline.bench.api import Mode
from paceline.bench.client import Exchange
from paceline.errors import InputError

Status = Literal[
    "ok",
    "http_error",
    "server_error",
    "incomplete",
    "malformed",
    "timeout",
    "disconnected",
    "connect_error",
    "interrupted",
]
TokenSource = Literal["usage", "tokenizer"]

SCHEMA = 1


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt; a line of ``requests.jsonl``. All stamps are ``perf_counter_ns``, None where it did not happen."""

    cell: int
    id: int
    repeat: int = 0
    scheduled: int
    sent: int | None
    first: int | None = None
    """First event with content, reasoning or a tool call; None for an unstreamed answer."""
    answer: int | None = None
    """First content that is not reasoning."""
    last: int | None = None
    """Last event with content or a finish reason; unstreamed: the last byte of the body."""
    end: int
    """When the slot was free again: the last byte of the response, or the failure."""
    events: list[tuple[int, int]] = []
    """(stamp, characters) of each content event."""
    tokens: int | None = None
    """Output tokens."""
    token_source: TokenSource | None = None
    prompt_tokens: int | None = None
    """As the server counted them, its chat template included."""
    cached_tokens: int | None = None
    finish_reason: str | None = None
    status: Status
    error: str | None = None
    reconnects: int = 0
    """How often the server turned out to have closed a kept connection; `sent` is of the last sending."""
    server_times: dict[str, float] = {}
    """``queue``, ``prefill``, ``decode`` in ms, as far as the server tells."""


class CellPlan(msgspec.Struct, frozen=True):
    """One combination of parameters that is measured."""

    id: int
    params: dict[str, Any]


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``."""

    schema: int = SCHEMA
    kind: str
    started: str
    """UTC, ISO 8601."""
    started_ns: int
    """The same moment on the clock of the records."""
    argv: list[str]
    """The command line that repeats this run, defaults that were found out or drawn included."""
    environment: dict[str, Any]
    plan: dict[str, Any]
    cells: list[CellPlan]


def record_exchange(
    exchange: Exchange, *, cell: int, mode: Mode, count_tokens: Callable[[str], int] | None, secret: str | None
) -> RequestRecord:
    """Reads what one exchange brought. `count_tokens` counts the output where the server does not tell;
    `secret` is blotted out of error messages, which servers like to quote it in."""
    if exchange.failure is not None and exchange.failure.kind in ("connect_error", "malformed"):
        return _failed(exchange, cell, exchange.failure.kind, exchange.failure.message, secret)
    if exchange.http_status >= 300:
        message = f"HTTP {exchange.http_status}: {error_message(exchange.body)}"
        return _failed(exchange, cell, "http_error", message, secret)
    content_type = exchange.headers.get("content-type", "")
    if mode == "stream" and exchange.failure is None and not content_type.startswith("text/event-stream"):
        message = f"asked for a stream, got content type {content_type!r}; try --mode sync"
        return _failed(exchange, cell, "malformed", message, secret)
    if mode == "sync" and exchange.failure is not None:
        return _failed(exchange, cell, exchange.failure.kind, exchange.failure.message, secret)

    answer = read_stream(exchange.reads) if mode == "stream" else read_body(exchange.body, exchange.end_ns)
    status: Status = answer.status
    error = answer.error
    # What cut the stream off explains an incomplete one; an error the server sent before that is the better reason.
    if exchange.failure is not None and status in ("ok", "incomplete"):
        status, error = exchange.failure.kind, exchange.failure.message
    tokens, source = answer.output_tokens, "usage" if answer.output_tokens is not None else None
    if tokens is None and count_tokens is not None and status == "ok":
        tokens, source = count_tokens(answer.text), "tokenizer"
    return RequestRecord(
        cell=cell,
        id=exchange.id,
        scheduled=exchange.scheduled_ns,
        sent=exchange.sent_ns or None,
        first=answer.events[0][0] if answer.events else None,
        answer=answer.answer_ns or None,
        last=answer.last_ns or None,
        end=exchange.end_ns,
        events=answer.events,
        tokens=tokens,
        token_source=source,  # type: ignore[arg-type]
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        finish_reason=answer.finish_reason,
        status=status,
        error=_redact(error, secret),
        reconnects=exchange.reconnects,
        server_times=answer.server_times,
    )


def _failed(exchange: Exchange, cell: int, status: Status, error: str, secret: str | None) -> RequestRecord:
    return RequestRecord(
        cell=cell,
        id=exchange.id,
        scheduled=exchange.scheduled_ns,
        sent=exchange.sent_ns or None,
        end=exchange.end_ns,
        status=status,
        error=_redact(error, secret),
        reconnects=exchange.reconnects,
    )


def _redact(text: str | None, secret: str | None) -> str | None:
    return text.replace(secret, "***") if text and secret else text


class RunDirectory:
    """The directory that is a run: ``run.json``, ``requests.jsonl``, ``samples.csv``, ``summary.json|csv``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_json = path / "run.json"
        self.requests_jsonl = path / "requests.jsonl"
        self.samples_csv = path / "samples.csv"
        self.summary_json = path / "summary.json"
        self.summary_csv = path / "summary.csv"

    @classmethod
    def for_new_run(cls, output: Path | None, command: str) -> "RunDirectory":
        """`output`, or ``runs/<UTC time>-<command>``. Nothing is created yet. Raises InputError if it is in use."""
        path = output or Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{command}"
        if path.exists() and not path.is_dir():
            raise InputError(f"--output {path} is a file; a run needs a directory of its own")
        if path.is_dir() and any(path.iterdir()):
            raise InputError(f"--output {path} is not empty; a run needs a directory of its own")
        return cls(path)

    def files(self) -> tuple[Path, ...]:
        """Every file that a run may have, in the order of their making."""
        return self.run_json, self.requests_jsonl, self.samples_csv, self.summary_json, self.summary_csv

    def create(self, info: RunInfo) -> None:
        """Makes the directory and writes ``run.json``. Raises InputError where the file system refuses."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write(self.run_json, msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")
            self.requests_jsonl.touch()
        except OSError as error:
            raise InputError(f"cannot write the run to {self.path}: {error.strerror}; give another --output") from None

    def append(self, records: Iterable[RequestRecord]) -> None:
        """Adds records to ``requests.jsonl``; a finished cell is safe whatever happens to the next."""
        with self.requests_jsonl.open("ab") as file:
            file.write(msgspec.json.Encoder().encode_lines(list(records)))
            file.flush()
            os.fsync(file.fileno())

    def info(self) -> RunInfo:
        """Reads ``run.json``. Raises InputError if it is missing, damaged or of another schema."""
        try:
            info = msgspec.json.decode(self.run_json.read_bytes(), type=RunInfo)
        except FileNotFoundError:
            raise InputError(f"{self.path} is not a run: it has no run.json") from None
        except msgspec.MsgspecError as error:
            raise InputError(f"{self.run_json}: {error}") from None
        if info.schema != SCHEMA:
            raise InputError(f"{self.run_json} has schema {info.schema}; this Paceline reads schema {SCHEMA}")
        return info

    def records(self) -> Sequence[RequestRecord]:
        """Reads ``requests.jsonl``. Raises InputError naming the line that cannot be read."""
        decode = msgspec.json.Decoder(RequestRecord).decode
        records = []
        for number, line in enumerate(self.requests_jsonl.read_bytes().splitlines(), 1):
            try:
                records.append(decode(line))
            except msgspec.MsgspecError as error:
                raise InputError(f"{self.requests_jsonl}, line {number}: {error}") from None
        return records

    @staticmethod
    def write(path: Path, content: bytes) -> None:
        """Writes a whole file, so that a reader sees the old one or the new one."""
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(content)
        partial.replace(path)
