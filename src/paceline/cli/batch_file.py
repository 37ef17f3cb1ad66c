"""OpenAI's batch files: lines of requests that go in, lines of results that come out.

The shapes: https://platform.openai.com/docs/api-reference/batch/request-input and …/request-output.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from paceline.errors import InputError
from paceline.server.body import as_json

URLS = ("/v1/chat/completions", "/v1/completions")

_RESULT_START = b'{"id":"batch_req_'
"""How every line begins that we write."""
_UNREADABLE = (msgspec.DecodeError, RecursionError)
"""What decoding raises, whatever the bytes are."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can be sent."""

    line: int
    """Its number in the file, from 1."""
    custom_id: str
    url: str
    body: bytes
    """JSON, as it stands in the file."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be sent, and why."""

    line: int
    custom_id: str | None
    """None where it has none that could be told."""
    code: str
    problem: str

    @property
    def message(self) -> str:
        return f"line {self.line}: {self.problem}"


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    stream: Any = None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def read_batch(path: Path) -> Iterator[BatchRequest | BadLine]:
    """The lines of an input file in their order; empty ones are left out. In memory are the custom_ids alone.

    Raises:
        InputError: the file cannot be read.
    """
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield _parse(number, line, seen)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _parse(number: int, line: bytes, seen: set[str]) -> BatchRequest | BadLine:
    try:
        fields = _decode_line(line)
    except _UNREADABLE as error:
        return BadLine(number, None, "invalid_json_line", f"not a JSON object: {error}")
    custom_id = fields.custom_id
    if not isinstance(custom_id, str) or not custom_id:
        told = f"custom_id is {as_json(custom_id)}; a string that tells the line from all others is needed"
        return BadLine(number, None, "invalid_custom_id", told)
    if custom_id in seen:
        told = f"custom_id {as_json(custom_id)} is that of an earlier line; each line needs its own"
        return BadLine(number, custom_id, "duplicate_custom_id", told)
    seen.add(custom_id)
    if fields.method != "POST":
        return BadLine(number, custom_id, "invalid_method", f'method is {as_json(fields.method)}; only "POST" works')
    if fields.url not in URLS:
        return BadLine(number, custom_id, "invalid_url", f"url is {as_json(fields.url)}; there are {', '.join(URLS)}")
    body = bytes(fields.body)
    try:
        stream = _decode_body(body).stream
    except _UNREADABLE:
        return BadLine(number, custom_id, "invalid_body", "body is missing or no JSON object")
    if stream is not None and stream is not False:
        told = f"body.stream is {as_json(stream)}, but the answers of a batch are whole; leave it out"
        return BadLine(number, custom_id, "stream_unsupported", told)
    return BatchRequest(number, custom_id, fields.url, body)


class _ResponseHead(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _ResponseHead | None

    @property
    def settled(self) -> bool:
        """To run it again would bring the same: a server's failure may pass, and a bad line may have been mended."""
        return self.custom_id is not None and self.response is not None and self.response.status_code < 500

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code < 400


_decode_result = msgspec.json.Decoder(_Result).decode


def settled_results(path: Path) -> dict[str, bool]:
    """The custom_ids that need not run again, and whether each succeeded; every other line is taken out of the file.

    A file that does not exist has none. A last line that was cut off in the middle is no result.

    Raises:
        InputError: the file is not the output of a batch (it is left as it is), or cannot be read or written.
    """
    settled: dict[str, bool] = {}
    path = path.resolve()
    try:
        if not path.exists():
            return settled
        if not path.is_file():
            raise InputError(f"--output {path} is not a file")
        size = 0
        for line, result in _read_results(path):
            if result.settled:
                assert result.custom_id is not None
                settled[result.custom_id] = result.succeeded
                size += len(line)
        if size != path.stat().st_size:
            _take_out_unsettled(path)
    except OSError as error:
        raise InputError(f"--output {path}: {error.strerror}") from None
    return settled


def _take_out_unsettled(path: Path) -> None:
    """Into a new file, which then takes the old one's place: whenever this is killed, one of the two is whole."""
    replacement = path.with_name(f"{path.name}.part")
    with replacement.open("wb") as file:
        file.writelines(line for line, result in _read_results(path) if result.settled)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(path, replacement)
    replacement.replace(path)


def _read_results(path: Path) -> Iterator[tuple[bytes, _Result]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                result = _decode_result(line)
            except _UNREADABLE as error:
                half = not line.endswith(b"\n") and (line.startswith(_RESULT_START) or _RESULT_START.startswith(line))
                if half:
                    return
                raise InputError(
                    f"--output {path} is there already and is not the output of a batch (line {number}: {error}); "
                    "name another file"
                ) from None
            yield line if line.endswith(b"\n") else line + b"\n", result


class ResultFile:
    """An output file that results are added to. Each is in the file when ``write`` returns.

    All methods raise InputError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from None

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def write_response(self, custom_id: str, *, status: int, request_id: str, body: bytes) -> None:
        """``body`` is JSON without line breaks."""
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
        self._write(custom_id, response, None)

    def write_bad_line(self, bad: BadLine) -> None:
        self._write(bad.custom_id, None, {"code": bad.code, "message": bad.message})

    def _write(self, custom_id: str | None, response: object, error: object) -> None:
        result = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
        line = msgspec.json.encode(result) + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as failure:
            raise self._unwritable(failure) from None

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"--output {self._path} cannot be written: {error.strerror}; what it has is kept")
